"""Updates that are converted on the way: strictly serial against chunks in a pipeline."""

from __future__ import annotations

import argparse
import contextlib
import functools
import itertools
import os
import statistics
import time
import weakref
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from benchmarks.network import Network, why_not
from benchmarks.options import Options
from benchmarks.processes import HERE, Place, Process
from benchmarks.report import Figure, Table, machine, ratio, say, show_ratio
from benchmarks.targets import Target, target, targets_table
from benchmarks.updates import Weights, connected, require_same
from weight_update import (
    BucketEncoding,
    DistributedWeightSyncScheme,
    SharedMemWeightSyncScheme,
    SyncReport,
    WeightStrategy,
    WeightSyncScheme,
)

QUICK = "24 MB, 2 turns"

WORKS = {"transfer-bound": 0.0, "balanced": 1.0, "conversion-bound": 3.0}
"""How long converting and encoding takes, in times of the transfer; at least as long as encoding alone."""

_CACHED = 1 << 14  # elements that stay in the cache of a core


class Conversion:
    """A conversion that takes time and does not change the weights.

    Attributes:
        sines: number of times that one core computes the sine of some numbers, for each tensor.
        copies: whether to make new tensors.
        most: most bytes of new tensors that were alive at once.
    """

    def __init__(self) -> None:
        self.sines, self.copies, self.most = 0, False, 0
        self._alive: weakref.WeakSet[torch.Tensor] = weakref.WeakSet()

    def __call__(self, items: Iterator[tuple[str, torch.Tensor]]) -> Iterator[tuple[str, torch.Tensor]]:
        for name, tensor in items:
            _compute(self.sines)
            if self.copies:
                tensor = tensor.clone()
                self._alive.add(tensor)
                self.most = max(self.most, sum(one.nbytes for one in self._alive))
            yield name, tensor
            del tensor


def make_weights(megabytes: float, count: int) -> Weights:
    """Return ``count`` bfloat16 matrices of ``megabytes`` together."""
    size = int(megabytes * 1e6 / count / 2 / 256)
    return {f"layer{i}.weight": torch.randn(size, 256).to(torch.bfloat16) for i in range(count)}


def seconds_of_a_sine() -> float:
    return min(_seconds(lambda: _compute(100)) for _ in range(5)) / 100


def both_cores() -> tuple[float, float]:
    """Measure the time of two processes at once, relative to one after the other.

    The other process copies. No pipeline of two processes that always need a core can do better here.

    Returns:
        The ratio while this process computes, and the ratio while it copies too.
    """
    other, copy = Process(_Copy), _Copy()
    other.answer()
    _copy_in(other, copy.run)  # it has started, and all memory was touched
    compute = functools.partial(_compute, round(_seconds(copy.run) / seconds_of_a_sine()))
    computing, copying = (
        statistics.median(_at_once(other, mine) for _ in range(5)) for mine in (compute, copy.run)
    )
    other.close()
    return computing, copying


def _at_once(other: Process, mine: Callable[[], None]) -> float:
    alone = _seconds(mine) + _seconds(lambda: _copy_in(other))
    return _seconds(lambda: _copy_in(other, mine)) / alone


class _Copy:
    """A copy of 480 MB by one thread."""

    def __init__(self) -> None:
        torch.set_num_threads(1)
        self._source, self._target = torch.ones(2, 20_000_000, dtype=torch.uint8)

    def run(self) -> None:
        for _ in range(24):
            self._target.copy_(self._source)

    def close(self) -> None: ...


def _copy_in(other: Process, meanwhile: Callable[[], None] = lambda: None) -> None:
    other.send("run")
    meanwhile()
    other.answer()


def _compute(sines: int) -> None:
    scratch = torch.zeros(_CACHED)
    for _ in range(sines):
        scratch.sin_()


def _seconds(action: Callable[[], None]) -> float:
    start = time.perf_counter()
    action()
    return time.perf_counter() - start


@dataclass(frozen=True)
class Route:
    """The way from sender to worker.

    Attributes:
        name: as shown.
        rate: rate of the link, as ``tc`` writes it; None for one host.
        sockets: whether sender and worker believe to be on two hosts.
    """

    name: str
    rate: str | None = None
    sockets: bool = False


ROUTES = (
    Route("shared memory"),
    Route("sockets of one machine", sockets=True),
    Route("a link of 1 Gbit/s", rate="1gbit", sockets=True),
)


