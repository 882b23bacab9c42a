"""Updates that observers are told of, as soon as it is known which workers have them."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import replace

from weight_update.errors import SyncTimeoutError
from weight_update.report import Event, SyncReport, WorkerEvent
from weight_update.sender.handle import Outcomes, Patience, is_settled, reason_of
from weight_update.sender.workers import WorkerState

_SUPERSEDED_SECONDS = 1.0
"""Seconds after which the report of an update that newer ones follow waits for busy workers no longer."""


class ObservedUpdate:
    """An update on its way, of which observers are told.

    Args:
        outcomes: the sender.
        report: the report as far as it is known; it is not changed.
        workers: indices of the workers that are sent the update.
    """

    def __init__(self, outcomes: Outcomes, report: SyncReport, workers: Sequence[int]) -> None:
        self._outcomes, self._report, self._workers = outcomes, report, workers
        self._sent = time.perf_counter()
        self._patience = Patience(outcomes.timeout)
        self._superseded_at = time.monotonic() + _SUPERSEDED_SECONDS

    def settle(self, *, superseded: bool, stop: Callable[[], bool]) -> list[Event] | None:
        """Wait until every worker has applied the update, failed or left; return what observers are told.

        Args:
            superseded: whether newer updates follow. Busy workers are then waited for only a moment, and a
                worker is reported as late once until it goes on. Observers are told of versions that
                workers apply afterwards by events of their own.
            stop: returns whether there is something else to tell; the result is then None.
        """
        table, version, timeout = self._outcomes.table, self._report.version, self._outcomes.timeout
        report = replace(self._report, seconds=dict(self._report.seconds), apply_seconds={}, stall_seconds={})
        with table.changed:
            states = table.known(self._workers)
            limit = self._superseded_at if superseded else None
            if not self._patience.wait(table.changed, states, self._is_settled, limit, stop):
                return None
            missing = [worker for worker in states if worker.reached < version and worker.missed]
            in_time = superseded and time.monotonic() < self._patience.deadline
            busy = [worker for worker in missing if in_time and not self._is_settled(worker)]
            told = [worker for worker in missing if _is_told(worker, timeout, busy=worker in busy)]
            failures = {worker.idx: reason_of(worker, version, timeout) for worker in told}
            self._outcomes.fill(report, self._workers)
            table.told = max(table.told, version)
        if not busy:
            report.seconds["ack"] = time.perf_counter() - self._sent
        report.failures = {idx: str(error) for idx, error in failures.items()}
        late = [(idx, str(error)) for idx, error in failures.items() if isinstance(error, SyncTimeoutError)]
        return [report, *(WorkerEvent("late", idx, version, reason) for idx, reason in late)]

    def _is_settled(self, worker: WorkerState) -> bool:
        return is_settled(worker, self._report.version)


def _is_told(worker: WorkerState, timeout: float, *, busy: bool) -> bool:
    """Return whether observers are told that ``worker`` does not have an update, and note that.

    Of the updates that a worker misses while it is not connected, only the first is told. A ``busy`` worker
    may still apply the update in time; it is late if it has not answered an earlier one for so long.
    """
    if busy:
        begins = worker.inflight is None or worker.writing
        if begins or time.monotonic() - worker.sent_at < timeout:
            return False
        told, worker.late_told = worker.late_told != worker.sent_at, worker.sent_at
        return told
    told = not worker.absence_told
    worker.absence_told = not worker.joined
    return told
