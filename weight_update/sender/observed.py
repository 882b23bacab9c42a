"""Updates that observers are told of, as soon as it is known which workers have them."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial

from weight_update.errors import SyncTimeoutError
from weight_update.report import Event, SyncReport, WorkerEvent
from weight_update.sender.delivery import reason_of
from weight_update.sender.handle import Outcomes, Patience, is_settled
from weight_update.sender.workers import WorkerState

_BUSY_SECONDS = 1.0
"""Seconds that observers wait for busy workers, before they are told what the other workers have."""


class ObservedUpdate:
    """An update on its way, of which observers are told.

    ``report``, as far as it is known, is not changed.
    """

    def __init__(self, outcomes: Outcomes, report: SyncReport, workers: Sequence[int]) -> None:
        self._outcomes, self._report, self._workers = outcomes, report, workers
        self._sent = time.perf_counter()
        self._patience = Patience(outcomes.timeout)
        self._due = time.monotonic() + _BUSY_SECONDS
        self._begun = False  # whether observers know which workers have the update so far

    def settle(self, *, superseded: bool, stop: Callable[[], bool]) -> list[Event] | None:
        """Wait until every worker has applied the update, failed or left; return what observers are told.

        Observers are told of workers that have the update after a moment, if other workers are busy. The
        report comes then, too, if newer updates follow. Workers that are busy for longer are not waited for.
        A worker is reported as late with only one of them.
        """
        table, version = self._outcomes.table, self._report.version
        with table.lock:
            states, done = table.known(self._workers), partial(is_settled, version=version)
            brief = superseded or not self._begun
            waited_for = [one for one in states if not (brief and _is_busy(one, _BUSY_SECONDS))]
            limit = self._due if brief else math.inf
            if not self._patience.wait(table.changed, waited_for, done, limit, stop):
                return None
            table.told = max(table.told, version)  # from now on, events tell of workers that apply it
            in_time = time.monotonic() < self._patience.deadline
            busy = [worker for worker in states if in_time and not done(worker)]
            if busy and not superseded:
                self._begun = True
                return [
                    WorkerEvent("applied", one.idx, version, late_joiner=one.late)
                    for one in states
                    if one.version == version and one.applied_told < version
                ]
            return self._finish(states, busy)

    def wake(self) -> None:
        """Have :meth:`settle`, if it waits in another thread, call ``stop`` now."""
        with self._outcomes.table.lock:
            self._outcomes.table.changed.notify_all()

    def _finish(self, states: Sequence[WorkerState], busy: Sequence[WorkerState]) -> list[Event]:
        """Return the report, and events of workers that are late."""
        version, timeout, seconds = self._report.version, self._outcomes.timeout, dict(self._report.seconds)
        if not busy:
            seconds["ack"] = time.perf_counter() - self._sent
        report = replace(self._report, seconds=seconds, apply_seconds={}, stall_seconds={})
        missing = [worker for worker in states if worker.reached < version and worker.required]
        told = [worker for worker in missing if _is_told(worker, timeout, busy=worker in busy)]
        failures = {worker.idx: reason_of(worker, version, timeout) for worker in told}
        self._outcomes.fill(report, states)
        report.failures = {idx: str(error) for idx, error in failures.items()}
        connected = {worker.idx for worker in told if worker.joined}
        late = [
            WorkerEvent("late", idx, version, str(error))
            for idx, error in failures.items()
            if idx in connected and isinstance(error, SyncTimeoutError)
        ]
        return [report, *late]


def _is_busy(worker: WorkerState, seconds: float) -> bool:
    """Return whether a worker has not answered an update for so many seconds."""
    begins = worker.inflight is None or worker.writing
    return not begins and time.monotonic() - worker.sent_at >= seconds


def _is_told(worker: WorkerState, timeout: float, *, busy: bool) -> bool:
    """Return whether observers are told that ``worker`` does not have an update, and note that.

    Of the updates that a worker misses while it is not connected, only the first is told. A ``busy`` worker
    may still apply the update in time; it is late if it has not answered an earlier one for so long.
    """
    if busy:
        if not _is_busy(worker, timeout):
            return False
        told, worker.late_told = worker.late_told != worker.sent_at, worker.sent_at
        return told
    told = not worker.absence_told
    worker.absence_told = not worker.joined
    return told
