"""Compare this library's schemes with TorchRL's, in one run and in turns."""

from __future__ import annotations

import argparse
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace

from benchmarks.memory import Memory, measure_memory, memory_table
from benchmarks.processes import in_turns
from benchmarks.report import (
    Cell,
    Figure,
    Table,
    chosen,
    machine,
    numbers,
    ratio,
    say,
    show_ratio,
    sizes,
)
from benchmarks.targets import Target, count_workers, target, targets_table
from benchmarks.trainers import COPY, FLOOR, LABELS, Case, Stall, Trainer, rival, trainers

QUICK = "1 MB, one worker, 2 repeats"

Key = tuple[str, float, int, int]
"""Variant, megabytes, tensors, workers."""

Found = dict[Key, Figure]

_SMALL = 10.0
"""Megabytes up to which waking the processes takes a large part of an update, and copies need no threads."""

_REST = 0.01
"""Seconds before an update of more; threads that copied for the one before no longer spin then."""

UNLIMITED = "+fd"
"""Marks a variant that runs without the limit on descriptors, because it cannot run with it."""


@dataclass(frozen=True)
class Plan:
    """The options of one run.

    Attributes:
        sizes: model sizes in MB.
        tensors: numbers of tensors.
        workers: numbers of workers.
        schemes: our schemes.
        beside: whether TorchRL's schemes and plain copies are measured too.
        repeats: turns of each variant at the largest sizes; small updates get ten times as many.
        timeout: seconds for one answer of a trainer.
        start_timeout: seconds until all processes of a trainer are connected; each imports torch first.
        budget: seconds after which a slow variant gets no further turns.
        tensors_megabytes: size of the model in the many-tensors case.
        tensors_workers: workers in the many-tensors case.
        rounds: number of times that a variant's processes are started, if variants do not run at once.
        many: number of tensors beyond which TorchRL is also measured without a limit on open files.
    """

    sizes: tuple[float, ...] = (1.0, 100.0, 1000.0)
    tensors: tuple[int, ...] = (16, 1000, 5000)
    workers: tuple[int, ...] = (1, 2, 4, 8)
    schemes: tuple[str, ...] = ("shared", "process")
    beside: bool = True
    repeats: int = 10
    timeout: float = 60.0
    start_timeout: float = 120.0
    budget: float = 30.0
    tensors_megabytes: float = 5.0
    tensors_workers: int = 2
    many: int = 200
    rounds: int = 1

    def for_one_round(self) -> Plan:
        """Return this plan with the turns of one of its rounds."""
        return replace(self, repeats=math.ceil(self.repeats / self.rounds), budget=self.budget / self.rounds)

    def repeats_for(self, megabytes: float) -> int:
        """Return the number of turns of each variant at this size."""
        return self.repeats * 10 if megabytes <= _SMALL else self.repeats

    def variants_of(self, scheme: str) -> tuple[str, ...]:
        """Return our scheme and TorchRL's of the same kind, or ours alone."""
        return (scheme, rival(scheme)) if self.beside else (scheme,)

    @property
    def largest(self) -> float:
        """The largest size, where stall and memory are measured."""
        return max(self.sizes)


def figures_of(live: Sequence[Trainer], plan: Plan) -> list[Figure]:
    """Measure the updates of each trainer, in turns."""
    megabytes = live[0].case.megabytes
    rest = 0.0 if megabytes <= _SMALL else _REST
    repeats, budget = plan.repeats_for(megabytes), plan.budget
    results = in_turns(live, "update", repeats, timeout=plan.timeout, budget=budget, rest=rest)
    return [Figure(tuple(values), trainer.failure) for trainer, values in zip(live, results, strict=True)]


def beside(found: Found, variant: str, case: Sequence[float]) -> list[str | Cell]:
    """Return the cells that compare one of our schemes with TorchRL's and with a plain copy."""
    names = (variant, rival(variant), f"{COPY}-{variant.partition('-')[0]}")
    ours, theirs, copy = (found.get((name, *case), Figure(())) for name in names)
    shown = [ours.cell(1e3), theirs.show(1e3), copy.show(1e3)]
    return [*shown, show_ratio(ours, theirs), show_ratio(ours, copy)]


