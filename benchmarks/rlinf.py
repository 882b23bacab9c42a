"""Patches as the documentation of RLinf's weight syncer describes them: their bytes, and their time on a GPU.

The document gives the fields of a patch (ordinals, nnz_per_tensor, rows, cols, values), the 2-D view of every
tensor, and the rule of delta encoding. Where it leaves things open, this takes what is faster or smaller:

- Coordinates "can often be downscaled to tighter dtypes such as uint8 or int32": one dtype for all rows of a
  patch and one for all columns, uint8 if the largest fits, else int32; without delta encoding too.
- Rows start anew with each tensor, so that no increment is negative.
- ordinals and nnz_per_tensor are int32; the version and what frames the message count for nothing.
- nvcomp_lz4 compresses rows, cols and values, each by itself; in :func:`documented_bytes`, our LZ4 on the CPU
  stands for it, in pieces of 1 MB where nvCOMP's are of 64 KB, which compress no better.
- The snapshot lies on the GPU, or in pinned memory, from where each tensor is copied to the GPU while another
  is compared. Rows, columns and values come to lie in pinned memory.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

import torch

from weight_update.compression import Compression, pack
from weight_update.wire.schema import BITS

Tensors = Sequence[torch.Tensor]
Weights = Mapping[str, torch.Tensor]
Change = tuple[torch.Tensor, torch.Tensor, torch.Tensor]
"""Rows, columns and values."""


class Fields(NamedTuple):
    """The fields of a patch; ``counts`` has the number of changes of each tensor, unchanged ones too."""

    counts: list[int]
    rows: torch.Tensor
    columns: torch.Tensor
    values: torch.Tensor

    @property
    def nbytes(self) -> int:
        """Number of bytes; ordinals and counts have 4 each."""
        touched = sum(count > 0 for count in self.counts)
        return 8 * touched + self.rows.nbytes + self.columns.nbytes + self.values.nbytes


class DocumentedPatch:
    """A snapshot, and the patch from it to other weights.

    Args:
        old: the weights of the snapshot, of one dtype.
        snapshot_device: ``"cuda"``; or ``"cpu"`` for pinned memory.
        device: that of the weights.
    """

    def __init__(self, old: Tensors, snapshot_device: str, device: torch.device) -> None:
        self._device, self._on_gpu = device, snapshot_device == "cuda" and device.type == "cuda"
        self._snapshot = [tensor.clone() if self._on_gpu else _pinned(tensor) for tensor in old]
        self._copies = torch.cuda.Stream(device) if device.type == "cuda" else None

    def build(self, new: Tensors) -> Fields:
        """Return the patch from the snapshot to ``new``."""
        found = [_increments(*_changes(*pair)) for pair in zip(new, self._arriving(), strict=True)]
        rows, columns, values = (torch.cat(parts) for parts in zip(*found, strict=True))
        fields = Fields(
            [len(part) for part, _, _ in found], *map(_pinned, (_narrow(rows), _narrow(columns), values))
        )
        if self._copies is not None:
            torch.cuda.current_stream(self._device).synchronize()
        return fields

    def _arriving(self) -> Iterator[torch.Tensor]:
        """Yield each tensor of the snapshot on the device, while the next one is copied there."""
        if self._on_gpu or self._copies is None:
            yield from self._snapshot
            return
        current, ahead = torch.cuda.current_stream(self._device), []
        for tensor in [*self._snapshot, None]:
            if tensor is not None:
                with torch.cuda.stream(self._copies):
                    copied = tensor.to(self._device, non_blocking=True)
                    ahead.append((copied, self._copies.record_event()))
            if len(ahead) > 1 or (tensor is None and ahead):
                copied, event = ahead.pop(0)
                current.wait_event(event)
                copied.record_stream(current)
                yield copied


def documented_bytes(old: Weights, new: Weights, delta: bool, compression: Compression) -> int:
    """Return the bytes of the patch from ``old`` to ``new``, with or without delta encoding, compressed."""
    pairs = ((new[name].to(value.dtype), value) for name, value in old.items())
    found = [change for change in (_changes(*pair) for pair in pairs) if len(change[0])]
    if not found:
        return 0
    if delta:
        found = [_increments(*change) for change in found]
    rows, columns, values = (torch.cat(parts) for parts in zip(*found, strict=True))
    arrays = (_narrow(rows), _narrow(columns), values)
    return 8 * len(found) + sum(pack(compression, one.view(torch.uint8))[1].numel() for one in arrays)


def apply(fields: Fields, weights: Tensors) -> None:
    """Write the changes into ``weights``."""
    device = weights[0].device
    arrays = [array.to(device, non_blocking=True) for array in fields[1:]]
    parts = zip(*(array.split(fields.counts) for array in arrays), strict=True)
    for weight, (steps, more, values) in zip(weights, parts, strict=True):
        if len(values):
            rows, columns = steps.long().cumsum(0), more.long()
            sums, order = columns.cumsum(0), torch.arange(len(rows), device=device)
            first = torch.where(_begins(rows), order, 0).cummax(0).values  # where the row of each begins
            _matrix(weight)[rows, sums - (sums - columns)[first]] = values


def _changes(new: torch.Tensor, old: torch.Tensor) -> Change:
    """Return rows, columns and values that differ."""
    new, old = _matrix(new), _matrix(old)
    rows, columns = (new != old).nonzero(as_tuple=True)
    return rows, columns, new[rows, columns]


def _increments(rows: torch.Tensor, columns: torch.Tensor, values: torch.Tensor) -> Change:
    """Return increments of rows, increments or first ones of columns, and the values."""
    return (
        rows.diff(prepend=rows.new_zeros(1)),
        torch.where(_begins(rows), columns, columns.diff(prepend=rows.new_zeros(1))),
        values,
    )


def _begins(rows: torch.Tensor) -> torch.Tensor:
    """Return for each change whether it is the first of its row."""
    return rows.diff(prepend=rows.new_full((1,), -1)) != 0


def _matrix(tensor: torch.Tensor) -> torch.Tensor:
    """Return a 2-D view of the bits."""
    bits = tensor.view(BITS[tensor.itemsize])
    return bits.view(bits.shape[0], math.prod(bits.shape[1:])) if bits.dim() > 1 else bits.view(1, -1)


def _narrow(array: torch.Tensor) -> torch.Tensor:
    return array.to(torch.uint8 if not len(array) or int(array.max()) < 256 else torch.int32)


def _pinned(tensor: torch.Tensor) -> torch.Tensor:
    target = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=tensor.is_cuda)
    return target.copy_(tensor, non_blocking=True)
