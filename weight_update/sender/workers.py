"""The workers of a sender: what each of them has, its send group, and the thread that writes to it."""

from __future__ import annotations

import queue
import threading
import time
import weakref
from collections.abc import Callable, Collection, Hashable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from weight_update.encodings import DeltaEncoding, Encoding
from weight_update.errors import undo_on_error
from weight_update.report import WorkerEvent
from weight_update.sender.buffers import MIXED, BufferPool, EncodedUpdate, VersionId
from weight_update.sender.groups.base import FullGroup, SendGroup
from weight_update.sender.groups.delta import DeltaGroup
from weight_update.sender.observers import Observers, PendingUpdate
from weight_update.strategy.named_weights import NamedWeights
from weight_update.threads import InterruptibleCondition, start_thread
from weight_update.transports.base import TransportBackend
from weight_update.transports.watched_process import may_run
from weight_update.wire.frames import Step
from weight_update.wire.schema import WeightSchema

NOBODY = -1
"""Index of a late joiner that never comes: a sender of no workers keeps weights for it, and so for others."""

_CHECK_SECONDS = 0.05
_BUSY_SECONDS = 0.25  # after which a worker that has not answered an update is waited for no longer
_MAX_FAILURES, _MAX_UPDATES = 8, 4


class Outbox:
    """A thread that writes to one worker, so that other workers do not wait for its link."""

    def __init__(self, idx: int, changed: threading.Condition) -> None:
        self._changed = changed
        self._jobs: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._left = 0
        with undo_on_error(self.close):  # the thread may run, and nobody else could end it
            start_thread(f"weight_update-outbox-{idx}", self._run, in_order=True)

    @property
    def busy(self) -> bool:
        """Whether a job runs or waits."""
        return self._left > 0

    def put(self, job: Callable[[], None]) -> None:
        """Have the thread call ``job``, which must not raise, last. The caller holds the sender's lock."""
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


class ReceiverId(NamedTuple):
    """Identity of a receiver: its random name (None if it gave none) and its process."""

    instance: str | None
    pid: int


