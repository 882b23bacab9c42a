"""Tensors that are gathered at once, and how they are put together."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from weight_update.sharded.plan import Batch, Item, local_of

__all__ = ["Coming", "Tensors", "flat", "whole_of"]

_ALIGNMENT = 16  # of the largest dtype
Tensors = Mapping[str, torch.Tensor]


class Coming:
    """A batch on its way to the leader.

    Attributes:
        is_here: whether the leader has all of it by itself.
        parts: what each rank is to push: memory for it, and a view for each tensor.
        pulls: what is under way, by rank.
    """

    def __init__(self, batch: Batch, tensors: Tensors) -> None:
        self._batch, self._whole = batch, dict[str, torch.Tensor]()
        self.is_here = all(item.parts is not None and not any(item.parts) for item in batch)
        kinds: dict[int, list[tuple[tuple[int, ...], torch.dtype]]] = {}
        for item in batch:
            for who, (_, shape) in (item.parts or {}).items():
                if who:
                    kinds.setdefault(who, []).append((shape, tensors[item.names[0]].dtype))
        self.parts = {who: flat(shapes) for who, shapes in kinds.items()}
        self.pulls: list[tuple[int, Any]] = []
        self.tag = -1

    def put_together(self, tensors: Tensors) -> None:
        """Do with the others what only all ranks at once can do."""
        names = [item.names[0] for item in self._batch if item.parts is None]
        self._whole = {name: whole_of(tensors, name) for name in names}

    def items(self, tensors: Tensors) -> Iterator[tuple[str, torch.Tensor]]:
        """Names and whole tensors, each made when it is asked for."""
        views = {who: iter(found) for who, (_, found) in self.parts.items()}
        for item in self._batch:
            tensor = self._whole.pop(item.names[0], None)
            if tensor is None:
                tensor = assemble(item, tensors, views)
            for name in item.names:
                yield name, tensor
            del tensor


def whole_of(tensors: Tensors, name: str) -> torch.Tensor:
    """The whole tensor of a DTensor; all ranks take part."""
    tensor = tensors[name]
    assert isinstance(tensor, DTensor)
    return tensor.full_tensor()


def assemble(item: Item, tensors: Tensors, views: Mapping[int, Iterator[torch.Tensor]]) -> torch.Tensor:
    """The whole tensor: without a copy where the leader has all of it."""
    own = tensors[item.names[0]]
    local = local_of(own)
    if not item.parts:
        return local.new_empty(own.shape) if isinstance(own, DTensor) else own
    if list(item.parts) == [0]:
        return local
    whole = torch.empty(own.shape, dtype=own.dtype)
    for who, (start, shape) in item.parts.items():
        target = whole
        for dim, (first, size) in enumerate(zip(start, shape, strict=True)):
            target = target.narrow(dim, first, size)
        target.copy_(next(views[who]) if who else local)
    return whole


def flat(kinds: list[tuple[tuple[int, ...], torch.dtype]]) -> tuple[torch.Tensor, list[torch.Tensor]]:
    """Memory for tensors of these shapes and dtypes, and a view for each."""
    places, end = [], 0
    for shape, dtype in kinds:
        places.append(end)
        nbytes = torch.Size(shape).numel() * dtype.itemsize
        end += -(-nbytes // _ALIGNMENT) * _ALIGNMENT
    memory = torch.empty(end, dtype=torch.uint8)
    views = [
        memory[place : place + torch.Size(shape).numel() * dtype.itemsize].view(dtype).view(shape)
        for place, (shape, dtype) in zip(places, kinds, strict=True)
    ]
    return memory, views
