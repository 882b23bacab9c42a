"""How a model stores the weights of a checkpoint, found out by a load that writes nothing."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pytest
import torch
from torch import nn

from weight_update.engines.placement import tensors_of
from weight_update.serving.vllm.placement import find_placements

WEIGHTS = {
    "q": torch.randn(6, 4),
    "k": torch.randn(2, 4),
    "cut": torch.randn(4, 6),
    "turned": torch.randn(3, 5),
    "norm": torch.randn(4),
    "padded": torch.randn(5, 2),
    "quantized": torch.randn(4, 4),
    "unused": torch.randn(3),
}
MODULES = {name: {"qk" if name in ("q", "k") else name} for name in WEIGHTS if name != "unused"}
SHAPES = {name: (weight.shape, weight.dtype) for name, weight in WEIGHTS.items()}


class Quantized(nn.Module):
    quant_method = object()

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(4, 4))


class Rank1(nn.Module):
    """The second of two tensor-parallel ranks, with loaders such as those of vLLM."""

    def __init__(self) -> None:
        super().__init__()
        self.qk = nn.Linear(4, 4, bias=False, dtype=torch.bfloat16)
        self.cut = nn.Linear(3, 4, bias=False)
        self.turned = nn.Linear(3, 5, bias=False)
        self.norm = nn.LayerNorm(4, bias=False)
        self.padded = nn.Embedding(8, 2)
        self.quantized = Quantized()

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        for name, weight in weights:
            if name == "q":
                self.qk.weight.data.narrow(0, 0, 3).copy_(weight.narrow(0, 3, 3))
            elif name == "k":
                self.qk.weight.data.narrow(0, 3, 1).copy_(weight[1:2])
            elif name == "cut":
                self.cut.weight.data.copy_(weight.narrow(1, 3, 3))
            elif name == "turned":
                self.turned.weight.data.copy_(weight.t())
            elif name == "norm":
                self.norm.weight.data.copy_(weight)
            elif name == "padded":
                self.padded.weight[:5].data.copy_(weight)
                self.padded.weight[5:].data.fill_(0)
            elif name == "quantized":
                self.quantized.weight.data.copy_(weight)


def test_finding_out_changes_nothing_and_names_each_weight() -> None:
    model = Rank1()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    found = find_placements(model, model.load_weights, SHAPES, MODULES)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert set(found.blocks) == {"q", "k", "cut", "norm", "padded", "unused"}
    assert found.blocks["unused"] == ()
    assert found.others == {"turned", "quantized"}
    assert found.takes_patches
    assert str(found) == "5 in place, 2 reloaded (quantized, turned), 1 not used by this worker"


@pytest.mark.parametrize("name", ["q", "k", "cut", "norm", "padded"])
def test_changed_elements_are_written_where_a_load_puts_them(name: str) -> None:
    model, expected = Rank1(), Rank1()
    model.load_weights(WEIGHTS.items())
    (block,) = find_placements(model, model.load_weights, SHAPES, MODULES).blocks[name]
    weight = WEIGHTS[name].clone()
    positions = torch.randperm(weight.numel())[: weight.numel() // 2].sort().values
    weight.view(-1)[positions] += 1.0
    tensors = tensors_of(model)
    block.write(tensors, weight.shape, positions, weight.view(-1)[positions])
    expected.load_weights({**WEIGHTS, name: weight}.items())
    for key, value in model.state_dict().items():
        assert torch.equal(value, expected.state_dict()[key]), key
    everything = torch.arange(weight.numel())
    assert block.has(tensors, weight.shape, everything, weight.view(-1))
    stored = block.stored(tensors)
    assert torch.equal(block.of(weight).to(stored.dtype), stored)


def test_a_block_tells_other_values_apart() -> None:
    model = Rank1()
    model.load_weights(WEIGHTS.items())
    (block,) = find_placements(model, model.load_weights, SHAPES, MODULES).blocks["cut"]
    everything = torch.arange(24)
    model.cut.weight.data.copy_(model.cut.weight.data.flip(0))  # as a kernel's own form
    assert not block.has(tensors_of(model), WEIGHTS["cut"].shape, everything, WEIGHTS["cut"].view(-1))


def test_a_weight_without_dimensions() -> None:
    model = nn.Module()
    model.scale = nn.Parameter(torch.tensor(3.0))

    def load(weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        for _, weight in weights:
            model.scale.data.copy_(weight)

    found = find_placements(model, load, {"scale": (torch.Size(), torch.float32)}, {"scale": {""}})
    (block,) = found.blocks["scale"]
    tensors, positions = tensors_of(model), torch.zeros(256, dtype=torch.int64)
    assert block.has(tensors, torch.Size(), positions, torch.tensor(3.0))
    assert not block.has(tensors, torch.Size(), positions, torch.tensor(4.0))
    block.write(tensors, torch.Size(), positions[:1], torch.tensor([4.0]))
    assert block.has(tensors, torch.Size(), positions, torch.tensor(4.0))


def test_a_loader_that_computes_spoils_its_own_weight_only() -> None:
    model = Rank1()

    def load(weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        for name, weight in weights:
            if name == "k":
                model.qk.weight.data[3:].add_(weight[1:2])
            else:
                model.load_weights([(name, weight)])

    found = find_placements(model, load, SHAPES, MODULES)
    assert "q" in found.blocks
    assert found.others == {"k", "turned", "quantized"}


def test_a_loader_that_computes_from_the_model_spoils_all_weights() -> None:
    model = Rank1()

    def load(weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        model.load_weights(weights)
        model.derived = model.qk.weight.data * 2

    assert not find_placements(model, load, SHAPES, MODULES).blocks


def test_a_loader_may_look_up_which_experts_its_rank_has() -> None:
    model = Rank1()
    model.register_buffer("expert_map", torch.tensor([-1, 0]))

    def load(weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        for name, weight in weights:
            if name not in ("cut", "norm") or model.expert_map[int(name == "cut")].item() != -1:
                model.load_weights([(name, weight)])

    found = find_placements(model, load, SHAPES, MODULES)
    assert found.blocks["cut"]
    assert found.blocks["norm"] == ()
    assert found.others == {"turned", "quantized"}


def test_what_a_patch_reloads() -> None:
    model = Rank1()
    found = find_placements(model, model.load_weights, SHAPES, MODULES)
    assert found.reload_of(["q", "norm", "unused"]) == (set(), set())
    assert found.reload_of(["q", "turned"]) == ({"turned"}, {"turned"})
    found.drop("k")  # a kernel stores it in its own form, with q
    assert found.others == {"q", "k", "turned", "quantized"}
    assert found.reload_of(["k"]) == ({"q", "k"}, {"qk"})
    found.modules = {**MODULES, "cut": {"cut", "qk"}, "norm": {"norm", "cut"}}
    assert found.reload_of(["k"]) == ({"q", "k", "cut", "norm"}, {"qk", "cut", "norm"})


@pytest.mark.parametrize("modules", [{}, {**MODULES, "turned": ()}, {**MODULES, "q": {"elsewhere"}}])
def test_without_the_modules_of_a_weight_all_are_reloaded(modules: dict[str, Any]) -> None:
    model = Rank1()
    assert not find_placements(model, model.load_weights, SHAPES, modules).takes_patches
