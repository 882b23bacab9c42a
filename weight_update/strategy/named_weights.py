"""Weights by dotted name, and reading them from modules, TensorDicts and dicts."""

from __future__ import annotations

import inspect
import operator
from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from tensordict import NonTensorData, TensorDictBase
from torch import nn
from torch.distributed.tensor import DTensor
from torch.nn.parameter import UninitializedBuffer, UninitializedParameter, is_lazy

from weight_update.arguments import require_instance
from weight_update.encodings import Encoding
from weight_update.errors import ConversionError, SchemaMismatchError, UnsupportedSourceError
from weight_update.strategy.conversion import Convert, collect, convert_checked
from weight_update.strategy.selection import extra_with, key_name
from weight_update.text import plural
from weight_update.wire.fixed import FixedTensors
from weight_update.wire.memory import has_memory, is_freed, memory_identity
from weight_update.wire.schema import (
    WeightSchema,
    differences,
    matching,
    require_not_freed,
    require_tensor,
    untied,
    wrapper_hint,
)

ExtractAs = Literal["tensordict", "state_dict"]
Select = Literal["trainable"] | Sequence[str] | Callable[[str, torch.Tensor], bool]

EXTRA = "_extra_state"
EXTRA_IN_TENSORDICT = "__extra_state__"
"""The key of a module's own extra state in a TensorDict; TorchRL's name."""

Gather = Callable[[Mapping[str, torch.Tensor]], Generator[tuple[str, torch.Tensor]]]
"""Function that gathers tensors of which this process holds parts, one after the other."""

# these run for thousands of tensors in each update, so without interpreted code for each tensor
_SHAPE, _DTYPE, _LAYOUT, _IS_META = map(operator.attrgetter, ("shape", "dtype", "layout", "is_meta"))
_LAZY = {UninitializedParameter, UninitializedBuffer}


