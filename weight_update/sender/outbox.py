"""Threads that write to workers whose links may block."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable

__all__ = ["Outbox"]


class Outbox:
    """A thread that writes to one worker, so that other workers do not wait for its link.

    Args:
        idx: index of the worker.
        changed: the sender's lock; notified when the thread has nothing left to write.
    """

    def __init__(self, idx: int, changed: threading.Condition) -> None:
        self._changed = changed
        self._jobs: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._left = 0
        threading.Thread(target=self._run, name=f"weight_update-outbox-{idx}", daemon=True).start()

    @property
    def busy(self) -> bool:
        """Whether a job runs or waits."""
        return self._left > 0

    def put(self, job: Callable[[], None]) -> None:
        """Have the thread call ``job``, which must not raise, after all earlier ones.

        The caller holds the sender's lock.
        """
        self._left += 1
        self._jobs.put(job)

    def close(self) -> None:
        """End the thread after the jobs that it has."""
        self._jobs.put(None)

    def _run(self) -> None:
        while (job := self._jobs.get()) is not None:
            job()
            del job  # it keeps an update and its worker alive
            with self._changed:
                self._left -= 1
                if not self._left:
                    self._changed.notify_all()
