"""Versions that are never put together whole: converted, encoded and sent chunk by chunk."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace

from weight_update.encodings import Encoder
from weight_update.errors import SyncTimeoutError
from weight_update.report import SyncReport
from weight_update.sender.buffers import Slot
from weight_update.sender.delivery import Delivery
from weight_update.sender.groups.assignment import GroupAssignment
from weight_update.sender.pipeline import Pipeline
from weight_update.sender.workers import WorkerState, WorkerTable
from weight_update.strategy.named_weights import NamedWeights
from weight_update.strategy.strategy import WeightStrategy
from weight_update.wire.frames import Kind, WeightChunk
from weight_update.wire.updates import Step

__all__ = ["Streams"]


class Streams:
    """Sends versions through pipelines, one after the other.

    Nothing of a version is kept: who joins later, or missed it, is sent the next one.

    Args:
        table: the workers.
        groups: which of them are sent the same.
        strategy: with ``max_in_flight``.
        borrow: gives a slot of so many bytes, with one user; may wait.
        delivery: sends frames to a worker, or loses it.
    """

    def __init__(
        self,
        table: WorkerTable,
        groups: GroupAssignment,
        strategy: WeightStrategy,
        borrow: Callable[[int], Slot],
        delivery: Delivery,
    ) -> None:
        self._table, self._groups, self._strategy = table, groups, strategy
        self._borrow, self._delivery = borrow, delivery
        self._encoders: dict[str, Encoder] = {}

    def send(self, weights: Mapping[int, NamedWeights], step: Step, timeout: float) -> SyncReport:
        """Convert, encode and send a version.

        Args:
            weights: by worker; workers that share an object share its conversion.
            step: which version; its extra state comes from ``weights``.
            timeout: seconds a worker may take to become ready, and to take a chunk.

        Raises:
            SchemaMismatchError: the weights are not those of the schema; no worker applies them.
        """
        report = SyncReport(step.version, self._strategy.encoding.label)
        for states in self._groups.parts(weights, weights, apart=not step.commit):
            named = weights[states[0].idx]
            extra = Step.of(step.version, named.extra).extra
            self._send_to(states, named, replace(step, extra=extra), timeout, report)
        return report

    def _send_to(
        self, states: list[WorkerState], named: NamedWeights, step: Step, timeout: float, report: SyncReport
    ) -> None:
        """Send a version to workers of one group."""
        group, encoding, limit = states[0].group, self._strategy.encoding.whole, self._strategy.max_in_flight
        assert group is not None
        assert limit is not None
        sizes = encoding.payload_sizes(group.schema)
        digest = group.schema.digest
        if digest not in self._encoders:
            self._encoders[digest] = encoding.encoder(group.schema)
        with self._table.changed:
            pipeline = Pipeline(
                step,
                self._ready(states, step, timeout),
                limit=limit,
                timeout=timeout,
                borrow=lambda: self._borrow(max(sizes)),
                write=self._write,
                changed=self._table.changed,
            )
        items = named.items()
        try:
            tensors = pipeline.checked(states[0].schema, items)
            pipeline.run(self._encoders[digest], group.schema, encoding.name, len(sizes), tensors)
        finally:
            items.close()
        for stage, seconds in pipeline.seconds.items():
            report.seconds[stage] = report.seconds.get(stage, 0.0) + seconds
        report.dense_bytes += group.schema.dense_bytes
        copies = 1 if states[0].link.shares_memory else len(states)
        report.wire_bytes += pipeline.payload_bytes * copies

    def _ready(self, states: list[WorkerState], step: Step, timeout: float) -> list[WorkerState]:
        """Those that can be sent a version now; waits for those that are busy with the one before."""

        def busy(worker: WorkerState) -> bool:
            writing = worker.former is not None and worker.former.busy(worker)
            return worker.joined and (worker.inflight is not None or writing)

        self._table.changed.wait_for(lambda: not any(map(busy, states)), timeout)
        for worker in filter(busy, states):
            worker.failures[step.version] = SyncTimeoutError(
                f"was busy with an earlier version for {timeout:g} s: it is stopped, or in hold() or a long "
                "forward pass; it gets all weights with the next send() (or raise timeout=)"
            )
        return [worker for worker in states if worker.joined and not busy(worker)]

    def _write(self, worker: WorkerState, chunk: WeightChunk) -> None:
        """Send a frame, if the worker is still to have the version that it belongs to."""
        with worker.sending:
            with self._table.changed:
                arriving = None if worker.pipeline is None else worker.pipeline.step.version
                stale = chunk.kind is Kind.UPDATE and arriving != chunk.header["version"]
                if stale or not worker.joined:
                    return
            self._delivery.send(worker, [chunk])
