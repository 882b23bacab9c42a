"""The contract of every compression."""

from __future__ import annotations

import pickle
import random
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from weight_update.compression import (
    Compression,
    NoCompression,
    decompressor_for,
    pack,
    resolve_compression,
)
from weight_update.errors import FormatError

MIB = 1 << 20


class CompressionContract:
    """Tests of one compression; subclass it and write :meth:`make_compression`."""

    def make_compression(self) -> Compression:
        """Return a new compression."""
        raise NotImplementedError(
            f"write {type(self).__name__}.make_compression(self): it returns a new compression"
        )

    def device(self) -> str:
        """Return the device of its data."""
        place = self.make_compression().device
        return "cpu" if place == "any" else place

    def few_values(self, size: int) -> torch.Tensor:
        """Return bytes that shrink by half or more."""
        return self.noise(size) & 3

    def noise(self, size: int) -> torch.Tensor:
        """Return bytes that do not shrink."""
        generator = torch.Generator().manual_seed(size)
        data = torch.randint(256, (size,), dtype=torch.uint8, generator=generator)
        return data.to(self.device())

    def make_checked(self) -> Compression:
        """Return the compression, or skip the test if its decompressor takes only what it compressed."""
        compression = self.make_compression()
        if compression.device == "cuda":
            pytest.skip("a decompressor on the GPU may need valid data; frames are verified before")
        return compression

    @pytest.mark.parametrize(
        "size", [0, 1, 2, 3, 1000, 65536, MIB - 1, MIB, MIB + 1, 2 * MIB, 3 * MIB + 12345]
    )
    def test_round_trip(self, size: int) -> None:
        """The same bytes come back, whatever they are, in memory that may be written to."""
        compression = self.make_compression()
        for data in (self.few_values(size), self.noise(size), torch.zeros_like(self.noise(size))):
            before = data.clone()
            packed = compression.compress(data)
            assert (packed.dtype, packed.dim(), packed.device) == (torch.uint8, 1, data.device)
            result = compression.decompress(packed, size)
            assert torch.equal(result, before)
            assert torch.equal(data, before)
            assert (result.dtype, result.device) == (torch.uint8, data.device)
            result.fill_(1)

    def test_unaligned_slices(self) -> None:
        """Data and compressed data may start anywhere in a larger buffer."""
        compression = self.make_compression()
        data = self.few_values(5003)[3:]
        packed = compression.compress(data)
        shifted = torch.cat([packed[:1], packed])[1:]
        assert torch.equal(compression.decompress(shifted, 5000), data)

    def test_it_compresses(self) -> None:
        """Compressible data shrinks; other data does not grow by much."""
        compression = self.make_compression()
        if isinstance(compression, NoCompression):
            return
        assert compression.compress(self.few_values(MIB)).numel() < 0.6 * MIB
        room = 1.05 if compression.device == "cuda" else 1.02
        assert compression.compress(self.noise(MIB)).numel() < room * MIB + 4096

    @pytest.mark.parametrize("size", [1, 1000, 2 * MIB + 5])
    def test_wrong_size(self, size: int) -> None:
        """Another number of bytes than were compressed is a FormatError."""
        compression = self.make_compression()
        packed = compression.compress(self.few_values(size))
        for wrong in (-1, 0, size - 1, size + 1, 2 * size, size + MIB, 1 << 50, 1 << 90):
            if wrong != size:
                with pytest.raises(FormatError):
                    compression.decompress(packed, wrong)

    @pytest.mark.parametrize("size", [1000, MIB + 70000])
    def test_cut_or_extended(self, size: int) -> None:
        """Compressed data of which some is missing, or with something behind it, is a FormatError."""
        compression = self.make_checked()
        packed = compression.compress(self.few_values(size))
        cuts = {0, 1, 3, 4, 7, 8, packed.numel() // 2, packed.numel() - 1}
        for wrong in (*(packed[:cut] for cut in cuts), torch.cat([packed, packed[:1]])):
            with pytest.raises(FormatError):
                compression.decompress(wrong, size)

    def test_changed_bytes(self) -> None:
        """Data with wrong bytes in it gives as many bytes as announced, or a FormatError; nothing else."""
        compression, choose = self.make_checked(), random.Random(0)
        packed = compression.compress(self.few_values(3000))
        for _ in range(300):
            wrong = packed.clone()
            wrong[choose.randrange(len(wrong))] = choose.randrange(256)
            try:
                assert compression.decompress(wrong, 3000).numel() == 3000
            except FormatError:
                continue

    def test_wrong_tensors(self) -> None:
        """Other dtypes, dimensions and strides are a ValueError, both ways."""
        compression, data = self.make_compression(), self.noise(16)
        for wrong in (data.view(torch.int8), data.view(4, 4), data[::2]):
            with pytest.raises(ValueError, match="1-D uint8"):
                compression.compress(wrong)
            with pytest.raises(ValueError, match="1-D uint8"):
                compression.decompress(wrong, 16)

    def test_memory_of_another_device(self) -> None:
        """Data that lies elsewhere is an error that says what to set."""
        compression = self.make_compression()
        if compression.device == "any":
            return
        elsewhere = torch.empty(8, dtype=torch.uint8, device="meta")
        expected = f'transport_device="{compression.device}"'
        with pytest.raises(ValueError, match=expected):
            compression.compress(elsewhere)
        with pytest.raises(ValueError, match=expected):
            compression.decompress(elsewhere, 8)

    def test_results_are_kept_apart(self) -> None:
        """A later call does not change the result of an earlier one, in memory that is used again."""
        compression = self.make_compression()
        many = [self.few_values(5000 + i) for i in range(10)]
        packed = [compression.compress(data) for data in many]
        found = [compression.decompress(one, data.numel()) for one, data in zip(packed, many, strict=True)]
        for data, result in zip(many, found, strict=True):
            assert torch.equal(data, result), "a later compress() or decompress() changed an earlier result"

    def test_many_threads(self) -> None:
        """One compression may be used by several threads at once."""
        compression = self.make_compression()
        many = [self.few_values(100_000 + i) for i in range(8)]

        def there_and_back(data: torch.Tensor) -> torch.Tensor:
            return compression.decompress(compression.compress(data), data.numel())

        with ThreadPoolExecutor(4) as pool:
            for data, result in zip(many, pool.map(there_and_back, many), strict=True):
                assert torch.equal(data, result)

    def test_pack(self) -> None:
        """Data is compressed if that pays and returned unchanged if not; the name says which."""
        compression = self.make_compression()
        for size in (0, 10, 5000, 2 * MIB):
            for data in (self.few_values(size), self.noise(size)):
                name, packed = pack(compression, data)
                assert name in (compression.name, NoCompression.name)
                assert (packed is data) == (name == NoCompression.name)
                assert packed.numel() <= size
                assert torch.equal(decompressor_for(name).decompress(packed, size), data)
        assert pack(compression, self.noise(2 * MIB))[0] == NoCompression.name
        assert pack(compression, self.few_values(2 * MIB))[0] == compression.name

    def test_is_known_by_name(self) -> None:
        """The compression is found by its short name and by its name on the wire."""
        compression = self.make_compression()
        assert type(resolve_compression(compression.label)) is type(compression)
        assert decompressor_for(compression.name) is type(compression)
        assert compression.name.startswith(compression.label + "/")
        assert resolve_compression(compression) is compression

    def test_pickles(self) -> None:
        """It travels to workers with the scheme, its options too."""
        compression = self.make_compression()
        assert pickle.loads(pickle.dumps(compression)) == compression
