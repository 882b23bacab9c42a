"""Increasing positions <-> gaps in small units.

A gap is position - previous - 1. Gaps are written in units of 1, 2 or 4 bytes. The largest value of a unit is
an escape: "add it and continue with the next unit".
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise

import numpy as np
import torch

from weight_update.encodings.patch import kernels
from weight_update.encodings.patch.arrays import UNSIGNED, Array
from weight_update.encodings.threads import in_threads, threads_for
from weight_update.errors import FormatError

UNITS = (1, 2, 4)
"""Bytes of a unit."""

_CACHED = 1 << 17  # elements at a time, so that intermediate results stay in the cache
_SPARSE = 1 << 12  # elements for each position above which units of 1 byte would take much memory
_STEP = 1 << 18  # positions of a part that one thread processes


@dataclass(frozen=True, eq=False)
class Gaps:
    """One or more positions as gaps, for the compiled loops.

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
    def of(cls, first: int, offsets: Array) -> Gaps:
        """Return the positions ``first + offsets`` (1-D int32 or int64, not empty, increasing)."""
        start, last = int(offsets[0]), first + int(offsets[-1])
        if start + len(offsets) * _SPARSE < int(offsets[-1]):
            units = _spread(_gaps(first, offsets, first + start - 1), 4)
        else:
            units = kernels.code(offsets - offsets.dtype.type(start))
        return cls(first + start, last, units, len(offsets))

    @property
    def offsets(self) -> Array:
        """The positions minus ``first``, int32 or int64."""
        return join_units(self.units, self.count, self.last + 1 - self.first)


def merge_gaps(parts: Sequence[Gaps]) -> list[Array]:
    """Return what :func:`split_units` returns for the positions of all parts, in ascending order."""
    if any(part.units.itemsize != 1 for part in parts):
        return _split_numpy([(part.first, part.offsets) for part in parts])
    count, needed, before = sum(part.count for part in parts), 0, -1
    pieces: list[tuple[int, Array]] = []  # the first gap of each part, and the units of the other gaps
    for part in parts:
        lead = int(np.argmax(part.units != escape_of(1)))
        gap = part.first + lead * escape_of(1) + int(part.units[lead]) - before - 1
        pieces.append((gap, part.units[lead + 1 :]))
        needed += gap // escape_of(1) + len(part.units) - lead
        before = part.last
    if needed <= 2 * count:  # as few bytes as units of 2 bytes can take
        return [one for gap, rest in pieces for one in (_one_gap(gap, 1), rest)]
    found = {1: needed}
    wide: dict[int, list[Array]] = {}
    for size in UNITS[1:]:
        wide[size] = [one for gap, rest in pieces for one in (_one_gap(gap, size), kernels.widen(rest, size))]
        found[size] = sum(map(len, wide[size]))
        if size * found[size] <= 4 * count:
            break  # as few bytes as units of 4 bytes can take
    best = min(found, key=lambda size: size * found[size])
    return wide.get(best) or [one for gap, rest in pieces for one in (_one_gap(gap, 1), rest)]


