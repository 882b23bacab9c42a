"""Increasing positions <-> gaps in small units, with torch operators; :mod:`.gaps` describes the units."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

import torch

from weight_update.encodings.patch.arrays import Array
from weight_update.encodings.patch.gaps import Gaps, escape_of, join_units

SIGNED: dict[int, torch.dtype] = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
"""Signed integer dtype by size in bytes; torch computes with few unsigned ones."""

_PART = 1 << 22
"""Units that are decoded at a time, which takes about 25 bytes of memory for each."""


@dataclass(frozen=True, eq=False)
class DeviceGaps:
    """Positions as gaps in units on a GPU, which are decoded part by part.

    Attributes:
        first: position that a first gap of 0 means.
        units: 1-D, of dtype ``SIGNED[size]``; the bits are those of unsigned units.
        parts: for each part of the units, the elements before its first gap, from ``first``, and its number
            of positions.
    """

    first: int
    units: torch.Tensor = field(repr=False)
    parts: tuple[tuple[int, int], ...]

    @classmethod
    def read(cls, units: Array, count: int, limit: int, device: torch.device, first: int = 0) -> DeviceGaps:
        """Copy to ``device`` the units of ``count`` positions, which are below ``limit`` if counted from 0.

        Raises:
            FormatError: they stand for no such positions.
        """
        size = units.itemsize
        if not 0 < units.size <= count + limit // escape_of(size) or units.size * escape_of(size) >= 1 << 63:
            join_units(units, count, limit)  # raises, and says what is wrong
        there = torch.from_numpy(units.view(f"i{size}")).to(device)
        facts = [torch.stack([u.sum(), (u != escape_of(size)).sum()]) for u in _parts(there)]
        *found, (last, _) = torch.stack([*facts, _unsigned(there[-1:]).repeat(2)]).tolist()
        parts, gaps, positions = [], 0, 0
        for more, here in found:
            parts.append((gaps + positions, here))
            gaps, positions = gaps + more, positions + here
        if last == escape_of(size) or positions != count or gaps + positions > limit:
            join_units(units, count, limit)
        return cls(first, there, tuple(parts))

    @classmethod
    def of(cls, gaps: Gaps, device: torch.device) -> DeviceGaps:
        """Copy gaps to ``device``."""
        return cls.read(gaps.units, gaps.count, gaps.last + 1 - gaps.first, device, gaps.first)

    def all(self) -> torch.Tensor:
        """Return all positions, 1-D int64."""
        return torch.cat(list(self.positions()))

    def positions(self) -> Iterator[torch.Tensor]:
        """Yield the positions of each part, 1-D int64."""
        escape = escape_of(self.units.itemsize)
        for units, (before, count) in zip(_parts(self.units), self.parts, strict=True):
            sums = units.cumsum(0)
            if count < len(units):
                sums = sums[units != escape]
            yield sums.add_(torch.arange(count, device=sums.device)).add_(self.first + before)


def _parts(units: torch.Tensor) -> Iterator[torch.Tensor]:
    return map(_unsigned, torch.split(units, _PART))


def _unsigned(units: torch.Tensor) -> torch.Tensor:
    """Return units as int64."""
    return units.to(torch.int64) & escape_of(units.itemsize)


def units_needed(gaps: torch.Tensor, size: int) -> torch.Tensor:
    """Return how many units of ``size`` bytes gaps (1-D int64) take, as a tensor."""
    return (gaps // escape_of(size)).sum() + gaps.numel()


def units_of(gaps: torch.Tensor, size: int, needed: int) -> torch.Tensor:
    """Return the ``needed`` units of gaps (1-D int64), of dtype ``SIGNED[size]``."""
    escapes = gaps // escape_of(size)
    units = torch.full((needed,), -1, dtype=SIGNED[size], device=gaps.device)
    units[(escapes + 1).cumsum(0) - 1] = (gaps - escapes * escape_of(size)).to(units.dtype)
    return units
