"""Updates over a slow link: what a patch saves there, what each rate and each further host costs.

The hosts are those of :class:`Network`.
"""

from __future__ import annotations

import argparse
import functools
import os
import socket
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from benchmarks.network import Network, bits_of, why_not
from benchmarks.options import Options
from benchmarks.processes import Place, in_turns
from benchmarks.report import Figure, Table, Unable, machine, ratio, say, show_ratio
from benchmarks.targets import target, targets_table
from benchmarks.trainers import trainers
from benchmarks.updates import change, layered, measure_schemes
from benchmarks.workers import Case
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
_BEST = "patch, relative, zstd"
_TARGET = 500.0, "1gbit"  # megabytes and rate
_MOST_MEGABYTES, _MOST_TURNS = 100.0, 3  # of the tables with several hosts, and with several rates


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


def _rate(text: str) -> str:
    bits_of(text)
    return text


def add_options(known: Options) -> None:
    known.add("--megabytes", 500.0, "size of the model to one host", quick=4.0)
    known.add("--turns", 5, "how often each thing is timed", quick=2)
    known.add("--rate", "1gbit", "of the sender's link", kind=_rate)
    known.add("--rates", RATES, kind=_rate)


def facts(options: argparse.Namespace) -> list[str]:
    if (reason := why_not()) is not None:
        raise Unable(f"no hosts to measure with: {reason}")
    return [
        *machine(),
        f"The sender's link: {options.rate} each way (tc tbf, burst of 2 ms, at least 64 KiB)",
    ]


def tables(options: argparse.Namespace) -> Iterator[Table]:
    megabytes, turns, rate = options.megabytes, options.turns, options.rate
    fewer = min(megabytes, _MOST_MEGABYTES)
    sent = {label: measure(label, megabytes, 1, rate=rate, turns=turns) for label in ENCODINGS}
    yield _encodings_table(sent, megabytes, rate, turns)
    yield _rates_table(fewer, options.rates, min(turns, _MOST_TURNS), beside=options.beside)
    yield _hosts_table(fewer, 2 if options.quick else len(HOSTS), rate, turns)
    yield _connections_table(fewer, rate, turns)
    reached = ratio(sent[_BEST].seconds, sent["dense"].seconds) if (megabytes, rate) == _TARGET else None
    yield targets_table([target("500 MB over 1gbit/s, {encoding}, of dense's time", reached, encoding=_BEST)])


def _encodings_table(sent: dict[str, Sent], megabytes: float, rate: str, turns: int) -> Table:
    rows = []
    for label, one in sent.items():
        figures = [figure.cell(1e3, 0) for figure in (one.seconds, one.encode, one.apply)]
        speedup = show_ratio(sent["dense"].seconds, one.seconds, 1)
        rows.append([label, Figure([one.megabytes]).cell(), *figures, speedup])
    note = (
        f"Milliseconds, median (min .. max) of {turns} turns. {_FRACTION:.0%} of all elements\n"
        "change by 1 to 4 ulp in bfloat16. *speedup over dense*: *send() until applied* of dense,\n"
        "divided by that of the row."
    )
    head = ["encoding", "MB sent", "send() until applied", "encode", "apply", "speedup over dense"]
    return Table(f"{megabytes:.0f} MB to one host over {rate}/s", note, head, rows)


def _rates_table(size: float, rates: Sequence[str], turns: int, *, beside: bool) -> Table:
    rows = []
    for rate in rates:
        sent = {label: measure(label, size, 1, rate=rate, turns=turns) for label in ("dense", BUCKETS, _BEST)}
        found = {label: (one.megabytes, one.seconds) for label, one in sent.items()}
        if beside:
            found["bare TCP"] = sent["dense"].megabytes, _bare_tcp(rate, turns, sent["dense"].megabytes)
        for label, (megabytes, seconds) in found.items():
            least = Figure([megabytes * 8e6 / bits_of(rate)])
            shown = seconds.show(1e3, 1) if label == "bare TCP" else seconds.cell(1e3, 1)
            times = show_ratio(seconds, least, 2)
            rows.append([rate, label, f"{megabytes:.2f}", least.show(1e3, 1), shown, times])
    note = (
        f"Milliseconds, median (min .. max) of {turns} turns. {_FRACTION:.0%} of all elements\n"
        "change by 1 to 4 ulp. *link*: time of the bytes sent at this rate. The headers of packets are not\n"
        "counted; they are 4 % more. *bare TCP*: one socket, the bytes of dense. Where it takes much longer\n"
        "than the link, the machine cannot feed a link of that rate."
    )
    head = ["rate", "encoding", "MB sent", "link", "send() until applied", "of link"]
    return Table(f"{size:.0f} MB to one host over links of several rates", note, head, rows, names=(0, 1))


