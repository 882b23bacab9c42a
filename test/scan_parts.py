"""Helpers of the tests of scans."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from weight_update.encodings.patch.changes import Changes
from weight_update.wire.schema import BITS, WeightSchema

Tensors = Sequence[torch.Tensor]


def schema_of(tensors: Tensors) -> WeightSchema:
    return WeightSchema.of({str(i): tensor for i, tensor in enumerate(tensors)})


def flat_of(schema: WeightSchema, tensors: Tensors, base: torch.Tensor | None = None) -> torch.Tensor:
    """Return the tensors as Tensor.copy_ writes them, over ``base`` or over bytes that are no padding."""
    flat = torch.full((schema.nbytes,), 0xA5, dtype=torch.uint8) if base is None else base.clone()
    with torch.no_grad():
        for view, tensor in zip(schema.views(flat), tensors, strict=True):
            view.copy_(tensor)
    return flat


def same(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Return whether the bytes of two tensors are equal."""
    bytes_of = (tensor.contiguous().view(-1).view(torch.uint8) for tensor in (one, other))
    return bool(torch.equal(*bytes_of))


def check_form(changes: Changes, nbytes: int) -> None:
    """Check all that the docstrings of changes.py say of the form."""
    written = torch.zeros(nbytes, dtype=torch.uint8)
    assert [part.width for part in changes.sparse] == sorted({part.width for part in changes.sparse})
    for part in changes.sparse:
        assert part.positions.dtype is torch.int64
        assert part.values.dtype is BITS[part.width]
        assert part.positions.shape == part.values.shape
        assert part.positions.numel() > 0
        assert bool((part.positions.diff() > 0).all())
        for one in part.segments:
            assert one.positions.dtype is torch.int64
            assert len(one.positions) == len(one.values) == one.gaps.count > 0
            assert int(one.positions[-1]) == one.gaps.last
        written.view(-1, part.width)[part.positions] += 1
    starts = [one.start for one in changes.ranges]
    assert starts == sorted(starts)
    for one in changes.ranges:
        written[one.start : one.start + one.data.numel()] += 1
    assert int(written.max() if nbytes else 0) <= 1


def flip(tensor: torch.Tensor, fraction: float, seed: int) -> int:
    """Change bits of about that share of the elements of a contiguous tensor; return their number."""
    bits = tensor.view(-1).view(BITS[min(8, tensor.element_size())])
    chosen = torch.rand(bits.shape, generator=torch.Generator().manual_seed(seed)) < fraction
    bits[chosen] ^= 1
    return int(chosen.sum())
