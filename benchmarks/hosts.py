"""Weights to one worker on another host, beside bare TCP, bare gloo and TorchRL's scheme, in turns.

The other host is a process of this machine, reached over loopback, or over a pair of veth interfaces between
network namespaces.
"""

from __future__ import annotations

import argparse
import contextlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

import torch

from benchmarks import links
from benchmarks.bare import GLOO, SMALL_BUFFER, TCP
from benchmarks.network import Network, why_not
from benchmarks.options import Options
from benchmarks.processes import in_turns
from benchmarks.report import Figure, Table, Times, machine, ratio, say, show_ratio
from benchmarks.targets import Target, target, targets_table
from benchmarks.trainers import COPY, preload, rival, trainers
from benchmarks.workers import Case
from weight_update import SyncReport
from weight_update.transports.distributed.relay.payload_stream import pieces_of
from weight_update.transports.distributed.transfer import Checksum, joint_hex

QUICK = "1 MB, 2 turns; 4 MB over shaped links"

OURS = "distributed-sockets"
STAGES = ("encode", "send", "ack")
_SHAPED = "1gbit"
_SHAPED_MEGABYTES = 100.0
_FOUR = 4


@dataclass
class Measured:
    """The figures of one size over one route.

    Attributes:
        seconds: time of an update, by candidate.
        reports: our reports, one for each turn.
        checksum: time of the checksum of as many bytes, which sender and worker each compute.
    """

    seconds: dict[str, Figure] = field(default_factory=dict)
    reports: list[SyncReport] = field(default_factory=list)
    checksum: Figure = field(default_factory=Figure)

    def of(self, variant: str) -> Figure:
        """Return the seconds of a candidate, without values if it was not measured."""
        return self.seconds.get(variant, Figure())

    def stage(self, name: str) -> Figure:
        """Return the seconds of a stage of ours."""
        return Figure([report.seconds.get(name, 0.0) for report in self.reports])

    @property
    def apply(self) -> Figure:
        """The seconds for which the worker applied ours."""
        return Figure([report.apply_seconds.get(0, 0.0) for report in self.reports])

    @property
    def rest(self) -> Figure:
        """The seconds of *ack* without those of *apply* and of bare TCP, as medians."""
        ack, apply, tcp = (figure.median for figure in (self.stage("ack"), self.apply, self.of(TCP)))
        return Figure() if ack is None or apply is None or tcp is None else Figure((ack - apply - tcp,))


Found = Mapping[tuple[str, float], Measured]
"""By route and megabytes."""


def measure(options: argparse.Namespace, megabytes: float, network: Network | None) -> Measured:
    """Measure all candidates in turns; only the processes of one live at a time."""
    found = Measured(checksum=_checksum_seconds(megabytes, options.turns))
    case = Case(megabytes, start="forkserver", network=network)
    turns = options.turns * (10 if megabytes <= 10 else 1)
    for variant in options.starts * (
        (COPY, TCP, SMALL_BUFFER, GLOO, rival(OURS), OURS) if options.beside else (OURS,)
    ):
        method = "reported" if variant == OURS else "update"
        with trainers([(variant, case)], 120.0) as live:
            (results,) = in_turns(live, method, turns, timeout=60.0, budget=20.0)
        if variant == OURS:
            found.reports += [report for _, report in results]
            results = [seconds for seconds, _ in results]
        figure = Figure(results, live[0].failure)
        found.seconds[variant] = found.of(variant).with_more(figure)
    return found


def _checksum_seconds(megabytes: float, turns: int) -> Figure:
    payload, times = torch.zeros(round(megabytes * 1e6), dtype=torch.uint8).fill_(1), Times()

    def compute() -> None:
        total = Checksum()
        for piece in pieces_of(payload):
            total.add(piece)
        joint_hex([total])

    for _ in range(1 + turns):
        times.add("checksum", compute)
    return times.figure("checksum")


def times_table(found: Found, reason: str | None) -> Table:
    """Return the table of all candidates; ``reason`` says why there is no veth."""
    rows = []
    for (route, megabytes), one in found.items():
        ours, others = one.of(OURS), [one.of(name) for name in (TCP, SMALL_BUFFER, GLOO, rival(OURS), COPY)]
        ratios = [show_ratio(ours, other) for other in (others[0], others[3])]
        rows.append([route, f"{megabytes:g}", ours.cell(1e3), *(x.show(1e3) for x in others), *ratios])
    note = (
        "Milliseconds, median (min .. max). Ours and torchrl: from the call of send() to its return, when\n"
        "the worker has applied the update. TCP and gloo: until the answer of one byte has come back, which\n"
        "the worker sends when it has all bytes. *small buffer*: bare TCP with our size of send buffer.\n"
        "*plain copy*: in one process."
    )
    if reason is not None:
        note += f"\nVeth was not measured: {reason}."
    head = ["route", "MB", "ours", "bare TCP", "small buffer", "bare gloo", "torchrl", "plain copy"]
    head += ["ours/TCP", "ours/torchrl"]
    return Table("To another host", note, head, rows, names=(0, 1))


