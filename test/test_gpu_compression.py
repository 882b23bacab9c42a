"""Compression on the GPU; needs torch, nvCOMP and a GPU."""

from __future__ import annotations

import pytest
import torch

from weight_update.compression import (
    Compression,
    NoCompression,
    NvcompAnsCompression,
    NvcompLz4Compression,
)
from weight_update.testing import CompressionContract

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


class TestNvcompLz4Compression(CompressionContract):
    compression: type[Compression] = NvcompLz4Compression

    def make_compression(self) -> Compression:
        pytest.importorskip("nvidia.nvcomp", reason="needs the extra nvcomp")
        return self.compression()

    def few_values(self, size: int) -> torch.Tensor:
        """Runs, which are all that LZ4 finds on a GPU for certain."""
        return super().few_values(size).repeat_interleave(8)[:size]

    def test_work_before_and_after_on_another_stream(self) -> None:
        compression = self.make_compression()
        with torch.cuda.stream(torch.cuda.Stream()):
            for i in range(20):
                data = torch.arange(1 << 20, device="cuda").remainder(i + 2).to(torch.uint8)
                result = compression.decompress(compression.compress(data), data.numel())
                assert torch.equal(result.clone(), data)

    def test_memory_of_the_host(self) -> None:
        with pytest.raises(ValueError, match='transport_device="cuda"'):
            self.make_compression().compress(torch.zeros(8, dtype=torch.uint8))


class TestNvcompAnsCompression(TestNvcompLz4Compression):
    compression = NvcompAnsCompression


class TestNoCompressionOnTheDevice(CompressionContract):
    def make_compression(self) -> Compression:
        return NoCompression()

    def device(self) -> str:
        return "cuda"
