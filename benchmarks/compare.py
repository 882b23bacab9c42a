"""Compare this library's schemes with TorchRL's, in one run and in turns."""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from benchmarks.memory import Memory, measure_memory, memory_table
from benchmarks.options import Options
from benchmarks.processes import in_turns
from benchmarks.report import Figure, Table, machine, ratio, say, show_ratio
from benchmarks.targets import Target, count_workers, target, targets_table
from benchmarks.trainers import COPY, FLOOR, LABELS, Stall, Trainer, rival, trainers
from benchmarks.workers import Case

QUICK = "1 MB, one worker, 2 repeats"

Found = dict[tuple[str, Case], dict[str, Figure]]
"""By scheme and case, one for each variant that was measured beside the scheme."""

_SMALL = 10.0
"""Megabytes up to which waking the processes takes a large part of an update, and copies need no threads."""

_REST = 0.01
"""Seconds before an update of more; threads that copied for the one before no longer spin then."""

UNLIMITED = "+fd"
"""Marks a variant that runs without the limit on descriptors, because it cannot run with it."""

SCHEMES = {"shared": "SharedMem", "process": "MultiProcess"}
MEGABYTES = 5.0  # of many tensors
_LIMIT = 1024  # open files of a process, with many tensors
_LAYERED = 200  # tensors from which on transformers are measured, and TorchRL without a limit on open files
_MANY = 5000  # tensors for which a target is set


@dataclass(frozen=True)
class Plan:
    """The extent of one run.

    Attributes:
        schemes: our schemes.
        beside: whether TorchRL's schemes and plain copies are measured too.
        repeats: turns of each variant at the largest sizes; small updates get ten times as many.
        timeout: seconds for one answer of a trainer.
        start_timeout: seconds until all processes of a trainer are connected; each imports torch first.
        budget: seconds after which a slow variant gets no further turns.
    """

    schemes: Sequence[str]
    beside: bool
    repeats: int
    timeout: float = 60.0
    start_timeout: float = 120.0
    budget: float = 30.0

    def variants_of(self, scheme: str) -> tuple[str, ...]:
        """Return our scheme and TorchRL's of the same kind, or ours alone."""
        return (scheme, rival(scheme)) if self.beside else (scheme,)


def figures_of(live: Sequence[Trainer], plan: Plan) -> list[Figure]:
    """Measure the updates of each trainer, in turns."""
    small = live[0].case.megabytes <= _SMALL
    repeats, rest = (10 * plan.repeats, 0.0) if small else (plan.repeats, _REST)
    results = in_turns(live, "update", repeats, timeout=plan.timeout, budget=plan.budget, rest=rest)
    return [Figure(values, trainer.failure) for trainer, values in zip(live, results, strict=True)]


def beside(found: Found, scheme: str, case: Case, variant: str = "") -> Figure:
    """Return what was measured of a variant beside a scheme, by default of TorchRL's."""
    return found.get((scheme.partition("-")[0], case), {}).get(variant or rival(scheme), Figure())


def of_other(found: Found, scheme: str, case: Case, other: str = "") -> float | None:
    """Return the ratio of a scheme to the ``other`` variant, by default to TorchRL's."""
    return ratio(found.get((scheme, case), {}).get(scheme), beside(found, scheme, case, other))


def sync_table(title: str, labels: Mapping[str, str], found: Found, *, tensors: bool = False) -> Table:
    """Return a table with one row for each scheme and case, beside TorchRL's scheme and a plain copy."""
    rows: list[list[object]] = []
    for (scheme, case), figures in found.items():
        ours = figures[scheme]
        theirs, copy = (beside(found, scheme, case, name) for name in ("", COPY))
        sizes = [f"{case.megabytes:g}", *[case.tensors] * tensors, case.workers]
        shown = [ours.cell(1e3), theirs.show(1e3), copy.show(1e3)]
        rows.append([labels[scheme], *sizes, *shown, show_ratio(ours, theirs), show_ratio(ours, copy)])
    head = ["scheme", "MB", *["tensors"] * tensors, "workers"]
    return Table(
        title,
        "Milliseconds from the call of send() to its return, when all workers have applied the update: "
        "median (min .. max).",
        [*head, "ours", "torchrl", "plain copy", "ours/torchrl", "ours/copy"],
        rows,
        names=range(len(head)),
    )


