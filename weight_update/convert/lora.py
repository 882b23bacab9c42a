"""Merging of LoRA adapters into their base weights."""

from __future__ import annotations

import functools
import math
import numbers
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import torch

from weight_update.convert.base import Converter, Item, stream
from weight_update.errors import ConversionError

_BASE = re.compile(r"(?P<layer>.+)\.base_layer\.(?P<leaf>.+)")
_FACTOR = re.compile(
    r"(?P<layer>.+)\.(?:lora_|trainable_tokens_(?=original|delta))"
    r"(?P<kind>[^.]+)\.(?P<adapter>[^.]+)(?P<leaf>\..+)?"
)
_SAVED = re.compile(r"(?P<layer>.+)\.(?:original_module|modules_to_save\.(?P<adapter>[^.]+))\.(?P<leaf>.+)")
_KINDS = {"A": ".weight", "B": ".weight", "embedding_A": None, "embedding_B": None}
_REMEDY = "merge in the trainer and send the merged model"
_Scaling = float | Mapping[str, float] | Callable[[str, str], float]


def merge_lora(
    scaling: _Scaling, *, fan_in_fan_out: bool = False, prefix: str = "base_model.model."
) -> Converter:
    """Merge LoRA adapters into their base weights, with PEFT's names, out of place.

    ``X.base_layer.weight``, ``X.lora_A.<adapter>.weight`` and ``X.lora_B.<adapter>.weight`` become
    ``X.weight = base + scaling * B @ A``; for embeddings ``lora_embedding_A`` and ``lora_embedding_B``, and
    the product is transposed. ``X.base_layer.bias`` becomes ``X.bias``. For fully trained modules,
    ``X.modules_to_save.<adapter>.*`` becomes ``X.*`` and ``X.original_module.*`` is left out. All other
    weights pass. Sums are made in float32 (float64 for such a base) and rounded to the dtype of the base.
    Source: ``peft/tuners/lora/layer.py``.

    Args:
        scaling: ``alpha / r`` (``alpha / sqrt(r)`` with ``use_rslora``), for all adapters; a dict by adapter,
            which merges only these adapters; or a function of the layer ``X`` and the adapter, for adapters
            with ``alpha_pattern`` or ``rank_pattern``.
        fan_in_fan_out: whether base weights of linear layers are ``(in, out)``, as in GPT-2's ``Conv1D``.
        prefix: prefix that is removed from names.

    The weights of one layer may come in any order, but must be adjacent. The converter raises
    :class:`~weight_update.ConversionError` if they are not adjacent, if a factor or base is missing, if an
    adapter of ``scaling`` belongs to no weight, if shapes do not fit, and for variants that it cannot merge:
    DoRA, biases of ``lora_B``, convolutions, parameters such as fused experts (``target_parameters``), single
    tokens (``trainable_token_indices``), and an adapter with several ranks and one scaling. It cannot notice
    ``alpha_pattern``: unless ``scaling`` is a function, some layers are then merged wrongly.
    """
    factors: Iterable[Any] = scaling.values() if isinstance(scaling, Mapping) else [scaling]
    if not callable(scaling) and not all(map(_is_scaling, factors)):
        raise ValueError(
            "scaling= is alpha / r, or a dict of that by adapter, or a function of the layer and the adapter"
            f", not {scaling!r}"
        )
    return functools.partial(_merge, scaling, fan_in_fan_out, prefix)


def _is_scaling(value: object) -> bool:
    return isinstance(value, numbers.Real) and math.isfinite(value)


def _merge(scaling: _Scaling, fan_in_fan_out: bool, prefix: str, items: Iterator[Item]) -> Iterator[Item]:
    merger = _Merger(scaling, fan_in_fan_out, prefix)
    return stream(items, merger.take, merger.finish)


