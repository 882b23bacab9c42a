"""The sender's door for links through Ray."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Mapping
from typing import Any

from weight_update.errors import FormatError, JoinRefusedError, LinkClosedError
from weight_update.transports.rate_limit import RateLimitedLog, Refusals
from weight_update.transports.ray.connection import Line
from weight_update.transports.ray.object_store import Shelf
from weight_update.transports.ray.rendezvous import POLL_SECONDS, ask, ray_runs, running_ray, with_ray
from weight_update.transports.ray.transport import RayTransport
from weight_update.wire.frames import Kind, WeightChunk

__all__ = ["RayListener"]

_log = logging.getLogger(__name__)
_BACK_OFF_SECONDS = 1.0


class RayListener:
    """The sender's door: takes those who knock and gives each connection to its link.

    Args:
        board: handle of the actor.
        token: workers must show it.
        links: the sender's end for each worker index.
        newcomers: gives the link of a worker that has none, or raises
            :class:`~weight_update.JoinRefusedError`.

    Attributes:
        refusals: why the last join requests were refused.
    """

    def __init__(
        self,
        board: Any,
        token: str,
        links: Mapping[int, RayTransport],
        newcomers: Callable[[int], RayTransport],
    ) -> None:
        self._board, self._token, self._links, self._newcomers = board, token, links, newcomers
        self._closed = threading.Event()
        self._log = RateLimitedLog(_log)
        self.refusals = Refusals(_log)
        self._thread = threading.Thread(target=self._run, name="weight_update-door", daemon=True)

    def start(self) -> None:
        """Begin to let workers in."""
        if not self._thread.is_alive():
            self._thread.start()

    def close(self) -> None:
        """Let nobody in any more."""
        self._closed.set()
        with_ray(lambda: self._board.knock.remote("", (b"", b""), []))  # wakes the thread
        if self._thread.is_alive() and self._thread is not threading.current_thread():
            self._thread.join(5.0)

    def _run(self) -> None:
        while not self._closed.is_set() and ray_runs():
            try:
                request = self._next()
                if request is not None and not self._closed.is_set():
                    self._admit(*request)
            except Exception as error:  # noqa: BLE001 - if this thread ended nobody could join any more
                self.refusals.note(error, expected=isinstance(error, ValueError | TypeError))

    def _next(self) -> Any | None:
        """Return the next join request, or None if there is none yet."""
        try:
            return ask(self._board.door.remote(POLL_SECONDS), None)
        except LinkClosedError as error:  # the actor is away, perhaps only for a moment
            self._log.warning("accepting workers goes on after this: %s", error)
            self._closed.wait(_BACK_OFF_SECONDS)
            return None

    def _admit(self, name: str, message: tuple[str, bytes], refs: list[Any]) -> None:
        node, raw = message
        hello = WeightChunk.decode(raw)
        if hello.kind is not Kind.HELLO:
            raise FormatError("did not say hello")
        local = node == running_ray().get_runtime_context().get_node_id()
        try:
            link = self._link_of(hello)
            link.screen(hello)
        except JoinRefusedError as error:
            refused = Line(self._board, name, 0, Shelf(), local)
            header = {"reason": str(error), "problems": list(error.problems)}
            refused.send(WeightChunk(Kind.REFUSED, header))
            refused.close()
            raise
        line = Line(self._board, name, 0, link.shelf, local)
        line.follow(refs[0])
        link.attach(line, hello)

    def _link_of(self, hello: WeightChunk) -> RayTransport:
        if not hello.shows(self._token):
            raise JoinRefusedError("wrong token: the scheme was not made by this sender")
        worker: int = hello.header["worker"]
        return self._links.get(worker) or self._newcomers(worker)
