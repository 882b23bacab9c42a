"""LoRA merged into its base."""

from __future__ import annotations

import copy
import itertools
from fractions import Fraction

import pytest
import torch
from convert_parts import convert, numbers, same, state
from torch import nn

from weight_update import ConversionError
from weight_update.convert import merge_lora
from weight_update.testing import fingerprint

PREFIX = "base_model.model."
FACTORS = {"x.lora_A.d.weight": numbers(2, 4), "x.lora_B.d.weight": numbers(4, 2)}


class Lora(nn.Module):
    """A linear layer with adapters, with the names of PEFT."""

    def __init__(self, base: nn.Linear, scaling: dict[str, float], transposed: bool = False) -> None:
        super().__init__()
        self.base_layer, self.scaling, self.transposed = base, dict(scaling), transposed
        columns, rows = (base.weight.T if transposed else base.weight).shape[::-1]
        self.lora_A = nn.ModuleDict({name: nn.Linear(columns, 2, bias=False) for name in scaling})
        self.lora_B = nn.ModuleDict({name: nn.Linear(2, rows, bias=False) for name in scaling})

    def merged_(self) -> None:
        """The reference: as ``merge_and_unload`` does, in place."""
        for name, scaling in self.scaling.items():
            delta = self.lora_B[name].weight.float() @ self.lora_A[name].weight.float()
            wide = self.base_layer.weight.data.float() + scaling * (delta.T if self.transposed else delta)
            self.base_layer.weight.data.copy_(wide)


def model_of(scaling: dict[str, float], dtype: torch.dtype = torch.float32) -> nn.Module:
    torch.manual_seed(3)
    inner = nn.Module()
    inner.embed = nn.Embedding(5, 4)
    inner.layers = nn.ModuleList(Lora(nn.Linear(4, 4), scaling) for _ in range(3))
    inner.head = nn.Linear(4, 2)
    model = nn.Module()
    model.base_model = nn.Module()
    model.base_model.model = inner.to(dtype)
    return model


def merged_by_peft(model: nn.Module) -> dict[str, torch.Tensor]:
    merged = copy.deepcopy(model).base_model.model
    for place, layer in enumerate(merged.layers):
        layer.merged_()
        merged.layers[place] = layer.base_layer
    return state(merged)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("scaling", [2.0, 0.25])  # powers of two: their products are exact
def test_the_same_bits_as_merging_in_place(dtype: torch.dtype, scaling: float) -> None:
    model = model_of({"default": scaling}, dtype)
    before = fingerprint(dict(model.named_parameters()))
    same(convert(merge_lora(scaling), model.named_parameters()), merged_by_peft(model))
    same(convert(merge_lora({"default": scaling}), model.named_parameters()), merged_by_peft(model))
    assert fingerprint(dict(model.named_parameters())) == before


def test_the_merged_model_computes_what_the_adapted_one_does() -> None:
    layer = Lora(nn.Linear(4, 6), {"default": 1.7}).double()
    merged = convert(merge_lora(1.7), ((f"x.{name}", value) for name, value in layer.named_parameters()))
    x = numbers(3, 4, dtype=torch.float64)
    added = 1.7 * layer.lora_B["default"](layer.lora_A["default"](x))
    torch.testing.assert_close(
        x @ merged["x.weight"].T + merged["x.bias"], layer.base_layer(x) + added, rtol=1e-12, atol=1e-12
    )


def test_several_adapters() -> None:
    model = model_of({"one": 2.0, "two": 0.5})
    both, one = copy.deepcopy(model), copy.deepcopy(model)
    for layer in one.base_model.model.layers:
        del layer.scaling["two"]
    weights = list(model.named_parameters())
    torch.testing.assert_close(convert(merge_lora({"two": 0.5, "one": 2.0}), weights), merged_by_peft(both))
    same(convert(merge_lora({"one": 2.0}), weights), merged_by_peft(one))
    with pytest.raises(ConversionError, match=r"no weight has the adapter 'three', 'zwei'"):
        convert(merge_lora({"one": 1.0, "zwei": 1.0, "three": 1.0}), weights)


