"""The bucket encoder makes its views into a payload once, and payloads are used again and again."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from weight_update import BucketEncoding, WeightSchema
from weight_update.encodings.bucket import _BucketDecoder


class Views(TorchDispatchMode):
    """Counts views while it is in force."""

    def __init__(self) -> None:
        super().__init__()
        self.made = 0

    def __torch_dispatch__(
        self, func: Any, types: Sequence[Any], args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        self.made += func.is_view
        return func(*args, **(kwargs or {}))


def lending(payloads: Sequence[torch.Tensor]) -> Callable[[int], torch.Tensor]:
    """Return a function that lends the first payload of a size that was not lent yet."""
    free = list(payloads)

    def lend(nbytes: int) -> torch.Tensor:
        return free.pop(next(i for i, one in enumerate(free) if one.numel() == nbytes))

    return lend


def test_a_payload_that_is_used_again_gets_no_new_views() -> None:
    tensors = [torch.rand(2, 8) for _ in range(500)]
    schema = WeightSchema.of({f"w{i}": tensor for i, tensor in enumerate(tensors)})
    encoder = BucketEncoding().encoder(schema)
    payload = torch.zeros(64 + schema.nbytes, dtype=torch.uint8)
    encoder.encode(tensors, lending([payload]))
    with Views() as views:
        encoder.encode(tensors, lending([payload]))
    assert views.made < 20


@pytest.mark.parametrize("dtype", [None, "bfloat16"])
def test_payloads_that_change_places(dtype: Any) -> None:
    """Buckets of one size take each other's payloads, and the views of a payload stay those of one bucket."""
    shapes = [(3, 5), (64, 64), (7,), (), (16,), (0, 2), (2, 2)]
    schema = WeightSchema.of({f"w{i}": torch.zeros(shape) for i, shape in enumerate(shapes)})
    encoding = BucketEncoding(bucket_size=512, bucket_dtype=dtype)
    encoder = encoding.encoder(schema)
    payloads = [torch.zeros(size, dtype=torch.uint8) for size in encoding.payload_sizes(schema)]
    assert len(payloads) > 5
    for _ in range(4):
        payloads.reverse()
        tensors = [torch.rand(shape) for shape in shapes]
        sent = encoder.encode(tensors, lending(payloads))
        decoder = _BucketDecoder(schema)
        for index, payload in enumerate(sent):
            decoder.feed(index, payload, lambda nbytes: torch.zeros(nbytes, dtype=torch.uint8))
        wanted = tensors if dtype is None else [tensor.bfloat16().float() for tensor in tensors]
        found = decoder.decode([decoder._flat] * len(sent))  # type: ignore[list-item]
        assert all(map(torch.equal, found, wanted))
