"""The sending end of a scheme: encodes each update once and serves every worker."""

from __future__ import annotations

import os
import time
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from contextlib import ExitStack
from typing import TypeVar

from weight_update.encodings import DeltaEncoding
from weight_update.errors import JoinRefusedError
from weight_update.report import SyncReport
from weight_update.sender.buffers import BufferPool
from weight_update.sender.delivery import AnswerThreads, Delivery
from weight_update.sender.groups.base import SendGroup, UpdateFacts
from weight_update.sender.handle import AnswerReader, Outcomes
from weight_update.sender.joining import Admission, absent, require_weights, wait_for_none, without_weights
from weight_update.sender.observed import ObservedUpdate
from weight_update.sender.pipeline import PipelineSender
from weight_update.sender.workers import NOBODY, GroupAssignment, WorkerState, WorkerTable, WorkerWeights
from weight_update.strategy.named_weights import NamedWeights
from weight_update.strategy.strategy import WeightStrategy
from weight_update.transports.base import TransportBackend
from weight_update.wire.frames import Kind, Step, WeightChunk
from weight_update.wire.schema import WeightSchema

_T = TypeVar("_T")
_PARTING_SECONDS = 5.0
_ADMITTED_SECONDS = 30.0
"""Seconds within which a connection reaches its link once its worker was admitted."""