@dataclass(eq=False)
class WorkerState:
    """The sender's account of one worker: its link, its weights, and how it was lost."""

    idx: int
    link: TransportBackend
    schema: WeightSchema = field(repr=False)  # the weights it is to have, in the sender's dtypes
    tracked: frozenset[str] | None = field(default=None, repr=False)  # names that updates carry; None: all
    late: bool = False  # whether it is a late joiner; nobody waits for it once it has left
    receiver: ReceiverId | None = None  # the receiver that was last admitted under this index
    admitted_until: float = 0.0  # monotonic time by which an admitted connection reaches the link
    connections: int = 0  # changes with each connection; tells an error of one from an error of the next
    # Tells whether the process of a worker index lives; None if unknown, as after a restart.
    alive: Callable[[int], bool] | None = field(default=None, repr=False)
    replaced: bool = False  # whether another receiver is about to join in its place

    joining: bool = False  # whether it is being welcomed, and is sent the newest weights in a moment
    joined: bool = False  # whether it was welcomed, and its connection has not ended since
    connecting: bool = False  # whether it joined by connect(), which waits for first weights
    pid: int = 0  # its process when it joined last
    left: bool = False  # whether it said goodbye
    leaving: bool = False  # whether connect() has raised its error, so that its end is no other error
    lost: Exception | None = None  # error by which its link ended

    group: SendGroup | None = None  # None until it first joins
    has: VersionId | None = None  # the weights it has; None if unknown
    applied: EncodedUpdate | None = None  # where memory is shared, the update that it reads
    staged: int | None = None  # the version that it keeps until COMMIT or ABORT
    inflight: EncodedUpdate | None = None  # the update it was sent and has not answered yet
    sent_at: float = 0.0  # monotonic time at which `inflight` was set
    reached: int = -1  # the newest version it ever applied; kept when it leaves
    arrived: bool = False  # whether it has applied weights since it joined
    complete: bool = False  # whether a late joiner has all models that are sent together
    failures: dict[int, Exception] = field(default_factory=dict)  # of the last versions that it lacks
    apply_seconds: float = 0.0  # times that it reported with the newest version
    stall_seconds: float = 0.0
    # Whether observers were told, since it was last connected, of an update that it missed.
    absence_told: bool = False
    applied_told: int = -1  # the newest version of which an event told observers that it applied it
    late_told: float = 0.0  # the `sent_at` of the update that observers were told it is late with
    outbox: Outbox | None = None  # thread that writes to it; None until its link is one that may block
    # Lock of whoever writes to the link; a signal handler may take it again, for shutdown().
    sending: Any = field(default_factory=threading.RLock)
    thread: threading.Thread | None = None  # reads from the link; None until started, and for `NOBODY`
    reading: Any = field(default_factory=threading.RLock)  # of whoever reads from the link, and acts on it

    @property
    def required(self) -> bool:
        """Whether it is an error that the worker lacks an update; late joiners may leave at any time."""
        return self.joined or not (self.late and self.left)

    @property
    def together(self) -> bool:
        """Whether it takes part in group commits; a late joiner gets its models one by one at first."""
        return self.complete or not self.late

    @property
    def error(self) -> Exception | None:
        """The error that keeps the worker from having weights: its own, or else how it was lost."""
        return next(iter(self.failures.values()), self.lost)

    @property
    def version(self) -> int | None:
        """Number of the weights it has; None if they are unknown or mixed."""
        return None if self.has is None or self.has is MIXED else self.has.version

    @property
    def has_ended(self) -> bool:
        """Whether its process is known to have ended."""
        try:
            return self.alive is not None and not self.alive(self.idx)
        except Exception:  # noqa: BLE001 - of a user's function, such as for a process that was closed
            return False

    @property
    def lacks(self) -> int | None:
        """The version that it should be sent; None if it has that, or failed to apply it."""
        target = None if self.group is None else self.group.target(self.has, together=self.together)
        if target is None or target in self.failures:
            return None
        version = self.version
        return target if version is None or version < target else None

    @property
    def writing(self) -> bool:
        """Whether frames to it are being written by its thread, or about to be."""
        return self.outbox is not None and self.outbox.busy

    @property
    def awaited(self) -> bool:
        """Whether an update is on its way to the worker or about to be sent.

        A version in a pipeline is not kept for workers that join meanwhile.
        """
        idle = self.inflight is None and self.lacks is None and not self.writing
        return self.joining or (self.joined and not idle)

    def failure(self, version: int) -> Exception | None:
        """Return why the worker has neither ``version`` nor a newer one, and will not get one by itself."""
        newer = [error for number, error in self.failures.items() if number > version]
        return self.failures.get(version) or (newer[-1] if newer and self.lacks is None else None)

    @property
    def joining_error(self) -> Exception | None:
        """The error with which it failed to apply the weights that it joined with; None if there is none."""
        return next(reversed(self.failures.values()), None) if self.has is None else None

    def fail(self, version: int, error: Exception) -> None:
        """Note why it does not have ``version``; keep the last few errors, for which callers ask later."""
        self.failures[version] = error
        for old in list(self.failures)[:-_MAX_FAILURES]:
            del self.failures[old]

    def close_outbox(self) -> None:
        """End the thread that writes to it, if there is one."""
        if self.outbox is not None:
            self.outbox.close()
            self.outbox = None

    @property
    def may_read(self) -> bool:
        """Whether the worker may still read memory of the sender, connected or not."""
        link = self.link.capabilities
        return link.shares_memory and (not link.pid_is_visible or may_run(self.pid))

    def mark_disconnected(self) -> None:
        """Stop expecting its answers. Memory that it may still read is never written again."""
        if self.may_read:
            for update in filter(None, (self.applied, self.inflight)):
                update.abandon()
        self.joined, self.joining, self.has, self.staged = False, False, None, None
        self.inflight = self.applied = None


