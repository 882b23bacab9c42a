"""Bytes of patches, in every layout and compression, and of those that RLinf documents."""

from __future__ import annotations

import functools
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any, Literal

import torch

from benchmarks.report import Figure, Table
from benchmarks.rlinf import documented_bytes
from benchmarks.updates import Update
from weight_update import PatchEncoding
from weight_update.compression import pack, resolve_compression
from weight_update.encodings import Tracker
from weight_update.encodings.patch.format import encode_patch

LAYOUTS: dict[str, dict[str, Any]] = {
    "flat": {"values": "raw"},
    "flat, relative": {"values": "relative"},
    "coo": {"layout": "coo", "values": "raw"},
    "coo, relative": {"layout": "coo", "values": "relative"},
}
COMPRESSIONS = ("none", "lz4", "zstd", "ans")
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
    return PatchEncoding(**LAYOUTS[layout], compression=compression)


def tracker_of(update: Update, values: Literal["raw", "relative"]) -> Tracker[Any]:
    """Return a tracker that knows the weights before the update."""
    tracker = PatchEncoding(values=values).tracker(update.schema, None)
    tracker.begin(list(update.old.values()))
    return tracker


def measure_bytes(update: Update) -> Sizes:
    """Encode ``update`` in every way and return the sizes."""
    schema = update.schema
    allocate = functools.partial(torch.empty, dtype=torch.uint8)
    found = {values: tracker_of(update, values).compare(list(update.new.values())) for values in VALUES}
    sizes = Sizes(update.name, found["raw"].changed, found["raw"].total)
    whole = torch.cat(
        [value.to(update.old[n].dtype).view(-1).view(torch.uint8) for n, value in update.new.items()]
    )
    for label in COMPRESSIONS:
        compression = resolve_compression(label)
        sizes.found["dense", label] = pack(compression, whole)[1].numel()
        for layout in LAYOUTS:
            chosen = encoding(layout, label)
            changes = found[chosen.values].changes
            payload = encode_patch(changes, schema, 0, 1, chosen.options, allocate)
            sizes.found[layout, label] = payload.numel()
        if label in ("none", "lz4"):  # RLinf has no other
            for rival, delta in _RIVALS.items():
                sizes.found[rival, label] = documented_bytes(update.old, update.new, delta, compression)
    return sizes


def bytes_table(title: str, found: Iterable[Sizes]) -> Table:
    """Return a table of bytes for each changed element; the first column of numbers is in MB."""
    rows = [
        [sizes.update, f"{sizes.changed / sizes.elements:.3%}", layout, *_sizes(sizes, layout)]
        for sizes in found
        for layout in ("dense", *LAYOUTS, *_RIVALS)
    ]
    note = (
        "*MB, none*: size of the update without compression, in MB. *none*, *lz4*, *zstd*, *ans*: bytes per\n"
        "changed element with that compression. This library does not compress dense updates; they are\n"
        "shown compressed for comparison. RLinf's bytes are computed from its documentation, with this\n"
        "library's LZ4 instead of nvCOMP's. If a patch would be larger than 90 % of dense, all weights are\n"
        "sent instead."
    )
    head = ["update", "changed", "layout", "MB, none", *COMPRESSIONS]
    return Table(title, note, head, rows, names=(0, 2))


def _sizes(sizes: Sizes, layout: str) -> list[object]:
    each = [sizes.found.get((layout, label)) for label in COMPRESSIONS]
    changed = max(sizes.changed, 1)
    figures = [Figure([] if nbytes is None else [nbytes / changed], "-") for nbytes in each]
    shown = [figure.cell() if layout in LAYOUTS else figure.show() for figure in figures]
    return [f"{(each[0] or 0) / 1e6:.3f}", *shown]
