"""Increasing positions <-> gaps between them in small units; the layout "flat" of a patch."""

from __future__ import annotations

import numpy as np

from weight_update.encodings.patch_arrays import UNSIGNED, Array, ArrayReader, ArrayWriter
from weight_update.errors import FormatError

__all__ = ["decode_flat", "encode_flat", "join_units", "require_increasing", "split_units"]

UNITS = (1, 2, 4)
"""Bytes of a unit."""


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
    best: tuple[int, int, Array | None] | None = None
    for size in UNITS:
        escape = _escape(size)
        if largest < escape:
            found = size * gaps.size, size, None
        else:
            escapes = gaps // gaps.dtype.type(escape)
            found = size * (gaps.size + int(escapes.sum(dtype=gaps.dtype))), size, escapes
        best = found if best is None or found[0] < best[0] else best
        if largest < escape:
            break
    assert best is not None
    return _spread(gaps, best[2], best[1])


def _gaps(positions: Array) -> Array:
    short = positions.astype(np.uint32 if int(positions[-1]) < 1 << 32 else np.uint64)
    gaps = np.empty_like(short)
    gaps[0] = short[0]
    np.subtract(short[1:], short[:-1], out=gaps[1:])
    gaps[1:] -= 1
    return gaps


def _spread(gaps: Array, escapes: Array | None, size: int) -> Array:
    unit = UNSIGNED[size]
    if escapes is None:
        return gaps.astype(unit)
    rest = gaps.astype(unit)
    rest += escapes.astype(unit)  # the same as gaps - escape * escapes, for an escape is -1 modulo 2**bits
    ends = np.cumsum(escapes + escapes.dtype.type(1), dtype=escapes.dtype).astype(np.int64)
    ends -= 1
    units = np.full(int(ends[-1]) + 1, _escape(size), unit)
    units[ends] = rest
    return units


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
    whole = units != escape
    if not whole.size or not whole[-1] or np.count_nonzero(whole) != count:
        raise FormatError(f"the gaps of a patch do not make {count} positions")
    last = int(units.sum(dtype=np.uint64)) + count - 1
    if last >= limit:
        raise FormatError(f"a patch changes element {last} of {limit}")
    steps = units + whole  # to the next position, or to its next unit: both fit the unit
    steps[0] -= 1
    positions = np.cumsum(steps, dtype=np.uint32 if last < 1 << 32 else np.int64)
    if positions.size > count:
        positions = positions[whole]
    return positions.astype(np.int64, copy=False)
