"""Updates over a slow link: what a patch saves there, what each rate and each further host costs.

The hosts are those of :class:`Network`.
"""

from __future__ import annotations

import argparse
import functools
import os
import socket
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from benchmarks.network import Network, bits_of, why_not
from benchmarks.processes import in_turns
from benchmarks.report import Cell, Figure, Table, Unable, machine, ratio, say, show_ratio
from benchmarks.targets import Target, target, targets_table
from benchmarks.trainers import Case, trainers
from benchmarks.updates import Place, change, connected, layered, require_same
from weight_update import BucketEncoding, DistributedWeightSyncScheme, PatchEncoding, WeightStrategy
from weight_update.transports import TransportBackend

QUICK = "4 MB, 2 turns"

BUCKETS = "buckets, 2 in flight"
STRATEGIES: dict[str, dict[str, Any]] = {
    "dense": {"encoding": "dense"},
    "patch, raw": {"encoding": PatchEncoding(values="raw")},
    "patch, relative": {"encoding": PatchEncoding(values="relative")},
    "patch, relative, zstd": {"encoding": PatchEncoding(values="relative", compression="zstd")},
    BUCKETS: {"encoding": BucketEncoding(4 << 20), "max_in_flight": 2},
}
"""Options of a ``WeightStrategy``, by name."""

