"""A batch of tensors that are gathered at once, and their assembly."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import torch
from torch.distributed.tensor import DTensor

from weight_update.sharded.plan import Batch, GatherItem, local_of
from weight_update.wire.schema import aligned

_ALIGNMENT = 16  # of the largest dtype
Tensors = Mapping[str, torch.Tensor]


class PendingBatch:
    """A batch on its way to the leader.

    Attributes:
        is_local: whether the leader holds all of it itself.
        parts: for each rank that pushes, the memory for what it pushes, and a view of it for each tensor.
    """

    def __init__(self, batch: Batch, tensors: Tensors) -> None:
        self._batch, self._whole = batch, dict[str, torch.Tensor]()
        self.is_local = all(item.boxes is not None and not any(item.boxes) for item in batch)
        shapes: dict[int, list[tuple[tuple[int, ...], torch.dtype]]] = {}
        for item in batch:
            for rank, (_, shape) in (item.boxes or {}).items():
                if rank:
                    shapes.setdefault(rank, []).append((shape, tensors[item.names[0]].dtype))
        self.parts = {rank: flat(one) for rank, one in shapes.items()}

    def gather_whole(self, tensors: Tensors) -> None:
        """Gather the tensors that only ``full_tensor()`` on all ranks can gather."""
        names = [item.names[0] for item in self._batch if item.boxes is None]
        self._whole = {name: whole_of(tensors, name) for name in names}

    def items(self, tensors: Tensors) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield names and whole tensors; each tensor is made when it is asked for."""
        views = {rank: iter(found) for rank, (_, found) in self.parts.items()}
        for item in self._batch:
            tensor = self._whole.pop(item.names[0], None)
            if tensor is None:
                tensor = assemble(item, tensors, views)
            for name in item.names:
                yield name, tensor
            del tensor


def whole_of(tensors: Tensors, name: str) -> torch.Tensor:
    """Return the whole tensor of a DTensor; all ranks call this."""
    tensor = tensors[name]
    assert isinstance(tensor, DTensor)
    return tensor.full_tensor()


def assemble(item: GatherItem, tensors: Tensors, views: Mapping[int, Iterator[torch.Tensor]]) -> torch.Tensor:
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


def flat(shapes: list[tuple[tuple[int, ...], torch.dtype]]) -> tuple[torch.Tensor, list[torch.Tensor]]:
    """Return memory for tensors of these shapes and dtypes, and a view of it for each."""
    sizes = [torch.Size(shape).numel() * dtype.itemsize for shape, dtype in shapes]
    padded = [aligned(size, _ALIGNMENT) for size in sizes]
    memory = torch.empty(sum(padded), dtype=torch.uint8, device="cpu")
    parts = zip(torch.split(memory, padded), sizes, shapes, strict=True)
    return memory, [part[:size].view(dtype).view(shape) for part, size, (shape, dtype) in parts]
