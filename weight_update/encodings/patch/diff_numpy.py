"""Find the elements of a tile that differ, without the compiled loops.

Tiles are compared in words of 8 bytes, and only words that differ are examined further.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from weight_update.encodings.patch import kernels
from weight_update.encodings.patch.tiles import Tile

FEW = 0.1
"""Fraction up to which numpy's ``nonzero`` branches at each hit, and mispredicts most."""

FEW_EIGHTS = 1 - (1 - FEW) ** 8
"""Fraction of groups of eight that have a hit when the fraction of all is :data:`FEW`."""

Bytes = NDArray[np.uint8]
ElementDiff = tuple[int, NDArray[Any], NDArray[Any]]
"""Width, positions from the start of the tile, and values of elements that differ; at least one element."""


def differences(tile: Tile, new: Bytes, old: Bytes, relative: bool) -> list[ElementDiff]:
    """Return the elements of a tile that differ, by ascending width.

    Values are new bits, or new minus old bits if ``relative``.
    """
    width = tile.widths[0]
    found = _of_width(width, new, old) if len(tile.widths) == 1 else _mixed(tile, new, old)
    if relative:
        for width, positions, values in found:
            values -= old.view(kernels.INTEGER[width]).take(
                positions, mode="wrap"
            )  # from the core's own cache
    return found


def _mixed(tile: Tile, new: Bytes, old: Bytes) -> list[ElementDiff]:
    """Return the elements that differ in a tile of several widths, by ascending width."""
    words = np.flatnonzero(new.view(np.int64) != old.view(np.int64))
    starts = np.array([(one.start - tile.start) // 8 for one in tile.slices])
    widths = np.array([one.width for one in tile.slices])
    width_of = widths[np.searchsorted(starts, words, side="right") - 1]
    found = (_inside(width, words[width_of == width], new, old) for width in tile.widths)
    return [(width, positions, values) for width, positions, values in found if len(positions)]


def _of_width(width: int, new: Bytes, old: Bytes) -> list[ElementDiff]:
    """Return the elements that differ where all have one width."""
    if len(new) % 8 == 0:
        differ = new.view(np.int64) != old.view(np.int64)
        most = 1.0 if width == 8 else 1 - (1 - FEW) ** (8 // width)  # as many as FEW elements
        words = _where(differ, most)
        if words is not None:
            return [_inside(width, words, new, old)] if len(words) else []
    values = new.view(kernels.INTEGER[width])
    positions = np.flatnonzero(values != old.view(kernels.INTEGER[width]))
    return [(width, positions, values.take(positions))] if len(positions) else []


def _where(differ: NDArray[np.bool_], most: float) -> NDArray[np.int64] | None:
    """Return the positions of True, faster than numpy for few; None if their fraction is above ``most``."""
    if len(differ) % 8 == 0:
        eights = differ.view(np.int64)
        some = eights != 0
        if np.count_nonzero(some) <= FEW_EIGHTS * len(eights):
            hits = np.flatnonzero(some)
            return _spread(hits, np.flatnonzero(_take(eights, hits).view(np.bool_)), 3)
    return np.flatnonzero(differ) if np.count_nonzero(differ) <= most * len(differ) else None


def _inside(width: int, words: NDArray[np.int64], new: Bytes, old: Bytes) -> ElementDiff:
    """Return the elements of one width that differ within ``words`` of 8 bytes that differ."""
    values = _take(new.view(np.int64), words)
    if width == 8:
        return width, words, values
    elements = values.view(kernels.INTEGER[width])
    at = np.flatnonzero(elements != _take(old.view(np.int64), words).view(kernels.INTEGER[width]))
    return width, _spread(words, at, (8 // width).bit_length() - 1), _take(elements, at)


def _spread(groups: NDArray[np.int64], at: NDArray[np.int64], bits: int) -> NDArray[np.int64]:
    """Return the positions of members ``at`` of ``groups``, which have ``1 << bits`` members each."""
    places = _take(groups, at >> bits)
    places <<= bits
    places += at & ((1 << bits) - 1)
    return places


def _take(array: NDArray[Any], at: NDArray[np.int64]) -> NDArray[Any]:
    """Return ``array.take(at)``; no index is out of bounds, and mode "wrap" is the fastest."""
    return array.take(at, mode="wrap")