class Sender:
    """A sender with its worker.

    Attributes:
        name: number of chunks in flight, as shown.
        chunks: number of chunks that may be in flight; None for all.
        tensors: number of tensors.
        workers: its worker, alone in a list.
    """

    def __init__(
        self, limit: int | None, scheme: WeightSyncScheme, convert: Conversion, weights: Weights
    ) -> None:
        self.name = {None: "whole", 1: "serial"}.get(limit, f"{limit} in flight")
        self.chunks = limit
        self.tensors = len(weights)
        self.workers: list[Process] = []
        self._scheme, self._convert, self._weights = scheme, convert, weights

    def send(self, sines: int) -> SyncReport:
        """Send one update; converting each tensor takes so many sines."""
        self._convert.sines = sines
        return self._scheme.send()

    def require_same(self) -> None:
        """Raise RuntimeError unless the worker has the weights of the trainer."""
        first = next(iter(self._weights.values()))
        first.add_(1)
        self._scheme.send()
        require_same(self.workers, self._weights, [self.name])

    def memory(self, place: str) -> Memory:
        """Send one update that converts into new tensors; return the memory that it took."""
        self._convert.copies = True
        self.send(0)
        encoding, sender = self._scheme.strategy.encoding, self._scheme._sender
        assert isinstance(encoding, BucketEncoding)
        assert sender is not None
        slots = sum(slot.buffer.tensor.nbytes for slot in sender._pool._slots)
        return Memory(place, self.name, self.chunks, encoding.bucket_size + 64, slots, self._convert.most)


def balance(serial: Sender, share: float) -> int:
    """Return the sines that take ``share`` times as long as the transfer of ``serial``."""
    reports = [serial.send(0) for _ in range(3)]
    spent = [report.seconds for report in reports[1:]]
    made = min(one["convert"] + one["encode"] for one in spent)
    moved = min(one["send"] + one["ack"] for one in spent)
    lacking = share * moved - made
    return max(0, round(lacking / seconds_of_a_sine() / serial.tensors))


@contextlib.contextmanager
def _senders(route: Route, weights: Weights) -> Iterator[list[Sender]]:
    """Connect one sender for each of :data:`LIMITS`; they share the link."""
    with contextlib.ExitStack() as stack:
        options: dict[str, Any] = {}
        place = Place(host="worker") if route.sockets else HERE
        if route.rate is not None:
            network = stack.enter_context(Network(["trainer", "worker"]))
            stack.enter_context(network.inside("trainer"))
            network.shape("trainer", route.rate)
            options["address"] = network.address["trainer"]
            place = Place("worker", functools.partial(network.enter, "worker"))
        if route.sockets:
            os.environ["WEIGHT_UPDATE_HOST"] = "trainer"
        scheme = DistributedWeightSyncScheme if route.sockets else SharedMemWeightSyncScheme
        make = functools.partial(scheme, **options)
        yield [stack.enter_context(_sender(make, place, limit, weights)) for limit in LIMITS]