def _measure(plan: Plan, scheme: str, case: Case, more: Sequence[tuple[str, Case]] = ()) -> dict[str, Figure]:
    """Measure a scheme in turns with TorchRL's, and with ``more`` variants and cases."""
    say(f"{SCHEMES[scheme]}: {case.size} to {case.workers} workers")
    started = [(variant, case) for variant in plan.variants_of(scheme)] + [*more] * plan.beside
    with trainers(started, plan.start_timeout) as live:
        figures = figures_of(live, plan)
    return {
        trainer.variant + UNLIMITED * (trainer.case != case): figure
        for trainer, figure in zip(live, figures, strict=True)
    }


def measure_sync(plan: Plan, sizes: Sequence[float], workers: Sequence[int]) -> Found:
    """Measure all sizes and numbers of workers, with 16 tensors."""
    found: Found = {}
    for case in (Case(megabytes, 16, count) for megabytes in sizes for count in workers):
        for scheme in plan.schemes:
            more = [COPY, *[FLOOR] * (scheme == "shared" and case.megabytes <= _SMALL)]
            found[scheme, case] = _measure(plan, scheme, case, [(variant, case) for variant in more])
    return found


def small_table(found: Found) -> Table:
    """Return a table with one row for each small size and number of workers of SharedMem."""
    rows = []
    for (scheme, case), figures in found.items():
        if FLOOR in figures:
            ours, theirs, floor = (figures[name] for name in (scheme, rival(scheme), FLOOR))
            shown = [ours.show(1e3), floor.show(1e3), show_ratio(ours, floor), show_ratio(theirs, floor)]
            rows.append([f"{case.megabytes:g}", case.workers, *shown])
    return Table(
        "Small updates of SharedMem, beside the least that they can cost",
        "Milliseconds, of the same turns as above. *floor*: one plain copy, and then one byte over a Unix "
        "socket to each of as many processes, and one byte back.",
        ["MB", "workers", "ours", "floor", "ours/floor", "torchrl/floor"],
        rows,
        names=(0, 1),
    )


def measure_tensors(plan: Plan, counts: Sequence[int], workers: int) -> Found:
    """Measure few and many tensors of 5 MB, with the usual limit on open files."""
    found: Found = {}
    for case in (Case(MEGABYTES, tensors, workers, descriptors=_LIMIT) for tensors in counts):
        for scheme in plan.schemes:
            more = [(rival(scheme), replace(case, descriptors=None))] * (case.tensors > _LAYERED)
            found[scheme, case] = _measure(plan, scheme, case, more)
    return found


def tensors_table(found: Found, workers: int) -> Table:
    """Return a table with one row for each number of tensors and scheme."""
    rows = []
    for (scheme, case), figures in found.items():
        ours, theirs = figures[scheme], figures.get(rival(scheme), Figure())
        free = figures.get(rival(scheme) + UNLIMITED)
        shown = [ours.cell(1e3), theirs.show(1e3), "not needed" if free is None else free.show(1e3)]
        rows.append([SCHEMES[scheme], case.tensors, *shown, show_ratio(ours, free or theirs)])
    return Table(
        f"Many tensors: {MEGABYTES:g} MB to {workers} workers",
        "Milliseconds. Every process may open 1,024 files, except in the column *torchrl, more files*.",
        ["scheme", "tensors", "ours", "torchrl", "torchrl, more files", "ours/torchrl"],
        rows,
        names=(0, 1),
    )


def measure_layers(plan: Plan, counts: Sequence[int], workers: int) -> Found:
    """Measure transformers whose weights and biases take turns, in many tensors."""
    cases = [Case(0.0, tensors, workers, layered=True) for tensors in counts if tensors > _LAYERED]
    return {(scheme, case): _measure(plan, scheme, case) for case in cases for scheme in plan.schemes}


