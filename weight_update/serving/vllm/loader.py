"""Loading whole versions and patches into a model of vLLM. Imports vLLM when it is used."""

from __future__ import annotations

import logging
from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from weight_update.engines.base import WeightChange
from weight_update.engines.placement import Block, Tensors, bits_of, tensors_of
from weight_update.engines.samples import BaseLostError, StoredSamples, random_positions
from weight_update.serving.vllm.placement import (
    Placements,
    find_modules,
    find_placements,
    modules_without_weights,
    written_modules,
)

if TYPE_CHECKING:
    from vllm.config import ModelConfig

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class PatchCounts:
    """Account of one patch.

    Attributes:
        in_place: number of weights of which the changed elements were written in place.
        elements: number of these elements.
        reloaded: number of weights that were loaded as a whole, unchanged ones of the same modules included.
    """

    in_place: int
    elements: int
    reloaded: int

    def __str__(self) -> str:
        return f"{self.in_place} weights in place ({self.elements:,} elements), {self.reloaded} reloaded"


class ModelLoader:
    """Loads weights in checkpoint format into a model of vLLM.

    Whole versions go through vLLM's layerwise reload, which keeps the addresses of the parameters and
    processes quantized weights again. Source: ``vllm/model_executor/model_loader/reload`` of vLLM 0.33.

    Attributes:
        placements: how the model stores each weight; None before the first whole version.
        last_patch: account of the last patch; None before the first.
    """

    def __init__(self, model: nn.Module, model_config: ModelConfig, device: torch.device) -> None:
        self.placements: Placements | None = None
        self.last_patch: PatchCounts | None = None
        self._model, self._config, self._device = model, model_config, device
        self._stored: StoredSamples | None = None  # of the version that was loaded last
        self._generator = torch.Generator()  # an update does not change the random numbers of vLLM
        self._reloading = False
        self._shapes: dict[str, tuple[torch.Size, torch.dtype]] = {}
        self._samples: dict[str, tuple[torch.Tensor, torch.Tensor]] = {}  # positions, values

    @torch.no_grad()
    def load(self, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        """Load some weights of a whole version; :meth:`finish` ends the version."""
        from vllm.model_executor.model_loader.reload import initialize_layerwise_reload

        if not self._reloading:
            self._reloading = True
            self._shapes, self._samples = {}, {}
            initialize_layerwise_reload(self._model)
        self._load_into_model(self._on_device(weights))

    def _on_device(self, weights: Iterable[tuple[str, torch.Tensor]]) -> Iterator[tuple[str, torch.Tensor]]:
        for name, weight in weights:
            self._note(name, weight)
            # A copy: vLLM keeps the weights of a layer until the layer is complete.
            yield name, weight.to(self._device, copy=True)

    def _note(self, name: str, weight: torch.Tensor) -> None:
        """Remember what :meth:`_find_placements` has to know of a weight."""
        if self.placements is None:
            self._shapes[name] = weight.shape, weight.dtype
            if weight.numel():
                positions = random_positions(weight.numel(), self._generator)
                index = torch.unravel_index(positions, weight.shape)
                self._samples[name] = positions, bits_of(weight)[index].clone().view(weight.dtype)

    def _load_into_model(self, weights: Iterable[tuple[str, torch.Tensor]]) -> Any:
        from vllm.model_executor.model_loader.mtp_validation import disable_mtp_completeness_check

        with disable_mtp_completeness_check():
            model: Any = self._model  # a module whose attributes are not typed
            return model.load_weights(weights)

    def finish(self) -> None:
        """Complete the version: process what was not loaded completely, and let the model compute again.

        Raises:
            RuntimeError: vLLM's reload has left out weights that it was given.
        """
        if self._reloading:
            missed = modules_without_weights(self._model) if self.placements is None else set()
            self.abort()
            if self.placements is None:
                self._require_loaded(missed)
                self._find_placements()
            self._stored = StoredSamples(self._model)

    def abort(self) -> None:
        """Make the model computable again; its weights are a mixture if the version is not complete."""
        from vllm.model_executor.model_loader.reload import finalize_layerwise_reload

        if self._reloading:
            self._reloading = False
            finalize_layerwise_reload(self._model, self._config)

    def _require_loaded(self, missed: set[str]) -> None:
        """Raise RuntimeError if weights were given for modules that the reload has ``missed``."""
        if not missed:
            return
        written = written_modules(self._model, self._load_into_model, self._shapes)
        left = set[str]().union(*(modules for modules in written if modules <= missed))
        if left:
            raise RuntimeError(
                f"vLLM cannot update {type(self._model).__name__} while it runs, because its layerwise "
                f"reload does not reach {', '.join(sorted(left)[:10])}; start vLLM again from a checkpoint "
                "instead, or use another engine"
            )

    def _find_placements(self) -> None:
        """Find out how weights are stored, and check it with elements of the version just loaded."""
        modules = find_modules(self._model, self._load_into_model, self._shapes, self._config)
        self.placements = find_placements(self._model, self._load_into_model, self._shapes, modules)
        tensors = tensors_of(self._model)
        for name, (positions, values) in self._samples.items():
            blocks = self.placements.blocks.get(name, ())
            if not all(block.has(tensors, self._shapes[name][0], positions, values) for block in blocks):
                self.placements.drop(name)
        self._shapes, self._samples = {}, {}
        _log.info("how patches are loaded, in weights of the trainer: %s", self.placements)
        if not self.placements.takes_patches:
            others = self.placements.others
            _log.warning("patches reload all weights: the modules of these are not known: %s", sorted(others))

    @property
    def takes_patches(self) -> bool:
        """Whether :meth:`patch` can be called; else a patch is loaded as a whole version."""
        return self.placements is not None and self.placements.takes_patches

    def needs_with(self, changed: Collection[str]) -> Collection[str]:
        """Return the weights that are reloaded with ``changed`` ones; see :meth:`Placements.reload_of`."""
        assert self.placements is not None
        return self.placements.reload_of(changed)[0]

    @torch.no_grad()
    def patch(self, changes: Iterable[WeightChange]) -> PatchCounts:
        """Load a patch, each weight in place or as a whole, and return the account of it.

        Raises:
            BaseLostError: vLLM has discarded or replaced the weights, or the trainer has others than before;
                nothing was loaded.
        """
        assert self.placements is not None
        assert self._stored is not None
        changes = list(changes)
        try:
            self._stored.require(self._model)
            self.placements.require(change.name for change in changes)
        except BaseLostError:
            # The weights may be stored elsewhere now, such as experts that changed ranks.
            self.placements = None
            raise
        names, modules = self.placements.reload_of([one.name for one in changes if one.values.numel()])
        in_place = [change for change in changes if change.name not in names]
        tensors = tensors_of(self._model)
        for change in in_place:
            self._patch_in_place(change, self.placements.blocks[change.name], tensors)
        if names:
            self._reload([(one.name, one.weight) for one in changes if one.name in names], modules)
        self._process_attention()
        self._stored.take(self._model)
        elements = sum(change.values.numel() for change in in_place)
        self.last_patch = PatchCounts(len(in_place), elements, len(names))
        return self.last_patch

    def _patch_in_place(self, change: WeightChange, blocks: Iterable[Block], tensors: Tensors) -> None:
        for block in blocks:
            if change.positions is None:
                block.stored(tensors).copy_(block.of(change.weight))
            else:
                block.write(tensors, change.weight.shape, change.positions, change.values)

    def _reload(self, weights: Iterable[tuple[str, torch.Tensor]], modules: Iterable[str]) -> None:
        """Load all weights of some modules, and process the modules again."""
        from vllm.model_executor.model_loader.reload import (
            finalize_layerwise_reload,
            initialize_layerwise_reload,
        )

        layers = [self._model.get_submodule(module) for module in modules]
        for layer in layers:
            initialize_layerwise_reload(layer)
        try:
            self._load_into_model((name, weight.to(self._device, copy=True)) for name, weight in weights)
        finally:
            for layer in layers:
                finalize_layerwise_reload(layer, self._config)

    def _process_attention(self) -> None:
        """Derive again what attention layers derive from weights of other layers, as a reload ends with."""
        from vllm.model_executor.layers.attention import is_deferred_attention_layer

        for layer in self._model.modules():
            if is_deferred_attention_layer(layer):
                process: Any = layer.process_weights_after_loading
                process(self._config.dtype)
