"""Bindings: the places in a model where its tensors are kept, for writing weights into them."""

from __future__ import annotations

import copy
import functools
import operator
from collections.abc import Callable, Iterable, Iterator, Mapping, MutableMapping, Sequence
from itertools import chain, repeat
from typing import Any

import torch
from tensordict import TensorDictBase, TensorDictParams
from torch import nn
from torch.nn.utils import parametrize

from weight_update.arguments import require_instance
from weight_update.encodings.dense import copy_tensors
from weight_update.errors import SchemaMismatchError, UnsupportedSourceError, undo_on_error
from weight_update.strategy.named_weights import (
    EXTRA,
    EXTRA_IN_TENSORDICT,
    NamedWeights,
    any_freed,
    extra_owners,
    named_parts,
    require_initialized,
)
from weight_update.strategy.selection import key_name
from weight_update.wire.memory import memory_identity
from weight_update.wire.schema import WeightSchema, require_not_freed, require_tensor

_Place = tuple[str, tuple[Any, Any]]  # name of a tensor, the dict that holds it, and its key
_Facts = tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...], tuple[torch.dtype, ...]]
"""Addresses, numbers of dimensions, sizes of all dimensions, and dtypes."""
_CPU = torch.device("cpu")
_SHAPE, _DTYPE, _DEVICE, _IS_CPU, _IS_META = map(
    operator.attrgetter, ("shape", "dtype", "device", "is_cpu", "is_meta")
)


def require_writable(destination: Any) -> None:
    """Raise UnsupportedSourceError unless the type of ``destination`` is one that has places for weights."""
    require_instance(destination, UnsupportedSourceError)
    if not isinstance(destination, nn.Module | MutableMapping):
        raise UnsupportedSourceError(
            f"cannot write weights into an object of type {type(destination).__name__}; give an nn.Module, a "
            "TensorDict or a dict of tensors (an InferenceEngine takes weights only from send())"
        )


