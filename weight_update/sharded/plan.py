"""Weights that several ranks of a trainer hold in parts: who holds what, and how it is put together."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard

from weight_update.errors import SchemaMismatchError
from weight_update.wire.memory import memory_identity
from weight_update.wire.schema import DTYPES, dtype_name

__all__ = ["Batch", "Box", "Item", "Row", "local_of", "plan", "reshard", "rows_of", "sharded"]

Box = tuple[tuple[int, ...], tuple[int, ...]]
"""A part of a tensor: where it begins in each dimension, and its shape."""


@dataclass(frozen=True)
class Row:
    """What one rank says of one of its weights.

    Attributes:
        name: dotted.
        shape: of the whole tensor.
        dtype: its name.
        layout: how it is sharded, equal on all ranks; None for a plain tensor.
        box: the part that this rank holds; None if that is no box.
        near: whether that lies in memory that a network can send from.
        tie: place of the first row with the same memory; its own if there is none before.
    """

    name: str
    shape: tuple[int, ...]
    dtype: str
    layout: str | None
    box: Box | None
    near: bool
    tie: int

    @classmethod
    def from_wire(cls, row: Sequence[Any]) -> Row:
        """Inverse of ``dataclasses.astuple``, after JSON."""
        name, shape, dtype, layout, box, near, tie = row
        where = None if box is None else (tuple(box[0]), tuple(box[1]))
        return cls(name, tuple(shape), dtype, layout, where, near, tie)


@dataclass
class Item:
    """One tensor to be put together.

    Attributes:
        names: of the tensor, and of those tied to it.
        parts: the box to take from each rank that gives one; empty for a plain tensor; None if only
            ``full_tensor()`` of all ranks can do it.
    """

    names: list[str]
    parts: dict[int, Box] | None


Batch = list[Item]
"""What is gathered at once."""


def local_of(tensor: torch.Tensor) -> torch.Tensor:
    """The part of ``tensor`` that is here; of a plain one, all of it. Gradients are to be off."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor.detach()


def sharded(tensors: Mapping[str, torch.Tensor]) -> bool:
    """Whether there are some of which other processes hold parts."""
    return any(issubclass(kind, DTensor) for kind in set(map(type, tensors.values())))


def reshard(source: Any) -> None:
    """Have the FSDP modules in ``source`` free what a forward pass without a backward pass left whole."""
    if isinstance(source, nn.Module):
        for module in source.modules():
            if isinstance(module, FSDPModule):
                module.reshard()


@torch.no_grad()
def rows_of(tensors: Mapping[str, torch.Tensor]) -> list[Row]:
    """What this rank has to say of its weights."""
    first: dict[Any, int] = {}
    known: dict[Any, tuple[str, Box | None]] = {}  # most tensors are sharded like another of their shape
    rows = []
    for place, (name, tensor) in enumerate(tensors.items()):
        local = local_of(tensor)
        tie = first.setdefault((memory_identity(local) or id(tensor), tensor.shape), place)
        layout, box = None, None
        if isinstance(tensor, DTensor):
            kind = id(tensor.device_mesh), tensor.placements, tensor.shape, local.shape
            if kind not in known:
                layout = f"{tuple(tensor.device_mesh.shape)} {tensor.placements}"
                known[kind] = layout, _box_of(tensor, tuple(local.shape))
            layout, box = known[kind]
        near = local.device.type == "cpu"
        rows.append(Row(name, tuple(tensor.shape), dtype_name(tensor.dtype), layout, box, near, tie))
    return rows


