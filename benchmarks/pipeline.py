"""Updates that are converted on the way: strictly serial against chunks in a pipeline.

::

    python -m benchmarks pipeline                  # about six minutes; as root, to have a slow link too
    python -m benchmarks pipeline --quick          # half a minute, to see that it works
    python -m benchmarks pipeline --rst docs/benchmark_pipeline.rst
"""

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
from multiprocessing.connection import Connection
from typing import Any

import torch
import torch.multiprocessing as mp

from benchmarks.network import Network, why_not
from benchmarks.report import Figure, Table, machine, parser, publish, ratio, say, show_ratio
from benchmarks.sending import Place, connected, require_same
from benchmarks.targets import Target, target, targets_table
from weight_update import (
    BucketEncoding,
    DistributedWeightSyncScheme,
    SharedMemWeightSyncScheme,
    SyncReport,
    WeightStrategy,
    WeightSyncScheme,
)

__all__ = ["main"]

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


def make_weights(megabytes: float, count: int) -> dict[str, torch.Tensor]:
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
    ctx = mp.get_context("spawn")
    pipe, theirs = ctx.Pipe()
    other = ctx.Process(target=_copy_when_told, args=(theirs,), daemon=True)
    other.start()
    copy = _Copy()
    _seconds(functools.partial(_copy_in, pipe, copy))  # it has started, and all memory was touched
    compute = functools.partial(_compute, round(_seconds(copy) / seconds_of_a_sine()))
    ratios = []
    for mine in (compute, copy):
        turns = [_at_once(pipe, mine) for _ in range(5)]
        ratios.append(statistics.median(turns))
    pipe.close()
    other.join(10.0)
    return ratios[0], ratios[1]


def _at_once(pipe: Connection, mine: Callable[[], None]) -> float:
    alone = _seconds(mine) + _seconds(functools.partial(_copy_in, pipe))
    return _seconds(functools.partial(_copy_in, pipe, mine)) / alone


def _copy_when_told(pipe: Connection) -> None:
    torch.set_num_threads(1)
    copy = _Copy()
    with contextlib.suppress(EOFError):
        while pipe.recv():
            copy()
            pipe.send(True)


class _Copy:
    """A copy of 480 MB."""

    def __init__(self) -> None:
        self._source, self._target = torch.ones(2, 20_000_000, dtype=torch.uint8)

    def __call__(self) -> None:
        for _ in range(24):
            self._target.copy_(self._source)


def _copy_in(pipe: Connection, meanwhile: Callable[[], None] = lambda: None) -> None:
    pipe.send(True)
    meanwhile()
    pipe.recv()


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


class Side:
    """One sender.

    Attributes:
        name: number of chunks in flight, as shown.
        tensors: number of tensors.
    """

    def __init__(
        self,
        limit: int | None,
        scheme: WeightSyncScheme,
        convert: Conversion,
        weights: dict[str, torch.Tensor],
    ) -> None:
        self.name = {None: "whole", 1: "serial"}.get(limit, f"{limit} in flight")
        self.tensors = len(weights)
        self.scheme = scheme
        self.pipe: Connection | None = None
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
        assert self.pipe is not None
        require_same([self.pipe], self._weights, [self.name])

    @property
    def chunk_megabytes(self) -> float:
        """Size of the largest chunk."""
        encoding = self.scheme.strategy.encoding
        assert isinstance(encoding, BucketEncoding)
        return (encoding.bucket_size + 64) / 1e6

    def peak_megabytes(self) -> tuple[float, float]:
        """Return the most that slots and converted tensors took while an update was sent."""
        self.send(Work(copies=True))
        sender = self.scheme._sender
        assert sender is not None
        slots = sum(slot.buffer.tensor.nbytes for slot in sender._pool._slots)
        return slots / 1e6, self._convert.most / 1e6


def balance(work: Work, side: Side, share: float) -> Work:
    """Return work that takes ``share`` times as long as the transfer of ``side``, which is serial."""
    plain = replace(work, sines=0)
    reports = [side.send(plain) for _ in range(3)]
    spent = [report.seconds for report in reports[1:]]
    made = min(one["convert"] + one["encode"] for one in spent)
    moved = min(one["send"] + one["ack"] for one in spent)
    lacking = share * moved - made
    return replace(work, sines=max(0, round(lacking / seconds_of_a_sine() / side.tensors)))


@contextlib.contextmanager
def _sides(route: Route, weights: dict[str, torch.Tensor]) -> Iterator[list[Side]]:
    """Connect one side for each of :data:`LIMITS`; the sides share the link."""
    with contextlib.ExitStack() as stack:
        network = None
        if route.rate is not None:
            network = stack.enter_context(Network(["trainer", "worker"]))
            stack.enter_context(network.inside("trainer"))
            network.shape("trainer", route.rate)
        yield [stack.enter_context(_side(route, network, limit, weights)) for limit in LIMITS]


