"""How vLLM loads a change of each weight: in place, or with all weights of the same modules."""

from __future__ import annotations

import contextlib
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from weight_update.engines.placement import (
    Block,
    Destinations,
    Load,
    Recorder,
    Shapes,
    find_blocks,
    tensors_of,
)
from weight_update.engines.samples import BaseLostError

if TYPE_CHECKING:
    from vllm.config import ModelConfig


@dataclass
class Placements:
    """How a model stores each weight of a checkpoint.

    Attributes:
        blocks: blocks of each weight that is stored one to one; no blocks if the model does not use it.
        others: names of the weights that are stored in another form.
        modules: names of the modules that a reload of each weight writes into; empty if that is not known.
    """

    blocks: dict[str, tuple[Block, ...]]
    others: frozenset[str]
    modules: Mapping[str, Collection[str]]

    def drop(self, name: str) -> None:
        """Note that a weight is not stored one to one after all, nor are those of the same modules."""
        modules = {block.module for block in self.blocks[name]}
        names = {
            one for one, blocks in self.blocks.items() if any(block.module in modules for block in blocks)
        }
        self.others |= names
        for one in names:
            del self.blocks[one]

    def require(self, names: Iterable[str]) -> None:
        """Raise BaseLostError if ``names`` has a weight of which it was not found out how it is stored."""
        if new := set(names) - self.blocks.keys() - self.others:
            raise BaseLostError(f"the trainer has weights that it did not have before, such as {min(new)}")

    @property
    def takes_patches(self) -> bool:
        """Whether a change of any weight can be loaded without all other weights."""
        return all(self.modules.get(name) for name in self.others)

    def reload_of(self, changed: Collection[str]) -> tuple[set[str], set[str]]:
        """Return the weights that are reloaded after a change, and the modules that they fill.

        These are the changed weights in another form, and all weights of the modules that these fill: a
        reload fills the whole module.
        """
        names, modules = set[str](), set[str]()
        found = set(self.others.intersection(changed))
        while found:
            modules.update(*(self.modules[name] for name in found))
            names |= found
            found = {name for name, used in self.modules.items() if not modules.isdisjoint(used)} - names
        return names, modules

    def __str__(self) -> str:
        unused = sum(not blocks for blocks in self.blocks.values())
        text = f"{len(self.blocks) - unused} in place, {len(self.others)} reloaded"
        names = sorted(self.others)
        some = f" ({', '.join(names[:3])}{', ...' if len(names) > 3 else ''})" if names else ""
        return f"{text}{some}, {unused} not used by this worker"


def find_placements(
    model: nn.Module, load: Load, weights: Shapes, modules: Mapping[str, Collection[str]]
) -> Placements:
    """Return how ``model`` stores ``weights``, without changing it.

    Weights count as stored one to one as in :func:`~weight_update.engines.placement.find_blocks`, if their
    modules do not process weights after loading (``quant_method`` of vLLM's layers). Whether the blocks have
    the right values is for the caller to check.

    Args:
        model: the model.
        load: its ``load_weights``.
        weights: shape and dtype of each weight, by name.
        modules: result of :func:`find_modules`.
    """
    plain = {name for name, module in model.named_modules() if _is_plain(module)}
    blocks = {
        name: found
        for name, found in find_blocks(model, load, weights).items()
        if all(block.module in plain for block in found)
    }
    if any(block.module not in modules.get(name, ()) for name, found in blocks.items() for block in found):
        modules = {}
    return Placements(blocks, frozenset(weights.keys() - blocks.keys()), modules)


@torch.no_grad()
def find_modules(
    model: nn.Module, load: Load, weights: Shapes, config: ModelConfig
) -> dict[str, frozenset[str]]:
    """Return the modules that a layerwise reload of each weight writes into, without changing the model.

    During a reload, vLLM notes what a module is to load until the module is complete. Here no module gets
    complete, so all of them get back what they had. Source: ``model_loader/reload`` of vLLM 0.33.

    Returns:
        names of modules by the name of the weight. Empty if a loader hands a module something else than views
        of its weights.
    """
    from vllm.model_executor.model_loader.reload import finalize_layerwise_reload, initialize_layerwise_reload
    from vllm.model_executor.model_loader.reload.layerwise import _get_original_loader, get_layerwise_info

    recorder = Recorder(tensors_of(model), weights)
    initialize_layerwise_reload(model)
    noted = {name: get_layerwise_info(module) for name, module in model.named_modules()}
    for info in noted.values():
        info.load_numel = -(1 << 62)  # elements that were loaded, so that there are never enough
    found: dict[str, set[str]] = {name: set() for name in weights}
    try:
        with recorder:
            load(recorder.probes)
        for module, info in noted.items():
            for _, call in info.loaded_weights:
                values = [value for key, value in call.arguments.items() if key != "param"]
                for name in recorder.weights_in(values):
                    found[name].add(module)
    except Exception:  # noqa: BLE001 - loaders of models may do anything
        return {}
    finally:
        for info in noted.values():
            info.load_numel = info.load_numel_total = 0
        finalize_layerwise_reload(model, config)
        tensor: Any
        for tensor in tensors_of(model).values():  # biases keep those of the reload, which load nothing now
            tensor.weight_loader = _get_original_loader(tensor)
    for name, copies in recorder.copies.items():  # into what vLLM leaves in place
        found[name].update(copy.tensor.rpartition(".")[0] for copy in copies)
    return {name: frozenset(modules) for name, modules in found.items()}


def modules_without_weights(model: nn.Module) -> set[str]:
    """Return the names of the modules into which the layerwise reload under way has loaded nothing."""
    from vllm.model_executor.model_loader.reload.layerwise import get_layerwise_info

    noted = {name: get_layerwise_info(module) for name, module in model.named_modules()}
    return {
        name
        for name, info in noted.items()
        if info.can_load() and info.load_numel <= 0 < info.load_numel_total
    }


@torch.no_grad()
def written_modules(model: nn.Module, load: Load, weights: Shapes) -> set[frozenset[str]]:
    """Return, for each tensor that a load of ``weights`` without a reload writes to, the modules with it.

    No weight is copied into the model. If the loader raises an error for weights without data, tensors are
    missing.
    """
    destinations = Destinations(tensors_of(model))
    probes = [
        (name, torch.empty(shape, dtype=dtype, device="meta")) for name, (shape, dtype) in weights.items()
    ]
    with contextlib.suppress(Exception), destinations:
        load(probes)
    return destinations.modules


def _is_plain(module: nn.Module) -> bool:
    method = getattr(module, "quant_method", None)
    return method is None or type(method).__name__.startswith("Unquantized")
