"""Listener for links through Ray."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Mapping
from typing import Any

from weight_update.errors import FormatError, JoinRefusedError, LinkClosedError
from weight_update.transports.rate_limit import RateLimitedLog, Refusals
from weight_update.transports.ray.connection import RayConnection
from weight_update.transports.ray.object_store import ObjectStore
from weight_update.transports.ray.rendezvous import POLL_SECONDS, ask, ray_runs, running_ray, with_ray
from weight_update.transports.ray.transport import RayTransport
from weight_update.wire.frames import Kind, WeightChunk

__all__ = ["RayListener"]

_log = logging.getLogger(__name__)
_BACK_OFF_SECONDS = 1.0


class RayListener:
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
        self._actor, self._token, self._links, self._late_joiners = actor, token, links, late_joiners
        self._closed = threading.Event()
        self._log = RateLimitedLog(_log)
        self.refusals = Refusals(_log)
        self._thread = threading.Thread(target=self._run, name="weight_update-listener", daemon=True)

    def start(self) -> None:
        """Start to admit workers."""
        if not self._thread.is_alive():
            self._thread.start()

    def close(self) -> None:
        """Admit no more workers."""
        self._closed.set()
        with_ray(lambda: self._actor.request_join.remote("", (b"", b""), []))  # wakes the thread
        if self._thread.is_alive() and self._thread is not threading.current_thread():
            self._thread.join(5.0)

    def _run(self) -> None:
        while not self._closed.is_set() and ray_runs():
            try:
                request = self._next()
                if request is not None and not self._closed.is_set():
                    self._admit(*request)
            except Exception as error:  # noqa: BLE001 - without this thread no worker could join
                self.refusals.note(error, expected=isinstance(error, ValueError | TypeError))

    def _next(self) -> Any | None:
        """Return the next join request, or None if there is none yet."""
        try:
            return ask(self._actor.next_join_request.remote(POLL_SECONDS), None)
        except LinkClosedError as error:  # the actor is unreachable, perhaps only for a moment
            self._log.warning("accepting workers goes on after this: %s", error)
            self._closed.wait(_BACK_OFF_SECONDS)
            return None

    def _admit(self, name: str, message: tuple[str, bytes], refs: list[Any]) -> None:
        node, raw = message
        hello = WeightChunk.decode(raw)
        if hello.kind is not Kind.HELLO:
            raise FormatError("the first message is not a HELLO")
        local = node == running_ray().get_runtime_context().get_node_id()
        try:
            link = self._link_of(hello)
            link.screen(hello)
        except JoinRefusedError as error:
            refused = RayConnection(self._actor, name, 0, ObjectStore(), local)
            header = {"reason": str(error), "problems": list(error.problems)}
            refused.send(WeightChunk(Kind.REFUSED, header))
            refused.close()
            raise
        connection = RayConnection(self._actor, name, 0, link.object_store, local)
        connection.follow(refs[0])
        link.take_over(connection, hello)

    def _link_of(self, hello: WeightChunk) -> RayTransport:
        if not hello.shows(self._token):
            raise JoinRefusedError("wrong token: the scheme was not made by this sender")
        worker: int = hello.header["worker"]
        return self._links.get(worker) or self._late_joiners(worker)
