"""Patches put together by torch operators have the bytes of those that numpy puts together."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from fuzz import examples
from hypothesis import given
from patch_cases import (
    ALL_OPTIONS,
    AS_ON_A_GPU,
    Case,
    any_options,
    bf16_case,
    cases,
    lend,
    make_case,
    options,
)

from weight_update.compression import Compression
from weight_update.encodings.patch import arrays, gaps_cuda
from weight_update.encodings.patch.arrays import ArrayReader, ArrayWriter
from weight_update.encodings.patch.changes import Changes, Segment, Sparse
from weight_update.encodings.patch.encode_cuda import add_on_device
from weight_update.encodings.patch.format import PatchOptions, decode_patch, encode_patch
from weight_update.errors import FormatError
from weight_update.wire.schema import WeightSchema

on_gpu = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
UNCOMPRESSED = [chosen for chosen in ALL_OPTIONS if chosen.compression.label == "none"]


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=on_gpu)])
def device(request: pytest.FixtureRequest) -> torch.device:
    return torch.device(request.param)


def check(case: Case, chosen: PatchOptions, device: torch.device) -> None:
    changes = case.of_kind(chosen.relative).to(device)
    payload = encode_patch(changes, case.schema, 6, 7, chosen, lend, add_on_device)
    assert torch.equal(payload, case.encode(chosen))


@given(cases(), any_options)
@examples(200)
def test_any_model(case: Case, chosen: PatchOptions) -> None:
    check(case, chosen, torch.device("cpu"))


@pytest.mark.parametrize("chosen", UNCOMPRESSED)
@pytest.mark.parametrize(("density", "step"), [(0.0001, 1), (0.01, 4), (0.3, 300), (0.01, None)])
def test_a_model_in_bfloat16(
    density: float, step: int | None, chosen: PatchOptions, device: torch.device
) -> None:
    check(bf16_case(1 << 18, density, step), chosen, device)


@pytest.mark.parametrize("chosen", UNCOMPRESSED)
def test_every_width_and_runs(chosen: PatchOptions, device: torch.device) -> None:
    kinds = (torch.uint8, torch.float16, torch.float32, torch.complex128)
    schema = WeightSchema.of({str(kind): torch.empty(70, 300, dtype=kind) for kind in kinds})
    for seed in range(8):
        check(make_case(schema, np.random.default_rng(seed), 0.02, 3), chosen, device)


@pytest.mark.parametrize("gap", [254, 255, 510, 65_534, 65_535, 131_070, (1 << 32) - 2, (1 << 32) - 1])
@pytest.mark.parametrize("count", [1, 2, 300])
def test_gaps_around_the_escapes(gap: int, count: int, device: torch.device) -> None:
    schema = WeightSchema.of({"a": torch.empty((gap + 1) * 301, dtype=torch.bool, device="meta")})
    positions = torch.cat([torch.arange(300), 300 + torch.arange(count) * (gap + 1)])
    changes = Changes((Sparse.of(1, positions, torch.ones(300 + count, dtype=torch.uint8)),))
    expected = encode_patch(changes, schema, 0, 1, options(), lend)
    payload = encode_patch(changes.to(device), schema, 0, 1, options(), lend, add_on_device)
    assert torch.equal(payload, expected)


@pytest.mark.parametrize("size", [1, 2, 7])
@pytest.mark.parametrize("dtype", [torch.uint8, torch.bfloat16])
def test_positions_are_decoded_part_by_part(
    dtype: torch.dtype, size: int, monkeypatch: pytest.MonkeyPatch, device: torch.device
) -> None:
    monkeypatch.setattr(gaps_cuda, "PART", size)
    there = AS_ON_A_GPU if device.type == "cpu" else device
    schema = WeightSchema.of({"a": torch.empty(100_000, dtype=dtype)})
    for seed in range(5):
        case = make_case(schema, np.random.default_rng(seed), 0.0005 * seed, 3)
        payload = case.encode(options(values="relative"))
        patch = decode_patch(payload, schema, there)
        for part, expected in zip(patch.sparse, case.changes.sparse, strict=True):
            assert torch.equal(part.positions.cpu(), expected.positions)
        flat = case.old.to(device)
        patch._write_on_device(flat)
        assert torch.equal(flat.cpu(), case.new)


@pytest.mark.parametrize(("gap", "size"), [(100, 1), (4000, 1), (5000, 4), (1 << 40, 4)])
def test_positions_far_apart_take_little_memory(gap: int, size: int, device: torch.device) -> None:
    positions = 7 + torch.arange(1, 4, device=device) * gap
    gaps = gaps_cuda.DeviceGaps.of(7, positions)
    assert gaps.units.itemsize == size
    assert gaps.units.nbytes < 1 << 14
    assert gaps.last == 7 + 3 * gap
    assert torch.equal(gaps.positions, positions)
    assert torch.equal(torch.from_numpy(gaps.cpu().positions), positions.cpu())


def test_memory_that_is_overwritten_while_it_is_read_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """Units that were invalid on the GPU are valid when the CPU looks at them to say what is wrong."""
    monkeypatch.setattr(gaps_cuda, "join_units", lambda units, count, limit: np.arange(count))
    with pytest.raises(FormatError, match="was overwritten while the patch was read"):
        gaps_cuda.read_units(np.array([3, 255], np.uint8), 2, 1000, AS_ON_A_GPU)


class AsOnAGpu(torch.Tensor):
    """A tensor on the CPU that says it is on a GPU."""

    is_cpu = property(lambda self: False)  # type: ignore[assignment]
    is_cuda = property(lambda self: True)  # type: ignore[assignment]


def test_arrays_on_the_cpu_are_not_copied_to_a_gpu_that_has_others(monkeypatch: pytest.MonkeyPatch) -> None:
    """A scan on a GPU leaves large ranges on the CPU."""
    ours, theirs = torch.arange(100, dtype=torch.uint8), torch.arange(100, 180, dtype=torch.uint8)
    expected, out = ArrayWriter(options().compression), ArrayWriter(options().compression)
    for writer, units in ((expected, ours), (out, ours.as_subclass(AsOnAGpu))):
        writer.put(units, 1)
        writer.join([theirs.numpy(), theirs.numpy()])
    before = expected.write(b"head", lend)
    monkeypatch.delattr(torch, "cat")
    assert torch.equal(out.write(b"head", lend), before)


class OnAGpu(Compression):
    """A compression of anything to nothing, which says that it works on a GPU."""

    name = "gpu/1"
    device = "cuda"

    def compress(self, data: torch.Tensor) -> torch.Tensor:
        return data[:0]

    @classmethod
    def decompress(cls, data: torch.Tensor, nbytes: int) -> torch.Tensor:
        return torch.zeros(nbytes, dtype=torch.uint8)

    @classmethod
    def check(cls, data: torch.Tensor, nbytes: int = 0) -> None:
        pass


def test_a_compression_works_on_the_gpu_of_the_weights(monkeypatch: pytest.MonkeyPatch) -> None:
    """The current GPU of a thread that receives is the first one, whatever GPU the worker uses."""
    asked: list[object] = []

    def to(data: torch.Tensor, device: object) -> torch.Tensor:
        asked.append(device)
        return data

    gpu = torch.device("cuda", 1)
    monkeypatch.setattr(torch.Tensor, "to", to)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(arrays, "decompressor_for", lambda name: OnAGpu)
    writer = ArrayWriter(OnAGpu(), gpu)
    writer.put(torch.arange(100, dtype=torch.uint8), 1)
    assert ArrayReader(writer.write(b"", lend), 0, 1, gpu).exactly(100).size == 100
    assert asked == [gpu, gpu]


def test_touched_tensors_are_found_without_copying_positions() -> None:
    schema = WeightSchema.of({str(i): torch.empty(50 + i, dtype=torch.bfloat16) for i in range(9)})
    positions = torch.tensor([schema.tensors[i].offset // 2 + i for i in (1, 4, 8)])
    for here in (positions, positions.as_subclass(AsOnAGpu)):
        segment = Segment(gaps_cuda.DeviceGaps.of(0, here), torch.ones(3, dtype=torch.int16))
        changes = Changes((Sparse(2, (segment,)),))
        assert changes.touched(schema) == [1, 4, 8]
