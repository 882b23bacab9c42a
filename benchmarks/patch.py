"""Bytes and time of patches, on real updates and on random ones, beside what one would have otherwise.

::

    python -m benchmarks patch                  # about five minutes on two cores
    python -m benchmarks patch --quick          # half a minute, to see that it works
    python -m benchmarks patch --rst docs/benchmark_patch.rst

Nothing else should run on the machine.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from benchmarks.patch_bytes import (
    COMPRESSIONS,
    LAYOUTS,
    VALUES,
    Sizes,
    bytes_table,
    encoding,
    flat_of,
    measure_bytes,
    obvious,
    tracker_of,
)
from benchmarks.report import Figure, Table, machine, parser, publish, ratio, say
from benchmarks.sending import Key, Sent, measure_schemes, stages
from benchmarks.targets import Target, target, targets_table
from benchmarks.updates import (
    MOVES,
    Update,
    by_chance,
    change,
    layered,
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

__all__ = ["main"]

_FRACTIONS = (0.0001, 0.01, 0.05, 0.2)
_TARGET = 0.01  # the fraction for which targets are set
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

ALL: tuple[Variant, ...] = tuple((layout, label) for layout in LAYOUTS for label in COMPRESSIONS)
FEW: tuple[Variant, ...] = (("flat", "none"), ("flat, relative", "none"), ("flat, relative", "zstd"))

_LINKS = (1, 10, 25, 100)  # Gbit/s


@dataclass
class Times:
    """The seconds that one update takes, by turn.

    Attributes:
        update: name of the update.
        changed: number of elements that differ.
        dense_bytes: bytes of the model.
        payload_bytes: bytes of the patch, by variant.
        seconds: times by action: "copy", "lone copy", "obvious", or a stage and a variant.
    """

    update: str
    changed: int
    dense_bytes: int
    payload_bytes: dict[Variant, int] = field(default_factory=dict)
    seconds: dict[Any, list[float]] = field(default_factory=dict)

    def add(self, what: Any, action: Callable[[], Any]) -> Any:
        """Run ``action`` and note its seconds."""
        start = time.perf_counter()
        result = action()
        self.seconds.setdefault(what, []).append(time.perf_counter() - start)
        return result

    def figure(self, what: Any) -> Figure:
        """Return the times of all turns but the first, which warms up."""
        return Figure(tuple(self.seconds.get(what, [])[1:]))

    @property
    def copy(self) -> Figure:
        """The faster of a copy by all threads and by one: waiting for each other costs on a busy machine."""
        return min(self.figure("copy"), self.figure("lone copy"), key=lambda one: one.median or 0.0)

    def build(self, variant: Variant) -> Figure:
        """Return the times of scan and encode together."""
        both = zip(*(self.figure((stage, variant)).values for stage in ("scan", "encode")), strict=True)
        return Figure(tuple(map(sum, both)))

    def bytes_each(self, variant: Variant) -> float:
        """Return the bytes of the patch for each changed element."""
        return self.payload_bytes[variant] / max(self.changed, 1)


class _Bench:
    """An update, and memory that every turn uses again."""

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
        return encode_patch(scan.changes, self.snapshot, self.schema, 0, 1, options, self._allocate)

    def apply(self, payload: torch.Tensor) -> None:
        decode_patch(payload, self.schema).changes.write(self.receiver)

    def copy(self) -> None:
        torch._foreach_copy_(self.places, self.new)

    def lone_copy(self) -> None:
        self.target.numpy()[:] = self.expected.numpy()

    def _allocate(self, nbytes: int) -> torch.Tensor:
        return self._payload[:nbytes]


def measure_times(update: Update, variants: Iterable[Variant], turns: int) -> Times:
    """Time all variants in turns, after one turn that warms up.

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
    """Return a table with one row for each update and variant."""
    note = (
        "Milliseconds, median (min .. max). B: bytes per changed element. *build* is scan and encode, and\n"
        "*apply* is decode and write. *one copy* copies all tensors in the workers' dtype, with all threads\n"
        "or one thread, whichever is faster. *pays below* is a link speed (MB/s): on slower links a "
        "patch is\n"
        "faster than dense, if it is built, sent and applied one after the other."
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
    """Return the speed of a link, in MB/s, on which a patch and dense take equally long."""
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
    """Return the computed time of an update over links of several speeds."""
    note = (
        "Milliseconds, computed from the medians above. A patch is built, sent at the full speed of the\n"
        "link, and applied, one after the other. Dense is one copy and the transfer. * marks the fastest."
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


def _measure_sync(megabytes: float, turns: int) -> dict[Key, list[Sent]]:
    """Change 1 % of the weights by a few ulp in each turn, and send them by every scheme.

    Raises:
        RuntimeError: a receiver ended with other weights than the trainer, or a patch was not sent as one.
        EOFError: the worker's process died.
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


def _sync_table(megabytes: float, found: dict[Key, list[Sent]]) -> Table:
    rows = []
    for (scheme, label), sent in found.items():
        figures = stages(sent)
        megabytes_sent = f"{sent[-1][1].wire_bytes / 1e6:.2f}"
        of_dense = f"{ratio(figures[0], stages(found[scheme, 'dense'])[0]) or 0.0:.2f}"
        rows.append([scheme, label, megabytes_sent, *(figure.show(1e3, 1) for figure in figures), of_dense])
    note = (
        "Milliseconds, median (min .. max). 1 % of the elements change by 1 to 4 ulp in bfloat16. The "
        "worker\n"
        "is a process on the same machine, so there is no network where a smaller update would save time."
    )
    head = ["scheme", "encoding", "MB sent", "send()", "encode", "ack", "stall", "of dense"]
    return Table(f"send() until applied, {megabytes:.0f} MB", note, head, rows)


def _targets(times: Times) -> Iterator[Target]:
    for variant in (FEW[0], FEW[1], ("flat", "zstd"), FEW[2]):
        yield target(f"bytes of a changed element: {', '.join(variant)}", times.bytes_each(variant))
    for variant in FEW:
        build, apply = times.build(variant), times.figure(("apply", variant))
        name = ", ".join(variant)
        yield _time_target("building, of one copy: {variant}", name, build, times.copy)
        yield _time_target("building, of the obvious way: {variant}", name, build, times.figure("obvious"))
        yield _time_target("applying, of one copy: {variant}", name, apply, times.copy)


def _time_target(template: str, variant: str, one: Figure, other: Figure) -> Target:
    """Judge by the fastest turns too: a busy machine slows a copy by several threads most."""
    return target(template, ratio(one, other), min(one.values) / min(other.values), variant=variant)


@dataclass(frozen=True)
class Plan:
    """The options of one run.

    Attributes:
        megabytes: of the model whose patches are timed.
        turns: number of turns of each measurement.
        quick: whether to train small networks.
    """

    megabytes: float
    turns: int
    quick: bool


def main(arguments: list[str] | None = None) -> int:
    """Parse, measure, print; return the exit status."""
    options = _parser().parse_args(arguments)
    quick = options.quick
    plan = Plan(options.megabytes or (4.0 if quick else 500.0), options.turns or (2 if quick else 7), quick)
    return publish("patch", machine(), _tables(plan), options.rst)


def _tables(plan: Plan) -> Iterator[Table]:
    """Yield the tables of a run, each as soon as it is measured."""
    yield bytes_table("Bytes: policies in training", _trained(plan))
    old = layered(min(plan.megabytes, _MOST_MEGABYTES))
    for move in MOVES:
        say(f"bytes: changes of {move}")
        found = (measure_bytes(by_chance(old, fraction, move)) for fraction in _FRACTIONS)
        yield bytes_table(f"Bytes: changes of {move} by chance", found)
    times = _timed(plan)
    yield times_table(plan.megabytes, times.values())
    yield links_table(plan.megabytes, times.values())
    megabytes = min(plan.megabytes, _MOST_SYNC_MEGABYTES)
    say(f"send() until applied, {megabytes:g} MB")
    yield _sync_table(megabytes, _measure_sync(megabytes, plan.turns))
    note = "A time meets its limit if both the ratio of medians and the ratio of fastest turns do."
    one = times[_TARGET]
    yield targets_table(_targets(one), note=f"{one.update}. {note}")


def _trained(plan: Plan) -> Iterator[Sizes]:
    for updates in (trained_language_model(plan.quick), trained_cartpole()):
        for update in updates:
            say(f"bytes: {update.name}")
            yield measure_bytes(update)


def _timed(plan: Plan) -> dict[float, Times]:
    old = layered(plan.megabytes)
    found = {}
    for fraction in _FRACTIONS:
        say(f"times: {fraction:.2%} of {plan.megabytes:g} MB")
        variants = ALL if fraction == _TARGET else FEW
        found[fraction] = measure_times(by_chance(old, fraction, "1..4 ulp"), variants, plan.turns)
    return found


def _parser() -> argparse.ArgumentParser:
    options = parser("patch", __doc__, "4 MB, 2 turns, small networks")
    options.add_argument("--megabytes", type=float, help="size of the model that is timed; default: 500")
    options.add_argument("--turns", type=int, help="how often each thing is timed; default: 7")
    return options
