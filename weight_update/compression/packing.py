"""Compress only what gets smaller."""

from __future__ import annotations

import torch

from weight_update.compression.base import Compression
from weight_update.compression.none import NoCompression

__all__ = ["pack"]

_STRETCH_BYTES = 16 << 10
_STRETCHES = 3
_WORTHWHILE = 0.95
"""A sample must shrink to this part of its size or less."""


def pack(compression: Compression, data: torch.Tensor) -> tuple[str, torch.Tensor]:
    """Compress ``data`` if that pays.

    A sample from its start, middle and end is tried first, so that bytes that do not compress cost little.

    Args:
        compression: how.
        data: 1-D contiguous uint8 tensor.

    Returns:
        the name on the wire of what was done, and the bytes; ``"none/1"`` and ``data`` itself where the
        sample shrinks by less than 5 % or the whole does not shrink.

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
    last = data.numel() - _STRETCH_BYTES
    if data.numel() < 4 * _STRETCHES * _STRETCH_BYTES:
        return True
    starts = [last * i // (_STRETCHES - 1) for i in range(_STRETCHES)]
    sizes = [compression.compress(data[start : start + _STRETCH_BYTES]).numel() for start in starts]
    return sum(sizes) <= _WORTHWHILE * _STRETCHES * _STRETCH_BYTES