def layers_table(found: Found, workers: int) -> Table:
    """Return a table with one row for each number of tensors and scheme."""
    rows = []
    for (scheme, case), figures in found.items():
        ours, theirs = figures[scheme], figures.get(rival(scheme), Figure())
        shown = [ours.cell(1e3), theirs.show(1e3), show_ratio(ours, theirs)]
        rows.append([SCHEMES[scheme], case.tensors, *shown])
    return Table(
        f"Many tensors of a transformer, to {workers} workers",
        "Milliseconds. Layers of 12 tensors, weights and biases in turns, 1 KB each on average. Our scheme "
        "is given the module at each send, TorchRL's a TensorDict that was made once. Open files are not "
        "limited.",
        ["scheme", "tensors", "ours", "torchrl", "ours/torchrl"],
        rows,
        names=(0, 1),
    )


StallFigures = dict[tuple[str, str], dict[str, Figure]]
"""By variant and what happened (``"update"`` or ``"copy"``): a figure of each attribute of the stalls."""


def measure_stall(plan: Plan, megabytes: float) -> StallFigures:
    """Measure the stall of one worker, in turns."""
    found: StallFigures = {}
    case = Case(megabytes, 16, 1)
    for scheme in plan.schemes:
        say(f"stall: {megabytes:g} MB, {SCHEMES[scheme]}")
        cases = [(variant, case) for variant in plan.variants_of(scheme)]
        with trainers(cases, plan.start_timeout) as live:
            for name, method in (("copy", "control"), ("update", "stall")):
                results = in_turns(live, method, plan.repeats, timeout=plan.timeout, budget=plan.budget)
                for one, stalls in zip(live, results, strict=True):
                    found[one.variant, name] = _stall_figures(stalls, one.failure or "not known")
    return found


def _stall_figures(stalls: list[Stall], failure: str) -> dict[str, Figure]:
    """Return the figure of each attribute, of all stalls that have it."""
    found = {}
    for what in ("usual", "longest", "switch", "reported"):
        values = [value for stall in stalls if (value := getattr(stall, what)) is not None]
        found[what] = Figure(values, None if values else failure)
    return found


def stall_table(found: StallFigures, megabytes: float) -> Table:
    """Return a table with one row for each variant."""
    rows = []
    for variant in dict.fromkeys(variant for variant, _ in found):
        update, copy = found[variant, "update"], found[variant, "copy"]
        stalled = [update[what].cell(1e3, 3) for what in ("switch", "reported", "longest")]
        usual, copied = update["usual"].show(1e6, 1), copy["longest"].show(1e3, 3)
        rows.append([LABELS[variant], usual, *stalled, copied])
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


def add_options(known: Options) -> None:
    known.add("--sizes", (1.0, 100.0, 1000.0), "MB", quick=(1.0,))
    known.add("--tensors", (16, 1000, 5000), "numbers of tensors", quick=(16,))
    known.add("--workers", (1, 2, 4, 8), "numbers of workers", quick=(1,))
    known.add_choice("--scheme", "schemes", SCHEMES)
    known.add("--repeats", 10, "ten times that up to 10 MB", quick=2)
    known.add("--timeout", 60.0, "seconds for one answer of a trainer", quick=40.0)
    known.add_choice("--only", "only", PARTS)


def facts(options: argparse.Namespace) -> list[str]:
    return machine(*["torchrl"] * options.beside)


def tables(options: argparse.Namespace) -> Iterator[Table]:
    plan = Plan(options.schemes, options.beside, options.repeats, options.timeout)
    largest, few = max(options.sizes), 1 if options.quick else 2
    found: Found = {}
    stalls: StallFigures = {}
    memory: list[Memory] = []
    if "sync" in options.only:
        found |= measure_sync(plan, options.sizes, options.workers)
        yield sync_table("Synchronous update, 16 tensors", SCHEMES, found)
        if any(FLOOR in figures for figures in found.values()):
            yield small_table(found)
    if "tensors" in options.only:
        tensors = measure_tensors(plan, options.tensors, few)
        yield tensors_table(tensors, few)
        layers = measure_layers(plan, options.tensors, few)
        if layers:
            yield layers_table(layers, few)
        found |= tensors | layers
    if "stall" in options.only:
        stalls = measure_stall(plan, largest)
        yield stall_table(stalls, largest)
    if "memory" in options.only:
        variants = [variant for scheme in plan.schemes for variant in plan.variants_of(scheme)]
        case = Case(largest, 16, max(options.workers))
        memory += measure_memory(variants, case, timeout=plan.timeout, start_timeout=plan.start_timeout)
        yield memory_table(memory)
    size = f"{largest:g}"
    yield targets_table(
        [
            *_large(found),
            *_stall_targets(stalls.get(("shared", "update"), {}), size),
            *_memory_targets(memory, size),
            *_small(found),
            target(
                "MultiProcess, 1 GB, 4 workers, of torchrl's time",
                of_other(found, "process", Case(1000.0, 16, 4)),
            ),
            *_many_tensors(found, few),
        ]
    )