@dataclass
class NamedWeights:
    """Weights by dotted name: the form in which the rest of the library handles them.

    Attributes:
        tensors: tensors by dotted name, in order; live references, not copies.
        extra: extra state by the dotted name ``"<module>._extra_state"``.
        convert: conversion that :meth:`items` still has to apply to ``tensors``.
        gather: gathering that comes before the conversion.
        fixed: the same tensors, if they are known to be as in the update before except for their values.
    """

    tensors: dict[str, torch.Tensor] = field(repr=False)
    extra: dict[str, Any] = field(default_factory=dict, repr=False)
    convert: Convert | None = None
    gather: Gather | None = None
    fixed: FixedTensors | None = field(default=None, repr=False)

    def in_order(self, names: tuple[str, ...]) -> Sequence[torch.Tensor]:
        """Return the tensors of ``names``, which are all here."""
        fixed = self.fixed
        if fixed is not None and (fixed.memo.get("names") is names or fixed.names == names):
            fixed.memo["names"] = names
            return fixed
        return [self.tensors[name] for name in names]

    @torch.no_grad()
    def items(self) -> Generator[tuple[str, torch.Tensor]]:
        """Yield names and tensors, each converted only when it is asked for, and not kept.

        A caller that does not take all items closes the generator, so that a conversion ends.

        Raises:
            UnsupportedSourceError: ``convert`` gave a name twice, or no pairs of a name and a tensor.
            ConversionError: ``convert`` wrote to the tensors that it was given.
        """
        whole = (item for item in self.tensors.items()) if self.gather is None else self.gather(self.tensors)
        # How often each was written to, as far as PyTorch counts.
        counted = () if self.convert is None else self.tensors.items()
        for name, one in counted:
            require_not_freed(name, one)
        before = {name: one._version for name, one in counted if not one.is_inference()}
        try:
            yield from whole if self.convert is None else convert_checked(self.convert, whole)
        finally:
            whole.close()
        written = [name for name, count in before.items() if count != self.tensors[name]._version]
        if written:
            raise ConversionError(
                f"while weights were converted, {written[0]!r} was written to ({len(written)} of "
                f"{len(before)} were): convert must make new tensors and leave the trainer's alone"
            )

    def converted(self) -> NamedWeights:
        """Return the same weights after gathering and conversion.

        Raises:
            ConversionError: as :meth:`items`, or ``convert`` refilled a buffer for another weight.
        """
        if self.convert is None and self.gather is None:
            return self
        return NamedWeights(collect(self.items()), self.extra)

    def schema(self) -> WeightSchema:
        """Return the schema of :meth:`items`, without keeping tensors that a conversion makes."""
        owned = set(map(_storage, self.tensors.values()))  # views of it cost no memory
        found: dict[str, torch.Tensor] = {}
        last = hollow = torch.empty(0)
        for name, tensor in self.items():
            if _storage(tensor) in owned:
                found[name] = tensor
                continue
            # A tensor under several names in a row is tied, also if each name has a view of its own.
            if (memory := memory_identity(tensor)) is None or memory != memory_identity(last):
                last, hollow = tensor, tensor.to("meta")
            found[name] = hollow
        return WeightSchema.of(found)

    @property
    def sharded(self) -> bool:
        """Whether other processes hold parts of some of the tensors."""
        return any(issubclass(kind, DTensor) for kind in set(map(type, self.tensors.values())))

    def require_values(self) -> None:
        """Raise UnsupportedSourceError if some of the tensors are on the meta device."""
        if any(map(_IS_META, self.tensors.values())):
            hollow = ", ".join([name for name, tensor in self.tensors.items() if tensor.is_meta][:10])
            raise UnsupportedSourceError(
                f"on the meta device, without values to send: {hollow}; load the model first"
            )

    def require_agreed(
        self, schema: WeightSchema, *, more: bool, required: frozenset[str] | None = None
    ) -> None:
        """Check that the tensors fit ``schema``, on which both sides agreed.

        ``more`` allows names that are not in the schema. Names in the schema that are not ``required`` may
        be missing; None requires all.

        Raises:
            UnsupportedSourceError: tensors are on the meta device, or cannot be sent at all.
            SchemaMismatchError: names do not fit; the error has one line for each.
        """
        tensors, fixed = self.tensors, self.fixed
        agreed = "agreed", id(schema), id(required), more
        if fixed is not None and agreed in fixed.memo:
            return
        self.require_values()
        kept = schema, required  # the memo keeps them, and so their ids
        if required is not None:
            names = required.union(tensors)
            schema = WeightSchema(tuple(meta for meta in schema.tensors if meta.name in names), schema.nbytes)
        if _exact(schema, tensors, more=more):
            if fixed is not None:
                fixed.memo[agreed] = kept
            return
        given = WeightSchema.of(tensors)
        problems = [*differences(schema, given, "the weights given", more=more), *untied(schema, given)]
        if problems:
            hint = wrapper_hint({"the weights given": given.names, "the weights agreed on": schema.names})
            raise SchemaMismatchError(
                "the weights given are not those of this scheme's model "
                f"({plural(len(problems), 'difference')}{hint}):",
                tuple(problems),
            )


def called(source: Any) -> Any:
    """Return ``source`` or, if it is a function, its result; UnsupportedSourceError for a class."""
    while callable(source) and not isinstance(source, nn.Module | TensorDictBase | Mapping):
        require_instance(source, UnsupportedSourceError)
        source = source()
    return source


def require_initialized(tensors: Mapping[str, torch.Tensor]) -> None:
    """Raise UnsupportedSourceError if some of the tensors are of a lazy module that was not run yet."""
    if not _LAZY.isdisjoint(map(type, tensors.values())):
        lazy = ", ".join([name for name, tensor in tensors.items() if is_lazy(tensor)][:10])
        raise UnsupportedSourceError(
            f"not initialized, as parameters of a LazyLinear are at first: {lazy}; call the model once with "
            "a batch first"
        )


