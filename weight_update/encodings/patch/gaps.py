"""Increasing positions <-> gaps in small units.

A gap is position - previous - 1. Gaps are written in units of 1, 2 or 4 bytes. The largest value of a unit is
an escape: "add it and continue with the next unit".
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import pairwise

import numpy as np

from weight_update.encodings.patch import kernels, kernels_numpy
from weight_update.encodings.patch.arrays import Array
from weight_update.encodings.patch.kernels_numpy import spread
from weight_update.errors import FormatError

UNITS = (1, 2, 4)
"""Bytes of a unit."""

SPARSE = 1 << 12
"""Elements for each position above which units of 1 byte would take much memory."""

_STEP = 1 << 18  # positions of a part that one thread processes


@dataclass(frozen=True, eq=False)
class Gaps:
    """One or more positions as gaps.

    Attributes:
        first: the position that a first gap of 0 means.
        last: the last position.
        units: 1-D, of 1, 2 or 4 bytes; the last one is not an escape.
        count: number of positions.
    """

    first: int
    last: int
    units: Array = field(repr=False)
    count: int

    @classmethod
    def of(cls, positions: Array) -> Gaps:
        """Return ``positions`` (1-D int32 or int64, not empty, increasing) as gaps."""
        first, last = int(positions[0]), int(positions[-1])
        offsets = positions - positions.dtype.type(first)
        sparse = last - first > len(positions) * SPARSE
        units = kernels_numpy.code(offsets, 4) if sparse else kernels.code(offsets)
        return cls(first, last, units, len(positions))

    @property
    def positions(self) -> Array:
        """The positions, int64."""
        offsets = join_units(self.units, self.count, self.last + 1 - self.first)
        return offsets.astype(np.int64) + self.first


def merge_gaps(parts: Sequence[Gaps]) -> list[Array]:
    """Return the gaps of all parts, in ascending order, in units of the size that gives the fewest bytes.

    The arrays are to be joined; all have the dtype of the unit.
    """
    count = sum(part.count for part in parts)
    if any(part.units.itemsize != 1 for part in parts):
        positions = np.concatenate([part.positions for part in parts])
        gaps = np.diff(positions, prepend=-1) - 1
        size = min(UNITS, key=lambda size: size * (count + int((gaps // escape_of(size)).sum())))
        return [spread(gaps, size)]
    needed, before = 0, -1
    pieces: list[tuple[Array, Array]] = []  # the first gap of each part, and the units of the other gaps
    for part in parts:
        lead = int(np.argmax(part.units != escape_of(1)))
        gap = part.first + lead * escape_of(1) + int(part.units[lead]) - before - 1
        pieces.append((np.array([gap]), part.units[lead + 1 :]))
        needed += gap // escape_of(1) + len(part.units) - lead
        before = part.last
    best, nbytes = [one for gap, rest in pieces for one in (spread(gap, 1), rest)], needed
    for size in UNITS[1:]:
        if nbytes <= size * count:  # as few bytes as units of this size can take
            break
        wide = [one for gap, rest in pieces for one in (spread(gap, size), kernels.widen(rest, size))]
        if size * sum(map(len, wide)) < nbytes:
            best, nbytes = wide, size * sum(map(len, wide))
    return best


def escape_of(size: int) -> int:
    """Return the largest value of a unit of ``size`` bytes."""
    return (1 << 8 * size) - 1


def most_units(count: int, limit: int) -> int:
    """Return the largest number of units that ``count`` positions below ``limit`` can take."""
    return count + limit // escape_of(1)


def cut_units(units: Array, count: int, limit: int) -> list[Gaps]:
    """Return the ``count`` positions below ``limit`` that ``units`` stand for, in parts.

    Raises:
        FormatError: they stand for no such positions.
    """
    cuts = _read(kernels.index, units, count, limit, _STEP)
    return [
        Gaps(first, following - 1, units[unit:end], stop - value)
        for (unit, value, first), (end, stop, following) in pairwise(cuts.tolist())
    ]


def join_units(units: Array, count: int, limit: int) -> Array:
    """Return the ``count`` positions below ``limit`` that ``units`` stand for, int32 or int64.

    Raises:
        FormatError: they stand for no such positions.
    """
    return _read(kernels.join, units, count, limit)


def _read(loop: Callable[..., Array | None], units: Array, count: int, limit: int, *more: int) -> Array:
    """Return the result of a loop that reads units; FormatError if there is none."""
    escape = escape_of(units.itemsize)
    if units.size * escape >= 1 << 63:  # the sum could wrap around; no writer makes so many wide units
        raise FormatError(f"a patch has {units.size} units of {units.itemsize} bytes, which is too many")
    found = loop(units, count, limit, *more)
    if found is not None:
        return found
    if not units.size or units[-1] == escape or np.count_nonzero(units != escape) != count:
        raise FormatError(f"the gaps of a patch do not give {count} positions")
    last = int(units.sum(dtype=np.uint64)) + count - 1
    raise FormatError(f"a patch changes element {last}, but there are only {limit}")
