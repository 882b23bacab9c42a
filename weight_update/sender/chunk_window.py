"""The chunks of one version that were sent and are not yet read by all workers."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterable
from dataclasses import dataclass

from weight_update.sender.buffers import Slot

__all__ = ["ChunkWindow"]


@dataclass
class _SentChunk:
    """A chunk that was sent, and the indices of the workers that have not read it yet."""

    index: int
    slot: Slot
    readers: set[int]
    sent_at: float


class ChunkWindow:
    """Chunks that were sent and not yet read by all workers; at most a few at one time.

    Callers of all methods hold the sender's lock.

    Args:
        version: number of the version.
        workers: indices of the workers that are sent it.
        limit: the largest number of chunks at one time: one that is being filled, and others that were sent
            and not yet read by all workers.
        timeout: seconds that a worker has to read a chunk.
        changed: the sender's lock.

    Attributes:
        version: number of the version.
        workers: indices of the workers that still take chunks.
    """

    def __init__(
        self, version: int, workers: Iterable[int], limit: int, timeout: float, changed: threading.Condition
    ) -> None:
        self.version, self.workers = version, set(workers)
        self._limit, self._timeout, self._changed = limit, timeout, changed
        self._sent: list[_SentChunk] = []

    def await_room(self) -> list[int]:
        """Wait until one more chunk may be made; return the workers that prevent it for too long, if any."""
        while len(self._sent) >= self._limit:
            oldest = self._sent[0]
            left = oldest.sent_at + self._timeout - time.monotonic()
            if left <= 0:
                return list(oldest.readers)
            self._changed.wait(left)
        return []

    def add(self, index: int, slot: Slot) -> None:
        """Note that chunk ``index``, which lies in ``slot``, is sent to all workers."""
        self._sent.append(_SentChunk(index, slot, set(self.workers), time.monotonic()))

    def taken(self, worker: int, index: int) -> None:
        """Note that a worker has read the chunks up to ``index``."""
        for chunk in self._sent:
            if chunk.index <= index:
                chunk.readers.discard(worker)
        self._free()

    def leave(self, worker: int, *, reading: bool) -> None:
        """Remove a worker that has all chunks, or will not have them.

        Args:
            worker: index of the worker.
            reading: whether it may still read the chunks it was sent; their memory is then not written again.
        """
        self.workers.discard(worker)
        for chunk in self._sent:
            if worker in chunk.readers:
                chunk.readers.discard(worker)
                chunk.slot.abandoned |= reading
        self._free()

    def _free(self) -> None:
        for chunk in [chunk for chunk in self._sent if not chunk.readers]:
            self._sent.remove(chunk)
            chunk.slot.users -= 1
        self._changed.notify_all()
