"""Updates that are converted on the way: strictly serial against chunks in a pipeline."""

from __future__ import annotations

import argparse
import contextlib
import functools
import os
import statistics
import time
import weakref
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch

from benchmarks.network import Network, why_not
from benchmarks.processes import Process
from benchmarks.report import Cell, Figure, Table, machine, ratio, say, show_ratio
from benchmarks.targets import Target, target, targets_table
from benchmarks.updates import Place, Weights, connected, require_same
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


@dataclass(frozen=True)
class Work:
    """The work that is done for each tensor.

    Attributes:
        sines: number of times that one core computes the sine of some numbers.
        copies: whether to make a new tensor.
    """

    sines: int = 0
    copies: bool = False


class Conversion:
    """A conversion that takes time and does not change the weights.

    Attributes:
        work: work for each tensor.
        most: most bytes of converted tensors that were alive at once.
    """

    def __init__(self) -> None:
        self.work = Work()
        self.most = 0
        self._alive: weakref.WeakSet[torch.Tensor] = weakref.WeakSet()

    def __call__(self, items: Iterator[tuple[str, torch.Tensor]]) -> Iterator[tuple[str, torch.Tensor]]:
        scratch = torch.zeros(_CACHED)
        for name, tensor in items:
            for _ in range(self.work.sines):
                scratch.sin_()
            if self.work.copies:
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
    scratch, best = torch.zeros(_CACHED), float("inf")
    for _ in range(5):
        start = time.perf_counter()
        for _ in range(100):
            scratch.sin_()
        best = min(best, (time.perf_counter() - start) / 100)
    return best


def both_cores() -> tuple[float, float]:
    """Measure the time of two processes at once, relative to one after the other.

    The other process copies. No pipeline of two processes that always need a core can do better here.

    Returns:
        The ratio while this process computes, and the ratio while it copies too.
    """
    other, copy = Process(_Copy), _Copy()
    other.answer()
    _seconds(lambda: _copy_in(other, copy.run))  # it has started, and all memory was touched
    compute = functools.partial(_compute, round(_seconds(copy.run) / seconds_of_a_sine()))
    ratios = []
    for mine in (compute, copy.run):
        turns = [_at_once(other, mine) for _ in range(5)]
        ratios.append(statistics.median(turns))
    other.close()
    return ratios[0], ratios[1]


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

    @property
    def shaped(self) -> bool:
        """Whether there is a link whose rate is limited."""
        return self.rate is not None


ROUTES = (
    Route("shared memory"),
    Route("sockets of one machine", sockets=True),
    Route("a link of 1 Gbit/s", rate="1gbit", sockets=True),
)


class Sender:
    """A sender with its worker.

    Attributes:
        name: number of chunks in flight, as shown.
        tensors: number of tensors.
        workers: its worker, alone in a list.
    """

    def __init__(
        self, limit: int | None, scheme: WeightSyncScheme, convert: Conversion, weights: Weights
    ) -> None:
        self.name = {None: "whole", 1: "serial"}.get(limit, f"{limit} in flight")
        self.tensors = len(weights)
        self.scheme = scheme
        self.workers: list[Process] = []
        self._convert, self._weights = convert, weights

    def send(self, work: Work) -> SyncReport:
        """Send one update."""
        self._convert.work = work
        return self.scheme.send()

    def require_same(self, work: Work) -> None:
        """Raise RuntimeError unless the worker has the weights of the trainer."""
        first = next(iter(self._weights.values()))
        first.add_(1)
        self.send(work)
        require_same(self.workers, self._weights, [self.name])

    def peak_bytes(self) -> tuple[int, int, int]:
        """Return the largest chunk, and the most that slots and converted tensors took during an update."""
        self.send(Work(copies=True))
        encoding, sender = self.scheme.strategy.encoding, self.scheme._sender
        assert isinstance(encoding, BucketEncoding)
        assert sender is not None
        slots = sum(slot.buffer.tensor.nbytes for slot in sender._pool._slots)
        return encoding.bucket_size + 64, slots, self._convert.most


def balance(work: Work, serial: Sender, share: float) -> Work:
    """Return work that takes ``share`` times as long as the transfer of ``serial``."""
    plain = replace(work, sines=0)
    reports = [serial.send(plain) for _ in range(3)]
    spent = [report.seconds for report in reports[1:]]
    made = min(one["convert"] + one["encode"] for one in spent)
    moved = min(one["send"] + one["ack"] for one in spent)
    lacking = share * moved - made
    return replace(work, sines=max(0, round(lacking / seconds_of_a_sine() / serial.tensors)))


@contextlib.contextmanager
def _senders(route: Route, weights: Weights) -> Iterator[list[Sender]]:
    """Connect one sender for each of :data:`LIMITS`; they share the link."""
    with contextlib.ExitStack() as stack:
        network = None
        if route.rate is not None:
            network = stack.enter_context(Network(["trainer", "worker"]))
            stack.enter_context(network.inside("trainer"))
            network.shape("trainer", route.rate)
        yield [stack.enter_context(_sender(route, network, limit, weights)) for limit in LIMITS]


