"""Notice at once that another process of this host has ended."""

from __future__ import annotations

import contextlib
import os
import select
import threading
from collections.abc import Callable

__all__ = ["ProcessWatch"]


class ProcessWatch:
    """A thread that waits for the end of a process.

    Args:
        pid: of the process.
        on_end: called from the thread, once, unless :meth:`close` came first.
    """

    def __init__(self, pid: int, on_end: Callable[[], None]) -> None:
        self._on_end = on_end
        self._wake = os.eventfd(0, os.EFD_CLOEXEC)
        self._closing = threading.Lock()
        try:
            self._process = os.pidfd_open(pid)
        except ProcessLookupError:
            self._process = -1
        self._thread = threading.Thread(target=self._run, name="weight_update-watch", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Stop waiting."""
        with self._closing:
            if self._wake >= 0:
                os.eventfd_write(self._wake, 1)

    def _run(self) -> None:
        poller = select.poll()
        poller.register(self._wake, select.POLLIN)
        ended = self._process < 0
        if not ended:
            poller.register(self._process, select.POLLIN)
            ended = any(fd == self._process for fd, _ in poller.poll())
        with self._closing:
            for fd in (self._wake, self._process):
                with contextlib.suppress(OSError):
                    os.close(fd)
            self._wake = -1
        if ended:
            self._on_end()
