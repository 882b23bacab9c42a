"""Finding what changed: live tensors against a snapshot, one pass over memory, on all cores.

The flat buffer is cut into pieces that stay in caches. A large tensor gives pieces of its own,
which are compared where they lie unless they must be converted; small neighbours share a piece and are
first gathered. Each piece is compared in words of 8 bytes, and only words that differ are looked at closer.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from weight_update.chunks import ALIGNMENT, TensorMeta, WeightSchema
from weight_update.encodings.changes import Changes, Run, Sparse

__all__ = ["Scan", "Scanner"]

Bytes = NDArray[np.uint8]
Found = tuple[int, NDArray[np.int64], NDArray[Any]]  # width, positions, values

PIECE = 1 << 20
"""Bytes of a piece: short enough for caches, long enough that threads rarely meet at the interpreter lock."""

SMALL = 64 << 10
"""Tensors below so many bytes share a piece with their neighbours."""

SERIAL = 32736
"""Elements that torch copies on one thread, and a whole number of vectors: rests convert NaNs otherwise."""

FEW = 0.1
"""Up to this fraction numpy's ``nonzero`` branches at each one found, and mispredicts most."""

_INTEGER: dict[int, np.dtype[Any]] = {
    1: np.dtype(np.uint8),
    2: np.dtype(np.int16),
    4: np.dtype(np.int32),
    8: np.dtype(np.int64),
}


@dataclass(frozen=True, eq=False)
class Scan:
    """What a scan found.

    Attributes:
        changes: all that differs; its tensors share no memory with what was scanned.
        changed: number of elements that differ; the halves of a complex128 count as two.
        total: number of elements looked at.
    """

    changes: Changes
    changed: int
    total: int


