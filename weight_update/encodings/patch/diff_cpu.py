"""Finding what changed: live tensors against a snapshot, one pass over memory, on all cores.

The flat buffer is cut into pieces that stay in caches. A large tensor gives pieces of its own,
which are compared where they lie unless they must be converted; small neighbours share a piece and are
first gathered. Each piece is compared in words of 8 bytes, and only words that differ are looked at closer.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from weight_update.encodings.patch.changes import Changes, Run, Sparse, Stretch
from weight_update.encodings.patch.differing import INTEGER, Bytes, Found, differing
from weight_update.encodings.patch.threads import in_threads
from weight_update.encodings.patch.tiles import Piece, cut, flattened
from weight_update.wire.schema import WeightSchema

__all__ = ["Scan", "Scanner"]

PIECE = 2 << 20
"""Bytes of a piece: short enough for caches, long enough that threads rarely meet at the interpreter lock."""

GROUP = 16 << 20
"""Bytes of the flat buffer whose changes become one stretch: long enough to go on with in several threads."""

LARGE = 64 << 10
"""Tensors below so many bytes share a piece with their neighbours."""

LITTLE = 16 << 20
"""Bytes below which one thread is faster than two."""

SERIAL = 32736
"""Elements that torch copies on one thread, and a whole number of vectors: rests convert NaNs otherwise."""


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
        relative: values are what to add to the old bits instead of the new bits.
        threads: worker threads; None for as many as torch uses, but one where there is little to do.

    Raises:
        ValueError: ``threads`` is below 1.
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
        self._schema, self._dense_above, self._relative = schema, dense_above, relative
        self._pieces = list(cut(schema, tracked, PIECE, LARGE))
        groups = list(_grouped(self._pieces))
        self._lanes = [_readers(groups[lane::threads]) for lane in range(min(threads, len(groups)))]
        self._total = sum(piece.elements for piece in self._pieces)

    def scan(self, tensors: Sequence[torch.Tensor], snapshot: torch.Tensor) -> Scan:
        """Compare; nothing is written to either side.

        Args:
            tensors: one for each schema entry, in order, of any strides; only read.
            snapshot: 1-D uint8 on the CPU, ``schema.nbytes`` long, 8-byte aligned.

        Raises:
            ValueError: ``snapshot`` or the number of ``tensors`` does not fit the schema.
        """
        check_sizes(self._schema, tensors, snapshot)
        done = self._each_lane(flattened(tensors, self._pieces), snapshot.numpy())
        groups = [done[i % len(done)][i // len(done)] for i in range(sum(map(len, done)))]
        changed = sum(group.changed for group in groups)
        return Scan(_together(groups, self._relative), changed, self._total)

    def _each_lane(self, live: Sequence[torch.Tensor], snapshot: Bytes) -> list[list[_Difference]]:
        def compare(group: Sequence[_Reader]) -> _Difference:
            each = [_compare(reader, live, snapshot, self._dense_above, self._relative) for reader in group]
            return _join(group[0].piece.start, each)

        @torch.no_grad()  # a setting of each thread
        def run(lane: Sequence[Sequence[_Reader]]) -> list[_Difference]:
            return [compare(group) for group in lane]

        return in_threads(run, self._lanes, len(self._lanes))


def _grouped(pieces: Sequence[Piece]) -> Iterator[list[Piece]]:
    """Consecutive ones that lie within :data:`GROUP` bytes."""
    group: list[Piece] = []
    for piece in pieces:
        if group and piece.start + piece.nbytes - group[0].start > GROUP:
            yield group
            group = []
        group.append(piece)
    if group:
        yield group


def check_sizes(schema: WeightSchema, tensors: Sequence[torch.Tensor], snapshot: torch.Tensor) -> None:
    """Raise ValueError if ``snapshot`` or the number of ``tensors`` does not fit."""
    if len(tensors) != len(schema.tensors) or snapshot.numel() != schema.nbytes:
        raise ValueError(
            f"{len(tensors)} tensors and a snapshot of {snapshot.numel()} bytes; the schema has "
            f"{len(schema.tensors)} and {schema.nbytes}"
        )


class _Reader:
    """Gives the bytes of a piece as they are now; ``scratch``, 1-D uint8, may be used by others in turn."""

    def __init__(self, piece: Piece, scratch: torch.Tensor) -> None:
        self.piece, self._scratch = piece, scratch[: piece.nbytes]
        self._views = [] if piece.flat else piece.views(scratch)

    def read(self, live: Sequence[torch.Tensor], old: Bytes) -> Bytes:
        return self._slice(live) if self.piece.flat else self._gather(live, old)

    def _slice(self, live: Sequence[torch.Tensor]) -> Bytes:
        (part,), dtype = self.piece.of(live), self.piece.parts[0].meta.dtype
        if not _readable(part, dtype):
            into = self._scratch.view(dtype)
            torch._foreach_copy_(torch.split(into, SERIAL), torch.split(part, SERIAL))
            part = self._scratch
        return part.view(torch.uint8).numpy()

    def _gather(self, live: Sequence[torch.Tensor], old: Bytes) -> Bytes:
        new = self._scratch.numpy()
        new[:] = old  # so that nothing differs between the parts
        torch._foreach_copy_(self._views, self.piece.of(live))
        return new


def _readers(lane: Sequence[Sequence[Piece]]) -> list[list[_Reader]]:
    scratch = torch.empty(max(piece.nbytes for group in lane for piece in group), dtype=torch.uint8)
    return [[_Reader(piece, scratch) for piece in group] for group in lane]


@dataclass(frozen=True)
class _Found:
    """What differs in the piece that starts at byte ``start``; positions count from there."""

    start: int
    changed: int
    found: Sequence[Found] = ()
    runs: Sequence[Run] = ()


@dataclass(frozen=True)
class _Difference:
    """What differs in a group, by width."""

    changed: int
    stretches: dict[int, Stretch]
    runs: list[Run]


def _compare(
    reader: _Reader, live: Sequence[torch.Tensor], snapshot: Bytes, dense_above: float, relative: bool
) -> _Found:
    piece = reader.piece
    old = snapshot[piece.start : piece.start + piece.nbytes]
    new = reader.read(live, old)
    found = differing(piece, new, old)
    changed = sum(len(positions) for _, positions, _ in found)
    if changed > dense_above * piece.elements:
        runs = [Run(piece.start + a, torch.from_numpy(new[a:b].copy())) for a, b in piece.stretches]
        return _Found(piece.start, changed, runs=runs)
    if relative:
        for width, positions, values in found:
            values -= old.view(INTEGER[width]).take(positions, mode="wrap")  # from the core's own cache
    return _Found(piece.start, changed, found)


def _join(start: int, pieces: Sequence[_Found]) -> _Difference:
    """One stretch for each width; ``start`` is the first byte of the first piece."""
    by_width: dict[int, list[tuple[int, Found]]] = {}
    for piece in pieces:
        for found in piece.found:
            by_width.setdefault(found[0], []).append((piece.start, found))
    stretches = {}
    for width, parts in by_width.items():
        values = np.concatenate([values for _, (_, _, values) in parts])
        places = np.empty(values.shape, np.int32)  # fresh memory is what costs most here
        end = 0
        for at, (_, inside, _) in parts:
            here = places[end : end + len(inside)]
            here[:] = inside
            here += (at - start) // width
            end += len(inside)
        stretches[width] = Stretch(start // width, torch.from_numpy(places), torch.from_numpy(values))
    changed = sum(piece.changed for piece in pieces)
    return _Difference(changed, stretches, [run for piece in pieces for run in piece.runs])


def _together(groups: Sequence[_Difference], relative: bool) -> Changes:
    sparse = []
    for width in sorted({width for group in groups for width in group.stretches}):
        stretches = tuple(group.stretches[width] for group in groups if width in group.stretches)
        sparse.append(Sparse(width, stretches, relative))
    return Changes(tuple(sparse), tuple(run for group in groups for run in group.runs))


def _readable(part: torch.Tensor, dtype: torch.dtype) -> bool:
    """Whether the memory of ``part`` holds its elements as the snapshot would, aligned to words."""
    lazy = part.is_conj() or part.is_neg()
    return part.dtype is dtype and part.is_cpu and part.data_ptr() % 8 == 0 and not lazy
