"""Find the elements that changed: compare live tensors with a snapshot in one pass, on all cores.

The flat buffer is cut into tiles that fit into caches. A large tensor has tiles of its own, which are
compared in place unless they must be converted; small neighbours share a tile and are gathered first. Each
tile is compared in words of 8 bytes, and only words that differ are examined further.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from weight_update.encodings.base import Difference
from weight_update.encodings.patch import kernels
from weight_update.encodings.patch.changes import ByteRange, Changes, Segment, Sparse
from weight_update.encodings.patch.threads import in_threads
from weight_update.encodings.patch.tiles import Tile, cut, flattened
from weight_update.wire.schema import WeightSchema

TILE = 2 << 20
"""Bytes of a tile: short enough for caches, long enough that threads rarely wait for the interpreter lock."""

GROUP = 16 << 20
"""Bytes of the flat buffer whose changes become one segment, large enough for one thread to process."""

LARGE = 64 << 10
"""Bytes below which tensors share a tile with their neighbours."""

LITTLE = 16 << 20
"""Bytes below which one thread is faster than two."""

SERIAL = 32736
"""Elements that torch copies on one thread; whole vectors, because a remainder converts NaNs differently."""

FEW = 0.1
"""Fraction up to which numpy's ``nonzero`` branches at each hit, and mispredicts most."""

FEW_EIGHTS = 1 - (1 - FEW) ** 8
"""Fraction of groups of eight that have a hit when the fraction of all is :data:`FEW`."""

Bytes = NDArray[np.uint8]
ElementDiff = tuple[int, NDArray[Any], NDArray[Any]]
"""Width, positions from the start of the tile, and values of elements that differ; at least one element."""


@dataclass(frozen=True, eq=False)
class Scan(Difference):
    """The result of a scan, in memory of its own. The halves of a complex128 count as two elements."""

    changes: Changes


