"""No compression, and compression of only the data that gets smaller."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch

from weight_update.compression.base import Compression, register_compression
from weight_update.errors import FormatError

__all__ = ["NoCompression", "pack"]

_SAMPLE_BYTES = 16 << 10
_SAMPLES = 3
_WORTHWHILE = 0.95
"""Fraction of their size to which the samples must shrink."""


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
            raise FormatError(f"{data.numel()} bytes where {nbytes} were announced")
        return data


def pack(compression: Compression, data: torch.Tensor) -> tuple[str, torch.Tensor]:
    """Compress ``data`` (1-D contiguous uint8) if that pays; return the wire name in use, and the bytes.

    Samples from the start, middle and end are compressed first, so that incompressible data costs little. If
    they shrink by less than 5 %, or the whole does not shrink, the result is ``"none/1"`` and ``data``
    itself.

    Raises:
        ValueError: ``data`` is another kind of tensor or on another kind of device.
    """
    compression.check(data)
    if not isinstance(compression, NoCompression) and _promising(compression, data):
        packed = compression.compress(data)
        if packed.numel() < data.numel():
            return compression.name, packed
    return NoCompression.name, data


def _promising(compression: Compression, data: torch.Tensor) -> bool:
    last = data.numel() - _SAMPLE_BYTES
    if data.numel() < 4 * _SAMPLES * _SAMPLE_BYTES:
        return True
    starts = [last * i // (_SAMPLES - 1) for i in range(_SAMPLES)]
    sizes = [compression.compress(data[start : start + _SAMPLE_BYTES]).numel() for start in starts]
    return sum(sizes) <= _WORTHWHILE * _SAMPLES * _SAMPLE_BYTES
