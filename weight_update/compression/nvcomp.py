"""LZ4 and ANS on the GPU, by NVIDIA's nvCOMP."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch.utils.dlpack import from_dlpack

from weight_update.compression.base import Compression, register_compression
from weight_update.errors import FormatError, optional

_ALIGNMENT = 16
"""Largest alignment that nvCOMP requires (``Codec.get_required_decompression_alignment``)."""


class NvcompCompression(Compression):
    """The native bitstream of nvCOMP, 5.2 or newer (https://docs.nvidia.com/cuda/nvcomp/py_api.html).

    Its decompressor expects the output of its compressor. Pass it bytes from another process only after their
    checksum was verified, as the checksum of every frame in a stream is. Use the same major version of nvCOMP
    on both sides.

    Raises:
        RuntimeError: torch sees no CUDA device.
        ImportError: the package ``nvidia-nvcomp-cu12`` or ``nvidia-nvcomp-cu13`` is not installed.
    """

    device: ClassVar[str] = "cuda"

    algorithm: ClassVar[str]
    """Name of the algorithm in nvCOMP."""

    def __post_init__(self) -> None:
        _nvcomp()

    def compress(self, data: torch.Tensor) -> torch.Tensor:
        self.check(data)
        if not data.numel():
            return torch.empty_like(data)
        with _session(self.algorithm, data) as (codec, source, stream):
            encoded = codec.encode(source)
            stream.synchronize()
            whole = from_dlpack(encoded).view(torch.uint8)  # with nvCOMP 6, its room for incompressible data
            result = whole[: encoded.buffer_size].clone()
            # nvCOMP frees its output when this returns, without regard to our stream.
            torch.cuda.current_stream().synchronize()
        return result

    @classmethod
    def decompress(cls, data: torch.Tensor, nbytes: int) -> torch.Tensor:
        cls.check(data, nbytes)
        if not nbytes or not data.numel():
            if nbytes or data.numel():
                raise FormatError(f"{data.numel()} compressed bytes cannot decompress to {nbytes}")
            return torch.empty_like(data)
        try:
            with _session(cls.algorithm, data) as (codec, source, stream):
                found = codec.get_uncomp_buffer_size(source)
                if found != nbytes:
                    raise FormatError(f"the data holds {found} bytes, expected {nbytes}")
                result = torch.empty(nbytes, dtype=torch.uint8, device=data.device)
                stream.wait_stream(torch.cuda.current_stream())
                codec.decode(source, out=result)
                stream.synchronize()
        except FormatError:
            raise
        except (RuntimeError, ValueError) as error:
            raise FormatError(f"nvCOMP: {error}") from error
        return result


@register_compression
@dataclass(frozen=True)
class NvcompLz4Compression(NvcompCompression):
    """LZ4, which RLinf uses; on patches, it saves less than ANS."""

    name: ClassVar[str] = "nvcomp_lz4/1"
    algorithm: ClassVar[str] = "LZ4"


@register_compression
@dataclass(frozen=True)
class NvcompAnsCompression(NvcompCompression):
    """Asymmetric numeral systems: an entropy code, which suits patches."""

    name: ClassVar[str] = "nvcomp_ans/1"
    algorithm: ClassVar[str] = "ANS"


def _nvcomp() -> Any:
    if not torch.cuda.is_available():
        raise RuntimeError(
            "compression by nvCOMP needs a CUDA device, and torch sees none here: use compression='ans' and "
            "transport_device='cpu'. With a device, it also needs pip install \"weight-update[nvcomp]\""
        )
    return optional("nvidia.nvcomp", "nvcomp")


@contextmanager
def _session(algorithm: str, data: torch.Tensor) -> Iterator[tuple[Any, Any, torch.cuda.Stream]]:
    """Yield a codec, ``data`` with the alignment that it requires, and the stream of its own."""
    nvcomp = _nvcomp()
    if data.data_ptr() % _ALIGNMENT:
        data = data.clone()
    with torch.cuda.device(data.device):
        stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
        stream.wait_stream(torch.cuda.current_stream())
        handle = stream.cuda_stream
        with nvcomp.Codec(algorithm=algorithm, device_id=data.device.index, cuda_stream=handle) as codec:
            yield codec, nvcomp.as_array(data, cuda_stream=handle), stream
