"""Increasing positions <-> gaps between them in small units; the layout "flat" of a patch."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from weight_update.encodings.patch.arrays import UNSIGNED, Array, ArrayReader, ArrayWriter
from weight_update.encodings.patch.changes import Sparse
from weight_update.errors import FormatError

__all__ = [
    "UNITS",
    "decode_flat",
    "encode_flat",
    "escape_of",
    "join_units",
    "require_increasing",
    "split_units",
]

UNITS = (1, 2, 4)
"""Bytes of a unit."""

_BLOCK = 1 << 17  # so many numbers at a time: what is computed from them stays in the cache


def encode_flat(out: ArrayWriter, part: Sparse, delta: bool) -> None:
    """Write the positions of ``part`` as gaps, or as they are."""
    if delta:
        out.join(split_units([(one.first, one.places.numpy()) for one in part.blocks(_BLOCK)]))
    else:
        out.integers(part.positions.numpy())


def decode_flat(arrays: ArrayReader, count: int, limit: int, delta: bool) -> Array:
    """Read ``count`` positions below ``limit``, int64.

    Raises:
        FormatError: they are not so many, not increasing, or not below ``limit``.
    """
    if delta:
        return join_units(arrays.at_most(most_units(count, limit), UNITS), count, limit)
    positions = arrays.exactly(count)
    if int(positions[-1]) >= limit:
        raise FormatError(f"a patch changes element {positions[-1]} of {limit}")
    require_increasing(positions)
    return positions.astype(np.int64)


def require_increasing(positions: Array) -> None:
    """Check that each position is larger than the one before.

    Raises:
        FormatError: one is not.
    """
    if not (positions[1:] > positions[:-1]).all():
        raise FormatError("the positions of a patch do not increase")


def split_units(stretches: Sequence[tuple[int, Array]]) -> list[Array]:
    """Gaps (position - previous - 1) in units of 1, 2 or 4 bytes, in one array for each stretch.

    The largest value of a unit is an escape: "add it and go on with the next unit". The unit is the one that
    gives the fewest bytes.

    Args:
        stretches: each a first position and places counted from it, int32 or int64, not empty; all together
            strictly increasing.
    """
    ends = [first + int(places[-1]) for first, places in stretches]
    gaps = [_gaps(*stretch, end) for stretch, end in zip(stretches, [-1, *ends], strict=False)]
    needed = [sum(counts) for counts in zip(*map(_needed, gaps), strict=True)]
    unit = min(UNITS, key=lambda size: size * needed[UNITS.index(size)])
    return [_spread(part, unit) for part in gaps]


def _gaps(first: int, places: Array, before: int) -> Array:
    """The gaps of one stretch; ``before`` is the position before its first one."""
    narrow = first + int(places[-1]) - before < 1 << 32
    short = places.view(np.uint32) if places.itemsize == 4 else places.astype("u4" if narrow else "u8")
    gaps = np.empty(len(short), np.uint32 if narrow else np.uint64)
    np.subtract(short[1:], short[:-1], out=gaps[1:])
    gaps[1:] -= 1
    gaps[0] = first + int(places[0]) - before - 1
    return gaps


def _needed(gaps: Array) -> list[int]:
    """How many units of each size the gaps take."""
    largest = int(gaps.max())
    escapes = [int((gaps // escape_of(size)).sum()) if largest >= escape_of(size) else 0 for size in UNITS]
    return [gaps.size + more for more in escapes]


def _spread(gaps: Array, size: int) -> Array:
    unit = UNSIGNED[size]
    if int(gaps.max()) < escape_of(size):
        return gaps.astype(unit)
    escapes = gaps // escape_of(size)
    rest = gaps.astype(unit)
    rest += escapes.astype(unit)  # as good as gap - escape * escapes: escape is -1 modulo 2**bits
    ends = escapes.astype(np.int64)
    ends += 1
    ends[0] -= 1
    # Torch's take two thirds of numpy's time, and start no threads in one dimension.
    places = torch.from_numpy(ends).cumsum(0)
    units = np.full(int(places[-1]) + 1, escape_of(size), unit)
    signed = f"i{size}"  # torch has no scatter of wider unsigned ones
    torch.from_numpy(units.view(signed)).scatter_(0, places, torch.from_numpy(rest.view(signed)))
    return units


def _blocks(array: Array) -> list[Array]:
    return [array[start : start + _BLOCK] for start in range(0, array.size, _BLOCK)]


def escape_of(size: int) -> int:
    """The largest value of a unit of ``size`` bytes."""
    return (1 << 8 * size) - 1


def most_units(count: int, limit: int) -> int:
    """How many units ``count`` positions below ``limit`` can take."""
    return count + limit // escape_of(1)


def join_units(units: Array, count: int, limit: int) -> Array:
    """The positions, int64, that :func:`split_units` made ``units`` of.

    Raises:
        FormatError: they are not ``count``, or not below ``limit``.
    """
    escape = escape_of(units.itemsize)
    if units.size * escape >= 1 << 63:  # the sum could wrap around; no writer has so many wide units
        raise FormatError(f"a patch has {units.size} units of {units.itemsize} bytes")
    if not units.size or units[-1] == escape or np.count_nonzero(units != escape) != count:
        raise FormatError(f"the gaps of a patch do not make {count} positions")
    last = int(units.sum(dtype=np.uint64)) + count - 1
    if last >= limit:
        raise FormatError(f"a patch changes element {last} of {limit}")
    positions = np.empty(count, np.int64)
    at, reached = 0, -1
    for part in _blocks(units):
        whole = part != escape
        ends = (part + whole).astype(np.int64)  # to the next position, or to its next unit: both fit the unit
        ends[0] += reached
        np.cumsum(ends, out=ends)
        found = ends[whole]
        positions[at : at + found.size] = found
        at += found.size
        reached = int(ends[-1])
    return positions
