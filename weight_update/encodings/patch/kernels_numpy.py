"""The inner loops of :mod:`~weight_update.encodings.patch.kernels` in numpy."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[Any]


def differences(tile: Any, kind: npt.DTypeLike, relative: bool) -> tuple[Array, Array]:
    """Return positions and values of the elements of a tile that differ."""
    new, old = (_memory(int(tile[side]), int(tile["n"]), kind) for side in ("new", "old"))
    places = _differing(new, old)
    values = _take(new, places)
    if relative:
        values -= _take(old, places)
    return places + tile["at"], values


def _memory(address: int, items: int, kind: npt.DTypeLike) -> Array:
    data = ctypes.cast(address, ctypes.POINTER(ctypes.c_uint8))
    return np.ctypeslib.as_array(data, (items * np.dtype(kind).itemsize,)).view(kind)


def _differing(new: Array, old: Array) -> Array:
    """Return the indices at which two arrays differ; find words of 8 bytes first, because few differ."""
    each = 8 // new.itemsize
    if each == 1 or len(new) % each:
        return np.flatnonzero(new != old)
    words = np.flatnonzero(new.view(np.int64) != old.view(np.int64))
    mine, theirs = (_take(one.view(np.int64), words).view(one.dtype) for one in (new, old))
    inside = np.flatnonzero(mine != theirs)
    return _take(words, inside // each) * each + inside % each


def _take(array: Array, places: Array) -> Array:
    """Return ``array[places]``; no place is out of bounds, and this mode is the fastest."""
    return array.take(places, mode="wrap")


def code(offsets: Array, size: int = 1) -> Array:
    """Return the gaps of increasing offsets (integers, not empty) in units of ``size`` bytes."""
    return spread(np.diff(offsets, prepend=offsets.dtype.type(-1)) - 1, size)


def spread(gaps: Array, size: int) -> Array:
    """Return gaps in units of ``size`` bytes, each with as many escapes in front as it needs."""
    escape = (1 << 8 * size) - 1
    if int(gaps.max()) < escape:
        return gaps.astype(f"<u{size}")
    escapes = gaps // escape
    ends = np.cumsum(escapes + 1, dtype=np.int64) - 1
    units = np.full(int(ends[-1]) + 1, escape, f"<u{size}")
    units[ends] = gaps - escapes * escape
    return units


def widen(units: Array, size: int) -> Array:
    """Return the gaps of ``units`` in units of ``size`` bytes; the last unit is not an escape."""
    sums = np.cumsum(units, dtype=np.int64)[units != np.iinfo(units.dtype).max]
    return spread(np.diff(sums, prepend=0), size) if len(units) else units.astype(f"<u{size}")


def index(units: Array, count: int, limit: int, step: int) -> Array | None:
    """Cut units after about ``step``; see :func:`~weight_update.encodings.patch.kernels.index`."""
    whole = units != np.iinfo(units.dtype).max
    if not len(units) or not whole[-1]:
        return None
    starts = np.arange(0, len(units), step)
    starts = starts[whole[starts - 1]]
    cuts = np.zeros((len(starts) + 1, 3), np.int64)
    cuts[:, 0] = *starts, len(units)
    counts = np.add.reduceat(whole, starts, dtype=np.int64)
    np.cumsum(counts, out=cuts[1:, 1])
    np.cumsum(counts + np.add.reduceat(units, starts, dtype=np.int64), out=cuts[1:, 2])
    return cuts if cuts[-1, 1] == count and cuts[-1, 2] <= limit else None


def join(units: Array, count: int, limit: int) -> Array | None:
    """Return ``count`` positions below ``limit``, int64, or None if ``units`` are not valid."""
    whole = units != np.iinfo(units.dtype).max
    if not len(units) or not whole[-1] or np.count_nonzero(whole) != count:
        return None
    positions: Array = np.cumsum(units + whole, dtype=np.int64)  # the sum of two fits their dtype
    if count < len(units):
        positions = positions[whole]
    positions -= 1
    return positions if positions[-1] < limit else None


def apply(words: Array, units: Array, values: Array, relative: bool) -> bool:
    """Write ``values`` over the elements of ``words`` that ``units`` stand for, or add them."""
    places = join(units, len(values), len(words))
    if places is None:
        return False
    words[places] = values + _take(words, places) if relative else values
    return True


def plane_of(steps: Array, plane: int) -> tuple[Array, int]:
    """Return the byte ``plane`` of each of the zigzag coded ``steps``, and how many are not zero."""
    signed = steps.view(f"<i{steps.itemsize}")
    zigzag = signed << 1
    zigzag ^= signed >> (8 * steps.itemsize - 1)
    found = zigzag.view(np.uint8)[plane :: steps.itemsize].copy()
    return found, int(np.count_nonzero(found))


def steps_of(planes: Sequence[Array | None], out: Array) -> None:
    """Write into ``out`` the steps whose zigzag code has these planes; None is a plane of zeros."""
    kind = out.dtype.type
    out[:] = 0
    for k, plane in enumerate(planes):
        if plane is not None:
            out |= plane.astype(out.dtype) << kind(8 * k)
    signs = np.negative(out & kind(1))  # all bits set where the step was negative
    out >>= kind(1)
    out ^= signs
