"""Receiving of batches from workers, through the default process group."""

from __future__ import annotations

import queue
import threading
from typing import Any

from tensordict import TensorDictBase

__all__ = ["Arrivals"]


class Arrivals:
    """A receiver of batches like ``example``, one at a time from each worker; worker 0 has the rank 1.

    Attributes:
        batches: last batch of each worker.
        pending: workers whose next batch is awaited.
    """

    def __init__(self, example: TensorDictBase, num_workers: int) -> None:
        self.batches = [example.clone().lock_() for _ in range(num_workers)]
        self.pending: set[int] = set()
        self._arrived: queue.SimpleQueue[tuple[int, Exception | None]] = queue.SimpleQueue()
        self._threads: list[threading.Thread] = []

    def ask(self, idx: int) -> None:
        """Start to receive the next batch of a worker, unless this was started before."""
        if idx in self.pending:
            return
        self.pending.add(idx)
        try:
            parts = self.batches[idx].irecv(src=idx + 1, return_premature=True)
        except RuntimeError as error:
            self._arrived.put((idx, error))
            return
        waiting = threading.Thread(target=_await, args=(idx, parts, self._arrived), daemon=True)
        self._threads = [thread for thread in self._threads if thread.is_alive()] + [waiting]
        waiting.start()

    def take(self, timeout: float) -> tuple[int, Exception | None] | None:
        """Return the worker of the next batch and its error; None if none came in ``timeout`` seconds."""
        try:
            idx, error = self._arrived.get(timeout=timeout)
        except queue.Empty:
            return None
        self.pending.discard(idx)
        return idx, error

    def close(self, timeout: float) -> None:
        """Wait for the end of all receiving, once the workers have ended."""
        for thread in self._threads:
            thread.join(timeout)


def _await(idx: int, parts: list[Any], arrived: queue.SimpleQueue[tuple[int, Exception | None]]) -> None:
    try:
        for part in parts:
            part.wait()
    except RuntimeError as error:  # from gloo: the other end is gone
        arrived.put((idx, error))
    else:
        arrived.put((idx, None))
