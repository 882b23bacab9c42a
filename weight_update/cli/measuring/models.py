"""The model that is measured, and the changes that a training step would make to it."""

from __future__ import annotations

import importlib
import inspect
import math
import zlib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import click
import torch
from torch import nn

from weight_update.wire.memory import byte_view
from weight_update.wire.schema import BITS

_LAYERS = 16


@dataclass(frozen=True)
class ModelSource:
    """Where a process gets the model from; each process makes its own.

    Attributes:
        megabytes: size of a model of linear layers in bfloat16.
        path: import path ``module:attribute`` of a module, or of a function that returns one; None for a
            model of that size.
    """

    megabytes: float
    path: str | None

    def make(self) -> nn.Module:
        """Return the model, on the CPU.

        Raises:
            click.BadParameter: the import path leads to no module with weights.
        """
        model = _sized(self.megabytes) if self.path is None else _imported(self.path)
        if not any(value.numel() for value in tensors_of(model).values()):
            raise _refused(f"{self.path!r} has no weights to send")
        return model


def _sized(megabytes: float) -> nn.Module:
    width = max(1, round(math.sqrt(megabytes * 1e6 / _LAYERS / torch.bfloat16.itemsize)))
    return nn.Sequential(*(nn.Linear(width, width, dtype=torch.bfloat16) for _ in range(_LAYERS)))


def _imported(path: str) -> nn.Module:
    module, _, name = path.partition(":")
    if not module or not name:
        raise _refused(f"{path!r} is not of the form module:attribute, such as my_policy:Policy")
    try:
        found: Any = importlib.import_module(module)
        for part in name.split("."):
            found = getattr(found, part)
    except (ImportError, AttributeError, ValueError) as error:
        raise _refused(f"{path!r}: {error}; give module:attribute") from None
    if not isinstance(found, nn.Module) and callable(found):
        try:
            inspect.signature(found).bind()
        except (TypeError, ValueError) as error:
            raise _refused(f"{path!r} needs arguments ({error}); give a function without any") from None
        found = found()
    if not isinstance(found, nn.Module):
        raise _refused(
            f"{path!r} is of type {type(found).__name__}, neither a torch.nn.Module nor a function that "
            "returns one"
        )
    return found.cpu()


def _refused(problem: str) -> click.BadParameter:
    return click.BadParameter(problem, param_hint="--model")


def tensors_of(model: nn.Module) -> dict[str, torch.Tensor]:
    """Return the tensors of a model's state, which share its memory."""
    state = model.state_dict()
    return {name: value.detach() for name, value in state.items() if isinstance(value, torch.Tensor)}


def change(tensors: Mapping[str, torch.Tensor], share: float) -> None:
    """Change that share of the elements at random places by one unit in the last place."""
    for value in {one.data_ptr(): one for one in tensors.values()}.values():  # tied ones once
        bits = BITS.get(value.dtype.itemsize)
        if bits is not None and value.numel() and value.is_contiguous():
            flat = value.view(-1).view(bits)
            if share < 1:  # a place that is drawn twice changes once
                flat[torch.randint(flat.numel(), (round(-math.log1p(-share) * flat.numel()),))] ^= 1
            else:
                flat ^= 1


def checksums(tensors: Mapping[str, torch.Tensor]) -> dict[str, int]:
    """Return the CRC-32 of each tensor's bytes."""
    plain = {name: value.contiguous().view(-1) for name, value in tensors.items()}
    return {name: zlib.crc32(byte_view(value.view(torch.uint8))) for name, value in plain.items()}
