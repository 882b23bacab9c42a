"""Pieces of the flat buffer that are looked at one after the other: which entries lie in each, and where."""

from __future__ import annotations

import functools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch

from weight_update.wire.schema import ALIGNMENT, TensorMeta, WeightSchema

__all__ = ["Part", "Piece", "cut", "flattened"]


@dataclass(frozen=True)
class Part:
    """Consecutive elements of one schema entry.

    Attributes:
        entry: position in the schema.
        meta: the entry.
        first: the first element.
        count: number of elements.
    """

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
        """Bytes that are compared as one element; those of 16 bytes are compared by halves."""
        return min(self.meta.dtype.itemsize, 8)


@dataclass(frozen=True)
class Piece:
    """A stretch of the flat buffer, from its first part to its last with whatever lies between.

    Attributes:
        parts: ascending; a single one if ``flat``.
        flat: whether it is a slice of one large tensor, which is then read in one dimension; otherwise the
            parts are small tensors, whole.
    """

    parts: tuple[Part, ...]
    flat: bool

    @property
    def start(self) -> int:
        """The first byte in the flat buffer, a multiple of 64."""
        return self.parts[0].start

    @functools.cached_property
    def nbytes(self) -> int:
        """Number of bytes; a multiple of 64 unless ``flat``."""
        last = self.parts[-1]
        return last.nbytes if self.flat else _aligned(last.start + last.nbytes) - self.start

    @functools.cached_property
    def elements(self) -> int:
        """Elements in all parts."""
        return sum(part.nbytes // part.width for part in self.parts)

    @functools.cached_property
    def widths(self) -> tuple[int, ...]:
        """Widths of elements that occur, ascending."""
        return tuple(sorted({part.width for part in self.parts}))

    @functools.cached_property
    def stretches(self) -> list[tuple[int, int]]:
        """Starts and stops, in bytes of the piece, between which nothing but parts and padding lies."""
        out: list[tuple[int, int]] = []
        for part in self.parts:
            start = part.start - self.start
            stop = start + part.nbytes
            if out and _aligned(out[-1][1]) == start:
                start = out.pop()[0]
            out.append((start, stop))
        return out

    def views(self, memory: torch.Tensor) -> list[torch.Tensor]:
        """The parts as they lie in ``memory``, 1-D uint8, which begins where the piece does."""
        out = []
        for part in self.parts:
            at = part.start - self.start
            view = memory[at : at + part.nbytes].view(part.meta.dtype)
            out.append(view if self.flat else view.view(part.meta.shape))
        return out

    def of(self, live: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """The parts in ``live``, which comes from :func:`flattened`."""
        if self.flat:
            return [live[part.entry][part.first : part.first + part.count] for part in self.parts]
        return [live[part.entry] for part in self.parts]


def cut(schema: WeightSchema, tracked: Sequence[int] | None, size: int, large: int) -> Iterator[Piece]:
    """Cut what is tracked into pieces, ascending.

    Args:
        schema: the layout.
        tracked: positions of entries; None for all. Of those that are tied the first one stands for all.
        size: most bytes of a piece, a multiple of 64.
        large: bytes from which on a tensor gets pieces of its own; at most ``size``.
    """
    batch: list[Part] = []
    for part in _owners(schema, tracked):
        apart = part.nbytes >= large
        if batch and (apart or _aligned(part.start + part.nbytes) - batch[0].start > size):
            yield Piece(tuple(batch), flat=False)
            batch = []
        if not apart:
            batch.append(part)
            continue
        step = size // part.meta.dtype.itemsize
        for first in range(0, part.count, step):
            count = min(step, part.count - first)
            yield Piece((Part(part.entry, part.meta, first, count),), flat=True)
    if batch:
        yield Piece(tuple(batch), flat=False)


def flattened(tensors: Sequence[torch.Tensor], pieces: Sequence[Piece]) -> list[torch.Tensor]:
    """``tensors``, the large ones in one dimension; those of them that are not contiguous are copied."""
    live = list(tensors)
    for entry in {piece.parts[0].entry for piece in pieces if piece.flat}:
        live[entry] = tensors[entry].detach().reshape(-1)
    return live


def _owners(schema: WeightSchema, tracked: Sequence[int] | None) -> list[Part]:
    """Whole entries, one for each place that has bytes, by ascending place."""
    places: dict[int, Part] = {}
    for entry in range(len(schema.tensors)) if tracked is None else sorted(tracked):
        meta = schema.tensors[entry]
        if meta.nbytes:
            places.setdefault(meta.offset, Part(entry, meta, 0, math.prod(meta.shape)))
    return [places[offset] for offset in sorted(places)]


def _aligned(nbytes: int) -> int:
    return -(-nbytes // ALIGNMENT) * ALIGNMENT