def _box_of(tensor: DTensor, local: tuple[int, ...]) -> Box | None:
    """The part of ``tensor`` that this rank has, if it is a box as large as ``local``."""
    mesh = tensor.device_mesh
    here = mesh.get_coordinate()
    if here is None:
        return (0,) * tensor.ndim, (0,) * max(tensor.ndim, 1)
    start, shape = [0] * tensor.ndim, list(tensor.shape)
    done = dict.fromkeys(range(tensor.ndim), 1)  # into how many parts each dimension was cut
    for axis in _in_order_of_cuts(tensor.placements):
        placement: Any = tensor.placements[axis]
        dim, size = placement.dim, mesh.size(axis)
        if not isinstance(placement, Shard) and placement.split_factor != done[dim]:
            return None
        each = -(-shape[dim] // size)
        begin = min(here[axis] * each, shape[dim])
        start[dim] += begin
        shape[dim] = min(each, shape[dim] - begin)
        done[dim] *= size
    partial = any(isinstance(one, Partial) for one in tensor.placements)
    return None if partial or tuple(shape) != local else (tuple(start), local)


def _in_order_of_cuts(placements: Sequence[Any]) -> list[int]:
    """Mesh dimensions that cut the tensor, in that order: strided ones after all others, from the right."""
    cuts = [axis for axis, one in enumerate(placements) if not isinstance(one, (Partial, Replicate))]
    plain = [axis for axis in cuts if isinstance(placements[axis], Shard)]
    return plain + [axis for axis in reversed(cuts) if axis not in plain]


def plan(ranks: Sequence[Sequence[Row]], members: Sequence[int], batch_bytes: int) -> list[Batch]:
    """What to gather, in which order: as the leader has it, but tied weights together.

    Args:
        ranks: the rows of each rank, the leader's first.
        members: the number of each in the default process group, for messages.
        batch_bytes: the largest batch, unless one tensor is larger.

    Raises:
        SchemaMismatchError: the ranks do not hold parts of the same weights; it lists the differences.
    """
    mine = ranks[0]
    others = [{row.name: row for row in rows} for rows in ranks[1:]]
    problems = [
        line
        for theirs, number in zip(others, members[1:], strict=True)
        for line in _differences(mine, theirs, f"rank {number}", f"rank {members[0]}")
    ]
    if problems:
        raise SchemaMismatchError("the ranks of the trainer do not hold the same weights:", tuple(problems))
    items: dict[int, Item] = {}
    sizes: dict[int, int] = {}
    for place, row in enumerate(mine):
        if row.tie != place and row.tie in items:
            items[row.tie].names.append(row.name)
            continue
        items[place] = Item([row.name], _parts(row, [theirs[row.name] for theirs in others if row.layout]))
        sizes[place] = _nbytes(row) if row.layout else 0
    return _batches(list(items.values()), list(sizes.values()), batch_bytes)


def _differences(mine: Sequence[Row], theirs: Mapping[str, Row], them: str, me: str) -> Iterable[str]:
    names = {row.name for row in mine}
    yield from (f"{row.name}: {them} does not have it" for row in mine if row.name not in theirs)
    yield from (f"{name}: {me} does not have it" for name in theirs if name not in names)
    for row in mine:
        other = theirs.get(row.name)
        if other is None or row.layout is None:
            continue
        here, there = ((one.dtype, list(one.shape), one.layout or "whole") for one in (row, other))
        if here != there:
            yield f"{row.name}: {them} has {_text(*there)}, {me} {_text(*here)}"


def _text(dtype: str, shape: list[int], layout: str) -> str:
    return f"{dtype}{shape} {layout}"


def _parts(row: Row, others: Sequence[Row]) -> dict[int, Box] | None:
    """Ranks whose boxes make the whole tensor; the lower the number of the rank, the rather it is taken."""
    if row.layout is None:
        return {}
    parts: dict[Box, int] = {}
    for number, one in enumerate([row, *others]):
        if one.box is None:
            return None
        if math.prod(one.box[1]):
            parts.setdefault(one.box, number)
    far = any(number and not others[number - 1].near for number in parts.values())
    whole = sum(math.prod(shape) for _, shape in parts) == math.prod(row.shape)
    return {number: box for box, number in parts.items()} if whole and not far else None


def _nbytes(row: Row) -> int:
    return math.prod(row.shape) * DTYPES[row.dtype].itemsize


def _batches(items: list[Item], sizes: list[int], limit: int) -> list[Batch]:
    """Consecutive items of together at most ``limit`` bytes, or one that is larger."""
    numbers, number, filled = [], 0, 0
    for size in sizes:
        if filled and filled + size > limit:
            number, filled = number + 1, 0
        numbers.append(number)
        filled += size
    pairs = zip(numbers, items, strict=True)
    return [[item for _, item in batch] for _, batch in groupby(pairs, key=lambda pair: pair[0])]
