"""Scans on a CUDA device; what they compute is also tested without one, with queues that do not queue."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from patch_cases import lend, options
from scan_parts import Tensors, check_form, flat_of, flip, same, schema_of

from weight_update.encodings.patch import diff_cuda as scan_cuda
from weight_update.encodings.patch.changes import ByteRange, Changes, Sparse
from weight_update.encodings.patch.diff_cuda import CudaScanner, Queues
from weight_update.encodings.patch.encode_cuda import add_on_device
from weight_update.encodings.patch.format import encode_patch
from weight_update.testing import random_bits
from weight_update.wire.schema import DTYPES, WeightSchema

gpu = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
PLACES = ["cpu", "cuda"]


class Immediate(Queues):
    """On the CPU everything is done when it is asked for."""

    def __init__(self) -> None:
        self.device = torch.device("cpu")

    def fetch(self, target: torch.Tensor, source: torch.Tensor) -> Any:
        target.copy_(source)

    def fetched(self, event: Any) -> None:
        pass

    def store(self, source: torch.Tensor) -> torch.Tensor:
        return source.clone()

    def finish(self) -> None:
        pass


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=gpu)])
def device(request: pytest.FixtureRequest) -> torch.device:
    return torch.device(request.param)


def make(
    schema: WeightSchema, device: torch.device, tracked: list[int] | None = None, **options: Any
) -> CudaScanner:
    queues = Queues(device) if device.type == "cuda" else Immediate()
    return CudaScanner(schema, queues, tracked, **options)


def placed(snapshot: torch.Tensor, place: str, device: torch.device) -> torch.Tensor:
    """A copy of the snapshot where it is kept."""
    if device.type == "cpu":
        return snapshot.clone()
    return snapshot.to(device) if place == "cuda" else snapshot.pin_memory()


def on_cpu(changes: Changes) -> Changes:
    return Changes(
        tuple(
            Sparse.of(part.width, part.positions.cpu(), part.values.cpu(), part.relative)
            for part in changes.sparse
        ),
        tuple(ByteRange(one.start, one.data.cpu()) for one in changes.ranges),
    )


def of_all_kinds() -> list[torch.Tensor]:
    """Every dtype, small and large, and odd memory."""
    tensors = [random_bits((3, 5), dtype, 1) for dtype in DTYPES.values()]
    tensors += [random_bits((100_001,), dtype, 2) for dtype in (torch.bfloat16, torch.float32, torch.int8)]
    return [*tensors, random_bits((300, 200), torch.bfloat16, 3).t(), torch.tensor(1.5), torch.empty(0, 3)]


@pytest.mark.parametrize("piece", [1 << 16, 32 << 20])
@pytest.mark.parametrize("fraction", [0.0005, 0.01, 1.0])
@pytest.mark.parametrize("relative", [False, True])
@pytest.mark.parametrize("kept", PLACES)
def test_changes_give_the_new_bits(
    device: torch.device,
    kept: str,
    relative: bool,
    fraction: float,
    piece: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(scan_cuda, "TILE", piece)
    monkeypatch.setattr(scan_cuda, "PART", piece // 64)
    tensors = of_all_kinds()
    schema = schema_of(tensors)
    snapshot = placed(flat_of(schema, tensors), kept, device)
    contiguous = [tensor for tensor in tensors if tensor.is_contiguous() and tensor.numel()]
    changed = sum(flip(tensor, fraction, i) for i, tensor in enumerate(contiguous))
    live = [tensor.to(device) for tensor in tensors]
    scanner = make(schema, device, relative=relative, snapshot_device=kept)
    form = options(values="relative" if relative else "raw")
    scan = scanner.scan(live, snapshot)
    assert scan.changed == changed
    assert scan.total == sum(tensor.nbytes // min(8, tensor.element_size()) for tensor in tensors)
    assert {x.device.type for part in scan.changes.sparse for x in (part.positions, part.values)} <= {
        device.type
    }
    assert all(one.data.is_cpu for one in scan.changes.ranges)
    check_form(on_cpu(scan.changes), schema.nbytes)
    payload = encode_patch(scan.changes, schema, 0, 1, form, lend, add_on_device)
    assert torch.equal(payload, encode_patch(on_cpu(scan.changes), schema, 0, 1, form, lend))
    scan.changes.to(snapshot.device).write(snapshot)
    assert scanner.scan(live, snapshot).changed == 0
    assert same(snapshot.cpu(), flat_of(schema, tensors, torch.full_like(snapshot.cpu(), 0xA5)))


@pytest.mark.parametrize("kept", PLACES)
def test_master_weights_are_converted(device: torch.device, kept: str) -> None:
    tensors: Tensors = [
        torch.randn(size, generator=torch.Generator().manual_seed(size)) for size in (7, 200_000)
    ]
    schema = schema_of([tensor.bfloat16() for tensor in tensors])
    snapshot = placed(torch.zeros(schema.nbytes, dtype=torch.uint8), kept, device)
    scanner = make(schema, device, snapshot_device=kept)
    live = [tensor.to(device).requires_grad_() for tensor in tensors]
    for _ in range(3):
        scanner.scan(live, snapshot).changes.to(snapshot.device).write(snapshot)
        assert same(
            snapshot.cpu(),
            flat_of(schema, [x.detach().cpu() for x in live], torch.zeros_like(snapshot.cpu())),
        )
        with torch.no_grad():
            for tensor in live:
                tensor[::50] *= -1.5


def test_untracked_entries_are_left_alone(device: torch.device) -> None:
    tensors = [random_bits((200 + i,), torch.uint8, i) for i in range(40)]
    schema = schema_of(tensors)
    tracked = [i for i in range(40) if i % 3]
    snapshot = torch.zeros(schema.nbytes, dtype=torch.uint8)
    scanner = make(schema, device, tracked)
    found = scanner.scan([tensor.to(device) for tensor in tensors], snapshot).changes
    found.to(snapshot.device).write(snapshot)
    for i, view in enumerate(schema.views(snapshot)):
        assert same(view, tensors[i] if i in tracked else torch.zeros_like(view)), i


def test_nothing_to_look_at(device: torch.device) -> None:
    schema = schema_of([torch.empty(0)])
    scan = make(schema, device).scan([torch.empty(0, device=device)], torch.empty(0, dtype=torch.uint8))
    assert (scan.changed, scan.total) == (0, 0)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("kept", PLACES)
def test_what_a_side_stream_just_wrote_is_found(kept: str) -> None:
    device = torch.device("cuda")
    live = [torch.zeros(4 << 20, device=device, dtype=torch.bfloat16) for _ in range(20)]
    schema = schema_of(live)
    snapshot = placed(torch.zeros(schema.nbytes, dtype=torch.uint8), kept, device)
    torch.cuda.synchronize()
    with torch.cuda.stream(torch.cuda.Stream()):
        scanner = make(schema, device, snapshot_device=kept)
        for turn in range(20):
            torch.cuda._sleep(10_000_000)  # so that all below is queued, not done
            for tensor in live:
                tensor[turn::101] += 1
            scan = scanner.scan(live, snapshot)
            assert scan.changed == sum(tensor[turn::101].numel() for tensor in live)
            scan.changes.to(snapshot.device).write(snapshot)
    torch.cuda.synchronize()
    assert same(snapshot.cpu(), flat_of(schema, [tensor.cpu() for tensor in live]))


def test_memory_of_a_scanner_is_free_on_all_streams(monkeypatch: pytest.MonkeyPatch) -> None:
    """The thread that makes a scanner, for a worker that joins, has another stream than those that use it."""
    awaited: list[torch.Tensor] = []
    monkeypatch.setattr(scan_cuda, "await_stream", awaited.append)
    scanner = make(WeightSchema.of({"weight": torch.zeros(100)}), torch.device("cpu"))
    assert [one.data_ptr() for one in awaited] == [scanner._new.data_ptr()]