def measure_sync(plan: Plan) -> Found:
    """Measure all sizes and numbers of workers, with 16 tensors."""
    found: Found = {}
    for megabytes in plan.sizes:
        for workers in plan.workers:
            case = Case(megabytes, 16, workers)
            for scheme in plan.schemes:
                say(f"sync: {megabytes:g} MB to {workers} workers, {_label(plan, scheme)}")
                variants = [*plan.variants_of(scheme), *[COPY] * plan.beside]
                if plan.beside and scheme == "shared" and megabytes <= _SMALL:
                    variants.append(FLOOR)
                with trainers([(variant, case) for variant in variants], plan.start_timeout) as live:
                    for trainer, figure in zip(live, figures_of(live, plan), strict=True):
                        name = f"{COPY}-{scheme}" if trainer.variant == COPY else trainer.variant
                        found[name, megabytes, 16, workers] = figure
    return found


def _label(plan: Plan, scheme: str) -> str:
    return LABELS[scheme] + " and torchrl" * plan.beside


def sync_table(found: Found) -> Table:
    """Return a table with one row for each size, number of workers and scheme."""
    rows = [
        [LABELS[variant].partition(",")[0], f"{case[0]:g}", str(case[2]), *beside(found, variant, case)]
        for variant, *case in found
        if variant in ("shared", "process")
    ]
    return Table(
        "Synchronous update, 16 tensors",
        "Milliseconds from the call of send() to its return, when all workers have applied the update: "
        "median (min .. max).",
        ["scheme", "MB", "workers", "ours", "torchrl", "plain copy", "ours/torchrl", "ours/copy"],
        rows,
        names=(0, 1, 2),
    )


def small_table(found: Found) -> Table:
    """Return a table with one row for each small size and number of workers of SharedMem."""
    rows: list[list[str | Cell]] = []
    for variant, *case in found:
        floor = found.get((FLOOR, *case))
        if variant == "shared" and floor is not None:
            ours, theirs = found[(variant, *case)], found.get((rival(variant), *case))
            shown = [ours.show(1e3), floor.show(1e3), show_ratio(ours, floor), show_ratio(theirs, floor)]
            rows.append([f"{case[0]:g}", str(case[2]), *shown])
    return Table(
        "Small updates of SharedMem, beside the least that they can cost",
        "Milliseconds, of the same turns as above. *floor*: one plain copy, and then one byte over a Unix "
        "socket to each of as many processes, and one byte back.",
        ["MB", "workers", "ours", "floor", "ours/floor", "torchrl/floor"],
        rows,
        names=(0, 1),
    )


def measure_tensors(plan: Plan) -> Found:
    """Measure 5 MB to two workers in few and many tensors, with the usual limit on open files."""
    found: Found = {}
    for tensors in plan.tensors:
        limited = Case(plan.tensors_megabytes, tensors, plan.tensors_workers, descriptors=1024)
        for scheme in plan.schemes:
            say(f"tensors: {tensors} tensors, {_label(plan, scheme)}")
            cases = [(variant, limited) for variant in plan.variants_of(scheme)]
            if plan.beside and tensors > plan.many:
                cases.append((rival(scheme), replace(limited, descriptors=None)))
            with trainers(cases, plan.start_timeout) as live:
                for trainer, figure in zip(live, figures_of(live, plan), strict=True):
                    name = trainer.variant + ("" if trainer.case.descriptors else UNLIMITED)
                    found[name, plan.tensors_megabytes, tensors, plan.tensors_workers] = figure
    return found


def tensors_table(found: Found) -> Table:
    """Return a table with one row for each number of tensors and scheme."""
    rows: list[list[str | Cell]] = []
    for variant, *case in found:
        if variant not in ("shared", "process"):
            continue
        ours, theirs = found[(variant, *case)], found.get((rival(variant), *case), Figure(()))
        free = found.get((f"{rival(variant)}{UNLIMITED}", *case))
        rows.append(
            [
                LABELS[variant].partition(",")[0],
                str(case[1]),
                ours.cell(1e3),
                theirs.show(1e3),
                "not needed" if free is None else free.show(1e3),
                show_ratio(ours, theirs if free is None else free),
            ]
        )
    megabytes, workers = next(iter(found))[1], next(iter(found))[3]
    return Table(
        f"Many tensors: {megabytes:g} MB to {workers} workers",
        "Milliseconds. Every process may open 1,024 files, except in the column *torchrl, more files*.",
        ["scheme", "tensors", "ours", "torchrl", "torchrl, more files", "ours/torchrl"],
        rows,
        names=(0, 1),
    )


def measure_layers(plan: Plan) -> Found:
    """Measure transformers whose weights and biases take turns, in many tensors."""
    found: Found = {}
    for tensors in (one for one in plan.tensors if one > plan.many):
        case = Case(0.0, tensors, plan.tensors_workers, layered=True)
        for scheme in plan.schemes:
            say(f"layers: {tensors} tensors, {_label(plan, scheme)}")
            with trainers(
                [(variant, case) for variant in plan.variants_of(scheme)], plan.start_timeout
            ) as live:
                for trainer, figure in zip(live, figures_of(live, plan), strict=True):
                    found[trainer.variant, 0.0, tensors, plan.tensors_workers] = figure
    return found


