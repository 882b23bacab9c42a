"""Increasing positions <-> gaps between them in small units; the layout "flat" of a patch."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from weight_update.encodings.patch_arrays import UNSIGNED, Array, ArrayReader, ArrayWriter
from weight_update.errors import FormatError

__all__ = ["decode_flat", "encode_flat", "join_units", "require_increasing", "split_units"]

UNITS = (1, 2, 4)
"""Bytes of a unit."""

_BLOCK = 1 << 17  # so many numbers at a time: what is computed from them stays in the cache


def encode_flat(out: ArrayWriter, positions: Array, delta: bool) -> None:
    """Write ``positions`` (int64, strictly increasing, not empty) as gaps, or as they are."""
    if delta:
        out.add(split_units(positions))
    else:
        out.integers(positions)


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


def split_units(positions: Array) -> Array:
    """Gaps (position - previous - 1) of int64 ``positions`` in units of 1, 2 or 4 bytes.

    The largest value of a unit is an escape: "add it and go on with the next unit". The unit is the one that
    gives the fewest bytes.
    """
    gaps = _gaps(positions)
    largest = int(gaps.max())
    needed = {}
    for size in UNITS:
        needed[size] = gaps.size
        if largest < _escape(size):
            break
        needed[size] += sum(int((part // _escape(size)).sum()) for part in _blocks(gaps))
    size = min(needed, key=lambda size: size * needed[size])
    return gaps.astype(UNSIGNED[size]) if needed[size] == gaps.size else _spread(gaps, size, needed[size])


def _gaps(positions: Array) -> Array:
    short = positions.astype(np.uint32 if int(positions[-1]) < 1 << 32 else np.uint64)
    gaps = np.empty_like(short)
    gaps[0] = short[0]
    np.subtract(short[1:], short[:-1], out=gaps[1:])
    gaps[1:] -= 1
    return gaps


def _spread(gaps: Array, size: int, needed: int) -> Array:
    unit = UNSIGNED[size]
    units = np.full(needed, _escape(size), unit)
    at = 0
    for part in _blocks(gaps):
        escapes = part // _escape(size)
        rest = part.astype(unit)
        rest += escapes.astype(unit)  # as good as gap - escape * escapes: escape is -1 modulo 2**bits
        escapes += 1
        ends = np.cumsum(escapes, dtype=escapes.dtype).astype(np.int64)
        ends += at - 1
        units[ends] = rest
        at = int(ends[-1]) + 1
    return units


def _blocks(array: Array) -> Iterator[Array]:
    for start in range(0, array.size, _BLOCK):
        yield array[start : start + _BLOCK]


def _escape(size: int) -> int:
    return (1 << 8 * size) - 1


def most_units(count: int, limit: int) -> int:
    """How many units ``count`` positions below ``limit`` can take."""
    return count + limit // _escape(1)


def join_units(units: Array, count: int, limit: int) -> Array:
    """The positions, int64, that :func:`split_units` made ``units`` of.

    Raises:
        FormatError: they are not ``count``, or not below ``limit``.
    """
    escape = _escape(units.itemsize)
    if units.size * escape >= 1 << 63:  # the sum could wrap around; no writer has so many wide units
        raise FormatError(f"a patch has {units.size} units of {units.itemsize} bytes")
    if not units.size or units[-1] == escape or np.count_nonzero(units != escape) != count:
        raise FormatError(f"the gaps of a patch do not make {count} positions")
    last = int(units.sum(dtype=np.uint64)) + count - 1
    if last >= limit:
        raise FormatError(f"a patch changes element {last} of {limit}")
    sums = np.uint32 if units.itemsize < 4 else np.uint64  # wide enough for those of one block
    positions = np.empty(count, np.int64)
    at, reached = 0, -1
    for part in _blocks(units):
        whole = part != escape
        part = part + whole  # steps to the next position, or to its next unit: both fit the unit
        ends = np.cumsum(part, dtype=sums)
        found = ends[whole]
        np.add(found.astype(np.int64), reached, out=positions[at : at + found.size])
        at += found.size
        reached += int(ends[-1])
    return positions
