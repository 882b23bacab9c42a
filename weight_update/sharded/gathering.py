"""The weights of a sharded trainer, put together on the leader while all ranks go through them in step."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Generator, Iterator
from functools import partial
from typing import Any

import torch

from weight_update.errors import SyncFailedError, WeightSyncError
from weight_update.sharded.batch import Coming, Tensors, flat, whole_of
from weight_update.sharded.links import Message
from weight_update.sharded.plan import Batch, Row, local_of, plan, rows_of
from weight_update.sharded.ranks import Ranks
from weight_update.strategy.gather import GatherShards
from weight_update.strategy.named_weights import NamedWeights

__all__ = ["Gathering"]


class Gathering:
    """Goes through weights in step with the other ranks.

    For each pass the leader says which weights; unless all is as it was in the last pass, every rank says
    what it holds of them, and is told what to give. Then batch by batch: the leader says go, all do their
    part and report, and the leader says go again before it hands the batch out.

    Args:
        ranks: the connection to them.
        options: see :class:`GatherShards`.
    """

    def __init__(self, ranks: Ranks, options: GatherShards) -> None:
        self._ranks, self._options = ranks, options
        self._enrolled: list[NamedWeights] = []
        self._rows: list[list[Row]] = [[] for _ in ranks.members]  # of all, as they said; own ones first
        self._batches: list[Batch] = []
        self._agreed = False
        self._pulled = -1
        self._orders: list[Message] = []  # others: what to do for each batch
        self._tensors: Tensors = {}
        self._pushing: tuple[int, Any, torch.Tensor] | None = None  # tag, what is under way, its memory
        self._mine: Iterator[Any] = iter(())
        ranks.part = self

    def begin(self) -> None:
        """Weights that are enrolled from now on are counted from 0, on all ranks alike."""
        self._enrolled = []

    def enroll(self, named: NamedWeights) -> NamedWeights:
        """``named``, to be gone through in step."""
        named.gather = partial(self.items, len(self._enrolled))
        self._enrolled.append(named)
        return named

    # -- the leader --------------------------------------------------------------------------------

    def items(self, number: int, tensors: Tensors) -> Generator[tuple[str, torch.Tensor]]:
        """Leader: names and whole tensors; the others end with it.

        Raises:
            SchemaMismatchError: the ranks do not hold parts of the same weights.
            SyncFailedError: another rank failed; it says which.
        """
        try:
            self._ranks.tell({"pass": number, "known": self._agreed})
            if self._options.gather is not None:
                yield from self._own_way(tensors)
            else:
                self._agree(tensors)
                yield from self._in_batches(tensors)
        finally:
            with contextlib.suppress(WeightSyncError):  # who is gone is told so by what comes next
                self._ranks.tell({"stop": self._pulled})

    def _own_way(self, tensors: Tensors) -> Iterator[tuple[str, torch.Tensor]]:
        assert self._options.gather is not None
        self._ranks.hear()
        items = iter(self._options.gather(iter(tensors.items())))
        more = True
        while more:
            self._ranks.tell({"go": 0})
            item = next(items, None)
            more = item is not None
            for who, heard in zip(self._ranks.others, self._ranks.hear(), strict=True):
                if heard["more"] != more:
                    rank = self._ranks.members[who]
                    raise SyncFailedError(
                        f"gather= gave {'more' if heard['more'] else 'fewer'} tensors on rank {rank} of the "
                        f"trainer than on rank {self._ranks.members[0]}",
                        {},
                    )
            if item is not None:
                yield item
            del item

    def _agree(self, tensors: Tensors) -> None:
        """Make a plan, unless there is one for just these weights."""
        known, self._agreed = self._agreed, False
        rows = rows_of(tensors)
        heard = [one["rows"] for one in self._ranks.hear()]
        same = known and rows == self._rows[0] and not any(one is not None for one in heard)
        orders: list[Any] = [None] * self._ranks.size
        if not same:
            theirs = [
                old if new is None else [Row.from_wire(row) for row in new]
                for new, old in zip(heard, self._rows[1:], strict=True)
            ]
            self._rows = [rows, *theirs]
            self._batches = plan(self._rows, self._ranks.members, self._options.batch_bytes // 2)
            orders = [[_order(batch, who) for batch in self._batches] for who in range(self._ranks.size)]
        self._ranks.tell_each({who: {"plan": orders[who]} for who in self._ranks.others})
        self._agreed = True

    def _in_batches(self, tensors: Tensors) -> Iterator[tuple[str, torch.Tensor]]:
        """While a batch is handed out the next one is on its way."""
        ahead = self._ask(0, tensors)
        for place in range(len(self._batches)):
            batch, ahead = ahead, None
            assert batch is not None
            self._await(batch)
            ahead = self._ask(place + 1, tensors)
            yield from batch.items(tensors)
            del batch

    def _ask(self, place: int, tensors: Tensors) -> Coming | None:
        """Have the others give their parts of a batch."""
        if place >= len(self._batches):
            return None
        coming = Coming(self._batches[place], tensors)
        if coming.is_here:
            return coming
        coming.tag = self._ranks.new_tag()
        self._ranks.tell({"go": place, "tag": coming.tag})
        for who, (memory, _) in coming.parts.items():
            coming.pulls.append((who, self._ranks.pull(who, memory, coming.tag)))
        coming.put_together(tensors)
        return coming

    def _await(self, coming: Coming) -> None:
        if coming.is_here:
            return
        self._ranks.hear()
        for who, work in coming.pulls:
            self._ranks.finish(who, work)
        self._pulled = coming.tag

    # -- the others --------------------------------------------------------------------------------

    def obey(self, message: Message) -> None:
        """Others: one thing that the leader says."""
        if "pass" in message:
            self._enter(self._enrolled[message["pass"]].tensors, message["known"])
        elif "plan" in message:
            self._orders = self._orders if message["plan"] is None else message["plan"]
        elif "go" in message:
            self._give(message)
        else:
            self._let_go(message["stop"])
            self._tensors, self._mine = {}, iter(())

    def _enter(self, tensors: Tensors, known: bool) -> None:
        self._tensors, self._pushing = tensors, None
        if self._options.gather is not None:
            self._mine = iter(self._options.gather(iter(tensors.items())))
            self._ranks.report()
            return
        rows = rows_of(tensors)
        same, self._rows[0] = known and rows == self._rows[0], rows
        self._ranks.report({"rows": None if same else [dataclasses.astuple(row) for row in rows]})

    @torch.no_grad()
    def _give(self, message: Message) -> None:
        if self._options.gather is not None:
            self._ranks.report({"more": next(self._mine, None) is not None})
            return
        self._let_go(message["tag"])
        order = self._orders[message["go"]]
        for name in order["whole"]:
            whole_of(self._tensors, name)
        locals_ = [local_of(self._tensors[name]) for name in order["push"]]
        memory, views = flat([(tuple(local.shape), local.dtype) for local in locals_])
        for view, local in zip(views, locals_, strict=True):
            view.copy_(local)
        self._ranks.report()
        if views:
            self._pushing = message["tag"], self._ranks.push(memory, message["tag"]), memory

    def _let_go(self, pulled: int) -> None:
        """Wait until what was pushed has gone, if the leader took it, which has all up to that tag."""
        pushing, self._pushing = self._pushing, None
        if pushing is not None and pushing[0] <= pulled:
            self._ranks.finish(0, pushing[1])


def _order(batch: Batch, who: int) -> Message:
    """What a rank is told of a batch: names to call ``full_tensor()`` of, and names to push."""
    return {
        "whole": [item.names[0] for item in batch if item.parts is None],
        "push": [item.names[0] for item in batch if who in (item.parts or ())],
    }
