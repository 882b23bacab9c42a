"""Versions that are never put together whole: converted, encoded and sent chunk by chunk."""

from __future__ import annotations

import contextlib
import time
import weakref
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial

import torch

from weight_update.errors import SchemaMismatchError, SyncTimeoutError
from weight_update.progress import Progress
from weight_update.report import SyncReport
from weight_update.sender.buffers import BufferPool, ChunkedUpdate, EncodedUpdate, SlotUse, VersionId
from weight_update.sender.delivery import Delivery, delay_of
from weight_update.sender.groups.base import FullGroup
from weight_update.sender.workers import GroupAssignment, WorkerState, WorkerWeights
from weight_update.strategy.conversion import Results
from weight_update.strategy.named_weights import NamedWeights
from weight_update.wire.frames import Kind, Step, WeightChunk, frames_of
from weight_update.wire.memory import memory_identity
from weight_update.wire.schema import WeightSchema, dtype_name, require_plain


class PipelineSender:
    """Sends versions through pipelines, one version after the other.

    No version is kept: a worker that joins later, or missed one, is sent the next one. At most ``limit``
    chunks are in memory.
    """

    def __init__(self, groups: GroupAssignment, limit: int, pool: BufferPool, delivery: Delivery) -> None:
        self._groups, self._limit, self._pool, self._delivery = groups, limit, pool, delivery
        self._overdue: weakref.WeakSet[EncodedUpdate] = weakref.WeakSet()  # waited for long enough

    def send(self, weights: WorkerWeights, version: int, group_commit: str | None = None) -> SyncReport:
        """Convert, encode and send a version; ``group_commit`` is as in :meth:`Sender.publish`.

        Raises:
            SchemaMismatchError: the weights are not those of the schema; no worker applies them.
            UnsupportedSourceError: a weight is sparse, for example, or on the meta device; no worker
                applies the weights.
        """
        report = SyncReport(version, self._groups.encoding.label)
        parts = self._groups.partition(weights, apart=group_commit is not None)
        ordered = [_in_order(weights[states[0]], states[0].schema) for states in parts]
        with contextlib.ExitStack() as undo:
            for part, named in zip(parts, ordered, strict=True):
                for states, commit in _by_commit(part, group_commit):
                    self._send(states, named, Step.of(version, named.extra, commit), report, undo)
                    if group_commit is None:
                        undo.pop_all()  # these workers keep it, even if others cannot be sent theirs
            undo.pop_all()
        return report

    def _send(
        self,
        states: list[WorkerState],
        named: NamedWeights,
        step: Step,
        report: SyncReport,
        undo: contextlib.ExitStack,
    ) -> None:
        """Send a version to workers that take the same bytes; ``undo`` is to make them forget it."""
        group = states[0].group
        assert isinstance(group, FullGroup)
        largest = max(group.whole_encoding.payload_sizes(group.schema))
        pipeline = Pipeline(step, self._limit, lambda: self._pool.take(largest), self._delivery)
        undo.callback(pipeline.give_up)
        with contextlib.closing(named.items()) as items:
            with self._delivery.lock:
                pipeline.begin(self._ready(states, step))
            checked = pipeline.checked(states[0].schema, items, converted=named.convert is not None)
            pipeline.run(group, checked)
        for stage, seconds in pipeline.seconds.items():
            report.seconds[stage] = report.seconds.get(stage, 0.0) + seconds
        report.dense_bytes += group.schema.dense_bytes
        report.wire_bytes += pipeline.wire_bytes

    def _ready(self, states: list[WorkerState], step: Step) -> list[WorkerState]:
        """Wait for workers that are busy with the version before; return those that can be sent one now.

        A worker that was waited for in vain is not waited for again until it has answered.
        """

        def busy(worker: WorkerState) -> bool:
            return worker.joined and (worker.inflight is not None or worker.writing)

        def awaited(worker: WorkerState) -> bool:
            return busy(worker) and worker.inflight not in self._overdue

        timeout = self._delivery.timeout
        self._delivery.changed.wait_for(lambda: not any(map(awaited, states)), timeout)
        for worker in filter(busy, states):
            if worker.inflight is not None:
                self._overdue.add(worker.inflight)
            reason = (
                f"was busy with an earlier version for {timeout:g} s: {delay_of(worker)}; the worker gets "
                "all weights with the next send() (or raise timeout=)"
            )
            worker.fail(step.version, SyncTimeoutError(reason))
        return [worker for worker in states if worker.joined and not busy(worker)]


