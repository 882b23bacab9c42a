"""Comparisons of thousands of tensors and modules with what they were before, in one compiled call.

Where the library of ``unchanged.c`` is missing (see :mod:`weight_update.wire.compiled`), Python compares them
one by one.
"""

from __future__ import annotations

import ctypes
import operator
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

from weight_update.wire.compiled import load


class _ExchangeApi(ctypes.Structure):
    """The table ``DLPackExchangeAPI`` of DLPack 1."""

    _fields_ = (
        ("major", ctypes.c_uint32),
        ("minor", ctypes.c_uint32),
        ("other", ctypes.c_void_p * 4),
        ("dltensor_from_py_object", ctypes.c_void_p),
    )


def _exchange_api() -> _ExchangeApi | None:
    """Return torch's functions for DLPack; None if this version of torch does not have the one needed."""
    capsule = getattr(torch.Tensor, "__dlpack_c_exchange_api__", None)
    if capsule is None:
        return None
    prototype = ctypes.PYFUNCTYPE(ctypes.c_void_p, ctypes.py_object, ctypes.c_char_p)
    address = prototype(("PyCapsule_GetPointer", ctypes.pythonapi))(capsule, b"dlpack_exchange_api")
    api = _ExchangeApi.from_address(address)
    return api if api.major == 1 and api.dltensor_from_py_object else None


library: ctypes.CDLL | None = load(Path(__file__).parent, "_unchanged", 1, locked=True)
"""The compiled library; None where there is none."""

_api = _exchange_api()
_FACTS: tuple[Callable[[torch.Tensor], Any], ...] = (
    type,
    torch.Tensor.data_ptr,
    torch.Tensor.stride,
    *map(operator.attrgetter, ("dtype", "device", "shape")),
)
_METHODS = {False: {"named_modules"}, True: {"named_modules", "state_dict", "_save_to_state_dict"}}
"""Methods that a module may have of its own, by whether the weights are those of a state dict."""


class TensorPlaces:
    """The classes, addresses, dtypes, devices, shapes and strides of some tensors.

    The owner keeps the memory of the tensors alive, so that no other memory takes an address.

    Args:
        tensors: strided tensors.
    """

    def __init__(self, tensors: list[torch.Tensor]) -> None:
        self._numbers = np.zeros(sum(4 + 2 * tensor.dim() for tensor in tensors), dtype=np.int64)
        self._facts: list[list[Any]] = []
        if not self._agrees(tensors, writes=True):
            self._facts = _facts_of(tensors)

    def same(self, tensors: list[torch.Tensor]) -> bool:
        """Return whether ``tensors`` are in the same places."""
        if self._facts:
            try:
                return _facts_of(tensors) == self._facts
            except RuntimeError:  # one of them has no memory, such as a sparse tensor
                return False
        return self._agrees(tensors, writes=False)

    def _agrees(self, tensors: list[torch.Tensor], *, writes: bool) -> bool:
        if library is None or _api is None:
            return False
        numbers = ctypes.c_void_p(self._numbers.ctypes.data), ctypes.c_int64(self._numbers.size)
        return bool(library.wu_tensors(ctypes.py_object(tensors), ctypes.byref(_api), *numbers, int(writes)))


class ModuleParts:
    """The objects that decide which weights some modules have.

    For each module, these are its class and its dicts of parameters, buffers and submodules, with contents.
    For a state dict, also the names of buffers that are not persistent.

    Args:
        parts: a module and all its submodules.
        as_state_dict: whether the weights are those of ``state_dict()``.
    """

    def __init__(self, parts: list[nn.Module], *, as_state_dict: bool) -> None:
        self._parts, self._as_state_dict, self._compiled = parts, as_state_dict, library
        self._objects: list[object] = []  # which stay alive, so that no other object takes an address
        self._known = self._add_objects(self._objects)

    def unchanged(self) -> bool:
        """Return whether all are as before, and no module has hooks or methods of its own for its weights."""
        if not self._known:
            return False
        if self._compiled is not None:
            return self._walk(self._compiled, self._objects, appends=False)
        found: list[object] = []
        return (
            self._add_objects(found)
            and len(found) == len(self._objects)
            and all(map(operator.is_, found, self._objects))
        )

    def _walk(self, compiled: ctypes.CDLL, objects: list[object], *, appends: bool) -> bool:
        lists = ctypes.py_object(self._parts), ctypes.py_object(objects)
        return bool(compiled.wu_modules(*lists, int(self._as_state_dict), int(appends)))

    def _add_objects(self, objects: list[object]) -> bool:
        """Append the objects; return False if a module has hooks or methods of its own for its weights."""
        if self._compiled is not None:
            return self._walk(self._compiled, objects, appends=True)
        for part in self._parts:
            own = vars(part)
            objects.append(type(part))
            for held in map(own.get, ("_parameters", "_buffers", "_modules")):
                if type(held) is not dict:
                    return False
                objects += (held, *held, *held.values())
            if not own.keys().isdisjoint(_METHODS[self._as_state_dict]):
                return False
            if self._as_state_dict:
                if any(map(own.get, ("_state_dict_hooks", "_state_dict_pre_hooks"))):
                    return False
                objects += own.get("_non_persistent_buffers_set", ())
        return True


def _facts_of(tensors: list[torch.Tensor]) -> list[list[Any]]:
    """Return what the compiled function compares."""
    return [list(map(fact, tensors)) for fact in _FACTS]
