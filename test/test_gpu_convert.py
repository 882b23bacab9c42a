"""Converters on a GPU give what they give on the CPU; needs torch, tensordict, numpy and a GPU alone."""

from __future__ import annotations

import pytest
import torch
from convert_parts import convert
from test_convert_streams import CASES

from weight_update.convert import Converter

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


@pytest.mark.parametrize(("converter", "weights", "held"), CASES.values(), ids=CASES)
def test_the_same_as_on_the_cpu(converter: Converter, weights: dict[str, torch.Tensor], held: int) -> None:
    expected = convert(converter, weights.items())
    found = convert(converter, ((name, value.cuda()) for name, value in weights.items()))
    assert list(found) == list(expected)
    for name, value in found.items():
        assert value.is_cuda
        assert value.dtype is expected[name].dtype
        # products of matrices may be summed in another order; all else is exact
        tolerance = 1e-6 if "lora_A" in str(list(weights)) else 0.0
        torch.testing.assert_close(value.cpu(), expected[name], rtol=tolerance, atol=tolerance)
