"""Samples of a model's parameters, which show whether something else than an update has written to them."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from typing import Any

import torch
from torch import nn
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from weight_update.engines.placement import bits_of

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

    If a parameter consists of other tensors, as torchao's quantized ones do, the elements are of these.
    Tensors on the device ``meta`` and sparse tensors are left out.

    Args:
        model: the model.
        without: names of modules whose own parameters are not looked at.
    """

    def __init__(self, model: nn.Module, without: Collection[str] = ()) -> None:
        generator = torch.Generator()  # an update does not change the random numbers of the program
        self._chosen = {
            name: (tensor.shape, tensor.device, random_positions(tensor.numel(), generator).to(tensor.device))
            for name, tensor in _tensors(model, without).items()
            if tensor.numel()
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
        tensors = _tensors(model)
        found = []
        for name, (shape, device, positions) in self._chosen.items():
            tensor = tensors.get(name)
            if tensor is None or tensor.shape != shape or tensor.device != device:
                raise BaseLostError(f"parameter {name} has another shape or device, or is gone")
            found.append(torch.take(bits_of(tensor), positions).view(torch.uint8))
        return torch.cat([one.to(found[0].device) for one in found]) if found else torch.empty(0)


def random_positions(numel: int, generator: torch.Generator) -> torch.Tensor:
    """Return random flat positions in a tensor of ``numel`` elements; int64, on the CPU."""
    return torch.randint(numel, (_SAMPLES,), generator=generator, device="cpu")


def _tensors(model: nn.Module, without: Collection[str] = ()) -> dict[str, torch.Tensor]:
    """Return the tensors of a model's parameters whose elements can be read, by name."""
    return {
        key: tensor
        for name, parameter in model.named_parameters()
        if name.rpartition(".")[0] not in without
        for key, tensor in _parts(name, parameter.data)
    }


def _parts(name: str, tensor: torch.Tensor) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield a tensor, or the tensors that it consists of."""
    wrapper: Any = tensor
    if is_traceable_wrapper_subclass(wrapper):
        for attribute in wrapper.__tensor_flatten__()[0]:
            if isinstance(inner := getattr(wrapper, attribute), torch.Tensor):  # else a mesh of devices
                yield from _parts(f"{name}.{attribute}", inner)
    elif tensor.layout is torch.strided and not tensor.is_meta:
        yield name, tensor
