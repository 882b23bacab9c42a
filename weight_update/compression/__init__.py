"""Compressions: bytes to fewer bytes and back.

New compressions derive from :class:`Compression` and register a name.
"""

from weight_update.compression.ans import AnsCompression
from weight_update.compression.base import (
    Compression,
    NoCompression,
    decompressor_for,
    pack,
    register_compression,
    resolve_compression,
)
from weight_update.compression.lz4 import Lz4Compression
from weight_update.compression.nvcomp import NvcompAnsCompression, NvcompLz4Compression
from weight_update.compression.zstd import ZstdCompression

__all__ = [
    "AnsCompression",
    "Compression",
    "Lz4Compression",
    "NoCompression",
    "NvcompAnsCompression",
    "NvcompLz4Compression",
    "ZstdCompression",
    "decompressor_for",
    "pack",
    "register_compression",
    "resolve_compression",
]
