"""Compression in blocks on the CPU; ``docs/compression.rst`` describes the bytes.

Blocks keep copies in the processor's cache, bound the memory that a forged block can claim, let several
threads compress, and avoid LZ4's limit of 2 GB.
"""

from __future__ import annotations

import itertools
import os
from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import torch

from weight_update.arguments import whole_number
from weight_update.compression.base import Compression
from weight_update.errors import FormatError
from weight_update.threads import in_threads
from weight_update.wire.memory import byte_view

_BLOCK_BYTES = 1 << 20
_BLOCKS_FOR_A_THREAD = 4  # starting threads takes half a millisecond, a block one or two

Buffer = bytes | bytearray | memoryview


@dataclass(frozen=True)
class BlockCompression(Compression):
    """A compression of separate blocks; a subclass compresses and decompresses one block.

    Args:
        threads: largest number of threads that compress, at most one for each core and for each 4 MiB. The
            result does not depend on it. Receivers decompress with one thread, because several of them may
            share a machine with policies that compute.
    """

    threads: int = field(default=4, kw_only=True)

    def __post_init__(self) -> None:
        whole_number(self.threads, "threads", least=1)

    @abstractmethod
    def shrink(self, block: memoryview) -> Buffer:
        """Compress one block; several threads call this."""

    @classmethod
    @abstractmethod
    def expand(cls, block: memoryview, nbytes: int) -> Buffer:
        """Decompress one block; raise FormatError before much more memory is used than announced."""

    def compress(self, data: torch.Tensor) -> torch.Tensor:
        self.check(data)
        if not data.numel():
            return torch.empty(0, dtype=torch.uint8, device="cpu")
        blocks = [byte_view(block) for block in torch.split(data, _BLOCK_BYTES)]
        threads = min(self.threads, len(blocks) // _BLOCKS_FOR_A_THREAD, len(os.sched_getaffinity(0)))
        # Block by block, not one share for each thread: some blocks take much longer than others.
        return torch.frombuffer(joined(in_threads(self._smaller, blocks, threads)), dtype=torch.uint8)

    def _smaller(self, block: memoryview) -> Buffer:
        shrunk = self.shrink(block)
        return shrunk if len(shrunk) < len(block) else block

    @classmethod
    def decompress(cls, data: torch.Tensor, nbytes: int) -> torch.Tensor:
        cls.check(data, nbytes)
        blocks = separated(byte_view(data), -(-nbytes // _BLOCK_BYTES), "block")
        result = torch.empty(nbytes, dtype=torch.uint8, device="cpu")
        for start, block in zip(range(0, nbytes, _BLOCK_BYTES), blocks, strict=True):
            place = byte_view(result[start : start + _BLOCK_BYTES])
            found = block if len(block) == len(place) else cls.expand(block, len(place))
            if len(found) != len(place):
                raise FormatError(f"a block holds {len(found)} bytes, expected {len(place)}")
            place[:] = found
        return result


def joined(parts: Sequence[Buffer]) -> bytearray:
    """Return a table of the sizes of ``parts``, and the parts."""
    return bytearray().join([np.array([len(part) for part in parts], "<u4").tobytes(), *parts])


def separated(data: memoryview, count: int, kind: str) -> list[memoryview]:
    """Return ``count`` parts that were :func:`joined`; FormatError if they do not fill ``data`` exactly."""
    head = 4 * count
    if len(data) < head:
        raise FormatError(f"{len(data)} bytes are too few for the {kind} table of {count} {kind}s")
    places = [head, *(head + np.cumsum(np.frombuffer(data[:head], "<u4"), dtype=np.int64)).tolist()]
    if len(data) != places[-1]:
        raise FormatError(f"the compressed {kind}s do not add up to the {len(data)} bytes of the data")
    return [data[start:end] for start, end in itertools.pairwise(places)]
