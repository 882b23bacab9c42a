"""Tiles of the flat buffer, which are compared one after the other, and the schema entries in each."""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from operator import attrgetter

import torch

from weight_update.wire.schema import TensorMeta, WeightSchema, aligned


@dataclass(frozen=True)
class EntrySlice:
    """Consecutive elements of ``meta``, the schema entry at position ``entry``, from ``first`` on."""

    entry: int
    meta: TensorMeta
    first: int
    count: int

    @property
    def start(self) -> int:
        """The first byte in the flat buffer."""
        return self.meta.offset + self.first * self.meta.dtype.itemsize

    @property
    def nbytes(self) -> int:
        """Number of bytes."""
        return self.count * self.meta.dtype.itemsize

    @property
    def width(self) -> int:
        """Bytes that are compared as one element; elements of 16 bytes are compared by halves."""
        return min(self.meta.dtype.itemsize, 8)


@dataclass(frozen=True)
class Tile:
    """A part of the flat buffer, from its first slice to its last with everything in between.

    If ``flat``, it is one slice of a large tensor, read in one dimension; otherwise the slices are small
    tensors, whole and ascending.
    """

    slices: tuple[EntrySlice, ...]
    flat: bool

    @property
    def start(self) -> int:
        """The first byte in the flat buffer, a multiple of 64."""
        return self.slices[0].start

    @functools.cached_property
    def nbytes(self) -> int:
        """Number of bytes; a multiple of 64 unless ``flat``."""
        last = self.slices[-1]
        return last.nbytes if self.flat else aligned(last.start + last.nbytes) - self.start

    @functools.cached_property
    def elements(self) -> int:
        """Elements in all slices."""
        return sum(one.nbytes // one.width for one in self.slices)

    @functools.cached_property
    def runs(self) -> dict[int, list[tuple[int, int]]]:
        """Starts and stops, in bytes of the tile, of ranges without slices of another width, by width."""
        out: dict[int, list[tuple[int, int]]] = {}
        for width, run in itertools.groupby(self.slices, attrgetter("width")):
            slices = list(run)
            stop = slices[-1].start + slices[-1].nbytes
            out.setdefault(width, []).append((slices[0].start - self.start, stop - self.start))
        return out

    @functools.cached_property
    def widths(self) -> tuple[int, ...]:
        """Widths of elements that occur, ascending."""
        return tuple(sorted(self.runs))

    @functools.cached_property
    def filled(self) -> list[tuple[int, int]]:
        """Starts and stops, in bytes of the tile, of ranges that hold only slices and padding."""
        out: list[tuple[int, int]] = []
        for one in self.slices:
            start = one.start - self.start
            stop = start + one.nbytes
            if out and aligned(out[-1][1]) == start:
                start = out.pop()[0]
            out.append((start, stop))
        return out

    def views(self, memory: torch.Tensor) -> list[torch.Tensor]:
        """Return views of the slices into ``memory``, 1-D uint8, which holds the tile."""
        out = []
        for one in self.slices:
            at = one.start - self.start
            view = memory[at : at + one.nbytes].view(one.meta.dtype)
            out.append(view if self.flat else view.view(one.meta.shape))
        return out

    def of(self, live: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Return the slices of ``live``, the result of :func:`flattened`."""
        if self.flat:
            return [live[one.entry][one.first : one.first + one.count] for one in self.slices]
        return [live[one.entry] for one in self.slices]


def cut(schema: WeightSchema, tracked: Sequence[int] | None, size: int, large: int) -> Iterator[Tile]:
    """Cut the tracked entries (None for all) into tiles of at most ``size`` bytes, in ascending order.

    The first of several tied entries stands for all. A tensor of at least ``large`` bytes gets tiles of its
    own.
    """
    batch: list[EntrySlice] = []
    for one in _owners(schema, tracked):
        apart = one.nbytes >= large
        if batch and (apart or aligned(one.start + one.nbytes) - batch[0].start > size):
            yield Tile(tuple(batch), flat=False)
            batch = []
        if not apart:
            batch.append(one)
            continue
        step = size // one.meta.dtype.itemsize
        for first in range(0, one.count, step):
            count = min(step, one.count - first)
            yield Tile((EntrySlice(one.entry, one.meta, first, count),), flat=True)
    if batch:
        yield Tile(tuple(batch), flat=False)


def flattened(tensors: Sequence[torch.Tensor], tiles: Sequence[Tile]) -> list[torch.Tensor]:
    """Return ``tensors`` with the large ones in one dimension; copy large ones that are not contiguous."""
    live = list(tensors)
    for entry in {tile.slices[0].entry for tile in tiles if tile.flat}:
        live[entry] = tensors[entry].detach().reshape(-1).contiguous()
    return live


def _owners(schema: WeightSchema, tracked: Sequence[int] | None) -> list[EntrySlice]:
    """Return one whole entry for each offset that has bytes, by ascending offset."""
    owners: dict[int, EntrySlice] = {}
    for entry in range(len(schema.tensors)) if tracked is None else sorted(tracked):
        meta = schema.tensors[entry]
        if meta.nbytes:
            owners.setdefault(meta.offset, EntrySlice(entry, meta, 0, math.prod(meta.shape)))
    return [owners[offset] for offset in sorted(owners)]
