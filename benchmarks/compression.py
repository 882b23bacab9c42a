"""Ratio and speed of the compressions, on the kinds of data that patches consist of."""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

import numpy as np
import torch

from benchmarks.options import Options
from benchmarks.report import Figure, Table, machine
from weight_update.compression import AnsCompression, Compression, Lz4Compression, ZstdCompression

QUICK = "4 MB, one round"

CODECS: dict[str, Compression] = {
    "lz4, one thread": Lz4Compression(threads=1),
    "lz4": Lz4Compression(),
    "lz4, acceleration 8": Lz4Compression(acceleration=8),
    "ans, one thread": AnsCompression(threads=1),
    "ans": AnsCompression(),
    "zstd, level -1": ZstdCompression(level=-1),
    "zstd, level 1, one thread": ZstdCompression(level=1, threads=1),
    "zstd, level 1": ZstdCompression(level=1),
    "zstd, level 3": ZstdCompression(level=3),
    "zstd, level 6": ZstdCompression(level=6),
}


def gaps(nbytes: int, random: np.random.Generator) -> np.ndarray:
    """Return distances between random positions, 1 % of all, as uint8."""
    return np.minimum(random.geometric(0.01, nbytes) - 1, 255).astype(np.uint8)


def byte_planes(nbytes: int, random: np.random.Generator) -> np.ndarray:
    """Return steps of 16-bit patterns, zigzag coded: first all low bytes, then all high bytes.

    The steps are normally distributed with a deviation of 2.
    """
    steps = np.round(random.normal(0, 2, nbytes // 2)).astype(np.int16)
    zigzag = ((steps << 1) ^ (steps >> 15)).astype("<u2").view(np.uint8)
    return np.concatenate([zigzag[0::2], zigzag[1::2]])


def noise(nbytes: int, random: np.random.Generator) -> np.ndarray:
    """Return random bytes."""
    return random.integers(0, 256, nbytes, dtype=np.uint8)


KINDS: dict[str, Callable[[int, np.random.Generator], np.ndarray]] = {
    "gaps of 1 %": gaps,
    "planes of steps": byte_planes,
    "random": noise,
}


@dataclass
class Measured:
    """The figures of one compression: MB of original data a second, and the compressed length."""

    packed_bytes: int = 0
    compress: list[float] = field(default_factory=list)
    decompress: list[float] = field(default_factory=list)


def measure(data: torch.Tensor, turns: int) -> dict[str, Measured]:
    """Measure all compressions in turns, so that a disturbance of the machine affects all of them."""
    found = {name: Measured() for name in CODECS}
    for _ in range(turns):
        for name, codec in CODECS.items():
            start = time.perf_counter()
            packed = codec.compress(data)
            middle = time.perf_counter()
            result = codec.decompress(packed, data.numel())
            end = time.perf_counter()
            assert torch.equal(result, data), name
            found[name].packed_bytes = packed.numel()
            found[name].compress.append(data.numel() / (middle - start) / 1e6)
            found[name].decompress.append(data.numel() / (end - middle) / 1e6)
    return found


def row(kind: str, name: str, nbytes: int, measured: Measured) -> list[object]:
    """Return the cells of one compression."""
    shrunk = nbytes / measured.packed_bytes
    speeds = [Figure(measured.compress), Figure(measured.decompress)]
    seconds = sum(1 / (speed.median or 1) for speed in speeds)
    pays = f"{(1 - 1 / shrunk) / seconds:.0f}" if shrunk > 1 else "never"
    of_packed = Figure((shrunk,)).cell(more_is_better=True)
    return [kind, name, of_packed, *(speed.cell(digits=0, more_is_better=True) for speed in speeds), pays]


def add_options(known: Options) -> None:
    known.add("--mb", 32, "size of the data in MB", quick=4)
    known.add("--turns", 5, "how often each thing is timed", quick=1)


def facts(options: argparse.Namespace) -> list[str]:
    return machine()


def tables(options: argparse.Namespace) -> Iterator[Table]:
    nbytes, random = options.mb * 1_000_000, np.random.default_rng(0)
    rows = []
    for kind, make in KINDS.items():
        found = measure(torch.from_numpy(make(nbytes, random)), options.turns)
        rows += [row(kind, name, nbytes, one) for name, one in found.items()]
    note = (
        "MB of uncompressed data per second, median (min .. max). Up to 4 threads compress, one "
        "decompresses.\n"
        "Compression pays on links slower than the last column (MB/s), if compressing, sending and\n"
        "decompressing happen one after the other."
    )
    head = ["data", "compression", "ratio", "compress", "decompress", "pays below"]
    yield Table(f"Compression of {options.mb} MB", note, head, rows, names=(0, 1))
