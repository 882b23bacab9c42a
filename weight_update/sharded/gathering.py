"""The gather: sharded weights are put together on the leader while all ranks go through them in step.

A pass through weights takes these messages. An answer (``<-``) is each other rank's own, or an error::

    -> {"pass": number of the weights, "known": whether all ranks have a plan}
    <- {"rows": descriptions of the rank's parts; null if they are as in the last pass}
    -> {"plan": names that the rank takes part with, for each batch; null if the last plan still fits}
    -> {"go": number of a batch, "tag": tag}    for each batch that the leader does not hold all of
    <- {}, then the rank's parts, as bytes with the tag
    -> {"stop": number of the weights}          also after an error

With ``GatherShards(gather=...)`` the answer to the first message is empty, and there is no plan::

    -> {"go": 0}                                for each item, and once more
    <- {"more": whether the rank has an item}
"""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Generator, Iterator, Mapping
from functools import partial
from itertools import takewhile
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from weight_update.errors import SyncFailedError, WeightSyncError
from weight_update.sharded.links import Message
from weight_update.sharded.plan import Batch, GatherItem, Row, local_of, plan, reshard, rows_of
from weight_update.sharded.ranks import Ranks
from weight_update.strategy.conversion import Convert, call_converter, convert_checked
from weight_update.strategy.named_weights import NamedWeights
from weight_update.strategy.strategy import GatherShards, WeightStrategy
from weight_update.wire.schema import aligned

_ALIGNMENT = 16  # of the largest dtype
Tensors = Mapping[str, torch.Tensor]


def is_sharded(strategy: WeightStrategy, source: Any) -> bool:
    """Return whether other processes hold parts of the weights of ``source``."""
    source = _called(source)
    reshard(source)  # parameters that a forward pass alone left unsharded are no DTensors
    return strategy.named(source).sharded


def _called(source: Any) -> Any:
    """Return the result of a function. A strategy may read other objects that can be called."""
    while inspect.isroutine(source):
        source = source()
    return source


class Gathering:
    """Weights that all ranks read alike, so that they can go through them in step."""

    def __init__(self, ranks: Ranks, options: GatherShards) -> None:
        self._ranks, self._options = ranks, options
        self._weights: list[NamedWeights] = []

    def begin(self) -> None:
        """Number the weights that are read from now on from 0, on all ranks alike."""
        self._weights = []

    def read(self, strategy: WeightStrategy, source: Any, chosen: frozenset[str] | None) -> NamedWeights:
        """Return the weights of ``source``; going through their items takes all ranks, in step."""
        source = _called(source)
        reshard(source)
        named = strategy.outgoing(source, chosen, later=True)
        self._weights.append(named)
        return named


