"""Shards of tensor-parallel ranks, joined to whole weights."""

from __future__ import annotations

import contextlib
import functools
import hashlib
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist

from weight_update.convert.base import Converter, Item, stream
from weight_update.errors import ConversionError

__all__ = ["MEGATRON_SHARDS", "Sharded", "gather_tensor_parallel"]


@dataclass(frozen=True)
class Sharded:
    """How a weight is cut into one shard for each rank.

    ``Sharded(0)``: by output rows, as Megatron's ColumnParallelLinear. ``Sharded(1)``: by input columns, as
    RowParallelLinear. ``Sharded(0, (1, 1))``: by rows of the gate and rows of the up projection, which each
    rank has one after the other.

    Attributes:
        dim: the dimension that is cut.
        parts: relative sizes of what stands one after the other along ``dim``, in the whole and in each
            shard: ``(1,)`` for one projection, ``(1, 1)`` for gate and up, ``(4, 1, 1)`` for four times
            more query than key and value rows.
    """

    dim: int
    parts: tuple[int, ...] = (1,)

    def join(self, shards: Sequence[torch.Tensor]) -> torch.Tensor:
        """The whole weight of ``shards``, which are in the order of ranks.

        Raises:
            ValueError: a shard does not divide into the parts.
        """
        parts = zip(*(self._cut(shard) for shard in shards), strict=True)
        return torch.cat([piece for part in parts for piece in part], self.dim)

    def split(self, whole: torch.Tensor, ranks: int) -> list[torch.Tensor]:
        """The shards of ``ranks`` ranks: the inverse of :meth:`join`.

        Raises:
            ValueError: the weight does not divide into the parts, or a part into the ranks.
        """
        parts = self._cut(whole)
        if any(part.shape[self.dim] % ranks for part in parts):
            raise ValueError(f"{ranks} ranks do not divide dimension {self.dim} of {list(whole.shape)}")
        pieces = [torch.split(part, part.shape[self.dim] // ranks, self.dim) for part in parts]
        return [torch.cat(shard, self.dim) for shard in zip(*pieces, strict=True)]

    def _cut(self, tensor: torch.Tensor) -> tuple[torch.Tensor, ...]:
        if tensor.dim() <= self.dim or tensor.shape[self.dim] % sum(self.parts):
            raise ValueError(f"{self} does not divide the shape {list(tensor.shape)}")
        unit = tensor.shape[self.dim] // sum(self.parts)
        return torch.split(tensor, [size * unit for size in self.parts], self.dim)


Shards = Sequence[tuple[str, Sharded]]

# Fused QKV weights are cut by rows, as any: the groups of a rank are whole.
MEGATRON_SHARDS: Shards = (
    (r"(word_embeddings|output_layer)\.weight$", Sharded(0)),
    (r"\.linear_qkv\.(weight|bias)$", Sharded(0)),
    (r"\.linear_fc1\.(weight\d*|bias)$", Sharded(0, (1, 1))),
    (r"\.linear_(proj|fc2)\.weight\d*$", Sharded(1)),
)
"""How Megatron-Core cuts the weights of a ``GPTModel`` with gated MLPs.
Source: ``megatron/core/tensor_parallel/layers.py`` and ``megatron/core/transformer/mlp.py``."""


def gather_tensor_parallel(
    group: dist.ProcessGroup | None = None, shards: Shards = MEGATRON_SHARDS
) -> Converter:
    """Join the shards of all ranks of ``group``, one weight at a time.

    Every rank of the group runs this converter over the same names in the same order, to its end; each
    gets the whole weights. What no pattern names is taken to be equal on all ranks, and passes.

    Args:
        group: of the tensor-parallel ranks, with a backend that moves these tensors; None: all ranks.
        shards: ``(pattern, how it is cut)``; the first pattern that :func:`re.search` finds in a name counts.
            By default those of Megatron-Core's ``GPTModel`` with gated MLPs.

    Before a weight is gathered the ranks compare its name, shape and dtype. Where they differ, or a rank's
    weights end or fail, the converter raises :class:`~weight_update.ConversionError` on all of them, saying
    what each has. A rank that stops asking for weights leaves the others waiting for the timeout of the
    group.
    """
    compiled = [(re.compile(pattern), how) for pattern, how in shards]
    return functools.partial(_gather, group, compiled)


def _gather(
    group: dist.ProcessGroup | None, shards: Sequence[tuple[re.Pattern[str], Sharded]], items: Iterator[Item]
) -> Iterator[Item]:
    def rule(name: str, tensor: torch.Tensor) -> list[Item]:
        how = next((how for pattern, how in shards if pattern.search(name)), None)
        if how is None:
            return [(name, tensor)]
        _agree(group, f"{name}: {tensor.dtype}{list(tensor.shape)}")
        try:
            return [(name, how.join(_all_gather(group, tensor)))]
        except ValueError as error:
            raise ConversionError(f"{name}: {error}") from None

    yield from stream(_told(group, items), rule)
    _agree(group, "the end of its weights")


def _told(group: dist.ProcessGroup | None, items: Iterator[Item]) -> Iterator[Item]:
    """``items``, where an error among them is told to the other ranks."""
    try:
        yield from items
    except Exception as error:
        with contextlib.suppress(ConversionError):  # the others raise that; here the error itself says more
            _agree(group, f"an error: {error!r}")
        raise


def _agree(group: dist.ProcessGroup | None, mine: str) -> None:
    digest = int.from_bytes(hashlib.sha256(mine.encode()).digest()[:7], "little")
    device = "cuda" if dist.get_backend(group) == "nccl" else "cpu"
    found = _all_gather(group, torch.tensor([digest], device=device))
    if all(int(other) == digest for other in found):
        return
    told: list[str | None] = [None] * len(found)
    dist.all_gather_object(told, mine, group)
    lines = "".join(f"\n  - rank {rank} of the group has {text}" for rank, text in enumerate(told))
    raise ConversionError(f"the ranks of the group do not go through the same weights:{lines}")


def _all_gather(group: dist.ProcessGroup | None, tensor: torch.Tensor) -> list[torch.Tensor]:
    """The tensors of all ranks, as bytes, so that any dtype travels."""
    mine = tensor.contiguous().view(-1).view(torch.uint8)
    found = [torch.empty_like(mine) for _ in range(dist.get_world_size(group))]
    dist.all_gather(found, mine, group)
    return [piece.view(tensor.dtype).view(tensor.shape) for piece in found]
