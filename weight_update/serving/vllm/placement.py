"""Where a model stores the elements of its checkpoint's weights, found out by a load that writes nothing."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

if TYPE_CHECKING:
    from vllm.config import ModelConfig

Load = Callable[[Iterable[tuple[str, torch.Tensor]]], Any]
Shapes = Mapping[str, tuple[torch.Size, torch.dtype]]


class Block(NamedTuple):
    """A block of a weight that a parameter stores one to one.

    Attributes:
        stored: the part of the parameter, as a view; of the shape of the block.
        start: index of the block's first element in the weight, one number for each dimension.
        module: name of the module that owns the parameter.
    """

    stored: torch.Tensor
    start: tuple[int, ...]
    module: str

    def of(self, weight: torch.Tensor) -> torch.Tensor:
        """Return the block of a weight, as a view."""
        return weight[tuple(slice(a, a + n) for a, n in zip(self.start, self.stored.shape, strict=True))]

    def write(self, shape: torch.Size, positions: torch.Tensor, values: torch.Tensor) -> None:
        """Write the elements at flat ``positions`` of a weight of ``shape`` that lie in the block."""
        positions, values = positions.to(self.stored.device), values.to(self.stored)
        if self.stored.shape == shape and self.stored.is_contiguous():
            self.stored.view(-1).index_copy_(0, positions, values)
        else:
            index, inside = self._index(shape, positions)
            self.stored.index_put_(index, values[inside])

    def has(self, shape: torch.Size, positions: torch.Tensor, values: torch.Tensor) -> bool:
        """Return whether the elements at ``positions`` that lie in the block are stored as ``values``."""
        index, inside = self._index(shape, positions.to(self.stored.device))
        want = values.to(self.stored)[inside]
        return torch.equal(self.stored[index].view(torch.uint8), want.view(torch.uint8))

    def _index(
        self, shape: torch.Size, positions: torch.Tensor
    ) -> tuple[tuple[torch.Tensor, ...], torch.Tensor]:
        """Return the index into the block of those ``positions`` that lie in it, and which ones these are."""
        index = list(torch.unravel_index(positions, shape))
        inside = torch.ones_like(positions, dtype=torch.bool)
        for i, (first, size) in enumerate(zip(self.start, self.stored.shape, strict=True)):
            index[i] = index[i] - first
            inside &= (index[i] >= 0) & (index[i] < size)
        return tuple(one[inside] for one in index), inside


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

    @property
    def takes_patches(self) -> bool:
        """Whether a change of any weight can be loaded without all other weights."""
        return all(self.modules.get(name) for name in self.others)

    def reload_of(self, changed: Collection[str]) -> tuple[set[str], set[str]]:
        """Return the weights that are reloaded after a change, and the modules that they fill.

        These are the changed weights in another form, and all weights of the modules that these fill: a
        reload fills the whole module.
        """
        names, modules = self.others.intersection(changed), set[str]()
        found = set(names)
        while found:
            modules.update(*(self.modules[name] for name in found))
            names |= found
            found = {name for name, used in self.modules.items() if not modules.isdisjoint(used)} - names
        return set(names), modules

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

    ``load`` gets weights without data, and the copies that it makes into parameters are recorded, not made.
    A weight counts as stored one to one if all that is loaded of it are blocks, by plain copies, into
    modules whose weights are not processed after loading (``quant_method`` of vLLM's layers). Whether these
    blocks have the right values is for the caller to check.

    Args:
        model: the model.
        load: its ``load_weights``.
        weights: shape and dtype of each weight, by name.
        modules: result of :func:`find_modules`.
    """
    owners = _owners(model)
    together = _copies_of(load, weights, owners)
    plain = {name for name, module in model.named_modules() if _is_plain(module)}
    blocks: dict[str, tuple[Block, ...]] = {}
    for name, one in weights.items():  # one of them may have spoiled the others
        made = (_copies_of(load, {name: one}, owners) or {}).get(name) if together is None else together[name]
        stored = None if made is None else _blocks(made, one[0], plain)
        if stored is not None:
            blocks[name] = stored
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
    from vllm.model_executor.model_loader.reload.layerwise import get_layerwise_info

    recorder, probes = _recorder(weights, _owners(model))
    initialize_layerwise_reload(model)
    noted = {name: get_layerwise_info(module) for name, module in model.named_modules()}
    for info in noted.values():
        info.load_numel = -(1 << 62)  # elements that were loaded, so that there are never enough
    found: dict[str, set[str]] = {name: set() for name in weights}
    try:
        with recorder:
            load(probes)
        for module, info in noted.items():
            for _, call in info.loaded_weights:
                values = [value for key, value in call.arguments.items() if key != "param"]
                for name in {recorder.names[_memory_of(tensor)] for tensor in _tensors(values)}:
                    found[name].add(module)
    except Exception:  # noqa: BLE001 - loaders of models may do anything
        return {}
    finally:
        for info in noted.values():
            info.load_numel = info.load_numel_total = 0
        finalize_layerwise_reload(model, config)
    for name, copies in recorder.copies.items():  # into what vLLM leaves in place
        found[name].update(copy.module for copy in copies)
    return {name: frozenset(modules) for name, modules in found.items()}


