"""Libraries of compiled loops, which are built from C where there was a compiler at installation.

Elsewhere, and with ``WEIGHT_UPDATE_KERNELS=0`` in the environment, numpy or torch does the same work, which
takes several times as long. Calls release the interpreter lock, unless a library needs it.
"""

from __future__ import annotations

import ctypes
import importlib.machinery
import os
from collections.abc import Sequence
from pathlib import Path


def load(
    folder: Path, name: str, version: int, counting: Sequence[str] = (), *, locked: bool = False
) -> ctypes.CDLL | None:
    """Return the library ``name`` of ``folder``; None if there is none, or it was built from other sources.

    A checkout may hold one that an earlier version has built. The library states its version in the int
    ``wu_version``. The functions ``counting`` return an int64, others an int or nothing. Calls hold the
    interpreter lock if ``locked``.
    """
    if os.environ.get("WEIGHT_UPDATE_KERNELS") == "0":
        return None
    for suffix in importlib.machinery.EXTENSION_SUFFIXES:
        path = folder / (name + suffix)
        if path.exists():
            library = (ctypes.PyDLL if locked else ctypes.CDLL)(str(path))
            try:
                built = ctypes.c_int.in_dll(library, "wu_version").value
            except ValueError:  # it has no such name
                return None
            if built != version:
                return None
            for function in counting:
                getattr(library, function).restype = ctypes.c_int64
            return library
    return None