class Pipeline:
    """One version on its way to workers that take the same bytes.

    The caller's thread converts and encodes. At most ``limit`` chunks exist at one time, including the one
    that is being filled. A worker has the sender's timeout to read a chunk.
    """

    def __init__(self, step: Step, limit: int, take: Callable[[], SlotUse], delivery: Delivery) -> None:
        self.step = step
        self.seconds = dict.fromkeys(("convert", "encode", "send"), 0.0)  # that the caller spent
        self.wire_bytes = 0  # of all chunks that were sent, to each worker unless they share memory
        self._version_id = VersionId(step.version)
        self._states: list[WorkerState] = []
        self._take, self._delivery = take, delivery
        self._lent: SlotUse | None = None
        self._sent_at: deque[float] = deque(maxlen=limit)  # times of the last chunks

    def begin(self, states: list[WorkerState]) -> None:
        """Begin a version for these workers. The caller holds the sender's lock."""
        self._states = states
        for worker in states:
            worker.inflight, worker.sent_at = ChunkedUpdate(self._version_id, [], []), time.monotonic()

    def run(self, group: FullGroup, tensors: Iterator[torch.Tensor]) -> None:
        """Send the whole version; return when the last chunk was handed over.

        Ends early if no worker is left.
        """
        start, schema, encoding = time.perf_counter(), group.schema, group.whole_encoding
        count = len(encoding.payload_sizes(schema))
        try:
            with Progress("sending weights", schema.nbytes) as progress:
                payloads = group.encoder.stream(tensors, self._lend)
                for chunk in frames_of(self.step, schema, encoding.name, payloads, count):
                    self._send(chunk)
                    if not self._active():
                        break
                    progress.advance(schema.nbytes // count)
        finally:
            with self._delivery.lock:
                if self._lent is not None:
                    self._lent = None
                    self._delivery.changed.notify_all()
            spent = time.perf_counter() - start
            self.seconds["encode"] = spent - self.seconds["convert"] - self.seconds["send"]

    def checked(
        self, schema: WeightSchema, items: Iterator[tuple[str, torch.Tensor]], *, converted: bool
    ) -> Iterator[torch.Tensor]:
        """Yield the tensors of ``items``, which may be ``converted``.

        Raises:
            SchemaMismatchError: they are not those of ``schema``.
            ConversionError: the converter refilled the memory of one that may not be copied yet.
        """
        results = Results()
        places: dict[int, object] = {}
        tied = {position for pair in schema.ties for position in pair}
        for position, meta in enumerate(schema.tensors):
            start = time.perf_counter()
            name, tensor = next(items, (None, None))
            self.seconds["convert"] += time.perf_counter() - start
            if name is None or tensor is None:
                raise _mismatch(f"expected {meta.name!r}, but there are no more weights")
            _require_sendable(name, tensor)
            if (name, tensor.shape, tensor.dtype) != (meta.name, meta.shape, meta.dtype):
                found = f"{name!r} {tuple(tensor.shape)} {tensor.dtype}"
                raise _mismatch(f"got {found}, expected {meta.name!r} {meta.shape} {meta.dtype}")
            if position in tied and places.setdefault(meta.offset, memory_identity(tensor)) != (
                memory_identity(tensor)
            ):
                raise _mismatch(f"{meta.name!r} shared the memory of another weight and no longer does")
            if converted:
                results.add(name, tensor)
            yield tensor
            del tensor
        for name, _ in items:
            raise _mismatch(f"got {name!r} after the last expected weight")

    def _lend(self, nbytes: int) -> torch.Tensor:
        start = time.perf_counter()
        while overdue := self._overdue():
            self._remove(
                overdue,
                SyncTimeoutError(
                    f"did not read a chunk of it within {self._delivery.timeout:g} s: it is stopped or too "
                    "slow; it gets all weights with the next send() (or raise timeout=)"
                ),
            )
        self._lent = self._take()
        self.seconds["send"] += time.perf_counter() - start
        return self._lent.slot.buffer.tensor[:nbytes]

    def _overdue(self) -> list[WorkerState]:
        """Wait until one more chunk may be made; return the workers that prevent it for too long, if any."""
        with self._delivery.lock:
            while full := [one for one, update in self._active() if len(update.uses) == self._sent_at.maxlen]:
                left = self._sent_at[0] + self._delivery.timeout - time.monotonic()
                if left <= 0:
                    return full
                self._delivery.changed.wait(left)
            return []

    def _active(self) -> list[tuple[WorkerState, EncodedUpdate]]:
        """Return the workers that still take chunks, with their updates."""
        updates = [(worker, worker.inflight) for worker in self._states]
        return [(one, update) for one, update in updates if update and update.version_id is self._version_id]

    def _send(self, chunk: WeightChunk) -> None:
        assert self._lent is not None
        start = time.perf_counter()
        with self._delivery.lock:
            active = self._active()
            if not active:
                return
            for _, update in active:
                update.uses.append(self._lent)
            self._sent_at.append(time.monotonic())
            self._lent = None
        states = [worker for worker, _ in active]
        copies = 1 if states[0].link.capabilities.shares_memory else len(states)
        self.wire_bytes += chunk.payload_bytes * copies
        slow = [worker.link for worker in states if not worker.link.capabilities.send_never_blocks]
        if len(slow) > 1 and chunk.payload is not None:
            slow[0].expect(chunk.payload, slow)
        for worker in states:
            self._delivery.post(worker, partial(self._write, worker, chunk), [chunk])
        self.seconds["send"] += time.perf_counter() - start

    def _write(self, worker: WorkerState, chunk: WeightChunk) -> None:
        """Write a chunk, if the worker is still to have this version."""
        with worker.sending:
            update = worker.inflight  # which the worker's thread may end at any time
            if update is not None and update.version_id is self._version_id:
                self._delivery.send(worker, [chunk])

    def give_up(self) -> None:
        """Have the workers that have not answered forget this version, after an error."""
        with self._delivery.lock:
            left = [worker for worker, _ in self._active()]
        self._remove(left)

    def _remove(self, states: list[WorkerState], failure: Exception | None = None) -> None:
        """Remove workers, which forget their chunks of this version and keep the one they have."""
        abort = WeightChunk(Kind.ABORT, {"version": self.step.version})
        for worker in states:
            with self._delivery.lock:
                if failure is not None:
                    worker.fail(self.step.version, failure)
                if worker.inflight is not None and worker.may_read:
                    worker.inflight.abandon()
                worker.inflight = None
            self._delivery.post(worker, partial(self._delivery.broadcast, [worker], abort), [abort])


def _by_commit(
    states: list[WorkerState], commit: str | None
) -> Iterator[tuple[list[WorkerState], str | None]]:
    """Yield workers with the group commit that they take part in.

    A worker in its first ``connect()`` connects its other models only when it has these weights, so it cannot
    stage them. Neither can a late joiner that has not connected all models.
    """
    alone = [one for one in states if not one.together or (one.connecting and one.has is None)]
    first = alone if commit is not None else []
    if first:
        yield first, None
    if len(first) < len(states):
        yield [one for one in states if one not in first], commit


def _in_order(named: NamedWeights, schema: WeightSchema) -> NamedWeights:
    """Return weights in the order of ``schema``, unless they are converted or gathered on the way.

    Raises:
        SchemaMismatchError: the weights are not those of the schema.
    """
    if named.convert is not None or named.gather is not None:
        return named
    named.require_agreed(schema, more=False)
    tensors = dict(zip(schema.names, named.in_order(schema.names), strict=True))
    differ = [
        f"{meta}: dtype {dtype_name(tensor.dtype)} in the weights given"
        for meta, tensor in zip(schema.tensors, tensors.values(), strict=True)
        if tensor.dtype != meta.dtype
    ]
    if differ:
        raise _mismatch(*differ)
    return replace(named, tensors=tensors)


def _require_sendable(name: str, tensor: torch.Tensor) -> None:
    """Raise UnsupportedSourceError for a tensor without values, or of a kind that cannot be sent."""
    require_plain(name, tensor)
    if tensor.is_meta:
        NamedWeights({name: tensor}).require_values()


def _mismatch(*problems: str) -> SchemaMismatchError:
    return SchemaMismatchError(
        "the weights are not those of this scheme's model; none of them is applied:", problems
    )
