"""Random patches and what they change, for the tests of the patch format."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import torch
from hypothesis import strategies as st

from weight_update.compression import resolve_compression
from weight_update.encodings.patch.changes import ByteRange, Changes, Sparse
from weight_update.encodings.patch.format import Patch, PatchOptions, decode_patch, encode_patch
from weight_update.wire.schema import BITS, WeightSchema

DTYPES = [
    torch.bool,
    torch.uint8,
    torch.float8_e4m3fn,
    torch.float16,
    torch.bfloat16,
    torch.float32,
    torch.complex32,
    torch.float64,
    torch.complex64,
    torch.complex128,
]


def lend(nbytes: int) -> torch.Tensor:
    return torch.full((nbytes + 13,), 0xA5, dtype=torch.uint8)


def options(
    layout: str = "flat", delta: bool = True, values: str = "raw", codec: str = "none"
) -> PatchOptions:
    compression = resolve_compression(codec)
    return PatchOptions(layout, delta, values == "relative", compression)  # type: ignore[arg-type]


ALL_OPTIONS = [
    options(layout, delta, values, codec)
    for layout in ("flat", "coo")
    for delta in (True, False)
    for values in ("raw", "relative")
    for codec in ("none", "zstd", "ans")
]
any_options = st.sampled_from(ALL_OPTIONS)
shapes = st.one_of(
    st.lists(st.integers(0, 5), max_size=5),
    st.lists(st.sampled_from([1, 3, 300]), min_size=1, max_size=2),
    st.just([70_000]),
)


AS_ON_A_GPU = torch.device("cpu:0")
"""The CPU, where the operators for a GPU run, too; it does not equal ``torch.device("cpu")``."""


@dataclasses.dataclass
class Case:
    schema: WeightSchema
    old: torch.Tensor
    new: torch.Tensor
    changes: Changes

    def of_kind(self, relative: bool) -> Changes:
        """Return the changes with the values that a scan finds for this option."""
        sparse = []
        for part in self.changes.sparse:
            before = self.old.view(BITS[part.width])[part.positions]
            bits = part.values + before if part.relative else part.values
            sparse.append(
                Sparse.of(part.width, part.positions, bits - before if relative else bits, relative)
            )
        return dataclasses.replace(self.changes, sparse=tuple(sparse))

    def encode(self, chosen: PatchOptions) -> torch.Tensor:
        return encode_patch(self.of_kind(chosen.relative), self.schema, 6, 7, chosen, lend)

    def applied(self, payload: torch.Tensor) -> Patch:
        patch = decode_patch(payload, self.schema)
        flat = self.old.clone()
        patch.write(flat)
        assert torch.equal(flat, self.new)
        for one in (patch, decode_patch(payload, self.schema, AS_ON_A_GPU)):
            there = self.old.clone()
            one._write_on_device(there)
            assert torch.equal(there, self.new)
        return patch


def noise(nbytes: int, rng: np.random.Generator) -> torch.Tensor:
    return torch.from_numpy(rng.integers(0, 256, nbytes, np.uint8))


def places(schema: WeightSchema, rng: np.random.Generator, density: float) -> dict[int, list[Any]]:
    found: dict[int, list[Any]] = {}
    for meta in sorted((schema.tensors[i] for i in schema.distinct), key=lambda meta: meta.offset):
        width = min(meta.dtype.itemsize, 8)
        inside = np.flatnonzero(rng.random(meta.nbytes // width) < density)
        if inside.size and rng.random() < 0.8:
            found.setdefault(width, []).append(inside + meta.offset // width)
        elif meta.nbytes:
            start, end = sorted(rng.integers(0, meta.nbytes + 1, 2).tolist())
            found.setdefault(0, []).extend([(meta.offset + start, end - start)] if end > start else [])
    return found


def make_case(
    schema: WeightSchema, rng: np.random.Generator, density: float, largest_step: int | None = None
) -> Case:
    old = noise(schema.nbytes, rng)
    found = places(schema, rng, density)
    ranges = tuple(ByteRange(start, noise(size, rng)) for start, size in found.pop(0, []))
    parts = []
    for width, pieces in sorted(found.items()):
        positions = torch.from_numpy(np.concatenate(pieces))
        before = old.view(BITS[width])[positions]
        values = noise(width * positions.numel(), rng).view(BITS[width])
        if largest_step is not None:
            steps = rng.integers(1, largest_step + 1, positions.numel()) * rng.choice(
                [-1, 1], positions.numel()
            )
            values = before + torch.from_numpy(steps).to(BITS[width])
        parts.append(Sparse.of(width, positions, values))
    changes = Changes(tuple(parts), ranges)
    new = old.clone()
    changes.write(new)
    return Case(schema, old, new, changes)


@st.composite
def cases(draw: st.DrawFn) -> Case:
    kinds = draw(st.lists(st.tuples(shapes, st.sampled_from(DTYPES)), max_size=6))
    tensors = {str(i): torch.empty(shape, dtype=dtype) for i, (shape, dtype) in enumerate(kinds)}
    if tensors and draw(st.booleans()):
        tensors["tied"] = tensors["0"]
    rng = np.random.default_rng(draw(st.integers(0, 1 << 32)))
    density = draw(st.sampled_from([1.0, 0.5, 0.05, 0.002, 0.0001]))
    return make_case(WeightSchema.of(tensors), rng, density, draw(st.sampled_from([None, 1, 4, 300])))


def bf16_case(elements: int, density: float, largest_step: int | None = None) -> Case:
    """A bf16 model of four matrices."""
    schema = WeightSchema.of(
        {str(i): torch.empty(elements // 4096, 1024, dtype=torch.bfloat16) for i in range(4)}
    )
    rng = np.random.default_rng(3)
    while True:
        case = make_case(schema, rng, density, largest_step)
        if not case.changes.ranges:
            return case
