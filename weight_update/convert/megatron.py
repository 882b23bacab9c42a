"""Conversion between the weights of Megatron-Core and of Hugging Face."""

from __future__ import annotations

import functools
import re
from collections.abc import Iterator, Sequence

import torch

from weight_update.arguments import whole_number
from weight_update.convert.base import Converter, Item, stream
from weight_update.convert.fused import fuse_gate_up, fuse_qkv, split_gate_up, split_qkv
from weight_update.errors import ConversionError

_EMBEDDING, _OUTPUT = "embedding.word_embeddings.weight", "output_layer.weight"
_FUSED_MLP_NORM = "decoder.layers.#.mlp.linear_fc1.layer_norm_weight"

# "#" stands for the number of a layer or expert. One name on the right: renamed; two: gate and up; three:
# query, key and value.
_EXPERT = ("mlp.experts.#.gate_proj.weight", "mlp.experts.#.up_proj.weight")
_LAYER: dict[str, tuple[str, ...]] = {
    "self_attention.linear_qkv.layer_norm_weight": ("input_layernorm.weight",),
    "input_layernorm.weight": ("input_layernorm.weight",),
    "self_attention.q_layernorm.weight": ("self_attn.q_norm.weight",),
    "self_attention.k_layernorm.weight": ("self_attn.k_norm.weight",),
    "mlp.linear_fc1.layer_norm_weight": ("post_attention_layernorm.weight",),
    "pre_mlp_layernorm.weight": ("post_attention_layernorm.weight",),
    "mlp.router.weight": ("mlp.gate.weight",),
    "mlp.experts.linear_fc1.weight#": _EXPERT,
    "mlp.experts.linear_fc2.weight#": ("mlp.experts.#.down_proj.weight",),
    "mlp.experts.local_experts.#.linear_fc1.weight": _EXPERT,
    "mlp.experts.local_experts.#.linear_fc2.weight": ("mlp.experts.#.down_proj.weight",),
}
for _kind in ("weight", "bias"):
    _qkv = tuple(f"self_attn.{part}_proj.{_kind}" for part in "qkv")
    _LAYER[f"self_attention.linear_qkv.{_kind}"] = _qkv
    _LAYER[f"self_attention.linear_proj.{_kind}"] = (f"self_attn.o_proj.{_kind}",)
    _LAYER[f"mlp.linear_fc1.{_kind}"] = (f"mlp.gate_proj.{_kind}", f"mlp.up_proj.{_kind}")
    _LAYER[f"mlp.linear_fc2.{_kind}"] = (f"mlp.down_proj.{_kind}",)

_HF_NAMES: dict[str, tuple[str, ...]] = {
    _EMBEDDING: ("model.embed_tokens.weight",),
    **{
        f"decoder.layers.#.{ours}": tuple(f"model.layers.#.{t}" for t in theirs)
        for ours, theirs in _LAYER.items()
    },
    "decoder.final_layernorm.weight": ("model.norm.weight",),
    _OUTPUT: ("lm_head.weight",),
}
_NUMBER = re.compile(r"(?<=\.)\d+(?=\.)|(?<=\.weight)\d+$")


def megatron_to_hf(
    num_heads: int,
    num_kv_groups: int | None = None,
    *,
    vocab_size: int | None = None,
    tie_word_embeddings: bool = False,
) -> Converter:
    """Convert names and fused weights of Megatron-Core's ``GPTModel`` to Hugging Face's.

    The converter knows the Llama, Qwen2 and Qwen3 families: attention with or without biases and query and
    key norms, gated MLPs, norms fused into the linear layers (Transformer Engine) or not, and routed experts,
    grouped (``experts.linear_fc1.weight3``) or local (``experts.local_experts.3.linear_fc1.weight``). Names
    are relative to the ``GPTModel``; remove wrappers such as ``module.`` with :func:`rename` first. Unknown
    names pass unchanged. Weights must be whole: see :func:`gather_tensor_parallel`.

    Sources: ``megatron/core/models/gpt/gpt_model.py`` and ``megatron/core/transformer/``;
    ``modeling_llama.py``, ``modeling_qwen2.py`` and ``modeling_qwen3_moe.py`` in transformers.

    Args:
        num_heads: number of query heads (``num_attention_heads``).
        num_kv_groups: number of key and value heads (``num_query_groups``); None for as many as query heads.
        vocab_size: number of embedding rows that are tokens; Megatron pads beyond them. None for all rows.
        tie_word_embeddings: whether to yield the embeddings also as ``lm_head.weight``, because the model has
            no output layer.

    Raises:
        ValueError: a number is not a positive integer, or the heads do not divide into the groups.

    The converter raises :class:`~weight_update.ConversionError` if a fused weight does not divide, or if
    embeddings to be cut to ``vocab_size`` have fewer rows than that.
    """
    groups = _checked_groups(num_heads, num_kv_groups)
    if vocab_size is not None:
        whole_number(vocab_size, "vocab_size", least=1)
    return functools.partial(_to_hf, num_heads, groups, vocab_size, tie_word_embeddings)


