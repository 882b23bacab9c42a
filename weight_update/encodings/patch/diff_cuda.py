"""Finding what changed on a CUDA device, where the live tensors lie; the snapshot may lie on the CPU.

What happens to piece ``i`` of a snapshot on the CPU, and in which queue::

    fetch    snapshot i+1 -> device, while i is compared
    compute  wait for fetch i; compare, nonzero, gather
    store    after the last piece: positions and values -> pinned memory
    later    the caller writes the changes into the snapshot, in a thread of its own; what stayed on the
             device comes to pinned memory first, in queue store

Method: the "CPU Snapshot Optimization Path" in the documentation of RLinf's weight syncer.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Literal

import torch

from weight_update.encodings.patch.changes import BITS, Changes, Run, Sparse
from weight_update.encodings.patch.diff_cpu import Scan, check_sizes
from weight_update.encodings.patch.tiles import Piece, cut, flattened
from weight_update.wire.schema import WeightSchema

__all__ = ["CudaScanner", "Queues"]

PIECE = 32 << 20
"""Bytes of a piece. Each costs one wait for the device, and three of them lie in its memory."""

Found = tuple[int, torch.Tensor, torch.Tensor]  # width, positions, values


class Queues:
    """Copies beside the computation, which is whatever the caller's current stream does.

    Args:
        device: a CUDA device.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._fetch = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self._store = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]

    def fetch(self, target: torch.Tensor, source: torch.Tensor) -> torch.cuda.Event:
        """Copy pinned memory to the device as soon as the computation queued so far is over."""
        self._fetch.wait_stream(torch.cuda.current_stream(self.device))
        with torch.cuda.stream(self._fetch):
            target.copy_(source, non_blocking=True)
            event: torch.cuda.Event = self._fetch.record_event()
        return event

    def fetched(self, event: torch.cuda.Event) -> None:
        """Let the computation queued from now on wait for a copy to the device."""
        torch.cuda.current_stream(self.device).wait_event(event)

    def store(self, source: torch.Tensor) -> torch.Tensor:
        """Pinned memory that will hold ``source``, as computed so far, after :meth:`finish`."""
        target = torch.empty(source.shape, dtype=source.dtype, pin_memory=True)
        self._store.wait_stream(torch.cuda.current_stream(self.device))
        with torch.cuda.stream(self._store):
            target.copy_(source, non_blocking=True)
        source.record_stream(self._store)
        return target

    def bring(self, tensor: torch.Tensor) -> torch.Tensor:
        """Pinned memory that holds ``tensor``, whose computation was over at the last :meth:`finish`.

        It does not wait in line behind what is computed now.
        """
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
    """As :class:`~weight_update.encodings.patch.diff_cpu.Scanner`, for live tensors on a CUDA device.

    One scan at a time. Live tensors are read on the caller's current stream.

    Args:
        schema: layout and dtypes of the snapshot.
        queues: of the device where the live tensors lie and comparisons run.
        tracked: positions of the schema entries that are compared; None for all.
        dense_above: fraction of changed elements of a piece above which all of the piece is replaced.
        relative: values are what to add to the old bits instead of the new bits.
        snapshot_device: ``"cpu"``, best pinned, or ``"cuda"``, the device of ``queues``.
        transport_device: where positions and values are wanted: in pinned memory of the ``"cpu"``, or on the
            device, ``"cuda"``.
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
        self._pieces = list(cut(schema, tracked, PIECE, PIECE))
        size = max((piece.nbytes for piece in self._pieces), default=0)
        new, *olds = (self._empty(size) for _ in range(3 if self._fetches else 1))
        self._new, self._olds = new, olds
        self._views = [piece.views(new) for piece in self._pieces]

    @torch.no_grad()
    def scan(self, tensors: Sequence[torch.Tensor], snapshot: torch.Tensor) -> Scan:
        """Compare; nothing is written to either side.

        Args:
            tensors: one for each schema entry, in order, of any strides; only read.
            snapshot: 1-D uint8, ``schema.nbytes`` long, 8-byte aligned.

        Raises:
            ValueError: ``snapshot`` or the number of ``tensors`` does not fit the schema.
        """
        check_sizes(self._schema, tensors, snapshot)
        live = flattened(tensors, self._pieces)
        found, runs, changed = [], [], 0
        for index, old in enumerate(self._arriving(snapshot)):
            piece, new = self._pieces[index], self._new[: len(old)]
            new.copy_(old)  # so that nothing differs between the parts
            torch._foreach_copy_(self._views[index], piece.of(live))
            here = _find(piece, new, old)
            count = sum(len(positions) for _, positions, _ in here)
            changed += count
            if count > self._dense_above * piece.elements:
                runs += [Run(piece.start + a, self._hand_over(new[a:b].clone())) for a, b in piece.stretches]
                continue
            for width, at, values in here:
                if self._relative:
                    values = values - old.view(BITS[width])[at]
                found.append((width, at + piece.start // width, values))
        changes = Changes(self._merge(found), tuple(runs))
        self._queues.finish()
        return Scan(changes, changed, sum(piece.elements for piece in self._pieces))

    def _empty(self, nbytes: int) -> torch.Tensor:
        return torch.empty(nbytes, dtype=torch.uint8, device=self._queues.device)

    def _arriving(self, snapshot: torch.Tensor) -> Iterator[torch.Tensor]:
        """The snapshot of each piece on the device; the next one is on its way meanwhile."""
        pieces = [snapshot[piece.start : piece.start + piece.nbytes] for piece in self._pieces]
        if not self._fetches:
            yield from pieces
            return
        targets = [self._olds[i % 2][: len(piece)] for i, piece in enumerate(pieces)]
        coming = [self._queues.fetch(*pair) for pair in zip(targets[:1], pieces[:1], strict=True)]
        for i, target in enumerate(targets):
            if i + 1 < len(targets):  # before the comparison of i: it may overtake it
                coming.append(self._queues.fetch(targets[i + 1], pieces[i + 1]))
            self._queues.fetched(coming[i])
            yield target

    def _merge(self, found: Sequence[Found]) -> tuple[Sparse, ...]:
        """One stream for each width."""
        sparse = []
        for width in sorted({width for width, _, _ in found}):
            positions = torch.cat([positions for w, positions, _ in found if w == width])
            values = torch.cat([values for w, _, values in found if w == width])
            positions, values = self._hand_over(positions), self._hand_over(values)
            sparse.append(Sparse.of(width, positions, values, self._relative))
        return tuple(sparse)

    def _hand_over(self, tensor: torch.Tensor) -> torch.Tensor:
        return self._queues.store(tensor) if self._stores else tensor


def _find(piece: Piece, new: torch.Tensor, old: torch.Tensor) -> list[Found]:
    """Elements that differ; positions count from the start of the piece."""
    if len(piece.widths) == 1:
        found = [_differing(piece.widths[0], new, old)]
    else:
        found = _mixed(piece, new.view(torch.int64), old.view(torch.int64))
    return [(width, positions, values) for width, positions, values in found if len(positions)]


def _differing(width: int, new: torch.Tensor, old: torch.Tensor) -> Found:
    values = new.view(BITS[width])
    positions = (values != old.view(BITS[width])).nonzero().view(-1)
    return width, positions, values[positions]


def _mixed(piece: Piece, new: torch.Tensor, old: torch.Tensor) -> list[Found]:
    """As :func:`_find`, of words of 8 bytes, where there are several widths."""
    words = (new != old).nonzero().view(-1)
    starts = words.new_tensor([(part.start - piece.start) // 8 for part in piece.parts])
    widths = words.new_tensor([part.width for part in piece.parts])
    kinds = widths[torch.searchsorted(starts, words, right=True) - 1]
    out = []
    for width in piece.widths:
        mine, each = words[kinds == width], 8 // width
        _, at, values = _differing(width, new[mine], old[mine])
        places = mine[torch.div(at, each, rounding_mode="floor")] * each + at % each
        out.append((width, places, values))
    return out
