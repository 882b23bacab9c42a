"""Weights in eight bits, with scales beside them."""

from __future__ import annotations

import itertools
import math
import re

import pytest
import torch
from convert_parts import convert, numbers, same
from fuzz import examples
from hypothesis import given
from hypothesis import strategies as st

from weight_update import ConversionError
from weight_update.convert import (
    Converter,
    cast,
    chain,
    dequantize,
    quantize_fp8,
    quantize_fp8_blocks,
    quantize_int8,
)

NAME = "layers.0.up_proj.weight"
KINDS: dict[str, tuple[Converter, torch.dtype, str]] = {
    "int8": (quantize_int8(), torch.int8, "_scale"),
    "fp8": (quantize_fp8(), torch.float8_e4m3fn, "_scale"),
    "fp8 blocks": (quantize_fp8_blocks(), torch.float8_e4m3fn, "_scale_inv"),
}
each = pytest.mark.parametrize(("converter", "dtype", "suffix"), KINDS.values(), ids=KINDS)
shapes = st.tuples(st.integers(1, 9), st.integers(1, 9))


@each
@pytest.mark.parametrize("source", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
def test_scales_stand_after_their_weights(
    converter: Converter, dtype: torch.dtype, suffix: str, source: torch.dtype
) -> None:
    weights = {"a.weight": numbers(3, 5, dtype=source), "a.bias": numbers(3, dtype=source)}
    found = convert(converter, weights.items())
    assert list(found) == ["a.weight", f"a.weight{suffix}", "a.bias"]
    assert found["a.weight"].dtype is dtype
    assert found["a.weight"].shape == (3, 5)
    assert found[f"a.weight{suffix}"].dtype is torch.float32
    assert found["a.weight"].is_contiguous()
    same({"b": found["a.bias"]}, {"b": weights["a.bias"]})


@examples(60)
@given(shape=shapes, seed=st.integers(0, 99), exponent=st.integers(-30, 30))
def test_int8_row_by_row(shape: tuple[int, int], seed: int, exponent: int) -> None:
    weight = numbers(*shape, seed=seed) * 2.0**exponent
    weight[0] = 0
    found = convert(quantize_int8(), [(NAME, weight)])
    scale = found[f"{NAME}_scale"]
    assert scale.shape == (shape[0], 1)
    for row, step, ints in zip(weight.tolist(), scale.flatten().tolist(), found[NAME].tolist(), strict=True):
        largest = max(map(abs, row))
        assert step == (torch.tensor(largest) / 127 if largest else 1.0)
        assert max(map(abs, ints)) == (127 if largest else 0)
        assert all(abs(value - step * int8) <= step * 0.5001 for value, int8 in zip(row, ints, strict=True))
    same({"w": dequantize(found[NAME], scale)}, {"w": found[NAME].float() * scale})


@examples(60)
@given(shape=shapes, high=st.integers(1, 10), wide=st.integers(1, 10), seed=st.integers(0, 99))
def test_fp8_block_by_block(shape: tuple[int, int], high: int, wide: int, seed: int) -> None:
    weight = numbers(*shape, seed=seed)
    weight[:high, :wide] = 0
    found = convert(quantize_fp8_blocks((high, wide)), [(NAME, weight)])
    quantized, scale = found[NAME], found[f"{NAME}_scale_inv"]
    assert scale.shape == (math.ceil(shape[0] / high), math.ceil(shape[1] / wide))
    assert scale[0, 0] == 1.0
    back = dequantize(quantized, scale, block=(high, wide))
    for down, across in itertools.product(*map(range, scale.shape)):
        place = slice(down * high, (down + 1) * high), slice(across * wide, (across + 1) * wide)
        block = weight[place]
        step = block.abs().max() / 448 if block.any() else torch.tensor(1.0)
        assert scale[down, across] == step
        same({"q": quantized[place].float()}, {"q": (block / step).to(torch.float8_e4m3fn).float()})
        same({"w": back[place]}, {"w": quantized[place].float() * step})
    # e4m3 has three bits of mantissa: half a unit is 1/16 of a value; 2**-10 is half the smallest step
    assert ((back - weight).abs() <= weight.abs() / 16 + scale.max() * 2**-10 + 1e-12).all()


def test_blocks_are_128_wide_unless_told() -> None:
    found = convert(quantize_fp8_blocks(), [(NAME, numbers(300, 129))])
    assert found[f"{NAME}_scale_inv"].shape == (3, 2)


@each
def test_quantizing_again_what_was_dequantized_is_the_same(
    converter: Converter, dtype: torch.dtype, suffix: str
) -> None:
    # A scale that is a power of two, so that no product is rounded.
    largest = 127.0 if dtype is torch.int8 else 448.0
    weight = (numbers(4, 6) * 20).to(dtype).float() / 4
    weight[:, 0] = largest / 4
    found = convert(converter, [(NAME, weight)])
    block = (128, 128) if suffix == "_scale_inv" else None
    back = dequantize(found[NAME], found[NAME + suffix], block=block)
    assert (found[NAME + suffix] == 0.25).all()
    again = convert(converter, [(NAME, back)])
    same(found, again)


@each
def test_dequantized_in_another_dtype(converter: Converter, dtype: torch.dtype, suffix: str) -> None:
    found = convert(converter, [(NAME, numbers(3, 4))])
    block = (128, 128) if suffix == "_scale_inv" else None
    back = dequantize(found[NAME], found[NAME + suffix], block=block, dtype=torch.bfloat16)
    assert back.dtype is torch.bfloat16


@each
def test_by_default_matrices_of_linear_layers(converter: Converter, dtype: torch.dtype, suffix: str) -> None:
    kept = {
        "model.embed_tokens.weight": numbers(3, 4),
        "model.norm.weight": numbers(4),
        "model.layers.0.mlp.gate.weight": numbers(3, 4),
        "model.layers.0.mlp.shared_expert_gate.weight": numbers(1, 4),  # Qwen2-MoE
        "model.layers.0.block_sparse_moe.gate.weight": numbers(3, 4),  # Mixtral
        "output.weight": numbers(3, 4),  # InternLM2, Meta's Llama
        "transformer.wte.weight": numbers(3, 4),
        "lm_head.weight": numbers(3, 4),
        "conv.weight": numbers(3, 4, 2),
        "steps.weight": torch.ones(3, 4, dtype=torch.int64),
        "nothing.weight": torch.ones(0, 4),
        "table": numbers(3, 4),
    }
    same(convert(converter, kept.items()), kept)
    found = convert(converter, [("model.layers.0.mlp.gate_proj.weight", numbers(3, 4))])
    assert len(found) == 2


@pytest.mark.parametrize("make", [quantize_int8, quantize_fp8, quantize_fp8_blocks])
def test_only(make: object) -> None:
    weights = {"a.weight": numbers(2, 2), "lm_head.weight": numbers(2, 2)}
    for only in (["lm_head"], re.compile("head"), lambda name, tensor: "head" in name):
        found = convert(make(only=only), weights.items())
        assert [value.dtype.itemsize for value in found.values()] == [4, 1, 4]
    with pytest.raises(ConversionError, match="'b'"):
        convert(make(only=["b"]), weights.items())
    with pytest.raises(ValueError, match="only="):
        make(only="lm_head")


@each
@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_values_that_no_scale_fits(converter: Converter, dtype: torch.dtype, suffix: str, bad: float) -> None:
    weight = numbers(5, 4)
    weight[3, 2] = bad
    with pytest.raises(ConversionError, match=f"{NAME}: has a NaN or an infinity"):
        convert(converter, [(NAME, weight)])


@each
def test_a_model_on_the_meta_device_has_a_schema(
    converter: Converter, dtype: torch.dtype, suffix: str
) -> None:
    """The sender may be given such a model, which is loaded before ``connect()``."""
    real, hollow = (convert(converter, [("a.weight", numbers(3, 4).to(on))]) for on in ("cpu", "meta"))
    assert [(n, v.dtype, v.shape) for n, v in hollow.items()] == [
        (n, v.dtype, v.shape) for n, v in real.items()
    ]
    assert all(value.is_meta for value in hollow.values())


@each
def test_extreme_values(converter: Converter, dtype: torch.dtype, suffix: str) -> None:
    for largest in (torch.finfo(torch.float32).max, torch.finfo(torch.float32).tiny, 2.0**-149):
        weight = torch.tensor([[largest, -largest], [0.0, largest]])
        found = convert(converter, [(NAME, weight)])
        assert found[NAME].float().isfinite().all()
        assert found[NAME + suffix].isfinite().all()
        assert (found[NAME + suffix] > 0).all()


@pytest.mark.parametrize("make", [quantize_int8, quantize_fp8, quantize_fp8_blocks])
@pytest.mark.parametrize(
    "value", [numbers(4), numbers(2, 2, 2), torch.ones(2, 2).long(), torch.zeros(0, 2), torch.zeros(2, 0)]
)
def test_what_cannot_be_quantized(make: object, value: torch.Tensor) -> None:
    with pytest.raises(ConversionError, match=r"x: .* cannot be quantized, .* that are not empty; leave"):
        convert(make(only=["x"]), [("x", value)])
    with pytest.raises(ConversionError, match=r"x: has a NaN or an infinity in float32"):
        convert(make(only=["x"]), [("x", torch.full((2, 2), 1e39, dtype=torch.float64))])
    with pytest.raises(ConversionError, match=r"x: torch.float8_e4m3fn .* cannot be quantized"):
        convert(make(only=["x"]), [("x", torch.ones(2, 2).to(torch.float8_e4m3fn))])


def test_blocks_have_a_size() -> None:
    with pytest.raises(ValueError, match=r"block= .* not \(0, 128\)"):
        quantize_fp8_blocks((0, 128))


@pytest.mark.parametrize("quantize", [quantize_int8(), quantize_fp8(), quantize_fp8_blocks()])
def test_a_cast_afterwards_leaves_it_alone(quantize: Converter) -> None:
    weights = {"model.layers.0.mlp.down_proj.weight": torch.randn(8, 8), "norm.weight": torch.randn(8)}
    plain = dict(quantize(iter(weights.items())))
    cast_too = dict(chain(quantize, cast(torch.bfloat16))(iter(weights.items())))
    assert {name: value.dtype for name, value in cast_too.items()} == {
        name: torch.bfloat16 if name == "norm.weight" else value.dtype for name, value in plain.items()
    }


def test_scales_of_other_blocks_are_refused() -> None:
    weight, scale = torch.zeros(256, 128), torch.ones(2, 1)
    assert dequantize(weight, scale, block=(128, 128)).shape == (256, 128)
    with pytest.raises(ConversionError, match=r"\[4, 2\] scales, not \[2, 1\]"):
        dequantize(weight, scale, block=(64, 64))
    with pytest.raises(ConversionError, match=r"\[1, 256, 128\] is not a matrix"):
        dequantize(weight[None], scale, block=(128, 128))


@pytest.mark.parametrize("shape", [(4,), (1, 4), (3, 1, 1)])
def test_scales_that_would_be_spread_over_columns_are_refused(shape: tuple[int, ...]) -> None:
    with pytest.raises(
        ConversionError, match=r"\[4, 4\] has one scale, or scales of the shape \[4, 1\], not"
    ):
        dequantize(torch.zeros(4, 4, dtype=torch.int8), torch.ones(shape))


def test_a_block_larger_than_the_weight_costs_no_more_memory() -> None:
    weight, block = torch.randn(3, 5), (10**9, 10**9)
    quantized, scale = (value for _, value in quantize_fp8_blocks(block)(iter([("x.weight", weight)])))
    _, whole = (value for _, value in quantize_fp8()(iter([("x.weight", weight)])))
    assert scale.tolist() == [whole.tolist()]
    back = dequantize(quantized, scale, block=block)
    torch.testing.assert_close(back, weight, atol=0.1, rtol=0.1)
    with pytest.raises(ValueError, match="block= is rows and columns"):
        dequantize(quantized, scale, block=(0, 1))