@contextlib.contextmanager
def _side(
    route: Route, network: Network | None, limit: int | None, weights: dict[str, torch.Tensor]
) -> Iterator[Side]:
    convert = Conversion()
    nbytes = sum(value.nbytes for value in weights.values())
    size = -(-nbytes // _CHUNKS // 64) * 64 + 64
    strategy = WeightStrategy(
        "state_dict", encoding=BucketEncoding(bucket_size=size), convert=convert, max_in_flight=limit
    )
    scheme = _scheme(route, network, strategy)
    side = Side(limit, scheme, convert, weights)
    worker = Place(host="worker" if route.sockets else None, network=network)
    with connected([scheme], weights, [worker]) as pipes:
        side.pipe = pipes[0]
        yield side


def _scheme(route: Route, network: Network | None, strategy: WeightStrategy) -> WeightSyncScheme:
    if not route.sockets:
        return SharedMemWeightSyncScheme(strategy=strategy)
    os.environ["WEIGHT_UPDATE_HOST"] = "trainer"
    options: dict[str, Any] = {} if network is None else {"address": network.address["trainer"]}
    return DistributedWeightSyncScheme(strategy=strategy, **options)


LIMITS: tuple[int | None, ...] = (1, 2, 4, None)
_CHUNKS = 24
_WARM = 1


def main(arguments: list[str] | None = None) -> int:
    """Parse, measure, print; return the exit status."""
    options = _parse(arguments)
    torch.set_num_threads(1)
    facts = machine(("torch", "tensordict"))
    computing, copying = both_cores()
    facts.append(
        f"Time of two processes at once, divided by their time one after the other: {computing:.2f} if one "
        f"computes and one copies, {copying:.2f} if both copy. A pipeline within this machine cannot be "
        "faster "
        "than that"
    )
    return publish("pipeline", facts, _tables(options.megabytes, options.turns), options.rst)


def _tables(all_megabytes: float, turns: int) -> Iterator[Table]:
    reason = why_not()
    ratios, memory = dict[tuple[str, str], Mapping[str, float | None]](), list[list[str]]()
    for route in ROUTES:
        if route.shaped and reason is not None:
            say(f"without {route.name}: {reason}")
            continue
        megabytes = all_megabytes / (8 if route.shaped else 1)
        with _sides(route, make_weights(megabytes, 4 * _CHUNKS)) as sides:
            table, found = _times(route, megabytes, sides, turns)
            memory += _memory(route, sides)
        ratios |= {(route.name, work): rates for work, rates in found.items()}
        yield table
    yield _memory_table(memory)
    note = "The memory limit allows one chunk for each in flight, and one more for converted tensors."
    yield targets_table(_targets(ratios, memory), note=note)


def _times(
    route: Route, megabytes: float, sides: list[Side], turns: int
) -> tuple[Table, dict[str, Mapping[str, float | None]]]:
    serial = sides[0]
    work = Work()
    rows, found = [], {}
    for name, share in WORKS.items():
        work = balance(work, serial, share)
        say(f"{route.name}, {name}: {work}")
        seconds: dict[str, list[float]] = {side.name: [] for side in sides}
        parts: list[tuple[float, float]] = []
        for turn in range(_WARM + turns):
            for side in sides:
                start = time.perf_counter()
                report = side.send(work)
                if turn >= _WARM:
                    seconds[side.name].append(time.perf_counter() - start)
                    if side is serial:
                        spent = report.seconds
                        parts.append((spent["convert"] + spent["encode"], spent["send"] + spent["ack"]))
        figures = {name: Figure(tuple(values)) for name, values in seconds.items()}
        first = figures[serial.name]
        found[name] = {label: ratio(one, first) for label, one in figures.items()}
        made, moved = (Figure(tuple(values)) for values in zip(*parts, strict=True))
        cells = [name, made.show(1e3, 0), moved.show(1e3, 0)]
        for label, figure in figures.items():
            cells += [figure.show(1e3, 0), *([] if label == serial.name else [show_ratio(figure, first)])]
        rows.append(cells)
    for side in sides:
        side.require_same(work)
    head = ["work", "convert, encode", "transfer"]
    for side in sides:
        head += [side.name, *([] if side is serial else ["of serial"])]
    note = (
        f"Milliseconds from send() until applied, median (min .. max) of {turns} turns, interleaved.\n"
        f"Bfloat16, {_CHUNKS} chunks. The second and third columns are times of *serial*."
    )
    return Table(f"{megabytes:.0f} MB through {route.name}", note, head, rows), found


def _memory(route: Route, sides: list[Side]) -> list[list[str]]:
    """Return rows with the peak memory of the sender while it sends, beside its weights."""
    if route.shaped:
        return []
    return [
        [route.name, side.name, f"{side.chunk_megabytes:.2f}", *(f"{mb:.2f}" for mb in side.peak_megabytes())]
        for side in sides
    ]


def _memory_table(rows: list[list[str]]) -> Table:
    note = (
        "MB. *chunk*: the largest chunk. *slots*: all slots of the sender. *converted*: converted "
        "tensors that\n"
        'were not yet copied into a slot, at their peak. The side "whole" keeps a version for late workers.'
    )
    return Table(
        "Memory of the sender while it sends", note, ["place", "side", "chunk", "slots", "converted"], rows
    )


def _targets(
    ratios: Mapping[tuple[str, str], Mapping[str, float | None]], memory: list[list[str]]
) -> Iterator[Target]:
    for (place, work), rates in ratios.items():
        yield target(f"{work}, {{place}}: 2 in flight, of serial", rates["2 in flight"], place=place)
    for place, side, chunk, slots, converted in memory:
        if side == "whole":
            continue
        chunks = 2 if side == "serial" else int(side.split()[0]) + 1
        reached = (float(slots) + float(converted)) / (chunks * float(chunk))
        template = "{side}, {place}: memory beyond the weights, of {chunks} chunks"
        yield target(template, reached, side=side, place=place, chunks=chunks)


def _parse(arguments: list[str] | None) -> argparse.Namespace:
    known = parser("pipeline", __doc__, "24 MB, 2 turns")
    known.add_argument(
        "--megabytes", type=float, help="of bfloat16 weights; default: 480, a link gets an eighth"
    )
    known.add_argument("--turns", type=int, help="how often each thing is timed; default: 9")
    options = known.parse_args(arguments)
    options.megabytes = options.megabytes or (24.0 if options.quick else 480.0)
    options.turns = options.turns or (2 if options.quick else 9)
    return options