class Binding:
    """The tensors of one destination, found once and written many times.

    A binding remembers where each tensor is kept (the owning dict and its key), not the tensor, so that it
    finds a parameter that was replaced in the meantime. :meth:`WeightStrategy.bind` makes one, whose ``read``
    is :meth:`WeightStrategy.named`.

    Attributes:
        home: CUDA device that all tensors were on at first; the CPU if there is no such device.
        points: whether :meth:`switch` may be used: True for modules, whose parameters may move in memory.
    """

    def __init__(self, read: Callable[[Any], NamedWeights], destination: Any) -> None:
        require_writable(destination)
        self._read = read
        self.destination = destination
        self.points = isinstance(destination, nn.Module)
        _rejoin(destination)
        is_module = self.points and not isinstance(destination, TensorDictBase)
        places = self._module_places(destination) if is_module else _places(destination)
        self._places: dict[str, tuple[Any, str]] = {}
        for name, place in places:
            if name in self._places:
                raise UnsupportedSourceError(f"{name!r} is the name of two different entries of the target")
            self._places[name] = place
        self._parts = list(_parts(destination))
        modules = named_parts(destination) if self.points else []
        self._extra_owners = extra_owners(modules)
        self._owners = [part._modules for _, part in modules if part._modules]
        self._submodules = list(chain.from_iterable(map(dict.values, self._owners)))
        plain = {type(owner).get for owner, _ in self._places.values()} <= {dict.get}
        self._look_up: Callable[[Any, str], Any] = dict.get if plain else lambda owner, key: owner.get(key)
        self._asked: tuple[tuple[str, ...], list[Any], list[str]] = (), [], []  # names, owners and keys
        self._prepared: _Facts = (), (), (), ()  # of the tensors in prepare()
        self._find_devices()

    def is_stale(self) -> bool:
        """Return whether a submodule, or a dict or TensorDict inside the destination, was replaced."""
        # Without interpreted code for each submodule: forward passes may be waiting.
        submodules = list(chain.from_iterable(map(dict.values, self._owners)))
        return (
            len(submodules) != len(self._submodules)
            or not all(map(operator.is_, submodules, self._submodules))
            or True in [get(key) is not part for get, key, part in self._parts]
        )

    def _find_devices(self) -> None:
        devices = {self._get(name).device for name in self._places}
        self._cuda_devices = _cuda_devices(devices)  # the program may move the tensors later
        self.home: torch.device = devices.pop() if len(devices) == 1 and self._cuda_devices else _CPU

    def read(self) -> NamedWeights:
        """Return the weights of the destination as they are now; live references."""
        return self._read(self.destination)

    def tensors(self, names: tuple[str, ...]) -> list[torch.Tensor]:
        """Return the tensors of the destination as they are now."""
        if names is not self._asked[0]:  # forward passes may be waiting, so do little for each tensor
            places = [self._places[name] for name in names]
            self._asked = names, [owner for owner, _ in places], [key for _, key in places]
        targets = list(map(self._look_up, *self._asked[1:]))
        if all(map(issubclass, set(map(type, targets)), repeat(torch.Tensor))):
            return targets
        return [self._get(name) for name in names]  # raises, with the name

    def schema(self) -> WeightSchema:
        """Return the schema of the destination as it is now.

        Raises:
            UnsupportedSourceError: the destination is read-only, or a lazy module was not run yet.
        """
        tensors = {name: self._get(name) for name in self._places}
        require_initialized(tensors)
        frozen = [name for name, one in tensors.items() if one.is_inference() and not one.is_meta]
        if frozen:
            raise UnsupportedSourceError(
                f"{frozen[0]!r} of the target is an inference tensor ({len(frozen)} of {len(tensors)} "
                "are): make the model outside torch.inference_mode(), and compute with it there if you like"
            )
        return WeightSchema.of(tensors)

    def copy(self, names: tuple[str, ...], values: list[torch.Tensor], *, counted: bool = True) -> None:
        """Copy ``values`` into the destination's tensors; addresses do not change.

        ``counted`` is whether autograd is told of the writes; if not, the caller has to tell it.
        Parameters on the meta device have no memory yet, so real ones replace them.
        """
        targets, without_memory = self.tensors(names), {}
        _require_own_elements(names, targets)
        if any(map(_IS_META, targets)):
            pairs = list(zip(targets, values, strict=True))
            without_memory = {id(t): _convert(t, value, copy=True) for t, value in pairs if t.is_meta}
            targets = [target for target, _ in pairs if not target.is_meta]
            values = [value for target, value in pairs if not target.is_meta]
        if targets:
            places = [target.data for target in targets]  # whose writes torch does not count
            if any(map(torch.Tensor.is_conj, targets)) or any(map(torch.Tensor.is_neg, targets)):
                for place, value in zip(places, values, strict=True):  # _foreach_copy_ takes no such views
                    place.copy_(value)
            else:
                copy_tensors(places, values, "applying weights")
            if counted:
                count_writes(targets)
        self._materialise(without_memory)

    def prepare(self, schema: WeightSchema, values: list[torch.Tensor]) -> list[torch.Tensor]:
        """Return ``values``, converted to the destination's dtype and device where they differ.

        Raises:
            SchemaMismatchError: a tensor was replaced by one that does not take its value.
            UnsupportedSourceError: a tensor was replaced by one that cannot be written.
        """
        targets = self.tensors(schema.names)
        addresses, dimensions, sizes, dtypes = self._prepared = _facts_of(targets)
        offsets = dict(zip(addresses, schema.offsets, strict=False))
        if (
            (dimensions, sizes, dtypes) != (*schema.dimensions, schema.dtypes)
            or 0 in offsets  # of a tensor without memory
            or tuple(map(offsets.get, addresses)) != schema.offsets  # tied, unlike the values
            or any(map(torch.Tensor.is_inference, targets))
        ):
            schema.require_same(self.schema(), "the model", more=True)
        on_cpu = all(map(_IS_CPU, targets))
        self._cuda_devices = [] if on_cpu else _cuda_devices(map(_DEVICE, targets))
        if on_cpu and all(map(_IS_CPU, values)) and all(map(operator.is_, dtypes, map(_DTYPE, values))):
            return list(values)
        return _convert_all(schema, targets, values)

    def changed(self, names: tuple[str, ...]) -> bool:
        """Return whether tensors were replaced, moved or cast since :meth:`prepare`."""
        return _facts_of(self.tensors(names)) != self._prepared

    def switch(self, names: tuple[str, ...], ready: list[torch.Tensor]) -> None:
        """Make the tensors use the memory of ``ready``, the result of :meth:`prepare`; nothing is copied.

        Real parameters replace those on the meta device.
        """
        targets = self.tensors(names)
        if any(map(_IS_META, targets)):
            self._materialise({id(t): value for t, value in zip(targets, ready, strict=True) if t.is_meta})
            targets = self.tensors(names)
        for target, value in zip(targets, ready, strict=True):  # forward passes may be waiting
            target.data = value
        count_writes(targets)

    @torch.inference_mode(False)  # the model may be trained later
    def leave(self) -> None:
        """Move the tensors to memory of their own; tied tensors stay tied, and values stay as they are."""
        found = {id(one): one for owner, key in self._places.values() if (one := owner.get(key)) is not None}
        memory: dict[Any, torch.Tensor] = {}
        for tensor in found.values():
            if (place := memory_identity(tensor)) is not None:
                if place not in memory:
                    memory[place] = tensor.detach().clone()
                tensor.data = memory[place]
        self.finish_kernels()

    def finish_kernels(self) -> None:
        """Wait for the GPUs of the destination: a forward pass may still read, and a copy still write.

        The host leaves a forward pass before its kernels have run, and they may run on any stream.
        """
        for device in self._cuda_devices:
            torch.cuda.synchronize(device)

    def check_extra(self, extra: Mapping[str, Any]) -> None:
        """Raise SchemaMismatchError if ``extra`` names modules that take none."""
        unknown = extra.keys() - self._extra_owners.keys()
        if unknown and self.points:
            problems = tuple(f"{name}: no such extra state" for name in extra if name in unknown)
            raise SchemaMismatchError("extra state does not fit the target:", problems)

    def exchange_extra(self, extra: Mapping[str, Any]) -> Callable[[], None]:
        """Give each extra state to its owner, or raise and give none; return a function that reverts it."""
        if not extra:
            return lambda: None
        undo = functools.partial(self._set_extra, _copied(self.read().extra))
        with undo_on_error(undo):
            self._set_extra(extra)
        return undo

    def _set_extra(self, extra: Mapping[str, Any]) -> None:
        for name, value in extra.items():
            if self.points:
                self._extra_owners[name].set_extra_state(value)
            else:
                _set_extra_in(self.destination, name, value)

    def _get(self, name: str) -> torch.Tensor:
        owner, key = self._places[name]
        tensor = owner.get(key)
        if not isinstance(tensor, torch.Tensor):
            raise SchemaMismatchError(f"{name!r} is no longer in the target")
        return tensor

    def _materialise(self, values: dict[int, torch.Tensor]) -> None:
        """Replace meta tensors, given by id, wherever they are kept; tied tensors stay tied."""
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
        _rejoin(self.destination)
        self._find_devices()

    def _module_places(self, module: nn.Module) -> Iterator[_Place]:
        places: dict[str, tuple[Any, str]] = {}
        for prefix, part in named_parts(module):
            if isinstance(part, torch.jit.ScriptModule):
                raise UnsupportedSourceError(
                    f"cannot write weights into {prefix[:-1] or 'the model'}, a ScriptModule; give the "
                    "module that it was scripted or traced from, which shares its weights, and compute with "
                    "scheme.guarded(script_module)"
                )
            for owner in (part._parameters, part._buffers):
                for key, value in owner.items():
                    if value is not None:
                        places[prefix + key] = (owner, key)
        for name, tensor in self._read(module).tensors.items():
            if name not in places:
                raise UnsupportedSourceError(
                    f"{name!r} of {type(module).__name__} is neither a parameter nor a buffer, so it "
                    "can be read but not written; make it a buffer, or use 'tensordict' and select="
                )
            owner, key = places[name]
            kept = tensor is owner[key] or tensor.is_meta
            if not kept and memory_identity(tensor) != memory_identity(owner[key]):
                raise UnsupportedSourceError(
                    f"{name!r} in the state dict of {type(module).__name__} is not its parameter or buffer "
                    "of that name, so no weights can be written there; use 'tensordict', or call "
                    "init_on_receiver() without a model, and load_state_dict() with each result of receive()"
                )
            yield name, places[name]


