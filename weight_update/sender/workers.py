"""The workers of a sender, and what each of them has."""

from __future__ import annotations

import threading
import time
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import NamedTuple, Protocol

from weight_update.errors import LinkClosedError, SchemaMismatchError, SyncFailedError, SyncTimeoutError
from weight_update.report import SyncReport
from weight_update.sender.buffers import MIXED, EncodedUpdate, VersionId
from weight_update.sender.groups.full import SendGroup
from weight_update.transports.base import TransportBackend
from weight_update.transports.shared_memory.slots import may_run
from weight_update.wire.schema import WeightSchema
from weight_update.wire.updates import Step

__all__ = ["WorkerState", "WorkerTable"]

_LOOK_SECONDS = 0.2
_MAX_FAILURES = 8


class ChunkedUpdate(Protocol):
    """A version that workers are being sent chunk by chunk.

    See :class:`~weight_update.sender.pipeline.Pipeline`.
    """

    step: Step

    def taken(self, worker: WorkerState, index: int) -> None:
        """A worker has read the chunks up to ``index``."""

    def leave(self, worker: WorkerState, *, reading: bool) -> None:
        """A worker has all, or will not have it."""

    def busy(self, worker: WorkerState) -> bool:
        """Whether a thread still writes to a worker that left."""


class ReceiverId(NamedTuple):
    """The receiver that an index belongs to.

    Attributes:
        instance: its random name; None if it gave none.
        pid: its process.
    """

    instance: str | None
    pid: int


class WorkerState:
    """One worker: its link, what it is meant to have, what it has, and how it was lost.

    Attributes:
        schema: what it is to have, in the sender's dtypes.
        tracked: names of the weights that updates carry; None for all.
        group: what it is sent; None until it first joins.
        has: the weights it has; None if unknown.
        applied: what it has; where memory is shared, what it reads.
        inflight: what it was sent and has not answered yet.
        pipeline: what it is just being sent chunk by chunk; ``former``: what it was last sent so.
        writing: whether a thread is sending ``inflight``, or about to.
        reached: the newest version it ever applied; not forgotten when it leaves.
        failures: why it did not apply a version, for the last few.
        guest: whether it came beyond the first number of workers; nobody waits for it when it has gone.
        left: whether it said goodbye.
        replaced: whether another receiver is about to join in its place.
        receiver: the receiver that was last admitted under this index.
        admitted: until when, on the monotonic clock, a connection that was admitted may reach the link.
    """

    def __init__(
        self,
        idx: int,
        link: TransportBackend,
        schema: WeightSchema,
        tracked: frozenset[str] | None = None,
        *,
        guest: bool = False,
    ) -> None:
        self.idx, self.link, self.schema, self.tracked = idx, link, schema, tracked
        self.guest, self.left = guest, False
        self.group: SendGroup | None = None
        self.joined = False
        self.replaced = False
        self.receiver: ReceiverId | None = None
        self.admitted = 0.0
        self.pid = 0
        self.has: VersionId | None = None
        self.reached = -1
        self.staged: int | None = None
        self.applied: EncodedUpdate | None = None
        self.inflight: EncodedUpdate | None = None
        self.pipeline: ChunkedUpdate | None = None
        self.former: ChunkedUpdate | None = None
        self.writing = False
        self.since = 0.0
        self.lost: Exception | None = None
        self.failures: dict[int, Exception] = {}
        self.apply_seconds = 0.0
        self.stall_seconds = 0.0
        self.sending = threading.Lock()
        self.thread: threading.Thread | None = None

    @property
    def missed(self) -> bool:
        """Whether it is an error that it does not have an update; guests may leave whenever they like."""
        return self.joined or not (self.guest and self.left)

    def trouble(self) -> Exception | None:
        """What keeps it from having the weights: its own error, else how it was lost."""
        return next(iter(self.failures.values()), self.lost)

    @property
    def version(self) -> int | None:
        """Number of the weights it has."""
        return None if self.has is None or self.has is MIXED else self.has.version

    @property
    def lacks(self) -> int | None:
        """The version that it should be sent; None if it has that, or failed to apply it."""
        target = None if self.group is None else self.group.target(self.has)
        if target is None or target in self.failures:
            return None
        return None if self.version is not None and self.version >= target else target

    @property
    def awaited(self) -> bool:
        """Whether it is here, and an update is on its way to it or about to be sent.

        Of a version that travels in chunks nothing is kept for a worker that joins meanwhile.
        """
        idle = self.inflight is None and self.pipeline is None and self.lacks is None and not self.writing
        return self.joined and not idle

    def failure(self, version: int) -> Exception | None:
        """Why it has neither ``version`` nor a newer one in its place, and will not get one by itself."""
        if version in self.failures:
            return self.failures[version]
        newer = [error for number, error in self.failures.items() if number > version]
        return newer[-1] if newer and self.lacks is None else None

    def forget_old_failures(self) -> None:
        """Keep the last few: whoever sends without waiting asks for them later."""
        for version in list(self.failures)[:-_MAX_FAILURES]:
            del self.failures[version]

    def hold(self, role: str, update: EncodedUpdate | None) -> None:
        """Set ``applied`` or ``inflight``, keeping count of who uses which memory."""
        old: EncodedUpdate | None = self.__dict__[role]
        self.__dict__[role] = update.retain() if update is not None else None
        if old is not None:
            old.release()

    @property
    def may_read(self) -> bool:
        """Whether it may still read memory of ours, connected or not."""
        return self.link.shares_memory and (not self.link.near or may_run(self.pid))

    def let_go(self) -> None:
        """Stop counting on its answer. If it may still read our memory, never write there again."""
        reading = self.may_read
        if self.pipeline is not None:
            self.pipeline.leave(self, reading=reading)
        if reading:
            for update in (self.applied, self.inflight):
                for slot in update.slots if update is not None else ():
                    slot.abandoned = True
        self.joined, self.has, self.staged = False, None, None
        self.hold("inflight", None)
        self.hold("applied", None)