def test_any_order_within_a_layer() -> None:
    weights = dict(model_of({"default": 2.0}).named_parameters())
    parts = [name for name in weights if ".layers.1." in name]
    others = [(name, value) for name, value in weights.items() if name not in parts]
    expected = convert(merge_lora(2.0), weights.items())
    for order in itertools.permutations(parts):
        mine = [(name, weights[name]) for name in order]
        same(convert(merge_lora(2.0), [*others, *mine]), expected)


def test_transposed_bases() -> None:
    base = nn.Linear(6, 4, bias=False)  # GPT-2's Conv1D: the weight is (in, out)
    layer = Lora(base, {"default": 2.0}, transposed=True)
    weights = [(f"x.{name}", value) for name, value in layer.named_parameters()]
    reference = copy.deepcopy(layer)
    reference.merged_()
    same(
        convert(merge_lora(2.0, fan_in_fan_out=True), weights),
        {"x.weight": reference.base_layer.weight.detach()},
    )
    with pytest.raises(
        ConversionError, match=r"x \(default\): B @ A is \[6, 4\], the base \[4, 6\]; .*False"
    ):
        convert(merge_lora(2.0), weights)


def test_embeddings() -> None:
    base, a, b = numbers(5, 4), numbers(2, 5), numbers(4, 2)
    weights = {"e.base_layer.weight": base, "e.lora_embedding_A.x": a, "e.lora_embedding_B.x": b}
    same(convert(merge_lora(2.0), weights.items()), {"e.weight": base + 2.0 * (b @ a).T})


def test_modules_that_were_trained_whole() -> None:
    weights = {
        "head.original_module.weight": numbers(2, 2),
        "head.modules_to_save.default.weight": numbers(2, 2, seed=5),
        "head.modules_to_save.other.weight": numbers(2, 2, seed=6),
    }
    found = convert(merge_lora({"default": 1.0}, prefix=""), weights.items())
    same(found, {"head.weight": weights["head.modules_to_save.default.weight"]})


@pytest.mark.parametrize(
    ("left_out", "message"),
    [
        ("base_layer.weight", r"x: base_layer.weight is missing; with select="),
        ("lora_A.default.weight", r"x \(default\): lora_A is missing"),
        ("lora_B.default.weight", r"x \(default\): lora_B is missing"),
    ],
)
def test_missing_parts(left_out: str, message: str) -> None:
    layer = Lora(nn.Linear(4, 4), {"default": 2.0})
    weights = [(f"{PREFIX}x.{name}", value) for name, value in layer.named_parameters() if name != left_out]
    with pytest.raises(ConversionError, match=message):
        convert(merge_lora(2.0), weights)


def test_layers_that_come_apart() -> None:
    layers = {
        layer: [
            (f"{layer}.{name}", value) for name, value in Lora(nn.Linear(4, 4), {"d": 1.0}).named_parameters()
        ]
        for layer in ("x", "y")
    }
    with pytest.raises(ConversionError, match="x: its weights are not adjacent"):
        convert(merge_lora(1.0), [*layers["x"], *layers["y"], ("x.base_layer.scale", numbers(2))])
    with pytest.raises(ConversionError, match=r"x \(d\): lora_B is missing"):
        convert(merge_lora(1.0), [*layers["x"][:-1], *layers["y"], layers["x"][-1]])


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("lora_magnitude_vector.default.weight", numbers(4)),
        ("lora_B.default.bias", numbers(4)),
        ("lora_A.default.weight", numbers(2, 4, 3, 3)),
        ("trainable_tokens_delta.default", numbers(2, 4)),
    ],
)
def test_what_cannot_be_merged(name: str, value: torch.Tensor) -> None:
    weights = {"x.base_layer.weight": numbers(4, 4), f"x.{name}": value}
    with pytest.raises(ConversionError, match=f"x.{name}: only plain LoRA"):
        convert(merge_lora(1.0), weights.items())


