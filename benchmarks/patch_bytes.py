"""Bytes of a patch in each layout with each compression, of RLinf's patch, and of dense weights.

RLinf's document gives the fields of its patches (ordinals, nnz_per_tensor, rows, cols, values), the 2-D view
of every tensor, and the rule of delta encoding. Where it leaves things open we take what costs RLinf fewer
bytes:

- Coordinates "can often be downscaled to tighter dtypes such as uint8 or int32": one dtype for all rows of a
  patch and one for all columns, uint8 if the largest fits, else int32, else int64; without delta encoding
  too.
- Rows start anew with each tensor, so that no increment is negative.
- ordinals and nnz_per_tensor are int32; the version and what frames the message count for nothing.
- nvcomp_lz4 compresses rows, cols and values, each by itself; our LZ4 on the CPU stands for it here, in
  pieces of 1 MB where nvCOMP's are of 64 KB, which compress no better.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np
import torch

from benchmarks.report import Table
from benchmarks.updates import Update
from weight_update import PatchEncoding
from weight_update.compression import Compression, pack, resolve_compression
from weight_update.encodings import Tracker
from weight_update.encodings.patch.changes import BITS
from weight_update.encodings.patch.format import encode_patch

__all__ = [
    "COMPRESSIONS",
    "LAYOUTS",
    "VALUES",
    "Sizes",
    "bytes_table",
    "documented_bytes",
    "encoding",
    "flat_of",
    "measure_bytes",
    "obvious",
    "tracker_of",
]


LAYOUTS = {
    "flat": PatchEncoding(values="raw"),
    "flat, relative": PatchEncoding(values="relative"),
    "coo": PatchEncoding(layout="coo", values="raw"),
    "coo, relative": PatchEncoding(layout="coo", values="relative"),
}
COMPRESSIONS = ("none", "lz4", "zstd")
VALUES: tuple[Literal["raw", "relative"], ...] = ("raw", "relative")
_RIVALS = {"RLinf": True, "RLinf, no delta": False}


@dataclass(frozen=True)
class Sizes:
    """The size of one update, encoded in every way.

    Attributes:
        update: name of the update.
        changed: number of elements that differ.
        elements: number of all elements.
        found: bytes by layout and compression.
    """

    update: str
    changed: int
    elements: int
    found: dict[tuple[str, str], int] = field(default_factory=dict)


def encoding(layout: str, compression: str) -> PatchEncoding:
    """Return one of :data:`LAYOUTS` with a compression."""
    values = LAYOUTS[layout]
    return PatchEncoding(layout=values.layout, values=values.values, compression=compression)


def flat_of(update: Update) -> torch.Tensor:
    """Return the flat buffer of a receiver before the update."""
    flat = torch.zeros(update.schema.nbytes, dtype=torch.uint8)
    torch._foreach_copy_(update.schema.views(flat), list(update.old.values()))
    return flat


def tracker_of(update: Update, values: Literal["raw", "relative"]) -> Tracker[Any]:
    """Return a tracker that knows the weights before the update."""
    tracker = PatchEncoding(values=values).tracker(update.schema, None)
    tracker.begin(list(update.old.values()))
    return tracker


def measure_bytes(update: Update) -> Sizes:
    """Encode ``update`` in every way and return the sizes."""
    schema, flat = update.schema, flat_of(update)
    found = {values: tracker_of(update, values).compare(list(update.new.values())) for values in VALUES}
    sizes = Sizes(update.name, found["raw"].changed, found["raw"].total)
    whole = torch.cat(
        [value.to(update.old[n].dtype).view(-1).view(torch.uint8) for n, value in update.new.items()]
    )
    for label in COMPRESSIONS:
        compression = resolve_compression(label)
        sizes.found["dense", label] = _packed(compression, whole)
        for layout in LAYOUTS:
            options = encoding(layout, label).options
            payload = encode_patch(found[options.values].changes, flat, schema, 0, 1, options, _allocate)
            sizes.found[layout, label] = payload.numel()
        if label != "zstd":  # which RLinf does not have
            for rival, delta in _RIVALS.items():
                sizes.found[rival, label] = documented_bytes(update, delta, compression)
    return sizes


def _allocate(nbytes: int) -> torch.Tensor:
    return torch.empty(nbytes, dtype=torch.uint8)


def _packed(compression: Compression, data: torch.Tensor) -> int:
    return pack(compression, data)[1].numel()


def bytes_table(title: str, found: Iterable[Sizes]) -> Table:
    """Return a table of bytes for each changed element; the first column of numbers is in MB."""
    rows = [
        [sizes.update, f"{sizes.changed / sizes.elements:.3%}", layout, *_cells(sizes, layout)]
        for sizes in found
        for layout in ("dense", *LAYOUTS, *_RIVALS)
    ]
    note = (
        "Bytes per changed element. This library does not compress dense updates; they are shown compressed\n"
        "for comparison. RLinf's bytes are computed from its documentation, with this library's LZ4 instead\n"
        "of nvCOMP's. If a patch would be larger than 90 % of dense, all weights are sent instead."
    )
    head = ["update", "changed", "layout", "MB, none", *COMPRESSIONS]
    return Table(title, note, head, rows)


def _cells(sizes: Sizes, layout: str) -> Sequence[str]:
    each = [sizes.found.get((layout, label)) for label in COMPRESSIONS]
    return [
        f"{(each[0] or 0) / 1e6:.3f}",
        *("-" if nbytes is None else f"{nbytes / max(sizes.changed, 1):.2f}" for nbytes in each),
    ]


Array = np.ndarray
_WIDTHS = (np.uint8, np.int32, np.int64)


def documented_bytes(update: Update, delta: bool, compression: Compression) -> int:
    """Return the bytes of RLinf's patch for all changed elements of ``update``."""
    tensors = list(_coordinates(update, delta))
    if not tensors:
        return 0
    rows, columns, values = (np.concatenate(parts) for parts in zip(*tensors, strict=True))
    arrays = (_narrow(rows), _narrow(columns), values)
    packed = (pack(compression, torch.from_numpy(array.view(np.uint8)))[1] for array in arrays)
    return 2 * 4 * len(tensors) + sum(piece.numel() for piece in packed)


def _narrow(numbers: Array) -> Array:
    dtype = next(dtype for dtype in _WIDTHS if int(numbers.max()) <= np.iinfo(dtype).max)
    return numbers.astype(dtype)


def _coordinates(update: Update, delta: bool) -> Iterator[tuple[Array, Array, Array]]:
    """Yield rows, columns and the bytes of values of each tensor that changed."""
    for name, old in update.old.items():
        new = update.new[name].to(old.dtype)
        bits = BITS[old.dtype.itemsize]
        before, after = (value.reshape(-1).view(bits).numpy() for value in (old, new))
        places = np.flatnonzero(before != after)
        if not places.size:
            continue
        columns = math.prod(old.shape[1:]) if old.dim() > 1 else old.numel()
        row, column = np.divmod(places, columns)
        if delta:
            row, column = _differences(row, column)
        yield row, column, after[places].view(np.uint8)


def _differences(rows: Array, columns: Array) -> tuple[Array, Array]:
    steps = np.diff(rows, prepend=0)
    same = np.diff(rows, prepend=-1) == 0
    return steps, np.where(same, np.diff(columns, prepend=0), columns)


def obvious(
    old: Sequence[torch.Tensor], new: Sequence[torch.Tensor]
) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Return positions and values that differ, found the obvious way; nothing is narrowed or packed."""
    found = []
    for before, after in zip(old, new, strict=True):
        places = (before != after).nonzero()
        found.append((places, after[tuple(places.T)]))
    return found
