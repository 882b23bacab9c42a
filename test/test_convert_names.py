"""chain, rename and cast."""

from __future__ import annotations

import re
import time

import pytest
import torch
from convert_parts import convert, numbers, same

from weight_update import ConversionError, MemoryWeightSyncScheme, WeightStrategy
from weight_update.convert import Converter, cast, chain, rename

WEIGHTS = {
    "body.0.weight": numbers(3, 2),
    "body.0.bias": numbers(3),
    "head.weight": numbers(2, 3),
    "steps": torch.tensor(3),
}


def test_a_chain_goes_from_left_to_right() -> None:
    both = chain(rename({"head.weight": "out.weight"}), rename({"out.weight": "tail.weight"}))
    assert list(convert(both, WEIGHTS.items())) == ["body.0.weight", "body.0.bias", "tail.weight", "steps"]
    same(convert(chain(), WEIGHTS.items()), WEIGHTS)


def test_renaming_by_a_table_and_back() -> None:
    table = {"body.0.weight": "layers.0.w", "head.weight": "lm_head.weight"}
    there = convert(rename(table), WEIGHTS.items())
    assert list(there) == ["layers.0.w", "body.0.bias", "lm_head.weight", "steps"]
    same(convert(rename({new: old for old, new in table.items()}), there.items()), WEIGHTS)


def test_names_may_be_swapped() -> None:
    swapped = convert(rename({"body.0.bias": "head.weight", "head.weight": "body.0.bias"}), WEIGHTS.items())
    assert torch.equal(swapped["head.weight"], WEIGHTS["body.0.bias"])


def test_renaming_by_patterns_takes_the_first_that_is_found() -> None:
    patterns = [(r"^body\.(\d+)\.", r"layers.\1."), (re.compile("weight$"), "w"), ("no such", "x")]
    assert list(convert(rename(patterns), WEIGHTS.items())) == [
        "layers.0.weight",
        "layers.0.bias",
        "head.w",
        "steps",
    ]


def test_two_names_that_become_one_are_both_named() -> None:
    with pytest.raises(ConversionError, match=r"'body\.0\.weight' and 'head\.weight' .* 'x'"):
        convert(rename([("^.*weight$", "x")]), WEIGHTS.items())
    with pytest.raises(ConversionError, match=r"'body\.0\.bias' and 'steps'"):
        convert(rename({"body.0.bias": "steps"}), WEIGHTS.items())


def test_a_name_of_the_table_that_is_not_there() -> None:
    stream = rename({"head.weight": "w", "haed.bias": "b", "bdoy": "c"})(iter(WEIGHTS.items()))
    for _ in WEIGHTS:
        next(stream)
    with pytest.raises(ConversionError, match=r"no weight has the name 'haed\.bias', 'bdoy'"):
        next(stream)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64, torch.float8_e4m3fn])
def test_cast_is_tensor_to(dtype: torch.dtype) -> None:
    same(
        convert(cast(dtype), WEIGHTS.items()),
        {name: value.to(dtype) if name != "steps" else value for name, value in WEIGHTS.items()},
    )


@pytest.mark.parametrize(
    "only", [["body"], ["body."], re.compile("^body"), lambda name, tensor: name.startswith("body")]
)
def test_cast_of_some(only: object) -> None:
    found = convert(cast(torch.bfloat16, only=only), WEIGHTS.items())
    assert [value.dtype for value in found.values()] == [
        torch.bfloat16,
        torch.bfloat16,
        torch.float32,
        torch.int64,
    ]


def test_thousands_of_names_are_found_in_a_moment() -> None:
    """A mixture of experts has tens of thousands of weights, and ``only=`` is looked at in each update."""
    weights = {f"layers.{layer}.experts.{i}.weight": numbers(1) for layer in range(40) for i in range(200)}
    converter = cast(torch.bfloat16, only=list(weights))
    start = time.perf_counter()
    assert {value.dtype for value in convert(converter, weights.items()).values()} == {torch.bfloat16}
    assert WeightStrategy("state_dict", select=list(weights)).chosen(weights) == set(weights)
    assert time.perf_counter() - start < 5.0


@pytest.mark.parametrize(
    "converter", [rename({"a": "x", "b": "y"}), cast(torch.bfloat16, only=["a", "b"])], ids=["rename", "cast"]
)
def test_names_that_are_not_selected_have_a_remedy(converter: Converter) -> None:
    """A patch encoding converts all weights in ``connect()``, and then those that are selected."""
    strategy = WeightStrategy("state_dict", encoding="patch", select=["a"], convert=converter)
    scheme = MemoryWeightSyncScheme(strategy)
    with pytest.raises(ConversionError, match=r"'b'; .*if select= leaves .* out of updates.* pattern"):
        scheme.init_on_sender(weights={"a": numbers(2), "b": numbers(2)}, num_workers=1)


def test_a_prefix_that_chooses_nothing() -> None:
    with pytest.raises(ConversionError, match="'bod', 'haed'"):
        convert(cast(torch.bfloat16, only=["bod", "head", "haed"]), WEIGHTS.items())


def test_wrong_arguments() -> None:
    with pytest.raises(ValueError, match="floating dtype"):
        cast(torch.int8)
    with pytest.raises(ValueError, match="only= takes a list of prefixes"):
        cast(torch.bfloat16, only="body")
    with pytest.raises(ValueError, match="rename takes a dict"):
        rename(("wq", "wk"))  # type: ignore[arg-type] - one pair; each text would be taken for a pair
