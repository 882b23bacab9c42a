"""Gathering of the shards of tensor-parallel ranks."""

from __future__ import annotations

import contextlib
import functools
import hashlib
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist

from weight_update.convert.base import Converter, Item, compiled_pairs, stream
from weight_update.errors import ConversionError


@dataclass(frozen=True)
class Sharded:
    """The division of a weight into one shard for each rank.

    ``Sharded(0)`` divides by output rows, as Megatron's ColumnParallelLinear; ``Sharded(1)`` by input
    columns, as RowParallelLinear. ``Sharded(0, (1, 1))`` divides the rows of the gate and the rows of the up
    projection, and each rank has one after the other.

    Attributes:
        dim: dimension that is divided.
        parts: relative sizes of consecutive parts along ``dim``, in the whole weight and in each shard:
            ``(1,)`` for one projection, ``(1, 1)`` for gate and up, ``(4, 1, 1)`` for four times more query
            than key and value rows.

    Raises:
        ValueError: ``dim`` is not an integer, or ``parts`` are not positive integers.
    """

    dim: int
    parts: tuple[int, ...] = (1,)

    def __post_init__(self) -> None:
        sizes = isinstance(self.parts, Sequence) and all(isinstance(p, int) and p > 0 for p in self.parts)
        if not isinstance(self.dim, int) or not sizes or not self.parts:
            raise ValueError(
                f"Sharded takes a dimension and positive sizes, such as Sharded(0, (1, 1)), not {self}"
            )

    def join(self, shards: Sequence[torch.Tensor]) -> torch.Tensor:
        """Return the whole weight of ``shards``, which are in the order of ranks.

        Raises:
            ValueError: a shard does not divide into the parts.
        """
        return torch.cat(self._pieces(shards), self.dim)

    def _pieces(self, shards: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Return the pieces of ``shards`` in the order of the whole weight; raise as :meth:`join`."""
        parts = zip(*(self._cut(shard) for shard in shards), strict=True)
        return [one for part in parts for one in part]

    def split(self, whole: torch.Tensor, ranks: int) -> list[torch.Tensor]:
        """Return the shards of ``ranks`` ranks; the inverse of :meth:`join`.

        Raises:
            ValueError: the weight does not divide into the parts, or a part into the ranks.
        """
        parts = self._cut(whole)
        if any(part.shape[self.dim] % ranks for part in parts):
            raise ValueError(f"{ranks} ranks do not divide dimension {self.dim} of {list(whole.shape)}")
        shares = [torch.tensor_split(part, ranks, self.dim) for part in parts]
        return [torch.cat(shard, self.dim) for shard in zip(*shares, strict=True)]

    def _cut(self, tensor: torch.Tensor) -> tuple[torch.Tensor, ...]:
        if not -tensor.dim() <= self.dim < tensor.dim() or tensor.shape[self.dim] % sum(self.parts):
            raise ValueError(f"{self} does not divide the shape {list(tensor.shape)}")
        unit = tensor.shape[self.dim] // sum(self.parts)
        return torch.split(tensor, [size * unit for size in self.parts], self.dim)


Shards = Sequence[tuple[str, Sharded]]

# Fused QKV weights are divided by rows like any other: the groups of a rank are whole.
MEGATRON_SHARDS: Shards = (
    (r"(word_embeddings|output_layer)\.weight$", Sharded(0)),
    (r"\.linear_qkv\.(weight|bias)$", Sharded(0)),
    (r"\.linear_fc1\.(weight\d*|bias)$", Sharded(0, (1, 1))),
    (r"\.linear_(proj|fc2)\.weight\d*$", Sharded(1)),
)
"""The shards of Megatron-Core's ``GPTModel`` with gated MLPs.

Source: ``megatron/core/tensor_parallel/layers.py`` and ``megatron/core/transformer/mlp.py``."""


def gather_tensor_parallel(
    group: dist.ProcessGroup | None = None, shards: Shards = MEGATRON_SHARDS
) -> Converter:
    """Join the shards of all ranks of ``group``, one weight at a time.

    Every rank of the group must run this converter over the same names in the same order, to its end. Each
    rank gets the whole weights. Weights that match no pattern are assumed to be equal on all ranks, and pass
    unchanged.

    Args:
        group: group of the tensor-parallel ranks, with a backend that supports these tensors; None for all
            ranks.
        shards: pairs of a pattern and a :class:`Sharded`; the first pattern that :func:`re.search` finds in a
            name is used. By default the shards of Megatron-Core's ``GPTModel`` with gated MLPs.

    Raises:
        ValueError: ``shards`` is not such a list.

    Before they gather a weight, the ranks compare its name, shape and dtype. If these differ, or if a rank's
    weights end or fail, or if a rank has no memory for a weight, the converter raises
    :class:`~weight_update.ConversionError` on all ranks, with the state of each; a rank that failed raises
    its own error. If a rank stops early, the others wait for the timeout of the group.
    """
    compiled = compiled_pairs(shards, lambda how: isinstance(how, Sharded))
    if compiled is None:
        raise ValueError(f"shards= takes pairs of a pattern and a Sharded, not {shards!r:.100}")
    return functools.partial(_gather, group, compiled)


def _gather(
    group: dist.ProcessGroup | None, shards: Sequence[tuple[re.Pattern[str], Sharded]], items: Iterator[Item]
) -> Iterator[Item]:
    def rule(name: str, tensor: torch.Tensor) -> list[Item]:
        how = next((how for pattern, how in shards if pattern.search(name)), None)
        if how is None:
            return [(name, tensor)]
        with _errors_reported(group):
            mine, found = _memory_for(group, tensor)
            whole = torch.empty(len(found) * len(mine), dtype=torch.uint8, device=mine.device)
        # No rank may fail alone after this: with GatherShards, the others do not go on to their next weight.
        _agree(group, f"{name}: {tensor.dtype}{list(tensor.shape)}")
        dist.all_gather(found, mine, group)
        try:
            pieces = how._pieces([one.view(tensor.dtype).view(tensor.shape) for one in found])
        except ValueError as error:
            raise ConversionError(f"{name}: {error}") from None
        shape = list(tensor.shape)
        shape[how.dim] *= len(found)
        return [(name, torch.cat(pieces, how.dim, out=whole.view(tensor.dtype).view(shape)))]

    yield from stream(_with_errors_reported(group, items), rule)
    _agree(group, "the end of its weights")


def _with_errors_reported(group: dist.ProcessGroup | None, items: Iterator[Item]) -> Iterator[Item]:
    with _errors_reported(group):
        yield from items


@contextlib.contextmanager
def _errors_reported(group: dist.ProcessGroup | None) -> Iterator[None]:
    """Return a context that reports an error to the other ranks, where they compare the next weight."""
    try:
        yield
    except Exception as error:
        with contextlib.suppress(ConversionError):  # the other ranks raise it; this error says more
            _agree(group, f"an error: {error!r}")
        raise


def _agree(group: dist.ProcessGroup | None, mine: str) -> None:
    digest = int.from_bytes(hashlib.sha256(mine.encode()).digest()[:7], "little")
    device = "cuda" if dist.get_backend(group) == "nccl" else "cpu"
    given, found = _memory_for(group, torch.tensor([digest], device=device))
    dist.all_gather(found, given, group)
    if all(torch.equal(other, given) for other in found):
        return
    states: list[str | None] = [None] * len(found)
    dist.all_gather_object(states, mine, group)
    lines = "".join(f"\n  - rank {rank} of the group has {text}" for rank, text in enumerate(states))
    raise ConversionError(f"the ranks of the group do not convert the same weights:{lines}")


def _memory_for(
    group: dist.ProcessGroup | None, tensor: torch.Tensor
) -> tuple[torch.Tensor, list[torch.Tensor]]:
    """Return a tensor as bytes, so that any dtype is supported, and memory for those of all ranks."""
    mine = tensor.contiguous().view(-1).view(torch.uint8)
    return mine, [torch.empty_like(mine) for _ in range(dist.get_world_size(group))]
