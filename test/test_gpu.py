"""CUDA on either side; needs torch, tensordict and a GPU alone."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import pytest
import torch
from pairs import connect_pair
from torch import nn

from weight_update import (
    BucketEncoding,
    Encoding,
    MemoryWeightSyncScheme,
    PatchEncoding,
    SharedMemWeightSyncScheme,
    WeightStrategy,
    WeightSyncScheme,
)
from weight_update.encodings import DenseEncoding
from weight_update.encodings.dense import copy_tensors
from weight_update.testing import random_bits
from weight_update.wire.memory import pin
from weight_update.wire.schema import DTYPES, WeightSchema

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


def make(device: str, dtype: torch.dtype = torch.float32) -> nn.Module:
    net = nn.Sequential(nn.Linear(64, 128), nn.BatchNorm1d(128), nn.Tanh(), nn.Linear(128, 8))
    return net.to(device=device, dtype=dtype).eval()


@contextmanager
def connected(
    source: nn.Module,
    target: nn.Module,
    kind: type[WeightSyncScheme] = MemoryWeightSyncScheme,
    **options: Any,
) -> Iterator[tuple[WeightSyncScheme, WeightSyncScheme]]:
    with kind(**options) as sender, connect_pair(sender, source, target) as receiver:
        yield sender, receiver


@torch.no_grad()
def change(model: nn.Module) -> None:
    for parameter in model.parameters():
        parameter.add_(torch.randn_like(parameter))


def assert_same(source: nn.Module, target: nn.Module) -> None:
    for (name, ours), theirs in zip(source.state_dict().items(), target.state_dict().values(), strict=True):
        expected = ours.to(dtype=theirs.dtype).cpu()
        assert torch.equal(expected.view(-1).view(torch.uint8), theirs.cpu().view(-1).view(torch.uint8)), name


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("devices", [("cuda", "cpu"), ("cpu", "cuda"), ("cuda", "cuda")])
def test_weights_are_equal(devices: tuple[str, str], dtype: torch.dtype) -> None:
    source, target = make(devices[0]), make(devices[1], dtype)
    with connected(source, target) as (sender, _):
        for _ in range(3):
            change(source)
            sender.send()
            assert_same(source, target)
            assert next(target.parameters()).device.type == devices[1]


def large(device: str, dtype: torch.dtype = torch.float32) -> nn.Module:
    """32 MB in float32."""
    return nn.Sequential(nn.Linear(2048, 2048), nn.Linear(2048, 2048)).to(device=device, dtype=dtype)


@torch.no_grad()
def change_some(model: nn.Module) -> None:
    for parameter in model.parameters():
        parameter.view(-1)[::50] += 0.25


ENCODINGS: dict[str, Callable[[], Encoding]] = {
    "dense": DenseEncoding,
    "buckets": partial(BucketEncoding, bucket_size=17 << 20),
    "buckets, kept": partial(BucketEncoding, bucket_size=17 << 20, load_instant=False),
    "patch": PatchEncoding,
    "patch, snapshot on the GPU": partial(PatchEncoding, snapshot_device="cuda"),
    "patch, compressed": partial(PatchEncoding, compression="zstd"),
    "patch, compressed by nvCOMP": partial(PatchEncoding, transport_device="cuda", compression="nvcomp_ans"),
    "patch, rows and columns": partial(PatchEncoding, layout="coo", values="relative"),
}


@pytest.mark.parametrize("stable", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kind", [MemoryWeightSyncScheme, SharedMemWeightSyncScheme])
@pytest.mark.parametrize("encoding", ENCODINGS)
def test_every_encoding_through_host_memory(
    encoding: str, kind: type[WeightSyncScheme], dtype: torch.dtype, stable: bool
) -> None:
    if "nvCOMP" in encoding:
        pytest.importorskip("nvidia.nvcomp", reason="needs pip install 'weight-update[nvcomp]'")
    source, target = large("cuda"), large("cuda", dtype)
    strategy = WeightStrategy("state_dict", encoding=ENCODINGS[encoding]())
    with connected(source, target, kind, strategy=strategy, stable_addresses=stable) as (sender, _):
        for _ in range(4):
            change_some(source)
            sender.send()
            assert_same(source, target)
        change(source)
        sender.send()
        assert_same(source, target)


def test_shared_slots_are_pinned_on_both_sides() -> None:
    source, target = large("cuda"), large("cuda")
    with connected(source, target, SharedMemWeightSyncScheme) as (sender, receiver):
        for _ in range(5):
            change(source)
            sender.send()
        assert all(slot.buffer.tensor.is_pinned() for slot in sender._sender._pool._slots)
        slots = receiver._receiver.link._slots._slots.values()
        assert slots
        assert all(slot._read_only.is_pinned() for slot in slots)


def test_memory_that_cannot_be_pinned_changes_nothing() -> None:
    torch.zeros(1, device="cuda")
    memory = torch.arange(32 << 20, dtype=torch.uint8)
    middle = memory[1 << 20 : 2 << 20].clone()
    assert int(torch.cuda.cudart().cudaHostRegister(memory.data_ptr() + (1 << 20), 1 << 20, 0)) == 0
    pin(memory)  # a part of it is pinned already
    assert torch.equal(memory.cuda().cpu()[1 << 20 : 2 << 20], middle)
    assert int(torch.cuda.cudart().cudaHostUnregister(memory.data_ptr() + (1 << 20))) == 0
    memory = torch.arange(32 << 20, dtype=torch.uint8)
    pin(memory)
    assert memory.is_pinned()
    address = memory.data_ptr()
    del memory
    again = torch.empty(32 << 20, dtype=torch.uint8)
    assert again.data_ptr() != address or not again.is_pinned()


def test_a_patch_is_written_after_the_last_forward_pass_has_run() -> None:
    strategy = WeightStrategy("state_dict", encoding="patch")
    source, target = large("cuda"), large("cuda")
    with connected(source, target, strategy=strategy) as (sender, _):
        before = [one.clone() for one in target.parameters()]
        torch.cuda.synchronize()
        with torch.cuda.stream(torch.cuda.Stream()):
            torch.cuda._sleep(1_000_000_000)
            seen = [one.clone() for one in target.parameters()]
        change_some(source)
        sender.send()
        torch.cuda.synchronize()
        assert all(map(torch.equal, seen, before))
        assert_same(source, target)


@pytest.mark.parametrize("shape", [(3000, 2000), (2000, 3000)])
def test_a_copy_to_the_cpu_is_done_on_return(shape: tuple[int, int]) -> None:
    source = torch.ones(3000, 2000, device="cuda")
    target = torch.zeros(shape) if shape == source.shape else torch.zeros(shape).t()
    torch.cuda._sleep(100_000_000)
    copy_tensors([target], [source], "copying")
    assert bool((target == 1).all())


def test_bytes_that_changed_together_are_not_copied_to_the_gpu_again() -> None:
    """Half of the weights change completely, so the scan has their bytes on the CPU."""
    live = [torch.zeros(128 << 20, dtype=torch.uint8, device="cuda") for _ in range(2)]
    schema = WeightSchema.of({str(i): one for i, one in enumerate(live)})
    tracker = PatchEncoding().tracker(schema, None)
    tracker.begin(live)
    live[0] += 1
    live[1][::1000] += 1
    difference = tracker.compare(live)
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    payload = tracker.encode(difference, 0, 1, lambda nbytes: torch.empty(nbytes, dtype=torch.uint8))
    assert payload is not None
    assert torch.cuda.max_memory_allocated() - before < 32 << 20
    flat = torch.zeros(schema.nbytes, dtype=torch.uint8)
    PatchEncoding.read(payload, schema).write(flat)
    assert all(torch.equal(view, one.cpu()) for view, one in zip(schema.views(flat), live, strict=True))


@pytest.mark.parametrize("dtype", DTYPES.values(), ids=DTYPES)
def test_copies_keep_every_bit(dtype: torch.dtype) -> None:
    sources = [random_bits((size,), dtype, size).cuda() for size in (3, 70_000, 100_001)]
    targets = [torch.zeros_like(source) for source in sources]
    copy_tensors(targets, sources, "test")
    for target, source in zip(targets, sources, strict=True):
        assert torch.equal(target.view(torch.uint8), source.view(torch.uint8))


@pytest.mark.parametrize("to", [torch.bfloat16, torch.float16, torch.float8_e4m3fn, torch.complex64])
@pytest.mark.parametrize("of", [torch.float32, torch.bfloat16, torch.float8_e5m2, torch.uint16])
def test_copies_convert_several_dtypes(to: torch.dtype, of: torch.dtype) -> None:
    sources = [torch.arange(50, device="cuda").to(of), torch.arange(50, device="cuda").float()]
    targets = [torch.zeros(50, dtype=to, device="cuda"), torch.zeros(50, dtype=of, device="cuda")]
    copy_tensors(targets, sources, "test")
    assert torch.equal(targets[0].cpu().to(torch.complex64), sources[0].cpu().to(to).to(torch.complex64))
    assert torch.equal(targets[1].cpu().float(), sources[1].cpu().to(of).float())


def test_cuda_graph_replays_new_weights() -> None:
    source, target = make("cuda"), make("cuda")
    with connected(source, target, stable_addresses=True) as (sender, receiver):
        given = torch.randn(4, 64, device="cuda")
        with torch.no_grad():
            receiver.guarded(target)(given)  # takes the hooks off before capture
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                out = target(given)
            change(source)
            sender.send()
            with receiver.hold():
                graph.replay()
                torch.cuda.synchronize()
            torch.testing.assert_close(out, source(given))


def test_no_mixture_on_a_side_stream() -> None:
    source, target = make("cuda"), make("cuda")
    seen: list[torch.Tensor] = []
    stop = threading.Event()

    def compute() -> None:
        with torch.no_grad(), torch.cuda.stream(torch.cuda.Stream()):
            given = torch.ones(4, 64, device="cuda")
            while not stop.is_set():
                seen.append(target(given).clone())
        torch.cuda.synchronize()

    versions: list[torch.Tensor] = []
    with connected(source, target) as (sender, _), torch.no_grad():
        given = torch.ones(4, 64, device="cuda")
        versions.append(source(given))
        worker = threading.Thread(target=compute)
        worker.start()
        for _ in range(50):
            change(source)
            versions.append(source(given))
            sender.send()
        stop.set()
        worker.join()
    assert seen
    for out in seen[:: max(1, len(seen) // 200)]:
        assert any(torch.allclose(out, version, rtol=1e-4, atol=1e-4) for version in versions)
