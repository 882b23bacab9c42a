"""Tensors that keep their memory from one update to the next, so that little is done for each of them."""

from __future__ import annotations

import operator
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from weight_update.wire.unchanged import TensorPlaces

MANY = 256
"""Number of tensors from which it pays to know that they are as before."""

_SMALL = 4096  # bytes of a tensor, on average: larger ones take longer to copy than to look at
_LARGE = 64 << 20  # bytes of all tensors
PLAIN = {torch.Tensor, nn.Parameter}
"""Classes of tensors whose values are those of their memory."""

_ITEMSIZE = operator.attrgetter("itemsize")


class FixedTensors(tuple[torch.Tensor, ...]):
    """Tensors by name in CPU memory, of which only the values have changed since this object was made.

    The object keeps their memory alive, so it exists only for many small tensors, 64 MB at most. Its owner
    asks :meth:`unchanged` before each use, and drops it if the answer is False.

    Attributes:
        names: names of the tensors, in order.
        addresses: addresses of their first bytes.
        memo: results that others derive from the tensors, by keys of their own.
    """

    names: tuple[str, ...]
    addresses: list[int]
    memo: dict[Any, Any]
    _views: list[torch.Tensor]
    _places: TensorPlaces

    @classmethod
    def of(cls, named: Mapping[str, torch.Tensor]) -> FixedTensors | None:
        """Return the tensors, or None if they are few, large, not contiguous or not plain CPU memory."""
        tensors = list(named.values())
        if not are_many_small(named) or not all(map(is_plain, tensors)):
            return None
        self = cls(tensors)
        self.names, self.addresses, self.memo = tuple(named), list(map(torch.Tensor.data_ptr, tensors)), {}
        with torch.inference_mode(False):
            self._views = list(map(torch.Tensor.detach, tensors))
        self._places = TensorPlaces(tensors)
        return self

    def unchanged(self, named: Mapping[str, torch.Tensor]) -> bool:
        """Return whether ``named`` has the same names in the same order, for the same views of memory."""
        tensors = list(named.values())
        return (
            tuple(named) == self.names
            # The views keep the memory, so that no other memory takes its place.
            and self._places.same(tensors)
            and not any(map(torch.Tensor.is_neg, tensors))  # a bit that is not part of a place
        )


def are_many_small(named: Mapping[str, torch.Tensor]) -> bool:
    """Return whether these are so many small tensors that it pays to look for a :class:`FixedTensors`."""
    if len(named) < MANY or not set(map(type, named.values())) <= PLAIN:
        return False
    tensors = list(named.values())
    # Sparse tensors have no attribute "nbytes".
    total = sum(map(operator.mul, map(torch.Tensor.numel, tensors), map(_ITEMSIZE, tensors)))
    return bool(total <= min(_LARGE, len(tensors) * _SMALL))


def is_plain(tensor: torch.Tensor) -> bool:
    """Return whether the values of a tensor are those of its bytes, one after the other in CPU memory."""
    return (
        tensor.is_cpu
        and tensor.layout is torch.strided
        and not tensor.is_quantized
        and not tensor.is_complex()  # the bit for conjugation would have to be looked at
        and not tensor.is_neg()
        and tensor.is_contiguous()
    )
