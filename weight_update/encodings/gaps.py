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
    kind = np.uint32 if int(positions[-1]) < 1 << 32 else np.uint64
    gaps = positions.astype(kind)
    gaps[1:] -= gaps[:-1].copy()
    gaps[1:] -= 1
    largest = int(gaps.max())
    best = escapes = None
    fewest = 0
    for size in UNITS:
        escape = (1 << 8 * size) - 1
        more = gaps // kind(escape) if largest >= escape else None
        needed = size * (gaps.size + (0 if more is None else int(more.sum())))
        if best is None or needed < fewest:
            best, escapes, fewest = size, more, needed
        if more is None:
            break
    assert best is not None
    return _spread(gaps, escapes, best)


def _spread(gaps: Array, escapes: Array | None, size: int) -> Array:
    unit = UNSIGNED[size]
    if escapes is None:
        return gaps.astype(unit)
    escape = np.iinfo(unit).max
    ends = np.cumsum(escapes, dtype=np.int64)
    ends += np.arange(gaps.size)
    units = np.full(int(ends[-1]) + 1, escape, unit)
    units[ends] = gaps - escapes * gaps.dtype.type(escape)
    return units


def most_units(count: int, limit: int) -> int:
    """How many units ``count`` positions below ``limit`` can take."""
    return count + limit // 255


def join_units(units: Array, count: int, limit: int) -> Array:
    """The positions, int64, that :func:`split_units` made ``units`` of.

    Raises:
        FormatError: they are not ``count``, or not below ``limit``.
    """
    escape = int(np.iinfo(units.dtype).max)
    if units.size * escape >= 1 << 63:  # the sum could wrap around; no writer has so many wide units
        raise FormatError(f"a patch has {units.size} units of {units.itemsize} bytes")
    whole = units != escape
    if not whole.size or not whole[-1] or np.count_nonzero(whole) != count:
        raise FormatError(f"the gaps of a patch do not make {count} positions")
    positions = np.cumsum(units, dtype=np.int64)
    if positions.size > count:
        positions = positions[whole]
    positions += np.arange(count)
    if positions[-1] >= limit:
        raise FormatError(f"a patch changes element {positions[-1]} of {limit}")
    return positions
