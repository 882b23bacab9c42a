"""The plan by which a sharded model is gathered: which rank holds which parts of each tensor."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard

from weight_update.errors import SchemaMismatchError
from weight_update.wire.memory import memory_identity
from weight_update.wire.schema import DTYPES, dtype_name

Box = tuple[tuple[int, ...], tuple[int, ...]]
"""A part of a tensor: its offset in each dimension, and its shape."""


class Row(NamedTuple):
    """One rank's description of one of its weights.

    Attributes:
        shape: shape of the whole tensor.
        layout: description of the placements, equal on all ranks; None for a plain tensor.
        box: the part that this rank holds; None if that is no box.
        on_cpu: whether the part lies in CPU memory, which can be sent from directly.
        tie: position of the first row with the same memory; its own if there is none before.
    """

    name: str
    shape: tuple[int, ...]
    dtype: str
    layout: str | None
    box: Box | None
    on_cpu: bool
    tie: int

    @classmethod
    def from_wire(cls, row: Sequence[Any]) -> Row:
        """Return the row that ``row``, as read from JSON, describes."""
        name, shape, dtype, layout, box, on_cpu, tie = row
        where = None if box is None else (tuple(box[0]), tuple(box[1]))
        return cls(name, tuple(shape), dtype, layout, where, on_cpu, tie)


@dataclass
class GatherItem:
    """A tensor to be gathered, under its name and those tied to it.

    Attributes:
        boxes: the box to take from each rank that gives one; empty for a plain tensor; None if only
            ``full_tensor()`` on all ranks can gather it.
        nbytes: bytes of the whole tensor; 0 for a plain tensor, of which nothing is gathered.
    """

    names: list[str]
    boxes: dict[int, Box] | None
    nbytes: int


Batch = list[GatherItem]
"""Tensors that are gathered at once."""


def local_of(tensor: torch.Tensor) -> torch.Tensor:
    """Return the part of ``tensor`` that this rank holds. Gradients must be off."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor.detach()


def reshard(source: Any) -> None:
    """Have the FSDP modules in ``source`` free parameters that a forward pass alone left unsharded."""
    if isinstance(source, nn.Module):
        for module in source.modules():
            if isinstance(module, FSDPModule):
                module.reshard()


@torch.no_grad()
def rows_of(tensors: Mapping[str, torch.Tensor]) -> list[Row]:
    """Return this rank's description of its weights."""
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
        on_cpu = local.device.type == "cpu"
        rows.append(Row(name, tuple(tensor.shape), dtype_name(tensor.dtype), layout, box, on_cpu, tie))
    return rows


def _box_of(tensor: DTensor, local: tuple[int, ...]) -> Box | None:
    """Return the part of ``tensor`` that this rank holds, if it is a box as large as ``local``."""
    mesh = tensor.device_mesh
    here = mesh.get_coordinate()
    if here is None:
        return (0,) * tensor.ndim, (0,) * max(tensor.ndim, 1)
    start, shape = [0] * tensor.ndim, list(tensor.shape)
    done = dict.fromkeys(range(tensor.ndim), 1)  # number of parts that each dimension was cut into
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
    """Return mesh dimensions in the order in which they cut the tensor; strided ones last, from the right."""
    cuts = [axis for axis, one in enumerate(placements) if not isinstance(one, (Partial, Replicate))]
    plain = [axis for axis in cuts if isinstance(placements[axis], Shard)]
    return plain + [axis for axis in reversed(cuts) if axis not in plain]


def plan(ranks: Sequence[Sequence[Row]], members: Sequence[int], batch_bytes: int) -> list[Batch]:
    """Return the batches to gather, in the leader's order, with tied weights together.

    ``ranks`` has the rows of each rank, the leader's first; ``members`` their numbers, for messages. A batch
    has at most ``batch_bytes``, unless one tensor is larger. SchemaMismatchError lists differences of ranks.
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
    items: dict[int, GatherItem] = {}
    for place, row in enumerate(mine):
        if row.tie in items:
            items[row.tie].names.append(row.name)
            continue
        boxes = _boxes(row, [theirs[row.name] for theirs in others if row.layout])
        nbytes = math.prod(row.shape) * DTYPES[row.dtype].itemsize if row.layout else 0
        items[place] = GatherItem([row.name], boxes, nbytes)
    return _batches(items.values(), batch_bytes)


def _differences(mine: Sequence[Row], theirs: Mapping[str, Row], them: str, me: str) -> Iterable[str]:
    names = {row.name for row in mine}
    yield from (f"{row.name}: {them} does not have it" for row in mine if row.name not in theirs)
    yield from (f"{name}: {me} does not have it" for name in theirs if name not in names)
    for row in mine:
        other = theirs.get(row.name)
        if other is None or row.layout is other.layout is None:
            continue
        here, there = (f"{one.dtype}{list(one.shape)} {one.layout or 'whole'}" for one in (row, other))
        if here != there:
            yield f"{row.name}: {them} has {there}, {me} {here}"


def _boxes(row: Row, others: Sequence[Row]) -> dict[int, Box] | None:
    """Return the box of each rank to make the whole tensor of; of equal boxes, that of the lowest rank."""
    if row.layout is None:
        return {}
    owners: dict[Box, int] = {}
    for number, one in enumerate([row, *others]):
        if one.box is None:
            return None
        if math.prod(one.box[1]):
            owners.setdefault(one.box, number)
    remote = any(number and not others[number - 1].on_cpu for number in owners.values())
    whole = sum(math.prod(shape) for _, shape in owners) == math.prod(row.shape)
    return {number: box for box, number in owners.items()} if whole and not remote else None


def _batches(items: Iterable[GatherItem], limit: int) -> list[Batch]:
    """Split into runs of consecutive items of together at most ``limit`` bytes, or one that is larger."""
    batches, filled = list[Batch](), 0
    for item in items:
        if not batches or (filled and filled + item.nbytes > limit):
            batches.append([])
            filled = 0
        batches[-1].append(item)
        filled += item.nbytes
    return batches
