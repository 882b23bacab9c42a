"""Listener for links through Ray."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from typing import Any

from weight_update.errors import FormatError, JoinRefusedError, LinkClosedError
from weight_update.transports.join_listener import BACK_OFF_SECONDS, JoinListener, refusal_of
from weight_update.transports.ray.connection import RayConnection
from weight_update.transports.ray.object_store import ObjectStore
from weight_update.transports.ray.rendezvous import POLL_SECONDS, ask, ray_runs, running_ray, with_ray
from weight_update.transports.ray.transport import RayTransport
from weight_update.wire.frames import Kind, WeightChunk

__all__ = ["RayListener"]

_log = logging.getLogger(__name__)


class RayListener(JoinListener[RayTransport]):
    """Admits workers at any time and gives each connection to its link.

    Args:
        actor: handle of the rendezvous actor.
        token: secret that workers must know.
        links: the sender's end for each worker index.
        late_joiners: returns the link for a worker index without one, or raises
            :class:`~weight_update.JoinRefusedError`.

    Attributes:
        refusals: reasons of the last refused join requests.
    """

    def __init__(
        self,
        actor: Any,
        token: str,
        links: Mapping[int, RayTransport],
        late_joiners: Callable[[int], RayTransport],
    ) -> None:
        super().__init__(links, late_joiners, _log)
        self._actor, self._token = actor, token

    def _wake(self) -> None:
        with_ray(lambda: self._actor.request_join.remote("", (b"", b""), []))

    def _next(self) -> Any | None:
        if not ray_runs():
            self._closed.set()  # no worker can ask any more
            return None
        try:
            return ask(self._actor.next_join_request.remote(POLL_SECONDS), None)
        except LinkClosedError as error:  # the actor is unreachable, perhaps only for a moment
            self._log.warning("the listener continues after an unexpected error: %s", error)
            self._closed.wait(BACK_OFF_SECONDS)
            return None

    def _admit(self, request: Any) -> None:
        try:
            name, (node, raw), refs = request
            hello = WeightChunk.decode(raw)
        except (ValueError, TypeError) as error:
            raise FormatError(f"not a join request ({error})") from None
        if hello.kind is not Kind.HELLO:
            raise FormatError("the first message is not a HELLO")
        local = node == running_ray().get_runtime_context().get_node_id()
        try:
            link = self._authenticated_link(hello)
            link.screen(hello)
        except JoinRefusedError as error:
            refused = RayConnection(self._actor, name, 0, ObjectStore(), local)
            refused.send(refusal_of(error))
            refused.close()
            raise
        connection = RayConnection(self._actor, name, 0, link.object_store, local)
        connection.follow(refs[0])
        link.take_over(connection, hello)

    def _authenticated_link(self, hello: WeightChunk) -> RayTransport:
        if not hello.shows(self._token):
            raise JoinRefusedError("wrong token: the scheme was not made by this sender")
        return self._link_for(hello.header["worker"])