class Scanner:
    """Finds what differs between live tensors and a snapshot of them, bit by bit.

    One scan at a time: scans share scratch memory.

    Args:
        schema: layout and dtypes of the snapshot. Live tensors may have other dtypes of the same kind and
            are converted as ``Tensor.copy_`` converts.
        tracked: positions of the schema entries that are compared; None for all. Of tied entries only the
            first one that is tracked is looked at.
        dense_above: fraction of changed elements of a piece above which all of the piece is replaced.
        threads: worker threads; None for as many as torch uses.

    Raises:
        ValueError: ``threads`` is below 1.
    """

    def __init__(
        self,
        schema: WeightSchema,
        tracked: Sequence[int] | None = None,
        dense_above: float = 0.25,
        threads: int | None = None,
    ) -> None:
        if threads is None:
            threads = torch.get_num_threads()
        if threads < 1:
            raise ValueError(f"threads is {threads}, must be at least 1")
        self._schema, self._dense_above = schema, dense_above
        pieces = list(_cut(_owners(schema, tracked)))
        self._lanes = [pieces[lane::threads] for lane in range(min(threads, len(pieces)))]
        for lane in self._lanes:
            scratch = torch.empty(max(piece.nbytes for piece in lane), dtype=torch.uint8)
            for piece in lane:
                piece.take(scratch)
        self._large = {piece.entry for piece in pieces if isinstance(piece, _Slice)}
        self._total = sum(piece.elements for piece in pieces)

    def scan(self, tensors: Sequence[torch.Tensor], snapshot: torch.Tensor) -> Scan:
        """Compare; nothing is written to either side.

        Args:
            tensors: one for each schema entry, in order, of any strides; only read.
            snapshot: 1-D uint8 on the CPU, ``schema.nbytes`` long, 8-byte aligned.

        Raises:
            ValueError: ``snapshot`` or the number of ``tensors`` does not fit the schema.
        """
        if len(tensors) != len(self._schema.tensors) or snapshot.numel() != self._schema.nbytes:
            raise ValueError(
                f"{len(tensors)} tensors and a snapshot of {snapshot.numel()} bytes; the schema has "
                f"{len(self._schema.tensors)} and {self._schema.nbytes}"
            )
        live = list(tensors)
        for entry in self._large:
            live[entry] = tensors[entry].detach().reshape(-1)  # copies what is not contiguous, once
        done = self._each_lane(live, snapshot.numpy())
        count = sum(len(lane) for lane in done)
        in_order = [done[i % len(done)][i // len(done)] for i in range(count)]
        changed = sum(difference.changed for difference in in_order)
        return Scan(_merge(in_order), changed, self._total)

    def _each_lane(self, live: Sequence[torch.Tensor], old: Bytes) -> list[list[_Difference]]:
        @torch.no_grad()  # a setting of each thread
        def run(lane: list[_Piece]) -> list[_Difference]:
            return [piece.compare(live, old, self._dense_above) for piece in lane]

        if len(self._lanes) < 2:
            return [run(lane) for lane in self._lanes]
        with ThreadPoolExecutor(len(self._lanes)) as pool:  # not kept: threads do not survive a fork
            return list(pool.map(run, self._lanes))


@dataclass(frozen=True)
class _Difference:
    """What differs in the piece that starts at byte ``start``; positions count from there."""

    changed: int
    start: int
    found: Sequence[Found] = ()
    runs: Sequence[Run] = ()


class _Piece(ABC):
    """A stretch of the flat buffer: at byte ``start``, ``nbytes`` long, with ``elements`` to look at."""

    start: int
    nbytes: int
    elements: int

    @abstractmethod
    def take(self, scratch: torch.Tensor) -> None:
        """Prepare for using ``scratch``, 1-D uint8, which other pieces use in turn."""

    @abstractmethod
    def fetch(self, live: Sequence[torch.Tensor], old: Bytes) -> Bytes:
        """What lies in the piece now; ``old`` is what the snapshot has there."""

    @abstractmethod
    def find(self, new: Bytes, old: Bytes) -> list[Found]:
        """Elements that differ; positions count from the start of the piece."""

    @abstractmethod
    def stretches(self) -> list[tuple[int, int]]:
        """Start and stop, within the piece, of what may be replaced as a whole."""

    def compare(self, live: Sequence[torch.Tensor], snapshot: Bytes, dense_above: float) -> _Difference:
        old = snapshot[self.start : self.start + self.nbytes]
        new = self.fetch(live, old)
        found = self.find(new, old)
        changed = sum(len(positions) for _, positions, _ in found)
        if changed > dense_above * self.elements:
            runs = [Run(self.start + a, torch.from_numpy(new[a:b].copy())) for a, b in self.stretches()]
            return _Difference(changed, self.start, runs=runs)
        return _Difference(changed, self.start, found)


class _Slice(_Piece):
    """``count`` consecutive elements of one large tensor, from ``first`` on."""

    def __init__(self, entry: int, meta: TensorMeta, first: int, count: int) -> None:
        self.entry, self._dtype, self._first, self._count = entry, meta.dtype, first, count
        self._width = _width(meta)
        self.start = meta.offset + first * meta.dtype.itemsize
        self.nbytes = count * meta.dtype.itemsize
        self.elements = self.nbytes // self._width

    def take(self, scratch: torch.Tensor) -> None:
        self._scratch = scratch[: self.nbytes]

    def fetch(self, live: Sequence[torch.Tensor], old: Bytes) -> Bytes:
        part = live[self.entry][self._first : self._first + self._count]
        if not _readable(part, self._dtype):
            into = self._scratch.view(self._dtype)
            torch._foreach_copy_(torch.split(into, SERIAL), torch.split(part, SERIAL))
            part = self._scratch
        return part.view(torch.uint8).numpy()

    def find(self, new: Bytes, old: Bytes) -> list[Found]:
        return _of_width(self._width, new, old)

    def stretches(self) -> list[tuple[int, int]]:
        return [(0, self.nbytes)]


class _Batch(_Piece):
    """Small tensors, whole, with whatever lies between them."""

    def __init__(self, entries: list[int], metas: list[TensorMeta]) -> None:
        self._entries, self._metas = entries, metas
        self.start = metas[0].offset
        self.nbytes = _end(metas[-1]) - self.start
        self.elements = sum(meta.nbytes // _width(meta) for meta in metas)
        self._widths = np.array([_width(meta) for meta in metas])
        self._words = np.array([(meta.offset - self.start) // 8 for meta in metas])

    def take(self, scratch: torch.Tensor) -> None:
        self._scratch = scratch[: self.nbytes].numpy()
        places = [scratch[meta.offset - self.start :][: meta.nbytes] for meta in self._metas]
        self._views = [
            place.view(meta.dtype).view(meta.shape) for place, meta in zip(places, self._metas, strict=True)
        ]

    def fetch(self, live: Sequence[torch.Tensor], old: Bytes) -> Bytes:
        self._scratch[:] = old  # so that nothing differs between the tensors
        torch._foreach_copy_(self._views, [live[entry] for entry in self._entries])
        return self._scratch

    def find(self, new: Bytes, old: Bytes) -> list[Found]:
        widths = np.unique(self._widths).tolist()
        if len(widths) == 1:
            return _of_width(widths[0], new, old)
        words = np.flatnonzero(new.view(np.int64) != old.view(np.int64))
        kinds = self._widths[np.searchsorted(self._words, words, side="right") - 1]
        found = (_inside(width, words[kinds == width], new, old) for width in widths)
        return [(width, positions, values) for width, positions, values in found if len(positions)]

    def stretches(self) -> list[tuple[int, int]]:
        out: list[tuple[int, int]] = []
        for meta in self._metas:
            start, stop = meta.offset - self.start, meta.offset - self.start + meta.nbytes
            if out and _align(out[-1][1]) == start:
                start = out.pop()[0]
            out.append((start, stop))
        return out


def _owners(schema: WeightSchema, tracked: Sequence[int] | None) -> list[tuple[int, TensorMeta]]:
    """Entries to look at, one for each place that has bytes, by ascending place."""
    places: dict[int, tuple[int, TensorMeta]] = {}
    for entry in range(len(schema.tensors)) if tracked is None else sorted(tracked):
        meta = schema.tensors[entry]
        if meta.nbytes:
            places.setdefault(meta.offset, (entry, meta))
    return [places[offset] for offset in sorted(places)]


def _cut(owners: Sequence[tuple[int, TensorMeta]]) -> Iterator[_Piece]:
    batch: list[tuple[int, TensorMeta]] = []
    for entry, meta in owners:
        large = meta.nbytes >= SMALL
        if batch and (large or _end(meta) - batch[0][1].offset > PIECE):
            yield _Batch(*map(list, zip(*batch, strict=True)))
            batch = []
        if large:
            step, size = PIECE // meta.dtype.itemsize, math.prod(meta.shape)
            for first in range(0, size, step):
                yield _Slice(entry, meta, first, min(step, size - first))
        else:
            batch.append((entry, meta))
    if batch:
        yield _Batch(*map(list, zip(*batch, strict=True)))


def _of_width(width: int, new: Bytes, old: Bytes) -> list[Found]:
    """Elements that differ where all are of one width."""
    if len(new) % 8 == 0:
        differ = new.view(np.int64) != old.view(np.int64)
        count = int(np.count_nonzero(differ))
        if count == 0:
            return []
        if width == 8 or count < (1 - (1 - FEW) ** (8 // width)) * len(differ):  # as many as FEW elements
            return [_inside(width, _where(differ, count), new, old)]
    values = new.view(_INTEGER[width])
    positions = np.flatnonzero(values != old.view(_INTEGER[width]))
    return [(width, positions, values.take(positions))] if len(positions) else []


def _where(differ: NDArray[np.bool_], count: int) -> NDArray[np.int64]:
    """Positions of the ``count`` true ones, quicker than numpy's where they are few."""
    if len(differ) % 8 or count > FEW * len(differ):
        return np.flatnonzero(differ)
    eights = differ.view(np.int64)
    lines = np.flatnonzero(eights != 0)
    return _spread(lines, np.flatnonzero(eights.take(lines).view(np.bool_)), 3)


def _inside(width: int, words: NDArray[np.int64], new: Bytes, old: Bytes) -> Found:
    """Elements of one width that differ within ``words`` of 8 bytes that differ."""
    values = new.view(np.int64).take(words)
    if width == 8:
        return width, words, values
    parts = values.view(_INTEGER[width])
    at = np.flatnonzero(parts != old.view(np.int64).take(words).view(_INTEGER[width]))
    return width, _spread(words, at, (8 // width).bit_length() - 1), parts.take(at)


def _spread(groups: NDArray[np.int64], at: NDArray[np.int64], bits: int) -> NDArray[np.int64]:
    """Places of members ``at`` of ``groups``, which have ``1 << bits`` members each."""
    places = groups.take(at >> bits)
    places <<= bits
    places += at & ((1 << bits) - 1)
    return places


def _merge(differences: Sequence[_Difference]) -> Changes:
    """One stream for each width; positions count from the start of the flat buffer from now on."""
    by_width: dict[int, list[tuple[int, Found]]] = {}
    for difference in differences:
        for found in difference.found:
            by_width.setdefault(found[0], []).append((difference.start, found))
    sparse = []
    for width, parts in sorted(by_width.items()):
        values = np.concatenate([values for _, (_, _, values) in parts])
        positions = np.empty(values.shape, np.int64)
        end = 0
        for start, (_, inside, _) in parts:
            np.add(inside, start // width, out=positions[end : end + len(inside)])
            end += len(inside)
        sparse.append(Sparse(width, torch.from_numpy(positions), torch.from_numpy(values)))
    return Changes(tuple(sparse), tuple(run for difference in differences for run in difference.runs))


def _readable(part: torch.Tensor, dtype: torch.dtype) -> bool:
    """Whether the memory of ``part`` holds its elements as the snapshot would, aligned to words."""
    lazy = part.is_conj() or part.is_neg()
    return part.dtype is dtype and part.is_cpu and part.data_ptr() % 8 == 0 and not lazy


def _width(meta: TensorMeta) -> int:
    return min(meta.dtype.itemsize, 8)


def _align(nbytes: int) -> int:
    return -(-nbytes // ALIGNMENT) * ALIGNMENT


def _end(meta: TensorMeta) -> int:
    """The first byte that may belong to another tensor."""
    return _align(meta.offset + meta.nbytes)
