"""Layouts of fused weights, which hold several projections: pure functions and their inverses."""

from __future__ import annotations

import torch


def split_qkv(
    fused: torch.Tensor, num_heads: int, num_kv_groups: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Split a weight or bias in Megatron-Core's layout into query, key and value projections.

    The rows are ``num_kv_groups`` groups. Each group has the rows of its ``num_heads / num_kv_groups`` query
    heads, then the rows of its key head and of its value head.
    Source: ``SelfAttention.get_query_key_value_tensors`` in ``megatron/core/transformer/attention.py``.

    Args:
        fused: shape ``(num_kv_groups * (num_heads / num_kv_groups + 2) * head_dim, ...)``.
        num_heads: number of query heads.
        num_kv_groups: number of key (and value) heads; equal to ``num_heads`` without grouped queries.

    Returns:
        Tensors of shape ``(num_heads * head_dim, ...)`` and twice ``(num_kv_groups * head_dim, ...)``.

    Raises:
        ValueError: the sizes do not divide.
    """
    blocks = num_heads + 2 * num_kv_groups
    good = 0 < num_kv_groups <= num_heads and num_heads % num_kv_groups == 0
    if not good or fused.dim() == 0 or fused.shape[0] % blocks:
        raise ValueError(
            f"{num_heads} heads in {num_kv_groups} groups do not divide the shape {list(fused.shape)}"
        )
    per_group = num_heads // num_kv_groups
    grouped = torch.unflatten(fused, 0, (num_kv_groups, per_group + 2, fused.shape[0] // blocks))
    query, key, value = torch.split(grouped, [per_group, 1, 1], dim=1)
    return query.flatten(0, 2), key.flatten(0, 2), value.flatten(0, 2)


def fuse_qkv(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, num_kv_groups: int) -> torch.Tensor:
    """Fuse query, key and value projections; the inverse of :func:`split_qkv`.

    Raises:
        ValueError: the sizes do not divide, or the dtypes differ.
    """
    rows = key.shape[0] if key.dim() == query.dim() > 0 else 0
    good = rows and num_kv_groups > 0 and value.shape == key.shape and query.shape[1:] == key.shape[1:]
    if not good or rows % num_kv_groups or query.shape[0] % rows:
        shapes = ", ".join(str(list(part.shape)) for part in (query, key, value))
        raise ValueError(f"{num_kv_groups} groups do not divide the shapes {shapes}")
    _check_dtypes(query, key, value)
    head_dim = rows // num_kv_groups
    grouped = [
        torch.unflatten(part, 0, (num_kv_groups, part.shape[0] // rows, head_dim))
        for part in (query, key, value)
    ]
    return torch.cat(grouped, dim=1).flatten(0, 2)


def split_gate_up(fused: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Split a weight or bias into its first half, gate, and its second half, up; return views.

    Source: ``MLP.forward`` in ``megatron/core/transformer/mlp.py``, where the first half goes through the
    activation.

    Raises:
        ValueError: the number of rows is odd.
    """
    if fused.dim() == 0 or fused.shape[0] % 2:
        raise ValueError(f"gate and up do not divide the shape {list(fused.shape)}")
    gate, up = torch.tensor_split(fused, 2)
    return gate, up


def fuse_gate_up(gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
    """Fuse gate and up projections; the inverse of :func:`split_gate_up`.

    Raises:
        ValueError: the shapes or the dtypes differ.
    """
    if gate.shape != up.shape or gate.dim() == 0:
        raise ValueError(
            f"gate is {list(gate.shape)} and up {list(up.shape)}; they must have the same shape, with rows"
        )
    _check_dtypes(gate, up)
    return torch.cat([gate, up])


def _check_dtypes(*parts: torch.Tensor) -> None:
    """Raise ValueError if the dtypes differ, because :func:`torch.cat` would promote some of the parts."""
    if len({part.dtype for part in parts}) > 1:
        dtypes = ", ".join(str(part.dtype) for part in parts)
        raise ValueError(f"the parts have the dtypes {dtypes}; cast them to one dtype first, as by cast()")