def _one_gap(gap: int, size: int) -> Array:
    escape = escape_of(size)
    units = np.full(gap // escape + 1, escape, UNSIGNED[size])
    units[-1] = gap % escape
    return units


def cut_units(units: Array, count: int, limit: int) -> list[Gaps] | None:
    """Return the ``count`` positions below ``limit`` that ``units`` stand for, in parts.

    Return None without the compiled loops, and if :func:`join_units` would raise an error.
    """
    if kernels.library is None or units.size * escape_of(units.itemsize) >= 1 << 63:
        return None
    cuts = kernels.index(units, count, limit, _STEP)
    if cuts is None:
        return None
    return [
        Gaps(first, following - 1, units[unit:end], stop - value)
        for (unit, value, first), (end, stop, following) in pairwise(cuts.tolist())
    ]


def split_units(segments: Sequence[tuple[int, Array]]) -> list[Array]:
    """Return gaps (position - previous - 1) in units of 1, 2 or 4 bytes, as one array for each segment.

    The largest value of a unit is an escape: "add it and continue with the next unit". The size of a unit is
    the one that gives the fewest bytes. A segment is a first position and offsets from it, int32 or int64,
    not empty; all positions together are strictly increasing.
    """
    if kernels.library is not None:
        threads = threads_for(sum(len(offsets) for _, offsets in segments))
        return merge_gaps(in_threads(lambda segment: Gaps.of(*segment), segments, threads))
    return _split_numpy(segments)


def _split_numpy(segments: Sequence[tuple[int, Array]]) -> list[Array]:
    ends = [first + int(offsets[-1]) for first, offsets in segments]
    gaps = [_gaps(*segment, end) for segment, end in zip(segments, [-1, *ends], strict=False)]
    needed = [sum(counts) for counts in zip(*map(_needed, gaps), strict=True)]
    unit = min(UNITS, key=lambda size: size * needed[UNITS.index(size)])
    return [_spread(part, unit) for part in gaps]


def _gaps(first: int, offsets: Array, before: int) -> Array:
    """Return the gaps of one segment; ``before`` is the position before its first one."""
    narrow = first + int(offsets[-1]) - before < 1 << 32
    short = offsets.view(np.uint32) if offsets.itemsize == 4 else offsets.astype("u4" if narrow else "u8")
    gaps = np.empty(len(short), np.uint32 if narrow else np.uint64)
    np.subtract(short[1:], short[:-1], out=gaps[1:])
    gaps[1:] -= 1
    gaps[0] = first + int(offsets[0]) - before - 1
    return gaps


def _needed(gaps: Array) -> list[int]:
    """Return the number of units of each size that the gaps take."""
    largest = int(gaps.max())
    escapes = [int((gaps // escape_of(size)).sum()) if largest >= escape_of(size) else 0 for size in UNITS]
    return [gaps.size + more for more in escapes]


def _spread(gaps: Array, size: int) -> Array:
    unit = UNSIGNED[size]
    if int(gaps.max()) < escape_of(size):
        return gaps.astype(unit)
    escapes = gaps // escape_of(size)
    rest = gaps.astype(unit)
    rest += escapes.astype(unit)  # equals gap - escape * escapes, because escape is -1 modulo 2**bits
    ends = escapes.astype(np.int64)
    ends += 1
    ends[0] -= 1
    # Torch takes two thirds of numpy's time here, and starts no threads in one dimension.
    places = torch.from_numpy(ends).cumsum(0)
    units = np.full(int(places[-1]) + 1, escape_of(size), unit)
    signed = f"i{size}"  # torch cannot scatter wider unsigned integers
    torch.from_numpy(units.view(signed)).scatter_(0, places, torch.from_numpy(rest.view(signed)))
    return units


def _parts(array: Array) -> list[Array]:
    return [array[start : start + _CACHED] for start in range(0, array.size, _CACHED)]


def escape_of(size: int) -> int:
    """Return the largest value of a unit of ``size`` bytes."""
    return (1 << 8 * size) - 1


def most_units(count: int, limit: int) -> int:
    """Return the largest number of units that ``count`` positions below ``limit`` can take."""
    return count + limit // escape_of(1)


def join_units(units: Array, count: int, limit: int) -> Array:
    """Return the ``count`` positions below ``limit`` that ``units`` stand for, int32 or int64.

    Raises:
        FormatError: they stand for no such positions.
    """
    escape = escape_of(units.itemsize)
    if units.size * escape >= 1 << 63:  # the sum could wrap around; no writer makes so many wide units
        raise FormatError(f"a patch has {units.size} units of {units.itemsize} bytes, which is too many")
    if kernels.library is not None and (found := kernels.join(units, count, limit)) is not None:
        return found
    if not units.size or units[-1] == escape or np.count_nonzero(units != escape) != count:
        raise FormatError(f"the gaps of a patch do not give {count} positions")
    last = int(units.sum(dtype=np.uint64)) + count - 1
    if last >= limit:
        raise FormatError(f"a patch changes element {last}, but there are only {limit}")
    positions = np.empty(count, np.int64)
    at, reached = 0, -1
    for part in _parts(units):
        whole = part != escape
        ends = (part + whole).astype(np.int64)  # to the next position or unit; both fit the dtype
        ends[0] += reached
        np.cumsum(ends, out=ends)
        found = ends[whole]
        positions[at : at + found.size] = found
        at += found.size
        reached = int(ends[-1])
    return positions