def layers_table(found: Found, workers: int) -> Table:
    """Return a table with one row for each number of tensors and scheme."""
    rows: list[list[str | Cell]] = []
    for variant, *case in found:
        if variant in ("shared", "process"):
            ours, theirs = found[(variant, *case)], found.get((rival(variant), *case), Figure(()))
            name = LABELS[variant].partition(",")[0]
            rows.append([name, str(case[1]), ours.cell(1e3), theirs.show(1e3), show_ratio(ours, theirs)])
    return Table(
        f"Many tensors of a transformer, to {workers} workers",
        "Milliseconds. Layers of 12 tensors, weights and biases in turns, 1 KB each on average. Our scheme "
        "is given the module at each send, TorchRL's a TensorDict that was made once. Open files are not "
        "limited.",
        ["scheme", "tensors", "ours", "torchrl", "ours/torchrl"],
        rows,
        names=(0, 1),
    )


StallFigures = dict[tuple[str, str], list[Stall]]
"""Variant and what happened (``"update"`` or ``"copy"``): one entry for each time."""


def measure_stall(plan: Plan) -> StallFigures:
    """Measure the stall of one worker at the largest size, in turns."""
    found: StallFigures = {}
    case = Case(plan.largest, 16, 1)
    for scheme in plan.schemes:
        say(f"stall: {plan.largest:g} MB, {_label(plan, scheme)}")
        cases = [(variant, case) for variant in plan.variants_of(scheme)]
        with trainers(cases, plan.start_timeout) as live:
            for name, method in (("copy", "control"), ("update", "stall")):
                results = in_turns(live, method, plan.repeats, timeout=plan.timeout, budget=plan.budget)
                found |= {(one.variant, name): stalls for one, stalls in zip(live, results, strict=True)}
    return found


def figure(stalls: list[Stall], what: str) -> Figure:
    """Return the figure of one attribute, of all stalls that have it."""
    values = [getattr(stall, what) for stall in stalls]
    return Figure(tuple(value for value in values if value is not None), "not known")


def stall_table(found: StallFigures, megabytes: float) -> Table:
    """Return a table with one row for each variant."""
    rows: list[list[str | Cell]] = []
    for variant in dict.fromkeys(variant for variant, _ in found):
        update, copy = found.get((variant, "update"), []), found.get((variant, "copy"), [])
        rows.append(
            [
                LABELS[variant],
                figure(update, "usual").show(1e6, 1),
                figure(update, "switch").cell(1e3, 3),
                figure(update, "reported").cell(1e3, 3),
                figure(update, "longest").cell(1e3, 3),
                figure(copy, "longest").show(1e3, 3),
            ]
        )
    return Table(
        f"A worker that computes while {megabytes:g} MB in 16 tensors arrive",
        "Time from the start of one forward pass to the next. *usual*: microseconds, without an "
        "update. The other columns show how many milliseconds longer a pass takes. *at the switch*: "
        "the pass in which the version changes. *SyncReport*: the stall that the report states. "
        "*longest in update*: the longest pass between the call of send() and its return. "
        "*longest in a copy*: the longest pass while the trainer makes a plain copy and sends "
        "nothing, which shows the cost of sharing the cores.",
        ["scheme", "usual us", "at the switch", "SyncReport", "longest in update", "longest in a copy"],
        rows,
    )


PARTS = ("sync", "tensors", "stall", "memory")
_MANY = 5000  # tensors for which a target is set


@dataclass
class Results:
    """The figures of one run.

    Attributes:
        largest: size in MB at which stall and memory were measured.
    """

    largest: float
    sync: Found = field(default_factory=dict)
    tensors: Found = field(default_factory=dict)
    layers: Found = field(default_factory=dict)
    stall: StallFigures = field(default_factory=dict)
    memory: list[Memory] = field(default_factory=list)


def add_options(known: argparse.ArgumentParser) -> None:
    known.add_argument("--sizes", type=sizes, metavar="MB,MB", help="default: 1,100,1000")
    known.add_argument("--tensors", type=numbers, metavar="N,N", help="default: 16,1000,5000")
    known.add_argument("--workers", type=numbers, metavar="N,N", help="default: 1,2,4,8")
    known.add_argument(
        "--scheme", action="append", dest="schemes", choices=Plan().schemes, help="default: both"
    )
    known.add_argument("--repeats", type=int, help="default: 10; ten times that up to 10 MB")
    known.add_argument("--timeout", type=float, help="seconds for one answer of a trainer; default: 60")
    known.add_argument("--only", action="append", choices=PARTS, help="may be given several times")