class WeightReader:
    """The part of a strategy that reads weights from sources; attributes are options of the strategy."""

    extract_as: ExtractAs
    encoding: Encoding
    select: Select | None
    convert: Convert | None
    max_in_flight: int | None

    @property
    def partial(self) -> bool:
        """Whether receivers may have more weights than are sent."""
        return self.select is not None and self.encoding is self.encoding.whole

    def named(self, source: Any) -> NamedWeights:
        """Return the weights of ``source`` by dotted name; the tensors are live references.

        Raises:
            UnsupportedSourceError: ``source`` is of a type that has no weights; the message names the type.
        """
        source = called(source)
        if isinstance(source, NamedWeights):
            return source
        if isinstance(source, TensorDictBase):
            return _enter_all(NamedWeights({}), source)
        if isinstance(source, nn.Module):
            if self.extract_as == "state_dict":
                return from_items(source.state_dict(keep_vars=True).items())
            return from_module(source)
        if isinstance(source, Mapping):
            return _enter_all(NamedWeights({}), source)
        raise UnsupportedSourceError(
            f"cannot read weights from an object of type {type(source).__name__}; give an nn.Module, a "
            "TensorDict, a dict of tensors, or a callable that returns one of these"
        )

    def chosen(self, source: Any) -> frozenset[str] | None:
        """Return the names in ``source`` that ``select`` chooses; None for all.

        Raises:
            ValueError: a prefix matches no name, or no weight is chosen.
            UnsupportedSourceError: nothing is selected, and the module has weights that are not read.
        """
        if self.select is None:
            if self.convert is None and self.extract_as == "tensordict" and isinstance(source, nn.Module):
                _require_all_read(source, self.named(source))
            return None
        source = called(source)
        tensors = self.named(source).tensors
        if self.select == "trainable":
            names = set(tensors) - _frozen_or_transient(source, tensors)
        elif callable(self.select):
            names = {name for name, tensor in tensors.items() if self.select(name, tensor)}
        else:
            names = matching(self.select, tensors)
        if not names:
            raise ValueError(f"select={self.select!r} chooses none of the {len(tensors)} weights")
        return frozenset(names)

    def outgoing(
        self, source: Any, chosen: frozenset[str] | None = None, *, later: bool = False
    ) -> NamedWeights:
        """Return the weights of ``source`` as they are sent: those ``chosen`` (None: all), converted.

        With ``max_in_flight`` or ``later``, or if sharded, each is converted when it is taken from the items.

        Raises:
            UnsupportedSourceError: as :meth:`named`; a lazy module never ran; ``convert`` gave a name twice.
        """
        named = self.named(source)
        require_initialized(named.tensors)
        if chosen is not None:
            extra = extra_with(chosen, named.tensors, named.extra) if self.partial else named.extra
            named = NamedWeights({n: v for n, v in named.tensors.items() if n in chosen}, extra)
        if self.convert is None:
            return named
        named = NamedWeights(named.tensors, convert=self.convert)
        return named if later or self.max_in_flight is not None or named.sharded else named.converted()


def any_freed(tensors: Iterable[torch.Tensor]) -> bool:
    """Return whether the memory of strided tensors was freed, as when a model is offloaded."""
    sizes = map(torch.UntypedStorage.nbytes, map(torch.Tensor.untyped_storage, tensors))
    return 0 in sizes and any(map(is_freed, tensors))


def _exact(schema: WeightSchema, tensors: Mapping[str, torch.Tensor], *, more: bool) -> bool:
    """Return whether nothing differs, not even a dtype; a fast check."""
    values = list(tensors.values())
    if tuple(tensors) != schema.names:
        values = [tensors[name] for name in schema.names if name in tensors]
    return (
        len(values) == len(schema.names)
        and (more or len(values) == len(tensors))
        and all(map(operator.eq, map(_SHAPE, values), schema.shapes))
        and all(map(operator.is_, map(_DTYPE, values), schema.dtypes))
        and set(map(_LAYOUT, values)) <= {torch.strided}
        and not any_freed(values)
        and all(
            values[a] is values[b] or memory_identity(values[a]) == memory_identity(values[b])
            for a, b in schema.ties
        )
    )


def _require_all_read(module: nn.Module, named: NamedWeights) -> None:
    """Raise UnsupportedSourceError if a submodule, such as a quantized layer, saves more than ``named``."""
    for prefix, part in named_parts(module):
        if _as_in_torch(part, "_save_to_state_dict"):
            continue
        saved: dict[str, Any] = {}
        part._save_to_state_dict(saved, prefix, True)
        unread = {n: v for n, v in saved.items() if n not in named.tensors and n not in named.extra}
        read = set(map(_storage, named.tensors.values())) if unread else set()
        for name, value in unread.items():
            if not isinstance(value, torch.Tensor) or _storage(value) not in read:
                raise UnsupportedSourceError(
                    f"{name!r} of {type(part).__name__} is in the state dict, but neither a parameter nor a "
                    "buffer, so it would not be sent; make it a buffer, or choose the weights to send by "
                    "WeightStrategy(select=...)"
                )


def _storage(tensor: torch.Tensor) -> int:
    """Return the address of the storage of a tensor, or its id if it has no memory of its own."""
    return tensor.untyped_storage().data_ptr() if has_memory(tensor) else id(tensor)


