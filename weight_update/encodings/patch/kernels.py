"""Compiled inner loops of the patch encoding, from ``kernels.c``.

They exist where a C compiler was at hand when the package was installed. Elsewhere, and with
``WEIGHT_UPDATE_KERNELS=0`` in the environment, numpy does the same work, which takes several times as long.
Calls release the interpreter lock.
"""

from __future__ import annotations

import ctypes
import importlib.machinery
import os
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[Any]

INTEGER: dict[int, np.dtype[Any]] = {int(kind[1]): np.dtype(kind) for kind in ("u1", "i2", "i4", "i8")}
"""Integer dtype for the bits of an element, by width in bytes."""

_NAME = "_kernels"


def _load() -> ctypes.CDLL | None:
    if os.environ.get("WEIGHT_UPDATE_KERNELS") == "0":
        return None
    for suffix in importlib.machinery.EXTENSION_SUFFIXES:
        path = Path(__file__).with_name(_NAME + suffix)
        if path.exists():
            library = ctypes.CDLL(str(path))
            library.wu_diff.restype = ctypes.c_int64
            return library
    return None


library: ctypes.CDLL | None = _load()
"""The compiled library; None where there is none."""


class DiffBuffer:
    """Memory for the result of :func:`diff` on up to ``nbytes`` bytes, used again and again by one thread."""

    def __init__(self, nbytes: int) -> None:
        self.offsets = np.empty(nbytes, np.int32)  # as many elements if they are of one byte
        self.values = np.empty(nbytes, np.uint8)


def diff(width: int, new: Array, old: Array, relative: bool, buffer: DiffBuffer) -> tuple[Array, Array]:
    """Compare two 1-D uint8 arrays by elements of ``width`` bytes.

    Return the offsets (int32) and the values (integers of ``width`` bytes) of the elements that differ, in
    memory of ``buffer``. Values are new bits, or new minus old bits if ``relative``.
    """
    assert library is not None
    where, out = buffer.offsets, buffer.values
    count = ctypes.c_int64(len(new) // width)
    found = library.wu_diff(width, _at(new), _at(old), count, int(relative), _at(where), _at(out))
    return where[:found], out[: found * width].view(INTEGER[width])


def units_needed(first: int, offsets: Array, before: int) -> list[int]:
    """Return the number of units of 1, 2 and 4 bytes for the gaps of ``first + offsets`` after ``before``."""
    assert library is not None
    needed = (ctypes.c_int64 * 3)()
    _of(offsets, "count")(_at(offsets), _number(len(offsets)), _number(first), _number(before), needed)
    return list(needed)


def split(first: int, offsets: Array, before: int, size: int, needed: int) -> Array:
    """Return these gaps in ``needed`` units of ``size`` bytes."""
    units = np.empty(needed, f"<u{size}")
    numbers = _number(len(offsets)), _number(first), _number(before)
    _of(offsets, "split")(_at(offsets), *numbers, size, _at(units))
    return units


def join(units: Array, count: int, limit: int) -> Array | None:
    """Return ``count`` positions below ``limit``, int32 if these fit, or None if ``units`` are not valid."""
    positions = np.empty(count, np.int32 if limit < 1 << 31 else np.int64)
    numbers = _number(len(units)), _number(count), _number(limit)
    bad = _of(positions, "join")(units.itemsize, _at(units), *numbers, _at(positions))
    return None if bad else positions


def write(words: Array, offsets: Array, values: Array, relative: bool) -> None:
    """Write ``values`` over the elements of ``words`` at ``offsets``, or add them; offsets are trusted."""
    numbers = _number(len(offsets)), int(relative)
    _of(offsets, "write")(words.itemsize, _at(words), _at(offsets), _at(values), *numbers)


_number = ctypes.c_int64


def _of(offsets: Array, name: str) -> Any:
    return getattr(library, f"wu_{name}_int{8 * offsets.itemsize}_t")


def _at(array: Array) -> ctypes.c_void_p:
    assert array.flags.c_contiguous
    return ctypes.c_void_p(array.ctypes.data)
