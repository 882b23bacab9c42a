"""The compression interface: the extension point between bytes and fewer bytes; and no compression."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import ClassVar, TypeVar

import torch

from weight_update.arguments import made_by_label, require_new_name
from weight_update.errors import FormatError

_MAX_NAME = 15
"""Characters of the longest name for which the table of a patch has room."""

_SAMPLE_BYTES = 16 << 10
_SAMPLES = 3
_WORTHWHILE = 0.95
"""Fraction of their size to which the samples must shrink."""


class Compression(ABC):
    """Lossless compression of raw bytes. Instances are immutable, picklable and thread-safe."""

    name: ClassVar[str]
    """Name and version on the wire, e.g. ``"zstd/1"``, at most 15 ASCII characters.

    A new layout takes a new number.
    """

    device: ClassVar[str]
    """Device type of the memory that it processes (``"cpu"``, ``"cuda"``, or ``"any"`` for both)."""

    @property
    def label(self) -> str:
        """The name without its version, as shown in reports."""
        return self.name.partition("/")[0]

    @abstractmethod
    def compress(self, data: torch.Tensor) -> torch.Tensor:
        """Compress ``data`` so that :meth:`decompress` can restore it.

        Args:
            data: 1-D contiguous uint8 tensor of any size, also 0; it is not changed.

        Returns:
            A 1-D uint8 tensor on the same device, which may be longer than ``data``.
        """

    @classmethod
    @abstractmethod
    def decompress(cls, data: torch.Tensor, nbytes: int) -> torch.Tensor:
        """Restore compressed data, without any option of the sender.

        Args:
            data: 1-D contiguous uint8 tensor, possibly not a result of :meth:`compress`.
            nbytes: size of the original data. Decompression uses little more memory than this.

        Returns:
            A writable 1-D uint8 tensor of ``nbytes`` on the same device.

        Raises:
            FormatError: ``data`` does not decompress to exactly ``nbytes`` bytes.
        """

    @classmethod
    def check(cls, data: torch.Tensor, nbytes: int = 0) -> None:
        """Raise ValueError if ``data`` is unsuitable, and FormatError if ``nbytes`` is negative."""
        if data.dtype != torch.uint8 or data.dim() != 1 or not data.is_contiguous():
            raise ValueError(f"expected contiguous 1-D uint8 data, got {list(data.shape)} of {data.dtype}")
        if cls.device not in ("any", data.device.type):
            raise ValueError(
                f"compression {cls.name!r} works on {cls.device} memory but the data is on {data.device}: "
                f'set transport_device="{cls.device}" or choose another compression'
            )
        if nbytes < 0:
            raise FormatError(f"cannot decompress to {nbytes} bytes")


_registry: dict[str, type[Compression]] = {}
_C = TypeVar("_C", bound=type[Compression])


def register_compression(cls: _C) -> _C:
    """Register a compression class under its ``name``. Use it as a class decorator; both ends need the class.

    Raises:
        ValueError: the class has no ``name``, the name is too long, or another class has the same one.
    """
    name = require_new_name(cls, _registry)
    if not name.isascii() or len(name) > _MAX_NAME:
        raise ValueError(f"the name of a compression has at most {_MAX_NAME} ASCII characters: {name!r}")
    _registry[name] = cls
    return cls


def resolve_compression(compression: str | Compression) -> Compression:
    """Return the compression of a short name, or the given compression itself.

    Raises:
        TypeError: a class was given.
        ValueError: the name is unknown; the message lists the known names.
        ImportError: a package that it needs is not installed; the message names the extra.
        RuntimeError: it needs a CUDA device, and there is none.
    """
    if isinstance(compression, Compression):
        return compression
    return made_by_label(compression, _registry, "compression")


def decompressor_for(wire_name: str) -> type[Compression]:
    """Return the class that reads the compression of this wire name; FormatError if it is not known."""
    try:
        return _registry[wire_name]
    except KeyError:
        known = ", ".join(sorted(_registry))
        raise FormatError(
            f"unknown compression {wire_name!r:.40} (known: {known}); call register_compression() in every "
            "process"
        ) from None


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


def pack(compression: Compression, data: torch.Tensor) -> tuple[str, torch.Tensor]:
    """Compress ``data`` (1-D contiguous uint8) if that pays; return the wire name in use, and the bytes.

    On the CPU, samples from the start, middle and end are compressed first, so that incompressible data costs
    little. If they shrink by less than 5 %, or the whole does not shrink, the result is ``"none/1"`` and
    ``data`` itself.
    """
    compression.check(data)
    if not isinstance(compression, NoCompression) and _promising(compression, data):
        packed = compression.compress(data)
        if packed.numel() < data.numel():
            return compression.name, packed
    return NoCompression.name, data


def _promising(compression: Compression, data: torch.Tensor) -> bool:
    last = data.numel() - _SAMPLE_BYTES
    if data.is_cuda or data.numel() < 4 * _SAMPLES * _SAMPLE_BYTES:
        return True  # on a GPU, samples take about as long as all
    starts = [last * i // (_SAMPLES - 1) for i in range(_SAMPLES)]
    samples = torch.cat([data[start : start + _SAMPLE_BYTES] for start in starts])
    return compression.compress(samples).numel() <= _WORTHWHILE * samples.numel()
