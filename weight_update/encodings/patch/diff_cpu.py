"""Find the elements that changed: compare live tensors with a snapshot in one pass, on all cores.

The flat buffer is cut into tiles that fit into caches. A large tensor has tiles of its own, which are
compared in place unless they must be converted; small neighbours share a tile and are gathered first.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from operator import attrgetter

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

LITTLE = 16 << 20
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
        self._schema = schema
        self._tiles = list(cut(schema, tracked, TILE, LARGE))
        groups = list(_grouped(self._tiles))
        count = min(threads, len(groups))
        shares = [groups[first::threads] for first in range(count)]  # one for each thread
        self._shares = [_groups_of(share, dense_above, relative) for share in shares]

    def scan(self, tensors: Sequence[torch.Tensor], snapshot: torch.Tensor) -> Scan:
        """Compare without writing to either side; ValueError if their sizes do not fit the schema.

        Args:
            tensors: one for each schema entry, in order, of any strides.
            snapshot: 1-D uint8 on the CPU, 8-byte aligned.
        """
        check_sizes(self._schema, tensors, snapshot)
        weights = _Weights.of(flattened(tensors, self._tiles), self._tiles, snapshot)

        @torch.no_grad()  # a setting of each thread
        def compare(share: Sequence[_Group]) -> list[Scan]:
            return [one.scan(weights) for one in share]

        done = in_threads(compare, self._shares, len(self._shares))
        return _merged([done[i % len(done)][i // len(done)] for i in range(sum(map(len, done)))])


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


@dataclass(frozen=True)
class _Weights:
    """Live tensors and a snapshot.

    Attributes:
        live: the result of :func:`~weight_update.encodings.patch.tiles.flattened`.
        addresses: where the bytes of an entry with tiles of its own begin, unless they must be converted.
        snapshot: 1-D uint8.
    """

    live: Sequence[torch.Tensor] = field(repr=False)
    addresses: dict[int, int]
    snapshot: Bytes = field(repr=False)

    @classmethod
    def of(cls, live: Sequence[torch.Tensor], tiles: Sequence[Tile], snapshot: torch.Tensor) -> _Weights:
        dtypes = {tile.slices[0].entry: tile.slices[0].meta.dtype for tile in tiles if tile.flat}
        addresses = {
            entry: live[entry].view(torch.uint8).numpy().ctypes.data
            for entry, dtype in dtypes.items()
            if _readable(live[entry], dtype)
        }
        return cls(live, addresses, snapshot.numpy())


class _TileReader:
    """A reader of the current bytes of a tile."""

    def __init__(self, tile: Tile, scratch: torch.Tensor) -> None:
        self.tile, self._scratch = tile, scratch[: tile.nbytes]
        self._views = [] if tile.flat else tile.views(scratch)

    def read(self, weights: _Weights) -> tuple[Bytes, Bytes]:
        """Return new and old bytes; the new ones may lie in scratch memory."""
        tile, parts = self.tile, self.tile.of(weights.live)
        old = weights.snapshot[tile.start : tile.start + tile.nbytes]
        if not tile.flat:
            new = self._scratch.numpy()
            new[:] = old  # so that nothing differs between the tensors
            torch._foreach_copy_(self._views, parts)
            return new, old
        (part,), dtype = parts, tile.slices[0].meta.dtype
        if not _readable(part, dtype):
            into = self._scratch.view(dtype)
            torch._foreach_copy_(torch.split(into, SERIAL), torch.split(part, SERIAL))
            part = self._scratch
        return part.view(torch.uint8).numpy(), old

    def ranges(self, new: Bytes) -> list[ByteRange]:
        """Return copies of all bytes of the tile, which are ``new``."""
        tile = self.tile
        return [ByteRange(tile.start + a, torch.from_numpy(new[a:b].copy())) for a, b in tile.filled]


def _groups_of(share: Sequence[Sequence[Tile]], dense_above: float, relative: bool) -> list[_Group]:
    """Return the groups of one thread, which share scratch memory."""
    tiles = [tile for group in share for tile in group]
    scratch = torch.empty(max(tile.nbytes for tile in tiles), dtype=torch.uint8)
    span = max(group[-1].start + group[-1].nbytes - group[0].start for group in share)
    widths = {width for tile in tiles for width in tile.widths}
    buffers = {width: kernels.GapBuffer(width, span // width) for width in widths}
    return [_Group(group, scratch, buffers, dense_above, relative) for group in share]


class _Group:
    """Consecutive tiles, which one thread compares."""

    def __init__(
        self,
        tiles: Sequence[Tile],
        scratch: torch.Tensor,
        buffers: Mapping[int, kernels.GapBuffer],
        dense_above: float,
        relative: bool,
    ) -> None:
        self._relative, self._total = relative, sum(tile.elements for tile in tiles)
        self._readers = [_TileReader(tile, scratch) for tile in tiles]
        self._buffers, self._start = buffers, tiles[0].start
        self._most = [int(dense_above * tile.elements) for tile in tiles]
        self._widths = sorted({width for tile in tiles for width in tile.widths})

    def scan(self, weights: _Weights) -> Scan:
        for width in self._widths:
            self._buffers[width].start(self._start // width)
        changed, ranges = 0, list[ByteRange]()

        def in_place(item: tuple[_TileReader, int]) -> int:
            """Return the width if the tile can be compared where it lies, else 0."""
            tile = item[0].tile
            return tile.widths[0] if tile.flat and tile.slices[0].entry in weights.addresses else 0

        for width, items in groupby(zip(self._readers, self._most, strict=True), in_place):
            run = list(items)
            if width:
                table = np.array([_in_place(one.tile, most, weights) for one, most in run], kernels.TILE)
                self._buffers[width].scan(table, self._relative)
                changed += int(table["found"].sum())
                for k in np.flatnonzero(table["found"] > table["most"]).tolist():
                    ranges += run[k][0].ranges(run[k][0].read(weights)[0])
                continue
            for reader, most in run:
                new, old = reader.read(weights)
                found = self._scan_slices(reader.tile, most, new, old)
                changed += found
                ranges += reader.ranges(new) if found > most else []
        return Scan(changed, self._total, Changes(tuple(self._sparse()), tuple(ranges)))

    def _scan_slices(self, tile: Tile, most: int, new: Bytes, old: Bytes) -> int:
        """Append the changes of a tile if they are at most ``most``; return their number."""
        before, found = [self._buffers[width].save() for width in tile.widths], 0
        for width in tile.widths:
            runs = [(0, tile.nbytes)]  # nothing differs between slices
            if len(tile.widths) > 1:
                grouped = ((of, list(run)) for of, run in groupby(tile.slices, attrgetter("width")))
                ends = [(run[0].start, run[-1].start + run[-1].nbytes) for of, run in grouped if of == width]
                runs = [(start - tile.start, end - start) for start, end in ends]
            rows = [
                _row(new.ctypes.data + at, old.ctypes.data + at, width, tile.start + at, size, size)
                for at, size in runs
            ]
            table = np.array(rows, kernels.TILE)
            self._buffers[width].scan(table, self._relative)
            found += int(table["found"].sum())
        if found > most:
            for width, saved in zip(tile.widths, before, strict=True):
                self._buffers[width].restore(saved)
        return found

    def _sparse(self) -> Iterator[Sparse]:
        for width in self._widths:
            buffer = self._buffers[width]
            if buffer.found:
                units, values = buffer.take()
                gaps = Gaps(self._start // width, buffer.last, units, buffer.found)
                yield Sparse(width, (Segment(gaps, torch.from_numpy(values)),), self._relative)


def _in_place(tile: Tile, most: int, weights: _Weights) -> tuple[int, ...]:
    (one,) = tile.slices
    new = weights.addresses[one.entry] + one.first * one.meta.dtype.itemsize
    return _row(new, weights.snapshot.ctypes.data + tile.start, one.width, tile.start, tile.nbytes, most)


def _row(new: int, old: int, width: int, start: int, nbytes: int, most: int) -> tuple[int, ...]:
    return new, old, nbytes // width, start // width, most, 0


def _merged(scans: Sequence[Scan]) -> Scan:
    parts, sparse = [part for one in scans for part in one.changes.sparse], list[Sparse]()
    for width in sorted({part.width for part in parts}):
        segments = tuple(part.segments[0] for part in parts if part.width == width)
        sparse.append(Sparse(width, segments, parts[0].relative))
    ranges = tuple(found for one in scans for found in one.changes.ranges)
    changed, total = sum(one.changed for one in scans), sum(one.total for one in scans)
    return Scan(changed, total, Changes(tuple(sparse), ranges))


def _readable(part: torch.Tensor, dtype: torch.dtype) -> bool:
    """Whether the memory of ``part`` holds its elements as the snapshot does, aligned to words."""
    lazy = part.is_conj() or part.is_neg()
    return part.dtype is dtype and part.is_cpu and part.data_ptr() % 8 == 0 and not lazy
