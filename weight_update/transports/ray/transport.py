"""Links to Ray actors without open ports: shared memory on the sender's host, Ray alone to other hosts."""

from __future__ import annotations

import uuid
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any, ClassVar

from typing_extensions import Never

from weight_update.arguments import refuse_arguments
from weight_update.errors import FormatError, LinkClosedError
from weight_update.transports.host_name import shares_sockets, this_host
from weight_update.transports.join_listener import JoinListener
from weight_update.transports.ray.connection import RayConnection
from weight_update.transports.ray.object_store import RayObjectStore
from weight_update.transports.ray.rendezvous import POLL_SECONDS, ask, call, look_up, node_id, ray_runs, tell
from weight_update.transports.reconnecting import LinkConnection
from weight_update.transports.shared_memory.transport import SharedMemListener, SharedMemTransport
from weight_update.transports.socket_stream import seconds_left
from weight_update.wire.frames import WeightChunk

_NO_HANDLE = (
    "workers find the sender through its rendezvous actor, so a transport needs no handle of them. Let "
    "RayWeightSyncScheme create both ends, and give its init_on_sender() remote_collectors="
)


class RayTransport(SharedMemTransport):
    """One end of a link to an actor, for clusters whose actors cannot open ports to each other.

    A worker on the sender's host connects as a :class:`SharedMemTransport` does, and maps the sender's slots.
    A worker on another host connects through Ray: messages go through the rendezvous actor, and payloads
    through Ray's object store. The sender copies each payload into the store once, whatever the number of
    workers, and each node fetches it once. A worker copies it out of the store, because the processes of a
    node share the memory of an object: weights that one worker changes would change in all of them.

    Args:
        find_actor: returns the handle of the rendezvous actor within the given seconds; called when the link
            is first used. None makes a sender's end, whose connection comes from ``RayListener``.
        object_store: store that payloads are put into, shared by the sender's ends.
        token: receiver's end: token of the listener.
        host: name of this host; the default is ``this_host()``; two ends with one name share memory.
        directory: see :class:`~weight_update.SharedMemWeightSyncScheme`.
    """

    _advice: ClassVar[str] = ": then give it and this worker different host="

    def __init__(
        self,
        find_actor: Callable[[float | None], Any] | None = None,
        object_store: RayObjectStore | None = None,
        *,
        token: str = "",
        host: str | None = None,
        directory: str | None = None,
        **unknown: Never,
    ) -> None:
        refuse_arguments(self, unknown, _NO_HANDLE)
        super().__init__(None if find_actor is None else "", token=token, directory=directory)
        self.host: str = host or this_host()
        self.object_store: RayObjectStore = object_store or RayObjectStore()
        self._find_actor, self._actor = find_actor, None

    def join(self, address: str, deadline: float | None) -> LinkConnection:
        assert self._find_actor is not None, "a receiver's end"
        self._actor = self._actor or self._find_actor(seconds_left(deadline))
        host, local = look_up(self._actor, "object_store", seconds_left(deadline))
        if shares_sockets(host, self.host):
            return super().join(local, deadline)
        return RayConnection(self._actor, uuid.uuid4().hex, 1)

    def take_over(self, connection: LinkConnection, hello: WeightChunk | None = None) -> None:
        if isinstance(connection, RayConnection):
            connection.object_store = self.object_store
            self.capabilities = replace(self.capabilities, pid_is_visible=False)
        super().take_over(connection, hello)


class RayListener(JoinListener[RayTransport]):
    """The listener for links to Ray actors, with the arguments of :class:`~weight_update.JoinListener`.

    It takes join requests from the rendezvous actor, and those of workers on this host from a Unix socket.
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
        call(actor.announce, "object_store", (host, self._local.address))

    def start(self) -> None:
        self._local.start()
        super().start()

    def close(self) -> None:
        self._local.close()
        super().close()

    def wake(self) -> None:
        tell(self._actor.request_join, "", (b"", b""), [])

    def accept(self) -> tuple[RayConnection, WeightChunk] | None:
        if not ray_runs():
            self._closed.set()  # no worker can ask any more
            return None
        try:
            request = ask(call(self._actor.next_join_request, POLL_SECONDS), None)
        except LinkClosedError as error:  # the actor is unreachable, perhaps only for a moment
            if not self._closed.wait(self.back_off) and ray_runs():
                self.refusals.note(error)
            return None
        if request is None:
            return None
        try:
            name, (node, raw), (liveness,) = request
            hello = WeightChunk.decode(raw)
        except (ValueError, TypeError) as error:
            raise FormatError(f"not a join request ({error})") from None
        return RayConnection(self._actor, name, 0, node == node_id(), liveness), hello
