"""Megatron-Core's format and Hugging Face's."""

from __future__ import annotations

import random

import pytest
import torch
from convert_parts import (
    GROUPS,
    HEADS,
    HIDDEN,
    MIDDLE,
    VOCAB,
    HuggingFace,
    convert,
    fused_by_loops,
    megatron_of,
    numbers,
    same,
    state,
)
from fuzz import examples
from hypothesis import given
from hypothesis import strategies as st

from weight_update import ConversionError
from weight_update.convert import (
    fuse_gate_up,
    fuse_qkv,
    hf_to_megatron,
    megatron_to_hf,
    split_gate_up,
    split_qkv,
)
from weight_update.testing import random_bits

FLOATING = [torch.float32, torch.bfloat16, torch.float16, torch.float64, torch.float8_e4m3fn]
HF = state(HuggingFace())
sizes = st.integers(1, 4)


@examples(60)
@given(groups=sizes, each=sizes, dim=sizes, tail=st.lists(sizes, max_size=2), dtype=st.sampled_from(FLOATING))
def test_qkv(groups: int, each: int, dim: int, tail: list[int], dtype: torch.dtype) -> None:
    q = random_bits((groups * each * dim, *tail), dtype, 1)
    k = random_bits((groups * dim, *tail), dtype, 2)
    v = random_bits((groups * dim, *tail), dtype, 3)
    reference = fused_by_loops(q, k, v, groups * each, groups)
    same({"fused": fuse_qkv(q, k, v, groups)}, {"fused": reference})
    same(dict(zip("qkv", split_qkv(reference, groups * each, groups), strict=True)), {"q": q, "k": k, "v": v})


@examples(30)
@given(rows=sizes, tail=st.lists(sizes, max_size=2), dtype=st.sampled_from(FLOATING))
def test_gate_up(rows: int, tail: list[int], dtype: torch.dtype) -> None:
    gate, up = random_bits((rows, *tail), dtype, 1), random_bits((rows, *tail), dtype, 2)
    fused = fuse_gate_up(gate, up)
    same({"f": fused}, {"f": torch.cat([gate, up])})
    same(dict(zip("gu", split_gate_up(fused), strict=True)), {"g": gate, "u": up})


def test_gate_and_up_without_rows() -> None:
    assert [list(part.shape) for part in split_gate_up(torch.zeros(0, 3))] == [[0, 3], [0, 3]]


