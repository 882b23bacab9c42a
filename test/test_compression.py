"""The compressions keep their contract; forged data; names that are not known; packages that are missing."""

from __future__ import annotations

import multiprocessing
import os
import struct
import tracemalloc

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from interpreters import run_python
from marks import slow

from benchmarks.compression import CODECS as MEASURED
from benchmarks.compression import KINDS, measure, row
from weight_update.compression import (
    AnsCompression,
    Compression,
    Lz4Compression,
    NoCompression,
    ZstdCompression,
    decompressor_for,
    pack,
    register_compression,
    resolve_compression,
)
from weight_update.errors import FormatError
from weight_update.testing import CompressionContract

lz4_block = pytest.importorskip("lz4.block", reason="needs the extra lz4")
zstandard = pytest.importorskip("zstandard", reason="needs the extra zstd")

MIB = 1 << 20


def tensor(data: bytes) -> torch.Tensor:
    return torch.frombuffer(bytearray(data), dtype=torch.uint8) if data else torch.empty(0, dtype=torch.uint8)


def pieces(*parts: bytes) -> torch.Tensor:
    return tensor(struct.pack(f"<{len(parts)}I", *map(len, parts)) + b"".join(parts))


class TestNoCompression(CompressionContract):
    def make_compression(self) -> Compression:
        return NoCompression()

    def test_nothing_is_copied(self) -> None:
        data = self.noise(100)
        assert NoCompression().compress(data) is data
        assert NoCompression.decompress(data, 100) is data


class TestLz4Compression(CompressionContract):
    def make_compression(self) -> Compression:
        return Lz4Compression()


class TestLz4Accelerated(CompressionContract):
    def make_compression(self) -> Compression:
        return Lz4Compression(acceleration=8)

    def test_compresses_less(self) -> None:
        data = self.few_values(MIB)
        sizes = [Lz4Compression(level).compress(data).numel() for level in (1, 8)]
        assert sizes[0] < sizes[1]


class TestAnsCompression(CompressionContract):
    def make_compression(self) -> Compression:
        return AnsCompression()


@pytest.mark.slow  # internal/test_ans.py compares both loops
@pytest.mark.usefixtures("numpy_loops")
class TestAnsCompressionWithoutCompiledLoops(CompressionContract):
    def make_compression(self) -> Compression:
        return AnsCompression()


class TestZstdCompression(CompressionContract):
    def make_compression(self) -> Compression:
        return ZstdCompression()


class TestZstdFast(CompressionContract):
    def make_compression(self) -> Compression:
        return ZstdCompression(level=-3)


class TestZstdSmall(CompressionContract):
    def make_compression(self) -> Compression:
        return ZstdCompression(level=6)


CODECS = [NoCompression, Lz4Compression, ZstdCompression, AnsCompression]


@pytest.mark.parametrize("codec", CODECS)
@given(data=st.binary(max_size=200), nbytes=st.integers(-3, 3 * MIB))
def test_random_bytes(codec, data, nbytes):
    try:
        assert codec.decompress(tensor(data), nbytes).numel() == nbytes
    except FormatError:
        return


@pytest.mark.parametrize("codec", CODECS)
@given(piece=st.binary(max_size=200), nbytes=st.integers(1, 2000))
def test_random_piece(codec, piece, nbytes):
    try:
        assert codec.decompress(pieces(piece), nbytes).numel() == nbytes
    except FormatError:
        return


@pytest.mark.parametrize("codec", CODECS)
@given(data=st.binary(max_size=3000), cut=st.integers(1, 3000))
def test_truncated(codec, data, cut):
    packed = codec().compress(tensor(data))
    assert codec.decompress(packed, len(data)).numpy().tobytes() == data
    if packed.numel():
        with pytest.raises(FormatError):
            codec.decompress(packed[: -min(cut, packed.numel())], len(data))


@pytest.mark.parametrize("codec", CODECS)
@given(data=st.binary(min_size=1, max_size=300), change=st.data())
def test_changed(codec, data, change):
    packed = codec().compress(tensor(data))
    packed = packed.clone()
    place = change.draw(st.integers(0, packed.numel() - 1))
    packed[place] ^= change.draw(st.integers(1, 255))
    nbytes = len(data) + change.draw(st.integers(-2, 2))
    try:
        assert codec.decompress(packed, nbytes).numel() == nbytes
    except FormatError:
        return


