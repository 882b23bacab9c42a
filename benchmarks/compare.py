"""Compare this library's schemes with TorchRL's, in one run and in turns.

    python -m benchmarks compare                   # everything; about half an hour on two cores
    python -m benchmarks compare --only stall      # one part
    python -m benchmarks compare --quick           # a minute, to see that it works
    python -m benchmarks compare --rst docs/benchmark_results.rst

Nothing else should run on the machine.
"""

from __future__ import annotations

import argparse
import os
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from pathlib import Path

import torch.multiprocessing as mp

from benchmarks.groups import Group, GroupFailed, Plan, groups, interleave
from benchmarks.report import Figure, Table, machine, numbers, parser, publish, ratio, say, show_ratio, sizes
from benchmarks.sender import COPY, LABELS, Case, Stall
from benchmarks.targets import Target, target, targets_table

__all__ = ["Key", "figures_of", "main"]


Key = tuple[str, float, int, int]
"""Side, megabytes, tensors, workers."""

UNLIMITED = "+fd"
"""Marks a side that runs without the limit on descriptors, because it cannot run with it."""


def figures_of(sides: Sequence[Group], plan: Plan, order: str = "update") -> list[Figure]:
    """Measure one figure for each side, in turns."""
    repeats = plan.repeats_for(sides[0].case.megabytes)
    results = interleave(sides, order, repeats, timeout=plan.timeout, budget=plan.budget)
    return [Figure(tuple(values), group.failure) for group, values in zip(sides, results, strict=True)]


def measure_sync(plan: Plan) -> dict[Key, Figure]:
    """Measure all sizes and numbers of workers, with 16 tensors."""
    found: dict[Key, Figure] = {}
    for megabytes in plan.sizes:
        for workers in plan.workers:
            case = Case(megabytes, 16, workers)
            for pair in plan.pairs:
                say(f"sync: {megabytes:g} MB to {workers} workers, {LABELS[pair[0]]} and torchrl")
                with groups([(side, case) for side in (*pair, COPY)], plan.start_timeout) as sides:
                    for group, figure in zip(sides, figures_of(sides, plan), strict=True):
                        name = f"{COPY}-{pair[0]}" if group.side == COPY else group.side
                        found[name, megabytes, 16, workers] = figure
    return found


def sync_table(found: dict[Key, Figure]) -> Table:
    """Return a table with one row for each size, number of workers and scheme."""
    rows = []
    for side, megabytes, tensors, workers in found:
        if side not in ("shared", "process"):
            continue
        case = (megabytes, tensors, workers)
        ours, theirs, copy = (found[(name, *case)] for name in (side, f"torchrl-{side}", f"{COPY}-{side}"))
        rows.append(
            [
                LABELS[side].partition(",")[0],
                f"{megabytes:g}",
                str(workers),
                *(figure.show(1e3) for figure in (ours, theirs, copy)),
                show_ratio(ours, theirs),
                show_ratio(ours, copy),
            ]
        )
    return Table(
        "Synchronous update, 16 tensors",
        "Milliseconds from send() to its return, when all workers have applied: median (min .. max).",
        ["scheme", "MB", "workers", "ours", "torchrl", "plain copy", "ours/torchrl", "ours/copy"],
        rows,
    )


def measure_tensors(plan: Plan) -> dict[Key, Figure]:
    """Measure 5 MB to two workers in few and many tensors, with the usual limit on open files."""
    found: dict[Key, Figure] = {}
    for tensors in plan.tensors:
        limited = Case(plan.tensors_megabytes, tensors, plan.tensors_workers, descriptors=1024)
        free = Case(plan.tensors_megabytes, tensors, plan.tensors_workers)
        for pair in plan.pairs:
            say(f"tensors: {tensors} tensors, {LABELS[pair[0]]} and torchrl")
            cases = [(pair[0], limited), (pair[1], limited)]
            cases += [(pair[1], free)] if tensors > plan.many else []
            with groups(cases, plan.start_timeout) as sides:
                for group, figure in zip(sides, figures_of(sides, plan), strict=True):
                    name = group.side + ("" if group.case.descriptors else UNLIMITED)
                    found[name, plan.tensors_megabytes, tensors, plan.tensors_workers] = figure
    return found


