"""How weights leave a model and how they enter one."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, MutableMapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, get_args

import torch
from tensordict import NonTensorData, TensorDict, TensorDictBase
from torch import nn

from weight_update.chunks import WeightSchema
from weight_update.encodings import Encoding, resolve_encoding
from weight_update.errors import SchemaMismatchError, UnsupportedSourceError

__all__ = ["Binding", "NamedWeights", "WeightStrategy", "resolve_strategy"]

ExtractAs = Literal["tensordict", "state_dict"]
_EXTRA = "_extra_state"


@dataclass
class NamedWeights:
    """Weights as the rest of the library sees them.

    Attributes:
        tensors: tensors by dotted name, in order; live references, not copies.
        extra: extra state by the dotted name ``"<module>._extra_state"``.
    """

    tensors: dict[str, torch.Tensor]
    extra: dict[str, Any] = field(default_factory=dict)


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
        binding = Binding(self, destination)
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

    def named(self, source: Any) -> NamedWeights:
        """The weights of ``source`` by dotted name; the tensors are live references.

        Raises:
            UnsupportedSourceError: as :meth:`extract_weights`.
        """
        if isinstance(source, NamedWeights):
            return source
        if isinstance(source, TensorDictBase):
            return _from_items(_walk_tensordict(source))
        if isinstance(source, nn.Module):
            return self._from_module(source)
        if isinstance(source, Mapping):
            return _from_items(_walk_mapping(source))
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
            return _from_items(iter(module.state_dict(keep_vars=True).items()))
        tensors: dict[str, torch.Tensor] = dict(module.named_parameters(remove_duplicate=False))
        tensors.update(module.named_buffers(remove_duplicate=False))
        return NamedWeights(tensors, _extra_of(module))


class Binding:
    """The tensors of one destination, found once and written many times.

    It remembers where each tensor is kept (the owning dict and its key), not the tensor, so that a
    parameter that was replaced in the meantime is found again.
    """

    def __init__(self, strategy: WeightStrategy, destination: Any) -> None:
        self._strategy = strategy
        self.destination = destination
        self._places: dict[str, tuple[Any, str]] = dict(self._find())
        devices = {self._get(name).device for name in self._places}
        self._cuda_devices = [device for device in devices if device.type == "cuda"]
        self._extra_owners: dict[str, nn.Module] = {}
        if isinstance(destination, nn.Module):
            self._extra_owners = dict(_extra_owners(destination))

    @property
    def points(self) -> bool:
        """Whether :meth:`point` may be used: true for modules, whose parameters may move in memory."""
        return isinstance(self.destination, nn.Module)

    def schema(self) -> WeightSchema:
        """The schema of the destination as it is now."""
        return WeightSchema.of({name: self._get(name) for name in self._places})

    def copy(self, names: tuple[str, ...], values: list[torch.Tensor]) -> None:
        """Copy ``values`` into the destination's tensors; addresses do not change.

        Parameters on the meta device have no memory yet; they are replaced by real ones.
        """
        pairs = list(zip(self._targets(names), values, strict=True))
        _require_own_elements(names, [target for target, _ in pairs])
        real = [(target.detach(), value) for target, value in pairs if not target.is_meta]
        if real:
            targets, sources = zip(*real, strict=True)
            torch._foreach_copy_(targets, sources)
        unreal = [(target, value) for target, value in pairs if target.is_meta]
        self._materialise({id(t): value.to(t.dtype, copy=True) for t, value in unreal})

    def point(self, names: tuple[str, ...], values: list[torch.Tensor]) -> None:
        """Make the destination's tensors use the memory of ``values``; nothing is copied.

        Values on another device or of another dtype are converted first, all of them before the first
        tensor is switched. Parameters on the meta device are replaced by real ones.
        """
        self.switch(names, self.prepare(names, values))

    def prepare(self, names: tuple[str, ...], values: list[torch.Tensor]) -> list[torch.Tensor]:
        """``values`` converted to the dtype and device of the destination where they differ."""
        targets = self._targets(names)
        return [
            value
            if target.dtype is value.dtype and target.device == value.device
            else _convert(target, value)
            for target, value in zip(targets, values, strict=True)
        ]

    def switch(self, names: tuple[str, ...], ready: list[torch.Tensor]) -> None:
        """The short second half of :meth:`point`, one assignment a tensor.

        Args:
            names: as in :meth:`point`.
            ready: what :meth:`prepare` returned.
        """
        unreal = {}
        for target, value in zip(self._targets(names), ready, strict=True):
            if target.is_meta:
                unreal[id(target)] = value
            else:
                target.data = value
        self._materialise(unreal)

    def finish_kernels(self) -> None:
        """Wait for the GPUs of the destination: a forward pass may still read, a copy still write.

        The host leaves a forward pass before its kernels have run, and they may run on any stream.
        """
        for device in self._cuda_devices:
            torch.cuda.synchronize(device)

    def check_extra(self, extra: Mapping[str, Any]) -> None:
        """Raise SchemaMismatchError if ``extra`` names modules that take no extra state."""
        if isinstance(self.destination, nn.Module):
            unknown = [f"{name}: no such extra state" for name in extra if name not in self._extra_owners]
            if unknown:
                raise SchemaMismatchError("extra state does not fit the destination:", tuple(unknown))

    def exchange_extra(self, extra: Mapping[str, Any]) -> Callable[[], None]:
        """Hand each extra state to its owner, or none and an error; returns what undoes it."""
        if not extra:
            return lambda: None
        before = self._strategy.named(self.destination).extra

        def undo() -> None:
            self._set_extra(before)

        try:
            self._set_extra(extra)
        except BaseException:
            undo()
            raise
        return undo

    def _set_extra(self, extra: Mapping[str, Any]) -> None:
        for name, value in extra.items():
            if isinstance(self.destination, nn.Module):
                self._extra_owners[name].set_extra_state(value)
            else:
                _set_extra_in(self.destination, name, value)

    def _get(self, name: str) -> torch.Tensor:
        owner, key = self._places[name]
        tensor = owner.get(key)
        if not isinstance(tensor, torch.Tensor):
            raise SchemaMismatchError(f"{name!r} is no longer in the destination")
        return tensor

    def _targets(self, names: tuple[str, ...]) -> list[torch.Tensor]:
        """The tensors as they are now; forward passes may be waiting, so few steps for each."""
        places = self._places
        targets = [owner.get(key) for owner, key in map(places.__getitem__, names)]
        if all(issubclass(kind, torch.Tensor) for kind in set(map(type, targets))):
            return targets
        return [self._get(name) for name in names]  # raises, with the name

    def _materialise(self, values: dict[int, torch.Tensor]) -> None:
        """Replace meta tensors, given by id, wherever they are kept; ties stay ties."""
        if not values:
            return
        made: dict[int, torch.Tensor] = {}
        for owner, key in self._places.values():
            target = owner.get(key)
            if id(target) in values:
                value = values[id(target)]
                if id(target) not in made:
                    parameter = isinstance(target, nn.Parameter)
                    # A tensor object of its own: later switches change it, and must not change `value`.
                    fresh = nn.Parameter(value, target.requires_grad) if parameter else value.detach()
                    made[id(target)] = fresh
                owner[key] = made[id(target)]

    def _find(self) -> Iterator[tuple[str, tuple[Any, str]]]:
        destination = self.destination
        if isinstance(destination, TensorDictBase):
            for name, owner, key in _tensordict_places(destination):
                yield name, (owner, key)
        elif isinstance(destination, nn.Module):
            yield from self._module_places(destination)
        elif isinstance(destination, MutableMapping):
            for name, owner, key in _mapping_places(destination):
                yield name, (owner, key)
        else:
            raise UnsupportedSourceError(
                f"cannot write weights into a {type(destination).__name__}; give an nn.Module, "
                "a TensorDict or a dict of tensors"
            )

    def _module_places(self, module: nn.Module) -> Iterator[tuple[str, tuple[Any, str]]]:
        places = {}
        for path, part in module.named_modules(remove_duplicate=False):
            for owner in (part._parameters, part._buffers):
                for key, value in owner.items():
                    if value is not None:
                        places[f"{path}.{key}" if path else key] = (owner, key)
        for name in self._strategy.named(module).tensors:
            if name not in places:
                raise UnsupportedSourceError(
                    f"{name!r} of {type(module).__name__} is neither a parameter nor a buffer, so it "
                    "can be read but not written"
                )
            yield name, places[name]


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


def _convert(target: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
    device = value.device if target.is_meta else target.device
    return value.to(device=device, dtype=target.dtype)


def _from_items(items: Iterator[tuple[str, Any]]) -> NamedWeights:
    named = NamedWeights({})
    for name, value in items:
        if name in named.tensors or name in named.extra:
            raise UnsupportedSourceError(f"{name!r} stands for two different entries")
        if name.rpartition(".")[2] == _EXTRA:
            named.extra[name] = value
        elif isinstance(value, torch.Tensor):
            named.tensors[name] = value
        else:
            raise UnsupportedSourceError(
                f"{name!r} is a {type(value).__name__}, not a tensor; weights are tensors, other state "
                f"goes under a name that ends in {_EXTRA!r}"
            )
    return named


def _walk_mapping(source: Mapping[Any, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for key, value in source.items():
        name = prefix + _key_name(key, source)
        if isinstance(value, TensorDictBase):
            yield from _walk_tensordict(value, name + ".")
        elif isinstance(value, Mapping) and name.rpartition(".")[2] != _EXTRA:
            yield from _walk_mapping(value, name + ".")
        else:
            yield name, value


def _walk_tensordict(source: TensorDictBase, prefix: str = "") -> Iterator[tuple[str, Any]]:
    for key, value in source.items():
        name = f"{prefix}{key}"
        if isinstance(value, torch.Tensor):  # asked first: it is quick, the others are abstract classes
            yield name, value
        elif isinstance(value, TensorDictBase):
            yield from _walk_tensordict(value, name + ".")
        elif isinstance(value, NonTensorData):
            yield name, value.data
        else:
            yield name, value


def _key_name(key: Any, source: Mapping[Any, Any]) -> str:
    if isinstance(key, tuple) and all(isinstance(part, str) for part in key):
        return ".".join(key)
    if not isinstance(key, str):
        raise UnsupportedSourceError(
            f"a {type(source).__name__} with the key {key!r}: weights have string keys"
        )
    return key


def _tensordict_places(node: TensorDictBase, prefix: str = "") -> Iterator[tuple[str, TensorDictBase, str]]:
    for key, value in node.items():
        if isinstance(value, TensorDictBase):
            yield from _tensordict_places(value, f"{prefix}{key}.")
        elif isinstance(value, torch.Tensor):
            if node.get(key) is not value:
                raise UnsupportedSourceError(
                    f"{prefix + key!r} of a {type(node).__name__} is made anew at each access, so it can be "
                    "read but not written"
                )
            yield f"{prefix}{key}", node, key


def _require_own_elements(names: Sequence[str], targets: Sequence[torch.Tensor]) -> None:
    """Find what a copy would fail on in the middle, before it begins."""
    for name, target in zip(names, targets, strict=True):
        if 0 in target.stride() and any(
            step == 0 and size > 1 for step, size in zip(target.stride(), target.shape, strict=True)
        ):
            raise UnsupportedSourceError(
                f"{name!r} of the destination is an expanded view; its elements cannot be written one by one"
            )


def _mapping_places(node: MutableMapping[Any, Any], prefix: str = "") -> Iterator[tuple[str, Any, Any]]:
    for key, value in node.items():
        name = prefix + _key_name(key, node)
        if isinstance(value, MutableMapping) and name.rpartition(".")[2] != _EXTRA:
            yield from _mapping_places(value, name + ".")
        elif isinstance(value, torch.Tensor) and name.rpartition(".")[2] != _EXTRA:
            yield name, node, key


def _set_extra_in(node: Any, name: str, value: Any) -> None:
    """Set an extra state of a TensorDict or a (nested or dotted) dict at the place where it belongs."""
    while not isinstance(node, TensorDictBase):
        head, _, rest = name.partition(".")
        if name in node or not rest or not isinstance(node.get(head), MutableMapping):
            node[name] = value
            return
        node, name = node[head], rest
    node.set_non_tensor(tuple(name.split(".")), value)


def _node(nodes: dict[str, TensorDictBase], path: str) -> TensorDictBase:
    if path not in nodes:
        parent, _, leaf = path.rpartition(".")
        nodes[path] = TensorDict()
        _node(nodes, parent).set(leaf, nodes[path])
        nodes[path] = nodes[parent].get(leaf)
    return nodes[path]


def _extra_owners(module: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    for path, part in module.named_modules(remove_duplicate=False):
        if type(part).get_extra_state is not nn.Module.get_extra_state:
            yield (f"{path}.{_EXTRA}" if path else _EXTRA), part


def _extra_of(module: nn.Module) -> dict[str, Any]:
    return {name: owner.get_extra_state() for name, owner in _extra_owners(module)}