class Scanner:
    """A bitwise comparison of live tensors with a snapshot of them; scans share scratch memory.

    Args:
        schema: layout and dtypes of the snapshot, to which live tensors are converted by ``Tensor.copy_``.
        tracked: positions of the schema entries to compare, of tied entries the first one; None for all.
        dense_above: fraction of changed elements above which the whole tile is replaced.
        relative: whether values are steps from the old bits instead of the new bits.
        threads: number of threads; None for as many as torch uses, or one if there is little to do.
    """

    def __init__(
        self,
        schema: WeightSchema,
        tracked: Sequence[int] | None = None,
        dense_above: float = 0.5,
        relative: bool = False,
        threads: int | None = None,
    ) -> None:
        if threads is None:
            threads = torch.get_num_threads() if schema.nbytes >= LITTLE else 1
        if threads < 1:
            raise ValueError(f"threads is {threads}, must be at least 1")
        self._schema, self._dense_above, self._relative = schema, dense_above, relative
        self._tiles = list(cut(schema, tracked, TILE, LARGE))
        groups = list(_grouped(self._tiles))
        count = min(threads, len(groups))
        self._shares = [_readers_of(groups[first::threads]) for first in range(count)]  # one for each thread
        self._total = sum(tile.elements for tile in self._tiles)

    def scan(self, tensors: Sequence[torch.Tensor], snapshot: torch.Tensor) -> Scan:
        """Compare without writing to either side; ValueError if their sizes do not fit the schema.

        Args:
            tensors: one for each schema entry, in order, of any strides.
            snapshot: 1-D uint8 on the CPU, 8-byte aligned.
        """
        check_sizes(self._schema, tensors, snapshot)
        live, old = flattened(tensors, self._tiles), snapshot.numpy()

        @torch.no_grad()  # a setting of each thread
        def compare(share: Sequence[Sequence[_TileReader]]) -> list[_GroupDiff]:
            return [_compare(group, live, old, self._dense_above, self._relative) for group in share]

        done = in_threads(compare, self._shares, len(self._shares))
        groups = [done[i % len(done)][i // len(done)] for i in range(sum(map(len, done)))]
        return Scan(sum(group.changed for group in groups), self._total, _merge(groups, self._relative))


def _grouped(tiles: Sequence[Tile]) -> Iterator[list[Tile]]:
    """Yield groups of consecutive tiles that lie within :data:`GROUP` bytes."""
    group: list[Tile] = []
    for tile in tiles:
        if group and tile.start + tile.nbytes - group[0].start > GROUP:
            yield group
            group = []
        group.append(tile)
    if group:
        yield group


def check_sizes(schema: WeightSchema, tensors: Sequence[torch.Tensor], snapshot: torch.Tensor) -> None:
    """Raise ValueError if a size does not fit the schema."""
    if len(tensors) != len(schema.tensors) or snapshot.numel() != schema.nbytes:
        raise ValueError(
            f"{len(tensors)} tensors and a snapshot of {snapshot.numel()} bytes; the schema has "
            f"{len(schema.tensors)} and {schema.nbytes}"
        )


class _TileReader:
    """A reader of the current bytes of a tile; readers of one thread share ``scratch``, 1-D uint8.

    They also share ``buffer``, memory for the differences.
    """

    def __init__(self, tile: Tile, scratch: torch.Tensor, buffer: kernels.DiffBuffer) -> None:
        self.tile, self.buffer, self._scratch = tile, buffer, scratch[: tile.nbytes]
        self._views = [] if tile.flat else tile.views(scratch)

    def read(self, live: Sequence[torch.Tensor], old: Bytes) -> Bytes:
        parts = self.tile.of(live)
        if not self.tile.flat:
            new = self._scratch.numpy()
            new[:] = old  # so that nothing differs between the tensors
            torch._foreach_copy_(self._views, parts)
            return new
        (part,), dtype = parts, self.tile.slices[0].meta.dtype
        if not _readable(part, dtype):
            into = self._scratch.view(dtype)
            torch._foreach_copy_(torch.split(into, SERIAL), torch.split(part, SERIAL))
            part = self._scratch
        return part.view(torch.uint8).numpy()


def _readers_of(share: Sequence[Sequence[Tile]]) -> list[list[_TileReader]]:
    most = max(tile.nbytes for group in share for tile in group)
    scratch, buffer = torch.empty(most, dtype=torch.uint8), kernels.DiffBuffer(most)
    return [[_TileReader(tile, scratch, buffer) for tile in group] for group in share]


@dataclass(frozen=True)
class _GroupDiff:
    """The differences in a group of tiles, by width."""

    changed: int
    segments: dict[int, Segment]
    ranges: list[ByteRange]


def _compare(
    group: Sequence[_TileReader],
    live: Sequence[torch.Tensor],
    snapshot: Bytes,
    dense_above: float,
    relative: bool,
) -> _GroupDiff:
    start, changed, ranges = group[0].tile.start, 0, list[ByteRange]()
    by_width: dict[int, list[tuple[int, NDArray[Any], NDArray[Any]]]] = {}
    for reader in group:
        tile = reader.tile
        old = snapshot[tile.start : tile.start + tile.nbytes]
        new = reader.read(live, old)
        found = _differences(reader, new, old, relative)
        here = sum(len(positions) for _, positions, _ in found)
        changed += here
        if here > dense_above * tile.elements:
            ranges += [ByteRange(tile.start + a, torch.from_numpy(new[a:b].copy())) for a, b in tile.filled]
            continue
        for width, positions, values in found:
            by_width.setdefault(width, []).append(((tile.start - start) // width, positions, values))
    segments = {width: _segment(start // width, parts) for width, parts in by_width.items()}
    return _GroupDiff(changed, segments, ranges)


def _segment(first: int, parts: Sequence[tuple[int, NDArray[Any], NDArray[Any]]]) -> Segment:
    """Join the positions, each counted from the start of its tile, and the values of several tiles."""
    values = np.concatenate([values for _, _, values in parts])
    offsets = np.empty(values.shape, np.int32)  # fresh memory costs most here
    end = 0
    for start, positions, _ in parts:
        here = offsets[end : end + len(positions)]
        here[:] = positions
        here += start
        end += len(positions)
    return Segment(first, torch.from_numpy(offsets), torch.from_numpy(values))


def _merge(groups: Sequence[_GroupDiff], relative: bool) -> Changes:
    sparse = []
    for width in sorted({width for group in groups for width in group.segments}):
        segments = tuple(group.segments[width] for group in groups if width in group.segments)
        sparse.append(Sparse(width, segments, relative))
    return Changes(tuple(sparse), tuple(one for group in groups for one in group.ranges))


def _readable(part: torch.Tensor, dtype: torch.dtype) -> bool:
    """Whether the memory of ``part`` holds its elements as the snapshot does, aligned to words."""
    lazy = part.is_conj() or part.is_neg()
    return part.dtype is dtype and part.is_cpu and part.data_ptr() % 8 == 0 and not lazy


def _differences(reader: _TileReader, new: Bytes, old: Bytes, relative: bool) -> list[ElementDiff]:
    """Return the elements of a tile that differ, by ascending width; values as :class:`Scanner` has them."""
    tile, width = reader.tile, reader.tile.widths[0]
    if len(tile.widths) == 1 and kernels.library is not None:
        positions, values = kernels.diff(width, new, old, relative, reader.buffer)
        return [(width, positions.copy(), values.copy())] if len(positions) else []
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
