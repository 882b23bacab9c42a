"""Links inside one process, for tests and for receivers that are threads."""

from __future__ import annotations

import contextlib
import queue
import threading
from dataclasses import replace

from weight_update.errors import LinkClosedError, NotEnoughMemoryError
from weight_update.transports.base import Allocate, TransportBackend
from weight_update.wire.frames import WeightChunk


class MemoryTransport(TransportBackend):
    """One end of an in-process link; :meth:`pair` makes both.

    A payload is copied once, into memory that the receiver allocates.
    """

    def __init__(
        self,
        inbox: queue.SimpleQueue[WeightChunk | None],
        outbox: queue.SimpleQueue[WeightChunk | None],
        closed: threading.Event,
    ) -> None:
        self._inbox, self._outbox, self._closed = inbox, outbox, closed

    @classmethod
    def pair(cls) -> tuple[MemoryTransport, MemoryTransport]:
        """Return both ends of a new link."""
        forward: queue.SimpleQueue[WeightChunk | None] = queue.SimpleQueue()
        backward: queue.SimpleQueue[WeightChunk | None] = queue.SimpleQueue()
        closed = threading.Event()
        return cls(backward, forward, closed), cls(forward, backward, closed)

    @property
    def closed(self) -> bool:
        """Whether one of the two ends was closed."""
        return self._closed.is_set()

    def send_chunk(self, chunk: WeightChunk, timeout: float | None = None) -> None:
        """Send one chunk; never waits."""
        if self.closed:
            raise LinkClosedError("the link was closed")
        payload = None if chunk.payload is None else chunk.payload.clone()
        self._outbox.put(replace(chunk, payload=payload))

    def recv_chunk(
        self, timeout: float | None = None, allocate: Allocate | None = None
    ) -> WeightChunk | None:
        try:
            chunk = self._inbox.get(timeout=timeout)
        except queue.Empty:
            return None
        if chunk is None:
            self._inbox.put(None)
            raise LinkClosedError("the link was closed")
        if chunk.payload is None or allocate is None:
            return chunk
        try:
            target = allocate(chunk.payload.numel())
        except NotEnoughMemoryError as error:
            error.version = chunk.header.get("version")
            raise
        return replace(chunk, payload=target.copy_(chunk.payload))

    def close(self) -> None:
        """Close both ends; chunks that this end has not read are dropped."""
        self._closed.set()
        with contextlib.suppress(queue.Empty):
            while True:
                self._inbox.get_nowait()
        self._inbox.put(None)
        self._outbox.put(None)
