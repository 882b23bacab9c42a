"""Which workers are sent the same."""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Mapping
from typing import Any

from weight_update.encodings import DeltaEncoding, Encoding
from weight_update.sender.groups.delta import ChangeLane
from weight_update.sender.groups.full import Borrow, Lane, WholeLane
from weight_update.sender.workers import WorkerState, WorkerTable
from weight_update.strategy.named_weights import NamedWeights
from weight_update.wire.schema import WeightSchema
from weight_update.wire.updates import Step

__all__ = ["Lanes"]


class Lanes:
    """Assigns workers to lanes; its methods are called by one thread at a time.

    Args:
        table: the workers.
        encoding: how updates travel.
        borrow: where payloads lie.
    """

    def __init__(self, table: WorkerTable, encoding: Encoding, borrow: Borrow) -> None:
        self._table, self._encoding, self._borrow = table, encoding, borrow

    def all(self) -> list[Lane]:
        """Those that somebody is in."""
        return list({id(worker.lane): worker.lane for worker in self._table if worker.lane}.values())

    def newest(self) -> Lane | None:
        """The one with the newest version; None if there is none."""
        return max(self.all(), key=_version, default=None)

    def move(self, states: Iterable[WorkerState], lane: Lane) -> None:
        """Put workers into a lane; those that nobody is in any more are closed."""
        with self._table.changed:
            left = {id(worker.lane): worker.lane for worker in states if worker.lane not in (None, lane)}
            for worker in states:
                worker.lane = lane
            self._close_unused(left.values())

    def _close_unused(self, left: Iterable[Lane | None]) -> None:
        for lane in left:
            if lane is not None and lane not in self.all():
                lane.close()

    def join(self, worker: WorkerState, wire: WeightSchema) -> None:
        """Give a worker that is in a lane, or a guest, the lane for weights that best travel as ``wire``."""
        if worker.lane is None and worker.guest and (newest := self.newest()) is not None:
            self.move([worker], newest)
        lane = worker.lane
        if lane is None or wire.digest == lane.schema.digest:
            return
        twins = [one for one in self.all() if one.family == lane.family]
        same = [one for one in twins if one.schema.digest == wire.digest]
        if same:
            self.move([worker], same[0])
        elif lane.schema.digest != worker.schema.digest:  # neither its own kind nor our own: wait
            self.move([worker], self._new(wire, worker.tracked, lane.family))

    def settle_in(
        self, worker: WorkerState, wire: WeightSchema, version: int, named: NamedWeights | None
    ) -> None:
        """Find or make the first lane of a worker, with ``named`` as its weights."""
        family = (version, id(named))
        for lane in self.all():
            if lane.family == family and lane.schema.digest == wire.digest:
                self.move([worker], lane)
                return
        lane = self._new(wire, worker.tracked, family)
        if named is not None:
            lane.stage(Step.of(version, named.extra), named.tensors)
            lane.settle()
        self.move([worker], lane)

    def _new(self, schema: WeightSchema, tracked: frozenset[str] | None, family: Hashable) -> Lane:
        names = schema.names
        positions = None if tracked is None else [i for i, name in enumerate(names) if name in tracked]
        lane: Lane
        if isinstance(self._encoding, DeltaEncoding):
            lane = ChangeLane(schema, self._borrow, self._table.changed, self._encoding, positions)
        else:
            lane = WholeLane(schema, self._borrow, self._table.changed, self._encoding.whole)
        lane.family = family
        return lane

    def dismiss_guests(self) -> None:
        """What a guest that has gone was sent is kept for nobody."""
        with self._table.changed:
            for worker in self._table:
                if worker.guest and not worker.joined and worker.lost is not None:
                    self.leave(worker)

    def leave(self, worker: WorkerState) -> None:
        """Take a worker out of its send group."""
        with self._table.changed:
            left, worker.lane = worker.lane, None
            self._close_unused([left])

    def kinds(
        self, weights: Mapping[int, NamedWeights], workers: Iterable[int], *, apart: bool
    ) -> list[list[WorkerState]]:
        """Workers by what they can be sent together; without those not here yet, or just gone.

        Args:
            weights: what each is to be sent.
            workers: indices.
            apart: bring no lanes together.
        """
        kinds: dict[tuple[Any, ...], list[WorkerState]] = {}
        for idx in workers:
            worker = self._table[idx]
            if worker.lane is not None:
                own = id(worker.lane) if apart else None
                kind = (id(weights[idx]), worker.lane.schema.digest, worker.tracked, own)
                kinds.setdefault(kind, []).append(worker)
        return list(kinds.values())

    def for_one_kind(self, states: list[WorkerState]) -> Lane:
        """A lane for workers of one kind that are now sent the same weights, and for nobody else.

        They are to be moved to it when that is certain.
        """
        lanes = {id(worker.lane): worker.lane for worker in states if worker.lane is not None}
        outside = {id(worker.lane) for worker in self._table if worker not in states}
        own = [lane for key, lane in lanes.items() if key not in outside]
        return max(own, key=_version) if own else next(iter(lanes.values())).fork()

    def abandon(self, lanes: Iterable[Lane]) -> None:
        """Drop what is pending in ``lanes``, and close those that nobody was moved to."""
        for lane in lanes:
            lane.drop()
            self._close_unused([lane])


def _version(lane: Lane) -> int:
    return -1 if lane.version is None else lane.version
