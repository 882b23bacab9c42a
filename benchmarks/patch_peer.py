"""What others would do with the same update: RLinf's patch as its document describes it, and the obvious way.

RLinf's document gives the fields (ordinals, nnz_per_tensor, rows, cols, values), the 2-D view of every
tensor, and the rule of delta encoding. Where it leaves things open we take what costs RLinf fewer bytes:

- Coordinates "can often be downscaled to tighter dtypes such as uint8 or int32": one dtype for all rows of a
  patch and one for all columns, uint8 if the largest fits, else int32, else int64; without delta encoding
  too.
- Rows start anew with each tensor, so that no increment is negative.
- ordinals and nnz_per_tensor are int32; the version and what frames the message count for nothing.
- nvcomp_lz4 compresses rows, cols and values, each by itself; our LZ4 on the CPU stands for it here, in
  pieces of 1 MB where nvCOMP's are of 64 KB, which compress no better.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

import numpy as np
import torch

from benchmarks.patch_updates import Update
from weight_update.compression import Compression, pack
from weight_update.encodings.patch.changes import BITS

__all__ = ["documented_bytes", "obvious"]

Array = np.ndarray
_WIDTHS = (np.uint8, np.int32, np.int64)


def documented_bytes(update: Update, delta: bool, compression: Compression) -> int:
    """Bytes of RLinf's patch for ``update``, all changed elements in it."""
    tensors = list(_coordinates(update, delta))
    if not tensors:
        return 0
    rows, columns, values = (np.concatenate(parts) for parts in zip(*tensors, strict=True))
    arrays = (_narrow(rows), _narrow(columns), values)
    packed = (pack(compression, torch.from_numpy(array.view(np.uint8)))[1] for array in arrays)
    return 2 * 4 * len(tensors) + sum(piece.numel() for piece in packed)


def _narrow(numbers: Array) -> Array:
    dtype = next(dtype for dtype in _WIDTHS if int(numbers.max()) <= np.iinfo(dtype).max)
    return numbers.astype(dtype)


def _coordinates(update: Update, delta: bool) -> Iterator[tuple[Array, Array, Array]]:
    """Rows, columns and the bytes of values, of each tensor that changed."""
    for name, old in update.old.items():
        new = update.new[name].to(old.dtype)
        bits = BITS[old.dtype.itemsize]
        before, after = (value.reshape(-1).view(bits).numpy() for value in (old, new))
        places = np.flatnonzero(before != after)
        if not places.size:
            continue
        columns = math.prod(old.shape[1:]) if old.dim() > 1 else old.numel()
        row, column = np.divmod(places, columns)
        if delta:
            row, column = _differences(row, column)
        yield row, column, after[places].view(np.uint8)


def _differences(rows: Array, columns: Array) -> tuple[Array, Array]:
    steps = np.diff(rows, prepend=0)
    same = np.diff(rows, prepend=-1) == 0
    return steps, np.where(same, np.diff(columns, prepend=0), columns)


def obvious(old: list[torch.Tensor], new: list[torch.Tensor]) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Positions and values of what differs, as one would write it; nothing is narrowed or packed."""
    found = []
    for before, after in zip(old, new, strict=True):
        places = (before != after).nonzero()
        found.append((places, after[tuple(places.T)]))
    return found
