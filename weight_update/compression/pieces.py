"""Compression piece by piece on the CPU: the layout that ``lz4/1`` and ``zstd/1`` share.

The data is cut into pieces of 1 MiB; the last may be shorter. Compressed, for N pieces::

    offset  size  field
    0       4 N   length of each compressed piece, uint32, little endian
    4 N     ...   the compressed pieces, one after the other

A piece whose length is that of the original stands as it is, uncompressed. No data is no bytes.

Pieces keep what is copied in the processor's cache, bound the memory that a forged piece can claim, let
several threads compress, and get past the 2 GB to which an LZ4 block is limited.
"""

from __future__ import annotations

import itertools
import os
from abc import abstractmethod
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from queue import SimpleQueue

import numpy as np
import torch

from weight_update.compression.base import Compression
from weight_update.errors import FormatError
from weight_update.wire.memory import byte_view

__all__ = ["PIECE_BYTES", "PiecewiseCompression"]

PIECE_BYTES = 1 << 20
_PIECES_FOR_A_THREAD = 4  # starting threads takes half a millisecond, a piece one or two

Buffer = bytes | bytearray | memoryview
Shrink = Callable[[memoryview], Buffer]
"""Compresses one piece."""
Expand = Callable[[memoryview, int], Buffer]
"""Decompresses one piece; raises FormatError before it uses much more memory than the bytes announced."""


@dataclass(frozen=True)
class PiecewiseCompression(Compression):
    """A compression that only needs to say how one piece is compressed.

    Args:
        threads: compress with so many threads at most: not more than there are cores, and one for each
            4 MiB. It changes no byte of what comes out. Receivers decompress with one thread: several may
            share a machine, and all of them with a policy that computes.
    """

    threads: int = field(default=4, kw_only=True)

    def __post_init__(self) -> None:
        if self.threads < 1:
            raise ValueError(f"it takes at least one thread, got {self.threads}")

    @abstractmethod
    def shrinker(self) -> Shrink:
        """What compresses pieces, one after the other."""

    @classmethod
    @abstractmethod
    def expander(cls) -> Expand:
        """What decompresses the pieces of one call."""

    def compress(self, data: torch.Tensor) -> torch.Tensor:
        self.check(data)
        if not data.numel():
            return torch.empty(0, dtype=torch.uint8)
        view = byte_view(data)
        pieces = self._shrunk([view[start : start + PIECE_BYTES] for start in _starts(len(view))])
        table = np.array([len(piece) for piece in pieces], "<u4").tobytes()
        return torch.frombuffer(bytearray().join([table, *pieces]), dtype=torch.uint8)

    def _shrunk(self, pieces: Sequence[memoryview]) -> list[Buffer]:
        threads = min(self.threads, len(pieces) // _PIECES_FOR_A_THREAD, len(os.sched_getaffinity(0)))
        if threads < 2:
            shrink = self.shrinker()
            return [_smaller(piece, shrink) for piece in pieces]
        spare: SimpleQueue[Shrink] = SimpleQueue()
        for _ in range(threads):
            spare.put(self.shrinker())

        def shrunk(piece: memoryview) -> Buffer:
            shrink = spare.get()
            try:
                return _smaller(piece, shrink)
            finally:
                spare.put(shrink)

        # Piece by piece, not a share for each thread: some stretches are much harder than others.
        with ThreadPoolExecutor(threads) as pool:
            return list(pool.map(shrunk, pieces))

    @classmethod
    def decompress(cls, data: torch.Tensor, nbytes: int) -> torch.Tensor:
        cls.check(data, nbytes)
        pieces = _cut(data, nbytes)
        result = torch.empty(nbytes, dtype=torch.uint8)
        if nbytes:
            out, expand = byte_view(result), cls.expander()
            for start, piece in zip(_starts(nbytes), pieces, strict=True):
                place = out[start : start + PIECE_BYTES]
                place[:] = _whole(piece, len(place), expand)
        return result


def _starts(nbytes: int) -> range:
    return range(0, nbytes, PIECE_BYTES)


def _smaller(piece: memoryview, shrink: Shrink) -> Buffer:
    shrunk = shrink(piece)
    return shrunk if len(shrunk) < len(piece) else piece


def _whole(piece: memoryview, nbytes: int, expand: Expand) -> Buffer:
    if len(piece) == nbytes:
        return piece
    found = expand(piece, nbytes)
    if len(found) != nbytes:
        raise FormatError(f"a piece holds {len(found)} bytes where {nbytes} were announced")
    return found


def _cut(data: torch.Tensor, nbytes: int) -> list[memoryview]:
    """The compressed pieces, which fill ``data`` exactly."""
    head = 4 * -(-nbytes // PIECE_BYTES)
    if not nbytes and not data.numel():
        return []
    if data.numel() < head:
        raise FormatError(f"{data.numel()} bytes cannot hold {nbytes} compressed ones")
    view = byte_view(data)
    ends = head + np.cumsum(np.frombuffer(view[:head], "<u4"), dtype=np.int64)
    if len(view) != (ends[-1] if head else 0):
        raise FormatError(f"compressed pieces do not fill the {len(view)} bytes that are there")
    places = [head, *ends.tolist()]
    return [view[start:end] for start, end in itertools.pairwise(places)]