class WorkerTable:
    """All workers; who waits for one of them waits here.

    A late joiner that has gone is removed. It is remembered for as long as somebody holds it, such as the
    handle of an update that it missed.

    Args:
        states: the workers, by index.

    Attributes:
        changed: the sender's lock; notified whenever the state of a worker changed.
    """

    def __init__(self, states: Iterable[WorkerState]) -> None:
        self.changed = threading.Condition(threading.RLock())
        self._states = {worker.idx: worker for worker in states}
        self._removed: weakref.WeakValueDictionary[int, WorkerState] = weakref.WeakValueDictionary()

    def __iter__(self) -> Iterator[WorkerState]:
        return iter(self._states.values())

    def __contains__(self, idx: object) -> bool:
        return idx in self._states

    def __getitem__(self, idx: int) -> WorkerState:
        return self._states[idx]

    def add(self, worker: WorkerState) -> None:
        """One more worker; whoever is walking through the others does not meet it."""
        with self.changed:
            self._states = {**self._states, worker.idx: worker}

    def remove(self, worker: WorkerState) -> None:
        """Forget a late joiner that has gone."""
        with self.changed:
            self._states = {idx: one for idx, one in self._states.items() if one is not worker}
            self._removed[worker.idx] = worker

    def known(self, workers: Iterable[int]) -> list[WorkerState]:
        """Return the workers of these indices, without late joiners that are forgotten."""
        with self.changed:
            found = [self._states.get(idx) or self._removed.get(idx) for idx in workers]
        return [worker for worker in found if worker is not None]

    def removed(self, idx: int) -> WorkerState | None:
        """Return a late joiner that has gone, if somebody still holds it."""
        return self._removed.get(idx)

    @property
    def present(self) -> list[WorkerState]:
        """Return all initial workers and the late joiners that are connected, by index."""
        return sorted(
            (worker for worker in self if worker.joined or not worker.guest), key=lambda worker: worker.idx
        )

    @property
    def workers(self) -> tuple[int, ...]:
        """Return the indices of :attr:`present`."""
        return tuple(worker.idx for worker in self.present)

    @property
    def expected(self) -> list[WorkerState]:
        """Those of the first number."""
        return [worker for worker in self if not worker.guest]

    @property
    def absent(self) -> list[WorkerState]:
        """Those of the first number that have not come, for no known reason."""
        return [worker for worker in self.expected if not worker.joined and worker.trouble() is None]

    @property
    def unsettled(self) -> list[WorkerState]:
        """Those of the first number that have neither weights nor a reason why not."""
        return [
            worker
            for worker in self.expected
            if worker.trouble() is None and (not worker.joined or worker.version is None)
        ]

    def await_none(
        self, missing: Callable[[], list[WorkerState]], deadline: float, alive: Callable[[int], bool] | None
    ) -> None:
        """Wait until nobody is ``missing`` or the deadline has passed.

        Args:
            missing: who is waited for.
            deadline: on the monotonic clock.
            alive: tells whether the process of a worker lives, if the caller knows.
        """
        with self.changed:
            while missing() and time.monotonic() < deadline:
                for worker in missing():
                    if alive is not None and not alive(worker.idx):
                        worker.lost = LinkClosedError("its process died before it connected")
                self.changed.wait(_LOOK_SECONDS)

    def require_all(self, timeout: float, refusals: Iterable[str] = ()) -> None:
        """Raise the error of those of the first number that have no weights after so many seconds, if any.

        Args:
            timeout: seconds that were waited.
            refusals: why the listener refused join requests meanwhile.

        Raises:
            SchemaMismatchError, SyncTimeoutError, SyncFailedError: see ``WeightSyncScheme.connect``.
        """
        with self.changed:
            failures = {
                worker.idx: error for worker in self.expected if (error := worker.trouble()) is not None
            }
            late = [worker.idx for worker in self.unsettled]
            guests = [worker.idx for worker in self if worker.guest and worker.joined]
            refused = [
                f"worker {worker.idx}: {worker.lost}" for worker in self if worker.guest and worker.lost
            ]
        _raise_connect(failures, late, guests, timeout, [*refusals, *refused])

    def wait_staged(self, version: int, workers: Iterable[int], timeout: float) -> dict[int, Exception]:
        """Wait until workers have ``version`` staged; the errors of those that do not."""

        def settled(worker: WorkerState) -> bool:
            return worker.staged == version or not worker.joined or version in worker.failures

        return self._wait(version, workers, timeout, settled, lambda worker: worker.staged == version, True)

    def wait_applied(
        self, version: int, workers: Iterable[int], timeout: float, *, patient: bool
    ) -> dict[int, Exception]:
        """Wait until workers have applied ``version`` or a newer one; the errors of those that did not.

        Args:
            version: number of the update.
            workers: indices.
            timeout: seconds.
            patient: do not count the time in which something is still being written to one of them.
        """

        def has_it(worker: WorkerState) -> bool:
            return worker.reached >= version

        def settled(worker: WorkerState) -> bool:
            return has_it(worker) or not worker.awaited or worker.failure(version) is not None

        return self._wait(version, workers, timeout, settled, has_it, patient)

    def _wait(
        self,
        version: int,
        workers: Iterable[int],
        timeout: float,
        settled: Callable[[WorkerState], bool],
        good: Callable[[WorkerState], bool],
        patient: bool,
    ) -> dict[int, Exception]:
        states = self.known(workers)
        deadline = time.monotonic() + timeout
        with self.changed:
            while waited_for := [worker for worker in states if not settled(worker)]:
                if patient and any(worker.writing for worker in waited_for):
                    deadline = time.monotonic() + timeout
                if time.monotonic() >= deadline:
                    break
                self.changed.wait(deadline - time.monotonic())
            bad = [worker for worker in states if not good(worker) and worker.missed]
            return {worker.idx: _reason(worker, version, timeout) for worker in bad}

    def failures(self, version: int, workers: Iterable[int]) -> dict[int, Exception]:
        """The errors known by now of workers that will not apply ``version``; does not wait."""
        with self.changed:
            found = {}
            for worker in self.known(workers):
                if version in worker.failures:
                    found[worker.idx] = worker.failures[version]
                elif not worker.joined and worker.reached < version and worker.missed:
                    found[worker.idx] = worker.lost or LinkClosedError("it is not connected")
            return found

    def settled(self, version: int, workers: Iterable[int]) -> bool:
        """Whether nothing more is to be waited for."""
        with self.changed:
            return all(
                not worker.joined or worker.reached >= version or worker.failure(version) is not None
                for worker in self.known(workers)
            )

    def fill(self, report: SyncReport, workers: Iterable[int]) -> None:
        """Enter into ``report`` what the workers said."""
        with self.changed:
            for worker in self.known(workers):
                if worker.reached >= report.version:
                    report.apply_seconds[worker.idx] = worker.apply_seconds
                    report.stall_seconds[worker.idx] = worker.stall_seconds


