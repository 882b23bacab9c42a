"""The differences between two versions of one flat buffer."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass, field, replace

import numpy as np
import torch

from weight_update.encodings.patch import kernels
from weight_update.encodings.patch.arrays import Array
from weight_update.encodings.patch.gaps import Gaps
from weight_update.encodings.patch.gaps_cuda import DeviceGaps
from weight_update.errors import FormatError
from weight_update.threads import in_threads, threads_for
from weight_update.wire.schema import TensorMeta, WeightSchema

BITS: dict[int, torch.dtype] = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
"""Integer dtype for the bits of an element, by width in bytes; 16-byte elements count as two of 8."""

Move = Callable[[torch.Tensor], torch.Tensor]

_SHARE = 1 << 17  # elements that one thread writes at a time


@dataclass(frozen=True, eq=False)
class ByteRange:
    """New bytes (1-D uint8) for a contiguous range that begins at byte ``start`` of the flat buffer."""

    start: int
    data: torch.Tensor = field(repr=False)


@dataclass(frozen=True, eq=False)
class Segment:
    """A segment of the elements that change, with ``values`` as in :class:`Sparse`.

    ``offsets`` (1-D int32 or int64, not empty, strictly increasing) count from the element ``first``.
    """

    first: int
    offsets: torch.Tensor = field(repr=False)
    values: torch.Tensor = field(repr=False)

    @property
    def gaps(self) -> Gaps:
        """The positions as gaps; CPU only."""
        return Gaps.of(self.first, self.offsets.numpy())

    def kept(self) -> Segment:
        """Return a copy of what may be views into a payload: offsets are decoded, so they are no views."""
        return replace(self, values=self.values.clone())

    def moved(self, move: Move) -> Segment:
        """Return the segment with every tensor replaced by ``move(tensor)``."""
        return Segment(self.first, move(self.offsets), move(self.values))


@dataclass(frozen=True, eq=False)
class GapSegment:
    """A segment whose positions are gaps, as scans find them and patches carry them; CPU only."""

    gaps: Gaps
    values: torch.Tensor = field(repr=False)

    @property
    def first(self) -> int:
        """The element that :attr:`offsets` count from."""
        return self.gaps.first

    @functools.cached_property
    def offsets(self) -> torch.Tensor:
        """The offsets of a :class:`Segment`."""
        return torch.from_numpy(self.gaps.offsets)

    def kept(self) -> GapSegment:
        """Return a copy of what may be views into a payload."""
        return GapSegment(replace(self.gaps, units=self.gaps.units.copy()), self.values.clone())

    def moved(self, move: Move) -> Segment:
        """Return the segment with every tensor replaced by ``move(tensor)``."""
        return Segment(self.first, move(self.offsets), move(self.values))


@dataclass(frozen=True, eq=False)
class DeviceSegment:
    """A segment on a GPU, whose positions are gaps."""

    gaps: DeviceGaps
    values: torch.Tensor = field(repr=False)

    @property
    def first(self) -> int:
        """The element that :attr:`offsets` count from."""
        return self.gaps.first

    @property
    def offsets(self) -> torch.Tensor:
        """The offsets of a :class:`Segment`."""
        return self.gaps.offsets

    def kept(self) -> DeviceSegment:
        """Return the segment itself, which has no views into a payload."""
        return self

    def moved(self, move: Move) -> DeviceSegment | GapSegment:
        """Return the segment with every tensor replaced by ``move(tensor)``."""
        values = move(self.values)
        if values.is_cuda:
            return DeviceSegment(replace(self.gaps, units=move(self.gaps.units)), values)
        return GapSegment(self.gaps.moved(move), values)


@dataclass(frozen=True, eq=False)
class Sparse:
    """The changed elements of one width.

    Attributes:
        width: bytes of an element: 1, 2, 4 or 8.
        segments: one or more segments by ascending position, in elements of this width from the start of
            the buffer. Values are new bit patterns of dtype ``BITS[width]``.
        relative: whether values are added to the old bits, modulo 2**(8 * width), instead of replacing them.
    """

    width: int
    segments: tuple[Segment | GapSegment | DeviceSegment, ...]
    relative: bool = False

    @classmethod
    def of(cls, width: int, positions: torch.Tensor, values: torch.Tensor, relative: bool = False) -> Sparse:
        """Return the changes with one segment; ``positions`` are int32 or int64."""
        return cls(width, (Segment(0, positions, values),), relative)

    def __len__(self) -> int:
        return sum(len(one.values) for one in self.segments)

    @functools.cached_property
    def positions(self) -> torch.Tensor:
        """All positions, 1-D int64, strictly increasing."""
        return torch.cat([one.offsets.to(torch.int64) + one.first for one in self.segments])

    @functools.cached_property
    def values(self) -> torch.Tensor:
        """All values, of the shape of :attr:`positions`."""
        return torch.cat([one.values for one in self.segments])

    def shares(self) -> list[Segment | GapSegment]:
        """Return segments of which a thread processes one at a time; CPU only."""
        found: list[Segment | GapSegment] = []
        for one in self.segments:
            if isinstance(one, GapSegment):
                found.append(one)
            elif isinstance(one, DeviceSegment):
                found.append(GapSegment(one.gaps.moved(torch.Tensor.cpu), one.values.cpu()))
            else:
                parts = zip(torch.split(one.offsets, _SHARE), torch.split(one.values, _SHARE), strict=True)
                found += [Segment(one.first, *part) for part in parts]
        return found


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
        here = self.to(flat.device)
        for part in here.sparse:
            _write_sparse(flat.view(BITS[part.width]).numpy(), part)
        for one in here.ranges:
            flat.numpy()[one.start : one.start + one.data.numel()] = one.data.numpy()

    def _write_on_device(self, flat: torch.Tensor) -> None:
        for part in self.sparse:
            words = flat.view(BITS[part.width])
            for segment in part.segments:
                positions = segment.offsets.to(flat.device).to(torch.int64) + segment.first
                values = segment.values.to(flat.device)
                words[positions] = words[positions] + values if part.relative else values
        for one in self.ranges:
            flat[one.start : one.start + one.data.numel()].copy_(one.data)

    def map(self, move: Move) -> Changes:
        """Return these changes with every tensor replaced by ``move(tensor)``."""
        sparse = (
            replace(part, segments=tuple(one.moved(move) for one in part.segments)) for part in self.sparse
        )
        return Changes(tuple(sparse), tuple(replace(one, data=move(one.data)) for one in self.ranges))

    def to(self, device: torch.device) -> Changes:
        """Return these changes on ``device``; tensors that are there already are not copied."""
        tensors = [one.values for part in self.sparse for one in part.segments]
        if device.type == "cpu" and not any(one.is_cuda for one in tensors + [x.data for x in self.ranges]):
            return self
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
        return torch.from_numpy(np.unique(np.concatenate(found or [np.empty(0, np.int64)])))


def _search(positions: torch.Tensor, bounds: Array) -> Array:
    """Return the index of the first position that is at least as large as each of ``bounds`` (int64)."""
    if positions.is_cpu:
        return np.searchsorted(positions.numpy(), bounds)
    return torch.searchsorted(positions, torch.from_numpy(bounds).to(positions.device)).cpu().numpy()


def _write_sparse(words: Array, part: Sparse) -> None:  # not torch: its threads hang in forked processes
    def write(share: Segment | GapSegment) -> None:
        gaps = share.gaps
        place = words[gaps.first : gaps.last + 1]
        if not kernels.apply(place, gaps.units, share.values.numpy(), part.relative):
            raise FormatError("the memory of a patch was overwritten while the patch was applied")

    in_threads(write, part.shares(), threads_for(len(part)))
