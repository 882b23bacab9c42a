"""Updates over a slow link: what a patch saves there, and what each further host costs.

The hosts are those of :class:`Network`: network namespaces joined by a switch, whose cables can be pulled.
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import functools
import itertools
import os
import shutil
import subprocess
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from benchmarks.report import Cell, Figure, Table, Unable, machine, ratio, say
from benchmarks.targets import Target, target, targets_table
from benchmarks.updates import Place, change, connected, layered, require_same
from weight_update import DistributedWeightSyncScheme, PatchEncoding, WeightStrategy

QUICK = "4 MB, 2 turns"

_CLONE_NEWNET = 0x40000000
_SWITCH = "switch"
_libc = ctypes.CDLL(None, use_errno=True)
_serial = itertools.count()


def why_not() -> str | None:
    """Return the reason why there can be no such hosts here, or None."""
    for program in ("ip", "tc"):
        if shutil.which(program) is None:
            return f"the program {program} (iproute2) is missing"
    if os.geteuid() != 0:
        return "network namespaces are for root"
    try:
        with Network(["probe"]):
            return None
    except subprocess.CalledProcessError as error:
        return f"network namespaces are not allowed here: {error.stderr.strip()}"


class Network:
    """Hosts in one subnet; host ``k`` of ``names`` has the address 10.77.0.``k + 1``.

    A context manager that makes the namespaces and removes them.

    Attributes:
        address: address of each host.
    """

    def __init__(self, names: Sequence[str]) -> None:
        self._tag = f"weight_update-{os.getpid()}-{next(_serial)}"
        self.address = {name: f"10.77.0.{number}" for number, name in enumerate(names, 1)}

    def __enter__(self) -> Network:
        """Make all namespaces, or none."""
        try:
            self._build()
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *exc_info: object) -> None:
        """Remove the namespaces, and with them all interfaces."""
        for host in (*self.address, _SWITCH):
            subprocess.run(["ip", "netns", "del", self.namespace(host)], capture_output=True, check=False)

    def namespace(self, host: str) -> str:
        """Return the name of a host's namespace, for ``ip netns exec``."""
        return f"{self._tag}-{host}"

    def pull(self, host: str) -> None:
        """Unplug the cable of ``host``, which then sees that it has no link."""
        self._ip("-n", self.namespace(_SWITCH), "link", "set", self._port(host), "down")

    def plug(self, host: str) -> None:
        """Plug the cable of ``host`` in again."""
        self._ip("-n", self.namespace(_SWITCH), "link", "set", self._port(host), "up")

    def lose(self, host: str) -> None:
        """Lose every packet to and from ``host`` from now on, though its link looks fine."""
        self._ip("-n", self.namespace(_SWITCH), "link", "set", self._port(host), "nomaster")

    def find(self, host: str) -> None:
        """End the effect of :meth:`lose`."""
        self._ip("-n", self.namespace(_SWITCH), "link", "set", self._port(host), "master", "br0")

    def hide(self, host: str, other: str) -> None:
        """From now on all that ``other`` is sent by ``host`` is lost."""
        nobody = ("lladdr", "02:00:00:00:00:01", "dev", "eth0", "nud", "permanent")
        self._ip("-n", self.namespace(host), "neigh", "replace", self.address[other], *nobody)

    def shape(self, host: str, rate: str) -> None:
        """Limit the cable of ``host`` to ``rate`` (as ``tc`` writes it) each way."""
        ends = ((self.namespace(host), "eth0"), (self.namespace(_SWITCH), self._port(host)))
        for namespace, device in ends:
            bucket = ("tbf", "rate", rate, "burst", "256kb", "latency", "50ms")
            self._run("tc", "-n", namespace, "qdisc", "add", "dev", device, "root", *bucket)

    def enter(self, host: str) -> None:
        """Move the calling thread, and every thread and process that it starts later, to ``host``."""
        with open(f"/run/netns/{self.namespace(host)}", "rb") as file:
            _set_namespace(file.fileno())

    @contextlib.contextmanager
    def inside(self, host: str) -> Iterator[None]:
        """Keep the calling thread on ``host`` inside the ``with`` block."""
        with open("/proc/thread-self/ns/net", "rb") as before:
            self.enter(host)
            try:
                yield
            finally:
                _set_namespace(before.fileno())

    def _build(self) -> None:
        switch = self.namespace(_SWITCH)
        for host in (_SWITCH, *self.address):
            self._ip("netns", "add", self.namespace(host))
            self._ip("-n", self.namespace(host), "link", "set", "lo", "up")
        self._ip("-n", switch, "link", "add", "br0", "type", "bridge")
        self._ip("-n", switch, "link", "set", "br0", "up")
        for host, address in self.address.items():
            mine, port = self.namespace(host), self._port(host)
            self._ip("-n", mine, "link", "add", "eth0", "type", "veth", "peer", port, "netns", switch)
            self._ip("-n", mine, "addr", "add", f"{address}/24", "dev", "eth0")
            self._ip("-n", mine, "link", "set", "eth0", "up")
            self._ip("-n", switch, "link", "set", port, "master", "br0")
            self._ip("-n", switch, "link", "set", port, "up")

    def _port(self, host: str) -> str:
        """Return the name of an interface, which has at most 15 characters."""
        return f"port{list(self.address).index(host)}"

    def _ip(self, *arguments: str) -> None:
        self._run("ip", *arguments)

    @staticmethod
    def _run(*command: str) -> None:
        subprocess.run(command, capture_output=True, text=True, check=True)


def _set_namespace(fd: int) -> None:
    if _libc.setns(fd, _CLONE_NEWNET) != 0:  # os.setns is new in Python 3.12
        raise OSError(ctypes.get_errno(), "setns")


ENCODINGS = {
    "dense": "dense",
    "patch, raw": PatchEncoding(values="raw"),
    "patch, relative": PatchEncoding(values="relative"),
    "patch, relative, zstd": PatchEncoding(values="relative", compression="zstd"),
}
_HOSTS = ("one", "two", "three", "four")
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
    for count in range(1, len(_HOSTS) + 1):
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


def measure(plan: Plan, label: str, megabytes: float, count: int) -> Sent:
    """Time updates with one encoding to one worker on each of ``count`` hosts.

    Raises:
        RuntimeError: a worker ended with other weights than the trainer.
    """
    say(f"{label}, {megabytes:g} MB to {count}")
    hosts = _HOSTS[:count]
    weights, random = layered(megabytes), np.random.default_rng(0)
    with Network(["trainer", *hosts]) as network, network.inside("trainer"):
        network.shape("trainer", plan.rate)
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