def test_the_fused_model_computes_the_same() -> None:
    x = numbers(5, HIDDEN, dtype=torch.float64)
    q = numbers(HEADS * 3, HIDDEN, dtype=torch.float64)
    k, v = (numbers(GROUPS * 3, HIDDEN, dtype=torch.float64, seed=seed) for seed in (1, 2))
    mixed = (x @ fuse_qkv(q, k, v, GROUPS).T).view(5, GROUPS, (HEADS // GROUPS + 2) * 3)
    query, key, value = mixed.split([HEADS // GROUPS * 3, 3, 3], dim=2)  # as Megatron's attention reads it
    for found, weight in ((query, q), (key, k), (value, v)):
        torch.testing.assert_close(found.reshape(5, -1), x @ weight.T)


@pytest.mark.parametrize(("heads", "groups"), [(4, 3), (4, 8), (6, 2), (4, 0), (0, 1), (-4, -2)])
def test_sizes_that_do_not_divide(heads: int, groups: int) -> None:
    with pytest.raises(ValueError, match="do not divide"):
        split_qkv(torch.zeros(11, 2), heads, groups)


def test_heads_that_do_not_divide_into_groups_though_the_rows_do() -> None:
    with pytest.raises(ValueError, match="do not divide"):
        split_qkv(torch.zeros(10, 2), 4, 3)


def test_parts_of_different_shapes() -> None:
    with pytest.raises(ValueError, match=r"2 groups do not divide the shapes \[12, 8\], \[6, 8\], \[4, 8\]"):
        fuse_qkv(torch.zeros(12, 8), torch.zeros(6, 8), torch.zeros(4, 8), 2)
    for query, key, groups in (
        ([6, 1], [3, 2], 1),
        ([6, 2], [4, 2], 2),
        ([0, 2], [0, 2], 1),
        ([4, 2], [2, 2], 0),
        ([], [2], 1),
    ):
        with pytest.raises(ValueError, match="do not divide the shapes"):
            fuse_qkv(torch.zeros(query), torch.zeros(key), torch.zeros(key), groups)
    for gate, up in ((torch.zeros(2), torch.zeros(3)), (torch.tensor(1.0), torch.tensor(1.0))):
        with pytest.raises(ValueError, match="must have the same shape"):
            fuse_gate_up(gate, up)
    with pytest.raises(ValueError, match=r"\[3, 2\]"):
        split_gate_up(torch.zeros(3, 2))


def test_a_whole_model_there_and_back() -> None:
    megatron = megatron_of(HF)
    same(convert(megatron_to_hf(HEADS, GROUPS), megatron.items()), HF)
    same(convert(hf_to_megatron(HEADS, GROUPS), HF.items()), megatron)


def test_without_grouped_queries() -> None:
    q, k, v = (numbers(6, 5, seed=seed) for seed in range(3))
    fused = {"decoder.layers.0.self_attention.linear_qkv.weight": fused_by_loops(q, k, v, 3, 3)}
    parts = {f"model.layers.0.self_attn.{n}_proj.weight": t for n, t in zip("qkv", (q, k, v), strict=True)}
    same(convert(megatron_to_hf(3), fused.items()), parts)
    same(convert(hf_to_megatron(3), parts.items()), fused)


@pytest.mark.parametrize(("heads", "groups"), [(4, None), (4, 1), (8, 2)])
def test_numbers_of_heads_that_do_not_fit_the_parts_are_refused(heads: int, groups: int | None) -> None:
    """They divide all the same, and would give the fused weight its shape with the rows in another order."""
    parts = {f"model.layers.0.self_attn.{n}_proj.bias": numbers(16 if n == "q" else 8) for n in "qkv"}
    assert len(convert(hf_to_megatron(4, 2), parts.items())) == 1
    with pytest.raises(ConversionError, match=r"linear_qkv\.bias: .*check num_heads= and num_kv_groups="):
        convert(hf_to_megatron(heads, groups), parts.items())


def test_parts_may_come_in_any_order() -> None:
    items = list(HF.items())
    random.Random(7).shuffle(items)
    same(convert(hf_to_megatron(HEADS, GROUPS), items), megatron_of(HF))


@pytest.mark.parametrize(
    "expert", ["mlp.experts.linear_{fc}.weight{e}", "mlp.experts.local_experts.{e}.linear_{fc}.weight"]
)
def test_experts_and_norms_apart(expert: str) -> None:
    hf = {k: v for k, v in state(HuggingFace(layers=1, moe=True)).items() if ".mlp." in k or "norm" in k}
    layer = "decoder.layers.0."
    megatron = {
        layer + "input_layernorm.weight": hf["model.layers.0.input_layernorm.weight"],
        layer + "pre_mlp_layernorm.weight": hf["model.layers.0.post_attention_layernorm.weight"],
        layer + "mlp.router.weight": hf["model.layers.0.mlp.gate.weight"],
        "decoder.final_layernorm.weight": hf["model.norm.weight"],
    }
    for e in range(12):
        theirs = f"model.layers.0.mlp.experts.{e}."
        megatron[layer + expert.format(fc="fc1", e=e)] = torch.cat(
            [hf[theirs + "gate_proj.weight"], hf[theirs + "up_proj.weight"]]
        )
        megatron[layer + expert.format(fc="fc2", e=e)] = hf[theirs + "down_proj.weight"]
    same(convert(megatron_to_hf(HEADS, GROUPS), megatron.items()), hf)


def test_experts_there_and_back() -> None:
    hf = state(HuggingFace(layers=2, moe=True))
    megatron = convert(hf_to_megatron(HEADS, GROUPS, moe=True), hf.items())
    assert "decoder.layers.1.mlp.experts.linear_fc1.weight11" in megatron
    assert "decoder.layers.1.pre_mlp_layernorm.weight" in megatron
    same(convert(megatron_to_hf(HEADS, GROUPS), megatron.items()), hf)


def test_padded_vocabulary_and_tied_embeddings() -> None:
    hf = {**HF, "lm_head.weight": HF["model.embed_tokens.weight"]}
    there = convert(hf_to_megatron(HEADS, GROUPS, padded_vocab_size=16, tie_word_embeddings=True), hf.items())
    assert there["embedding.word_embeddings.weight"].shape == (16, HIDDEN)
    assert not there["embedding.word_embeddings.weight"][VOCAB:].any()
    assert "output_layer.weight" not in there
    back = convert(
        megatron_to_hf(HEADS, GROUPS, vocab_size=VOCAB, tie_word_embeddings=True), iter(there.items())
    )
    same(back, hf)
    assert back["lm_head.weight"].data_ptr() == back["model.embed_tokens.weight"].data_ptr()
    head = HF["lm_head.weight"]
    fits = convert(hf_to_megatron(HEADS, padded_vocab_size=VOCAB), [("lm_head.weight", head)])
    assert fits["output_layer.weight"].data_ptr() == head.data_ptr()  # there is nothing to pad, so no copy
    with pytest.raises(ConversionError, match=r"output_layer.weight: 10 rows do not fit"):
        convert(
            hf_to_megatron(HEADS, GROUPS, padded_vocab_size=9), [("lm_head.weight", HF["lm_head.weight"])]
        )
    with pytest.raises(ConversionError, match=r"output_layer.weight: 16 rows are fewer than vocab_size=17"):
        convert(
            megatron_to_hf(HEADS, GROUPS, vocab_size=17), [("output_layer.weight", torch.zeros(16, HIDDEN))]
        )


@pytest.mark.parametrize(
    "parts",
    [
        {"mlp.gate_proj.weight": torch.bfloat16, "mlp.up_proj.weight": torch.float32},
        {f"self_attn.{part}_proj.weight": {"v": torch.float16}.get(part, torch.float32) for part in "qkv"},
    ],
    ids=["gate and up", "query, key and value"],
)
def test_parts_of_different_dtypes_are_refused(parts: dict[str, torch.dtype]) -> None:
    """A fused weight has one dtype, so one of the parts would change its own."""
    items = [(f"model.layers.2.{name}", numbers(2, 4, dtype=dtype)) for name, dtype in parts.items()]
    dtypes = ", ".join(map(str, parts.values()))
    with pytest.raises(
        ConversionError, match=rf"^decoder\.layers\.2\..*: the parts have the dtypes {dtypes}; .*cast\(\)"
    ):
        convert(hf_to_megatron(1), items)
    with pytest.raises(ValueError, match=r"float32, torch\.float16; cast them to one dtype first"):
        fuse_gate_up(torch.zeros(2), torch.zeros(2).half())


@pytest.mark.parametrize("name", ["embedding.word_embeddings.weight", "output_layer.weight"])
def test_embeddings_without_rows_are_refused(name: str) -> None:
    theirs = {"embedding.word_embeddings.weight": "model.embed_tokens.weight"}.get(name, "lm_head.weight")
    number = torch.tensor(1.0)
    for converter, old_name in (
        (megatron_to_hf(HEADS, vocab_size=VOCAB), name),
        (hf_to_megatron(HEADS, padded_vocab_size=VOCAB), theirs),
    ):
        with pytest.raises(ConversionError, match=rf"^{name}: the shape \[\] has no rows"):
            convert(converter, [(old_name, number)])
    assert list(convert(megatron_to_hf(HEADS), [(name, number)])) == [theirs]  # no row is cut off


def test_names_it_does_not_know_pass() -> None:
    other = {"decoder.layers.3.adapter.weight": numbers(2), "vision.0.weight": numbers(3)}
    same(convert(megatron_to_hf(HEADS, GROUPS), other.items()), other)
    same(convert(hf_to_megatron(HEADS, GROUPS), other.items()), other)


def test_errors_name_the_weight() -> None:
    name = "decoder.layers.3.self_attention.linear_qkv.weight"
    with pytest.raises(ConversionError, match=rf"{name}: 4 heads in 2 groups do not divide .*\[25, 8\]"):
        convert(megatron_to_hf(HEADS, GROUPS), [(name, torch.zeros(25, HIDDEN))])
    name = "decoder.layers.3.mlp.linear_fc1.weight"
    with pytest.raises(ConversionError, match=name):
        convert(megatron_to_hf(HEADS, GROUPS), [(name, torch.zeros(2 * MIDDLE + 1, HIDDEN))])
    some = {name: value for name, value in HF.items() if not name.endswith("3.self_attn.k_proj.bias")}
    with pytest.raises(
        ConversionError, match=r"decoder\.layers\.3\.self_attention\.linear_qkv\.bias \(there"
    ):
        convert(hf_to_megatron(HEADS, GROUPS), some.items())
    for wrong in ((4, 3), (0, 1), (4, 0)):
        with pytest.raises(ValueError, match=r"do not divide|is an integer of at least 1"):
            megatron_to_hf(*wrong)
    for size in (-1, 0, 8.0, "8"):
        with pytest.raises(ValueError, match="vocab_size is an integer of at least 1"):
            megatron_to_hf(HEADS, vocab_size=size)  # type: ignore[arg-type]
        with pytest.raises(ValueError, match="padded_vocab_size is an integer of at least 1"):
            hf_to_megatron(HEADS, padded_vocab_size=size)  # type: ignore[arg-type]
