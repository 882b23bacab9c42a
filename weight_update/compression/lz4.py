"""LZ4: moderate compression, faster than most networks."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from weight_update.arguments import whole_number
from weight_update.compression.base import register_compression
from weight_update.compression.blocks import BlockCompression, Buffer
from weight_update.errors import FormatError, optional


@register_compression
@dataclass(frozen=True)
class Lz4Compression(BlockCompression):
    """LZ4 blocks (https://github.com/lz4/lz4/blob/dev/doc/lz4_Block_format.md), without a size in front.

    Args:
        acceleration: at least 1; a larger value is faster and compresses less.
        threads: largest number of threads that compress, at most one for each core and for each 4 MiB.

    Raises:
        ImportError: the package ``lz4`` is not installed.
    """

    acceleration: int = 1

    name: ClassVar[str] = "lz4/1"
    device: ClassVar[str] = "cpu"

    def __post_init__(self) -> None:
        super().__post_init__()
        whole_number(self.acceleration, "acceleration", least=1)
        optional("lz4.block", "lz4")

    def shrink(self, block: memoryview) -> Buffer:
        compress = optional("lz4.block", "lz4").compress
        packed: bytes = compress(block, mode="fast", acceleration=self.acceleration, store_size=False)
        return packed

    @classmethod
    def expand(cls, block: memoryview, nbytes: int) -> Buffer:
        lz4 = optional("lz4.block", "lz4")
        try:
            whole: bytes = lz4.decompress(block, uncompressed_size=nbytes)
        except lz4.LZ4BlockError as error:
            raise FormatError(f"not an LZ4 block of {nbytes} bytes: {error}") from None
        return whole
