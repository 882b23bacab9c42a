"""Compression of only the data that gets smaller."""

from __future__ import annotations

import torch

from weight_update.compression.base import Compression
from weight_update.compression.none import NoCompression

__all__ = ["pack"]

_SAMPLE_BYTES = 16 << 10
_SAMPLES = 3
_WORTHWHILE = 0.95
"""Fraction of their size to which the samples must shrink."""


def pack(compression: Compression, data: torch.Tensor) -> tuple[str, torch.Tensor]:
    """Compress ``data`` if that pays.

    Samples from the start, middle and end are compressed first, so that incompressible data costs little.

    Args:
        compression: compression to try.
        data: 1-D contiguous uint8 tensor.

    Returns:
        The wire name of the compression in use, and the bytes: ``"none/1"`` and ``data`` itself if the
        samples shrink by less than 5 % or the whole does not shrink.

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
