"""LZ4: moderate compression, faster than most networks."""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import ClassVar

from weight_update.compression.base import optional, register_compression
from weight_update.compression.blocks import BlockCompression, Expand, Shrink
from weight_update.errors import FormatError

__all__ = ["Lz4Compression"]


@register_compression
@dataclass(frozen=True)
class Lz4Compression(BlockCompression):
    """LZ4 blocks (https://github.com/lz4/lz4/blob/dev/doc/lz4_Block_format.md), without a size in front.

    Args:
        acceleration: at least 1; a larger value is faster and compresses less.
        threads: see :class:`~weight_update.compression.blocks.BlockCompression`.

    Raises:
        ImportError: the package ``lz4`` is not installed.
    """

    acceleration: int = 1

    name: ClassVar[str] = "lz4/1"
    device: ClassVar[str] = "cpu"

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.acceleration < 1:
            raise ValueError(f"acceleration starts at 1, got {self.acceleration}")
        optional("lz4.block", "lz4")

    def shrinker(self) -> Shrink:
        compress = optional("lz4.block", "lz4").compress
        return functools.partial(compress, mode="fast", acceleration=self.acceleration, store_size=False)

    @classmethod
    def expander(cls) -> Expand:
        block = optional("lz4.block", "lz4")

        def expand(data: memoryview, nbytes: int) -> bytes:
            try:
                whole: bytes = block.decompress(data, uncompressed_size=nbytes)
            except block.LZ4BlockError as error:
                raise FormatError(f"not an LZ4 block of {nbytes} bytes: {error}") from None
            return whole

        return expand