def test_fused_experts_cannot_be_merged() -> None:
    weights = {  # of PEFT, with target_parameters=["experts.gate_up_proj", "experts.down_proj"]
        "experts.base_layer.base_layer.gate_up_proj": numbers(3, 8, 4),
        "experts.base_layer.base_layer.down_proj": numbers(3, 4, 4),
        "experts.base_layer.lora_A.default.weight": numbers(6, 4),
        "experts.base_layer.lora_B.default.weight": numbers(8, 6),
        "experts.lora_A.default.weight": numbers(6, 4),
        "experts.lora_B.default.weight": numbers(4, 6),
    }
    with pytest.raises(ConversionError, match=r"experts.*\(gate_up_proj, down_proj\).*merge in the trainer"):
        convert(merge_lora(1.0), weights.items())
    once = {name.replace(".base_layer.base_layer", ".base_layer"): weights[name] for name in weights}
    with pytest.raises(ConversionError, match=r"experts.*\(gate_up_proj, down_proj\).*merge in the trainer"):
        convert(merge_lora(1.0), (item for item in once.items() if ".base_layer.lora" not in item[0]))


def test_an_adapter_with_several_ranks_is_refused() -> None:
    weights = {
        "x.base_layer.weight": numbers(4, 4),
        "x.lora_A.default.weight": numbers(2, 4),
        "x.lora_B.default.weight": numbers(4, 2),
        "x.lora_A.other.weight": numbers(1, 4),
        "x.lora_B.other.weight": numbers(4, 1),
        "y.base_layer.weight": numbers(4, 4),
        "y.lora_A.default.weight": numbers(1, 4),
        "y.lora_B.default.weight": numbers(4, 1),
    }
    with pytest.raises(
        ConversionError, match=r"y \(default\): has rank 1, and x has rank 2, so one scaling="
    ):
        convert(merge_lora(2.0), weights.items())


def test_layers_with_scalings_of_their_own() -> None:
    """As with PEFT's ``alpha_pattern`` and ``rank_pattern``."""
    weights, expected = {}, {}
    for layer, rank in (("x", 2), ("deep.y", 1)):
        a, b = numbers(rank, 4), numbers(4, rank, seed=rank)
        weights[f"{PREFIX}{layer}.base_layer.weight"] = base = numbers(4, 4, seed=7)
        weights[f"{PREFIX}{layer}.lora_A.default.weight"] = a
        weights[f"{PREFIX}{layer}.lora_B.default.weight"] = b
        expected[f"{layer}.weight"] = base + 4.0 / rank * (b @ a)
    scales = {("x", "default"): 2.0, ("deep.y", "default"): 4.0}
    same(convert(merge_lora(lambda layer, adapter: scales[layer, adapter]), weights.items()), expected)


@pytest.mark.parametrize("returned", [None, float("inf")])
def test_a_function_that_returns_no_scaling_is_named(returned: object) -> None:
    weights = {"x.base_layer.weight": numbers(4, 4), **FACTORS}
    with pytest.raises(ConversionError, match=rf"x \(d\): the function scaling= returned {returned}"):
        convert(merge_lora(lambda layer, adapter: returned), weights.items())  # type: ignore[arg-type]


def test_quantized_bases_are_refused() -> None:
    weights = {"x.base_layer.weight": torch.zeros(4, 4, dtype=torch.int8), **FACTORS}
    with pytest.raises(ConversionError, match=r"x: a base of torch\.int8"):
        convert(merge_lora(1.0), weights.items())


@pytest.mark.parametrize("scaling", [float("nan"), {"default": float("inf")}])
def test_a_scaling_that_would_destroy_the_weights_is_refused(scaling: object) -> None:
    with pytest.raises(ValueError, match="scaling= is alpha / r"):
        merge_lora(scaling)  # type: ignore[arg-type]


def test_a_fraction_is_a_scaling() -> None:
    weights = {"x.base_layer.weight": numbers(4, 4), **FACTORS}
    halved = convert(merge_lora(Fraction(1, 2)), weights.items())  # type: ignore[arg-type]
    assert torch.equal(halved["x.weight"], convert(merge_lora(0.5), weights.items())["x.weight"])