def _bare_tcp(rate: str, turns: int, megabytes: float) -> Figure:
    """Return the seconds of so many bytes over one socket."""
    say(f"bare TCP, {megabytes:g} MB over {rate}")
    with Network(["trainer", "worker"]) as network:
        network.shape("trainer", rate)
        with trainers([("tcp", Case(megabytes, network=network))], 120.0) as live:
            (seconds,) = in_turns(live, "update", turns, timeout=120.0, budget=120.0)
        return Figure(seconds, live[0].failure)


def _hosts_table(megabytes: float, hosts: int, rate: str, turns: int) -> Table:
    labels = ("dense", _BEST)
    sent = [
        [measure(label, megabytes, count, rate=rate, turns=turns).seconds for label in labels]
        for count in range(1, hosts + 1)
    ]
    rows = []
    for count, (dense, patch) in enumerate(sent, 1):
        ratios = [show_ratio(one, first, 2) for one, first in zip((dense, patch), sent[0], strict=True)]
        rows.append([count, dense.cell(1e3, 0), ratios[0], patch.cell(1e3, 0), ratios[1]])
    note = (
        "Milliseconds, as above. Only the sender's link is slow. Each host has one worker.\n"
        "*dense/one host*, *patch/one host*: the time in the column before, divided by the time for one host."
    )
    head = ["hosts", "dense", "dense/one host", "patch", "patch/one host"]
    return Table(f"{megabytes:.0f} MB to several hosts behind one link", note, head, rows)


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


def _connections_table(megabytes: float, rate: str, turns: int) -> Table:
    found = {}
    for connections in CONNECTIONS:
        kind = functools.partial(_Paced, rate, connections=connections)
        found[connections] = measure(
            "dense", megabytes, 1, rate=rate, turns=turns, shaped=(), kind=kind
        ).seconds
    rows = [
        [connections, seconds.cell(1e3, 0), show_ratio(seconds, found[1])]
        for connections, seconds in found.items()
    ]
    note = (
        f"Milliseconds from send() until applied, median (min .. max) of {turns} turns. The sender\n"
        f"sends at most {rate}/s over each connection (the socket option SO_MAX_PACING_RATE).\n"
        "The link itself is not slow."
    )
    title = f"{megabytes:.0f} MB to one host over connections of {rate}/s each"
    return Table(title, note, ["connections", "dense", "of one"], rows)


def measure(
    label: str,
    megabytes: float,
    count: int,
    *,
    rate: str,
    turns: int,
    shaped: Sequence[str] = ("trainer",),
    kind: Callable[..., DistributedWeightSyncScheme] = DistributedWeightSyncScheme,
) -> Sent:
    """Time updates with one encoding to one worker on each of ``count`` hosts.

    The links of the hosts ``shaped`` have ``rate``, as ``tc`` writes it. ``kind`` is the class of the scheme,
    or a function that creates it.

    Raises:
        RuntimeError: a worker ended with other weights than the trainer.
    """
    say(f"{label}, {megabytes:g} MB to {count} over {rate}")
    hosts = HOSTS[:count]
    weights, random = layered(megabytes), np.random.default_rng(0)
    with Network(["trainer", *hosts]) as network, network.inside("trainer"):
        for host in shaped:
            network.shape(host, rate)
        os.environ["WEIGHT_UPDATE_HOST"] = "trainer"
        strategy = WeightStrategy("state_dict", **STRATEGIES[label])
        scheme = kind(strategy=strategy, address=network.address["trainer"])
        places = [Place(host, functools.partial(network.enter, host)) for host in hosts]

        def advance(_: int) -> None:
            change(weights, _FRACTION, "1..4 ulp", random)

        found = measure_schemes({label: scheme}, weights, advance, turns, places)[label]
    seconds, reports = zip(*found, strict=True)
    encode = Figure([report.seconds["encode"] for report in reports])
    apply = Figure([max(report.apply_seconds.values()) for report in reports])
    return Sent(Figure(seconds), encode, apply, reports[-1].wire_bytes / 1e6)