def hf_to_megatron(
    num_heads: int,
    num_kv_groups: int | None = None,
    *,
    padded_vocab_size: int | None = None,
    tie_word_embeddings: bool = False,
    moe: bool = False,
) -> Converter:
    """Convert Hugging Face's weights to Megatron-Core's, with the names of the Transformer Engine layers.

    This is the inverse of :func:`megatron_to_hf`. The parts of a fused weight may come in any order; they are
    held until the last one comes.

    Args:
        num_heads: number of query heads.
        num_kv_groups: number of key and value heads; None for as many as query heads.
        padded_vocab_size: number of embedding rows; rows beyond the given ones are zero. None for no padding.
        tie_word_embeddings: whether to leave ``lm_head.weight`` out.
        moe: whether all layers have (grouped) experts, and so a separate norm before them.

    Raises:
        ValueError: a number is not a positive integer, or the heads do not divide into the groups.

    The converter raises :class:`~weight_update.ConversionError` if parts do not fit together or have
    different dtypes, if embeddings have no rows or too many for ``padded_vocab_size``, and at the end if
    parts are missing.
    """
    groups = _checked_groups(num_heads, num_kv_groups)
    if padded_vocab_size is not None:
        whole_number(padded_vocab_size, "padded_vocab_size", least=1)
    return functools.partial(_to_megatron, num_heads, groups, padded_vocab_size, tie_word_embeddings, moe)


def _checked_groups(num_heads: int, num_kv_groups: int | None) -> int:
    heads = whole_number(num_heads, "num_heads", least=1)
    groups = heads if num_kv_groups is None else whole_number(num_kv_groups, "num_kv_groups", least=1)
    if heads % groups:
        raise ValueError(f"{num_heads} heads do not divide into {groups} groups")
    return groups


def _to_hf(
    num_heads: int, groups: int, vocab_size: int | None, tied: bool, items: Iterator[Item]
) -> Iterator[Item]:
    def parts_of(name: str, tensor: torch.Tensor, count: int) -> Sequence[torch.Tensor]:
        if count > 1:
            return split_gate_up(tensor) if count == 2 else split_qkv(tensor, num_heads, groups)
        if vocab_size is None or name not in (_EMBEDDING, _OUTPUT):
            return [tensor]
        if _rows(tensor) < vocab_size:
            raise ValueError(f"{_rows(tensor)} rows are fewer than vocab_size={vocab_size}")
        return [tensor[:vocab_size]]

    def rule(name: str, tensor: torch.Tensor) -> list[Item]:
        generic, numbers = _generic(name)
        names = _HF_NAMES.get(generic, (name,))
        try:
            parts = parts_of(name, tensor, len(names))
        except ValueError as error:
            raise ConversionError(f"{name}: {error}") from None
        if name == _EMBEDDING and tied:
            return [(names[0], parts[0]), ("lm_head.weight", parts[0])]
        return [(_filled(new, numbers), part) for new, part in zip(names, parts, strict=True)]

    return stream(items, rule)


def _to_megatron(
    num_heads: int, groups: int, padded: int | None, tied: bool, moe: bool, items: Iterator[Item]
) -> Iterator[Item]:
    whole_of = _wholes(moe)
    waiting: dict[str, dict[str, torch.Tensor]] = {}

    def rule(name: str, tensor: torch.Tensor) -> list[Item]:
        generic, numbers = _generic(name)
        if tied and name == "lm_head.weight":
            return []
        if generic not in whole_of:
            return [(name, tensor)]
        whole = _filled(whole_of[generic], numbers)
        wanted = [_filled(part, numbers) for part in _HF_NAMES[whole_of[generic]]]
        parts = waiting.setdefault(whole, {})
        parts[name] = tensor
        if len(parts) < len(wanted):
            return []
        del waiting[whole]
        try:
            return [(whole, _fused(whole, [parts[part] for part in wanted], num_heads, groups, padded))]
        except ValueError as error:
            raise ConversionError(f"{whole}: {error}") from None

    yield from stream(items, rule)
    if waiting:
        lines = (f"{whole} (there is only {', '.join(parts)})" for whole, parts in waiting.items())
        raise ConversionError(f"parts are missing for {'; '.join(lines)}")


def _fused(
    whole: str, parts: Sequence[torch.Tensor], num_heads: int, groups: int, padded: int | None
) -> torch.Tensor:
    if len(parts) == 3:
        fused = fuse_qkv(parts[0], parts[1], parts[2], groups)
        if parts[0].shape[0] * groups != parts[1].shape[0] * num_heads:
            raise ValueError(
                f"{num_heads} query heads have {parts[0].shape[0]} rows, and {groups} key heads "
                f"{parts[1].shape[0]}, so heads differ in size; check num_heads= and num_kv_groups="
            )
        return fused
    if len(parts) == 2:
        return fuse_gate_up(parts[0], parts[1])
    tensor = parts[0]
    if padded is None or whole not in (_EMBEDDING, _OUTPUT):
        return tensor
    rows = _rows(tensor)
    if padded < rows:
        raise ValueError(f"{rows} rows do not fit into padded_vocab_size={padded}")
    if padded == rows:
        return tensor
    return torch.cat([tensor, tensor.new_zeros(padded - rows, *tensor.shape[1:])])


def _rows(tensor: torch.Tensor) -> int:
    if tensor.dim() == 0:
        raise ValueError(f"the shape {list(tensor.shape)} has no rows")
    return tensor.shape[0]


def _wholes(moe: bool) -> dict[str, str]:
    """Return the name of the whole weight for each of Hugging Face's names; the first one in the table."""
    found: dict[str, str] = {}
    for whole, parts in _HF_NAMES.items():
        if not (moe and whole == _FUSED_MLP_NORM):
            for part in parts:
                found.setdefault(part, whole)
    return found


def _generic(name: str) -> tuple[str, list[str]]:
    return _NUMBER.sub("#", name), _NUMBER.findall(name)


def _filled(template: str, numbers: Sequence[str]) -> str:
    for number in numbers:
        template = template.replace("#", number, 1)
    return template