WorkerWeights = Mapping[WorkerState, NamedWeights]


class WorkerTable:
    """All workers of a sender, and the lock and condition to wait for them.

    A late joiner that has left is removed. It is remembered for as long as some object refers to it, such as
    the handle of an update that it missed.
    """

    def __init__(self, states: Iterable[WorkerState]) -> None:
        # The sender's lock. `with lock` is safe where signal handlers raise. `with changed` is not, because a
        # handler may run inside the methods of a condition.
        self.lock = threading.RLock()
        self.changed = InterruptibleCondition(self.lock)  # notified when the state of a worker changed
        self.closed = False  # whether the sender was shut down; no worker is admitted from then on
        self.version: int | None = None  # the newest version that a worker applied
        self.observers = Observers()
        self.told = -1  # the newest update of which observers were told, or do not want to be told
        self._states = {worker.idx: worker for worker in states}
        self._removed: weakref.WeakValueDictionary[int, WorkerState] = weakref.WeakValueDictionary()

    def __iter__(self) -> Iterator[WorkerState]:
        return iter(self._states.values())

    def __contains__(self, idx: object) -> bool:
        return idx in self._states

    def __getitem__(self, idx: int) -> WorkerState:
        return self._states[idx]

    def tell(self, event: WorkerEvent | PendingUpdate) -> None:
        """Tell observers of an event, or of an update once it is settled."""
        self.observers.tell(event)
        with self.lock:
            self.changed.notify_all()  # their thread may wait for an update

    def add(self, worker: WorkerState) -> None:
        """Add a worker. Iterations that have begun do not meet it."""
        with self.lock:
            self._states = {**self._states, worker.idx: worker}

    def remove(self, worker: WorkerState) -> None:
        """Remove a late joiner that has left."""
        with self.lock:
            self._removed[worker.idx] = worker  # first: known() finds it in one of the two
            self._states = {idx: one for idx, one in self._states.items() if one is not worker}
            self.changed.notify_all()

    def known(self, workers: Iterable[int]) -> list[WorkerState]:
        """Return the workers of these indices; late joiners that were forgotten are left out."""
        found, gone = self._states, self._removed
        return [one for idx in workers if (one := found.get(idx) or gone.get(idx)) is not None]

    @property
    def present(self) -> dict[int, WorkerState]:
        """All initial workers and the late joiners that are connected, by index, in its order."""
        return {idx: one for idx, one in sorted(self._states.items()) if one.joined or not one.late}