def _by_workers(found: Found, megabytes: float) -> dict[int, float]:
    """Return the seconds that SharedMem reached with 16 tensors, by number of workers."""
    reached = {
        case.workers: figures[scheme].reached
        for (scheme, case), figures in found.items()
        if scheme == "shared" and case == Case(megabytes, 16, case.workers)
    }
    return {workers: seconds for workers, seconds in reached.items() if seconds is not None}


def _large(found: Found) -> Iterator[Target]:
    case = Case(1000.0, 16, 4)
    yield target("SharedMem, 1 GB, 4 workers, of torchrl's time", of_other(found, "shared", case))
    yield target("SharedMem, 1 GB, 4 workers, of one plain copy", of_other(found, "shared", case, COPY))
    seconds = _by_workers(found, 1000.0).values()
    flat = max(seconds) / min(seconds) if len(seconds) > 1 else None
    yield target("SharedMem, 1 GB, slowest / fastest of 1 to 8 workers", flat)


def _stall_targets(stalls: dict[str, Figure], size: str) -> Iterator[Target]:
    template = "SharedMem, {size} MB, stall {where}, ms, {which}"
    for what, where in (("switch", "at the switch, seen by the worker"), ("reported", "in the SyncReport")):
        milliseconds = stalls.get(what, Figure()).times(1e3)
        longest = max(milliseconds.values, default=milliseconds.reached)
        yield target(template, milliseconds.reached, size=size, where=where, which="median")
        yield target(template, longest, size=size, where=where, which="longest")


def _memory_targets(found: list[Memory], size: str) -> Iterator[Target]:
    for memory in found:
        if memory.variant == "shared":
            template = "SharedMem, memory at {size} MB, {workers}, of what is allowed"
            reached, workers = ratio(memory.total, Figure((memory.allowed,))), memory.processes - 1
            yield target(template, reached, size=size, workers=count_workers(workers))


def _small(found: Found) -> Iterator[Target]:
    """Compare small updates with what they may take, and what one more worker may add."""
    for count in (1, 2, 4, 8):
        case, workers = Case(1.0, 16, count), count_workers(count)
        reached = of_other(found, "shared", case)
        yield target("SharedMem, 1 MB, {workers}, of torchrl's time", reached, workers=workers)
        reached = of_other(found, "shared", case, FLOOR)
        yield target("SharedMem, 1 MB, {workers}, of the floor", reached, workers=workers)
    milliseconds = {workers: 1e3 * seconds for workers, seconds in _by_workers(found, 1.0).items()}
    yield target("SharedMem, 1 MB, 1 worker, ms", milliseconds.get(1))
    fewest, most = min(milliseconds, default=0), max(milliseconds, default=0)
    growth = (milliseconds[most] - milliseconds[fewest]) / (most - fewest) if most > fewest else None
    yield target("SharedMem, 1 MB, growth per worker, ms", growth)


def _many_tensors(found: Found, workers: int) -> Iterator[Target]:
    """Compare both schemes with TorchRL's SharedMem without the limit on files, which it needs."""
    case = Case(MEGABYTES, _MANY, workers, descriptors=_LIMIT)
    theirs = found.get(("shared", case), {}).get(rival("shared") + UNLIMITED)
    for scheme, name in SCHEMES.items():
        reached = ratio(found.get((scheme, case), {}).get(scheme), theirs)
        template = "{scheme}, {tensors:,} tensors, of torchrl's SharedMem"
        yield target(template, reached, scheme=name, tensors=_MANY)
    layers = found.get(("shared", Case(0.0, _MANY, workers, layered=True)), {}).get("shared", Figure())
    template = "SharedMem, {tensors:,} tensors of a transformer, ms"
    yield target(template, layers.times(1e3).reached, tensors=_MANY)