def _frozen_or_transient(source: Any, tensors: Mapping[str, torch.Tensor]) -> set[str]:
    """Return the names of weights that training does not change or that a checkpoint does not hold.

    These are parameters that require no gradient and, in a module, buffers that are not persistent.
    """
    found = {
        name for name, value in tensors.items() if isinstance(value, nn.Parameter) and not value.requires_grad
    }
    if isinstance(source, nn.Module):
        for prefix, part in named_parts(source):
            found.update(prefix + key for key in part._non_persistent_buffers_set)
    return found


def from_items(items: Iterable[tuple[str, Any]]) -> NamedWeights:
    """Return named weights from pairs of a dotted name, given once, and a tensor or an extra state."""
    named = NamedWeights({})
    for name, value in items:
        _enter(named, name, value)
    return named


def _enter(named: NamedWeights, name: str, value: Any) -> None:
    """Add a tensor or an extra state to ``named``."""
    if name in named.tensors or name in named.extra:
        raise UnsupportedSourceError(f"{name!r} is the name of two different entries")
    if name.endswith(EXTRA) and name.rpartition(".")[2] == EXTRA:
        named.extra[name] = value
    else:
        require_tensor(name, value)
        named.tensors[name] = value


def _enter_all(named: NamedWeights, source: Mapping[Any, Any], prefix: str = "") -> NamedWeights:
    """Add the entries of a nested mapping or TensorDict, also non-tensor data, to ``named``; return it."""
    tensors, in_tensordict = named.tensors, isinstance(source, TensorDictBase)
    for key, value in source.items():
        name = prefix + (key if in_tensordict else key_name(key, source))
        if isinstance(value, torch.Tensor):  # asked first: it is quick, the others are abstract classes
            if name not in tensors and not name.endswith(EXTRA):
                tensors[name] = value  # in few steps: there may be thousands at each update
            else:
                _enter(named, name, value)
        elif in_tensordict and key == EXTRA_IN_TENSORDICT:
            _enter(
                named, prefix + EXTRA, value.to_dict() if isinstance(value, TensorDictBase) else value.data
            )
        elif isinstance(value, TensorDictBase) or (
            isinstance(value, Mapping) and name.rpartition(".")[2] != EXTRA
        ):
            _enter_all(named, value, f"{name}.")
        else:
            _enter(named, name, value.data if in_tensordict and isinstance(value, NonTensorData) else value)
    return named


def from_module(module: nn.Module) -> NamedWeights:
    """Return a module's parameters, then its buffers, each under all its names, and the extra state.

    They are those of ``named_parameters`` and ``named_buffers``, found in a third of the time.
    """
    parts = named_parts(module)
    tensors: dict[str, torch.Tensor] = {}
    for method, members in (("named_parameters", "_parameters"), ("named_buffers", "_buffers")):
        if _as_in_torch(module, method) and _as_in_torch(module, "_named_members"):
            for prefix, part in parts:
                for name, value in getattr(part, members).items():
                    if value is not None:
                        tensors[prefix + name] = value
        else:
            named = getattr(module, method)
            known = inspect.signature(named).parameters.values()
            takes = any(one.name == "remove_duplicate" or one.kind is one.VAR_KEYWORD for one in known)
            tensors.update(named(remove_duplicate=False) if takes else named())
    return NamedWeights(tensors, {name: part.get_extra_state() for name, part in extra_owners(parts).items()})


def extra_owners(parts: Iterable[tuple[str, nn.Module]]) -> dict[str, nn.Module]:
    """Return the modules in a result of :func:`named_parts` that have extra state, by the state's name."""
    plain = nn.Module.get_extra_state
    return {prefix + EXTRA: part for prefix, part in parts if type(part).get_extra_state is not plain}


def named_parts(module: nn.Module, prefix: str = "") -> list[tuple[str, nn.Module]]:
    """Return pairs of a name prefix, which ends with a dot, and a module, for each name of each submodule."""
    if type(module).named_modules is not nn.Module.named_modules or "named_modules" in module.__dict__:
        named = module.named_modules(set(), prefix.removesuffix("."), False)  # as torch calls it
        return [(f"{name}." if name else "", part) for name, part in named]
    parts = [(prefix, module)]
    for name, part in module._modules.items():
        if part is not None:
            parts += named_parts(part, f"{prefix}{name}.")
    return parts


def _as_in_torch(module: nn.Module, method: str) -> bool:
    """Return whether neither the class of a module nor the module itself overrides a method."""
    return getattr(type(module), method) is getattr(nn.Module, method) and method not in vars(module)
