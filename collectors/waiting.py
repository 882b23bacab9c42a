"""The time that a collector waits for the batches of its workers."""

from __future__ import annotations

import numbers
from collections.abc import Iterable
from typing import Any

from weight_update import SyncTimeoutError

FRAMES_TIMEOUT = 1800.0
"""Default seconds that a worker has for a batch, which is PyTorch's limit for gloo."""


def require_seconds(frames_timeout: Any) -> float:
    """Return ``frames_timeout`` as a float; raise ValueError unless it is a positive number."""
    if (
        isinstance(frames_timeout, bool)
        or not issubclass(type(frames_timeout), numbers.Real)
        or not frames_timeout > 0
    ):
        raise ValueError(
            f"frames_timeout is a positive number of seconds (math.inf for no limit), not {frames_timeout!r}"
        )
    return float(frames_timeout)


class WaitingTimes:
    """The seconds that a collector has waited for the next batch of each worker, at most ``limit``."""

    def __init__(self, limit: float) -> None:
        self.limit: float = limit
        self._seconds: dict[int, float] = {}

    def add(self, seconds: float, workers: Iterable[int]) -> None:
        """Count ``seconds`` of waiting for ``workers``, whose batches are missing."""
        for idx in workers:
            self._seconds[idx] = self._seconds.get(idx, 0.0) + seconds

    def end(self, worker: int) -> None:
        """Reset a worker whose batch has arrived or who is lost."""
        self._seconds.pop(worker, None)

    @property
    def late(self) -> list[int]:
        """Workers that have used up their time."""
        return sorted(idx for idx, seconds in self._seconds.items() if seconds > self.limit)

    def require_in_time(self) -> None:
        """Raise SyncTimeoutError if workers are late; they get as much time again."""
        late = self.late
        for idx in late:
            self.end(idx)
        if late:
            raise SyncTimeoutError(
                f"no batch of workers {late} came in {self.limit:g} s of waiting (frames_timeout)"
            )
