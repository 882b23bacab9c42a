"""All converters stream, leave the live model alone, and can run again."""

from __future__ import annotations

import pickle
import weakref
from collections.abc import Iterator

import numpy
import pytest
import torch
from convert_parts import GROUPS, HEADS, HuggingFace, Tree, convert, megatron_of, numbers, same, state

from weight_update.convert import (
    Converter,
    Item,
    cast,
    chain,
    hf_to_megatron,
    megatron_to_hf,
    merge_lora,
    quantize_fp8,
    quantize_fp8_blocks,
    quantize_int8,
    rename,
)
from weight_update.testing import fingerprint

HF = state(HuggingFace(layers=3))
MEGATRON = megatron_of(HF, layers=3)
LORA = {
    f"base_model.model.{layer}.{leaf}": numbers(*shape)
    for layer in "abc"
    for leaf, shape in {
        "base_layer.weight": (4, 5),
        "base_layer.bias": (4,),
        "lora_A.default.weight": (2, 5),
        "lora_B.default.weight": (4, 2),
    }.items()
}

# The converter, its weights, and how many it may need to know of at a time beside the next.
CASES: dict[str, tuple[Converter, dict[str, torch.Tensor], int]] = {
    "rename, table": (rename({"lm_head.weight": "head"}), HF, 0),
    "rename, patterns": (rename([("^model", "m")]), HF, 0),
    "cast": (cast(torch.bfloat16, only=["model"]), HF, 0),
    "megatron_to_hf": (megatron_to_hf(HEADS, GROUPS), MEGATRON, 0),
    # q and k, each with a bias, when v comes
    "hf_to_megatron": (hf_to_megatron(HEADS, GROUPS), HF, 4),
    "merge_lora": (merge_lora(0.5), LORA, 3),
    "quantize_int8": (quantize_int8(), HF, 0),
    "quantize_fp8": (quantize_fp8(), HF, 0),
    "quantize_fp8_blocks": (quantize_fp8_blocks((2, 3)), HF, 0),
    "chain": (chain(megatron_to_hf(HEADS, GROUPS), cast(torch.float64), quantize_int8()), MEGATRON, 0),
}
each = pytest.mark.parametrize(("converter", "weights", "held"), CASES.values(), ids=CASES)


@each
def test_nothing_is_held(converter: Converter, weights: dict[str, torch.Tensor], held: int) -> None:
    alive: dict[str, weakref.ref[numpy.ndarray]] = {}
    most = 0

    def fresh() -> Iterator[Item]:
        nonlocal most
        for name, value in weights.items():
            most = max(most, sum(memory() is not None for memory in alive.values()))
            memory = value.numpy().copy()
            alive[name] = weakref.ref(memory)
            yield name, torch.from_numpy(memory)
            del memory

    given = 0
    for _, tensor in converter(fresh()):
        given += 1
        mine = weakref.ref(tensor)
        del tensor
        assert mine() is None, "the converter refers to what it gave"
    assert given > len(weights) // 4
    assert most == held
    assert not any(memory() is not None for memory in alive.values())


@each
def test_results_come_as_soon_as_they_can(
    converter: Converter, weights: dict[str, torch.Tensor], held: int
) -> None:
    asked = 0

    def counted() -> Iterator[Item]:
        nonlocal asked
        for item in weights.items():
            asked += 1
            yield item

    next(iter(converter(counted())))
    assert asked <= 2  # the first weight, or the bias after it


@each
def test_the_live_model_is_left_alone(
    converter: Converter, weights: dict[str, torch.Tensor], held: int
) -> None:
    model = Tree(weights)
    before = fingerprint(dict(model.named_parameters()))
    versions = [value._version for value in model.parameters()]
    for name, value in converter(model.named_parameters()):
        assert not value.requires_grad, name
        assert value.grad_fn is None, name
    assert fingerprint(dict(model.named_parameters())) == before
    assert [value._version for value in model.parameters()] == versions
    assert all(value.requires_grad for value in model.parameters())


@each
def test_it_repeats_itself_also_pickled(
    converter: Converter, weights: dict[str, torch.Tensor], held: int
) -> None:
    first, again = convert(converter, weights.items()), convert(converter, weights.items())
    other = convert(pickle.loads(pickle.dumps(converter)), weights.items())
    same(first, again)
    same(first, other)
    assert list(first) == list(again) == list(other)


@each
def test_an_update_that_was_given_up_leaves_nothing_behind(
    converter: Converter, weights: dict[str, torch.Tensor], held: int
) -> None:
    whole = convert(converter, weights.items())
    for place, _ in enumerate(converter(iter(weights.items()))):
        if place == len(whole) // 2:
            break
    same(convert(converter, weights.items()), whole)
