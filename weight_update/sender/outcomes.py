"""The outcomes of updates: which workers have applied a version, and why others have not."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping, Sequence

from weight_update.errors import LinkClosedError, SyncTimeoutError
from weight_update.report import SyncReport
from weight_update.sender.workers import WorkerState, WorkerTable

__all__ = ["Outcome", "Outcomes"]

Outcome = tuple[bool, dict[int, Exception]]
"""Whether an update is settled, and the errors by worker index that are known by now."""


class Outcomes:
    """Waits for workers to stage or apply updates, and tells their errors.

    Args:
        table: the workers.
        timeout: seconds that workers may take.
    """

    def __init__(self, table: WorkerTable, timeout: float) -> None:
        self.table, self.timeout = table, timeout

    @property
    def version(self) -> int | None:
        """The newest version that a worker applied; None before."""
        return self.table.version

    @property
    def workers(self) -> tuple[int, ...]:
        """Indices of all initial workers and of the late joiners that are connected."""
        return tuple(worker.idx for worker in self.table.present)

    @property
    def worker_versions(self) -> dict[int, int | None]:
        """The version that each worker has applied; None for one that is not connected."""
        return {worker.idx: worker.version for worker in self.table.present}

    def members(self, workers: Sequence[int]) -> Sequence[object]:
        """Return the objects that a caller holds so that the outcome of an update stays known."""
        return self.table.known(workers)

    def wait(self, report: SyncReport, workers: Sequence[int], timeout: float | None) -> dict[int, Exception]:
        """Wait until workers have applied an update or a newer one; return the errors of all others.

        Args:
            report: report of the update; the times that workers report are entered.
            workers: indices.
            timeout: seconds; None takes the sender's, counted from when all was sent.
        """

        def applied(worker: WorkerState) -> bool:
            return worker.reached >= report.version

        def done(worker: WorkerState) -> bool:
            return applied(worker) or not worker.awaited or worker.failure(report.version) is not None

        limit = self.timeout if timeout is None else timeout
        failures = self._wait(report.version, workers, limit, done, applied, patient=timeout is None)
        self._fill(report, workers)
        return failures

    def wait_staged(self, version: int, workers: Sequence[int]) -> dict[int, Exception]:
        """Wait until workers have ``version`` staged; return the errors of all others."""

        def staged(worker: WorkerState) -> bool:
            return worker.staged == version

        def done(worker: WorkerState) -> bool:
            return staged(worker) or not worker.joined or version in worker.failures

        return self._wait(version, workers, self.timeout, done, staged, patient=True)

    def _wait(
        self,
        version: int,
        workers: Iterable[int],
        timeout: float,
        done: Callable[[WorkerState], bool],
        good: Callable[[WorkerState], bool],
        *,
        patient: bool,
    ) -> dict[int, Exception]:
        """Wait until workers are ``done``; return the errors of those that are not ``good``.

        ``patient`` leaves out, for each worker, the time during which something is still written to it. That
        time counts if the worker joins again meanwhile.
        """
        states, changed = self.table.known(workers), self.table.changed
        deadline = time.monotonic() + timeout
        later: dict[int, tuple[int, float]] = {}  # connection and deadline of workers that are written to
        with changed:
            while waited_for := [worker for worker in states if not done(worker)]:
                now = time.monotonic()
                for worker in waited_for if patient else ():
                    mine = later.get(worker.idx, (worker.connections,))[0] == worker.connections
                    if worker.writing and worker.window is None and mine:
                        later[worker.idx] = worker.connections, now + timeout
                last = max(_deadline_of(worker, later, deadline) for worker in waited_for)
                if now >= last:
                    break
                changed.wait(last - now)
            bad = [worker for worker in states if not good(worker) and worker.missed]
            return {worker.idx: _reason(worker, version, timeout) for worker in bad}

    def failures(self, version: int, workers: Sequence[int]) -> dict[int, Exception]:
        """Return the errors known by now of workers that will not apply ``version``, without waiting."""
        with self.table.changed:
            found = {}
            for worker in self.table.known(workers):
                if version in worker.failures:
                    found[worker.idx] = worker.failures[version]
                elif not worker.joined and worker.reached < version and worker.missed:
                    found[worker.idx] = worker.lost or LinkClosedError("it is not connected")
            return found

    def settled(self, version: int, workers: Sequence[int]) -> bool:
        """Return whether each worker has applied ``version`` or a newer one, failed or left."""
        with self.table.changed:
            return all(
                not worker.joined or worker.reached >= version or worker.failure(version) is not None
                for worker in self.table.known(workers)
            )

    def outcomes(self, updates: Sequence[tuple[int, Sequence[int]]]) -> list[Outcome]:
        """Return the outcome of each update, given as a version and its workers, without waiting."""
        # settled() comes first: an update that is settled gets no more errors
        settled = [self.settled(version, workers) for version, workers in updates]
        failures = [self.failures(version, workers) for version, workers in updates]
        return list(zip(settled, failures, strict=True))

    def _fill(self, report: SyncReport, workers: Iterable[int]) -> None:
        """Enter the times that workers reported into ``report``."""
        with self.table.changed:
            for worker in self.table.known(workers):
                if worker.reached >= report.version:
                    report.apply_seconds[worker.idx] = worker.apply_seconds
                    report.stall_seconds[worker.idx] = worker.stall_seconds


def _deadline_of(worker: WorkerState, later: Mapping[int, tuple[int, float]], deadline: float) -> float:
    """Return the deadline of a worker: that in ``later`` if it is of the present connection."""
    connection, extended = later.get(worker.idx, (worker.connections, deadline))
    return extended if connection == worker.connections else deadline


def _reason(worker: WorkerState, version: int, timeout: float) -> Exception:
    """Return the reason why a worker does not have ``version`` after so many seconds."""
    if (error := worker.failure(version)) is not None:
        return error
    if not worker.joined:
        return worker.lost or LinkClosedError("it is not connected")
    if not worker.awaited:
        return LinkClosedError(
            "it joined while this version was being sent; it gets weights with the next send()"
        )
    return SyncTimeoutError(
        f"did not apply it within {timeout:g} s: it is stopped, or in hold() or a long forward pass; it gets "
        "the newest version when it goes on (or raise timeout=)"
    )