def stages_table(found: Found) -> Table:
    """Return the table that says where our time goes."""
    rows = []
    for (route, megabytes), one in found.items():
        parts: list[object] = [one.stage(stage).cell(1e3) for stage in STAGES]
        parts += [one.apply.cell(1e3), *(x.show(1e3) for x in (one.of(TCP), one.rest, one.checksum))]
        rows.append([route, f"{megabytes:g}", one.of(OURS).cell(1e3), *parts])
    note = (
        "Milliseconds, median (min .. max). *encode* copies the weights into a slot. *ack*: until the\n"
        "worker has applied the update; the bytes travel in this time. *apply*: the part of *ack* after the\n"
        "worker has all bytes. *rest*: the median of *ack* without the medians of *apply* and *bare TCP*:\n"
        "time for frames, for thread switches, and for the part of the checksums that the transfer\n"
        "does not hide. *checksum*: time of one checksum alone; sender and worker each compute one during\n"
        "the transfer."
    )
    head = ["route", "MB", "send()", *STAGES, "apply", "bare TCP", "rest", "checksum"]
    return Table("Where our time goes", note, head, rows, names=(0, 1))


def _shaped(megabytes: float, turns: int) -> tuple[Table, float | None]:
    """Measure one host and four, all behind shaped links."""
    sent = {
        count: links.measure(
            "dense", megabytes, count, rate=_SHAPED, turns=turns, shaped=("trainer", *links.HOSTS[:count])
        ).seconds
        for count in (1, _FOUR)
    }
    rows = [[count, seconds.cell(1e3, 0), show_ratio(seconds, sent[1])] for count, seconds in sent.items()]
    note = (
        "Milliseconds from send() until all workers have applied the update, median (min .. max). Each host\n"
        f"has one worker and a link of {_SHAPED}/s, as the trainer has."
    )
    title = f"{megabytes:g} MB to several hosts over shaped links"
    reached = ratio(sent[_FOUR], sent[1]) if megabytes == _SHAPED_MEGABYTES else None
    return Table(title, note, ["hosts", "ours", "of one"], rows), reached


def _targets(found: Found, four: float | None) -> Iterator[Target]:
    for route in dict.fromkeys(route for route, _ in found):
        large, small = (found.get((route, size), Measured()) for size in (1000.0, 1.0))
        ours, theirs = large.of(OURS), large.of(rival(OURS))
        template = "1 GB to another host, {route}, of "
        yield target(template + "bare TCP's time", ratio(ours, large.of(TCP)), route=route)
        yield target(template + "torchrl's time", ratio(ours, theirs), route=route)
        ours, theirs = small.of(OURS), small.of(rival(OURS))
        yield target("1 MB to another host, {route}, ms", ours.times(1e3).reached, route=route)
        yield target("1 MB to another host, {route}, of torchrl's time", ratio(ours, theirs), route=route)
    yield target("four hosts over shaped links, of one", four)


def add_options(known: Options) -> None:
    known.add("--megabytes", (1.0, 100.0, 1000.0), quick=(1.0,))
    known.add("--turns", 4, "of each start, ten times that up to 10 MB", quick=2)
    known.add("--starts", 3, "how often processes are started", quick=1)


def facts(options: argparse.Namespace) -> list[str]:
    return machine(*["torchrl"] * options.beside)


def tables(options: argparse.Namespace) -> Iterator[Table]:
    reason = why_not()
    preload(options.beside)
    found: dict[tuple[str, float], Measured] = {}
    for route in ("loopback", *["veth"] * (reason is None)):
        with Network(["trainer", "worker"]) if route == "veth" else contextlib.nullcontext() as network:
            for megabytes in options.megabytes:
                say(f"{megabytes:g} MB over {route}")
                found[route, megabytes] = measure(options, megabytes, network)
    yield times_table(found, reason)
    yield stages_table(found)
    four = None
    if reason is None:
        shaped_megabytes = 4.0 if options.quick else _SHAPED_MEGABYTES
        table, four = _shaped(shaped_megabytes, options.turns + 1)
        yield table
    yield targets_table(_targets(found, four))
