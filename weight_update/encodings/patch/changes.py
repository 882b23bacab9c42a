"""What differs between two versions of one flat buffer."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from weight_update.encodings.patch.threads import in_threads, threads_for
from weight_update.wire.schema import WeightSchema

__all__ = ["Changes", "Run", "Sparse", "Stretch"]

Array = npt.NDArray[Any]

BITS: dict[int, torch.dtype] = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
"""The integer that holds the bits of an element of so many bytes; 16-byte elements count as two of 8."""

_BLOCK = 1 << 14
_SHARE = 1 << 17  # elements that a thread writes at a time


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
class Stretch:
    """Consecutive ones of the elements that change.

    Attributes:
        first: the element of the buffer that ``places`` count from.
        places: 1-D int32 or int64, not empty, not negative, strictly increasing.
        values: as in :class:`Sparse`, of the shape of ``places``.
    """

    first: int
    places: torch.Tensor
    values: torch.Tensor

    def blocks(self, size: int) -> Iterator[Stretch]:
        """The same in stretches of at most ``size`` elements."""
        for start in range(0, len(self.places), size):
            stop = start + size
            yield Stretch(self.first, self.places[start:stop], self.values[start:stop])


@dataclass(frozen=True, eq=False)
class Sparse:
    """Single elements of one width.

    Attributes:
        width: bytes of an element: 1, 2, 4 or 8.
        stretches: by ascending position, at least one; elements of this width count from the start of the
            buffer. Their values are new bit patterns, of dtype ``BITS[width]``.
        relative: the values are not new bits but are added to those that are there, modulo 2**(8 * width).
    """

    width: int
    stretches: tuple[Stretch, ...]
    relative: bool = False

    @classmethod
    def of(cls, width: int, positions: torch.Tensor, values: torch.Tensor, relative: bool = False) -> Sparse:
        """One stretch; ``positions`` are int64."""
        return cls(width, (Stretch(0, positions, values),), relative)

    def __len__(self) -> int:
        return sum(len(one.places) for one in self.stretches)

    @functools.cached_property
    def positions(self) -> torch.Tensor:
        """All positions, 1-D int64, strictly increasing."""
        return torch.cat([one.places.to(torch.int64) + one.first for one in self.stretches])

    @functools.cached_property
    def values(self) -> torch.Tensor:
        """All values, of the shape of :attr:`positions`."""
        return torch.cat([one.values for one in self.stretches])

    def blocks(self, size: int) -> list[Stretch]:
        """The same in stretches of at most ``size`` elements."""
        return [block for one in self.stretches for block in one.blocks(size)]


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
            words = flat.view(BITS[part.width])
            if words.is_cuda:
                positions, values = part.positions, part.values
                words[positions] = words[positions] + values if part.relative else values
            else:
                _write_sparse(words.numpy(), part)
        for run in self.runs:
            place = flat[run.start : run.start + run.data.numel()]
            if place.is_cuda:
                place.copy_(run.data)
            else:
                place.numpy()[:] = run.data.numpy()

    def map(self, move: Callable[[torch.Tensor], torch.Tensor]) -> Changes:
        """The same with every tensor replaced by what ``move`` makes of it."""
        sparse = []
        for part in self.sparse:
            stretches = (Stretch(s.first, move(s.places), move(s.values)) for s in part.stretches)
            sparse.append(replace(part, stretches=tuple(stretches)))
        return Changes(tuple(sparse), tuple(replace(run, data=move(run.data)) for run in self.runs))

    def to(self, device: torch.device) -> Changes:
        """The same on ``device``; what is there already is not copied."""
        return self.map(lambda tensor: tensor.to(device))

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
def _write_sparse(words: Array, part: Sparse) -> None:
    def write(block: Stretch) -> None:
        for one in block.blocks(_BLOCK):  # what was read is in the cache when it is written
            from_here, values = words[one.first :], one.values.numpy()
            places = one.places.numpy().astype(np.int64, copy=False)  # int32 would take three times as long
            if part.relative:
                values = values + np.take(from_here, places, mode="clip")
            from_here[places] = values

    in_threads(write, part.blocks(_SHARE), threads_for(len(part)))
