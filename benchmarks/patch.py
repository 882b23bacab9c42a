"""Bytes and time of patches, on real updates and on random ones, beside what one would have otherwise."""

from __future__ import annotations

import argparse
import ctypes
import itertools
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from benchmarks.options import Options
from benchmarks.patch_bytes import (
    COMPRESSIONS,
    LAYOUTS,
    VALUES,
    Sizes,
    bytes_table,
    encoding,
    measure_bytes,
    tracker_of,
)
from benchmarks.report import Figure, Table, Times, machine, ratio, say, show_ratio
from benchmarks.targets import Target, target, targets_table
from benchmarks.updates import (
    MOVES,
    Key,
    Sent,
    Update,
    by_chance,
    change,
    layered,
    measure_schemes,
    obvious,
    sent_table,
    trained_cartpole,
    trained_language_model,
)
from weight_update import (
    MultiProcessWeightSyncScheme,
    PatchEncoding,
    SharedMemWeightSyncScheme,
    WeightStrategy,
)
from weight_update.encodings.patch.format import PatchOptions, decode_patch, encode_patch
from weight_update.threads import in_threads

QUICK = "4 MB, 2 turns, small networks"

_FRACTIONS = (0.0001, 0.01, 0.05, 0.2)
_TARGET, _MANY = 0.01, 0.2  # the fractions for which targets are set
_MOST_MEGABYTES = 100.0  # of the models whose bytes are counted: what an element costs stays the same
_MOST_SYNC_MEGABYTES = 200.0  # eight senders and eight receivers hold it at once
SCHEMES = {"SharedMem": SharedMemWeightSyncScheme, "MultiProcess": MultiProcessWeightSyncScheme}
ENCODINGS = {
    "dense": "dense",
    "patch, relative": PatchEncoding(values="relative"),
    "patch, raw": PatchEncoding(values="raw"),
    "patch, zstd": PatchEncoding(compression="zstd"),
}

Variant = tuple[str, str]
"""Layout and compression."""

ALL: list[Variant] = list(itertools.product(LAYOUTS, COMPRESSIONS))
FEW: dict[Variant, tuple[str, str]] = {
    ("flat", "none"): ("building", "applying"),
    ("flat, relative", "none"): ("building relative values", "applying"),
    ("flat, relative", "zstd"): ("building compressed", "applying compressed"),
    ("flat, relative", "ans"): ("building compressed", "applying compressed"),
}
"""The names of their times in targets."""

_LINKS = (1, 10, 25, 100)  # Gbit/s
_PIECE = 2 << 20  # bytes that a thread compares at a time

_memcmp = ctypes.CDLL(None).memcmp
_memcmp.argtypes = ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t


@dataclass
class PatchTimes(Times):
    """The seconds that one update takes, by turn.

    The keys are "copy", "lone copy", "read", "obvious", or a stage and a variant.

    Attributes:
        update: name of the update.
        changed: number of elements that differ.
        dense_bytes: bytes of the model.
    """

    update: str = ""
    changed: int = 0
    dense_bytes: int = 0

    @property
    def copy(self) -> Figure:
        """The faster of a copy by all threads and by one: waiting for each other costs on a busy machine."""
        return min(self.figure("copy"), self.figure("lone copy"), key=lambda one: one.median or 0.0)

    def build(self, variant: Variant) -> Figure:
        """Return the times of scan and encode together."""
        return self.figure(("scan", variant), ("encode", variant))

    def busy(self, variant: Variant) -> float:
        """Return the median seconds of building and applying."""
        return (self.build(variant).median or 0.0) + (self.figure(("apply", variant)).median or 0.0)

    def bytes_each(self, variant: Variant) -> float:
        """Return the bytes of the patch for each changed element."""
        return self.nbytes[variant] / max(self.changed, 1)


