"""How long an update keeps a worker that computes without pause from its next forward pass."""

from __future__ import annotations

from benchmarks.groups import Group, groups, interleave
from benchmarks.plan import Plan
from benchmarks.report import Figure, Table
from benchmarks.sender import Case, Stall
from benchmarks.sides import LABELS

__all__ = ["StallFigures", "measure_stall", "stall_table"]

StallFigures = dict[tuple[str, str], list[Stall]]
"""Side and what happened (``"update"`` or ``"copy"``): one entry for each time."""


def measure_stall(plan: Plan) -> StallFigures:
    """The largest size, one worker; in turns, as everything."""
    found: StallFigures = {}
    case = Case(plan.largest, 16, 1)
    for pair in plan.pairs:
        plan.say(f"stall: {plan.largest:g} MB, {LABELS[pair[0]]} and torchrl")
        with groups([(side, case) for side in pair], plan.start_timeout) as sides:
            for name, order in (("copy", "control"), ("update", "stall")):
                found.update(_in_turns(sides, name, order, plan))
    return found


def _in_turns(sides: list[Group], name: str, order: str, plan: Plan) -> StallFigures:
    results = interleave(sides, order, plan.repeats, timeout=plan.timeout, budget=plan.budget)
    return {(group.side, name): values for group, values in zip(sides, results, strict=True)}


def figure(stalls: list[Stall], what: str) -> Figure:
    """One attribute of each stall; those that have it."""
    values = [getattr(stall, what) for stall in stalls]
    return Figure(tuple(value for value in values if value is not None), "not known")


def stall_table(found: StallFigures, megabytes: float) -> Table:
    """One row for each side."""
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
        "Time from the start of one forward pass to the next: usual (microseconds); then how much longer "
        "(milliseconds) the one is in which the version changed, the stall in the SyncReport, the longest "
        "one between send() and its return, and the longest one while the trainer makes a plain copy and "
        "sends nothing, which is what sharing the cores costs by itself.",
        ["side", "usual us", "at the switch", "SyncReport", "longest in update", "longest in a copy"],
        rows,
    )
