"""The inner loops of the encodings: compiled from ``kernels.c``, or where there are none, in numpy.

See :mod:`weight_update.wire.compiled`. Both give the same results.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from weight_update.encodings.patch import kernels_numpy
from weight_update.encodings.patch.kernels_numpy import Array
from weight_update.wire.compiled import load

TILE = np.dtype([("new", "u8"), ("old", "u8"), ("n", "i8"), ("at", "i8"), ("most", "i8"), ("found", "i8")])
"""Elements to compare: their addresses, number and first position; see :meth:`GapBuffer.scan`."""

_SLACK = 64  # bytes behind the results of a scan


library = load(Path(__file__).parent, "_kernels", 4, ["wu_widen", "wu_index", "wu_plane"])
"""The compiled library; None where there is none."""


class _State(ctypes.Structure):
    _fields_ = (
        ("units", ctypes.c_void_p),
        ("values", ctypes.c_void_p),
        ("used", ctypes.c_int64),
        ("found", ctypes.c_int64),
        ("next", ctypes.c_int64),
    )


class GapBuffer:
    """Memory of one thread for the gaps and values of changes among ``most`` elements, used again and again.

    Gaps are in units of one byte, see :mod:`~weight_update.encodings.patch.gaps`.
    """

    def __init__(self, width: int, most: int) -> None:
        self.width = width
        self.units = np.empty(most + _SLACK, np.uint8)
        self.values = np.empty(most * width + _SLACK, np.uint8)
        self._state = _State(self.units.ctypes.data, self.values.ctypes.data, 0, 0, 0)

    def start(self, first: int) -> None:
        """Drop everything; the next gap counts from the element ``first``."""
        self._state.used = self._state.found = 0
        self._state.next = first

    @property
    def found(self) -> int:
        """The number of changes."""
        return int(self._state.found)

    @property
    def last(self) -> int:
        """The position of the last change."""
        return int(self._state.next) - 1

    def scan(self, tiles: Array, relative: bool) -> None:
        """Append the elements of ``tiles`` (of dtype :data:`TILE`, ascending) that differ.

        ``found`` of each tile is set to their number. If it is above ``most``, they are not appended. Values
        are new bits, or new minus old bits if ``relative``.
        """
        if library is not None:
            count = _number(len(tiles))
            library.wu_scan(self.width, int(relative), _at(tiles), count, ctypes.byref(self._state))
            return
        state = self._state
        for tile in tiles:
            positions, values = kernels_numpy.differences(tile, f"i{self.width}", relative)
            tile["found"] = len(positions)
            if 0 < len(positions) <= tile["most"]:
                units = kernels_numpy.code(positions - state.next)
                self.units[state.used : state.used + len(units)] = units
                self.values.view(values.dtype)[state.found : state.found + len(values)] = values
                state.used, state.found = state.used + len(units), state.found + len(values)
                state.next = int(positions[-1]) + 1

    def save(self) -> tuple[int, int, int]:
        """Return what :meth:`restore` needs to drop everything that is appended later."""
        return self._state.used, self._state.found, self._state.next

    def restore(self, saved: tuple[int, int, int]) -> None:
        """Return to the state at :meth:`save`."""
        self._state.used, self._state.found, self._state.next = saved

    def take(self) -> tuple[Array, Array]:
        """Return copies of the units and of the values, integers of the width."""
        split = self.found * self.width
        memory = np.empty(split + self._state.used, np.uint8)  # one array, because large ones get large pages
        memory[:split] = self.values[:split]
        memory[split:] = self.units[: self._state.used]
        return memory[split:], memory[:split].view(f"i{self.width}")


def code(offsets: Array) -> Array:
    """Return the gaps of increasing offsets (int32 or int64, not empty) in units of one byte."""
    if library is None:
        return kernels_numpy.code(offsets)
    units = np.empty(len(offsets) + int(offsets[-1]) // 0xFF, np.uint8)
    state = _State(units.ctypes.data, None, 0, 0, 0)
    _of(offsets, "code")(_at(offsets), _number(len(offsets)), ctypes.byref(state))
    return units[: state.used]


def widen(units: Array, size: int) -> Array:
    """Return the gaps of ``units``, which have one byte, in units of 2 or 4 bytes."""
    if library is None:
        return kernels_numpy.widen(units, size)
    wide = np.empty(len(units), f"<u{size}")
    return wide[: library.wu_widen(_at(units), _number(len(units)), size, _at(wide))]


def index(units: Array, count: int, limit: int, step: int) -> Array | None:
    """Cut units that stand for ``count`` positions below ``limit`` after every ``step`` of them, or later.

    Return the first unit, the first value and the base of the first gap of each part, and then the same of
    the end, int64 of shape [parts + 1, 3]; or None if ``units`` are not valid.
    """
    if library is None:
        return kernels_numpy.index(units, count, limit, step)
    room = count // step + 1
    cuts = np.empty((room + 1, 3), np.int64)
    numbers = map(_number, (len(units), count, limit, step))
    parts = library.wu_index(units.itemsize, _at(units), *numbers, _at(cuts), _number(room))
    return cuts[: parts + 1] if parts > 0 else None


def join(units: Array, count: int, limit: int) -> Array | None:
    """Return ``count`` positions below ``limit``, int32 or int64, or None if ``units`` are not valid."""
    if library is None:
        return kernels_numpy.join(units, count, limit)
    positions = np.empty(count, np.int32 if limit < 1 << 31 else np.int64)
    numbers = _number(len(units)), _number(count), _number(limit)
    bad = _of(positions, "join")(units.itemsize, _at(units), *numbers, _at(positions))
    return None if bad else positions


def apply(words: Array, units: Array, values: Array, relative: bool) -> bool:
    """Write ``values`` over the elements of ``words`` that ``units`` stand for, or add them.

    Nothing outside ``words`` is written. Return False if the units stand for other elements than these, or
    for more or fewer; some values may then have been written.
    """
    if library is None:
        return kernels_numpy.apply(words, units, values, relative)
    place, numbers = (_at(words), _number(len(words))), (_number(len(values)), int(relative))
    sources = units.itemsize, _at(units), _number(len(units)), _at(values)
    return not library.wu_apply(words.itemsize, *place, *sources, *numbers)


def plane_of(steps: Array, plane: int) -> tuple[Array, int]:
    """Return the byte ``plane`` of each of the zigzag coded ``steps``, and how many are not zero."""
    if library is None:
        return kernels_numpy.plane_of(steps, plane)
    out = np.empty(len(steps), np.uint8)
    filled = library.wu_plane(steps.itemsize, _at(steps), _number(len(steps)), plane, _at(out))
    return out, int(filled)


def steps_of(planes: Sequence[Array | None], out: Array) -> None:
    """Write into ``out`` the steps whose zigzag code has these planes; None is a plane of zeros."""
    if library is None:
        kernels_numpy.steps_of(planes, out)
        return
    addresses = [None if one is None else one.ctypes.data for one in planes]
    pointers = (ctypes.c_void_p * len(planes))(*addresses)
    library.wu_steps(out.itemsize, pointers, _number(len(out)), _at(out))


_number = ctypes.c_int64


def _of(offsets: Array, name: str) -> Any:
    return getattr(library, f"wu_{name}_int{8 * offsets.itemsize}_t")


def _at(array: Array) -> ctypes.c_void_p:
    assert array.flags.c_contiguous
    return ctypes.c_void_p(array.ctypes.data)