@contextlib.contextmanager
def _sender(
    make: Callable[..., WeightSyncScheme], place: Place, limit: int | None, weights: Weights
) -> Iterator[Sender]:
    convert = Conversion()
    nbytes = sum(value.nbytes for value in weights.values())
    buckets = BucketEncoding(bucket_size=-(-nbytes // _CHUNKS // 64) * 64 + 64)
    strategy = WeightStrategy("state_dict", encoding=buckets, convert=convert, max_in_flight=limit)
    scheme = make(strategy=strategy)
    sender = Sender(limit, scheme, convert, weights)
    with connected([scheme], weights, [place]) as sender.workers:
        yield sender


LIMITS: tuple[int | None, ...] = (1, 2, 4, None)
_CHUNKS = 24
_WARM = 1


def add_options(known: Options) -> None:
    known.add("--megabytes", 480.0, "of bfloat16 weights; a link gets an eighth", quick=24.0)
    known.add("--turns", 9, "how often each thing is timed", quick=2)


def facts(options: argparse.Namespace) -> list[str]:
    torch.set_num_threads(1)
    if not options.beside:
        return machine()
    computing, copying = both_cores()
    return [
        *machine(),
        "Time of two processes at once, divided by their time one after the other: "
        f"{computing:.2f} if one computes and one copies, "
        f"{copying:.2f} if both copy. On this machine, no pipeline can take a smaller share of the time of "
        "*serial* than these shares",
    ]


def tables(options: argparse.Namespace) -> Iterator[Table]:
    reason = why_not()
    figures, memory = dict[tuple[str, str], dict[str, Figure]](), list[Memory]()
    for route in ROUTES:
        if route.rate is not None and reason is not None:
            say(f"without {route.name}: {reason}")
            continue
        megabytes = options.megabytes / (1 if route.rate is None else 8)
        with _senders(route, make_weights(megabytes, 4 * _CHUNKS)) as senders:
            table, found = _times(route, megabytes, senders, options.turns)
            if route.rate is None:
                memory += [sender.memory(route.name) for sender in senders]
        figures |= {(route.name, work): one for work, one in found.items()}
        yield table
    yield _memory_table(memory)
    note = (
        "The limit of the memory is the size of all chunks that may be in flight, and of one more chunk for "
        "converted tensors."
    )
    yield targets_table(_targets(figures, memory), note=note)


def _times(
    route: Route, megabytes: float, senders: list[Sender], turns: int
) -> tuple[Table, dict[str, dict[str, Figure]]]:
    """Time all senders with each amount of work; return the table, and the figures by work and sender."""
    serial, rows, found = senders[0], [], {}
    for name, share in WORKS.items():
        sines = balance(serial, share)
        say(f"{route.name}, {name}: {sines} sines for each tensor")
        seconds: dict[str, list[float]] = {sender.name: [] for sender in senders}
        parts: list[tuple[float, float]] = []
        for turn in range(_WARM + turns):
            for sender in senders:
                start = time.perf_counter()
                report = sender.send(sines)
                if turn >= _WARM:
                    seconds[sender.name].append(time.perf_counter() - start)
                    if sender is serial:
                        spent = report.seconds
                        parts.append((spent["convert"] + spent["encode"], spent["send"] + spent["ack"]))
        found[name] = {label: Figure(values) for label, values in seconds.items()}
        first, *others = found[name].values()
        shown = [Figure(values).show(1e3, 0) for values in zip(*parts, strict=True)]
        ratios = [(one.cell(1e3, 0), show_ratio(one, first)) for one in others]
        rows.append([name, *shown, first.cell(1e3, 0), *itertools.chain(*ratios)])
    for sender in senders:
        sender.require_same()
    head = ["work", "convert, encode", "transfer", serial.name]
    head += itertools.chain(*((sender.name, "of serial") for sender in senders[1:]))
    note = (
        f"Milliseconds from send() until applied, median (min .. max) of {turns} turns, interleaved.\n"
        f"Bfloat16, {_CHUNKS} chunks. *serial* converts and sends one chunk after the other; the columns "
        "before\n"
        "it are the two parts of its time. *of serial*: the time in the column before, divided by that of\n"
        "*serial*. *whole* is without a pipeline: all chunks are converted first."
    )
    return Table(f"{megabytes:.0f} MB through {route.name}", note, head, rows), found


@dataclass(frozen=True)
class Memory:
    """The peak memory of a sender while it sends, beside its weights.

    Attributes:
        place: name of the route.
        sender: number of chunks in flight, as shown.
        chunks: number of chunks that may be in flight; None for all.
        chunk: bytes of the largest chunk.
        slots: bytes of the slots.
        converted: most bytes of converted tensors that were alive at once.
    """

    place: str
    sender: str
    chunks: int | None
    chunk: int
    slots: int
    converted: int


def _memory_table(found: list[Memory]) -> Table:
    note = (
        "MB. *chunk*: the largest chunk. *slots*: all slots of the sender. *converted*: converted "
        "tensors that\n"
        "were not yet copied into a slot, at their peak. The sender *whole* keeps a version for workers\n"
        "that join later."
    )
    rows = [
        [
            one.place,
            one.sender,
            f"{one.chunk / 1e6:.2f}",
            *(Figure([x]).cell(1e-6) for x in (one.slots, one.converted)),
        ]
        for one in found
    ]
    head = ["place", "sender", "chunk", "slots", "converted"]
    return Table("Memory of the sender while it sends", note, head, rows, names=(0, 1))


def _targets(figures: Mapping[tuple[str, str], dict[str, Figure]], memory: list[Memory]) -> Iterator[Target]:
    for (place, work), by_sender in figures.items():
        reached = ratio(by_sender["2 in flight"], by_sender["serial"])
        yield target(f"{work}, {{place}}: 2 in flight, of serial", reached, place=place)
    for one in memory:
        if one.chunks is not None:
            chunks = one.chunks + 1
            template = "{limit}, {place}: memory beyond the weights, of {chunks} chunks"
            reached = (one.slots + one.converted) / (chunks * one.chunk)
            yield target(template, reached, limit=one.sender, place=one.place, chunks=chunks)
