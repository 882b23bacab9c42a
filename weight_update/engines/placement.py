"""Where a model stores the elements of its checkpoint's weights, found out by a load that writes nothing."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from weight_update.wire.schema import BITS

Load = Callable[[list[tuple[str, torch.Tensor]]], Any]
Shapes = Mapping[str, tuple[torch.Size, torch.dtype]]
Tensors = Mapping[str, torch.Tensor]


class Block(NamedTuple):
    """A block of a weight that a parameter or buffer stores one to one.

    It names the tensor, and does not keep its memory in use. Its methods get the model's tensors by name.

    Attributes:
        tensor: name of the parameter or buffer.
        size: shape of the block.
        stride: strides of the block in the memory of the tensor.
        offset: index of the block's first element in that memory.
        start: index of the block's first element in the weight, one number for each dimension.
    """

    tensor: str
    size: torch.Size
    stride: tuple[int, ...]
    offset: int
    start: tuple[int, ...]

    @property
    def module(self) -> str:
        """Name of the module that owns the tensor."""
        return self.tensor.rpartition(".")[0]

    def of(self, weight: torch.Tensor) -> torch.Tensor:
        """Return the block of a weight, as a view."""
        return weight[tuple(slice(a, a + n) for a, n in zip(self.start, self.size, strict=True))]

    def stored(self, tensors: Tensors) -> torch.Tensor:
        """Return the block as the model stores it, as a view."""
        return tensors[self.tensor].data.as_strided(self.size, self.stride, self.offset)

    def write(
        self, tensors: Tensors, shape: torch.Size, positions: torch.Tensor, values: torch.Tensor
    ) -> None:
        """Write the elements at flat ``positions`` of a weight of ``shape`` that lie in the block."""
        stored = self.stored(tensors)
        positions, values = positions.to(stored.device), bits_of(values.to(stored))
        if self.size == shape and stored.is_contiguous():
            bits_of(stored).view(-1).index_copy_(0, positions, values)
        else:
            index, inside = self._index(shape, positions)
            bits_of(stored).index_put_(index, values[inside])

    def has(self, tensors: Tensors, shape: torch.Size, positions: torch.Tensor, values: torch.Tensor) -> bool:
        """Return whether the elements at ``positions`` that lie in the block are stored as ``values``."""
        stored = self.stored(tensors)
        index, inside = self._index(shape, positions.to(stored.device))
        expected = bits_of(values.to(stored)).expand(positions.shape)[inside]  # it may have no dimensions
        return torch.equal(bits_of(stored)[index].expand_as(expected), expected)

    def _index(
        self, shape: torch.Size, positions: torch.Tensor
    ) -> tuple[tuple[torch.Tensor, ...], torch.Tensor]:
        """Return the index into the block of those ``positions`` that lie in it, and which ones these are."""
        index = list(torch.unravel_index(positions, shape))
        inside = torch.ones_like(positions, dtype=torch.bool)
        for i, (first, size) in enumerate(zip(self.start, self.size, strict=True)):
            index[i] = index[i] - first
            inside &= (index[i] >= 0) & (index[i] < size)
        return tuple(one[inside] for one in index), inside


def bits_of(tensor: torch.Tensor) -> torch.Tensor:
    """Return the elements as integers of the same width, as a view."""
    return tensor.view(BITS.get(tensor.element_size(), tensor.dtype))


def tensors_of(model: nn.Module) -> dict[str, torch.Tensor]:
    """Return the parameters and buffers of a model, under all their names."""
    return {
        **dict(model.named_buffers(remove_duplicate=False)),
        **dict(model.named_parameters(remove_duplicate=False)),
    }


def find_blocks(model: nn.Module, load: Load, weights: Shapes) -> dict[str, tuple[Block, ...]]:
    """Return the blocks of ``weights`` that ``model`` stores one to one, without changing it.

    ``load`` gets weights without data, and the copies that it makes into the model are recorded, not made.
    The result lacks a weight that is not stored as plain copies of blocks, and all weights if ``load``
    computes something from them. It has no blocks of a weight that the model does not use. Whether the blocks
    have the right values is for the caller to check: a model may process its weights after loading.

    Args:
        model: the model.
        load: its ``load_weights``.
        weights: shape and dtype of each weight, by name.
    """
    tensors = tensors_of(model)
    recorder = Recorder(tensors, weights)
    try:
        with torch.no_grad(), recorder:
            load(recorder.probes)
    except Exception:  # noqa: BLE001 - loaders of models may do anything; one weight spoils the load of all
        names, half = list(weights), len(weights) // 2
        parts = [names[:half], names[half:]] if half else []
        halves = [find_blocks(model, load, {name: weights[name] for name in part}) for part in parts]
        return {name: blocks for found in halves for name, blocks in found.items()}
    found = {name: _blocks(made, weights[name][0], tensors) for name, made in recorder.copies.items()}
    return {name: blocks for name, blocks in found.items() if blocks is not None}


class Copy(NamedTuple):
    """A copy of a view of a weight into a tensor of the model.

    Attributes:
        tensor: name of the parameter or buffer.
        stored: the part of it that was copied into.
        offset: index of the view's first element in the weight.
        stride: strides of the view.
    """

    tensor: str
    stored: torch.Tensor
    offset: int
    stride: tuple[int, ...]


class Recorder(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """A mode that records copies of weights into a model's tensors, and makes none.

    Attributes:
        probes: the weights to load, without data.
        copies: the copies of each weight, by its name.
    """

    def __init__(self, tensors: Tensors, weights: Shapes) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.probes = [
            (name, torch.empty(shape, dtype=dtype, device="meta")) for name, (shape, dtype) in weights.items()
        ]
        self.copies: dict[str, list[Copy]] = {name: [] for name in weights}
        self._weights = {_memory_of(probe): name for name, probe in self.probes}
        self._tensors: dict[int, str] = {}
        for name, tensor in tensors.items():
            self._tensors.setdefault(_memory_of(tensor), name)

    def weights_in(self, values: Iterable[Any]) -> set[str]:
        """Return the names of the weights of which ``values`` has views."""
        return {self._weights[_memory_of(tensor)] for tensor in _tensors_in(values)}

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func is torch.ops.aten.copy_.default:
            stored, loaded = args[0], args[1]
            tensor = self._tensors.get(_memory_of(stored))
            weight = self._weights.get(_memory_of(loaded))
            if tensor is not None and weight is not None and stored.shape == loaded.shape:
                copy = Copy(tensor, stored, loaded.storage_offset(), tuple(loaded.stride()))
                self.copies[weight].append(copy)
                return stored
        if func in _PADDING:
            if _memory_of(args[0]) in self._tensors:
                return args[0]  # it was filled when the last version was loaded
        elif func is _READ and not args[0].is_floating_point():
            pass  # such as the index of an expert on this rank
        elif not func.is_view and any(_memory_of(one) in self._tensors for one in _tensors_in(args)):
            raise _NotTracedError(str(func))  # it writes to the model, or computes from its weights
        return func(*args, **(kwargs or {}))


_PADDING = (torch.ops.aten.fill_.Scalar, torch.ops.aten.zero_.default)
"""Operations with which loaders fill the rows that a vocabulary is padded with."""


_READ = torch.ops.aten._local_scalar_dense.default
"""Operation of ``item()``."""


class _NotTracedError(Exception):
    """A loader did something else than plain copies of views."""


class Destinations(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """A mode that records which modules a load copies something into, and makes no copy into them.

    Attributes:
        modules: for each tensor that was copied into, the names of the modules that have it.
    """

    def __init__(self, tensors: Tensors) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.modules: set[frozenset[str]] = set()
        owners: dict[int, set[str]] = {}
        for name, tensor in tensors.items():
            owners.setdefault(_memory_of(tensor), set()).add(name.rpartition(".")[0])
        self._owners = {memory: frozenset(names) for memory, names in owners.items()}

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func is torch.ops.aten.copy_.default:
            owners = self._owners.get(_memory_of(args[0]))
            if owners is not None:
                self.modules.add(owners)
                return args[0]
        return func(*args, **(kwargs or {}))


def _memory_of(tensor: torch.Tensor) -> int:
    return int(tensor.untyped_storage()._cdata)


def _tensors_in(args: Iterable[Any]) -> Iterator[torch.Tensor]:
    for one in args:
        if isinstance(one, torch.Tensor):
            yield one
        elif isinstance(one, (list, tuple)):
            yield from _tensors_in(one)


def _blocks(copies: Iterable[Copy], shape: torch.Size, tensors: Tensors) -> tuple[Block, ...] | None:
    """Return the blocks that were copied; None if a copy was of something else than a block."""
    contiguous = torch.empty(shape, device="meta").stride()
    found = []
    for copy in copies:
        size = copy.stored.shape
        if len(size) != len(shape) or copy.stored.dtype != tensors[copy.tensor].dtype:
            return None
        expected = [s for s, n in zip(contiguous, size, strict=True) if n > 1]
        if [s for s, n in zip(copy.stride, size, strict=True) if n > 1] != expected:
            return None
        left, start = copy.offset, []
        for stride in contiguous:
            start.append(left // stride if stride else 0)
            left -= start[-1] * stride
        offset = int(copy.stored.storage_offset())
        found.append(Block(copy.tensor, size, copy.stored.stride(), offset, tuple(start)))
    return tuple(found)