ENCODINGS = ("dense", "patch, raw", "patch, relative", "patch, relative, zstd")
RATES = ("100mbit", "1gbit", "10gbit")
CONNECTIONS = (1, 2, 4)
HOSTS = ("one", "two", "three", "four")
_SO_MAX_PACING_RATE = 47  # of asm-generic/socket.h; bytes a second
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
        rates: rates of the table that compares several.
        rates_turns: number of turns there.
    """

    megabytes: float
    hosts_megabytes: float
    turns: int
    rate: str
    rates: tuple[str, ...] = RATES
    rates_turns: int = 3


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
    known.add_argument("--rate", type=_rate, default="1gbit", help="of the sender's link; default: 1gbit")
    known.add_argument(
        "--rates", type=_rates, default=RATES, metavar="RATE,RATE", help=f"default: {','.join(RATES)}"
    )


def _rate(text: str) -> str:
    bits_of(text)
    return text


def _rates(text: str) -> tuple[str, ...]:
    return tuple(map(_rate, text.split(",")))


def facts(options: argparse.Namespace) -> list[str]:
    if (reason := why_not()) is not None:
        raise Unable(f"no hosts to measure with: {reason}")
    return [
        *machine(("torch", "tensordict")),
        f"The sender's link: {options.rate} each way (tc tbf, burst of 2 ms, at least 64 KiB)",
    ]


def tables(options: argparse.Namespace) -> Iterator[Table]:
    megabytes = options.megabytes or (4.0 if options.quick else 500.0)
    turns = options.turns or (2 if options.quick else 5)
    plan = Plan(megabytes, min(megabytes, 100.0), turns, options.rate, options.rates, min(turns, 3))
    sent = {label: measure(plan, label, plan.megabytes, 1) for label in ENCODINGS}
    yield _encodings_table(plan, sent)
    yield _rates_table(plan, beside=options.figures is None)
    yield _hosts_table(plan)
    yield _connections_table(plan)
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


def _rates_table(plan: Plan, *, beside: bool) -> Table:
    rows: list[list[str | Cell]] = []
    for rate in plan.rates:
        one_rate = replace(plan, rate=rate, turns=plan.rates_turns)
        labels = ("dense", BUCKETS, "patch, relative, zstd")
        sent = {label: measure(one_rate, label, plan.hosts_megabytes, 1) for label in labels}
        found = {label: (one.megabytes, one.seconds) for label, one in sent.items()}
        if beside:
            found["bare TCP"] = sent["dense"].megabytes, _bare_tcp(one_rate, sent["dense"].megabytes)
        for label, (megabytes, seconds) in found.items():
            least = Figure((megabytes * 8e6 / bits_of(rate),))
            shown = seconds.show(1e3, 1) if label == "bare TCP" else seconds.cell(1e3, 1)
            times = f"{ratio(seconds, least) or 0.0:.2f}"
            rows.append([rate, label, f"{megabytes:.2f}", least.show(1e3, 1), shown, times])
    note = (
        f"Milliseconds, median (min .. max) of {plan.rates_turns} turns. {_FRACTION:.0%} of all elements\n"
        "change by 1 to 4 ulp. *link*: time of the bytes sent at this rate. The headers of packets are not\n"
        "counted; they are 4 % more. *bare TCP*: one socket, the bytes of dense. Where it takes much longer\n"
        "than the link, the machine cannot feed a link of that rate."
    )
    head = ["rate", "encoding", "MB sent", "link", "send() until applied", "of link"]
    title = f"{plan.hosts_megabytes:.0f} MB to one host over links of several rates"
    return Table(title, note, head, rows, names=(0, 1))


def _bare_tcp(plan: Plan, megabytes: float) -> Figure:
    """Return the seconds of so many bytes over one socket."""
    say(f"bare TCP, {megabytes:g} MB over {plan.rate}")
    with Network(["trainer", "worker"]) as network:
        network.shape("trainer", plan.rate)
        with trainers([("tcp", Case(megabytes, network=network))], 120.0) as live:
            (seconds,) = in_turns(live, "update", plan.turns, warmup=_WARM, timeout=120.0, budget=120.0)
        return Figure(tuple(seconds), live[0].failure)


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


class _Paced(DistributedWeightSyncScheme):
    """A scheme whose sender sends at most ``rate`` over each connection, as some networks demand."""

    def __init__(self, rate: str, **options: Any) -> None:
        super().__init__(**options)
        self.rate = rate

    def open_sender(self, workers: Sequence[int], ctx: Any) -> dict[int, TransportBackend]:
        links = super().open_sender(workers, ctx)
        nbytes = round(bits_of(self.rate) / 8)
        # Accepted connections inherit it.
        self.listener._sock.setsockopt(socket.SOL_SOCKET, _SO_MAX_PACING_RATE, nbytes)
        return links


def _connections_table(plan: Plan) -> Table:
    found = {
        connections: measure(
            plan,
            "dense",
            plan.hosts_megabytes,
            1,
            shaped=(),
            kind=functools.partial(_Paced, plan.rate, connections=connections),
        )
        for connections in CONNECTIONS
    }
    rows: list[list[str | Cell]] = [
        [str(connections), one.seconds.cell(1e3, 0), show_ratio(one.seconds, found[1].seconds)]
        for connections, one in found.items()
    ]
    note = (
        f"Milliseconds from send() until applied, median (min .. max) of {plan.turns} turns. The sender\n"
        f"sends at most {plan.rate}/s over each connection (the socket option SO_MAX_PACING_RATE).\n"
        "The link itself is not slow."
    )
    title = f"{plan.hosts_megabytes:.0f} MB to one host over connections of {plan.rate}/s each"
    return Table(title, note, ["connections", "dense", "of one"], rows)


def measure(
    plan: Plan,
    label: str,
    megabytes: float,
    count: int,
    *,
    shaped: Sequence[str] = ("trainer",),
    kind: Callable[..., DistributedWeightSyncScheme] = DistributedWeightSyncScheme,
) -> Sent:
    """Time updates with one encoding to one worker on each of ``count`` hosts.

    The links of the hosts ``shaped`` have the rate of the plan. ``kind`` is the class of the scheme, or a
    function that creates it.

    Raises:
        RuntimeError: a worker ended with other weights than the trainer.
    """
    say(f"{label}, {megabytes:g} MB to {count} over {plan.rate}")
    hosts = HOSTS[:count]
    weights, random = layered(megabytes), np.random.default_rng(0)
    with Network(["trainer", *hosts]) as network, network.inside("trainer"):
        for host in shaped:
            network.shape(host, plan.rate)
        os.environ["WEIGHT_UPDATE_HOST"] = "trainer"
        strategy = WeightStrategy("state_dict", **STRATEGIES[label])
        scheme = kind(strategy=strategy, address=network.address["trainer"])
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