class GatherLeader(Gathering):
    """The gather on the leader, which goes through weights and gets whole tensors."""

    def __init__(self, ranks: Ranks, options: GatherShards) -> None:
        super().__init__(ranks, options)
        self._rows: list[list[Row]] = [[] for _ in ranks.members]  # of all ranks; this rank's come first
        self._batches: list[Batch] | None = None  # the plan, once all ranks have it

    def read(self, strategy: WeightStrategy, source: Any, chosen: frozenset[str] | None) -> NamedWeights:
        named = super().read(strategy, source, chosen)
        named.gather = partial(self._items, len(self._weights) - 1)
        return named

    def _items(self, number: int, tensors: Tensors) -> Generator[tuple[str, torch.Tensor]]:
        """Yield names and whole tensors; its end is also the end of the pass for the others."""
        try:
            self._ranks.tell({"pass": number, "known": self._batches is not None})
            if self._options.gather is not None:
                yield from self._one_by_one(self._options.gather, tensors)
            else:
                yield from self._in_batches(self._agree(tensors), tensors)
        finally:
            self._ranks.drain()
            with contextlib.suppress(WeightSyncError):  # a rank that is gone shows in the next call
                self._ranks.tell({"stop": number})

    def _one_by_one(self, gather: Convert, tensors: Tensors) -> Iterator[tuple[str, torch.Tensor]]:
        self._ranks.hear()
        items = convert_checked(gather, iter(tensors.items()), "gather")
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

    def _agree(self, tensors: Tensors) -> list[Batch]:
        """Return the batches of the last plan if it still fits, else of a new one."""
        batches, self._batches = self._batches, None
        rows = rows_of(tensors)
        heard = [one["rows"] for one in self._ranks.hear()]
        orders: list[Any] = [None] * self._ranks.size
        if batches is None or rows != self._rows[0] or any(one is not None for one in heard):
            theirs = [
                old if new is None else [Row.from_wire(row) for row in new]
                for new, old in zip(heard, self._rows[1:], strict=True)
            ]
            self._rows = [rows, *theirs]
            batches = plan(self._rows, self._ranks.members, self._options.batch_bytes // 2)
            orders = [[_order(batch, rank) for batch in batches] for rank in range(self._ranks.size)]
        self._ranks.tell_each({rank: {"plan": orders[rank]} for rank in self._ranks.others})
        self._batches = batches
        return batches

    def _in_batches(self, batches: list[Batch], tensors: Tensors) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield the tensors of each batch while the next one is on its way."""
        asked = (self._ask(number, batch, tensors) for number, batch in enumerate(batches))
        ahead = next(asked, None)
        while ahead is not None:
            batch = ahead
            if not batch.is_local:
                self._ranks.hear()
            ahead = next(asked, None)
            yield from batch.items()
            del batch

    def _ask(self, number: int, batch: Batch, tensors: Tensors) -> _PendingBatch:
        """Ask the others for their parts of a batch."""
        pending = _PendingBatch(batch, tensors)
        if not pending.is_local:
            tag = next(self._ranks.tags)
            self._ranks.tell({"go": number, "tag": tag})
            for rank, (memory, _) in pending.parts.items():
                self._ranks.pull(rank, memory, tag)
            pending.gather_whole()
        return pending


def _order(batch: Batch, rank: int) -> Message:
    """Return the names of a batch that a rank calls ``full_tensor()`` of, and the names that it pushes."""
    return {
        "whole": [item.names[0] for item in batch if item.boxes is None],
        "push": [item.names[0] for item in batch if rank in (item.boxes or ())],
    }


class GatherFollower(Gathering):
    """The gather on every other rank, which gives its parts when the leader asks for them."""

    def __init__(self, ranks: Ranks, options: GatherShards) -> None:
        super().__init__(ranks, options)
        self._rows: list[Row] = []  # of the last pass
        self._orders: list[Message] = []  # the last plan
        ranks.take_part = self._take_part

    def _take_part(self, messages: Iterator[Message]) -> None:
        """Take part in all passes of a step."""
        for first in messages:
            rest = takewhile(lambda message: "stop" not in message, messages)
            if self._options.gather is not None:
                self._one_by_one(self._options.gather, first, rest)
            else:
                self._in_batches(first, rest)

    def _one_by_one(self, gather: Convert, first: Message, messages: Iterator[Message]) -> None:
        items = _unused(gather, self._weights[first["pass"]].tensors)
        self._ranks.report({})
        for _ in messages:
            self._ranks.report({"more": next(items, None) is not None})

    def _in_batches(self, first: Message, messages: Iterator[Message]) -> None:
        tensors = self._weights[first["pass"]].tensors
        before, self._rows = self._rows, rows_of(tensors)
        self._ranks.report({"rows": None if first["known"] and self._rows == before else self._rows})
        orders = next(messages, {"plan": None})["plan"]
        self._orders = self._orders if orders is None else orders
        for go in messages:
            self._give(self._orders[go["go"]], tensors, go["tag"])

    @torch.no_grad()
    def _give(self, order: Message, tensors: Tensors, tag: int) -> None:
        """Send this rank's parts of a batch; return when they have left."""
        for name in order["whole"]:
            _whole_of(tensors, name)
        parts = [local_of(tensors[name]) for name in order["push"]]
        memory, views = _flat([(tuple(part.shape), part.dtype) for part in parts])
        for view, part in zip(views, parts, strict=True):
            view.copy_(part)
        self._ranks.report({})
        if views:
            self._ranks.finish(0, self._ranks.push(memory, tag))


def _unused(gather: Convert, tensors: Tensors) -> Iterator[Any]:
    """Yield the results of ``gather`` on a rank that does not use them: they may be anything but None."""
    yield from call_converter(gather, iter(tensors.items()), "gather")


class _PendingBatch:
    """A batch on its way to the leader.

    Attributes:
        is_local: whether the leader holds all of it itself.
        parts: for each rank that pushes, the memory for what it pushes, and a view of it for each tensor.
    """

    def __init__(self, batch: Batch, tensors: Tensors) -> None:
        self._batch, self._tensors, self._whole = batch, tensors, dict[str, torch.Tensor]()
        self.is_local = all(item.boxes is not None and not any(item.boxes) for item in batch)
        shapes: dict[int, list[tuple[tuple[int, ...], torch.dtype]]] = {}
        for item in batch:
            for rank, (_, shape) in (item.boxes or {}).items():
                if rank:
                    shapes.setdefault(rank, []).append((shape, tensors[item.names[0]].dtype))
        self.parts = {rank: _flat(one) for rank, one in shapes.items()}

    def gather_whole(self) -> None:
        """Gather the tensors that only ``full_tensor()`` on all ranks can gather."""
        names = [item.names[0] for item in self._batch if item.boxes is None]
        self._whole = {name: _whole_of(self._tensors, name) for name in names}

    def items(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield names and whole tensors; each tensor is made when it is asked for."""
        views = {rank: iter(found) for rank, (_, found) in self.parts.items()}
        for item in self._batch:
            tensor = self._whole.pop(item.names[0], None)
            if tensor is None:
                tensor = _assemble(item, self._tensors, views)
            for name in item.names:
                yield name, tensor
            del tensor


def _whole_of(tensors: Tensors, name: str) -> torch.Tensor:
    """Return the whole tensor of a DTensor; all ranks call this."""
    tensor = tensors[name]
    assert isinstance(tensor, DTensor)
    return tensor.full_tensor()


def _assemble(
    item: GatherItem, tensors: Tensors, views: Mapping[int, Iterator[torch.Tensor]]
) -> torch.Tensor:
    """Return the whole tensor, without a copy if the leader holds all of it."""
    own = tensors[item.names[0]]
    local = local_of(own)
    if not item.boxes:
        return local.new_empty(own.shape) if isinstance(own, DTensor) else own
    if list(item.boxes) == [0]:
        return local
    whole = torch.empty(own.shape, dtype=own.dtype, device="cpu")
    for rank, (start, shape) in item.boxes.items():
        target = whole
        for dim, (first, size) in enumerate(zip(start, shape, strict=True)):
            target = target.narrow(dim, first, size)
        target.copy_(next(views[rank]) if rank else local)
    return whole


def _flat(shapes: list[tuple[tuple[int, ...], torch.dtype]]) -> tuple[torch.Tensor, list[torch.Tensor]]:
    """Return memory for tensors of these shapes and dtypes, and a view of it for each."""
    sizes = [torch.Size(shape).numel() * dtype.itemsize for shape, dtype in shapes]
    padded = [aligned(size, _ALIGNMENT) for size in sizes]
    memory = torch.empty(sum(padded), dtype=torch.uint8, device="cpu")
    parts = zip(torch.split(memory, padded), sizes, shapes, strict=True)
    return memory, [part[:size].view(dtype).view(shape) for part, size, (shape, dtype) in parts]
