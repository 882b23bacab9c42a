"""Logging that unauthenticated processes cannot flood."""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Iterator
from typing import Any

from weight_update.errors import FormatError

EXPECTED = (FormatError, ConnectionError, TimeoutError, EOFError)
"""Errors that any process may cause at a listener."""
_KEPT = 8


class RateLimitedLog:
    """A logger for events that any process may cause as often as it likes.

    Args:
        burst: records of one message that are written in each period; further ones are counted, and the next
            written record tells how many were omitted.
        seconds: length of a period.
    """

    def __init__(self, log: logging.Logger, burst: int = 10, seconds: float = 60.0) -> None:
        self._log, self._burst, self._seconds = log, burst, seconds
        self._lock = threading.RLock()  # a signal handler may log while it is held
        self._periods: dict[str, tuple[float, int, int]] = {}  # its start, records written and omitted

    def warning(self, message: str, *args: object, **options: Any) -> None:
        """Log a warning as :meth:`logging.Logger.warning` does, unless ``message`` came too often."""
        self._write(logging.WARNING, message, *args, **options)

    def exception(self, message: str, *args: object) -> None:
        """Log an error as :meth:`logging.Logger.exception` does, unless ``message`` came too often."""
        self._write(logging.ERROR, message, *args, exc_info=True)

    def _write(self, level: int, message: str, *args: object, **options: Any) -> None:
        omitted = self._admit(message)
        if omitted is not None:
            more = f" ({omitted} more like this were not logged)" if omitted else ""
            self._log.log(level, message + more, *args, stacklevel=3, **options)

    def _admit(self, message: str) -> int | None:
        """Count an event; return how many were omitted before it, or None if this one is to be omitted."""
        now = time.monotonic()
        with self._lock:
            start, written, omitted = self._periods.get(message, (now, 0, 0))
            if now - start >= self._seconds:
                start, written = now, 0
            if written == self._burst:
                self._periods[message] = start, written, omitted + 1
                return None
            self._periods[message] = start, written + 1, 0
            return omitted


class Refusals:
    """The last refusals of a listener, which the error of ``connect()`` names."""

    def __init__(self, log: logging.Logger) -> None:
        self._log = RateLimitedLog(log)
        self._kept: deque[str] = deque(maxlen=_KEPT)

    def __iter__(self) -> Iterator[str]:
        return iter(self._kept.copy())

    def note(self, error: Exception) -> None:
        """Keep and log a refusal, with a traceback unless its cause is :data:`EXPECTED`."""
        traceback = None if isinstance(error, EXPECTED) else error
        self._log.warning("refused a connection: %s", error, exc_info=traceback)
        self._kept.append(str(error))

    def clear(self) -> None:
        """Forget all refusals."""
        self._kept.clear()
