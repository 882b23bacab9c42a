"""Updates over a slow link: what a patch saves there, and what each further host costs.

The hosts are those of :class:`Network`.
"""

from __future__ import annotations

import argparse
import functools
import os
import time
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from benchmarks.network import Network, why_not
from benchmarks.report import Cell, Figure, Table, Unable, machine, ratio, say
from benchmarks.targets import Target, target, targets_table
from benchmarks.updates import Place, change, connected, layered, require_same
from weight_update import DistributedWeightSyncScheme, PatchEncoding, WeightStrategy

QUICK = "4 MB, 2 turns"

ENCODINGS = {
    "dense": "dense",
    "patch, raw": PatchEncoding(values="raw"),
    "patch, relative": PatchEncoding(values="relative"),
    "patch, relative, zstd": PatchEncoding(values="relative", compression="zstd"),
}
HOSTS = ("one", "two", "three", "four")
_FRACTION = 0.01
_WARM = 1
_TARGET = "patch, relative, zstd", 500.0, "1gbit"  # encoding, megabytes and rate


@dataclass(frozen=True)
class Plan:
    """The options of one run.

    Attributes:
        megabytes: size of the model that is sent to one host.
        hosts_megabytes: size of the model that is sent to several hosts.
        turns: number of turns of each measurement.
        rate: rate of the sender's link, as ``tc`` writes it.
    """

    megabytes: float
    hosts_megabytes: float
    turns: int
    rate: str


@dataclass(frozen=True)
class Sent:
    """The figures of one encoding to some hosts.

    Attributes:
        seconds: time from ``send()`` until all hosts have applied the update.
        encode: part of it before anything is sent.
        apply: part of it after everything has arrived.
        megabytes: size of an update's payloads.
    """

    seconds: Figure
    encode: Figure
    apply: Figure
    megabytes: float


def add_options(known: argparse.ArgumentParser) -> None:
    known.add_argument("--megabytes", type=float, help="size of the model to one host; default: 500")
    known.add_argument("--turns", type=int, help="how often each thing is timed; default: 5")
    known.add_argument("--rate", default="1gbit", help="of the sender's link; default: 1gbit")


def facts(options: argparse.Namespace) -> list[str]:
    if (reason := why_not()) is not None:
        raise Unable(f"no hosts to measure with: {reason}")
    return [
        *machine(("torch", "tensordict")),
        f"The sender's link: {options.rate} each way (tc tbf, burst 256kb)",
    ]


def tables(options: argparse.Namespace) -> Iterator[Table]:
    megabytes = options.megabytes or (4.0 if options.quick else 500.0)
    turns = options.turns or (2 if options.quick else 5)
    plan = Plan(megabytes, min(megabytes, 100.0), turns, options.rate)
    sent = {label: measure(plan, label, plan.megabytes, 1) for label in ENCODINGS}
    yield _encodings_table(plan, sent)
    yield _hosts_table(plan)
    yield targets_table([_target(plan, sent)])


def _target(plan: Plan, sent: dict[str, Sent]) -> Target:
    encoding, *case = _TARGET
    reached = ratio(sent[encoding].seconds, sent["dense"].seconds)
    template = "500 MB over 1gbit/s, {encoding}, of dense's time"
    return target(template, reached if case == [plan.megabytes, plan.rate] else None, encoding=encoding)


def _encodings_table(plan: Plan, sent: dict[str, Sent]) -> Table:
    rows: list[list[str | Cell]] = []
    for label, one in sent.items():
        speedup = ratio(sent["dense"].seconds, one.seconds) or 0.0
        rows.append(
            [
                label,
                Figure((one.megabytes,)).cell(),
                *(figure.cell(1e3, 0) for figure in (one.seconds, one.encode, one.apply)),
                f"{speedup:.1f}",
            ]
        )
    note = (
        f"Milliseconds, median (min .. max) of {plan.turns} turns. {_FRACTION:.0%} of all elements\n"
        "change by 1 to 4 ulp in bfloat16. *speedup over dense*: *send() until applied* of dense,\n"
        "divided by that of the row."
    )
    head = ["encoding", "MB sent", "send() until applied", "encode", "apply", "speedup over dense"]
    return Table(f"{plan.megabytes:.0f} MB to one host over {plan.rate}/s", note, head, rows)


def _hosts_table(plan: Plan) -> Table:
    rows: list[list[str | Cell]] = []
    first: dict[str, Sent] = {}
    for count in range(1, len(HOSTS) + 1):
        row: list[str | Cell] = [str(count)]
        for label in ("dense", "patch, relative, zstd"):
            one = measure(plan, label, plan.hosts_megabytes, count)
            first.setdefault(label, one)
            times = ratio(one.seconds, first[label].seconds) or 0.0
            row += [one.seconds.cell(1e3, 0), f"{times:.2f}"]
        rows.append(row)
    note = (
        "Milliseconds, as above. Only the sender's link is slow. Each host has one worker.\n"
        "*dense/one host*, *patch/one host*: the time in the column before, divided by the time for one host."
    )
    head = ["hosts", "dense", "dense/one host", "patch", "patch/one host"]
    return Table(f"{plan.hosts_megabytes:.0f} MB to several hosts behind one link", note, head, rows)


def measure(plan: Plan, label: str, megabytes: float, count: int, *, every_link: bool = False) -> Sent:
    """Time updates with one encoding to one worker on each of ``count`` hosts.

    The link of the trainer is shaped, and with ``every_link`` those of all hosts.

    Raises:
        RuntimeError: a worker ended with other weights than the trainer.
    """
    say(f"{label}, {megabytes:g} MB to {count}")
    hosts = HOSTS[:count]
    weights, random = layered(megabytes), np.random.default_rng(0)
    with Network(["trainer", *hosts]) as network, network.inside("trainer"):
        for host in ("trainer", *hosts) if every_link else ("trainer",):
            network.shape(host, plan.rate)
        os.environ["WEIGHT_UPDATE_HOST"] = "trainer"
        strategy = WeightStrategy("state_dict", encoding=ENCODINGS[label])
        scheme = DistributedWeightSyncScheme(strategy=strategy, address=network.address["trainer"])
        places = [Place(host=host, enter=functools.partial(network.enter, host)) for host in hosts]
        with connected([scheme], weights, places) as receivers:
            seconds, reports = [], []
            for _ in range(_WARM + plan.turns):
                change(weights, _FRACTION, "1..4 ulp", random)
                start = time.perf_counter()
                reports.append(scheme.send(weights=weights))
                seconds.append(time.perf_counter() - start)
            require_same(receivers, weights, [label])
    kept = reports[_WARM:]
    encode = tuple(report.seconds["encode"] for report in kept)
    apply = tuple(max(report.apply_seconds.values()) for report in kept)
    megabytes = kept[-1].wire_bytes / 1e6
    return Sent(Figure(tuple(seconds[_WARM:])), Figure(encode), Figure(apply), megabytes)
