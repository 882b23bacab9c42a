"""Listener for links to Ray actors."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from weight_update.errors import FormatError, LinkClosedError
from weight_update.transports.join_listener import BACK_OFF_SECONDS, JoinListener
from weight_update.transports.ray.connection import RayConnection
from weight_update.transports.ray.rendezvous import POLL_SECONDS, announce, ask, ray_runs, running_ray
from weight_update.transports.ray.transport import RayTransport
from weight_update.transports.shared_memory.transport import SharedMemListener
from weight_update.wire.frames import WeightChunk


class RayListener(JoinListener[RayTransport]):
    """The listener for links to Ray actors, with the arguments of :class:`~weight_update.JoinListener`.

    It takes join requests from the rendezvous actor, and those of workers on this host from a Unix socket.

    Args:
        actor: handle of the rendezvous actor.
        host: name of this host.
    """

    def __init__(
        self,
        actor: Any,
        host: str,
        token: str,
        links: Mapping[int, RayTransport],
        late_joiners: Callable[[int], RayTransport],
    ) -> None:
        super().__init__(token, links, late_joiners)
        self._actor = actor
        self._local = SharedMemListener(token, links, late_joiners)
        self._local.refusals = self.refusals
        announce(actor, "object_store", (host, self._local.address))

    def start(self) -> None:
        self._local.start()
        super().start()

    def close(self) -> None:
        self._local.close()
        super().close()

    def wake(self) -> None:
        if ray_runs():
            self._actor.request_join.remote("", (b"", b""), [])

    def accept(self) -> tuple[RayConnection, WeightChunk] | None:
        if not ray_runs():
            self._closed.set()  # no worker can ask any more
            return None
        try:
            request = ask(self._actor.next_join_request.remote(POLL_SECONDS), None)
        except LinkClosedError as error:  # the actor is unreachable, perhaps only for a moment
            self.refusals.note(error)
            self._closed.wait(BACK_OFF_SECONDS)
            return None
        if request is None:
            return None
        try:
            name, (node, raw), (liveness,) = request
            hello = WeightChunk.decode(raw)
        except (ValueError, TypeError) as error:
            raise FormatError(f"not a join request ({error})") from None
        local = node == running_ray().get_runtime_context().get_node_id()
        return RayConnection(self._actor, name, 0, local, liveness), hello