def tensors_table(found: dict[Key, Figure]) -> Table:
    """Return a table with one row for each number of tensors and scheme."""
    rows = []
    for side, megabytes, tensors, workers in found:
        if side not in ("shared", "process"):
            continue
        case = (megabytes, tensors, workers)
        ours, theirs = found[(side, *case)], found[(f"torchrl-{side}", *case)]
        free = found.get((f"torchrl-{side}{UNLIMITED}", *case))
        rows.append(
            [
                LABELS[side].partition(",")[0],
                str(tensors),
                ours.show(1e3),
                theirs.show(1e3),
                "as at left" if free is None else free.show(1e3),
                show_ratio(ours, theirs if free is None else free),
            ]
        )
    megabytes, workers = next(iter(found))[1], next(iter(found))[3]
    return Table(
        f"Many tensors: {megabytes:g} MB to {workers} workers",
        "Milliseconds. Every process may open 1,024 files, except in the column *torchrl, more files*.",
        ["scheme", "tensors", "ours", "torchrl", "torchrl, more files", "ours/torchrl"],
        rows,
    )


StallFigures = dict[tuple[str, str], list[Stall]]
"""Side and what happened (``"update"`` or ``"copy"``): one entry for each time."""


def measure_stall(plan: Plan) -> StallFigures:
    """Measure the stall of one worker at the largest size, in turns."""
    found: StallFigures = {}
    case = Case(plan.largest, 16, 1)
    for pair in plan.pairs:
        say(f"stall: {plan.largest:g} MB, {LABELS[pair[0]]} and torchrl")
        with groups([(side, case) for side in pair], plan.start_timeout) as sides:
            for name, order in (("copy", "control"), ("update", "stall")):
                found.update(_in_turns(sides, name, order, plan))
    return found


def _in_turns(sides: list[Group], name: str, order: str, plan: Plan) -> StallFigures:
    results = interleave(sides, order, plan.repeats, timeout=plan.timeout, budget=plan.budget)
    return {(group.side, name): values for group, values in zip(sides, results, strict=True)}


def figure(stalls: list[Stall], what: str) -> Figure:
    """Return the figure of one attribute, of all stalls that have it."""
    values = [getattr(stall, what) for stall in stalls]
    return Figure(tuple(value for value in values if value is not None), "not known")


def stall_table(found: StallFigures, megabytes: float) -> Table:
    """Return a table with one row for each side."""
    rows = []
    for side in dict.fromkeys(side for side, _ in found):
        update, copy = found.get((side, "update"), []), found.get((side, "copy"), [])
        rows.append(
            [
                LABELS[side],
                figure(update, "usual").show(1e6, 1),
                figure(update, "switch").show(1e3, 3),
                figure(update, "reported").show(1e3, 3),
                figure(update, "longest").show(1e3, 3),
                figure(copy, "longest").show(1e3, 3),
            ]
        )
    return Table(
        f"A worker that computes while {megabytes:g} MB in 16 tensors arrive",
        "Time from the start of one forward pass to the next. *usual*: microseconds, without an "
        "update. The other columns show how much longer it takes (milliseconds). *at the switch*: "
        "the pass in which the version changes. *SyncReport*: the stall that the report states. "
        "*longest in update*: the longest pass between the call of send() and its return. "
        "*longest in a copy*: the longest pass while the trainer makes a plain copy and sends "
        "nothing, which shows the cost of sharing the cores.",
        ["side", "usual us", "at the switch", "SyncReport", "longest in update", "longest in a copy"],
        rows,
    )


_UPDATES = 5


@dataclass(frozen=True)
class Memory:
    """Proportional set sizes, in bytes.

    Attributes:
        side: which library.
        model: size of the model.
        processes: sender and workers.
        total: of all of them; None if the side failed.
        base: of one process that has imported torch and tensordict and does nothing.
        failure: why there is no total.
    """

    side: str
    model: float
    processes: int
    total: int | None
    base: int
    failure: str | None = None

    @property
    def allowed(self) -> float:
        """Three model sizes and 300 MB for each process."""
        return 3 * self.model + 300e6 * self.processes


