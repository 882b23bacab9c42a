"""Elements of one piece that differ from the snapshot."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from weight_update.encodings.patch.tiles import Piece

__all__ = ["INTEGER", "Bytes", "Found", "differing"]

Bytes = NDArray[np.uint8]
Found = tuple[int, NDArray[Any], NDArray[Any]]
"""Width, positions from the start of the piece, values: at least one."""

FEW = 0.1
"""Up to this fraction numpy's ``nonzero`` branches at each one found, and mispredicts most."""

FEW_EIGHTS = 1 - (1 - FEW) ** 8
"""The fraction of eights in which one is found, where that of all is :data:`FEW`."""

INTEGER: dict[int, np.dtype[Any]] = {
    1: np.dtype(np.uint8),
    2: np.dtype(np.int16),
    4: np.dtype(np.int32),
    8: np.dtype(np.int64),
}
"""The integer that bits of so many bytes are compared as."""


def differing(piece: Piece, new: Bytes, old: Bytes) -> list[Found]:
    """What differs, by ascending width; nothing where ``new`` and ``old`` agree."""
    if len(piece.widths) == 1:
        return _of_width(piece.widths[0], new, old)
    return _mixed(piece, new, old)


def _mixed(piece: Piece, new: Bytes, old: Bytes) -> list[Found]:
    """Elements that differ where there are several widths."""
    words = np.flatnonzero(new.view(np.int64) != old.view(np.int64))
    starts = np.array([(part.start - piece.start) // 8 for part in piece.parts])
    widths = np.array([part.width for part in piece.parts])
    kinds = widths[np.searchsorted(starts, words, side="right") - 1]
    found = (_inside(width, words[kinds == width], new, old) for width in piece.widths)
    return [(width, positions, values) for width, positions, values in found if len(positions)]


def _of_width(width: int, new: Bytes, old: Bytes) -> list[Found]:
    """Elements that differ where all are of one width."""
    if len(new) % 8 == 0:
        differ = new.view(np.int64) != old.view(np.int64)
        most = 1.0 if width == 8 else 1 - (1 - FEW) ** (8 // width)  # as many as FEW elements
        words = _where(differ, most)
        if words is not None:
            return [_inside(width, words, new, old)] if len(words) else []
    values = new.view(INTEGER[width])
    positions = np.flatnonzero(values != old.view(INTEGER[width]))
    return [(width, positions, values.take(positions))] if len(positions) else []


def _where(differ: NDArray[np.bool_], most: float) -> NDArray[np.int64] | None:
    """Positions of the true ones, quicker than numpy's where they are few; None above a fraction ``most``."""
    if len(differ) % 8 == 0:
        eights = differ.view(np.int64)
        some = eights != 0
        if np.count_nonzero(some) <= FEW_EIGHTS * len(eights):
            lines = np.flatnonzero(some)
            return _spread(lines, np.flatnonzero(_taken(eights, lines).view(np.bool_)), 3)
    return np.flatnonzero(differ) if np.count_nonzero(differ) <= most * len(differ) else None


def _inside(width: int, words: NDArray[np.int64], new: Bytes, old: Bytes) -> Found:
    """Elements of one width that differ within ``words`` of 8 bytes that differ."""
    values = _taken(new.view(np.int64), words)
    if width == 8:
        return width, words, values
    parts = values.view(INTEGER[width])
    at = np.flatnonzero(parts != _taken(old.view(np.int64), words).view(INTEGER[width]))
    return width, _spread(words, at, (8 // width).bit_length() - 1), _taken(parts, at)


def _spread(groups: NDArray[np.int64], at: NDArray[np.int64], bits: int) -> NDArray[np.int64]:
    """Places of members ``at`` of ``groups``, which have ``1 << bits`` members each."""
    places = _taken(groups, at >> bits)
    places <<= bits
    places += at & ((1 << bits) - 1)
    return places


def _taken(array: NDArray[Any], at: NDArray[np.int64]) -> NDArray[Any]:
    """``array.take(at)``; no index is outside, so that nothing wraps: this mode is merely the fastest."""
    return array.take(at, mode="wrap")
