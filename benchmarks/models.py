"""The model that travels: a given number of bytes in a given number of float32 tensors."""

from __future__ import annotations

import math

import torch
from tensordict import TensorDict, TensorDictBase
from torch import nn

__all__ = ["Model", "fill", "mark", "trainer_weights"]

_WIDTH = 16  # of the one layer that computes: 16 x 16 float32 is 1 KB, so that 5,000 tensors are 5 MB
_LAYERS = 8  # times that it is applied, for a forward pass of about 50 microseconds


class Model(nn.Module):
    """A small layer that computes, and parameters beside it that only travel.

    The worker's forward pass then takes some tens of microseconds at every size, and a pause of less
    than a millisecond can be seen.

    Args:
        megabytes: size of all tensors together, in units of a million bytes.
        tensors: number of tensors, at least 2.
    """

    def __init__(self, megabytes: float, tensors: int) -> None:
        super().__init__()
        self.first = nn.Linear(_WIDTH, _WIDTH, bias=False)
        each = math.ceil((megabytes * 1e6 / 4 - _WIDTH**2) / (tensors - 1))
        # Not written to: pages that nobody touched cost no memory in a worker.
        rest = [nn.Parameter(torch.empty(max(each, 1))) for _ in range(tensors - 1)]
        self.rest = nn.ParameterList(rest)

    def forward(self, value: torch.Tensor) -> torch.Tensor:
        for _ in range(_LAYERS):
            value = self.first(value)
        return value

    def marks(self) -> tuple[float, float]:
        """The first element of the first and of the last tensor; see :func:`mark`."""
        return float(self.first.weight.detach().flatten()[0]), float(self.rest[-1].detach().flatten()[0])


def trainer_weights(megabytes: float, tensors: int) -> TensorDictBase:
    """Weights of a model of its own, every byte of them written."""
    return fill(Model(megabytes, tensors))


def fill(model: Model) -> TensorDictBase:
    """The model's own weights, every byte of them written."""
    weights: TensorDictBase = TensorDict.from_module(model).data
    for value in weights.values(True, True):
        value.fill_(0.5)
    return weights


def mark(weights: TensorDictBase, number: float) -> None:
    """Write ``number`` where :meth:`Model.marks` reads it, so that an update can be recognized."""
    weights["first", "weight"].flatten()[0] = number
    rest = weights["rest"]
    rest[str(len(list(rest.keys())) - 1)].flatten()[0] = number
