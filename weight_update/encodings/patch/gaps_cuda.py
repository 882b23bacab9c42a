"""Increasing positions <-> gaps in small units, with torch operators; :mod:`.gaps` describes the units."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NoReturn

import torch

from weight_update.encodings.patch.arrays import Array
from weight_update.encodings.patch.gaps import SPARSE, Gaps, escape_of, join_units
from weight_update.errors import FormatError
from weight_update.wire.schema import BITS

PART = 1 << 22
"""Units, or positions, that are computed with at a time: this takes up to 50 bytes of memory for each."""


@dataclass(frozen=True, eq=False)
class DeviceGaps:
    """Positions as gaps on a GPU; :class:`~weight_update.encodings.patch.gaps.Gaps` for tensors.

    Attributes:
        first: the position that a first gap of 0 means.
        last: the last position.
        units: 1-D, of dtype ``BITS[size]``, with the bits of unsigned units.
        count: number of positions.
    """

    first: int
    last: int
    units: torch.Tensor = field(repr=False)
    count: int

    @classmethod
    def of(cls, first: int, positions: torch.Tensor) -> DeviceGaps:
        """Return ``positions`` (1-D int64, not empty, increasing, at least ``first``) as gaps.

        Units have 1 byte, or 4 if the positions are far apart.
        """
        gaps = gaps_of(positions, first)
        last, *needed = torch.stack([positions[-1], units_needed(gaps, 1), units_needed(gaps, 4)]).tolist()
        size, count = (4, needed[1]) if last - first > len(positions) * SPARSE else (1, needed[0])
        return cls(first, last, units_of(gaps, size, count), len(positions))

    @property
    def positions(self) -> torch.Tensor:
        """The positions, int64."""
        units = _unsigned(self.units)
        sums = units.cumsum(0)
        if self.count < len(units):
            sums = sums[units != escape_of(self.units.itemsize)]
        return sums.add_(torch.arange(self.first, self.first + self.count, device=sums.device))

    @classmethod
    def view(cls, gaps: Gaps) -> DeviceGaps:
        """Return the same positions in the same memory, on the CPU."""
        signed = gaps.units.view(f"i{gaps.units.itemsize}")
        return cls(gaps.first, gaps.last, torch.from_numpy(signed), gaps.count)

    def cpu(self) -> Gaps:
        """Return the same positions on the CPU."""
        units = self.units.cpu().numpy()
        return Gaps(self.first, self.last, units.view(f"u{units.itemsize}"), self.count)


def read_units(units: Array, count: int, limit: int, device: torch.device) -> list[DeviceGaps]:
    """Copy to ``device`` the units of ``count`` positions below ``limit``; return the positions in parts.

    Raises:
        FormatError: they stand for no such positions.
    """
    size, escape = units.itemsize, escape_of(units.itemsize)
    if not 0 < units.size <= count + limit // escape or units.size * escape >= 1 << 63:
        _refuse(units, count, limit)
    parts = torch.split(torch.from_numpy(units.view(f"i{size}")).to(device), PART)
    wide = map(_unsigned, parts)
    facts = torch.stack([torch.stack([u.sum(), (u != escape).sum(), u[-1]]) for u in wide]).tolist()
    found, first, positions = [], 0, 0
    for part, (gaps, here, _) in zip(parts, facts, strict=True):
        found.append(DeviceGaps(first, first + gaps + here - 1, part, here))
        first, positions = first + gaps + here, positions + here
    if facts[-1][-1] == escape or positions != count or first > limit:
        _refuse(units, count, limit)
    return found


def _refuse(units: Array, count: int, limit: int) -> NoReturn:
    join_units(units, count, limit)  # raises, and says what is wrong
    raise FormatError("the memory of a patch was overwritten while the patch was read")


def gaps_of(positions: torch.Tensor, first: int = 0) -> torch.Tensor:
    """Return the gaps of positions (1-D int64); a first gap of 0 means ``first``."""
    return positions.diff(prepend=positions.new_full((1,), first - 1)) - 1


def units_needed(gaps: torch.Tensor, size: int) -> torch.Tensor:
    """Return how many units of ``size`` bytes gaps take, as a tensor."""
    return (gaps // escape_of(size)).sum() + gaps.numel()


def units_of(gaps: torch.Tensor, size: int, needed: int) -> torch.Tensor:
    """Return the ``needed`` units of gaps, of dtype ``BITS[size]``."""
    escapes = gaps // escape_of(size)
    units = torch.full((needed,), -1, dtype=BITS[size], device=gaps.device)
    units[(escapes + 1).cumsum(0) - 1] = (gaps - escapes * escape_of(size)).to(units.dtype)
    return units


def _unsigned(units: torch.Tensor) -> torch.Tensor:
    """Return units as int64."""
    return units.to(torch.int64) & escape_of(units.itemsize)