class Sender(Outcomes):
    """Sends versions of weights to workers.

    Args:
        links: the sender's end of the link for each worker index; ``NOBODY`` has one to allocate memory.
        schemas: the weights that each worker is to have; workers with equal schemas share the encoding.
        tracked: names of the weights that updates carry, for each worker; None for all of its schema.

    Attributes:
        admission: welcomes or refuses receivers.
        refusals: reasons for which the listener refused join requests, for the errors of :meth:`connect`.
    """

    def __init__(
        self,
        links: Mapping[int, TransportBackend],
        schemas: Mapping[int, WeightSchema],
        tracked: Mapping[int, frozenset[str] | None],
        strategy: WeightStrategy,
        token: str,
        timeout: float,
    ) -> None:
        table = WorkerTable(
            WorkerState(idx, link, schemas[idx], tracked[idx], late=idx == NOBODY)
            for idx, link in links.items()
        )
        super().__init__(table, timeout)
        self.refusals: Iterable[str] = ()
        self._strategy = strategy
        self._number = -1  # of the last version
        self._next = 0  # number of the next version
        self._first_weights: WorkerWeights = {}  # for workers that join while connect() waits
        self._first_label = strategy.encoding.whole.label  # of the weights that a worker gets when it joins
        self._pid = os.getpid()
        first = next(iter(links.values()))
        self._pool = BufferPool(first, table.lock, table.changed, timeout)
        self._delivery = Delivery(table, timeout)
        self._groups = GroupAssignment(table, strategy.encoding, self._pool)
        self._pipelines: PipelineSender | None = None
        if (limit := strategy.max_in_flight) is not None:
            self._pipelines = PipelineSender(self._groups, limit, self._pool, self._delivery)
        self.admission = Admission(table, self._delivery, strategy, token, self._group_to_join)
        self._answers = AnswerThreads(table, self._delivery, self._groups, self.admission.welcome)
        self.reader = AnswerReader(table, self._answers.record_result)
        for worker in table:
            self.admission.watch(worker)
        try:
            for schema in {schema.digest: schema for schema in schemas.values()}.values():
                self._reserve(schema)
        except BaseException:
            self._pool.close()  # the error, and whoever holds it, keeps no memory
            raise

    def _reserve(self, schema: WeightSchema) -> None:
        """Allocate the memory that updates of ``schema`` need; check the options of the encoding."""
        encoding, limit = self._strategy.encoding, self._strategy.max_in_flight
        # a device that this machine lacks, and prefixes that match nothing, are errors at once
        encoding.whole.encoder(schema)
        if isinstance(encoding, DeltaEncoding):
            encoding.tracker(schema, None)
            if len(encoding.bootstraps(schema)) < len(schema.tensors):
                self._first_label = encoding.label
        sizes = Counter(encoding.whole.payload_sizes(schema))
        if limit is not None:
            sizes = Counter({max(sizes): min(limit, sizes.total())})
        copies = 1 if encoding.receiver_copies else 2
        self._pool.reserve({nbytes: copies * count for nbytes, count in sizes.items()})

    @property
    def serving(self) -> bool:
        """Whether :meth:`connect` was called, and :meth:`close` was not."""
        return self._number >= 0 and not self.table.closed

    @property
    def closed(self) -> bool:
        """Whether :meth:`close` was called."""
        return self.table.closed

    # -- joining -----------------------------------------------------------------------------------

    def admit(self, idx: int, make_link: Callable[[], TransportBackend]) -> TransportBackend:
        """Return the link of a late joiner, which gets the weights that all other workers have.

        Raise JoinRefusedError after :meth:`close`.
        """
        with self.table.lock:
            if idx in self.table and not self.table[idx].link.capabilities.allows_rejoin:
                # Its link admits no second worker, so the one before is forgotten first.
                if self.table[idx].thread is None:  # nothing was read from it yet
                    self.table.remove(self.table[idx])
                self.table.changed.wait_for(lambda: idx not in self.table or self.table.closed, self.timeout)
            if self.table.closed:
                raise JoinRefusedError("the sender was shut down")
            if idx not in self.table:
                like, link = next(iter(self.table)), make_link()
                new = WorkerState(idx, link, like.schema, like.tracked, late=True)
                worker = next(iter(self.table.known([idx])), new)  # it may be remembered
                worker.link = link
                self.admission.watch(worker)
                self.table.add(worker)
            worker = self.table[idx]
            worker.admitted_until = time.monotonic() + _ADMITTED_SECONDS
            if self.serving:
                self._answers.start(worker)
            return worker.link

    def dismiss(self, error: Exception) -> None:
        """Refuse workers that wait for weights, because ``connect()`` failed with ``error``."""
        self.admission.dismiss(error)

    def connect(
        self, weights: Mapping[int, NamedWeights], timeout: float, alive: Callable[[int], bool] | None = None
    ) -> SyncReport:
        """Give the first weights to every worker and wait until all have them.

        Workers whose ``weights`` are one object share its encoding. ``alive`` tells whether the process of
        a worker index lives, if the caller knows.

        Raises:
            SchemaMismatchError: a worker's model has other weights.
            SyncTimeoutError: workers did not connect in time; the message names them.
            SyncFailedError: workers failed or were lost.
        """
        self.reader.stop()
        self.admission.refused.clear()  # of an earlier call
        with self.table.lock:
            for worker in self.table:
                failed = worker.has is None and bool(worker.failures)
                worker.leaving = failed if worker.joined else worker.lost is not None
                worker.lost, worker.failures = None, {}
                worker.arrived &= worker.joined
                worker.alive = None if worker.late else alive
        deadline = time.monotonic() + timeout
        if self._pipelines is not None:
            for worker in self.table:
                self._answers.start(worker)
            wait_for_none(self.table, absent, deadline)
        with self._groups.lock:
            first = self._by_worker(weights)
            if self._pipelines is not None:
                report = self._pipelines.send(first, self._next_number())
            else:
                report, self._first_weights = self._stage(first), first
        try:
            for worker in self.table:  # late joiners may have come just now
                self._delivery.update(worker)
                self._answers.start(worker)
            wait_for_none(self.table, without_weights, deadline)
            require_weights(self.table, timeout, [*self.refusals, *self.admission.refused])
        finally:
            with self._groups.lock:
                self._end_connect(first)
            report.dense_bytes = sum(group.schema.dense_bytes for group in self._groups.all())
        self.fill(report, first)
        self.table.told = report.version
        return report

    def _end_connect(self, weights: WorkerWeights) -> None:
        """Encode the first weights of workers that did not join: ``weights`` may change until they do."""
        for worker in self.table:
            if worker.group is None and (worker.idx == NOBODY or not worker.late):
                kept = weights[worker] if self._pipelines is None else None
                self._groups.assign_first(worker, worker.schema, self._number, kept)
        self._first_weights = {}

    def _group_to_join(self, worker: WorkerState, wire: WeightSchema) -> SendGroup:
        """Return the send group for a joining worker whose weights travel best as ``wire``."""
        with self._groups.lock:
            group = self._groups.join(worker, wire)
            if group is None:
                first = next(iter(self._first_weights.values()), None) if worker.late else None
                named = self._first_weights.get(worker, first)
                group = self._groups.assign_first(worker, wire, self._number, named)
            return group

    # -- sending -----------------------------------------------------------------------------------

    def publish(
        self, weights: dict[int, NamedWeights], *, group_commit: str | None = None, to_all: bool = False
    ) -> SyncReport:
        """Encode and send a version, without waiting for workers.

        Workers whose ``weights`` are one object share its encoding. ``group_commit`` names the group commit
        of :func:`~weight_update.send_together`: it leaves the version staged in the workers until
        :meth:`commit` or :meth:`abort`. With ``to_all``, late joiners that came since the workers were chosen
        are added to ``weights``, which are the same for all.

        Raises:
            SchemaMismatchError: the weights are not those of the schema; nothing was sent.
        """
        report: SyncReport | None = None
        try:
            with self._groups.lock:
                self._groups.release_departed()
                if to_all:
                    self._add_late_joiners(weights)
                states = self._by_worker(weights)
                if group_commit is not None:
                    with self.table.lock:
                        for worker in states:
                            if worker.joining_error is not None:
                                worker.failures.popitem()  # it is sent these again: it needs them first
                if self._pipelines is not None:
                    return self._pipelines.send(states, self._next_number(), group_commit)
                report = self._stage(states, group_commit)
                start = time.perf_counter()
                self.reader.pause(states)
                self._delivery.update(*states)
                report.seconds["send"] = time.perf_counter() - start
                return report
        except BaseException:  # of a signal handler: the caller has no handle to abort the version with
            if report is not None and group_commit is not None:
                self.abort(report.version, list(weights))
            raise

    def _add_late_joiners(self, weights: dict[int, NamedWeights]) -> None:
        """Add late joiners to ``weights``; they would keep the version before until the next update."""
        late = [one for one in self.table if one.late and one.group and not one.group.needs_all]
        missing = [one.idx for one in late if one.idx not in weights]
        if weights:
            weights.update(dict.fromkeys(missing, next(iter(weights.values()))))

    @property
    def late_joiners(self) -> set[int]:
        """Indices of the late joiners that have applied weights."""
        return {one.idx for one in self.table if one.late and one.joined and one.arrived}

    @property
    def incomplete(self) -> set[int]:
        """Indices of the late joiners that take no part in group commits yet."""
        return {one.idx for one in self.table if not one.together}

    def unite(self, complete: Collection[int]) -> None:
        """Let late joiners take part in group commits if they have all models, which are ``complete``."""
        with self.table.lock:
            for worker in self.table:
                worker.complete = worker.joined and worker.arrived and worker.idx in complete

    def attend(self, call: Callable[[], _T]) -> _T:
        """Return the result of ``call()``, which publishes weights and waits for workers."""
        return self.reader.attend(call)

    def tell_observers(self, report: SyncReport, workers: Sequence[int]) -> None:
        """Tell observers of an update once every worker has applied it, failed or left."""
        self.table.tell(ObservedUpdate(self, report, workers))

    def continue_from(self, version: int) -> None:
        """Give the next update a number above ``version``, or the first weights the number ``version``."""
        with self._groups.lock:
            self._next = max(self._next, version if self._number < 0 else version + 1)

    def needs_all(self, workers: Iterable[int]) -> bool:
        """Return whether a worker has to be sent all weights, not only those that updates carry."""
        return any(one.group is not None and one.group.needs_all for one in self.table.known(workers))

    def _next_number(self) -> int:
        self._number, self._next = self._next, self._next + 1
        return self._number

    def _by_worker(self, weights: Mapping[int, NamedWeights]) -> WorkerWeights:
        """Return ``weights`` by worker.

        Leave out late joiners that were forgotten meanwhile, and workers whose group needs more weights.
        """
        found = {}
        for idx, named in weights.items():
            if idx in self.table:
                worker = self.table[idx]
                needs_all = worker.group is not None and worker.group.needs_all
                if not needs_all or set(worker.schema.names) <= named.tensors.keys():
                    found[worker] = named
        return found

    def _stage(self, weights: WorkerWeights, group_commit: str | None = None) -> SyncReport:
        """Encode a new version and, unless workers wait for COMMIT, make it the one they are to have."""
        start, commit = time.perf_counter(), group_commit is None
        self._require_agreed(weights)
        report = SyncReport(self._next_number(), "")
        self._delivery.count_in(report)
        # an update that may be aborted does not unite groups
        parts = self._groups.partition(weights, apart=not commit)
        present = self._groups.all()
        groups: list[SendGroup] = []
        facts: list[UpdateFacts] = []
        try:
            for states in parts:
                self._groups.await_room(present, self.timeout)
                named = weights[states[0]]
                groups.append(self._groups.group_for(states, present))
                step = Step.of(self._number, named.extra, group_commit)
                bases = [worker.has for worker in states if worker.has is not None]
                facts.append(groups[-1].stage(step, named, bases))
        except BaseException:
            for group in groups:
                group.discard()
            self._groups.close_unused(groups)
            raise
        for states, group in zip(parts, groups, strict=True):
            group.source = (self._number, id(weights[states[0]]))
            self._groups.move(states, group)
            report.dense_bytes += group.schema.dense_bytes
            if commit:
                group.commit()
        if groups:  # else no worker has joined, and forked ones still hold the memory that would be freed
            encodings, compressions, changed, total = zip(*facts, strict=True)
            report.encoding = "+".join(sorted(set(encodings)))
            report.compression = "+".join(sorted(set(compressions) - {""}))
            report.changed_fraction = sum(changed) / sum(total) if any(total) else 0.0
            self._pool.trim(max([group.whole_bytes for group in groups]))
        else:
            report.encoding = self._first_label
        report.seconds["encode"] = time.perf_counter() - start
        return report

    def _require_agreed(self, weights: WorkerWeights) -> None:
        """Check weights that are to be sent, once for workers that are alike.

        Weights that updates do not carry are needed the first time only.
        """
        alike = {
            (id(named), id(worker.schema), id(worker.tracked), worker.group is None): (worker, named)
            for worker, named in weights.items()
        }
        for worker, named in alike.values():
            required = None if worker.group is None else worker.tracked
            named.require_agreed(worker.schema, more=self._strategy.partial, required=required)

    def whole_weights(self, weights: Mapping[int, NamedWeights]) -> NamedWeights:
        """Return the weights of one worker after gathering and conversion."""
        return next(iter(weights.values())).converted()

    def commit(self, version: int, workers: Iterable[int]) -> None:
        """Have workers apply the version that they staged."""
        with self._groups.lock:
            for group in self._groups.all():
                if group.pending == version:
                    group.commit()
        states = self.table.known(workers)
        with self.table.lock:
            told = [one for one in states if one.inflight is not None and one.inflight.version == version]
        self._delivery.broadcast(told, WeightChunk(Kind.COMMIT, {"version": version}))
        self._delivery.update(*(worker for worker in self.table if worker not in told))

    def abort(self, version: int, workers: Iterable[int]) -> None:
        """Have workers forget the version that they staged, and go back to the one before."""
        states = self.table.known(workers)
        with self._groups.lock:
            for group in self._groups.all():
                if group.pending == version:
                    group.discard()
        with self.table.lock:
            for worker in states:
                worker.staged = None
                if worker.inflight is not None and worker.inflight.version == version:
                    if self._pipelines is not None and worker.may_read:
                        worker.inflight.abandon()
                    worker.inflight = None  # first: frames not sent yet are then not sent at all
            self.table.changed.notify_all()
        self._delivery.broadcast(states, WeightChunk(Kind.ABORT, {"version": version}))

    # -- end ---------------------------------------------------------------------------------------

    def close(self) -> None:
        """Say goodbye, end all threads, free all memory."""
        if os.getpid() != self._pid:
            return
        with ExitStack() as rest:  # all steps are taken, in reverse order, whatever one of them raises
            rest.callback(self._free_memory)
            rest.callback(self._answers.join)
            rest.callback(self._close_links)
            rest.callback(self._delivery.close)
            rest.callback(self._say_goodbye)
            rest.callback(self._recall)
            self.reader.stop()

    def _recall(self) -> None:
        """Wait until workers have copied their weights out of memory that ends with this process."""
        joined = [worker for worker in self.table if worker.joined]
        borrowers = [one for one in joined if one.link.capabilities.payloads_die_with_sender]
        self._delivery.broadcast(borrowers, WeightChunk(Kind.GOODBYE, {}))
        with self.table.lock:
            self.table.changed.wait_for(lambda: not any(one.joined for one in borrowers), _PARTING_SECONDS)

    def _say_goodbye(self) -> None:
        with self.table.lock:  # GOODBYE goes after updates that are on their way
            self.table.changed.wait_for(lambda: not any(one.writing for one in self.table), self.timeout)
            self.table.closed = True
        self._delivery.broadcast(self.table, WeightChunk(Kind.GOODBYE, {}))

    def _close_links(self) -> None:
        self.table.closed = True  # also if the goodbye was interrupted: the threads of the workers end
        with ExitStack() as rest:
            for worker in self.table:
                rest.callback(worker.close_outbox)
                rest.callback(worker.link.close)

    def _free_memory(self) -> None:
        with self.table.lock:
            for group in self._groups.all():
                group.close()
            for worker in self.table:
                worker.joined = worker.joining = False
                worker.applied = worker.inflight = worker.group = None
            self.table.changed.notify_all()
        self._pool.close()