def _reason(worker: WorkerState, version: int, timeout: float) -> Exception:
    """Why a worker does not have ``version`` after so many seconds."""
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


def _raise_connect(
    failures: Mapping[int, Exception],
    late: list[int],
    guests: list[int],
    timeout: float,
    refusals: list[str],
) -> None:
    refused = "".join(f"\n  {reason}" for reason in dict.fromkeys(refusals))
    if refused:
        refused = f"\njoin requests were refused meanwhile:{refused}"
    mismatches = [error for error in failures.values() if isinstance(error, SchemaMismatchError)]
    if mismatches:
        problems = tuple(line for error in mismatches for line in error.problems)
        raise SchemaMismatchError(str(mismatches[0]).partition("\n")[0], problems)
    if failures:
        silent = {idx: SyncTimeoutError(f"did not come within {timeout:g} s") for idx in late}
        failures = {**failures, **silent}
        lines = "".join(f"\n  worker {idx}: {error}" for idx, error in sorted(failures.items()))
        raise SyncFailedError(f"workers could not connect:{lines}{refused}", failures)
    if late:
        others = f" (others did: {guests}; do the indices match?)" if guests else ""
        raise SyncTimeoutError(
            f"workers {late} did not connect within {timeout:g} s{others}"
            f"{refused or '; have they called connect()?'}"
        )