class _Bench:
    """An update, and memory that every turn uses again."""

    def __init__(self, update: Update) -> None:
        self.schema, self.snapshot = update.schema, update.flat(update.old)
        self.old, self.new = self.schema.views(self.snapshot), list(update.new.values())
        self.receiver = self.snapshot.clone()
        self.target = self.snapshot.clone()
        self._trackers = {values == "relative": tracker_of(update, values) for values in VALUES}
        self._payload = torch.empty(2 * self.schema.nbytes + 4096, dtype=torch.uint8)
        self.expected = update.flat(update.new)

    def scan(self, options: PatchOptions) -> Any:
        return self._trackers[options.relative].compare(self.new)

    def encode(self, scan: Any, options: PatchOptions) -> torch.Tensor:
        return encode_patch(scan.changes, self.schema, 0, 1, options, self._allocate)

    def apply(self, payload: torch.Tensor) -> None:
        decode_patch(payload, self.schema).write(self.receiver)

    def read_both(self) -> None:
        """Compare two equal models with all threads, and do nothing else."""
        ours, theirs = self.expected.data_ptr(), self.target.data_ptr()

        def compare(start: int) -> int:
            size = min(_PIECE, self.schema.nbytes - start)
            return _memcmp(ours + start, theirs + start, size)

        if any(in_threads(compare, range(0, self.schema.nbytes, _PIECE), torch.get_num_threads())):
            raise RuntimeError("a copy differs from what was copied")

    def _allocate(self, nbytes: int) -> torch.Tensor:
        return self._payload[:nbytes]


def measure_times(update: Update, variants: Iterable[Variant], turns: int) -> PatchTimes:
    """Time all variants in turns, after one turn that warms up.

    Raises:
        RuntimeError: a patch did not lead to the new weights.
    """
    bench = _Bench(update)
    changed = bench.scan(encoding("flat", "none").options).changed
    times = PatchTimes(update=update.name, changed=changed, dense_bytes=bench.schema.dense_bytes)
    chosen = {variant: encoding(*variant).options for variant in variants}
    places, target = bench.schema.views(bench.target), bench.target.numpy()
    for _ in range(1 + turns):
        times.add("copy", lambda: torch._foreach_copy_(places, bench.new))
        times.add("lone copy", lambda: np.copyto(target, bench.expected.numpy()))
        times.add("read", bench.read_both)
        times.add("obvious", lambda: obvious(bench.old, bench.new))
        for variant, options in chosen.items():
            _turn(bench, times, variant, options)
    return times


def _turn(bench: _Bench, times: PatchTimes, variant: Variant, options: PatchOptions) -> None:
    bench.receiver.copy_(bench.snapshot)
    scan = times.add(("scan", variant), lambda: bench.scan(options))
    payload = times.add(("encode", variant), lambda: bench.encode(scan, options))
    times.add(("apply", variant), lambda: bench.apply(payload))
    times.nbytes[variant] = payload.numel()
    if not torch.equal(bench.receiver, bench.expected):
        raise RuntimeError(f"{times.update}: the patch {variant} did not lead to the new weights")


def times_table(megabytes: float, found: Iterable[PatchTimes]) -> Table:
    """Return a table with one row for each update and variant."""
    note = (
        "Milliseconds, median (min .. max). B: bytes per changed element. *build* is scan and encode, and\n"
        "*apply* is decode and write. *one copy* copies all tensors in the workers' dtype, with all threads\n"
        "or one thread, whichever is faster. *one read of both models* compares equal memory with all\n"
        "threads, which every build includes. *pays below* is the speed of a link (MB/s). On slower\n"
        "links, a patch that is built, sent and applied one after the other is faster than dense.\n"
        "*the obvious way* finds and gathers the changes of each tensor with ``(a != b).nonzero()``, "
        "without\npacking them. *build/copy* is the time of *build* divided by that of *one copy*, and so on."
    )
    head = ["update", "layout", "compression", "B", "scan", "build", "apply", "build/copy", "obvious/build"]
    head += ["apply/copy", "pays below"]
    rows = [row for times in found for row in _rows(times)]
    return Table(f"Building and applying, {megabytes:.0f} MB", note, head, rows, names=(0, 1, 2))