def _rejoin(destination: Any) -> None:
    """Put the parameters and buffers of each ``TensorDictParams`` into its TensorDict, where they differ.

    A forward pass computes with the TensorDict, and weights are written into the parameters and buffers.
    ``TensorDict.to_module`` replaces only the former: TorchRL sends workers a policy whose TensorDicts are on
    the meta device.
    """
    if not isinstance(destination, nn.Module) or isinstance(destination, TensorDictBase):
        return
    for part in destination.modules():
        if not isinstance(part, TensorDictParams):
            continue
        members = {**part._parameters, **part._buffers}
        leaves = {key_name(key, part): value for key, value in part.items(True, True)}
        if any(members.get(name, value) is not value for name, value in leaves.items()):
            whole = part.named_apply(
                lambda key, value, members=members, part=part: members.get(key_name(key, part), value),
                nested_keys=True,
                device=None,  # its device is that of the old tensors
                propagate_lock=True,
            )
            whole.to_module(part, preserve_module_state=False)


def count_writes(targets: Sequence[torch.Tensor]) -> None:
    """Tell autograd, and PyTorch's caches of computed weights, about writes to ``targets``.

    No backward pass may use the new values. Autocast keeps casts of the old ones until its block ends, and
    ``parametrize.cached()`` keeps the results of parametrizations.
    """
    torch.clear_autocast_cache()  # of all threads
    getattr(parametrize, "_cache", {}).clear()  # of all threads, too; it may be missing in a later PyTorch
    try:
        torch.autograd.graph.increment_version(targets)
    except RuntimeError:  # inference tensors have no count, and no backward pass needs them
        torch.autograd.graph.increment_version([one for one in targets if not one.is_inference()])


