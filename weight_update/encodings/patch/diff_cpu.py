"""Find the elements that changed: compare live tensors with a snapshot in one pass, on all cores.

The flat buffer is cut into tiles that fit into caches. A large tensor has tiles of its own, which are
compared in place unless they must be converted; small neighbours share a tile and are gathered first.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from weight_update.encodings.base import Difference
from weight_update.encodings.dense import SERIAL
from weight_update.encodings.patch import kernels
from weight_update.encodings.patch.changes import ByteRange, Changes, Segment, Sparse
from weight_update.encodings.patch.gaps import Gaps
from weight_update.encodings.patch.tiles import Tile, cut, flattened
from weight_update.threads import in_threads
from weight_update.wire.schema import WeightSchema

Bytes = NDArray[np.uint8]

TILE = 2 << 20
"""Bytes of a tile: short enough for caches, long enough that threads rarely wait for the interpreter lock."""

GROUP = 16 << 20
"""Bytes of the flat buffer whose changes become one segment, large enough for one thread to process."""

LARGE = 64 << 10
"""Bytes below which tensors share a tile with their neighbours."""

DENSE_ABOVE = 0.5
"""Fraction of changed elements above which a whole tile is replaced."""

_LITTLE = 16 << 20
"""Bytes below which one thread is faster than two."""


@dataclass(frozen=True, eq=False)
class Scan(Difference):
    """The result of a scan, in memory of its own. The halves of a complex128 count as two elements."""

    changes: Changes


class Scanner:
    """A bitwise comparison of live tensors with a snapshot of them; scans share scratch memory.

    Args:
        schema: layout and dtypes of the snapshot, to which live tensors are converted by ``Tensor.copy_``.
        tracked: positions of the schema entries to compare, of tied entries the first one; None for all.
        relative: whether values are steps from the old bits instead of the new bits.
        threads: number of threads; None for as many as torch uses, or one if there is little to do.
    """

    def __init__(
        self,
        schema: WeightSchema,
        tracked: Sequence[int] | None = None,
        relative: bool = False,
        threads: int | None = None,
    ) -> None:
        if threads is None:
            threads = torch.get_num_threads() if schema.nbytes >= _LITTLE else 1
        self._relative = relative
        self._tiles = list(cut(schema, tracked, TILE, LARGE))
        self._total = sum(tile.elements for tile in self._tiles)
        groups = list(_grouped(self._tiles))
        count = min(threads, len(groups))
        self._shares: list[list[_Group]] = []  # one for each thread
        for first in range(count):
            share = groups[first::threads]
            largest = max(tile.nbytes for group in share for tile in group)
            scratch = torch.empty(largest, dtype=torch.uint8, device="cpu")
            self._shares.append([_Group(tiles, scratch, relative) for tiles in share])

    def scan(self, tensors: Sequence[torch.Tensor], snapshot: torch.Tensor) -> Scan:
        """Compare without writing to either side.

        Args:
            tensors: one for each schema entry, in order, of any strides.
            snapshot: 1-D uint8 on the CPU, 8-byte aligned.
        """
        live = flattened(tensors, self._tiles)
        dtypes = {tile.slices[0].entry: tile.slices[0].meta.dtype for tile in self._tiles if tile.flat}
        readable = [entry for entry, dtype in dtypes.items() if _readable(live[entry], dtype)]
        addresses = {entry: live[entry].view(torch.uint8).numpy().ctypes.data for entry in readable}
        weights = _Weights(live, addresses, snapshot.numpy())

        @torch.no_grad()  # a setting of each thread
        def scan(share: list[_Group]) -> list[_Found]:
            return [group.scan(weights) for group in share]

        done = in_threads(scan, self._shares, len(self._shares))
        found = [done[i % len(done)][i // len(done)] for i in range(sum(map(len, done)))]  # in order again
        sparse = []
        for width in sorted({width for _, segments, _ in found for width in segments}):
            parts = tuple(segments[width] for _, segments, _ in found if width in segments)
            sparse.append(Sparse(width, parts, self._relative))
        ranges = tuple(one for _, _, replaced in found for one in replaced)
        return Scan(sum(changed for changed, _, _ in found), self._total, Changes(tuple(sparse), ranges))


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


class _Weights(NamedTuple):
    """Live tensors and a snapshot.

    Attributes:
        live: the result of :func:`~weight_update.encodings.patch.tiles.flattened`.
        addresses: where the bytes of an entry with tiles of its own begin, unless they must be converted.
        snapshot: 1-D uint8.
    """

    live: Sequence[torch.Tensor]
    addresses: dict[int, int]
    snapshot: Bytes


_Found = tuple[int, dict[int, Segment], list[ByteRange]]
"""Number of changed elements of a group, and its changes: segments by width, and ranges."""


class _TileReader:
    """A reader of the current bytes of a tile, which is replaced if more than ``most`` elements changed."""

    def __init__(self, tile: Tile, scratch: torch.Tensor) -> None:
        self.tile, self.most = tile, int(DENSE_ABOVE * tile.elements)
        self._scratch, self._views = scratch[: tile.nbytes], tile.views(scratch)

    def in_place(self, weights: _Weights) -> bool:
        """Return whether the tile can be compared where it lies."""
        return self.tile.flat and self.tile.slices[0].entry in weights.addresses

    def row(self, weights: _Weights) -> tuple[int, ...]:
        """Return the row of :data:`kernels.TILE` for a tile that is compared where it lies."""
        tile, (one,) = self.tile, self.tile.slices
        new = weights.addresses[one.entry] + one.first * one.meta.dtype.itemsize
        old = weights.snapshot.ctypes.data + tile.start
        return _row(new, old, one.width, tile.start, tile.nbytes, self.most)

    def read(self, weights: _Weights) -> tuple[Bytes, Bytes]:
        """Return new and old bytes; the new ones may lie in scratch memory."""
        tile, parts = self.tile, self.tile.of(weights.live)
        old = weights.snapshot[tile.start : tile.start + tile.nbytes]
        if self.in_place(weights):
            return parts[0].view(torch.uint8).numpy(), old
        new = self._scratch.numpy()
        if tile.flat:
            torch._foreach_copy_(torch.split(self._views[0], SERIAL), torch.split(parts[0], SERIAL))
        else:
            new[:] = old  # so that nothing differs between the tensors
            torch._foreach_copy_(self._views, parts)
        return new, old

    def ranges(self, new: Bytes) -> list[ByteRange]:
        """Return copies of all bytes of the tile, which are ``new``."""
        tile = self.tile
        return [ByteRange(tile.start + a, torch.from_numpy(new[a:b].copy())) for a, b in tile.filled]


class _Group:
    """Consecutive tiles, which one thread compares, and the memory for their changes, by width."""

    def __init__(self, tiles: Sequence[Tile], scratch: torch.Tensor, relative: bool) -> None:
        self._start, self._relative = tiles[0].start, relative
        self._readers = [_TileReader(tile, scratch) for tile in tiles]
        span = tiles[-1].start + tiles[-1].nbytes - self._start
        widths = {width for tile in tiles for width in tile.widths}
        self._buffers = {width: kernels.GapBuffer(width, span // width) for width in widths}

    def scan(self, weights: _Weights) -> _Found:
        for width, buffer in self._buffers.items():
            buffer.start(self._start // width)
        changed, ranges = 0, list[ByteRange]()
        runs = groupby(self._readers, lambda one: one.tile.widths[0] if one.in_place(weights) else 0)
        for width, run in runs:
            readers = list(run)
            if width:
                table = np.array([one.row(weights) for one in readers], kernels.TILE)
                self._buffers[width].scan(table, self._relative)
                changed += int(table["found"].sum())
                for k in np.flatnonzero(table["found"] > table["most"]).tolist():
                    ranges += readers[k].ranges(readers[k].read(weights)[0])
                continue
            for one in readers:
                new, old = one.read(weights)
                found = self._scan_slices(one.tile, one.most, new, old)
                changed += found
                ranges += one.ranges(new) if found > one.most else []
        return changed, dict(self._segments()), ranges

    def _scan_slices(self, tile: Tile, most: int, new: Bytes, old: Bytes) -> int:
        """Append the changes of a tile if they are at most ``most``; return their number."""
        before, found = [self._buffers[width].save() for width in tile.widths], 0
        for width in tile.widths:
            rows = [
                _row(new.ctypes.data + a, old.ctypes.data + a, width, tile.start + a, b - a, b - a)
                for a, b in tile.runs[width]
            ]
            table = np.array(rows, kernels.TILE)
            self._buffers[width].scan(table, self._relative)
            found += int(table["found"].sum())
        if found > most:
            for width, saved in zip(tile.widths, before, strict=True):
                self._buffers[width].restore(saved)
        return found

    def _segments(self) -> Iterator[tuple[int, Segment]]:
        """Yield the changes, by width."""
        for width, buffer in self._buffers.items():
            units, values = buffer.take()
            if len(values):
                gaps = Gaps(self._start // width, buffer.last, units, buffer.found)
                yield width, Segment(gaps, torch.from_numpy(values))


def _row(new: int, old: int, width: int, start: int, nbytes: int, most: int) -> tuple[int, ...]:
    return new, old, nbytes // width, start // width, most, 0


def _readable(part: torch.Tensor, dtype: torch.dtype) -> bool:
    """Return whether the memory of ``part`` holds its elements as the snapshot does, aligned to words."""
    lazy = part.is_conj() or part.is_neg()
    return part.dtype is dtype and part.is_cpu and part.data_ptr() % 8 == 0 and not lazy