class _Merger:
    def __init__(self, scaling: _Scaling, fan_in_fan_out: bool, prefix: str) -> None:
        self._scaling, self._fan_in_fan_out, self._prefix = scaling, fan_in_fan_out, prefix
        self._layer: str | None = None
        self._base: torch.Tensor | None = None
        self._others: list[str] = []  # names of parameters of the base that are neither weight nor bias
        self._factors: dict[str, dict[str, torch.Tensor]] = {}
        self._ranks: dict[str, tuple[int, str]] = {}  # of each adapter: rank, and the first layer that has it
        self._done: set[str] = set()
        self._unused = set(scaling) if isinstance(scaling, Mapping) else set[str]()

    def take(self, name: str, tensor: torch.Tensor) -> list[Item]:
        name = name.removeprefix(self._prefix)
        base, factor, saved = _BASE.fullmatch(name), _FACTOR.fullmatch(name), _SAVED.fullmatch(name)
        found = base or factor
        before = self._enter(found["layer"] if found else None)
        if factor:
            self._take_factor(name, factor, tensor)
            return before
        if base and base["leaf"] == "weight":
            self._base = tensor
            return before
        if saved and not base and (saved["adapter"] is None or not self._chosen(saved["adapter"])):
            return before
        if base and base["leaf"] != "bias":
            self._others.append(base["leaf"])
        if part := base or saved:
            name = f"{part['layer']}.{part['leaf']}"
        return [*before, (name, tensor)]

    def finish(self) -> list[Item]:
        last = self._enter(None)
        if self._unused:
            shown = ", ".join(map(repr, sorted(self._unused)))
            raise ConversionError(f"no weight has the adapter {shown} of scaling=")
        return last

    def _enter(self, layer: str | None) -> list[Item]:
        """Begin with ``layer``, and return the merged weight of the previous layer."""
        if layer == self._layer:
            return []
        left, self._layer = self._layer, layer
        if layer in self._done:
            raise ConversionError(f"{layer}: its weights are not adjacent; sort the weights by layer first")
        if left is None:
            return []
        self._done.add(left)
        merged = self._merged(left)
        self._base, self._factors, self._others = None, {}, []
        return [(f"{left}.weight", merged)]

    def _chosen(self, adapter: str) -> bool:
        self._unused.discard(adapter)
        return not isinstance(self._scaling, Mapping) or adapter in self._scaling

    def _take_factor(self, name: str, match: re.Match[str], tensor: torch.Tensor) -> None:
        kind, adapter = match["kind"], match["adapter"]
        if not self._chosen(adapter):
            return
        if kind not in _KINDS or match["leaf"] != _KINDS[kind] or tensor.dim() != 2:
            raise ConversionError(
                f"{name}: only plain LoRA of linear layers and embeddings can be merged; {_REMEDY}"
            )
        self._factors.setdefault(adapter, {})[kind] = tensor

    def _merged(self, layer: str) -> torch.Tensor:
        base = self._base
        if base is None and self._others:
            shown = ", ".join(self._others)
            raise ConversionError(
                f"{layer}: LoRA of the parameters of a module ({shown}), such as fused experts, cannot be "
                f"merged; {_REMEDY}"
            )
        if base is None:
            raise ConversionError(f"{layer}: base_layer.weight is missing; with select=, choose it too")
        if not self._factors:
            return base
        if not base.is_floating_point() or base.dtype.itemsize < 2:
            raise ConversionError(
                f"{layer}: a base of {base.dtype} cannot be merged into; dequantize it first"
            )
        wide = torch.promote_types(base.dtype, torch.float32)
        total = base.to(wide, copy=True)
        for adapter, factors in self._factors.items():
            delta = self._delta(layer, adapter, factors, wide)
            if delta.shape != total.shape:
                raise ConversionError(
                    f"{layer} ({adapter}): B @ A is {list(delta.shape)}, the base {list(total.shape)}; "
                    f"is fan_in_fan_out={self._fan_in_fan_out} right?"
                )
            total.add_(delta, alpha=self._scale(layer, adapter))
        return total.to(base.dtype)

    def _scale(self, layer: str, adapter: str) -> float:
        scaling = self._scaling
        if not callable(scaling):
            return float(scaling[adapter] if isinstance(scaling, Mapping) else scaling)
        if not _is_scaling(found := scaling(layer, adapter)):
            raise ConversionError(
                f"{layer} ({adapter}): the function scaling= returned {found!r}; return alpha / r"
            )
        return float(found)

    def _delta(
        self, layer: str, adapter: str, factors: Mapping[str, torch.Tensor], wide: torch.dtype
    ) -> torch.Tensor:
        where = f"{layer} ({adapter})"
        embedding = "embedding_" if any(kind.startswith("embedding") for kind in factors) else ""
        a, b = factors.get(f"{embedding}A"), factors.get(f"{embedding}B")
        if a is None or b is None:
            raise ConversionError(f"{where}: lora_{embedding}{'A' if a is None else 'B'} is missing")
        if a.shape[0] != b.shape[1]:
            raise ConversionError(f"{where}: A is {list(a.shape)} and B {list(b.shape)}, of another rank")
        rank, first = self._ranks.setdefault(adapter, (a.shape[0], layer))
        if a.shape[0] != rank and not callable(self._scaling):
            raise ConversionError(
                f"{where}: has rank {a.shape[0]}, and {first} has rank {rank}, so one scaling= does not fit "
                "both; give a function of the layer and the adapter"
            )
        delta = b.to(wide) @ a.to(wide)
        return delta.T if embedding or self._fan_in_fan_out else delta