class _Copy(NamedTuple):
    stored: torch.Tensor
    offset: int
    stride: tuple[int, ...]
    module: str


def _owners(model: nn.Module) -> dict[int, str]:
    """Return the name of the module that owns the memory of each parameter and buffer."""
    found: dict[int, str] = {}
    for name, module in model.named_modules():
        for tensor in (*module.parameters(recurse=False), *module.buffers(recurse=False)):
            found.setdefault(_memory_of(tensor), name)
    return found


def _memory_of(tensor: torch.Tensor) -> int:
    return int(tensor.untyped_storage()._cdata)


def _is_plain(module: nn.Module) -> bool:
    method = getattr(module, "quant_method", None)
    return method is None or type(method).__name__.startswith("Unquantized")


_PADDING = (torch.ops.aten.fill_.Scalar, torch.ops.aten.zero_.default)
"""Operations with which loaders fill the rows that a vocabulary is padded with."""


class _NotTracedError(Exception):
    """A loader did something else than plain copies of views."""


class _Recorder(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Records copies into parameters, and makes none."""

    def __init__(self, names: dict[int, str], owners: dict[int, str]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.names, self._owners = names, owners
        self.copies: dict[str, list[_Copy]] = {name: [] for name in names.values()}

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func is torch.ops.aten.copy_.default:
            stored, loaded = args[0], args[1]
            module = self._owners.get(_memory_of(stored))
            name = self.names.get(_memory_of(loaded))
            if module is not None and name is not None and stored.shape == loaded.shape:
                copy = _Copy(stored, loaded.storage_offset(), tuple(loaded.stride()), module)
                self.copies[name].append(copy)
                return stored
        if func in _PADDING:
            if _memory_of(args[0]) in self._owners:
                return args[0]  # it was filled when the last version was loaded
        elif func._schema.is_mutable:
            for tensor in _tensors(args):
                if _memory_of(tensor) in self._owners:
                    raise _NotTracedError(str(func))
        return func(*args, **(kwargs or {}))


def _tensors(args: Iterable[Any]) -> Iterator[torch.Tensor]:
    for one in args:
        if isinstance(one, torch.Tensor):
            yield one
        elif isinstance(one, (list, tuple)):
            yield from _tensors(one)


def _recorder(weights: Shapes, owners: dict[int, str]) -> tuple[_Recorder, list[tuple[str, torch.Tensor]]]:
    """Return a recorder, and weights without data for it."""
    probes = [
        (name, torch.empty(shape, dtype=dtype, device="meta")) for name, (shape, dtype) in weights.items()
    ]
    return _Recorder({_memory_of(probe): name for name, probe in probes}, owners), probes


@torch.no_grad()
def _copies_of(load: Load, weights: Shapes, owners: dict[int, str]) -> dict[str, list[_Copy]] | None:
    """Return the copies that loading makes; None if the loader does something else."""
    recorder, probes = _recorder(weights, owners)
    try:
        with recorder:
            load(probes)
    except Exception:  # noqa: BLE001 - loaders of models may do anything; such weights are loaded as a whole
        return None
    return recorder.copies


def _blocks(copies: Iterable[_Copy], shape: torch.Size, plain: set[str]) -> tuple[Block, ...] | None:
    """Return the blocks that were copied; None if a copy was of something else than a block."""
    contiguous = torch.empty(shape, device="meta").stride()
    found = []
    for copy in copies:
        if copy.module not in plain or len(copy.stored.shape) != len(shape):
            return None
        expected = [s for s, n in zip(contiguous, copy.stored.shape, strict=True) if n > 1]
        if [s for s, n in zip(copy.stride, copy.stored.shape, strict=True) if n > 1] != expected:
            return None
        left, start = copy.offset, []
        for stride in contiguous:
            start.append(left // stride if stride else 0)
            left -= start[-1] * stride
        found.append(Block(copy.stored, tuple(start), copy.module))
    return tuple(found)
