"""No compression: the bytes themselves."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch

from weight_update.compression.base import Compression, register_compression
from weight_update.errors import FormatError

__all__ = ["NoCompression"]


@register_compression
@dataclass(frozen=True)
class NoCompression(Compression):
    """The identity: both directions return the given tensor without a copy."""

    name: ClassVar[str] = "none/1"
    device: ClassVar[str] = "any"

    def compress(self, data: torch.Tensor) -> torch.Tensor:
        self.check(data)
        return data

    @classmethod
    def decompress(cls, data: torch.Tensor, nbytes: int) -> torch.Tensor:
        cls.check(data, nbytes)
        if data.numel() != nbytes:
            raise FormatError(f"{data.numel()} bytes, expected {nbytes}")
        return data
