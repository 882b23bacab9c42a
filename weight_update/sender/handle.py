"""Updates that are on their way: their handles, and their outcomes at each worker."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Protocol

from weight_update.errors import LinkClosedError, SyncFailedError, SyncTimeoutError
from weight_update.report import SyncReport
from weight_update.sender.workers import WorkerState, WorkerTable


class UpdateOwner(Protocol):
    """The methods of a sender that a handle calls.

    The sender is a :class:`~weight_update.sender.sender.Sender`, or its counterpart on a rank of a sharded
    trainer that does not lead.
    """

    def members(self, workers: Sequence[int]) -> Sequence[object]: ...

    def settled(self, version: int, workers: Sequence[int]) -> bool: ...

    def wait(
        self, report: SyncReport, workers: Sequence[int], timeout: float | None
    ) -> dict[int, Exception]: ...

    def wait_staged(self, version: int, workers: Sequence[int]) -> dict[int, Exception]: ...

    def commit(self, version: int, workers: Sequence[int]) -> None: ...

    def abort(self, version: int, workers: Sequence[int]) -> None: ...

    def failures(self, version: int, workers: Sequence[int]) -> dict[int, Exception]: ...


class SendHandle:
    """An update that is on its way to workers.

    On a sharded trainer, either all ranks call :meth:`wait` or none does. On ranks that do not lead,
    :meth:`done` and :meth:`failures` know nothing until it has returned.

    Attributes:
        version: number of the update.
        workers: indices of the workers that are sent it.
        report: the report, as far as it is known.
    """

    def __init__(self, sender: UpdateOwner, report: SyncReport, workers: tuple[int, ...]) -> None:
        self._sender = sender
        self.report: SyncReport = report
        self.workers: tuple[int, ...] = workers
        self._members = sender.members(workers)
        self.version: int = report.version

    def __repr__(self) -> str:
        return f"SendHandle(version={self.version}, workers={list(self.workers)}, done={self.done()})"

    def done(self) -> bool:
        """Return whether every worker has applied this update or a newer one, failed or left."""
        return self._sender.settled(self.version, self.workers)

    def wait(self, timeout: float | None = None) -> SyncReport:
        """Wait until every worker has applied this update or a newer one.

        Args:
            timeout: seconds; None takes the scheme's, counted from when all was sent.

        Raises:
            SyncFailedError: workers failed, died or were late; it names them, and all others have it.
        """
        start = time.perf_counter()
        failures = self._sender.wait(self.report, self.workers, timeout)
        self.report.seconds["ack"] = time.perf_counter() - start
        if failures:
            raise failed(self.version, failures, self.report)
        return self.report

    def of(self, *workers: int) -> SendHandle:
        """Return a handle of the same update for some of its workers."""
        return SendHandle(self._sender, self.report, workers)

    def wait_staged(self) -> dict[int, Exception]:
        """Wait until the workers have staged the update; return the errors of all others."""
        return self._sender.wait_staged(self.version, self.workers)

    def commit(self) -> None:
        """Have the workers apply the staged update."""
        self._sender.commit(self.version, self.workers)

    def abort(self) -> None:
        """Have the workers forget the staged update."""
        self._sender.abort(self.version, self.workers)

    def failures(self) -> dict[int, Exception]:
        """Return the errors known by now, by worker index, without waiting."""
        return self._sender.failures(self.version, self.workers)


def failed(version: int, failures: Mapping[int, Exception], report: SyncReport | None) -> SyncFailedError:
    """Return the error for an update that some workers did not apply."""
    lines = "".join(f"\n  worker {idx}: {error}" for idx, error in sorted(failures.items()))
    return SyncFailedError(f"version {version} was not applied by:{lines}", failures, report)


Outcome = tuple[bool, dict[int, Exception]]
"""Whether an update is settled, and the errors by worker index that are known by now."""


class Outcomes:
    """Waits for workers to stage or apply updates, and tells their errors."""

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

        The times that workers report are entered into ``report``. A ``timeout`` of None takes the sender's,
        counted from when all was sent.
        """

        def applied(worker: WorkerState) -> bool:
            return worker.reached >= report.version

        def done(worker: WorkerState) -> bool:
            return applied(worker) or not worker.awaited or worker.failure(report.version) is not None

        limit = self.timeout if timeout is None else timeout
        failures = self._wait(report.version, workers, limit, done, applied, patient=timeout is None)
        self._fill(report, workers)
        return failures

    def wait_for_observers(
        self, report: SyncReport, workers: Sequence[int], timeout: float | None
    ) -> dict[int, Exception]:
        """Wait as :meth:`wait` does; return the errors that observers are told of.

        Of the updates that a worker misses while it is not connected, only the first is reported.
        """
        failures = Outcomes.wait(self, report, workers, timeout)  # Leader.wait is a step of all ranks
        with self.table.changed:
            for worker in self.table.known(failures):
                if worker.absence_told:
                    del failures[worker.idx]
                worker.absence_told = not worker.joined
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
