"""Samples of a model's parameters, which show whether something else than an update has written to them."""

from __future__ import annotations

from collections.abc import Collection, Iterable

import torch
from torch import nn

_SAMPLES = 256
"""Number of elements of each parameter."""


class BaseLostError(Exception):
    """An engine does not have the weights any more that a patch was made from.

    ``load_changes`` of the engines of this library raises it before it writes anything. The receiver then has
    the engine load all weights.
    """


class StoredSamples:
    """Random elements of all parameters of a model.

    Inference servers have other calls that write to weights: some discard them to free memory, and some load
    a checkpoint. A patch would then give a mixture of two versions.

    Args:
        model: the model.
        without: names of modules whose own parameters are not looked at.
    """

    def __init__(self, model: nn.Module, without: Collection[str] = ()) -> None:
        self._chosen = {
            name: (parameter.shape, _choose(parameter))
            for name, parameter in model.named_parameters()
            if parameter.numel() and name.rpartition(".")[0] not in without
        }
        self.take(model)

    def take(self, model: nn.Module) -> None:
        """Remember the elements that the model has now."""
        self._bits = self._read(model)

    def require(self, model: nn.Module) -> None:
        """Raise BaseLostError unless the model has the elements of the last :meth:`take`."""
        if not torch.equal(self._read(model), self._bits):
            raise BaseLostError("other calls than updates have written to the weights")

    def _read(self, model: nn.Module) -> torch.Tensor:
        parameters = dict(model.named_parameters())
        found = []
        for name, (shape, index) in self._chosen.items():
            if name not in parameters or parameters[name].shape != shape:
                raise BaseLostError(f"parameter {name} has another shape, or is gone")
            found.append(parameters[name].data[index])
        return _joined(found)


def _choose(parameter: torch.Tensor) -> tuple[torch.Tensor, ...]:
    positions = torch.randint(parameter.numel(), (_SAMPLES,)).to(parameter.device)
    return tuple(torch.unravel_index(positions, parameter.shape))


def _joined(values: Iterable[torch.Tensor]) -> torch.Tensor:
    found = [value.reshape(-1).view(torch.uint8) for value in values]
    return torch.cat([one.to(found[0].device) for one in found]) if found else torch.empty(0)
