"""Which workers are sent the same."""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Mapping
from typing import Any

from weight_update.encodings import DeltaEncoding, Encoding
from weight_update.sender.groups.delta import DeltaGroup
from weight_update.sender.groups.full import Borrow, FullGroup, SendGroup
from weight_update.sender.workers import WorkerState, WorkerTable
from weight_update.strategy.named_weights import NamedWeights
from weight_update.wire.schema import WeightSchema
from weight_update.wire.updates import Step

__all__ = ["GroupAssignment"]


class GroupAssignment:
    """Assigns workers to groups; its methods are called by one thread at a time.

    Args:
        table: the workers.
        encoding: how updates travel.
        borrow: where payloads lie.
    """

    def __init__(self, table: WorkerTable, encoding: Encoding, borrow: Borrow) -> None:
        self._table, self._encoding, self._borrow = table, encoding, borrow

    def all(self) -> list[SendGroup]:
        """Those that somebody is in."""
        return list({id(worker.group): worker.group for worker in self._table if worker.group}.values())

    def newest(self) -> SendGroup | None:
        """The one with the newest version; None if there is none."""
        return max(self.all(), key=_version, default=None)

    def move(self, states: Iterable[WorkerState], group: SendGroup) -> None:
        """Put workers into a group; those that nobody is in any more are closed."""
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
        """Give a worker that is in a group, or a guest, the group for weights that best travel as ``wire``."""
        if worker.group is None and worker.guest and (newest := self.newest()) is not None:
            self.move([worker], newest)
        group = worker.group
        if group is None or wire.digest == group.schema.digest:
            return
        twins = [one for one in self.all() if one.family == group.family]
        same = [one for one in twins if one.schema.digest == wire.digest]
        if same:
            self.move([worker], same[0])
        elif group.schema.digest != worker.schema.digest:  # neither the schema it has nor ours: wait
            self.move([worker], self._new(wire, worker.tracked, group.family))

    def settle_in(
        self, worker: WorkerState, wire: WeightSchema, version: int, named: NamedWeights | None
    ) -> None:
        """Find or make the first group of a worker, with ``named`` as its weights."""
        family = (version, id(named))
        for group in self.all():
            if group.family == family and group.schema.digest == wire.digest:
                self.move([worker], group)
                return
        group = self._new(wire, worker.tracked, family)
        if named is not None:
            group.stage(Step.of(version, named.extra), named.tensors)
            group.settle()
        self.move([worker], group)

    def _new(self, schema: WeightSchema, tracked: frozenset[str] | None, family: Hashable) -> SendGroup:
        names = schema.names
        positions = None if tracked is None else [i for i, name in enumerate(names) if name in tracked]
        group: SendGroup
        if isinstance(self._encoding, DeltaEncoding):
            group = DeltaGroup(schema, self._borrow, self._table.changed, self._encoding, positions)
        else:
            group = FullGroup(schema, self._borrow, self._table.changed, self._encoding.whole)
        group.family = family
        return group

    def dismiss_guests(self) -> None:
        """What a guest that has gone was sent is kept for nobody."""
        with self._table.changed:
            for worker in self._table:
                if worker.guest and not worker.joined and worker.lost is not None:
                    self.leave(worker)

    def leave(self, worker: WorkerState) -> None:
        """Take a worker out of its send group."""
        with self._table.changed:
            left, worker.group = worker.group, None
            self._close_unused([left])

    def parts(
        self, weights: Mapping[int, NamedWeights], workers: Iterable[int], *, apart: bool
    ) -> list[list[WorkerState]]:
        """Workers by what they can be sent together; without those not here yet, or just gone.

        Args:
            weights: what each is to be sent.
            workers: indices.
            apart: bring no groups together.
        """
        parts: dict[tuple[Any, ...], list[WorkerState]] = {}
        for idx in workers:
            worker = self._table[idx]
            if worker.group is not None:
                own = id(worker.group) if apart else None
                key = (id(weights[idx]), worker.group.schema.digest, worker.tracked, own)
                parts.setdefault(key, []).append(worker)
        return list(parts.values())

    def group_for(self, states: list[WorkerState]) -> SendGroup:
        """A group for workers that are sent the same that are now sent the same weights, and for nobody else.

        They are to be moved to it when that is certain.
        """
        groups = {id(worker.group): worker.group for worker in states if worker.group is not None}
        outside = {id(worker.group) for worker in self._table if worker not in states}
        own = [group for key, group in groups.items() if key not in outside]
        return max(own, key=_version) if own else next(iter(groups.values())).fork()

    def abandon(self, groups: Iterable[SendGroup]) -> None:
        """Drop what is pending in ``groups``, and close those that nobody was moved to."""
        for group in groups:
            group.drop()
            self._close_unused([group])


def _version(group: SendGroup) -> int:
    return -1 if group.version is None else group.version
