"""The inner loops of the encodings: compiled from ``kernels.c``, or where there are none, in numpy.

See :mod:`weight_update.wire.compiled`. Both give the same results.
"""

from __future__ import annotations

import contextlib
import ctypes
import mmap
import weakref
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from weight_update.encodings.patch import kernels_numpy
from weight_update.encodings.patch.kernels_numpy import Array
from weight_update.errors import NotEnoughMemoryError
from weight_update.wire.compiled import load
from weight_update.wire.schema import aligned

TILE = np.dtype([("new", "u8"), ("old", "u8"), ("n", "i8"), ("at", "i8"), ("most", "i8"), ("found", "i8")])
"""Elements to compare: their addresses, number and first position; see :meth:`GapBuffer.scan`."""

_SLACK = 64  # bytes behind the results of a scan
_PRIVATE = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS


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
    """Memory for the gaps and values of changes among ``most`` elements, used again and again.

    Gaps are in units of one byte, see :mod:`~weight_update.encodings.patch.gaps`. Only pages that were
    written take memory.
    """

    def __init__(self, width: int, most: int) -> None:
        self.width, self._most = width, most
        self._split = aligned(most * width + _SLACK, mmap.PAGESIZE)  # values lie before units
        self._state = _State(None, None, 0, 0, 0)
        self._taken: Callable[[], Array | None] = lambda: None
        self._map()

    def _map(self) -> None:
        size = self._split + self._most + _SLACK
        try:
            self._memory = mmap.mmap(-1, size, flags=_PRIVATE)
        except OSError as error:
            raise NotEnoughMemoryError(
                f"cannot reserve {size / 1e6:.1f} MB for the changes of a patch ({error}); free memory, or "
                "raise the process's limit (ulimit -v) or, with vm.overcommit_memory=2, the machine's"
            ) from None
        if hasattr(mmap, "MADV_NOHUGEPAGE"):
            with contextlib.suppress(OSError):  # the kernel has no large pages, which would be mostly empty
                self._memory.madvise(mmap.MADV_NOHUGEPAGE)
        values, units = self._arrays()
        self._state.values, self._state.units = values.ctypes.data, units.ctypes.data

    def _arrays(self) -> tuple[Array, Array]:
        whole = np.frombuffer(self._memory, np.uint8)
        return whole[: self._split], whole[self._split :]

    def start(self, first: int) -> None:
        """Drop everything; the next gap counts from the element ``first``."""
        if self._taken() is not None:  # results of the scan before are still in use
            self._map()
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
        state, (all_values, all_units) = self._state, self._arrays()
        for tile in tiles:
            positions, values = kernels_numpy.differences(tile, f"i{self.width}", relative)
            tile["found"] = len(positions)
            if 0 < len(positions) <= tile["most"]:
                units = kernels_numpy.code(positions - state.next)
                all_units[state.used : state.used + len(units)] = units
                all_values.view(values.dtype)[state.found : state.found + len(values)] = values
                state.used, state.found = state.used + len(units), state.found + len(values)
                state.next = int(positions[-1]) + 1

    def save(self) -> tuple[int, int, int]:
        """Return what :meth:`restore` needs to drop everything that is appended later."""
        return self._state.used, self._state.found, self._state.next

    def restore(self, saved: tuple[int, int, int]) -> None:
        """Return to the state at :meth:`save`."""
        self._state.used, self._state.found, self._state.next = saved

    def take(self) -> tuple[Array, Array]:
        """Return the units, and the values as integers of the width.

        Their memory is used again as soon as nothing refers to it. It has room for as many changes again; all
        other pages are freed.
        """
        self._free(2 * self.found * self.width, self._split)
        self._free(self._split + 2 * self._state.used, len(self._memory))
        values, units = self._arrays()
        self._taken = weakref.ref(values.base)
        return units[: self._state.used], values[: self.found * self.width].view(f"i{self.width}")

    def _free(self, start: int, end: int) -> None:
        start = aligned(start, mmap.PAGESIZE)
        if start < end:
            with contextlib.suppress(OSError):  # the process has locked its memory
                self._memory.madvise(mmap.MADV_DONTNEED, start, end - start)


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