def _rows(times: PatchTimes) -> Iterator[list[object]]:
    copy, plain = times.copy, times.figure("obvious")
    for what, figure in (
        ("one copy", copy),
        ("one read of both models", times.figure("read")),
        ("the obvious way", plain),
    ):
        yield [times.update, what, "-", "-", "-", figure.show(1e3, 0), *["-"] * 5]
    for variant in times.nbytes:
        scan, apply = times.figure(("scan", variant)), times.figure(("apply", variant))
        build, size = times.build(variant), Figure([times.bytes_each(variant)]).cell()
        shown = [size, *(figure.cell(1e3, 0) for figure in (scan, build, apply))]
        ratios = [show_ratio(*pair, 2) for pair in ((build, copy), (plain, build), (apply, copy))]
        yield [times.update, *variant, *shown, *ratios, _pays_below(times, variant)]


def _pays_below(times: PatchTimes, variant: Variant) -> str:
    """Return the speed of a link, in MB/s, on which a patch and dense take equally long."""
    saved = times.dense_bytes - times.nbytes[variant]
    extra = times.busy(variant) - (times.copy.median or 0.0)
    if saved <= 0:
        return "never"
    return f"{saved / extra / 1e6:.0f}" if extra > 0 else "always"


def links_table(megabytes: float, found: Iterable[PatchTimes]) -> Table:
    """Return the computed time of an update over links of several speeds."""
    note = (
        "Milliseconds, computed from the medians above. A patch is built, sent at the full speed of the\n"
        "link, and applied, one after the other. Dense is one copy and the transfer. * marks the fastest."
    )
    head = ["update", "sent as", "MB", *(f"{speed} Gbit/s" for speed in _LINKS)]
    rows = [row for times in found for row in _link_rows(times)]
    return Table(f"Over a link, {megabytes:.0f} MB", note, head, rows)


def _link_rows(times: PatchTimes) -> Iterator[list[str]]:
    ways = {"dense": (times.dense_bytes, times.copy.median or 0.0)}
    for variant in FEW:
        ways[", ".join(variant)] = times.nbytes[variant], times.busy(variant)
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


def _measure_sync(megabytes: float, turns: int) -> dict[Key, list[Sent]]:
    """Change 1 % of the weights by a few ulp in each turn, and send them by every scheme.

    Raises:
        RuntimeError: a receiver ended with other weights than the trainer, or a patch was not sent as one.
        Failed: the worker's process died.
    """
    weights, random = layered(megabytes), np.random.default_rng(0)
    schemes = {
        (scheme, label): SCHEMES[scheme](strategy=WeightStrategy("state_dict", encoding=encoding))
        for scheme in SCHEMES
        for label, encoding in ENCODINGS.items()
    }
    found = measure_schemes(schemes, weights, lambda _: change(weights, _TARGET, "1..4 ulp", random), turns)
    for key, sent in found.items():
        if (used := sent[-1][1].encoding) != key[1].partition(",")[0]:
            raise RuntimeError(f"{key}: sent as {used}")
    return found


_SMALLEST: Variant = ("flat, relative", "ans")


def _size_targets(by_chance: Sizes, trained: Iterable[Sizes]) -> Iterator[Target]:
    """Yield the targets for the bytes of changes by chance, and of policies in training."""
    smallest = ", ".join(_SMALLEST)
    for article, sizes in (("", by_chance), *(("the ", one) for one in trained)):
        each = sizes.found[_SMALLEST] / max(sizes.changed, 1)
        template = f"{{variant}}: bytes of an element of {article}{{update}}"
        yield target(template, each, variant=smallest, update=sizes.update)