def test_layout_is_as_documented() -> None:
    data = b"abcd" * (MIB // 4) + b"abcd" * 1000 + bytes(range(16))
    by_hand = pieces(
        lz4_block.compress(data[:MIB], store_size=False), lz4_block.compress(data[MIB:], store_size=False)
    )
    assert torch.equal(Lz4Compression().compress(tensor(data)), by_hand)
    assert Lz4Compression.decompress(by_hand, len(data)).numpy().tobytes() == data
    frames = pieces(*(zstandard.ZstdCompressor().compress(part) for part in (data[:MIB], data[MIB:])))
    assert ZstdCompression.decompress(frames, len(data)).numpy().tobytes() == data


def test_a_piece_that_does_not_shrink_stands_as_it_is() -> None:
    noise = torch.randint(256, (MIB + 10,), dtype=torch.uint8)
    for codec in (Lz4Compression(), ZstdCompression(), AnsCompression()):
        packed = codec.compress(noise)
        assert packed.numel() == noise.numel() + 8
        assert torch.equal(packed[8:], noise)


BOMB = bytes(64 << 20)


@pytest.mark.parametrize(
    ("codec", "bomb"),
    [
        (Lz4Compression, lambda: lz4_block.compress(BOMB, store_size=False)),
        (ZstdCompression, lambda: zstandard.ZstdCompressor().compress(BOMB)),
        (ZstdCompression, lambda: zstandard.ZstdCompressor(write_content_size=False).compress(BOMB)),
        # A frame that says 1000 bytes and has more in it.
        (ZstdCompression, lambda: b"\x28\xb5\x2f\xfd\x60\xe8\x02" + b"\x03\x00\x10" + b"\0" * 8),
        # One that says 2**62 bytes.
        (ZstdCompression, lambda: b"\x28\xb5\x2f\xfd\xe0" + b"\0" * 7 + b"\x40" + b"\x02\x00\x10\0"),
    ],
    ids=["lz4", "zstd", "size unknown", "size too small", "size too large"],
)
def test_bomb_uses_no_memory(codec, bomb):
    packed = pieces(bomb())
    tracemalloc.start()
    with pytest.raises(FormatError):
        codec.decompress(packed, 1000)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < MIB // 4


def test_tiny_data_cannot_claim_much() -> None:
    with pytest.raises(FormatError, match="too few for the block table"):
        ZstdCompression.decompress(tensor(b"12345678"), 1 << 45)


def test_pack_looks_at_a_sample_first() -> None:
    class Counting(ZstdCompression):
        def compress(self, data: torch.Tensor) -> torch.Tensor:
            sizes.append(data.numel())
            return super().compress(data)

    sizes: list[int] = []
    data = torch.randint(256, (4 * MIB,), dtype=torch.uint8)
    assert pack(Counting(), data)[0] == "none/1"
    assert sum(sizes) < MIB / 16
    data[: len(data) // 2 + MIB] = 7  # start and middle shrink
    assert pack(Counting(), data)[0] == "zstd/1"
    assert sizes[-1] == 4 * MIB


def test_pack_gives_the_data_back_when_the_sample_misled() -> None:
    data = torch.randint(256, (1000,), dtype=torch.uint8)
    name, packed = pack(Lz4Compression(), data)
    assert name == "none/1"
    assert packed is data


@pytest.mark.parametrize("codec", [Lz4Compression, ZstdCompression, AnsCompression])
def test_threads_change_no_byte(codec):
    data = torch.randint(40, (17 * MIB + 1,), dtype=torch.uint8)
    packed = codec(threads=1).compress(data)
    for threads in (2, 3, 4, 50):
        assert torch.equal(codec(threads=threads).compress(data), packed)


def test_a_forked_child_compresses_too() -> None:
    data = torch.randint(40, (9 * MIB,), dtype=torch.uint8)
    packed = ZstdCompression().compress(data)
    child = multiprocessing.get_context("fork").Process(target=_compress_and_compare, args=(data, packed))
    child.start()
    child.join(30)
    assert child.exitcode == 0


def _compress_and_compare(data: torch.Tensor, packed: torch.Tensor) -> None:
    again = ZstdCompression().compress(data)
    same = again.numpy().tobytes() == packed.numpy().tobytes()
    whole = ZstdCompression.decompress(packed, data.numel())
    os._exit(0 if same and whole.numpy().tobytes() == data.numpy().tobytes() else 1)


@pytest.mark.parametrize(
    ("codec", "option", "values"),
    [
        (Lz4Compression, "acceleration", [0, 1.5, None]),
        (ZstdCompression, "level", [23, -8, 1.0, "3"]),
        *((codec, "threads", [0, 1.5, "2"]) for codec in (AnsCompression, Lz4Compression, ZstdCompression)),
    ],
)
def test_option_out_of_range(codec, option, values):
    for value in values:
        with pytest.raises(ValueError, match=rf"{option} is an integer .*, not {value!r}"):
            codec(**{option: value})


def test_unknown_name_lists_the_known_ones() -> None:
    with pytest.raises(ValueError, match=r"unknown compression 'zst' \(known compressions: .*lz4, .*zstd"):
        resolve_compression("zst")


def test_unknown_name_on_the_wire() -> None:
    with pytest.raises(FormatError, match=r"unknown compression 'zstd/9' \(known: .*zstd/1"):
        decompressor_for("zstd/9")


def test_own_compression_is_found_by_both_ends() -> None:
    @register_compression
    class Own(NoCompression):
        name = "own/7"

    assert isinstance(resolve_compression("own"), Own)
    assert decompressor_for("own/7") is Own


@pytest.mark.skipif(torch.cuda.is_available(), reason="for machines without CUDA")
def test_nvcomp_without_a_device_says_what_it_needs() -> None:
    with pytest.raises(RuntimeError, match=r"CUDA device.*weight-update\[nvcomp\]"):
        resolve_compression("nvcomp_lz4")


@pytest.mark.parametrize(("label", "module"), [slow("zstd", "zstandard"), ("lz4", "lz4")])
def test_missing_package_names_the_extra(label, module):
    program = f"""
import sys
sys.modules[{module!r}] = None
import torch, weight_update.testing
from weight_update.compression import decompressor_for, resolve_compression
packed = torch.tensor([5, 0, 0, 0, 1, 2, 3, 4, 5], dtype=torch.uint8)
for use in (lambda: resolve_compression({label!r}),
            lambda: decompressor_for("{label}/1").decompress(packed, 6)):
    try:
        use()
    except ImportError as error:
        print(error)
"""
    done = run_python("-c", program, timeout=60.0)
    lines = done.stdout.splitlines()
    assert len(lines) == 2, done.stdout + done.stderr
    assert all(f'pip install "weight-update[{label}]"' in line for line in lines)


@pytest.mark.parametrize("kind", KINDS)
def test_benchmark_measures_every_compression(kind):
    data = torch.from_numpy(KINDS[kind](100_000, np.random.default_rng(0)))
    found = measure(data, turns=2)
    assert set(found) == set(MEASURED)
    for name, one in found.items():
        cells = row(kind, name, data.numel(), one)
        assert float(str(cells[2])) == pytest.approx(data.numel() / one.packed_bytes, abs=0.006)
        assert (cells[-1] == "never") == (one.packed_bytes >= data.numel())


class Scratch(NoCompression):
    """A compression whose results lie in one buffer."""

    memory = torch.empty(1 << 20, dtype=torch.uint8)

    @classmethod
    def decompress(cls, data: torch.Tensor, nbytes: int) -> torch.Tensor:
        return cls.memory[:nbytes].copy_(super().decompress(data, nbytes))


def test_the_contract_finds_results_that_do_not_last(monkeypatch: pytest.MonkeyPatch) -> None:
    contract = CompressionContract()
    monkeypatch.setattr(contract, "make_compression", Scratch)
    with pytest.raises(AssertionError, match="changed an earlier result"):
        contract.test_results_are_kept_apart()
