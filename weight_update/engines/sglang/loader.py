"""The function by which SGLang's scheduler processes load our weights."""

from __future__ import annotations

import json
import logging
import traceback
import weakref
from collections.abc import Callable, Iterable, Mapping
from typing import NamedTuple

import torch
from torch import nn

from weight_update.engines.base import WeightChange
from weight_update.engines.placement import Block, Tensors, bits_of, find_blocks
from weight_update.engines.sglang.memory import answer, read

_log = logging.getLogger(__name__)


class Placement(NamedTuple):
    """How a model stores a weight.

    Attributes:
        form: shape and dtype of the weight.
        blocks: its blocks in parameters; empty if the process has no part of it. None if it is stored in
            another form.
    """

    form: tuple[torch.Size, torch.dtype]
    blocks: tuple[Block, ...] | None


# By model and parameter: the digest after the last complete load; empty once a patch found them unchanged.
_digests: weakref.WeakKeyDictionary[nn.Module, dict[str, tuple[int, ...]]] = weakref.WeakKeyDictionary()

# By model and weight.
_placements: weakref.WeakKeyDictionary[nn.Module, dict[str, Placement]] = weakref.WeakKeyDictionary()


@torch.no_grad()
def load(model: nn.Module, named_tensors: Iterable[tuple[str, torch.Tensor]]) -> None:
    """Load weights that an engine of this package sent; SGLang calls this in each of its scheduler processes.

    Start SGLang with ``--custom-weight-loader weight_update.engines.sglang.load``, or with the argument
    ``custom_weight_loader=["weight_update.engines.sglang.load"]`` of ``sglang.Engine``. The weights are in
    memory of the sending process; ``named_tensors`` only states where. This function never raises, because
    SGLang would end the server. It returns errors to the sender with the answer.

    Weights are loaded by ``model.load_weights``, which splits and fuses them. After the first load of a
    weight, this function calls it again with a weight without data, and records where it would be copied to,
    instead of copying it. If these are blocks of the weight, and the parameters have its bits there, later
    changes are written in place: also in parameters that SGLang fuses, and in the part of a weight that a
    tensor-parallel rank has. The answer names the weights that are stored in another form, and the sender
    sends them as a whole. It does the same with all weights of a model that computes from them when they are
    loaded, such as one with ``post_load_weights``. Before the first patch, all parameters must still have the
    bits with which they were loaded; if SGLang transforms them, the update fails.

    Args:
        model: the model of the process.
        named_tensors: orders, each with an empty tensor.
    """
    for text, _ in named_tensors:
        order = json.loads(text)
        try:
            content: dict[str, str | dict[str, bool]] = {
                "in_place": _PERFORM[order["kind"]](model, read(order))
            }
        except Exception:  # noqa: BLE001 - the sender gets it, and raises it
            content = {"error": traceback.format_exc()}
        try:
            answer(order, content)
        except (OSError, ValueError):  # the sender reports the missing answer
            _log.exception("no answer to weight_update; content: %s", content)


def _load_weights(model: nn.Module, weights: Mapping[str, torch.Tensor]) -> dict[str, bool]:
    model.load_weights(list(weights.items()))  # type: ignore[operator]
    if not _derives(model):
        _find_placements(model, weights)
    return {}


def _find_placements(model: nn.Module, weights: Mapping[str, torch.Tensor]) -> None:
    """Find out how the model stores weights that it has just loaded, unless that is known."""
    known = _placements.setdefault(model, {})
    forms = {name: (weight.shape, weight.dtype) for name, weight in weights.items()}
    new = {name: form for name, form in forms.items() if name not in known or known[name].form != form}
    if not new:
        return
    parameters = dict(model.named_parameters())
    found = find_blocks(model, model.load_weights, new)  # type: ignore[arg-type]
    for name, form in new.items():
        blocks = found.get(name)
        if blocks is not None and not all(_holds(parameters, block, weights[name]) for block in blocks):
            blocks = None
        known[name] = Placement(form, blocks)


def _holds(parameters: Tensors, block: Block, weight: torch.Tensor) -> bool:
    """Return whether a block of a weight is stored bit for bit, in a parameter."""
    if block.tensor not in parameters:
        return False  # a buffer, which SGLang may change
    stored = block.stored(parameters)
    return torch.equal(bits_of(stored), bits_of(block.of(weight).to(stored)))


def _load_elements(model: nn.Module, packed: Mapping[str, torch.Tensor]) -> dict[str, bool]:
    """Write elements in place; return for each weight of this process whether that is possible."""
    _check_unchanged(model)
    parameters = dict(model.named_parameters())
    known = _placements.get(model, {})
    in_place = {}
    for name, content in packed.items():
        placement = known.get(name)
        if placement is None or placement.blocks is None:
            in_place[name] = False
        elif placement.blocks:
            in_place[name] = True
            shape, dtype = placement.form
            positions, values = _unpack(content, dtype)
            for block in placement.blocks:
                block.write(parameters, shape, positions, values)
    return in_place


def _derives(model: nn.Module) -> bool:
    """Return whether ``load_weights`` computes from the weights, such as ``w_kc`` of latent attention.

    SGLang does not compute it again at the end of an update in which it has called a loader. Source:
    ``end_weight_update`` in ``sglang/srt/managers/scheduler_components/weight_updater.py``.
    """
    return any(getattr(module, "post_load_weights", None) is not None for module in model.modules())


def _remember(model: nn.Module, nothing: Mapping[str, torch.Tensor]) -> dict[str, bool]:
    """Note the bits of all parameters, which now have a complete version."""
    if _digests.get(model) != {}:
        _digests[model] = {key: _digest(parameter) for key, parameter in model.named_parameters()}
    return {}


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


_PERFORM: Mapping[str, Callable[[nn.Module, Mapping[str, torch.Tensor]], dict[str, bool]]] = {
    "weights": _load_weights,
    "elements": _load_elements,
    "remember": _remember,
}


def pack(change: WeightChange) -> torch.Tensor:
    """Return flat positions and their values as one tensor of bytes; an empty one if all elements changed."""
    if change.positions is None:
        return torch.empty(0, dtype=torch.uint8)
    return torch.cat([change.positions.view(torch.uint8), change.values.contiguous().view(torch.uint8)])


def _unpack(packed: torch.Tensor, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """Return positions and values of :func:`pack`, as views."""
    count = packed.numel() // (8 + dtype.itemsize)
    return packed[: 8 * count].view(torch.int64), packed[8 * count :].view(dtype)


def _digest(parameter: torch.Tensor) -> tuple[int, ...]:
    """Return numbers that depend on the layout, on the bits of all elements, and on their order."""
    total = 0
    for part in torch.split(bits_of(parameter.data.reshape(-1)), 1 << 22):
        factors = torch.arange(1, len(part) + 1, device=part.device)
        total = (31 * total + int((part.to(torch.int64) * factors).sum())) % (1 << 61)
    return int(parameter.storage_offset()), *parameter.stride(), total