class GroupAssignment:
    """Assigns workers to send groups. A group is closed when its last worker leaves it."""

    def __init__(self, table: WorkerTable, encoding: Encoding, pool: BufferPool) -> None:
        # Held by the thread that calls these methods, and those of groups that encode or commit.
        self.lock = threading.Lock()
        self.encoding = encoding
        self._table, self._pool = table, pool

    def all(self) -> dict[SendGroup, list[WorkerState]]:
        """Return the workers of each group."""
        found: dict[SendGroup, list[WorkerState]] = {}
        for worker in self._table:
            if worker.group is not None:
                found.setdefault(worker.group, []).append(worker)
        return found

    def move(self, states: list[WorkerState], group: SendGroup | None) -> None:
        """Move workers into ``group``, or out of theirs."""
        with self._table.lock:
            left = {worker.group for worker in states if worker.group is not None} - {group}
            for worker in states:
                worker.group = group
            if left:
                self.close_unused(left)

    def close_unused(self, left: Iterable[SendGroup]) -> None:
        """Close those of the groups that have no workers."""
        for group in {*left}.difference(self.all()):
            group.close()

    def join(self, worker: WorkerState, wire: WeightSchema) -> SendGroup | None:
        """Return the group of a worker that joins, if it has one, or joins late.

        That is, if possible, the group for weights that travel best as ``wire``.
        """
        if worker.group is None and worker.late:
            newest = max(self.all(), key=_version, default=None)
            if newest is not None:
                self.move([worker], newest)
        group = worker.group
        if group is None or wire.digest == group.schema.digest:
            return group
        best = self._find(group.source, wire)
        if best is None and group.schema.digest != worker.schema.digest:
            unrounded = self._find(group.source, worker.schema)
            best = unrounded or self._new(wire, worker.tracked, group.source)  # a new one has no weights yet
        if best is not None:
            self.move([worker], best)
        return best or group

    def assign_first(
        self, worker: WorkerState, wire: WeightSchema, version: int, named: NamedWeights | None
    ) -> SendGroup:
        """Find or make the first group of a worker, with ``named`` as its weights."""
        source = (version, id(named))
        group = self._find(source, wire)
        if group is None:
            group = self._new(wire, worker.tracked, source)
            if named is not None:
                group.stage(Step.of(version, named.extra), named)
                group.commit()
        self.move([worker], group)
        self._pool.trim(group.whole_bytes)
        return group

    def _find(self, source: Hashable, wire: WeightSchema) -> SendGroup | None:
        alike = (one for one in self.all() if one.source == source)
        return next((one for one in alike if one.schema.digest == wire.digest), None)

    def _new(self, schema: WeightSchema, tracked: frozenset[str] | None, source: Hashable) -> SendGroup:
        group: SendGroup
        if isinstance(self.encoding, DeltaEncoding):
            group = DeltaGroup(schema, self._pool, self.encoding, tracked)
        else:
            group = FullGroup(schema, self._pool, self.encoding.whole)
        group.source = source
        return group

    def release_departed(self) -> None:
        """Release updates held for late joiners that have left."""
        with self._table.lock:
            gone = [one for one in self._table if one.late and not one.joined and one.lost is not None]
            if gone:
                self.move(gone, None)

    def partition(self, weights: WorkerWeights, *, apart: bool) -> list[list[WorkerState]]:
        """Return lists of workers that can be sent the same bytes; workers without a group are left out.

        ``apart`` keeps workers of different groups apart even if they could be sent the same.
        """
        parts: dict[tuple[Any, ...], list[WorkerState]] = {}
        for worker, named in weights.items():
            if (group := worker.group) is not None:
                alike = group.schema.digest, worker.tracked, group.origin
                key = id(named), *alike, apart and id(group)
                parts.setdefault(key, []).append(worker)
        return list(parts.values())

    def await_room(self, groups: Collection[SendGroup], timeout: float) -> None:
        """Wait while so many updates, of all ``groups``, are in use that one more would cost too much memory.

        A worker that is busy, as in ``hold()``, keeps up to two updates until it goes on. The limit grows
        with the number of such workers, so that they delay neither the caller nor other workers.
        """
        deadline, busy = time.monotonic() + timeout, min(timeout, _BUSY_SECONDS)
        with self._table.lock:
            while (now := time.monotonic()) < deadline:
                limit, kept = _MAX_UPDATES + 2 * (len(groups) - 1), list[EncodedUpdate | None]()
                for group in groups:
                    kept += group.kept
                for worker in self._table:
                    kept += worker.applied, worker.inflight
                    if worker.inflight is not None and now - worker.sent_at > busy:
                        limit += 2
                if len({one.version_id for one in kept if one is not None}) < limit:
                    return
                self._table.changed.wait(_CHECK_SECONDS)

    def group_for(
        self, states: list[WorkerState], groups: Mapping[SendGroup, list[WorkerState]]
    ) -> SendGroup:
        """Return a group for these workers alone, which :meth:`partition` put together.

        ``groups`` are all groups. The caller moves the workers to theirs once the update is staged.
        """
        own = [group for group, workers in groups.items() if set(workers).issubset(states)]
        if own:
            return max(own, key=_version)
        assert states[0].group is not None
        return states[0].group.fork()


def _version(group: SendGroup) -> int:
    return -1 if group.version_id is None else group.version_id.version