def pss(pid: int) -> int:
    """Return the proportional set size of a process in bytes: private pages and its share of shared pages."""
    text = Path(f"/proc/{pid}/smaps_rollup").read_text()
    found = re.search(r"^Pss:\s+(\d+) kB", text, re.MULTILINE)
    assert found is not None, text
    return int(found[1]) * 1024


def measure_memory(plan: Plan) -> list[Memory]:
    """Measure the largest size and number of workers after several updates, one side after the other."""
    base = _bare_process()
    found = []
    workers = max(plan.workers)
    for side in (side for pair in plan.pairs for side in pair):
        say(f"memory: {plan.largest:g} MB, {workers} workers, {LABELS[side]}")
        with groups([(side, Case(plan.largest, 16, workers))], plan.start_timeout) as (group,):
            total, failure = None, None
            try:
                for _ in range(_UPDATES):
                    group.ask("update", plan.timeout)
                total = sum(pss(pid) for pid in group.pids)
            except GroupFailed as error:
                failure = str(error)
        found.append(Memory(side, plan.largest * 1e6, workers + 1, total, base, failure))
    return found


def _bare_process() -> int:
    ctx = mp.get_context("spawn")
    mine, theirs = ctx.Pipe()
    process = ctx.Process(target=_import_only, args=(theirs,))
    process.start()
    size = pss(mine.recv())
    mine.send(None)
    process.join()
    return size


def _import_only(conn: Connection) -> None:
    import tensordict  # noqa: F401
    import torch  # noqa: F401

    conn.send(os.getpid())
    conn.recv()


def memory_table(found: list[Memory]) -> Table:
    """Return a table with one row for each side."""
    rows = []
    for memory in found:
        cells = ["-", "-", "-"]
        if memory.total is not None:
            cells = [
                f"{memory.total / 1e6:.0f}",
                f"{(memory.total - memory.processes * memory.base) / memory.model:.2f}",
                "yes" if memory.total <= memory.allowed else "no",
            ]
        cells = [memory.failure or cells[0], *cells[1:]]
        rows.append([LABELS[memory.side], str(memory.processes), *cells, f"{memory.allowed / 1e6:.0f}"])
    return Table(
        f"Memory of all processes, {found[0].model / 1e6:g} MB in 16 tensors",
        f"MB, PSS of sender and workers after {_UPDATES} updates. One process with torch and tensordict "
        f"imported has {found[0].base / 1e6:.0f} MB. *models beyond base*: memory beyond that in all "
        "processes, divided by the size of the model. *allowed*: 3 model sizes and 300 MB per process.",
        ["side", "processes", "total", "models beyond base", "within", "allowed"],
        rows,
    )


PARTS = ("sync", "tensors", "stall", "memory")
_MANY = 5000  # tensors for which a target is set


def main(arguments: list[str] | None = None) -> int:
    """Parse, measure, print; return the exit status."""
    options = _parser().parse_args(arguments)
    return publish("compare", machine(), _tables(_plan(options), options.only or PARTS), options.rst)


@dataclass
class Results:
    """The figures of one run.

    Attributes:
        largest: size in MB at which stall and memory were measured.
    """

    largest: float
    sync: dict[Key, Figure] = field(default_factory=dict)
    tensors: dict[Key, Figure] = field(default_factory=dict)
    stall: StallFigures = field(default_factory=dict)
    memory: list[Memory] = field(default_factory=list)


def _tables(plan: Plan, parts: tuple[str, ...]) -> Iterator[Table]:
    """Yield the tables of a run, each as soon as it is measured."""
    results = Results(plan.largest)
    if "sync" in parts:
        results.sync = measure_sync(plan)
        yield sync_table(results.sync)
    if "tensors" in parts:
        results.tensors = measure_tensors(plan)
        yield tensors_table(results.tensors)
    if "stall" in parts:
        results.stall = measure_stall(plan)
        yield stall_table(results.stall, plan.largest)
    if "memory" in parts:
        results.memory = measure_memory(plan)
        yield memory_table(results.memory)
    yield targets_table(_targets(results))


