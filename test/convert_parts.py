"""Weights in several formats, and what tests do with converters."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import nn

from weight_update.convert import Converter, Item
from weight_update.testing import fingerprint

HEADS, GROUPS, HEAD_DIM, HIDDEN, MIDDLE, VOCAB = 4, 2, 3, 8, 6, 10


def convert(converter: Converter, items: Iterable[Item]) -> dict[str, torch.Tensor]:
    """Return the converted weights; a name that comes twice is an error."""
    made = list(converter(iter(items)))
    out = dict(made)
    assert len(out) == len(made), "a name came twice"
    return out


def same(left: dict[str, torch.Tensor], right: dict[str, torch.Tensor]) -> None:
    """Assert that names, dtypes, shapes and bits are equal."""
    assert fingerprint(left) == fingerprint(right)


def numbers(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> torch.Tensor:
    """Return normally distributed random numbers."""
    generator = torch.Generator().manual_seed(seed + sum(shape))
    return torch.randn(shape, generator=generator).to(dtype)


class Block(nn.Module):
    """One layer with Hugging Face's names; its forward pass is a stand-in that uses every weight."""

    def __init__(self, moe: bool = False) -> None:
        super().__init__()
        query, key = HEADS * HEAD_DIM, GROUPS * HEAD_DIM
        self.self_attn = nn.ModuleDict(
            {
                "q_proj": nn.Linear(HIDDEN, query),
                "k_proj": nn.Linear(HIDDEN, key),
                "v_proj": nn.Linear(HIDDEN, key),
                "o_proj": nn.Linear(query, HIDDEN, bias=False),
            }
        )
        self.mlp: nn.Module
        if moe:
            experts = nn.ModuleList(gated_mlp() for _ in range(12))
            self.mlp = nn.ModuleDict({"gate": nn.Linear(HIDDEN, 12, bias=False), "experts": experts})
        else:
            self.mlp = gated_mlp()
        self.input_layernorm, self.post_attention_layernorm = nn.RMSNorm(HIDDEN), nn.RMSNorm(HIDDEN)


def gated_mlp() -> nn.ModuleDict:
    return nn.ModuleDict(
        {
            "gate_proj": nn.Linear(HIDDEN, MIDDLE, bias=False),
            "up_proj": nn.Linear(HIDDEN, MIDDLE, bias=False),
            "down_proj": nn.Linear(MIDDLE, HIDDEN, bias=False),
        }
    )


class HuggingFace(nn.Module):
    """A little language model with Hugging Face's names and random weights."""

    def __init__(self, seed: int = 0, layers: int = 11, moe: bool = False) -> None:
        super().__init__()
        self.model = nn.ModuleDict(
            {
                "embed_tokens": nn.Embedding(VOCAB, HIDDEN),
                "layers": nn.ModuleList(Block(moe) for _ in range(layers)),
                "norm": nn.RMSNorm(HIDDEN),
            }
        )
        self.lm_head = nn.Linear(HIDDEN, VOCAB, bias=False)
        with torch.no_grad():
            for place, value in enumerate(self.parameters()):
                value.copy_(numbers(*value.shape, seed=1000 * seed + place))


def fused_by_loops(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, heads: int, groups: int
) -> torch.Tensor:
    """Megatron's layout, head by head: the reference for the layouts."""
    dim, each = k.shape[0] // groups, heads // groups
    rows = []
    for group in range(groups):
        for head in range(group * each, (group + 1) * each):
            rows.append(q[head * dim : (head + 1) * dim])
        rows.append(k[group * dim : (group + 1) * dim])
        rows.append(v[group * dim : (group + 1) * dim])
    return torch.cat(rows)


def megatron_of(hf: dict[str, torch.Tensor], layers: int = 11) -> dict[str, torch.Tensor]:
    """A dense model's weights in Megatron-Core's format: the reference for the names."""
    out = {"embedding.word_embeddings.weight": hf["model.embed_tokens.weight"]}
    for layer in range(layers):
        ours, theirs = f"decoder.layers.{layer}.", f"model.layers.{layer}."
        attention, mlp = theirs + "self_attn.", theirs + "mlp."
        qkv = ours + "self_attention.linear_qkv."
        out[ours + "self_attention.linear_proj.weight"] = hf[attention + "o_proj.weight"]
        out[qkv + "layer_norm_weight"] = hf[theirs + "input_layernorm.weight"]
        for kind in ("weight", "bias"):
            parts = [hf[f"{attention}{part}_proj.{kind}"] for part in "qkv"]
            out[qkv + kind] = fused_by_loops(*parts, HEADS, GROUPS)
        out[ours + "mlp.linear_fc1.layer_norm_weight"] = hf[theirs + "post_attention_layernorm.weight"]
        out[ours + "mlp.linear_fc1.weight"] = torch.cat(
            [hf[mlp + "gate_proj.weight"], hf[mlp + "up_proj.weight"]]
        )
        out[ours + "mlp.linear_fc2.weight"] = hf[mlp + "down_proj.weight"]
    out["decoder.final_layernorm.weight"] = hf["model.norm.weight"]
    out["output_layer.weight"] = hf["lm_head.weight"]
    return out


class Tree(nn.Module):
    """A module whose parameters have the given dotted names."""

    def __init__(self, weights: dict[str, torch.Tensor]) -> None:
        super().__init__()
        for name, value in weights.items():
            path, _, leaf = name.rpartition(".")
            owner: nn.Module = self
            for part in path.split(".") if path else []:
                if part not in owner._modules:
                    owner.add_module(part, nn.Module())
                owner = owner.get_submodule(part)
            floating = value.is_floating_point() and value.dtype.itemsize > 1
            owner.register_parameter(leaf, nn.Parameter(value.clone(), requires_grad=floating))


def state(module: nn.Module) -> dict[str, torch.Tensor]:
    """Return copies of all weights."""
    return {name: value.detach().clone() for name, value in module.state_dict().items()}
