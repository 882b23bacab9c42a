"""Which workers are sent the same."""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Mapping
from typing import Any

from weight_update.encodings import DeltaEncoding, Encoding
from weight_update.sender.groups.delta import ChangeLane
from weight_update.sender.groups.full import Borrow, Lane, WholeLane
from weight_update.sender.peer import Peer
from weight_update.sender.workers import Roll
from weight_update.strategy.named_weights import NamedWeights
from weight_update.wire.schema import WeightSchema
from weight_update.wire.updates import Step

__all__ = ["Lanes"]


class Lanes:
    """Assigns workers to lanes; its methods are called by one thread at a time.

    Args:
        roll: the workers.
        encoding: how updates travel.
        borrow: where payloads lie.
    """

    def __init__(self, roll: Roll, encoding: Encoding, borrow: Borrow) -> None:
        self._roll, self._encoding, self._borrow = roll, encoding, borrow

    def all(self) -> list[Lane]:
        """Those that somebody is in."""
        return list({id(peer.lane): peer.lane for peer in self._roll if peer.lane}.values())

    def newest(self) -> Lane | None:
        """The one with the newest version; None if there is none."""
        return max(self.all(), key=_version, default=None)

    def move(self, peers: Iterable[Peer], lane: Lane) -> None:
        """Put workers into a lane; those that nobody is in any more are closed."""
        with self._roll.moved:
            left = {id(peer.lane): peer.lane for peer in peers if peer.lane not in (None, lane)}
            for peer in peers:
                peer.lane = lane
            self._close_unused(left.values())

    def _close_unused(self, left: Iterable[Lane | None]) -> None:
        for lane in left:
            if lane is not None and lane not in self.all():
                lane.close()

    def join(self, peer: Peer, wire: WeightSchema) -> None:
        """Give a worker that is in a lane, or a guest, the lane for weights that best travel as ``wire``."""
        if peer.lane is None and peer.guest and (newest := self.newest()) is not None:
            self.move([peer], newest)
        lane = peer.lane
        if lane is None or wire.digest == lane.schema.digest:
            return
        twins = [one for one in self.all() if one.family == lane.family]
        same = [one for one in twins if one.schema.digest == wire.digest]
        if same:
            self.move([peer], same[0])
        elif lane.schema.digest != peer.schema.digest:  # neither its own kind nor our own: wait
            self.move([peer], self._new(wire, peer.tracked, lane.family))

    def settle_in(self, peer: Peer, wire: WeightSchema, version: int, named: NamedWeights | None) -> None:
        """Find or make the first lane of a worker, with ``named`` as its weights."""
        family = (version, id(named))
        for lane in self.all():
            if lane.family == family and lane.schema.digest == wire.digest:
                self.move([peer], lane)
                return
        lane = self._new(wire, peer.tracked, family)
        if named is not None:
            lane.stage(Step.of(version, named.extra), named.tensors)
            lane.settle()
        self.move([peer], lane)

    def _new(self, schema: WeightSchema, tracked: frozenset[str] | None, family: Hashable) -> Lane:
        names = schema.names
        positions = None if tracked is None else [i for i, name in enumerate(names) if name in tracked]
        lane: Lane
        if isinstance(self._encoding, DeltaEncoding):
            lane = ChangeLane(schema, self._borrow, self._roll.moved, self._encoding, positions)
        else:
            lane = WholeLane(schema, self._borrow, self._roll.moved, self._encoding.whole)
        lane.family = family
        return lane

    def dismiss_guests(self) -> None:
        """What a guest that has gone was sent is kept for nobody."""
        with self._roll.moved:
            for peer in self._roll:
                if peer.guest and not peer.joined and peer.lost is not None:
                    self.leave(peer)

    def leave(self, peer: Peer) -> None:
        """Take a worker out of its send group."""
        with self._roll.moved:
            left, peer.lane = peer.lane, None
            self._close_unused([left])

    def kinds(
        self, weights: Mapping[int, NamedWeights], workers: Iterable[int], *, apart: bool
    ) -> list[list[Peer]]:
        """Workers by what they can be sent together; without those not here yet, or just gone.

        Args:
            weights: what each is to be sent.
            workers: indices.
            apart: bring no lanes together.
        """
        kinds: dict[tuple[Any, ...], list[Peer]] = {}
        for idx in workers:
            peer = self._roll[idx]
            if peer.lane is not None:
                own = id(peer.lane) if apart else None
                kind = (id(weights[idx]), peer.lane.schema.digest, peer.tracked, own)
                kinds.setdefault(kind, []).append(peer)
        return list(kinds.values())

    def for_one_kind(self, peers: list[Peer]) -> Lane:
        """A lane for workers of one kind that are now sent the same weights, and for nobody else.

        They are to be moved to it when that is certain.
        """
        lanes = {id(peer.lane): peer.lane for peer in peers if peer.lane is not None}
        outside = {id(peer.lane) for peer in self._roll if peer not in peers}
        own = [lane for key, lane in lanes.items() if key not in outside]
        return max(own, key=_version) if own else next(iter(lanes.values())).fork()

    def abandon(self, lanes: Iterable[Lane]) -> None:
        """Drop what is pending in ``lanes``, and close those that nobody was moved to."""
        for lane in lanes:
            lane.drop()
            self._close_unused([lane])


def _version(lane: Lane) -> int:
    return -1 if lane.version is None else lane.version
