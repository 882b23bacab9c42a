"""Find the elements that changed on the CUDA device of the live tensors; the snapshot may be on the CPU.

The steps for tile ``i`` of a snapshot on the CPU, and the queue of each::

    fetch    snapshot i+1 -> device, while i is compared
    compute  wait for fetch i; compare, nonzero, gather
    store    gaps and values -> pinned memory, while the next tile is compared
    later    the caller writes the changes into the snapshot, in a thread of its own; changes that stayed
             on the device are copied to pinned memory first, in queue store

Method: the "CPU Snapshot Optimization Path" in the documentation of RLinf's weight syncer.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Literal

import torch

from weight_update.encodings.dense import copy_together
from weight_update.encodings.patch.changes import BITS, ByteRange, Changes, GapSegment, Segment, Sparse
from weight_update.encodings.patch.diff_cpu import Scan, check_sizes
from weight_update.encodings.patch.gaps import Gaps
from weight_update.encodings.patch.gaps_cuda import units_needed, units_of
from weight_update.encodings.patch.tiles import Tile, cut, flattened
from weight_update.wire.schema import WeightSchema

TILE = 32 << 20
"""Bytes of a tile. Each tile costs one wait for the device, whose memory holds three tiles."""

ElementDiff = tuple[int, torch.Tensor, torch.Tensor]
"""Width, positions and values of elements that differ."""


class Queues:
    """Queues of copies that run beside the computation in the caller's current stream of a CUDA device."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._fetch = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self._store = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]

    def fetch(self, target: torch.Tensor, source: torch.Tensor) -> torch.cuda.Event:
        """Copy pinned memory to the device after the computation that is queued so far."""
        self._fetch.wait_stream(torch.cuda.current_stream(self.device))
        with torch.cuda.stream(self._fetch):
            target.copy_(source, non_blocking=True)
            event: torch.cuda.Event = self._fetch.record_event()
        return event

    def fetched(self, event: torch.cuda.Event) -> None:
        """Let computation that is queued from now on wait for a copy to the device."""
        torch.cuda.current_stream(self.device).wait_event(event)

    def store(self, source: torch.Tensor) -> torch.Tensor:
        """Return pinned memory that holds ``source``, as computed so far, after :meth:`finish`."""
        target = torch.empty(source.shape, dtype=source.dtype, pin_memory=True)
        self._store.wait_stream(torch.cuda.current_stream(self.device))
        with torch.cuda.stream(self._store):
            target.copy_(source, non_blocking=True)
        source.record_stream(self._store)
        return target

    def bring(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return pinned memory that holds ``tensor``, without waiting for computation that is queued now."""
        if not tensor.is_cuda:
            return tensor
        target = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
        with torch.cuda.stream(self._store):
            target.copy_(tensor)
        return target

    def finish(self) -> None:
        """Wait until the computation queued so far and all copies from the device are done."""
        torch.cuda.current_stream(self.device).record_event().synchronize()
        self._store.record_event().synchronize()


class CudaScanner:
    """A :class:`~weight_update.encodings.patch.diff_cpu.Scanner` for tensors on the device of ``queues``.

    They are read on the caller's current stream. A snapshot on the CPU is best pinned. Results come
    to lie on ``transport_device``; ``"cpu"`` is pinned memory.
    """

    def __init__(
        self,
        schema: WeightSchema,
        queues: Queues,
        tracked: Sequence[int] | None = None,
        dense_above: float = 0.5,
        relative: bool = False,
        snapshot_device: Literal["cpu", "cuda"] = "cpu",
        transport_device: Literal["cpu", "cuda"] = "cpu",
    ) -> None:
        self._schema, self._queues, self._dense_above = schema, queues, dense_above
        self._relative = relative
        self._fetches, self._stores = snapshot_device == "cpu", transport_device == "cpu"
        self._tiles = list(cut(schema, tracked, TILE, TILE))
        size = max((tile.nbytes for tile in self._tiles), default=0)
        count = 3 if self._fetches else 1
        new, *olds = (torch.empty(size, dtype=torch.uint8, device=queues.device) for _ in range(count))
        self._new, self._olds = new, olds
        self._views = [tile.views(new) for tile in self._tiles]

    @torch.no_grad()
    def scan(self, tensors: Sequence[torch.Tensor], snapshot: torch.Tensor) -> Scan:
        """Compare as :meth:`Scanner.scan <weight_update.encodings.patch.diff_cpu.Scanner.scan>` does."""
        check_sizes(self._schema, tensors, snapshot)
        live = flattened(tensors, self._tiles)
        found: dict[int, list[Segment | GapSegment]] = {}
        ranges: list[ByteRange] = []
        changed = 0
        for index, old in enumerate(self._arriving(snapshot)):
            tile, new = self._tiles[index], self._new[: len(old)]
            new.copy_(old)  # so that nothing differs between the tensors
            copy_together(self._views[index], tile.of(live))
            here = _find(tile, new, old)
            count = sum(len(positions) for _, positions, _ in here)
            changed += count
            if count > self._dense_above * tile.elements:
                ranges += [ByteRange(tile.start + a, self._store(new[a:b].clone())) for a, b in tile.filled]
                continue
            for width, at, values in here:
                if self._relative:
                    values = values - old.view(BITS[width])[at]
                found.setdefault(width, []).append(self._segment(tile.start // width, at, values))
        self._queues.finish()
        sparse = (Sparse(width, tuple(found[width]), self._relative) for width in sorted(found))
        changes = Changes(tuple(sparse), tuple(ranges))
        return Scan(changed, sum(tile.elements for tile in self._tiles), changes)

    def _arriving(self, snapshot: torch.Tensor) -> Iterator[torch.Tensor]:
        """Yield each tile of the snapshot on the device while the next one is copied."""
        tiles = [snapshot[tile.start : tile.start + tile.nbytes] for tile in self._tiles]
        if not self._fetches:
            yield from tiles
            return
        targets = [self._olds[i % 2][: len(tile)] for i, tile in enumerate(tiles)]
        coming = [self._queues.fetch(*pair) for pair in zip(targets[:1], tiles[:1], strict=True)]
        for i, target in enumerate(targets):
            if i + 1 < len(targets):  # before the comparison of i: it may overtake it
                coming.append(self._queues.fetch(targets[i + 1], tiles[i + 1]))
            self._queues.fetched(coming[i])
            yield target

    def _segment(self, first: int, offsets: torch.Tensor, values: torch.Tensor) -> Segment | GapSegment:
        """Return changes of one tile; gaps are for the CPU, which they reach in an eighth of the bytes."""
        if not self._stores:
            return Segment(first, offsets, values)
        gaps = offsets.diff(prepend=offsets.new_full((1,), -1)) - 1
        needed, last = torch.stack([units_needed(gaps, 1), offsets[-1]]).tolist()
        units = self._store(units_of(gaps, 1, needed).view(torch.uint8)).numpy()
        return GapSegment(Gaps(first, first + last, units, len(offsets)), self._store(values))

    def _store(self, tensor: torch.Tensor) -> torch.Tensor:
        return self._queues.store(tensor) if self._stores else tensor


def _find(tile: Tile, new: torch.Tensor, old: torch.Tensor) -> list[ElementDiff]:
    """Return the elements that differ; positions count from the start of the tile."""
    if len(tile.widths) == 1:
        found = [_differing(tile.widths[0], new, old)]
    else:
        found = _mixed(tile, new.view(torch.int64), old.view(torch.int64))
    return [(width, positions, values) for width, positions, values in found if len(positions)]


def _differing(width: int, new: torch.Tensor, old: torch.Tensor) -> ElementDiff:
    values = new.view(BITS[width])
    positions = (values != old.view(BITS[width])).nonzero().view(-1)
    return width, positions, values[positions]


def _mixed(tile: Tile, new: torch.Tensor, old: torch.Tensor) -> list[ElementDiff]:
    """Do the work of :func:`_find` for words of 8 bytes in a tile of several widths."""
    words = (new != old).nonzero().view(-1)
    starts = words.new_tensor([(one.start - tile.start) // 8 for one in tile.slices])
    widths = words.new_tensor([one.width for one in tile.slices])
    width_of = widths[torch.searchsorted(starts, words, right=True) - 1]
    out = []
    for width in tile.widths:
        mine, each = words[width_of == width], 8 // width
        _, at, values = _differing(width, new[mine], old[mine])
        places = mine[torch.div(at, each, rounding_mode="floor")] * each + at % each
        out.append((width, places, values))
    return out