@contextlib.contextmanager
def _sender(route: Route, network: Network | None, limit: int | None, weights: Weights) -> Iterator[Sender]:
    convert = Conversion()
    nbytes = sum(value.nbytes for value in weights.values())
    size = -(-nbytes // _CHUNKS // 64) * 64 + 64
    strategy = WeightStrategy(
        "state_dict", encoding=BucketEncoding(bucket_size=size), convert=convert, max_in_flight=limit
    )
    scheme = _scheme(route, network, strategy)
    sender = Sender(limit, scheme, convert, weights)
    enter = None if network is None else functools.partial(network.enter, "worker")
    worker = Place(host="worker" if route.sockets else None, enter=enter)
    with connected([scheme], weights, [worker]) as sender.workers:
        yield sender


def _scheme(route: Route, network: Network | None, strategy: WeightStrategy) -> WeightSyncScheme:
    if not route.sockets:
        return SharedMemWeightSyncScheme(strategy=strategy)
    os.environ["WEIGHT_UPDATE_HOST"] = "trainer"
    options: dict[str, Any] = {} if network is None else {"address": network.address["trainer"]}
    return DistributedWeightSyncScheme(strategy=strategy, **options)


LIMITS: tuple[int | None, ...] = (1, 2, 4, None)
_CHUNKS = 24
_WARM = 1


def add_options(known: argparse.ArgumentParser) -> None:
    known.add_argument(
        "--megabytes", type=float, help="of bfloat16 weights; default: 480, a link gets an eighth"
    )
    known.add_argument("--turns", type=int, help="how often each thing is timed; default: 9")


def facts(options: argparse.Namespace) -> list[str]:
    torch.set_num_threads(1)
    if options.figures is not None:  # they are of no library
        return machine(("torch", "tensordict"))
    computing, copying = both_cores()
    return [
        *machine(("torch", "tensordict")),
        "Time of two processes at once, divided by their time one after the other: "
        f"{computing:.2f} if one computes and one copies, "
        f"{copying:.2f} if both copy. On this machine, no pipeline can take a smaller share of the time of "
        "*serial* than these shares",
    ]


def tables(options: argparse.Namespace) -> Iterator[Table]:
    all_megabytes = options.megabytes or (24.0 if options.quick else 480.0)
    turns = options.turns or (2 if options.quick else 9)
    reason = why_not()
    ratios, memory = dict[tuple[str, str], Mapping[str, float | None]](), list[Memory]()
    for route in ROUTES:
        if route.shaped and reason is not None:
            say(f"without {route.name}: {reason}")
            continue
        megabytes = all_megabytes / (8 if route.shaped else 1)
        with _senders(route, make_weights(megabytes, 4 * _CHUNKS)) as senders:
            table, found = _times(route, megabytes, senders, turns)
            memory += _memory(route, senders)
        ratios |= {(route.name, work): rates for work, rates in found.items()}
        yield table
    yield _memory_table(memory)
    note = (
        "The limit of the memory is the size of all chunks that may be in flight, and of one more chunk for "
        "converted tensors."
    )
    yield targets_table(_targets(ratios, memory), note=note)


def _times(
    route: Route, megabytes: float, senders: list[Sender], turns: int
) -> tuple[Table, dict[str, Mapping[str, float | None]]]:
    serial = senders[0]
    work = Work()
    rows: list[list[str | Cell]] = []
    found = {}
    for name, share in WORKS.items():
        work = balance(work, serial, share)
        say(f"{route.name}, {name}: {work}")
        seconds: dict[str, list[float]] = {sender.name: [] for sender in senders}
        parts: list[tuple[float, float]] = []
        for turn in range(_WARM + turns):
            for sender in senders:
                start = time.perf_counter()
                report = sender.send(work)
                if turn >= _WARM:
                    seconds[sender.name].append(time.perf_counter() - start)
                    if sender is serial:
                        spent = report.seconds
                        parts.append((spent["convert"] + spent["encode"], spent["send"] + spent["ack"]))
        figures = {name: Figure(tuple(values)) for name, values in seconds.items()}
        first = figures[serial.name]
        found[name] = {label: ratio(one, first) for label, one in figures.items()}
        made, moved = (Figure(tuple(values)) for values in zip(*parts, strict=True))
        cells: list[str | Cell] = [name, made.show(1e3, 0), moved.show(1e3, 0)]
        for label, figure in figures.items():
            cells += [figure.cell(1e3, 0), *([] if label == serial.name else [show_ratio(figure, first)])]
        rows.append(cells)
    for sender in senders:
        sender.require_same(work)
    head = ["work", "convert, encode", "transfer"]
    for sender in senders:
        head += [sender.name, *([] if sender is serial else ["of serial"])]
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
        limit: number of chunks in flight, as shown.
        chunk: bytes of the largest chunk.
        slots: bytes of the slots.
        converted: most bytes of converted tensors that were alive at once.
    """

    place: str
    limit: str
    chunk: int
    slots: int
    converted: int


def _memory(route: Route, senders: list[Sender]) -> list[Memory]:
    return [] if route.shaped else [Memory(route.name, one.name, *one.peak_bytes()) for one in senders]


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
            one.limit,
            f"{one.chunk / 1e6:.2f}",
            *(Figure((x,)).cell(1e-6) for x in (one.slots, one.converted)),
        ]
        for one in found
    ]
    head = ["place", "sender", "chunk", "slots", "converted"]
    return Table("Memory of the sender while it sends", note, head, rows, names=(0, 1))


def _targets(
    ratios: Mapping[tuple[str, str], Mapping[str, float | None]], memory: list[Memory]
) -> Iterator[Target]:
    for (place, work), rates in ratios.items():
        yield target(f"{work}, {{place}}: 2 in flight, of serial", rates["2 in flight"], place=place)
    for one in memory:
        if one.limit == "whole":
            continue
        chunks = 2 if one.limit == "serial" else int(one.limit.split()[0]) + 1
        reached = (one.slots + one.converted) / (chunks * one.chunk)
        template = "{limit}, {place}: memory beyond the weights, of {chunks} chunks"
        yield target(template, reached, limit=one.limit, place=one.place, chunks=chunks)
