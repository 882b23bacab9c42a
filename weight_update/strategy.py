"""How weights leave a model and how they enter one."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal, get_args

import torch
from tensordict import NonTensorData, TensorDict, TensorDictBase
from torch import nn

from weight_update.binding import Binding
from weight_update.chunks import WeightSchema
from weight_update.encodings import Encoding, resolve_encoding
from weight_update.errors import UnsupportedSourceError
from weight_update.named import NamedWeights, extra_of, from_items, walk_mapping, walk_tensordict

__all__ = ["WeightStrategy", "resolve_strategy"]

ExtractAs = Literal["tensordict", "state_dict"]


class WeightStrategy:
    """Extracts weights from a source and applies them to a destination.

    Args:
        extract_as: ``"tensordict"`` takes parameters and all buffers, and hands weights out as a nested
            TensorDict; ``"state_dict"`` takes parameters and persistent buffers, and hands weights out
            as a flat dict with dotted names.
        encoding: how weights become chunks: ``"dense"`` or an :class:`~weight_update.Encoding`.

    Raises:
        ValueError: an unknown ``extract_as`` or encoding; the message lists the known ones.

    Sources and destinations may be an ``nn.Module``, a TensorDict, a (nested or dotted) dict of tensors,
    or, as a source, a callable that returns one of these.
    """

    def __init__(self, extract_as: ExtractAs = "tensordict", *, encoding: str | Encoding = "dense") -> None:
        if extract_as not in get_args(ExtractAs):
            known = " or ".join(repr(name) for name in get_args(ExtractAs))
            raise ValueError(f"extract_as must be {known}, got {extract_as!r}")
        self.extract_as: ExtractAs = extract_as
        self.encoding = resolve_encoding(encoding)

    def __repr__(self) -> str:
        return f"WeightStrategy({self.extract_as!r}, encoding={self.encoding!r})"

    def extract_weights(self, source: Any) -> TensorDictBase | dict[str, Any]:
        """The weights of ``source`` in the format of this strategy; the tensors are not copied.

        Raises:
            UnsupportedSourceError: ``source`` is of a type that has no weights; the message names it.
        """
        return self.export(self.named(source))

    def apply_weights(self, destination: Any, weights: Any, inplace: bool = True) -> None:
        """Write ``weights`` into ``destination``: all of them, or none and an error.

        Args:
            destination: module, TensorDict or dict.
            weights: anything that :meth:`extract_weights` takes.
            inplace: True copies values into the tensors that are there; False makes the destination hold
                the given tensors' memory instead (no copy is made where device and dtype agree).

        Raises:
            SchemaMismatchError: names, shapes or kinds of dtype differ; nothing was written.
            UnsupportedSourceError: one of the two is of a type that has no weights.
        """
        named = self.named(weights)
        binding = self.bind(destination)
        schema = WeightSchema.of(named.tensors)
        schema.require_same(binding.schema(), "the destination")
        binding.check_extra(named.extra)
        values = [value.detach() for value in named.tensors.values()]
        undo = binding.exchange_extra(named.extra)
        try:
            (binding.copy if inplace else binding.point)(schema.names, values)
        except BaseException:
            undo()
            raise

    def bind(self, destination: Any) -> Binding:
        """The places in ``destination`` that the weights of this strategy are written to.

        Raises:
            UnsupportedSourceError: ``destination`` is of a type that cannot be written.
        """
        return Binding(self.named, destination)

    def named(self, source: Any) -> NamedWeights:
        """The weights of ``source`` by dotted name; the tensors are live references.

        Raises:
            UnsupportedSourceError: as :meth:`extract_weights`.
        """
        if isinstance(source, NamedWeights):
            return source
        if isinstance(source, TensorDictBase):
            return from_items(walk_tensordict(source))
        if isinstance(source, nn.Module):
            return self._from_module(source)
        if isinstance(source, Mapping):
            return from_items(walk_mapping(source))
        if callable(source):
            return self.named(source())
        raise UnsupportedSourceError(
            f"cannot read weights from a {type(source).__name__}; give an nn.Module, a TensorDict, "
            "a dict of tensors, or a callable that returns one of these"
        )

    def export(self, named: NamedWeights) -> TensorDictBase | dict[str, Any]:
        """``named`` in the format of this strategy."""
        if self.extract_as == "state_dict":
            return {**named.tensors, **named.extra}
        out = TensorDict()
        nodes: dict[str, TensorDictBase] = {"": out}
        for name, value in {**named.tensors, **named.extra}.items():
            path, _, leaf = name.rpartition(".")
            node = _node(nodes, path)
            if name in named.extra:
                node[leaf] = NonTensorData(value)
            else:
                node.set(leaf, value)
        return out

    def _from_module(self, module: nn.Module) -> NamedWeights:
        if self.extract_as == "state_dict":
            return from_items(iter(module.state_dict(keep_vars=True).items()))
        tensors: dict[str, torch.Tensor] = dict(module.named_parameters(remove_duplicate=False))
        tensors.update(module.named_buffers(remove_duplicate=False))
        return NamedWeights(tensors, extra_of(module))


def resolve_strategy(strategy: str | WeightStrategy) -> WeightStrategy:
    """A strategy from its name, or the strategy itself.

    Raises:
        ValueError: the name is unknown.
    """
    if isinstance(strategy, WeightStrategy):
        return strategy
    if strategy not in get_args(ExtractAs):
        known = ", ".join(repr(name) for name in get_args(ExtractAs))
        raise ValueError(f"strategy must be {known} or a WeightStrategy, got {strategy!r}")
    return WeightStrategy(strategy)  # type: ignore[arg-type]  # checked at run time


def _node(nodes: dict[str, TensorDictBase], path: str) -> TensorDictBase:
    if path not in nodes:
        parent, _, leaf = path.rpartition(".")
        nodes[path] = TensorDict()
        _node(nodes, parent).set(leaf, nodes[path])
        nodes[path] = nodes[parent].get(leaf)
    return nodes[path]
