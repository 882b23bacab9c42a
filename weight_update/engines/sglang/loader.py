"""The function by which SGLang's scheduler processes load our weights."""

from __future__ import annotations

import json
import logging
import math
import re
import traceback
import weakref
from collections.abc import Callable, Iterable, Mapping
from typing import NamedTuple

import torch
from torch import nn

from weight_update.encodings.patch.changes import BITS
from weight_update.engines.base import WeightChange
from weight_update.engines.sglang.memory import answer, read

PROBES = 8  # elements that are compared before all are

_log = logging.getLogger(__name__)


class Place(NamedTuple):
    """Consecutive elements of a parameter that hold a weight: the parameter's name, and the first element."""

    parameter: str
    start: int


# By model and parameter: the digest after the last complete load; empty once a patch found them unchanged.
_digests: weakref.WeakKeyDictionary[nn.Module, dict[str, int]] = weakref.WeakKeyDictionary()

# By model and weight. None: the weight is not stored as it arrives, or in several places.
_places: weakref.WeakKeyDictionary[nn.Module, dict[str, Place | None]] = weakref.WeakKeyDictionary()


@torch.no_grad()
def load(model: nn.Module, named_tensors: Iterable[tuple[str, torch.Tensor]]) -> None:
    """Load weights that an engine of this package sent; SGLang calls this in each of its scheduler processes.

    Start SGLang with ``--custom-weight-loader weight_update.engines.sglang.load``, or with the argument
    ``custom_weight_loader=["weight_update.engines.sglang.load"]`` of ``sglang.Engine``. The weights are in
    memory of the sending process; ``named_tensors`` only states where. This function never raises, because
    SGLang would end the server. It returns errors to the sender with the answer.

    Weights are loaded by ``model.load_weights``, which splits and fuses them. After the first load of a
    weight, this function looks for its bits in the parameters of its layer. If they are there exactly once,
    as consecutive elements of one parameter, later changes are written in place, also in parameters that
    SGLang fuses. The answer names all other weights, such as those of which a process has only a part, and
    the sender sends them as a whole. It does the same with all weights of a model that has
    ``post_load_weights``, which computes from them. Before the first patch, all parameters must still have
    the bits with which they were loaded; if SGLang transforms them, the update fails.

    Args:
        model: the model of the process.
        named_tensors: orders, each with an empty tensor.
    """
    for text, _ in named_tensors:
        order = json.loads(text)
        try:
            content: dict[str, str | list[str]] = {"kept": _PERFORM[order["kind"]](model, read(order))}
        except Exception:  # noqa: BLE001 - the sender gets it, and raises it
            content = {"error": traceback.format_exc()}
        try:
            answer(order, content)
        except (OSError, ValueError):  # the sender reports the missing answer
            _log.exception("no answer to weight_update; content: %s", content)


def _load_weights(model: nn.Module, weights: Mapping[str, torch.Tensor]) -> list[str]:
    model.load_weights(list(weights.items()))  # type: ignore[operator]
    parameters = dict(model.named_parameters())
    places = _places.setdefault(model, {})
    for name, weight in weights.items():
        if name not in places and not _constant(weight):
            found = [
                Place(key, start)
                for key, parameter in parameters.items()
                if _layer(key) == _layer(name)
                for start in _starts(weight, parameter)
            ]
            places[name] = found[0] if len(found) == 1 else None
    return []


def _load_elements(model: nn.Module, packed: Mapping[str, torch.Tensor]) -> list[str]:
    """Write elements in place; return the names of the weights where that is not possible."""
    _check_unchanged(model)
    parameters = dict(model.named_parameters())
    places = {} if _derives(model) else _places.get(model, {})
    left = []
    for name, content in packed.items():
        place = places.get(name)
        if place is None:
            left.append(name)
        else:
            _write(parameters[place.parameter], place.start, content)
    return left


