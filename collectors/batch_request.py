"""Requests for the batches of workers."""

from __future__ import annotations

import _thread
import queue
import threading
from collections.abc import Callable
from typing import Any

Make = Callable[[Callable[[Any], None]], None]
"""Asks a worker for its next batch, and calls its argument once the batch, or an error, has arrived."""


class BatchRequest:
    """A request for the next batch of a worker, made by a thread of its own.

    A signal handler, which runs in the main thread, may raise while a program waits for batches. Such a
    program may call :meth:`begin` again: the worker is asked once.

    Args:
        make: function that makes the request.
        changed: queue that gets an item when the batch has arrived.

    Attributes:
        answer: the batch, or the error of ``make``; empty before.
    """

    def __init__(self, make: Make, changed: queue.SimpleQueue[None]) -> None:
        self.answer: list[Any] = []
        self._make, self._changed = make, changed
        self._begun, self._running = False, threading.Lock()

    @property
    def pending(self) -> bool:
        """Whether the worker was asked, and has not answered."""
        return self._begun and not self.answer

    def begin(self) -> None:
        """Make the request, unless this was done."""
        self._begun = True
        if not self._running.locked():
            _thread.start_new_thread(self._run, ())  # a signal handler must not raise in Thread.start()

    def _run(self) -> None:
        if self._running.acquire(blocking=False):
            try:
                self._make(self._put)
            except Exception as error:  # noqa: BLE001 - any error is raised by the reader of the answer
                self._put(error)

    def _put(self, answer: Any) -> None:
        self.answer.append(answer)
        self._changed.put(None)
