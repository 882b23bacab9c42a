"""Time until all workers have applied an update, beside one plain copy of the same weights."""

from __future__ import annotations

from collections.abc import Sequence

from benchmarks.groups import Group, groups, interleave
from benchmarks.plan import Plan
from benchmarks.report import Figure, Table, show_ratio
from benchmarks.sender import Case
from benchmarks.sides import COPY, LABELS

__all__ = ["Key", "figures_of", "measure_sync", "measure_tensors", "sync_table", "tensors_table"]

Key = tuple[str, float, int, int]
"""Side, megabytes, tensors, workers."""

UNLIMITED = "+fd"
"""Marks a side that runs without the limit on descriptors, because it cannot run with it."""


def figures_of(sides: Sequence[Group], plan: Plan, order: str = "update") -> list[Figure]:
    """One figure for each side, taken in turns."""
    repeats = plan.repeats_for(sides[0].case.megabytes)
    results = interleave(sides, order, repeats, timeout=plan.timeout, budget=plan.budget)
    return [Figure(tuple(values), group.failure) for group, values in zip(sides, results, strict=True)]


def measure_sync(plan: Plan) -> dict[Key, Figure]:
    """All sizes and numbers of workers, 16 tensors."""
    found: dict[Key, Figure] = {}
    for megabytes in plan.sizes:
        for workers in plan.workers:
            case = Case(megabytes, 16, workers)
            for pair in plan.pairs:
                plan.say(f"sync: {megabytes:g} MB to {workers} workers, {LABELS[pair[0]]} and torchrl")
                with groups([(side, case) for side in (*pair, COPY)], plan.start_timeout) as sides:
                    for group, figure in zip(sides, figures_of(sides, plan), strict=True):
                        name = f"{COPY}-{pair[0]}" if group.side == COPY else group.side
                        found[name, megabytes, 16, workers] = figure
    return found


def sync_table(found: dict[Key, Figure]) -> Table:
    """One row for each size, number of workers and scheme."""
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
    """5 MB to two workers in few and in many tensors, with the usual limit on open files."""
    found: dict[Key, Figure] = {}
    for tensors in plan.tensors:
        limited = Case(plan.tensors_megabytes, tensors, plan.tensors_workers, descriptors=1024)
        free = Case(plan.tensors_megabytes, tensors, plan.tensors_workers)
        for pair in plan.pairs:
            plan.say(f"tensors: {tensors} tensors, {LABELS[pair[0]]} and torchrl")
            cases = [(pair[0], limited), (pair[1], limited)]
            cases += [(pair[1], free)] if tensors > plan.many else []
            with groups(cases, plan.start_timeout) as sides:
                for group, figure in zip(sides, figures_of(sides, plan), strict=True):
                    name = group.side + ("" if group.case.descriptors else UNLIMITED)
                    found[name, plan.tensors_megabytes, tensors, plan.tensors_workers] = figure
    return found


def tensors_table(found: dict[Key, Figure]) -> Table:
    """One row for each number of tensors and scheme."""
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
                "as before" if free is None else free.show(1e3),
                show_ratio(ours, theirs if free is None else free),
            ]
        )
    megabytes, workers = next(iter(found))[1], next(iter(found))[3]
    return Table(
        f"Many tensors: {megabytes:g} MB to {workers} workers",
        "Milliseconds; every process may open 1,024 files, except in the column that says otherwise.",
        ["scheme", "tensors", "ours", "torchrl", "torchrl, more files", "ours/torchrl"],
        rows,
    )
