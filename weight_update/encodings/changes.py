"""What differs between two versions of one flat buffer."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from weight_update.chunks import WeightSchema

__all__ = ["Changes", "Run", "Sparse"]

Array = npt.NDArray[Any]

BITS: dict[int, torch.dtype] = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
"""The integer that holds the bits of an element of so many bytes; 16-byte elements count as two of 8."""

_BLOCK = 1 << 14


@dataclass(frozen=True, eq=False)
class Run:
    """Bytes that are replaced one after the other.

    Attributes:
        start: first byte in the flat buffer.
        data: new bytes, 1-D uint8.
    """

    start: int
    data: torch.Tensor


@dataclass(frozen=True, eq=False)
class Sparse:
    """Single elements of one width.

    Attributes:
        width: bytes of an element: 1, 2, 4 or 8.
        positions: 1-D int64, strictly increasing, in elements of this width from the start of the buffer.
        values: new bit patterns, of dtype ``BITS[width]`` and the shape of ``positions``.
        relative: the values are not new bits but are added to those that are there, modulo 2**(8 * width).
    """

    width: int
    positions: torch.Tensor
    values: torch.Tensor
    relative: bool = False


@dataclass(frozen=True, eq=False)
class Changes:
    """All that differs: writing it over the old version gives the new one, bit for bit.

    Attributes:
        sparse: at most one for each width, in ascending order of width; none is empty.
        runs: by ascending start, not overlapping each other nor any position in ``sparse``.
    """

    sparse: tuple[Sparse, ...] = ()
    runs: tuple[Run, ...] = ()

    def write(self, flat: torch.Tensor) -> None:
        """Change ``flat`` (1-D uint8; 8-byte aligned, its size a multiple of 8) from old to new.

        It must be on the device of the tensors given here. Positions are trusted.
        """
        for part in self.sparse:
            words, positions, values = flat.view(BITS[part.width]), part.positions, part.values
            if words.is_cuda:
                words[positions] = words[positions] + values if part.relative else values
            else:
                _write_sparse(words.numpy(), positions.numpy(), values.numpy(), part.relative)
        for run in self.runs:
            place = flat[run.start : run.start + run.data.numel()]
            if place.is_cuda:
                place.copy_(run.data)
            else:
                place.numpy()[:] = run.data.numpy()

    def to(self, device: torch.device) -> Changes:
        """The same on ``device``; what is there already is not copied."""
        return Changes(
            tuple(
                replace(part, positions=part.positions.to(device), values=part.values.to(device))
                for part in self.sparse
            ),
            tuple(replace(run, data=run.data.to(device)) for run in self.runs),
        )

    def touched(self, schema: WeightSchema) -> list[int]:
        """Positions of the entries of ``schema`` that change, in ascending order; CPU only."""
        metas = schema.tensors
        order = sorted((i for i in range(len(metas)) if metas[i].nbytes), key=lambda i: metas[i].offset)
        starts = np.array([metas[i].offset for i in order])
        ends = np.array([metas[i].offset + metas[i].nbytes for i in order])
        hit = np.zeros(len(order), dtype=bool)
        for part in self.sparse:
            bytes_at = part.positions.numpy() * part.width
            counts = np.searchsorted(bytes_at, ends) - np.searchsorted(bytes_at, starts)
            hit |= counts > 0
        for run in self.runs:
            hit |= (starts < run.start + run.data.numel()) & (run.start < ends)
        return sorted(order[int(i)] for i in np.flatnonzero(hit))


# Not torch: its threads hang in forked processes.
def _write_sparse(words: Array, positions: Array, values: Array, relative: bool) -> None:
    if not relative:
        words[positions] = values
        return
    for start in range(0, positions.size, _BLOCK):  # what was read is in the cache when it is written
        place = positions[start : start + _BLOCK]
        words[place] = values[start : start + _BLOCK] + np.take(words, place, mode="clip")
