"""Where a model stores the elements of its checkpoint's weights, found out by a load that writes nothing."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

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
        alone: module of each weight that is stored in another form and is the only weight of its module.
        others: names of the weights that are stored in another form together with others.
    """

    blocks: dict[str, tuple[Block, ...]]
    alone: dict[str, str]
    others: frozenset[str]

    def drop(self, name: str) -> None:
        """Note that a weight is not stored one to one after all."""
        modules = {block.module for block in self.blocks.pop(name)}
        shared = any(block.module in modules for blocks in self.blocks.values() for block in blocks)
        if len(modules) == 1 and not shared:
            self.alone[name] = modules.pop()
        else:
            self.others |= {name}

    def __str__(self) -> str:
        unused = sum(not blocks for blocks in self.blocks.values())
        text = f"{len(self.blocks) - unused} in place, {len(self.alone) + len(self.others)} reloaded"
        names = sorted([*self.alone, *self.others])
        some = f" ({', '.join(names[:3])}{', ...' if len(names) > 3 else ''})" if names else ""
        return f"{text}{some}, {unused} not used by this worker"


def find_placements(model: nn.Module, load: Load, weights: Shapes) -> Placements:
    """Return how ``model`` stores ``weights``, without changing it.

    ``load`` gets weights without data, and the copies that it makes into parameters are recorded, not made.
    A weight counts as stored one to one if all that is loaded of it are blocks, by plain copies, into
    modules whose weights are not processed after loading (``quant_method`` of vLLM's layers). Whether these
    blocks have the right values is for the caller to check.

    Args:
        model: the model.
        load: its ``load_weights``.
        weights: shape and dtype of each weight, by name.
    """
    owners = _owners(model)
    together = _copies_of(load, weights, owners)
    found: dict[str, list[_Copy] | None] = {}
    for name, one in weights.items():
        if together is not None:
            found[name] = together[name]
        else:  # one of them spoils the others
            by_itself = _copies_of(load, {name: one}, owners)
            found[name] = None if by_itself is None else by_itself[name]
    plain = {name for name, module in model.named_modules() if _is_plain(module)}
    blocks: dict[str, tuple[Block, ...]] = {}
    strange: dict[str, set[str] | None] = {}
    for name, made in found.items():
        stored = None if made is None else _blocks(made, weights[name][0], plain)
        if stored is not None:
            blocks[name] = stored
        else:
            strange[name] = None if made is None else {copy.module for copy in made}
    users: dict[str, int] = {}
    for made in found.values():
        for module in {copy.module for copy in made or ()}:
            users[module] = users.get(module, 0) + 1
    alone = {
        name: next(iter(modules))
        for name, modules in strange.items()
        if modules is not None and len(modules) == 1 and users[next(iter(modules))] == 1
    }
    return Placements(blocks, alone, frozenset(strange.keys() - alone.keys()))


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
        self._names, self._owners = names, owners
        self.copies: dict[str, list[_Copy]] = {name: [] for name in names.values()}

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func is torch.ops.aten.copy_.default:
            stored, loaded = args[0], args[1]
            module = self._owners.get(_memory_of(stored))
            name = self._names.get(_memory_of(loaded))
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


@torch.no_grad()
def _copies_of(load: Load, weights: Shapes, owners: dict[int, str]) -> dict[str, list[_Copy]] | None:
    """Return the copies that loading makes; None if the loader does something else."""
    probes = {
        name: torch.empty(shape, dtype=dtype, device="meta") for name, (shape, dtype) in weights.items()
    }
    recorder = _Recorder({_memory_of(probe): name for name, probe in probes.items()}, owners)
    try:
        with recorder:
            load(list(probes.items()))
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
