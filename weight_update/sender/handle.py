"""Updates that are on their way: their handles, and their outcomes at each worker."""

from __future__ import annotations

import functools
import math
import select
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Protocol, TypeVar

from weight_update.arguments import require_seconds
from weight_update.errors import FormatError, LifecycleError, SyncFailedError
from weight_update.report import SyncReport
from weight_update.sender.buffers import ChunkedUpdate
from weight_update.sender.delivery import absence_of, reason_of
from weight_update.sender.workers import WorkerState, WorkerTable
from weight_update.transports.base import Arrivals
from weight_update.wire.frames import Kind, WeightChunk

_Paused = dict[Arrivals, WorkerState]
_T = TypeVar("_T")
_WorkerTest = Callable[[WorkerState], bool]
NESTED = (
    "this thread is inside send() or wait() of this scheme: a signal handler cannot send or wait meanwhile, "
    "and a converter or a source cannot send; let it set a flag, and do it afterwards"
)


class UpdateOwner(Protocol):
    """The methods of a sender that a handle calls.

    The sender is a :class:`~weight_update.sender.sender.Sender`, or its counterpart on a rank of a sharded
    trainer that does not lead.
    """

    def members(self, workers: Sequence[int]) -> Sequence[object]: ...

    def settled(self, version: int, workers: Sequence[int]) -> bool: ...

    def wait(
        self, report: SyncReport, workers: Sequence[int], timeout: float | None, since: float | None = None
    ) -> dict[int, Exception]: ...

    def wait_staged(
        self, version: int, workers: Sequence[int], since: float | None = None
    ) -> dict[int, Exception]: ...

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
            timeout: seconds. None takes the scheme's ``timeout``, to which the time is added during which
                weights are still being written to a worker.

        Raises:
            SyncFailedError: some workers failed, died or were late. All others have the update.
            LifecycleError: a signal handler calls this while its thread waits for workers.
        """
        if timeout is not None:
            timeout = require_seconds("timeout", timeout, zero=True)
        start = time.perf_counter()
        failures = self._sender.wait(self.report, self.workers, timeout)
        self.report.seconds["ack"] = time.perf_counter() - start
        if failures:
            raise failed(self.version, failures, self.report)
        return self.report

    def wait_applied(self, since: float) -> dict[int, Exception]:
        """Wait until the workers have applied the update, as :meth:`wait_staged` waits for staging."""
        return self._sender.wait(self.report, self.workers, None, since)

    def of(self, *workers: int) -> SendHandle:
        """Return a handle of the same update for some of its workers."""
        return SendHandle(self._sender, self.report, workers)

    def wait_staged(self, since: float | None = None) -> dict[int, Exception]:
        """Wait until the workers have staged the update; return the errors of all others.

        The scheme's ``timeout`` counts from ``since``, a time of the monotonic clock; None is now.
        """
        return self._sender.wait_staged(self.version, self.workers, since)

    def commit(self) -> None:
        """Make the workers apply the staged update."""
        self._sender.commit(self.version, self.workers)

    def abort(self) -> None:
        """Make the workers discard the staged update."""
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

    reader: AnswerReader  # a subclass sets it

    def __init__(self, table: WorkerTable, timeout: float) -> None:
        self.table, self.timeout = table, timeout

    @property
    def version(self) -> int | None:
        """The newest version that a worker applied; None before."""
        return self.table.version

    @property
    def workers(self) -> tuple[int, ...]:
        """Indices of all initial workers and of the late joiners that are connected."""
        return tuple(self.table.present)

    @property
    def worker_versions(self) -> dict[int, int | None]:
        """The version that each worker has applied; None for one that is not connected."""
        return {idx: worker.version for idx, worker in self.table.present.items()}

    def members(self, workers: Sequence[int]) -> Sequence[object]:
        """Return the objects that a caller holds so that the outcome of an update stays known."""
        return self.table.known(workers)

    def wait(
        self, report: SyncReport, workers: Sequence[int], timeout: float | None, since: float | None = None
    ) -> dict[int, Exception]:
        """Wait until workers have applied an update or a newer one; return the errors of all others.

        The times that workers report are entered into ``report``. A ``timeout`` of None takes the sender's,
        and adds the time during which something is still written to a worker. ``since`` is when the wait
        began, if it began before this call.
        """
        version, states = report.version, self.table.known(workers)
        limit = self.timeout if timeout is None else timeout
        patience = Patience(limit, patient=timeout is None, since=since)
        failures = self._wait(version, states, patience, lambda worker: worker.reached >= version)
        self.fill(report, states)
        return failures

    def wait_staged(
        self, version: int, workers: Sequence[int], since: float | None = None
    ) -> dict[int, Exception]:
        """Wait until workers have ``version`` staged; return the errors of all others.

        ``since`` is when the wait began, if it began before this call.
        """
        patience, states = Patience(self.timeout, since=since), self.table.known(workers)
        return self._wait(version, states, patience, lambda worker: worker.staged == version)

    def _wait(
        self, version: int, states: list[WorkerState], patience: Patience, good: _WorkerTest
    ) -> dict[int, Exception]:
        """Wait until workers are ``good`` or settled; return the errors of those that are not ``good``."""

        def done(worker: WorkerState) -> bool:
            return is_settled(worker, version) or good(worker)

        self.reader.read(states, done, patience.deadline)
        with self.table.lock:
            patience.wait(self.table.changed, states, done)
            bad = [worker for worker in states if not good(worker) and worker.required]
            return {worker.idx: reason_of(worker, version, patience.timeout) for worker in bad}

    def failures(self, version: int, workers: Sequence[int]) -> dict[int, Exception]:
        """Return the errors known by now of workers that will not apply ``version``, without waiting."""
        with self.table.lock:
            found = {}
            for worker in self.table.known(workers):
                if version in worker.failures:
                    found[worker.idx] = worker.failures[version]
                elif not (worker.joined or worker.joining) and worker.reached < version and worker.required:
                    found[worker.idx] = absence_of(worker)
            return found

    def settled(self, version: int, workers: Sequence[int]) -> bool:
        """Return whether each worker has applied ``version`` or a newer one, failed or left."""
        with self.table.lock:
            return all(is_settled(worker, version) for worker in self.table.known(workers))

    def outcomes(self, updates: Sequence[tuple[int, Sequence[int]]]) -> list[Outcome]:
        """Return the outcome of each update, given as a version and its workers, without waiting."""
        # settled() comes first: an update that is settled gets no more errors
        settled = [self.settled(version, workers) for version, workers in updates]
        failures = [self.failures(version, workers) for version, workers in updates]
        return list(zip(settled, failures, strict=True))

    def fill(self, report: SyncReport, states: Iterable[WorkerState]) -> None:
        """Enter the times that workers reported into ``report``."""
        with self.table.lock:
            for worker in states:
                if worker.reached >= report.version:
                    report.apply_seconds[worker.idx] = worker.apply_seconds
                    report.stall_seconds[worker.idx] = worker.stall_seconds


class AnswerReader:
    """Reads the answers of workers in the thread that waits for them.

    Waking the thread of each worker, and then the caller, costs more than a small update. ``record`` notes,
    while the caller holds the sender's lock, that a worker has applied an update.
    """

    def __init__(self, table: WorkerTable, record: Callable[[WorkerState, WeightChunk], None]) -> None:
        self._table, self._record = table, record
        self._attending: set[int] = set()  # identifiers of the threads in attend()
        self._paused: dict[int, _Paused] = {}  # by the identifier of the thread

    def attend(self, call: Callable[[], _T]) -> _T:
        """Return the result of ``call()``, in which :meth:`pause` works for the calling thread.

        Raises:
            LifecycleError: a call is inside another one.
        """
        me = threading.get_ident()
        if me in self._attending:
            raise LifecycleError(NESTED)
        try:
            self._attending.add(me)  # a signal handler may raise right after it
            return call()
        finally:
            self._attending.discard(me)
            self.stop()

    def pause(self, states: Iterable[WorkerState]) -> None:
        """Let answers to an update that is about to be sent wait for :meth:`read`, in :meth:`attend`.

        The thread of a worker still notices the end of its connection.
        """
        me = threading.get_ident()
        if me not in self._attending:
            self.stop()
            return
        paused = self._paused.setdefault(me, {})
        for worker in states:
            arrivals, group = worker.link.arrivals, worker.group
            # changes may need memory first that is free only after answers to the update before
            if arrivals is not None and group is not None and not group.sends_changes:
                paused[arrivals] = worker  # first: a signal handler may raise at any time
                arrivals.pause()

    def read(self, states: Iterable[WorkerState], done: _WorkerTest, deadline: float) -> None:
        """Read what workers answer until they are ``done`` or the deadline has passed.

        Any answer but APPLIED is left to the threads of the workers.

        Raises:
            LifecycleError: a signal handler calls this while its thread reads these answers.
        """
        me = threading.get_ident()
        if me not in self._attending:
            self.attend(functools.partial(self.read, states, done, deadline))
            return
        paused = self._paused.setdefault(me, {})
        with self._table.lock:
            states = [worker for worker in states if not done(worker)]
        if any(worker.reading._is_owned() for worker in states):  # else a signal handler would wait in vain
            raise LifecycleError(NESTED)
        poller, waited_for = select.poll(), dict[int, tuple[WorkerState, Arrivals]]()
        for worker in states:
            arrivals = worker.link.arrivals
            if arrivals is None:
                continue
            paused[arrivals] = worker
            descriptor = arrivals.pause() if worker.reading.acquire(blocking=False) else None
            if descriptor is not None and not self._is(worker, done):  # its thread may have read it just now
                poller.register(descriptor, select.POLLIN)
                waited_for[descriptor] = worker, arrivals
            else:
                _resume(paused, worker, arrivals)
        while waited_for and (left := deadline - time.monotonic()) > 0:
            for descriptor, _ in poller.poll(left * 1e3):
                worker, arrivals = waited_for[descriptor]
                if not self._take_applied(worker, arrivals) or self._is(worker, done):
                    poller.unregister(descriptor)
                    del waited_for[descriptor]
                    _resume(paused, worker, arrivals)
        _resume_all(paused)  # the caller may wait longer, for workers of other links

    def stop(self) -> None:
        """Let the threads of workers read again what the calling thread has paused."""
        me = threading.get_ident()
        if (paused := self._paused.get(me)) is not None:
            _resume_all(paused)
            if me not in self._attending:  # else a signal handler has called this
                self._paused.pop(me, None)

    def _is(self, worker: WorkerState, done: _WorkerTest) -> bool:
        with self._table.lock:
            return done(worker)

    def _take_applied(self, worker: WorkerState, arrivals: Arrivals) -> bool:
        """Act on an APPLIED that arrived, if nothing else has to be done; return whether one did.

        The frame is removed afterwards: if a signal handler raises in between, it is found again.
        """
        try:
            found = arrivals.peek()
        except FormatError:  # the worker's thread finds it too
            return False
        if found is None or found[0].kind is not Kind.APPLIED:
            return False
        chunk, nbytes = found
        with self._table.lock:
            update, group = worker.inflight, worker.group
            if update is not None and (
                group is None or group.target(update.version_id, together=worker.together) != update.version
            ):
                return False  # a newer update is to be sent
            self._record(worker, chunk)
        arrivals.skip(nbytes)
        return True


def _resume_all(paused: _Paused) -> None:
    for arrivals, worker in list(paused.items()):
        _resume(paused, worker, arrivals)


def _resume(paused: _Paused, worker: WorkerState, arrivals: Arrivals) -> None:
    """Have the thread of a worker read again what arrives from it."""
    arrivals.resume()
    if worker.reading._is_owned():  # else pause() alone was called, or another thread reads
        worker.reading.release()
    paused.pop(arrivals, None)  # last: a signal handler may raise at any time


class Patience:
    """The time for which workers are waited for.

    Args:
        timeout: seconds from ``since`` on, a time of the monotonic clock; None is now.
        patient: whether to leave out, for each worker, the time during which something is still written to
            it. That time counts if the worker joins again meanwhile.
    """

    def __init__(self, timeout: float, *, patient: bool = True, since: float | None = None) -> None:
        self.timeout = timeout
        # End of the wait for workers that nothing is written to.
        self.deadline: float = (time.monotonic() if since is None else since) + timeout
        self._patient = patient
        # of each worker: its connection, its deadline, and since when it is being written to
        self._later: dict[int, tuple[int, float, float | None]] = {}

    def wait(
        self,
        changed: threading.Condition,
        states: Sequence[WorkerState],
        done: _WorkerTest,
        limit: float = math.inf,
        stop: Callable[[], bool] = lambda: False,
    ) -> bool:
        """Wait until workers are ``done``, or it takes too long; return False if ``stop()`` ended the wait.

        ``limit`` is an earlier end, on the monotonic clock. The caller holds the lock of ``changed``.
        """
        while waited_for := [worker for worker in states if not done(worker)]:
            now = time.monotonic()
            last = min(limit, max(self._deadline_of(worker, now) for worker in waited_for))
            if now >= last:
                break
            if stop():
                return False
            changed.wait(last - now)
        return True

    def _deadline_of(self, worker: WorkerState, now: float) -> float:
        connection, deadline, since = self._later.get(worker.idx, (worker.connections, self.deadline, None))
        if connection != worker.connections:
            return self.deadline
        if since is not None:
            deadline += now - since
        writing = self._patient and worker.writing and not isinstance(worker.inflight, ChunkedUpdate)
        self._later[worker.idx] = connection, deadline, now if writing else None
        return deadline


def is_settled(worker: WorkerState, version: int) -> bool:
    """Return whether a worker has applied ``version`` or a newer one, failed or left."""
    if worker.reached >= version or not worker.awaited:
        return True
    return bool(worker.failures) and worker.failure(version) is not None
