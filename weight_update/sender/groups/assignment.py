"""The assignment of workers to send groups."""

from __future__ import annotations

import time
from collections.abc import Hashable, Iterable, Mapping
from typing import Any

from weight_update.encodings import DeltaEncoding, Encoding
from weight_update.sender.groups.base import Borrow, FullGroup, SendGroup
from weight_update.sender.groups.delta import DeltaGroup
from weight_update.sender.workers import WorkerState, WorkerTable
from weight_update.strategy.named_weights import NamedWeights
from weight_update.wire.frames import Step
from weight_update.wire.schema import WeightSchema

__all__ = ["GroupAssignment"]

_MAX_UPDATES = 4
_CHECK_SECONDS = 0.2


class GroupAssignment:
    """Assigns workers to send groups. One thread at a time calls its methods.

    A group is closed when its last worker leaves it.

    Args:
        table: the workers.
        encoding: encoding of updates.
        borrow: lends memory for payloads.
    """

    def __init__(self, table: WorkerTable, encoding: Encoding, borrow: Borrow) -> None:
        self._table, self._encoding, self._borrow = table, encoding, borrow

    def all(self) -> list[SendGroup]:
        """Return the groups that have workers."""
        return list({id(worker.group): worker.group for worker in self._table if worker.group}.values())

    def move(self, states: Iterable[WorkerState], group: SendGroup) -> None:
        """Move workers into ``group``."""
        with self._table.changed:
            left = {id(worker.group): worker.group for worker in states if worker.group not in (None, group)}
            for worker in states:
                worker.group = group
            self._close_unused(left.values())

    def _close_unused(self, left: Iterable[SendGroup | None]) -> None:
        for group in left:
            if group is not None and group not in self.all():
                group.close()

    def join(self, worker: WorkerState, wire: WeightSchema) -> None:
        """Move a worker that joins again, or late, to the group for weights that travel best as ``wire``."""
        if worker.group is None and worker.late:
            newest = max(self.all(), key=_version, default=None)
            if newest is not None:
                self.move([worker], newest)
        group = worker.group
        if group is None or wire.digest == group.schema.digest:
            return
        alike = [one for one in self.all() if one.source == group.source]
        same = [one for one in alike if one.schema.digest == wire.digest]
        if same:
            self.move([worker], same[0])
        elif group.schema.digest != worker.schema.digest:  # neither the best schema nor ours: wait
            self.move([worker], self._new(wire, worker.tracked, group.source))

    def assign_first(
        self, worker: WorkerState, wire: WeightSchema, version: int, named: NamedWeights | None
    ) -> None:
        """Find or make the first group of a worker, with ``named`` as its weights."""
        source = (version, id(named))
        for group in self.all():
            if group.source == source and group.schema.digest == wire.digest:
                self.move([worker], group)
                return
        group = self._new(wire, worker.tracked, source)
        if named is not None:
            group.stage(Step.of(version, named.extra), named.tensors)
            group.commit()
        self.move([worker], group)

    def _new(self, schema: WeightSchema, tracked: frozenset[str] | None, source: Hashable) -> SendGroup:
        names = schema.names
        positions = None if tracked is None else [i for i, name in enumerate(names) if name in tracked]
        group: SendGroup
        if isinstance(self._encoding, DeltaEncoding):
            group = DeltaGroup(schema, self._borrow, self._table.changed, self._encoding, positions)
        else:
            group = FullGroup(schema, self._borrow, self._table.changed, self._encoding.whole)
        group.source = source
        return group

    def release_departed(self) -> None:
        """Release updates held for late joiners that have left."""
        with self._table.changed:
            for worker in self._table:
                if worker.late and not worker.joined and worker.lost is not None:
                    self.leave(worker)

    def leave(self, worker: WorkerState) -> None:
        """Take a worker out of its group."""
        with self._table.changed:
            left, worker.group = worker.group, None
            self._close_unused([left])

    def partition(self, weights: Mapping[int, NamedWeights], *, apart: bool) -> list[list[WorkerState]]:
        """Return lists of workers that can be sent the same bytes; workers without a group are left out.

        Args:
            weights: weights for each worker index.
            apart: keep workers of different groups apart even if they could be sent the same.
        """
        parts: dict[tuple[Any, ...], list[WorkerState]] = {}
        for idx, named in weights.items():
            worker = self._table[idx]
            if worker.group is not None:
                own = id(worker.group) if apart else None
                key = (id(named), worker.group.schema.digest, worker.tracked, own)
                parts.setdefault(key, []).append(worker)
        return list(parts.values())

    def await_room(self, timeout: float) -> None:
        """Wait while so many updates are in use that one more would cost too much memory.

        A worker that is overdue keeps up to two updates until it goes on: the limit grows with their number.
        """
        deadline = time.monotonic() + timeout
        with self._table.changed:
            while time.monotonic() < deadline:
                groups = self.all()
                used = [one for group in groups for one in group.kept]
                used += [one for worker in self._table for one in (worker.applied, worker.inflight) if one]
                limit = _MAX_UPDATES + 2 * self._table.count_overdue(timeout) + 2 * (len(groups) - 1)
                if len({id(one.version_id) for one in used}) < limit:
                    return
                self._table.changed.wait(_CHECK_SECONDS)

    def group_for(self, states: list[WorkerState]) -> SendGroup:
        """Return a group for these workers alone, which :meth:`partition` put together.

        The caller moves them to it once the update is staged.
        """
        groups = {id(worker.group): worker.group for worker in states if worker.group is not None}
        outside = {id(worker.group) for worker in self._table if worker not in states}
        own = [group for key, group in groups.items() if key not in outside]
        return max(own, key=_version) if own else next(iter(groups.values())).fork()

    def discard(self, groups: Iterable[SendGroup]) -> None:
        """Discard what is staged in ``groups``, and close those that have no workers."""
        for group in groups:
            group.discard()
            self._close_unused([group])


def _version(group: SendGroup) -> int:
    return -1 if group.version is None else group.version