def _derives(model: nn.Module) -> bool:
    """Return whether ``load_weights`` computes from the weights, such as ``w_kc`` of latent attention.

    SGLang does not compute it again at the end of an update in which it has called a loader. Source:
    ``end_weight_update`` in ``sglang/srt/managers/scheduler_components/weight_updater.py``.
    """
    return any(getattr(module, "post_load_weights", None) is not None for module in model.modules())


def _remember(model: nn.Module, nothing: Mapping[str, torch.Tensor]) -> list[str]:
    """Note the bits of all parameters, which now have a complete version."""
    if _digests.get(model) != {}:
        _digests[model] = {key: _digest(parameter) for key, parameter in model.named_parameters()}
    return []


def _check_unchanged(model: nn.Module) -> None:
    noted = _digests.get(model)
    if noted is None:
        raise RuntimeError("SGLang has been started again since the last update; send all weights")
    changed = [
        key for key, parameter in model.named_parameters() if noted and noted[key] != _digest(parameter)
    ]
    if changed:
        raise RuntimeError(
            f"SGLang transforms weights after loading, so they take no patches: {', '.join(changed)}; "
            "create the engine with loads_changes=False"
        )
    _digests[model] = {}


_PERFORM: Mapping[str, Callable[[nn.Module, Mapping[str, torch.Tensor]], list[str]]] = {
    "weights": _load_weights,
    "elements": _load_elements,
    "remember": _remember,
}


def pack(change: WeightChange) -> torch.Tensor:
    """Return flat positions and their values as one tensor of bytes; an empty one if all elements changed."""
    if change.positions is None:
        return torch.empty(0, dtype=torch.uint8)
    return torch.cat([change.positions.view(torch.uint8), change.values.contiguous().view(torch.uint8)])


def _write(parameter: torch.Tensor, start: int, packed: torch.Tensor) -> None:
    flat = parameter.data.view(-1)
    count = packed.numel() // (8 + flat.element_size())
    positions = packed[: 8 * count].view(torch.int64).to(flat.device) + start
    values = packed[8 * count :].view(flat.dtype).to(flat.device)
    bits = BITS.get(flat.element_size(), flat.dtype)
    flat.view(bits)[positions] = values.view(bits)


def _digest(parameter: torch.Tensor) -> int:
    """Return a number that depends on the bits of all elements, and on their order."""
    total = 0
    bits = BITS.get(parameter.element_size(), parameter.dtype)
    for part in torch.split(parameter.data.reshape(-1).view(bits), 1 << 22):
        factors = torch.arange(1, len(part) + 1, device=part.device)
        total = (31 * total + int((part.to(torch.int64) * factors).sum())) % (1 << 61)
    return total


def _layer(name: str) -> str:
    """Return the name up to its first number; empty if it has none."""
    found = re.match(r"(.*?\.\d+)\.", name)
    return found[1] if found else ""


def _constant(weight: torch.Tensor) -> bool:
    """Return whether all elements are equal, so that any arrangement of them looks the same."""
    flat = weight.reshape(-1)
    return flat.numel() < 2 or bool((flat == flat[0]).all())


def _starts(weight: torch.Tensor, parameter: torch.Tensor) -> list[int]:
    """Return the first elements of all places in ``parameter`` that hold the bits of ``weight``, by rows."""
    width = math.prod(weight.shape[1:])
    rows, spare = weight.numel() // width, parameter.numel() - weight.numel()
    if (
        weight.dtype != parameter.dtype
        or parameter.shape[parameter.ndim - weight.ndim + 1 :] != weight.shape[1:]
        or spare < 0
        or not parameter.is_contiguous()
    ):
        return []
    bits = BITS.get(weight.element_size(), weight.dtype)
    theirs = parameter.data.view(-1).view(bits)
    ours = weight.to(parameter.device).contiguous().view(-1).view(bits)
    starts = torch.arange(0, spare + 1, width, device=ours.device)
    for row in range(0, rows, max(1, rows // PROBES)):
        probe = row * width + row % width
        starts = starts[theirs[starts + probe] == ours[probe]]
    return [start for start in starts.tolist() if torch.equal(theirs[start : start + len(ours)], ours)]