def _parser() -> argparse.ArgumentParser:
    options = parser("compare", __doc__, "1 MB, one worker, 2 repeats")
    options.add_argument("--sizes", type=sizes, metavar="MB,MB", help="default: 1,100,1000")
    options.add_argument("--tensors", type=numbers, metavar="N,N", help="default: 16,1000,5000")
    options.add_argument("--workers", type=numbers, metavar="N,N", help="default: 1,2,4,8")
    options.add_argument("--scheme", action="append", choices=Plan().schemes, help="default: both")
    options.add_argument("--repeats", type=int, help="default: 10; ten times that up to 10 MB")
    options.add_argument("--timeout", type=float, help="seconds for one answer of a side; default: 60")
    options.add_argument("--only", action="append", choices=PARTS, help="may be given several times")
    return options


def _plan(options: argparse.Namespace) -> Plan:
    chosen = {"sizes": (1.0,), "tensors": (16,), "workers": (1,), "repeats": 2} if options.quick else {}
    if options.quick:
        chosen |= {"tensors_workers": 1, "timeout": 40.0}
    names = ("sizes", "tensors", "workers", "repeats", "timeout")
    chosen |= {name: getattr(options, name) for name in names if getattr(options, name) is not None}
    if options.scheme:
        chosen["schemes"] = tuple(options.scheme)
    return Plan(**chosen)


def _targets(results: Results) -> Iterator[Target]:
    sync, size = results.sync, f"{results.largest:g}"

    def at(one: str, other: str, megabytes: float, workers: int) -> float | None:
        case = (megabytes, 16, workers)
        return ratio(sync.get((one, *case)), sync.get((other, *case)))

    reached = at("shared", "torchrl-shared", 1000.0, 4)
    yield target("SharedMem, 1 GB, 4 workers, of torchrl's time", reached)
    reached = at("shared", f"{COPY}-shared", 1000.0, 4)
    yield target("SharedMem, 1 GB, 4 workers, of one plain copy", reached)
    yield target("SharedMem, 1 GB, slowest / fastest of 1 to 8 workers", _flat(sync))
    stalls = results.stall.get(("shared", "update"), [])
    for what, name in (("switch", "at the switch, seen by the worker"), ("reported", "in the SyncReport")):
        milliseconds = figure(stalls, what).times(1e3)
        template = f"SharedMem, {{size}} MB, stall {name}, ms, "
        yield target(template + "median", milliseconds.median, size=size)
        yield target(template + "longest", max(milliseconds.values, default=None), size=size)
    for memory in results.memory:
        if memory.side == "shared" and memory.total is not None:
            template = "SharedMem, memory at {size} MB, {workers} workers, of what is allowed"
            yield target(template, memory.total / memory.allowed, size=size, workers=memory.processes - 1)
    for workers in (1, 2, 4):
        reached = at("shared", "torchrl-shared", 1.0, workers)
        yield target("SharedMem, 1 MB, {workers} workers, of torchrl's time", reached, workers=workers)
    reached = at("process", "torchrl-process", 1000.0, 4)
    yield target("MultiProcess, 1 GB, 4 workers, of torchrl's time", reached)
    yield from _many_tensors(results.tensors)


def _flat(sync: dict[Key, Figure]) -> float | None:
    medians = [f.median for key, f in sync.items() if key[:2] == ("shared", 1000.0) and f.median is not None]
    return max(medians) / min(medians) if len(medians) > 1 else None


def _many_tensors(found: dict[Key, Figure]) -> Iterator[Target]:
    """Compare both schemes with TorchRL's SharedMem, without the limit on files if it needs that."""
    of_many = {key[0]: figure for key, figure in found.items() if key[2] == _MANY}
    theirs = of_many.get(f"torchrl-shared{UNLIMITED}", of_many.get("torchrl-shared"))
    for side, scheme in (("shared", "SharedMem"), ("process", "MultiProcess")):
        reached = ratio(of_many.get(side), theirs)
        yield target(
            "{scheme}, {tensors:,} tensors, of torchrl's SharedMem", reached, scheme=scheme, tensors=_MANY
        )
