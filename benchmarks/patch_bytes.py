"""Bytes of a patch in each layout, with each compression, and of RLinf's."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import torch

from benchmarks.patch_peer import documented_bytes
from benchmarks.patch_updates import Update
from benchmarks.report import Table
from weight_update import PatchEncoding
from weight_update.compression import Compression, pack, resolve_compression
from weight_update.encodings import Tracker
from weight_update.encodings.patch.format import encode_patch

__all__ = [
    "COMPRESSIONS",
    "LAYOUTS",
    "VALUES",
    "Sizes",
    "bytes_table",
    "encoding",
    "flat_of",
    "measure_bytes",
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
_PEERS = {"RLinf": True, "RLinf, no delta": False}


@dataclass(frozen=True)
class Sizes:
    """What one update comes to.

    Attributes:
        update: its name.
        changed: elements that differ.
        elements: elements there are.
        found: bytes by layout and compression.
    """

    update: str
    changed: int
    elements: int
    found: dict[tuple[str, str], int] = field(default_factory=dict)


def encoding(layout: str, compression: str) -> PatchEncoding:
    """One of :data:`LAYOUTS`, compressed."""
    values = LAYOUTS[layout]
    return PatchEncoding(layout=values.layout, values=values.values, compression=compression)


def flat_of(update: Update) -> torch.Tensor:
    """The flat buffer that receivers have before the update."""
    flat = torch.zeros(update.schema.nbytes, dtype=torch.uint8)
    torch._foreach_copy_(update.schema.views(flat), list(update.old.values()))
    return flat


def tracker_of(update: Update, values: Literal["raw", "relative"]) -> Tracker[Any]:
    """What finds changes in the sender, before the update."""
    tracker = PatchEncoding(values=values).tracker(update.schema, None)
    tracker.begin(list(update.old.values()))
    return tracker


def measure_bytes(update: Update) -> Sizes:
    """Encode ``update`` in every way."""
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
            payload = encode_patch(found[options.values].changes, flat, schema, 0, 1, options, _lend)
            sizes.found[layout, label] = payload.numel()
        if label != "zstd":  # which RLinf does not have
            for peer, delta in _PEERS.items():
                sizes.found[peer, label] = documented_bytes(update, delta, compression)
    return sizes


def _lend(nbytes: int) -> torch.Tensor:
    return torch.empty(nbytes, dtype=torch.uint8)


def _packed(compression: Compression, data: torch.Tensor) -> int:
    return pack(compression, data)[1].numel()


def bytes_table(title: str, found: Iterable[Sizes]) -> Table:
    """Bytes for each changed element; the first column of numbers is in MB."""
    rows = [
        [sizes.update, f"{sizes.changed / sizes.elements:.3%}", layout, *_cells(sizes, layout)]
        for sizes in found
        for layout in ("dense", *LAYOUTS, *_PEERS)
    ]
    note = (
        "Bytes for each changed element. Dense has no compression in this library: it is there to compare.\n"
        "RLinf's bytes follow from its document, with our LZ4 in the place of nvCOMP's. Where a patch would\n"
        "be above nine tenths of dense, all weights are sent instead."
    )
    head = ["update", "changed", "layout", "MB, none", *COMPRESSIONS]
    return Table(title, note, head, rows)


def _cells(sizes: Sizes, layout: str) -> Sequence[str]:
    each = [sizes.found.get((layout, label)) for label in COMPRESSIONS]
    return [
        f"{(each[0] or 0) / 1e6:.3f}",
        *("-" if nbytes is None else f"{nbytes / max(sizes.changed, 1):.2f}" for nbytes in each),
    ]
