"""Zstandard: good compression at the speed of a network."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from weight_update.arguments import whole_number
from weight_update.compression.base import register_compression
from weight_update.compression.blocks import BlockCompression, Buffer
from weight_update.errors import FormatError, optional


@register_compression
@dataclass(frozen=True)
class ZstdCompression(BlockCompression):
    """Zstandard frames (RFC 8878) that state the size of their content.

    Args:
        level: from -7 for the fastest to 22 for the smallest.
        threads: largest number of threads that compress, at most one for each core and for each 4 MiB.

    Raises:
        ImportError: the package ``zstandard`` is not installed.
    """

    level: int = 1

    name: ClassVar[str] = "zstd/1"
    device: ClassVar[str] = "cpu"

    def __post_init__(self) -> None:
        super().__post_init__()
        whole_number(self.level, "level", least=-7, most=22)
        optional("zstandard", "zstd")

    def shrink(self, block: memoryview) -> Buffer:
        # One compressor for each block: they are not thread-safe, and creating one takes 8 us.
        packed: bytes = optional("zstandard", "zstd").ZstdCompressor(level=self.level).compress(block)
        return packed

    @classmethod
    def expand(cls, block: memoryview, nbytes: int) -> Buffer:
        zstandard = optional("zstandard", "zstd")
        try:
            # The decompressor allocates the size that the frame claims, so check it first.
            if zstandard.frame_content_size(block) != nbytes:
                raise FormatError(f"a zstd frame does not hold {nbytes} bytes")
            whole: bytes = zstandard.ZstdDecompressor().decompress(block, allow_extra_data=False)
        except zstandard.ZstdError as error:
            raise FormatError(f"not a zstd frame of {nbytes} bytes: {error}") from None
        return whole
