"""The differences between two versions of one flat buffer."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import TypeVar

import numpy as np
import torch

from weight_update.encodings.patch import kernels
from weight_update.encodings.patch.arrays import Array, union
from weight_update.encodings.patch.gaps import Gaps
from weight_update.encodings.patch.gaps_cuda import DeviceGaps
from weight_update.errors import FormatError
from weight_update.threads import in_threads, threads_for
from weight_update.wire.schema import BITS, TensorMeta, WeightSchema

Move = Callable[[torch.Tensor], torch.Tensor]
_C = TypeVar("_C", bound="Changes")

_SHARE = 1 << 17  # positions that one thread codes at a time, and values that it writes


@dataclass(frozen=True, eq=False)
class ByteRange:
    """New bytes (1-D uint8) for a contiguous range that begins at byte ``start`` of the flat buffer."""

    start: int
    data: torch.Tensor = field(repr=False)


@dataclass(frozen=True, eq=False)
class Segment:
    """A segment of the elements that change: positions as gaps, and ``values`` as in :class:`Sparse`."""

    gaps: Gaps | DeviceGaps
    values: torch.Tensor = field(repr=False)

    @property
    def positions(self) -> torch.Tensor:
        """The positions, 1-D int64."""
        found = self.gaps.positions
        return torch.from_numpy(found) if isinstance(found, np.ndarray) else found

    @property
    def cpu_gaps(self) -> Gaps:
        """The positions as gaps on the CPU."""
        return self.gaps if isinstance(self.gaps, Gaps) else self.gaps.cpu()

    def map(self, move: Move) -> Segment:
        """Return the segment with every tensor replaced by ``move(tensor)``."""
        gaps = self.gaps if isinstance(self.gaps, DeviceGaps) else DeviceGaps.view(self.gaps)
        gaps = replace(gaps, units=move(gaps.units))
        return Segment(gaps if gaps.units.is_cuda else gaps.cpu(), move(self.values))


@dataclass(frozen=True, eq=False)
class Sparse:
    """The changed elements of one width.

    Attributes:
        width: bytes of an element: 1, 2, 4 or 8. Elements of 16 bytes count as two of 8.
        segments: one or more segments by ascending position, in elements of this width from the start of
            the buffer. Values are new bit patterns of dtype ``BITS[width]``.
        relative: whether values are added to the old bits, modulo 2**(8 * width), instead of replacing them.
    """

    width: int
    segments: tuple[Segment, ...]
    relative: bool = False

    @classmethod
    def of(cls, width: int, positions: torch.Tensor, values: torch.Tensor, relative: bool = False) -> Sparse:
        """Return the changes at ``positions`` (1-D int32 or int64, CPU, not empty, strictly increasing)."""

        def segment(start: int) -> Segment:
            part = slice(start, start + _SHARE)
            return Segment(Gaps.of(positions[part].numpy()), values[part])

        starts = range(0, len(positions), _SHARE)
        return cls(width, tuple(in_threads(segment, starts, threads_for(len(positions)))), relative)

    def __len__(self) -> int:
        return sum(len(one.values) for one in self.segments)

    @functools.cached_property
    def positions(self) -> torch.Tensor:
        """All positions, 1-D int64, strictly increasing."""
        return _joined([one.positions for one in self.segments])

    @functools.cached_property
    def values(self) -> torch.Tensor:
        """All values, of the shape of :attr:`positions`."""
        return _joined([one.values for one in self.segments])

    def map(self, move: Move) -> Sparse:
        """Return these changes with every tensor replaced by ``move(tensor)``."""
        return Sparse(self.width, tuple(one.map(move) for one in self.segments), self.relative)


@dataclass(frozen=True, eq=False)
class Changes:
    """All differences between two versions; written over the old version, they make the new one bit for bit.

    Attributes:
        sparse: changed elements, at most one entry for each width, by ascending width; none is empty.
        ranges: replaced bytes by ascending start; they overlap neither each other nor ``sparse``.
    """

    sparse: tuple[Sparse, ...] = ()
    ranges: tuple[ByteRange, ...] = ()

    def write(self, flat: torch.Tensor) -> None:
        """Change ``flat`` (1-D uint8, 8-byte aligned) from old to new; positions are trusted."""
        if not flat.is_cpu:
            self._write_on_device(flat)
            return
        for part in self.sparse:
            _write_sparse(flat.view(BITS[part.width]).numpy(), part)
        for one in self.ranges:
            flat.numpy()[one.start : one.start + one.data.numel()] = one.data.cpu().numpy()

    def _write_on_device(self, flat: torch.Tensor) -> None:
        for part in self.sparse:
            words = flat.view(BITS[part.width])
            for segment in part.segments:
                positions, values = segment.positions.to(flat.device), segment.values.to(flat.device)
                words[positions] = words[positions] + values if part.relative else values
        for one in self.ranges:
            flat[one.start : one.start + one.data.numel()].copy_(one.data)

    def map(self: _C, move: Move) -> _C:
        """Return these changes with every tensor replaced by ``move(tensor)``."""
        ranges = tuple(replace(one, data=move(one.data)) for one in self.ranges)
        return replace(self, sparse=tuple(part.map(move) for part in self.sparse), ranges=ranges)

    def to(self: _C, device: torch.device) -> _C:
        """Return these changes on ``device``; tensors that are there already are not copied."""
        return self.map(lambda tensor: tensor.to(device))

    def touched(self, schema: WeightSchema) -> list[int]:
        """Return the positions of the entries of ``schema`` that change, in ascending order."""
        metas = schema.tensors
        order = sorted((i for i in range(len(metas)) if metas[i].nbytes), key=lambda i: metas[i].offset)
        starts = np.array([metas[i].offset for i in order])
        ends = np.array([metas[i].offset + metas[i].nbytes for i in order])
        hit = np.zeros(len(order), dtype=bool)
        for part in self.sparse:
            bounds = -(-np.stack([starts, ends]) // part.width)  # the first element there or later
            first, last = _search(part.positions, bounds)
            hit |= first < last
        for one in self.ranges:
            hit |= (starts < one.start + one.data.numel()) & (one.start < ends)
        return sorted(order[int(i)] for i in np.flatnonzero(hit))

    def elements_of(self, meta: TensorMeta) -> torch.Tensor | None:
        """Return flat indices of the elements of ``meta`` that change, int64, ascending; CPU only.

        An element changes if any of its bytes does. The result may be None if all of them may change.
        """
        start, end, size = meta.offset, meta.offset + meta.nbytes, meta.dtype.itemsize
        found: list[Array] = []
        for part in self.sparse:
            positions = part.positions.numpy()
            first, last = np.searchsorted(positions, (-(-start // part.width), -(-end // part.width)))
            if first < last and part.width > size:
                return None
            here = positions[first:last]
            found.append(here - start // size if part.width == size else (here * part.width - start) // size)
        for one in self.ranges:
            low, high = max(one.start, start), min(one.start + one.data.numel(), end)
            if (low, high) == (start, end):
                return None
            if low < high:
                found.append(np.arange((low - start) // size, -(-(high - start) // size)))
        if len(found) == 1 and self.sparse and self.sparse[0].width == size:
            return torch.from_numpy(found[0])
        return torch.from_numpy(union(found or [np.empty(0, np.int64)]))


def _joined(parts: Sequence[torch.Tensor]) -> torch.Tensor:
    """Return 1-D parts as one tensor."""
    if parts[0].is_cuda:
        return torch.cat(list(parts))
    return torch.from_numpy(np.concatenate(parts))  # not torch: its threads hang in forked processes


def _search(positions: torch.Tensor, bounds: Array) -> Array:
    """Return the index of the first position that is at least as large as each of ``bounds`` (int64)."""
    if positions.is_cpu:
        return np.searchsorted(positions.numpy(), bounds)
    return torch.searchsorted(positions, torch.from_numpy(bounds).to(positions.device)).cpu().numpy()


def _write_sparse(words: Array, part: Sparse) -> None:  # not torch: its threads hang in forked processes
    def write(segment: Segment) -> None:
        gaps, values = segment.cpu_gaps, segment.values.cpu().numpy()
        if not kernels.apply(words[gaps.first : gaps.last + 1], gaps.units, values, part.relative):
            raise FormatError("the memory of a patch was overwritten while the patch was applied")

    in_threads(write, part.segments, threads_for(len(part)))