def _parts(node: Any) -> Iterator[tuple[Callable[[str], Any], str, Any]]:
    """Yield each part of a TensorDict or dict that contains tensors, after a call that finds it."""
    if isinstance(node, TensorDictBase | MutableMapping):
        for key, part in node.items():
            if isinstance(part, TensorDictBase | MutableMapping) and node.get(key) is part:
                yield node.get, key, part
                yield from _parts(part)


@torch.inference_mode(False)  # the model may be trained later
def _convert(target: torch.Tensor, value: torch.Tensor, *, copy: bool = False) -> torch.Tensor:
    device = value.device if target.is_meta else target.device
    return value.to(device=device, dtype=target.dtype, copy=copy)


def _convert_all(
    schema: WeightSchema, targets: Sequence[torch.Tensor], values: Sequence[torch.Tensor]
) -> list[torch.Tensor]:
    """Return ``values`` in the dtypes and on the devices of ``targets``; tied values stay tied."""
    made: dict[Any, torch.Tensor] = {}
    ready = []
    for offset, target, value in zip(schema.offsets, targets, values, strict=True):
        if target.dtype is not value.dtype or target.device != value.device:
            key = offset if value.numel() else id(value), target.dtype, target.device
            if key not in made:
                made[key] = _convert(target, value)
            value = made[key]
        ready.append(value)
    return ready


def _cuda_devices(devices: Iterable[torch.device]) -> list[torch.device]:
    return [device for device in set(devices) if device.type == "cuda"]


def _facts_of(tensors: Sequence[torch.Tensor]) -> _Facts:
    """Return the facts of tensors; no addresses if one of them has no memory to write into.

    The result has no ``torch.Size``: thousands of them would start Python's garbage collector several times,
    while forward passes wait.
    """
    try:
        addresses = tuple(map(torch.Tensor.data_ptr, tensors))
    except RuntimeError:  # a sparse tensor, for example
        addresses = ()
    sizes = tuple(chain.from_iterable(map(_SHAPE, tensors)))
    return addresses, tuple(map(torch.Tensor.dim, tensors)), sizes, tuple(map(_DTYPE, tensors))


def _require_own_elements(names: Sequence[str], targets: Sequence[torch.Tensor]) -> None:
    """Raise for tensors that a copy would fail on halfway."""
    if any_freed(targets):  # first for all at once: forward passes may be waiting
        for name, target in zip(names, targets, strict=True):
            require_not_freed(name, target)
    for name, target in zip(names, targets, strict=True):
        if 0 in target.stride() and any(
            step == 0 and size > 1 for step, size in zip(target.stride(), target.shape, strict=True)
        ):
            raise UnsupportedSourceError(
                f"{name!r} of the target is an expanded view; its elements cannot be written one by one"
            )


def _places(node: MutableMapping[Any, Any], prefix: str = "") -> Iterator[_Place]:
    """Yield the places in a TensorDict or dict, without extra state."""
    for key, value in node.items():
        name = prefix + key_name(key, node)
        if name.rpartition(".")[2] == EXTRA:
            continue
        if isinstance(value, MutableMapping):
            if key != EXTRA_IN_TENSORDICT or not isinstance(node, TensorDictBase):
                yield from _places(value, name + ".")
        elif isinstance(value, torch.Tensor) or not isinstance(node, TensorDictBase):
            require_tensor(name, value)
            if node.get(key) is not value:
                raise UnsupportedSourceError(
                    f"{name!r} of {type(node).__name__} is made anew at each access, so it can be read but "
                    "not written"
                )
            yield name, (node, key)


def _copied(extra: dict[str, Any]) -> dict[str, Any]:
    """Return a copy of extra state, which modules may change in place, unless it cannot be copied."""
    try:
        return copy.deepcopy(extra)
    except Exception:  # noqa: BLE001 - objects of modules may raise anything
        return extra


def _set_extra_in(node: Any, name: str, value: Any) -> None:
    """Set an extra state in a TensorDict or a (nested or dotted) dict, at its place."""
    while not isinstance(node, TensorDictBase):
        head, _, rest = name.partition(".")
        if name in node or not rest or not isinstance(node.get(head), MutableMapping):
            node[name] = value
            return
        node, name = node[head], rest
    if name == EXTRA and node.get(EXTRA, None) is None:
        name = EXTRA_IN_TENSORDICT
    node.set_non_tensor(tuple(name.split(".")), value)
