"""Reading the same source again and again: work for each tensor is done when something has changed."""

from __future__ import annotations

import operator
import weakref
from typing import Any

import torch
from torch import nn

from weight_update.strategy.named_weights import (
    ExtractAs,
    NamedWeights,
    WeightReader,
    called,
    extra_owners,
    named_parts,
)
from weight_update.wire.fixed import FixedTensors, are_many_small
from weight_update.wire.unchanged import ModuleParts

_ADDRESS = torch.Tensor.data_ptr
_LAYOUT = operator.attrgetter("layout")


class RepeatedRead:
    """Reads one source at each update, and notices whether more than its values have changed.

    Every read checks everything that its result depends on. A second read of the same module finds the
    tensors without asking each submodule for them, and tensors that are where they were need no other check.
    """

    def __init__(self, strategy: WeightReader) -> None:
        self._strategy = strategy
        self._module: weakref.ref[nn.Module] | None = None  # the module that was read last
        self._structure: _ModuleStructure | None = None
        self._chosen: frozenset[str] | None = None
        self._tensors: dict[str, torch.Tensor] = {}  # those of the structure
        self._addresses: list[int] = []  # of the tensors that were read last
        self._fixed: FixedTensors | None = None
        self._many_small = False  # whether the tensors that were read last may be fixed

    def outgoing(self, source: Any, chosen: frozenset[str] | None) -> NamedWeights:
        """Return the result of :meth:`WeightReader.outgoing`, or raise its errors."""
        if self._strategy.convert is not None:
            return self._strategy.outgoing(source, chosen)
        source = called(source)
        named = self._again(source, chosen) or self._anew(source, chosen)
        self._find_fixed(named)
        return named

    def _again(self, source: Any, chosen: frozenset[str] | None) -> NamedWeights | None:
        """Return the weights of the module that was read last, if its structure is the same."""
        structure = self._structure
        if structure is None or structure.module is not source or chosen is not self._chosen:
            return None
        if not structure.unchanged():
            return None
        extra = {name: part.get_extra_state() for name, part in structure.extra_owners.items()}
        return NamedWeights(self._tensors, extra)

    def _anew(self, source: Any, chosen: frozenset[str] | None) -> NamedWeights:
        last = None if self._module is None else self._module()
        self._module = self._structure = None
        self._tensors = {}
        structure = None
        if isinstance(source, nn.Module):
            self._module = weakref.ref(source)
            if source is last and self._many_small:  # a module that is read once is not kept alive
                structure = _ModuleStructure(source, self._strategy.extract_as)
        named = self._strategy.outgoing(source, chosen)
        self._many_small = are_many_small(named.tensors)
        if (
            structure is not None
            and structure.unchanged()  # since before the weights were read
            and structure.extra_owners.keys() == named.extra.keys()
        ):
            self._structure, self._chosen, self._tensors = structure, chosen, named.tensors
        return named

    def _find_fixed(self, named: NamedWeights) -> None:
        """Enter the fixed tensors into ``named``, if they are those of the last read."""
        tensors = named.tensors
        if self._fixed is not None and self._fixed.unchanged(tensors):
            named.fixed = self._fixed
            return
        self._fixed = None
        before, self._addresses = self._addresses, []
        if self._many_small and set(map(_LAYOUT, tensors.values())) == {torch.strided}:
            self._addresses = list(map(_ADDRESS, tensors.values()))
            if self._addresses == before:
                named.fixed = self._fixed = FixedTensors.of(tensors)


_DICTS = ("_parameters", "_buffers", "_modules")
_HOOKS = ("_state_dict_hooks", "_state_dict_pre_hooks")
_METHODS: dict[ExtractAs, tuple[str, ...]] = {
    "tensordict": ("named_modules", "named_parameters", "named_buffers", "_named_members"),
    "state_dict": ("named_modules", "state_dict", "_save_to_state_dict"),
}
"""Methods that find the weights; a module with one of its own is read anew each time."""


class _ModuleStructure:
    """Everything that the names and tensors of a module depend on, as it was when this object was made.

    These are the submodules with their classes, and the identity and contents of their dicts of parameters,
    buffers and submodules. For a state dict, also hooks, and the names of buffers that are not persistent.

    Attributes:
        extra_owners: submodules that have extra state, by the name of the state.
    """

    def __init__(self, module: nn.Module, extract_as: ExtractAs) -> None:
        self.module, parts = module, named_parts(module)
        self.extra_owners = extra_owners(parts)
        self._methods = _METHODS[extract_as]
        self._parts = ModuleParts([part for _, part in parts], as_state_dict=extract_as == "state_dict")
        self._extra_of = {type(part): type(part).get_extra_state for _, part in parts}

    def unchanged(self) -> bool:
        """Return whether everything is as it was, and torch's own methods find the weights."""
        own = vars(self.module)
        if any(name in own for name in self._methods) or not all(map(self._finds_as_torch, self._extra_of)):
            return False
        return self._parts.unchanged()

    def _finds_as_torch(self, kind: type[nn.Module]) -> bool:
        """Return whether a class finds weights in torch's way, and extra state in the way it did before."""
        return (
            kind.get_extra_state is self._extra_of[kind]
            and getattr(kind, "__getattribute__") is object.__getattribute__  # noqa: B009 - mypy sees two types
            and all(getattr(kind, name) is getattr(nn.Module, name) for name in self._methods)
            and not any(hasattr(kind, name) for name in (*_DICTS, *_HOOKS, "_non_persistent_buffers_set"))
        )
