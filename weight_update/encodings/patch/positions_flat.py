"""Increasing positions <-> gaps in small units; the layout "flat" of a patch."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from weight_update.encodings.patch import kernels
from weight_update.encodings.patch.arrays import UNSIGNED, Array, ArrayReader, ArrayWriter
from weight_update.encodings.patch.changes import Sparse
from weight_update.encodings.patch.threads import in_threads, threads_for
from weight_update.errors import FormatError

UNITS = (1, 2, 4)
"""Bytes of a unit."""

_CACHED = 1 << 17  # elements at a time, so that intermediate results stay in the cache


def encode_flat(out: ArrayWriter, part: Sparse, delta: bool) -> None:
    """Write the positions of ``part`` as gaps if ``delta``, else as they are."""
    if delta:
        out.join(split_units([(one.first, one.offsets.numpy()) for one in part.split(_CACHED)]))
    else:
        out.integers(part.positions.numpy())


def decode_flat(arrays: ArrayReader, count: int, limit: int, delta: bool) -> Array:
    """Read ``count`` positions (int32 or int64); FormatError unless they increase and are below ``limit``."""
    if delta:
        return join_units(arrays.at_most(most_units(count, limit), UNITS), count, limit)
    positions = arrays.exactly(count)
    if int(positions[-1]) >= limit:
        raise FormatError(f"a patch changes element {positions[-1]}, but there are only {limit}")
    require_increasing(positions)
    return positions.astype(np.int64)


def require_increasing(positions: Array) -> None:
    """Raise FormatError unless each position is larger than the previous one."""
    if not (positions[1:] > positions[:-1]).all():
        raise FormatError("the positions of a patch do not increase")


def split_units(segments: Sequence[tuple[int, Array]]) -> list[Array]:
    """Return gaps (position - previous - 1) in units of 1, 2 or 4 bytes, as one array for each segment.

    The largest value of a unit is an escape: "add it and continue with the next unit". The size of a unit is
    the one that gives the fewest bytes. A segment is a first position and offsets from it, int32 or int64,
    not empty; all positions together are strictly increasing.
    """
    ends = [first + int(offsets[-1]) for first, offsets in segments]
    if kernels.library is not None:
        return _split_compiled(list(zip(segments, [-1, *ends], strict=False)))
    gaps = [_gaps(*segment, end) for segment, end in zip(segments, [-1, *ends], strict=False)]
    needed = [sum(counts) for counts in zip(*map(_needed, gaps), strict=True)]
    unit = min(UNITS, key=lambda size: size * needed[UNITS.index(size)])
    return [_spread(part, unit) for part in gaps]


def _split_compiled(parts: Sequence[tuple[tuple[int, Array], int]]) -> list[Array]:
    """Do the work of :func:`split_units` for segments and the positions before them."""
    threads = threads_for(sum(len(offsets) for (_, offsets), _ in parts))
    needed = in_threads(lambda part: kernels.units_needed(*part[0], part[1]), parts, threads)
    totals = [sum(counts) for counts in zip(*needed, strict=True)]
    kind = min(range(len(UNITS)), key=lambda i: UNITS[i] * totals[i])

    def split(one: int) -> Array:
        return kernels.split(*parts[one][0], parts[one][1], UNITS[kind], needed[one][kind])

    return in_threads(split, range(len(parts)), threads)


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
