"""Patches of weights on a GPU; needs torch, tensordict and a GPU alone."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from weight_update.encodings import PatchEncoding
from weight_update.testing import random_bits
from weight_update.wire.schema import BITS, WeightSchema

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
PLACES = ["cpu", "cuda"]
FORMS: list[dict[str, Any]] = [
    {"layout": layout, "values": values, "delta_encoding": delta}
    for layout in ("flat", "coo")
    for values in ("raw", "relative")
    for delta in (True, False)
]


def lend(nbytes: int) -> torch.Tensor:
    return torch.empty(nbytes, dtype=torch.uint8)


def weights() -> dict[str, torch.Tensor]:
    kinds = (torch.bfloat16, torch.float32, torch.uint8, torch.complex128)
    found = {str(kind): random_bits((700, 300), kind, 1) for kind in kinds}
    return found | {"scalar": torch.ones(()), "empty": torch.empty(0, 3), "large": torch.zeros(5 << 20)}


def change(live: dict[str, torch.Tensor], turn: int) -> None:
    """About 2 % of the bits of each; all of the scalar."""
    for tensor in live.values():
        bits = tensor.view(-1).view(BITS[min(8, tensor.element_size())])
        bits[turn % 50 :: 50] ^= turn + 1


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("kept", PLACES)
def test_the_patch_has_the_bytes_of_one_made_on_the_cpu(kept: str, form: dict[str, Any]) -> None:
    here = weights()
    there = {name: tensor.cuda() for name, tensor in here.items()}
    schema = WeightSchema.of(here)
    plain = PatchEncoding(**form).tracker(schema, None)
    tracker = PatchEncoding(snapshot_device=kept, **form).tracker(schema, None)
    plain.begin(list(here.values()))
    tracker.begin(list(there.values()))
    flat = torch.zeros(schema.nbytes, dtype=torch.uint8)
    torch._foreach_copy_(schema.views(flat), list(here.values()))
    for turn in range(4):
        change(here, turn)
        change(there, turn)
        expected, found = plain.compare(list(here.values())), tracker.compare(list(there.values()))
        assert (found.changed, found.total) == (expected.changed, expected.total)
        payload = tracker.encode(found, turn, turn + 1, lend)
        assert payload is not None
        PatchEncoding.read(payload, schema).write(flat)
        for view, tensor in zip(schema.views(flat), here.values(), strict=True):
            assert torch.equal(view.view(-1).view(torch.uint8), tensor.view(-1).view(torch.uint8))
        if (
            not found.changes.ranges and not expected.changes.ranges
        ):  # tiles, and so byte ranges, differ in size
            assert torch.equal(payload, plain.encode(expected, turn, turn + 1, lend))
        plain.advance(expected)
        tracker.advance(found)
        for view, tensor in zip(tracker.weights(), here.values(), strict=True):
            assert torch.equal(view.cpu().view(-1).view(torch.uint8), tensor.view(-1).view(torch.uint8))


@pytest.mark.parametrize("compression", ["nvcomp_lz4", "nvcomp_ans"])
@pytest.mark.parametrize("kept", ["cpu", "cuda"])
def test_compressed_on_the_device(kept: str, compression: str) -> None:
    pytest.importorskip("nvidia.nvcomp", reason="needs the extra nvcomp")
    live = {name: tensor.cuda() for name, tensor in weights().items()}
    schema = WeightSchema.of(live)
    encoding = PatchEncoding(snapshot_device=kept, transport_device="cuda", compression=compression)
    tracker = encoding.tracker(schema, None)
    tracker.begin(list(live.values()))
    flat = torch.zeros(schema.nbytes, dtype=torch.uint8, device="cuda")
    torch._foreach_copy_(schema.views(flat), list(live.values()))
    for turn in range(3):
        change(live, turn)
        found = tracker.compare(list(live.values()))
        payload = tracker.encode(found, turn, turn + 1, lend)
        assert payload is not None
        PatchEncoding.read(payload, schema).write(flat)
        tracker.advance(found)
        for view, tensor in zip(schema.views(flat), live.values(), strict=True):
            assert torch.equal(view.view(-1).view(torch.uint8), tensor.view(-1).view(torch.uint8))


@pytest.mark.parametrize("kept", PLACES)
def test_each_turn_on_another_stream(kept: str) -> None:
    """Snapshots are written in the background; a scan in a new stream must find them written."""
    live = [torch.zeros(4 << 20, device="cuda", dtype=torch.bfloat16) for _ in range(10)]
    schema = WeightSchema.of({str(i): tensor for i, tensor in enumerate(live)})
    tracker = PatchEncoding(snapshot_device=kept).tracker(schema, None)
    tracker.begin(live)
    flat = torch.zeros(schema.nbytes, dtype=torch.uint8)
    for turn in range(10):
        with torch.cuda.stream(torch.cuda.Stream()):
            torch.cuda._sleep(10_000_000)  # so that all below is queued, not done
            for tensor in live:
                tensor[turn::101] += 1
            found = tracker.compare(live)
            assert found.changed == sum(tensor[turn::101].numel() for tensor in live)
            payload = tracker.encode(found, turn, turn + 1, lend)
            tracker.advance(found)
        assert payload is not None
        PatchEncoding.read(payload, schema).write(flat)
    torch.cuda.synchronize()
    for view, tensor in zip(schema.views(flat), live, strict=True):
        assert torch.equal(view, tensor.cpu())
