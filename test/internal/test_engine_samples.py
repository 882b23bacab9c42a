"""Samples of the parameters of inference engines, by which discarded weights are noticed."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.testing._internal.two_tensor import TwoTensor

from weight_update.engines.samples import BaseLostError, StoredSamples


def model_of(**tensors: torch.Tensor) -> nn.Module:
    model = nn.Module()
    for name, tensor in tensors.items():
        model.register_parameter(name, nn.Parameter(tensor, requires_grad=False))
    return model


def bytes_of(*shape: int) -> torch.Tensor:
    return torch.randint(256, shape, dtype=torch.uint8)


TENSORS = {
    "bfloat16": torch.randn(40, 30).bfloat16(),
    "float8_e4m3fn": bytes_of(40, 30).view(torch.float8_e4m3fn),
    "float8_e8m0fnu": bytes_of(40, 30).view(torch.float8_e8m0fnu),
    "float4_e2m1fn_x2": bytes_of(40, 30).view(torch.float4_e2m1fn_x2),
    "NaN": torch.full((40, 30), float("nan")),
    "scalar": torch.tensor(1.5),
    "not contiguous": torch.randn(30, 40).t()[::2],
    "of two tensors": TwoTensor(torch.randn(8, 8), torch.randn(8, 8)),
}


@pytest.mark.parametrize("name", TENSORS)
def test_a_change_is_noticed(name: str) -> None:
    model = model_of(weight=TENSORS[name], other=torch.ones(3))
    samples = StoredSamples(model)
    samples.require(model)
    parts = [model.weight.a, model.weight.b] if name == "of two tensors" else [model.weight.data]
    if name in ("scalar", "not contiguous"):
        parts[-1].add_(1)
    else:
        parts[-1].view(torch.uint8).bitwise_xor_(1)
    with pytest.raises(BaseLostError):
        samples.require(model)
    samples.take(model)
    samples.require(model)


def test_tensors_without_elements_are_not_looked_at() -> None:
    sparse = torch.eye(3).to_sparse()
    model = model_of(meta=torch.empty(3, device="meta"), empty=torch.empty(0, 3), sparse=sparse)
    StoredSamples(model).require(model)
    StoredSamples(nn.Module()).require(nn.Module())


def test_a_parameter_that_has_become_meta() -> None:
    """As after a reload of vLLM that failed midway."""
    model = model_of(one=torch.ones(3), two=torch.ones(3))
    samples = StoredSamples(model)
    model.two = nn.Parameter(torch.empty(3, device="meta"))
    with pytest.raises(BaseLostError, match="two"):
        samples.require(model)


def test_random_numbers_are_left_alone() -> None:
    before = torch.get_rng_state()
    StoredSamples(model_of(one=torch.ones(30)))
    assert torch.equal(torch.get_rng_state(), before)
