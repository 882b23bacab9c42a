"""Single elements of weights, which a patch changes: reading them from CPU memory, and writing them."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import NamedTuple

import numpy as np
import torch

from weight_update.encodings import Delta
from weight_update.encodings.patch.arrays import Array, union
from weight_update.engines.placement import bits_of
from weight_update.threads import in_threads, threads_for
from weight_update.wire.schema import TensorMeta, WeightSchema

_FEW = 200  # elements of all weights for each that changes; if more change, send() would take longer
_LARGE = 64 << 10  # bytes of a weight, on average; copying smaller ones takes less time than finding elements


class Elements(NamedTuple):
    """Elements of a weight: flat indices and bits. ``entry`` is the weight's position in the schema."""

    entry: int
    positions: Array
    bits: Array


def changed_elements(deltas: Sequence[Delta], meta: TensorMeta) -> Array | None:
    """Return flat indices of the elements of ``meta`` that change, int64, ascending; None for all."""
    found = [delta.elements_of(meta) for delta in deltas]
    arrays = [one.numpy() for one in found if one is not None]
    if len(arrays) < len(found):
        return None
    return arrays[0] if len(arrays) == 1 else union(arrays)


def few_elements(deltas: Sequence[Delta], schema: WeightSchema, among: Collection[int]) -> dict[int, Array]:
    """Return flat indices of the elements that change, by position of the weight in the schema.

    The result is empty if weights change that are not ``among`` these, or if copying whole ones is faster.
    """
    touched = sorted({i for delta in deltas for i in delta.touched(schema)})
    metas = [schema.tensors[i] for i in touched]
    if not set(touched) <= set(among) or sum(meta.nbytes for meta in metas) < _LARGE * len(metas):
        return {}
    found, left = dict[int, Array](), schema.elements // _FEW
    for i, meta in zip(touched, metas, strict=True):
        positions, count = changed_elements(deltas, meta), meta.nbytes // meta.dtype.itemsize
        left -= count if positions is None else len(positions)
        if left < 0:
            return {}
        found[i] = np.arange(count) if positions is None else positions
    return found


def read_elements(tensors: Sequence[torch.Tensor], positions: Mapping[int, Array]) -> list[Elements]:
    """Return the elements at ``positions``, by index into ``tensors``, which are contiguous CPU tensors."""

    def read(i: int) -> Elements:
        return Elements(i, positions[i], take(tensors[i], positions[i]))

    return in_threads(read, list(positions), threads_for(sum(map(len, positions.values()))))


def write_elements(
    tensors: Sequence[torch.Tensor], elements: Sequence[Elements], *, serial: bool = False
) -> None:
    """Write the result of :func:`read_elements` into other tensors of these dtypes; no write is counted.

    ``serial`` starts no threads, which may fail.
    """

    def write(one: Elements) -> None:
        _words(tensors[one.entry])[one.positions] = one.bits

    in_threads(write, elements, 1 if serial else threads_for(sum(len(one.bits) for one in elements)))


def take(tensor: torch.Tensor, positions: Array) -> Array:
    """Return the bits of elements of a contiguous CPU tensor."""
    return np.take(_words(tensor), positions)


def _words(tensor: torch.Tensor) -> Array:  # not torch: its threads hang in forked processes
    return bits_of(tensor.data.view(-1)).numpy()