def _targets(times: PatchTimes, many: PatchTimes) -> Iterator[Target]:
    seconds = (times.figure(("apply", _SMALLEST)).median or 0.0) * 1e9 / times.dense_bytes
    template = "seconds to apply a patch of 1 GB of weights: {variant}"
    yield target(template, seconds, variant=", ".join(_SMALLEST))
    first, relative, zstd, _ = FEW
    for variant in (first, relative, ("flat", "zstd"), zstd):
        yield target(f"bytes of a changed element: {', '.join(variant)}", times.bytes_each(variant))
    for variant, (building, applying) in FEW.items():
        build, apply = times.build(variant), times.figure(("apply", variant))
        pairs = [
            (f"{building}, of one copy: {{variant}}", build, times.copy),
            ("building, of the obvious way: {variant}", build, times.figure("obvious")),
            (f"{applying}, of one copy: {{variant}}", apply, times.copy),
        ]
        if variant == first:
            pairs.append(("building, 20% changed, of one copy: {variant}", many.build(variant), many.copy))
        for template, one, other in pairs:
            # Judged by the fastest turns too: a busy machine slows a copy by several threads most.
            fastest = min(one.values) / min(other.values)
            yield target(template, ratio(one, other), fastest, variant=", ".join(variant))


def add_options(known: Options) -> None:
    known.add("--megabytes", 500.0, "size of the model that is timed", quick=4.0)
    known.add("--turns", 7, "how often each thing is timed", quick=2)


def facts(options: argparse.Namespace) -> list[str]:
    return machine()


def tables(options: argparse.Namespace) -> Iterator[Table]:
    megabytes, turns = options.megabytes, options.turns
    trained = list(_trained(options.quick))
    yield bytes_table("Bytes: policies in training", trained)
    old = layered(min(megabytes, _MOST_MEGABYTES))
    random: dict[tuple[str, float], Sizes] = {}
    for move in MOVES:
        say(f"bytes: changes of {move}")
        found = {fraction: measure_bytes(by_chance(old, fraction, move)) for fraction in _FRACTIONS}
        yield bytes_table(f"Bytes: changes of {move} by chance", found.values())
        random |= {(move, fraction): sizes for fraction, sizes in found.items()}
    times = _timed(megabytes, turns)
    yield times_table(megabytes, times.values())
    yield links_table(megabytes, times.values())
    sent_megabytes = min(megabytes, _MOST_SYNC_MEGABYTES)
    say(f"send() until applied, {sent_megabytes:g} MB")
    note = (
        "Milliseconds, median (min .. max). 1 % of the elements change by 1 to 4 ulp in bfloat16. "
        "The worker\n"
        "is a process on the same machine, so there is no network where a smaller update would save time.\n"
        "*encode*, *ack* and *stall* are figures of the SyncReport. *of dense*: the time of send(), divided\n"
        "by that with dense."
    )
    yield sent_table(sent_megabytes, note, _measure_sync(sent_megabytes, turns))
    note = "A time meets its limit if neither the ratio of medians nor that of the fastest turns is above it."
    one = times[_TARGET]
    sizes = _size_targets(
        random["mostly 1 ulp", _TARGET], [one for one in trained if one.update.startswith("transformer")]
    )
    yield targets_table([*sizes, *_targets(one, times[_MANY])], note=f"{one.update}. {note}")


def _trained(quick: bool) -> Iterator[Sizes]:
    for updates in (trained_language_model(quick), trained_cartpole()):
        for update in updates:
            say(f"bytes: {update.name}")
            yield measure_bytes(update)


def _timed(megabytes: float, turns: int) -> dict[float, PatchTimes]:
    old = layered(megabytes)
    found = {}
    for fraction in _FRACTIONS:
        say(f"times: {fraction:.2%} of {megabytes:g} MB")
        variants = ALL if fraction == _TARGET else FEW
        found[fraction] = measure_times(by_chance(old, fraction, "1..4 ulp"), variants, turns)
    return found
