"""The function by which SGLang's scheduler processes load our weights."""

from __future__ import annotations

import json
import logging
import traceback
import weakref
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch import nn

from weight_update.engines.base import WeightChange
from weight_update.engines.placement import Block, Tensors, bits_of, find_blocks
from weight_update.engines.samples import BaseLostError, StoredSamples
from weight_update.engines.sglang.memory import answer, read

_log = logging.getLogger(__name__)


class _Placement(NamedTuple):
    """How a model stores a weight.

    Attributes:
        form: shape and dtype of the weight.
        blocks: its blocks in parameters; empty if the process has no part of it. None if it is stored in
            another form.
    """

    form: tuple[torch.Size, torch.dtype]
    blocks: tuple[Block, ...] | None


@dataclass
class _ModelState:
    """State of a model that has loaded weights, as one process of SGLang knows it.

    Attributes:
        placements: how the model stores each weight, by name.
        digests: digest of each parameter after the last complete load, by name; None before.
        transformed: names of the modules that SGLang transformed after that load. None until the first patch.
        samples: elements of the other modules after the last update. None until the first patch.
    """

    placements: dict[str, _Placement] = field(default_factory=dict)
    digests: dict[str, tuple[int, ...]] | None = None
    transformed: set[str] | None = None
    samples: StoredSamples | None = None

    def blocks(self, name: str) -> tuple[Block, ...] | None:
        """Return the blocks in which a weight takes elements; None if it must be loaded as a whole."""
        placement = self.placements.get(name)
        blocks = None if placement is None else placement.blocks
        if blocks is None or any(block.module in (self.transformed or ()) for block in blocks):
            return None
        return blocks


_models: weakref.WeakKeyDictionary[nn.Module, _ModelState] = weakref.WeakKeyDictionary()


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
    loaded, such as one with ``post_load_weights``. Before the first patch, this function finds the parameters
    whose bits SGLang has transformed after they were loaded. SGLang transforms their modules again at the end
    of each update, so each update loads all weights of these modules.

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
        except BaseLostError as error:
            _models.pop(model, None)  # the weights may be stored elsewhere now
            content = {"lost": str(error)}
        except Exception:  # noqa: BLE001 - the sender gets it, and raises it
            content = {"error": traceback.format_exc()}
        try:
            answer(order, content)
        except (OSError, ValueError):  # the sender reports the missing answer
            _log.exception("no answer to weight_update; content: %s", content)


def _load_weights(model: nn.Module, weights: Mapping[str, torch.Tensor]) -> dict[str, bool]:
    """Load whole weights; return, as True, those that this process uses."""
    model.load_weights(list(weights.items()))  # type: ignore[operator]
    _find_placements(model, weights)
    placements = _models[model].placements
    return {name: True for name in weights if placements[name].blocks != ()}


def _find_placements(model: nn.Module, weights: Mapping[str, torch.Tensor]) -> None:
    """Find out how the model stores weights that it has just loaded, unless that is known."""
    known = _models.setdefault(model, _ModelState()).placements
    forms = {name: (weight.shape, weight.dtype) for name, weight in weights.items()}
    new = {name: form for name, form in forms.items() if name not in known or known[name].form != form}
    if not new:
        return
    parameters = dict(model.named_parameters())
    found = {} if _derives(model) else find_blocks(model, model.load_weights, new)  # type: ignore[arg-type]
    for name, form in new.items():
        blocks = found.get(name)
        if blocks is not None and not all(_holds(parameters, block, weights[name]) for block in blocks):
            blocks = None
        known[name] = _Placement(form, blocks)


def _holds(parameters: Tensors, block: Block, weight: torch.Tensor) -> bool:
    """Return whether a block of a weight is stored bit for bit, in a parameter."""
    if block.tensor not in parameters:
        return False  # a buffer, which SGLang may change
    stored = block.stored(parameters)
    return torch.equal(bits_of(stored), bits_of(block.of(weight).to(stored)))


