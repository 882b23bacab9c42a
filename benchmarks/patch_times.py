"""Time to build and to apply a patch, beside one plain copy of the model and the obvious way."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch

from benchmarks.patch_bytes import COMPRESSIONS, LAYOUTS, VALUES, encoding, flat_of, tracker_of
from benchmarks.patch_peer import obvious
from benchmarks.patch_updates import Update
from benchmarks.report import Figure, Table, ratio
from weight_update.encodings.patch.format import PatchOptions, decode_patch, encode_patch

__all__ = [
    "ALL",
    "FEW",
    "Times",
    "Variant",
    "links_table",
    "measure_times",
    "times_table",
]

Variant = tuple[str, str]
"""Layout and compression."""

ALL: tuple[Variant, ...] = tuple((layout, label) for layout in LAYOUTS for label in COMPRESSIONS)
FEW: tuple[Variant, ...] = (("flat", "none"), ("flat, relative", "none"), ("flat, relative", "zstd"))

_LINKS = (1, 10, 25, 100)  # Gbit/s


@dataclass
class Times:
    """What one update takes, in seconds by turn.

    Attributes:
        update: its name.
        changed: elements that differ.
        dense_bytes: bytes of the model.
        payload_bytes: of the patch, by variant.
        seconds: by what was done: "copy", "lone copy", "obvious", or a stage and a variant.
    """

    update: str
    changed: int
    dense_bytes: int
    payload_bytes: dict[Variant, int] = field(default_factory=dict)
    seconds: dict[Any, list[float]] = field(default_factory=dict)

    def add(self, what: Any, action: Callable[[], Any]) -> Any:
        """Do it, and note how long it took."""
        start = time.perf_counter()
        result = action()
        self.seconds.setdefault(what, []).append(time.perf_counter() - start)
        return result

    def figure(self, what: Any) -> Figure:
        """All turns but the first, which warms up."""
        return Figure(tuple(self.seconds.get(what, [])[1:]))

    @property
    def copy(self) -> Figure:
        """The faster of a copy by all threads and by one: waiting for each other costs on a busy machine."""
        return min(self.figure("copy"), self.figure("lone copy"), key=lambda one: one.median or 0.0)

    def build(self, variant: Variant) -> Figure:
        """Scan and encode."""
        both = zip(*(self.figure((stage, variant)).values for stage in ("scan", "encode")), strict=True)
        return Figure(tuple(map(sum, both)))

    def bytes_each(self, variant: Variant) -> float:
        """Of the patch, for each changed element."""
        return self.payload_bytes[variant] / max(self.changed, 1)


class _Bench:
    """One update, and the memory that is used again in every turn."""

    def __init__(self, update: Update) -> None:
        self.schema, self.snapshot = update.schema, flat_of(update)
        self.old, self.new = self.schema.views(self.snapshot), list(update.new.values())
        self.receiver = self.snapshot.clone()
        self.target = self.snapshot.clone()
        self.places = self.schema.views(self.target)
        self._trackers = {values: tracker_of(update, values) for values in VALUES}
        self._payload = torch.empty(2 * self.schema.nbytes + 4096, dtype=torch.uint8)
        self.expected = self.receiver.clone()
        torch._foreach_copy_(self.schema.views(self.expected), self.new)

    def scan(self, options: PatchOptions) -> Any:
        return self._trackers[options.values].compare(self.new)

    def encode(self, scan: Any, options: PatchOptions) -> torch.Tensor:
        return encode_patch(scan.changes, self.snapshot, self.schema, 0, 1, options, self._lend)

    def apply(self, payload: torch.Tensor) -> None:
        decode_patch(payload, self.schema).changes.write(self.receiver)

    def copy(self) -> None:
        torch._foreach_copy_(self.places, self.new)

    def lone_copy(self) -> None:
        self.target.numpy()[:] = self.expected.numpy()

    def _lend(self, nbytes: int) -> torch.Tensor:
        return self._payload[:nbytes]


def measure_times(update: Update, variants: Iterable[Variant], turns: int) -> Times:
    """All variants in turns, and one more turn before, to warm up.

    Raises:
        RuntimeError: a patch did not lead to the new weights.
    """
    bench = _Bench(update)
    times = Times(update.name, bench.scan(LAYOUTS["flat"].options).changed, bench.schema.dense_bytes)
    chosen = {variant: encoding(*variant).options for variant in variants}
    for _ in range(1 + turns):
        times.add("copy", bench.copy)
        times.add("lone copy", bench.lone_copy)
        times.add("obvious", lambda: obvious(bench.old, bench.new))
        for variant, options in chosen.items():
            _turn(bench, times, variant, options)
    return times


def _turn(bench: _Bench, times: Times, variant: Variant, options: PatchOptions) -> None:
    bench.receiver.copy_(bench.snapshot)
    scan = times.add(("scan", variant), lambda: bench.scan(options))
    payload = times.add(("encode", variant), lambda: bench.encode(scan, options))
    times.add(("apply", variant), lambda: bench.apply(payload))
    times.payload_bytes[variant] = payload.numel()
    if not torch.equal(bench.receiver, bench.expected):
        raise RuntimeError(f"{times.update}: the patch {variant} did not lead to the new weights")


def times_table(megabytes: float, found: Iterable[Times]) -> Table:
    """One row for each update and variant."""
    note = (
        "Milliseconds, median (least .. most). B: bytes for each changed element. Build is scan and encode,\n"
        "apply is decode and write. A copy is one of all tensors in the receivers' dtype, by all threads or\n"
        "by one, whichever was faster. A patch pays on links slower than the last column (MB/s) if it is\n"
        "built, sent and applied one after the other and dense costs one copy."
    )
    head = ["update", "layout", "compression", "B", "scan", "build", "apply", "build/copy", "obvious/build"]
    head += ["apply/copy", "pays below"]
    rows = [row for times in found for row in _rows(times)]
    return Table(f"Building and applying, {megabytes:.0f} MB", note, head, rows)


def _rows(times: Times) -> Iterator[list[str]]:
    copy, plain = times.copy, times.figure("obvious")
    for what, figure in (("one copy", copy), ("the obvious way", plain)):
        yield [times.update, what, "-", "-", "-", figure.show(1e3, 0), *["-"] * 5]
    for variant in times.payload_bytes:
        build, apply = times.build(variant), times.figure(("apply", variant))
        yield [
            times.update,
            *variant,
            f"{times.bytes_each(variant):.2f}",
            times.figure(("scan", variant)).show(1e3, 0),
            build.show(1e3, 0),
            apply.show(1e3, 0),
            *(_show(value) for value in (ratio(build, copy), ratio(plain, build), ratio(apply, copy))),
            _pays_below(times, variant),
        ]


def _show(value: float | None) -> str:
    return "-" if value is None else f"{value:.2f}"


def _pays_below(times: Times, variant: Variant) -> str:
    """The speed of a link, in MB/s, on which a patch and dense take equally long."""
    medians = (
        times.build(variant).median,
        times.figure(("apply", variant)).median,
        times.copy.median,
    )
    build, apply, copy = (value or 0.0 for value in medians)
    saved, extra = times.dense_bytes - times.payload_bytes[variant], build + apply - copy
    if saved <= 0:
        return "never"
    return f"{saved / extra / 1e6:.0f}" if extra > 0 else "always"


def links_table(megabytes: float, found: Iterable[Times]) -> Table:
    """What an update would take over links of several speeds."""
    note = (
        "Milliseconds, computed from the medians above: building, the bytes at the full speed of the link,\n"
        "and applying, one after the other; for dense one copy and the bytes. The best has a star."
    )
    head = ["update", "sent as", "MB", *(f"{speed} Gbit/s" for speed in _LINKS)]
    rows = [row for times in found for row in _link_rows(times)]
    return Table(f"Over a link, {megabytes:.0f} MB", note, head, rows)


def _link_rows(times: Times) -> Iterator[list[str]]:
    ways = {"dense": (times.dense_bytes, times.copy.median or 0.0)}
    for variant in FEW:
        medians = times.build(variant).median, times.figure(("apply", variant)).median
        ways[", ".join(variant)] = times.payload_bytes[variant], sum(value or 0.0 for value in medians)
    totals = {
        name: [1e3 * (busy + 8 * nbytes / (1e9 * speed)) for speed in _LINKS]
        for name, (nbytes, busy) in ways.items()
    }
    best = [min(column) for column in zip(*totals.values(), strict=True)]
    for name, (nbytes, _) in ways.items():
        cells = [
            f"{total:.1f}{' *' * (total == least)}" for total, least in zip(totals[name], best, strict=True)
        ]
        yield [times.update, name, f"{nbytes / 1e6:.2f}", *cells]
