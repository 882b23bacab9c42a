"""Find the elements that changed on the CUDA device of the live tensors; the snapshot may be on the CPU.

The steps for tile ``i`` of a snapshot on the CPU, and the queue of each::

    fetch    snapshot i+1 -> device, while i is compared
    compute  wait for fetch i; compare, nonzero, gather; code positions as gaps
    store    a tile that changed in most elements -> pinned memory
    later    the caller writes the changes into the snapshot, in a thread of its own; for a snapshot on the
             CPU they are copied to pinned memory first, in queue store

Method: the "CPU Snapshot Optimization Path" in the documentation of RLinf's weight syncer.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Literal

import torch

from weight_update.encodings.dense import copy_together
from weight_update.encodings.patch.changes import ByteRange, Changes, Segment, Sparse
from weight_update.encodings.patch.diff_cpu import DENSE_ABOVE, Scan
from weight_update.encodings.patch.gaps_cuda import PART, DeviceGaps
from weight_update.encodings.patch.tiles import Tile, cut, flattened
from weight_update.wire.memory import await_stream
from weight_update.wire.schema import BITS, WeightSchema

TILE = 32 << 20
"""Bytes of a tile. Each tile costs one wait for the device, whose memory holds three tiles."""

_ElementDiff = tuple[int, torch.Tensor, torch.Tensor]
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
        target = torch.empty(source.shape, dtype=source.dtype, pin_memory=True, device="cpu")
        self._store.wait_stream(torch.cuda.current_stream(self.device))
        with torch.cuda.stream(self._store):
            target.copy_(source, non_blocking=True)
        source.record_stream(self._store)
        return target

    def bring(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return pinned memory that holds ``tensor``, without waiting for computation that is queued now."""
        if not tensor.is_cuda:
            return tensor
        target = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True, device="cpu")
        with torch.cuda.stream(self._store):
            target.copy_(tensor)
        return target

    def finish(self) -> None:
        """Wait until the computation queued so far and all copies from the device are done."""
        torch.cuda.current_stream(self.device).record_event().synchronize()
        self._store.record_event().synchronize()


class CudaScanner:
    """A :class:`~weight_update.encodings.patch.diff_cpu.Scanner` for tensors on the device of ``queues``.

    They are read on the caller's current stream. A snapshot on the CPU is best pinned. Changed elements stay
    on the device; changed ranges come to lie in pinned memory.
    """

    def __init__(
        self,
        schema: WeightSchema,
        queues: Queues,
        tracked: Sequence[int] | None = None,
        relative: bool = False,
        snapshot_device: Literal["cpu", "cuda"] = "cpu",
    ) -> None:
        self._queues, self._relative = queues, relative
        self._fetches = snapshot_device == "cpu"
        self._tiles = list(cut(schema, tracked, TILE, TILE))
        size = max((tile.nbytes for tile in self._tiles), default=0)
        count = 3 if self._fetches else 1
        new, *olds = (torch.empty(size, dtype=torch.uint8, device=queues.device) for _ in range(count))
        self._new, self._olds = new, olds
        self._views = [tile.views(new) for tile in self._tiles]
        await_stream(new)  # work on other tensors that had this memory before: scans may use another stream

    @torch.no_grad()
    def scan(self, tensors: Sequence[torch.Tensor], snapshot: torch.Tensor) -> Scan:
        """Compare as :meth:`Scanner.scan <weight_update.encodings.patch.diff_cpu.Scanner.scan>` does."""
        live = flattened(tensors, self._tiles)
        found = _Found()
        ranges: list[ByteRange] = []
        changed = 0
        for index, old in enumerate(self._arriving(snapshot)):
            tile, new = self._tiles[index], self._new[: len(old)]
            new.copy_(old)  # so that nothing differs between the tensors
            copy_together(self._views[index], tile.of(live))
            here = _find(tile, new, old)
            count = sum(len(positions) for _, positions, _ in here)
            changed += count
            if count > DENSE_ABOVE * tile.elements:
                ranges += [
                    ByteRange(tile.start + a, self._queues.store(new[a:b].clone())) for a, b in tile.filled
                ]
                continue
            for width, at, values in here:
                if self._relative:
                    values = values - old.view(BITS[width])[at]
                found.add(width, at + tile.start // width, values)
        changes = Changes(found.sparse(self._relative), tuple(ranges))
        self._queues.finish()
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


class _Found:
    """The changes that a scan has found so far, by width.

    Positions are coded as gaps, an eighth of their bytes: many at a time, because each step costs a call, but
    not all, because it takes memory.
    """

    def __init__(self) -> None:
        self._waiting: dict[int, list[tuple[torch.Tensor, torch.Tensor]]] = {}  # positions and values
        self._coded: dict[int, list[Segment]] = {}

    def add(self, width: int, positions: torch.Tensor, values: torch.Tensor) -> None:
        """Add changes that follow those added before; positions are int64."""
        waiting = self._waiting.setdefault(width, [])
        waiting.append((positions, values))
        if sum(len(one) for one, _ in waiting) >= PART:
            self._code(width)

    def sparse(self, relative: bool) -> tuple[Sparse, ...]:
        """Return all changes."""
        for width in list(self._waiting):
            self._code(width)
        return tuple(Sparse(width, tuple(self._coded[width]), relative) for width in sorted(self._coded))

    def _code(self, width: int) -> None:
        waiting, coded = self._waiting.pop(width), self._coded.setdefault(width, [])
        first = coded[-1].gaps.last + 1 if coded else 0  # so that the units of all segments can be joined
        positions, values = map(torch.cat, zip(*waiting, strict=True))
        coded.append(Segment(DeviceGaps.of(first, positions), values))


def _find(tile: Tile, new: torch.Tensor, old: torch.Tensor) -> list[_ElementDiff]:
    """Return the elements that differ; positions count from the start of the tile."""
    if len(tile.widths) == 1:
        found = [_differing(tile.widths[0], new, old)]
    else:
        found = _mixed(tile, new.view(torch.int64), old.view(torch.int64))
    return [(width, positions, values) for width, positions, values in found if len(positions)]


def _differing(width: int, new: torch.Tensor, old: torch.Tensor) -> _ElementDiff:
    values = new.view(BITS[width])
    positions = (values != old.view(BITS[width])).nonzero().view(-1)
    return width, positions, values[positions]


def _mixed(tile: Tile, new: torch.Tensor, old: torch.Tensor) -> list[_ElementDiff]:
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