def _load_elements(model: nn.Module, packed: Mapping[str, torch.Tensor]) -> dict[str, bool]:
    """Write elements in place; return for each weight of this process whether that is possible."""
    state = _state_of(model)
    parameters = dict(model.named_parameters())
    in_place = {}
    for name, content in packed.items():
        blocks = state.blocks(name)
        if blocks is None:
            in_place[name] = False
        elif blocks:
            in_place[name] = True
            shape, dtype = state.placements[name].form
            positions, values = _unpack(content, dtype)
            for block in blocks:
                block.write(parameters, shape, positions, values)
    if state.samples is None:
        _choose_samples(model, state)
    else:
        state.samples.take(model)
    return in_place


def _choose_samples(model: nn.Module, state: _ModelState) -> None:
    """Note elements of all parameters that SGLang does not transform at the end of an update."""
    assert state.transformed is not None
    state.samples = StoredSamples(model, without=state.transformed)


def _derives(model: nn.Module) -> bool:
    """Return whether ``load_weights`` computes from the weights, such as ``w_kc`` of latent attention.

    SGLang does not compute it again at the end of an update in which it has called a loader. Source:
    ``end_weight_update`` in ``sglang/srt/managers/scheduler_components/weight_updater.py``.
    """
    return any(getattr(module, "post_load_weights", None) is not None for module in model.modules())


def _remember(model: nn.Module, nothing: Mapping[str, torch.Tensor]) -> dict[str, bool]:
    """Note what all parameters have, which is now a complete version."""
    state = _models.setdefault(model, _ModelState())
    if state.transformed is None:
        state.digests = _digests(model)
    else:
        _choose_samples(model, state)  # anew: SGLang may have replaced parameters
    return {}


def _compare(model: nn.Module, nothing: Mapping[str, torch.Tensor]) -> dict[str, bool]:
    """Find the modules that SGLang has transformed; return, as False, the weights to load in each update.

    If there are such modules, these are all weights that take no elements: they may belong to the modules. If
    the model computes from weights, these are all weights: it may need several for one computation.

    Raises:
        BaseLostError: SGLang has discarded or replaced the weights.
    """
    state = _state_of(model)
    if state.samples is not None:
        state.samples.require(model)
    if state.transformed is None:
        before, now = state.digests or {}, _digests(model)
        if before and all(before[key] != now.get(key) for key in before):  # SGLang never transforms norms
            raise BaseLostError("all parameters have other values than after the last update")
        changed = {key for key in before.keys() | now.keys() if before.get(key) != now.get(key)}
        state.digests, state.transformed = {}, {key.rpartition(".")[0] for key in changed}
        if changed:
            _log.info("SGLang transforms these after loading, so patches load them: %s", sorted(changed))
    if not state.transformed and not _derives(model):
        return {}
    return {name: False for name in state.placements if state.blocks(name) is None}


def _state_of(model: nn.Module) -> _ModelState:
    state = _models.get(model)
    if state is None or state.digests is None:
        raise RuntimeError("SGLang has been started again since the last update; send all weights")
    return state


_PERFORM: Mapping[str, Callable[[nn.Module, Mapping[str, torch.Tensor]], dict[str, bool]]] = {
    "weights": _load_weights,
    "elements": _load_elements,
    "remember": _remember,
    "compare": _compare,
}


def pack(change: WeightChange) -> torch.Tensor:
    """Return flat positions and their values as one tensor of bytes; an empty one if all elements changed."""
    if change.positions is None:
        return torch.empty(0, dtype=torch.uint8, device="cpu")
    return torch.cat([change.positions.view(torch.uint8), change.values.contiguous().view(torch.uint8)])


def _unpack(packed: torch.Tensor, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """Return positions and values of :func:`pack`, as views."""
    count = packed.numel() // (8 + dtype.itemsize)
    return packed[: 8 * count].view(torch.int64), packed[8 * count :].view(dtype)


def _digests(model: nn.Module) -> dict[str, tuple[int, ...]]:
    return {key: _digest(parameter) for key, parameter in model.named_parameters()}


def _digest(parameter: torch.Tensor) -> tuple[int, ...]:
    """Return numbers that depend on the layout, on the bits of all elements, and on their order."""
    total = 0
    for part in torch.split(bits_of(parameter.data.reshape(-1)), 1 << 22):
        factors = torch.arange(1, len(part) + 1, device=part.device)
        total = (31 * total + int((part.to(torch.int64) * factors).sum())) % (1 << 61)
    return int(parameter.storage_offset()), *parameter.stride(), total
