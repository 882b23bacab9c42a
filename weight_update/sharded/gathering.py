"""The gather: sharded weights are put together on the leader while all ranks go through them in step."""

from __future__ import annotations

import contextlib
from collections.abc import Generator, Iterator
from functools import partial
from typing import Any

import torch

from weight_update.errors import SyncFailedError, WeightSyncError
from weight_update.sharded.batch import PendingBatch, Tensors, flat, whole_of
from weight_update.sharded.links import Message
from weight_update.sharded.plan import Batch, Row, local_of, plan, reshard, rows_of
from weight_update.sharded.ranks import Ranks
from weight_update.strategy.named_weights import NamedWeights
from weight_update.strategy.strategy import GatherShards, WeightStrategy


class Gathering:
    """Gathers weights in step with the other ranks.

    At the beginning of a pass the leader names the weights. Unless they are as in the last pass, every rank
    describes the parts it holds, and is told which of them to give. Then follow the batches: the leader asks
    for one, all ranks give their parts and report, and the leader asks for the next one before it yields the
    first.
    """

    def __init__(self, ranks: Ranks, options: GatherShards) -> None:
        self._ranks, self._options = ranks, options
        self._weights: list[NamedWeights] = []
        self._rows: list[list[Row]] = [[] for _ in ranks.members]  # of all ranks; this rank's come first
        self._batches: list[Batch] = []
        self._agreed = False
        self._pulled = -1
        self._orders: list[Message] = []  # others: what to give for each batch
        self._tensors: Tensors = {}
        self._pushing: tuple[int, Any, torch.Tensor] | None = None  # tag, pending send, its memory
        self._mine: Iterator[Any] = iter(())
        ranks.handle = self._handle

    def begin(self) -> None:
        """Number the weights that are read from now on from 0, on all ranks alike."""
        self._weights = []

    def read(self, strategy: WeightStrategy, source: Any, chosen: frozenset[str] | None) -> NamedWeights:
        """Return the weights of ``source``; going through their items takes all ranks, in step."""
        reshard(source)
        named = strategy.outgoing(source, chosen, later=True)
        named.gather = partial(self.items, len(self._weights))
        self._weights.append(named)
        return named

    # -- the leader --------------------------------------------------------------------------------

    def items(self, number: int, tensors: Tensors) -> Generator[tuple[str, torch.Tensor]]:
        """Yield names and whole tensors, on the leader; its end is also the end for the others."""
        try:
            self._ranks.tell({"pass": number, "known": self._agreed})
            if self._options.gather is not None:
                yield from self._custom(tensors)
            else:
                self._agree(tensors)
                yield from self._in_batches(tensors)
        finally:
            with contextlib.suppress(WeightSyncError):  # a rank that is gone shows in the next call
                self._ranks.tell({"stop": self._pulled})

    def _custom(self, tensors: Tensors) -> Iterator[tuple[str, torch.Tensor]]:
        assert self._options.gather is not None
        self._ranks.hear()
        items = iter(self._options.gather(iter(tensors.items())))
        while True:
            self._ranks.tell({"go": 0})
            item = next(items, None)
            more = item is not None
            for place, heard in zip(self._ranks.others, self._ranks.hear(), strict=True):
                if heard["more"] != more:
                    raise SyncFailedError(
                        f"gather= gave {'more' if heard['more'] else 'fewer'} tensors on "
                        f"{self._ranks.name(place)} than on rank {self._ranks.members[0]}",
                        {},
                    )
            if item is None:
                return
            yield item
            del item

    def _agree(self, tensors: Tensors) -> None:
        """Make a plan, unless the last one still fits."""
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
            orders = [[_order(batch, rank) for batch in self._batches] for rank in range(self._ranks.size)]
        self._ranks.tell_each({rank: {"plan": orders[rank]} for rank in self._ranks.others})
        self._agreed = True

    def _in_batches(self, tensors: Tensors) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield the tensors of each batch while the next one is on its way."""
        asked = (self._ask(place, tensors) for place in range(len(self._batches)))
        ahead = next(asked, None)
        while ahead is not None:
            batch = ahead
            if not batch.is_local:
                self._ranks.hear()
                for rank, work in batch.pulls:
                    self._ranks.finish(rank, work)
                self._pulled = batch.tag
            ahead = next(asked, None)
            yield from batch.items(tensors)
            del batch

    def _ask(self, place: int, tensors: Tensors) -> PendingBatch:
        """Ask the others for their parts of a batch."""
        pending = PendingBatch(self._batches[place], tensors)
        if pending.is_local:
            return pending
        pending.tag = next(self._ranks.tags)
        self._ranks.tell({"go": place, "tag": pending.tag})
        for rank, (memory, _) in pending.parts.items():
            pending.pulls.append((rank, self._ranks.pull(rank, memory, pending.tag)))
        pending.gather_whole(tensors)
        return pending

    # -- the others --------------------------------------------------------------------------------

    def _handle(self, message: Message) -> None:
        if "pass" in message:
            self._enter(self._weights[message["pass"]].tensors, message["known"])
        elif "plan" in message:
            self._orders = self._orders if message["plan"] is None else message["plan"]
        elif "go" in message:
            self._give(message)
        else:
            self._finish_push(message["stop"])
            self._tensors, self._mine = {}, iter(())

    def _enter(self, tensors: Tensors, known: bool) -> None:
        self._tensors, self._pushing = tensors, None
        if self._options.gather is not None:
            self._mine = iter(self._options.gather(iter(tensors.items())))
            self._ranks.report()
            return
        rows = rows_of(tensors)
        same, self._rows[0] = known and rows == self._rows[0], rows
        self._ranks.report({"rows": None if same else rows})

    @torch.no_grad()
    def _give(self, message: Message) -> None:
        if self._options.gather is not None:
            self._ranks.report({"more": next(self._mine, None) is not None})
            return
        self._finish_push(message["tag"])
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

    def _finish_push(self, pulled: int) -> None:
        """Wait until pushed data has left if the leader took it, which is so up to the tag ``pulled``."""
        pushing, self._pushing = self._pushing, None
        if pushing is not None and pushing[0] <= pulled:
            self._ranks.finish(0, pushing[1])


def _order(batch: Batch, rank: int) -> Message:
    """Return the names of a batch that a rank calls ``full_tensor()`` of, and the names that it pushes."""
    return {
        "whole": [item.names[0] for item in batch if item.boxes is None],
        "push": [item.names[0] for item in batch if rank in (item.boxes or ())],
    }
