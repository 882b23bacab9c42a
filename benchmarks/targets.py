"""The targets set for this library, and whether a run reached them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

from benchmarks.measure_memory import Memory
from benchmarks.measure_stall import StallFigures, figure
from benchmarks.measure_sync import UNLIMITED, Key
from benchmarks.report import Figure, Table, ratio
from benchmarks.sides import COPY

__all__ = ["Results", "Target", "targets_of", "targets_table"]


@dataclass
class Results:
    """All that one run measured; ``largest`` is the size in MB of stall and memory."""

    largest: float
    sync: dict[Key, Figure] = field(default_factory=dict)
    tensors: dict[Key, Figure] = field(default_factory=dict)
    stall: StallFigures = field(default_factory=dict)
    memory: list[Memory] = field(default_factory=list)


_MANY = 5000
Target = tuple[str, float | None, float]
"""What, the figure reached (None: not measured), and the most it may be."""


def targets_table(targets: Iterable[Target], title: str = "Targets") -> Table:
    """One row for each target."""
    rows = [
        [what, f"<= {limit:g}", "-" if reached is None else f"{reached:.4g}", _verdict(reached, limit)]
        for what, reached, limit in targets
    ]
    return Table(
        title,
        "Medians of this run, except where it says otherwise.",
        ["target", "limit", "reached", "met"],
        rows,
    )


def _verdict(reached: float | None, limit: float) -> str:
    if reached is None:
        return "not measured"
    return "yes" if reached <= limit else "no"


def targets_of(results: Results) -> Iterator[Target]:
    """What :mod:`benchmarks.compare` has to reach."""
    sync = results.sync

    def at(one: str, other: str, megabytes: float, workers: int) -> float | None:
        case = (megabytes, 16, workers)
        return ratio(sync.get((one, *case)), sync.get((other, *case)))

    yield "SharedMem, 1 GB, 4 workers, of torchrl's time", at("shared", "torchrl-shared", 1000.0, 4), 0.25
    yield "SharedMem, 1 GB, 4 workers, of one plain copy", at("shared", f"{COPY}-shared", 1000.0, 4), 1.5
    yield "SharedMem, 1 GB, slowest / fastest of 1 to 8 workers", _flat(sync), 1.25
    yield from _stalls(results.stall, results.largest)
    for memory in results.memory:
        if memory.side == "shared" and memory.total is not None:
            case = f"{results.largest:g} MB, {memory.processes - 1} workers"
            yield f"SharedMem, memory at {case}, of what is allowed", memory.total / memory.allowed, 1.0
    for workers in (1, 2, 4):
        name = f"SharedMem, 1 MB, {workers} workers, of torchrl's time"
        yield name, at("shared", "torchrl-shared", 1.0, workers), 1.0
    yield "MultiProcess, 1 GB, 4 workers, of torchrl's time", at("process", "torchrl-process", 1000.0, 4), 0.5
    yield from _many(results.tensors)


def _flat(sync: dict[Key, Figure]) -> float | None:
    medians = [f.median for key, f in sync.items() if key[:2] == ("shared", 1000.0) and f.median is not None]
    return max(medians) / min(medians) if len(medians) > 1 else None


def _stalls(found: StallFigures, megabytes: float) -> Iterator[Target]:
    stalls = found.get(("shared", "update"), [])
    for what, name in (("switch", "at the switch, seen by the worker"), ("reported", "in the SyncReport")):
        values = figure(stalls, what).values
        yield f"SharedMem, {megabytes:g} MB, stall {name}, ms, median", _ms(figure(stalls, what).median), 1.0
        yield f"SharedMem, {megabytes:g} MB, stall {name}, ms, longest", _ms(max(values, default=None)), 1.0


def _ms(seconds: float | None) -> float | None:
    return None if seconds is None else 1e3 * seconds


def _many(found: dict[Key, Figure]) -> Iterator[Target]:
    """Both schemes against TorchRL's SharedMem, which needs more descriptors than the usual limit."""
    for side, name in (("shared", "SharedMem"), ("process", "MultiProcess")):
        ours = next((f for key, f in found.items() if key[0] == side and key[2] == _MANY), None)
        theirs = None
        for rival in (f"torchrl-shared{UNLIMITED}", "torchrl-shared"):
            theirs = theirs or next((f for k, f in found.items() if k[0] == rival and k[2] == _MANY), None)
        yield f"{name}, {_MANY:,} tensors, of torchrl's SharedMem", ratio(ours, theirs), 0.01