def facts(options: argparse.Namespace) -> list[str]:
    return machine(["torch", "tensordict", *([] if options.figures else ["torchrl"])])


def tables(options: argparse.Namespace) -> Iterator[Table]:
    quick = {"sizes": (1.0,), "tensors": (16,), "workers": (1,), "repeats": 2}
    quick |= {"tensors_workers": 1, "timeout": 40.0}
    names = ("sizes", "tensors", "workers", "schemes", "repeats", "timeout")
    plan = Plan(**chosen(options, names, quick), beside=options.figures is None)
    parts, results = options.only or PARTS, Results(plan.largest)
    if "sync" in parts:
        results.sync = measure_sync(plan)
        yield sync_table(results.sync)
        if any(key[0] == FLOOR for key in results.sync):
            yield small_table(results.sync)
    if "tensors" in parts:
        results.tensors = measure_tensors(plan)
        yield tensors_table(results.tensors)
        results.layers = measure_layers(plan)
        if results.layers:
            yield layers_table(results.layers, plan.tensors_workers)
    if "stall" in parts:
        results.stall = measure_stall(plan)
        yield stall_table(results.stall, plan.largest)
    if "memory" in parts:
        variants = [variant for scheme in plan.schemes for variant in plan.variants_of(scheme)]
        case, seconds = Case(plan.largest, 16, max(plan.workers)), plan.timeout
        memory = measure_memory(variants, case, timeout=seconds, start_timeout=plan.start_timeout)
        results.memory = list(memory)
        yield memory_table(results.memory)
    yield targets_table(_targets(results))


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
        if memory.variant == "shared" and memory.total is not None:
            template = "SharedMem, memory at {size} MB, {workers}, of what is allowed"
            workers = count_workers(memory.processes - 1)
            yield target(template, memory.total / memory.allowed, size=size, workers=workers)
    for count in (1, 2, 4, 8):
        workers = count_workers(count)
        reached = at("shared", "torchrl-shared", 1.0, count)
        yield target("SharedMem, 1 MB, {workers}, of torchrl's time", reached, workers=workers)
        yield target(
            "SharedMem, 1 MB, {workers}, of the floor", at("shared", FLOOR, 1.0, count), workers=workers
        )
    yield from _small(sync)
    reached = at("process", "torchrl-process", 1000.0, 4)
    yield target("MultiProcess, 1 GB, 4 workers, of torchrl's time", reached)
    yield from _many_tensors(results.tensors)
    layers = (one.median for key, one in results.layers.items() if key[0] == "shared" and key[2] == _MANY)
    seconds = next(layers, None)
    reached = None if seconds is None else seconds * 1e3
    yield target("SharedMem, {tensors:,} tensors of a transformer, ms", reached, tensors=_MANY)


def _small(sync: Found) -> Iterator[Target]:
    """Compare small updates with what they may take, and what one more worker may add."""
    medians = {key[3]: one.median for key, one in sync.items() if key[:2] == ("shared", 1.0) and one.median}
    one = medians.get(1)
    yield target("SharedMem, 1 MB, 1 worker, ms", None if one is None else one * 1e3)
    fewest, most = min(medians, default=0), max(medians, default=0)
    growth = (medians[most] - medians[fewest]) / (most - fewest) * 1e3 if most > fewest else None
    yield target("SharedMem, 1 MB, growth per worker, ms", growth)


def _flat(sync: Found) -> float | None:
    medians = [f.median for key, f in sync.items() if key[:2] == ("shared", 1000.0) and f.median is not None]
    return max(medians) / min(medians) if len(medians) > 1 else None


def _many_tensors(found: Found) -> Iterator[Target]:
    """Compare both schemes with TorchRL's SharedMem, without the limit on files if it needs that."""
    of_many = {key[0]: figure for key, figure in found.items() if key[2] == _MANY}
    theirs = of_many.get(f"torchrl-shared{UNLIMITED}", of_many.get("torchrl-shared"))
    for variant, scheme in (("shared", "SharedMem"), ("process", "MultiProcess")):
        reached = ratio(of_many.get(variant), theirs)
        yield target(
            "{scheme}, {tensors:,} tensors, of torchrl's SharedMem", reached, scheme=scheme, tensors=_MANY
        )
