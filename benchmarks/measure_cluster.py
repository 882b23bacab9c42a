"""Updates over the schemes that leave the machine, beside TorchRL's and one plain copy."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from benchmarks.groups import groups
from benchmarks.measure_sync import Key, figures_of
from benchmarks.plan import Plan
from benchmarks.report import Figure, Table, ratio, show_ratio
from benchmarks.sender import Case
from benchmarks.sides import CLUSTER, COPY, rival
from benchmarks.targets import Target

__all__ = ["Found", "cluster_table", "cluster_targets", "measure_cluster", "sync_cases", "tensors_cases"]

Found = dict[Key, Figure]

_MANY = 5000


def sync_cases(plan: Plan) -> list[tuple[float, int, int]]:
    """Megabytes, tensors and workers: all sizes and numbers of workers."""
    return [(megabytes, 16, workers) for megabytes in plan.sizes for workers in plan.workers]


def tensors_cases(plan: Plan) -> list[tuple[float, int, int]]:
    """The same: few and many tensors."""
    return [(plan.tensors_megabytes, tensors, plan.tensors_workers) for tensors in plan.tensors]


def measure_cluster(plan: Plan, cases: Iterable[tuple[float, int, int]], ray: str | None) -> Found:
    """Each scheme in turns with its rival and a copy: A B C A B C ..., each time by new processes.

    Only the processes of one side live at a time: TorchRL's idle workers look for news without pause, and
    would take the cores from ours.

    Args:
        plan: its schemes are names of :data:`CLUSTER`.
        cases: megabytes, tensors and workers.
        ray: address of the running Ray; None if no scheme needs it.
    """
    found: Found = {}
    round_plan = plan.for_one_round()
    for case in cases:
        for scheme in plan.schemes:
            megabytes, tensors, workers = case
            plan.say(f"{CLUSTER[scheme]}: {megabytes:g} MB in {tensors} tensors to {workers} workers")
            # What a variant of a scheme is compared with was measured with the scheme itself.
            sides = (scheme,) if "-" in scheme else (scheme, rival(scheme), COPY)
            for side in plan.rounds * sides:
                started = [(side, Case(*case, start="forkserver", ray=_ray_of(side, ray)))]
                with groups(started, plan.start_timeout) as live:
                    figure = figures_of(live, round_plan)[0]
                name = f"{COPY}-{scheme}" if side == COPY else side
                found[(name, *case)] = found.get((name, *case), Figure(())).with_more(figure)
    return found


def _ray_of(side: str, address: str | None) -> str | None:
    return address if "ray" in side.removeprefix("torchrl-").split("-") else None


def cluster_table(title: str, found: Found) -> Table:
    """One row for each of our sides and each case."""
    rows = []
    for side, *case in found:
        if side not in CLUSTER:
            continue
        names = (side, rival(side), f"{COPY}-{side.partition('-')[0]}")
        ours, theirs, copy = (found.get((name, *case), Figure(())) for name in names)
        rows.append(
            [
                CLUSTER[side],
                *(f"{number:g}" for number in case),
                *(figure.show(1e3) for figure in (ours, theirs, copy)),
                show_ratio(ours, theirs),
                show_ratio(ours, copy),
            ]
        )
    return Table(
        title,
        "Milliseconds from send() to its return, when all workers have applied: median (min .. max).",
        ["scheme", "MB", "tensors", "workers", "ours", "torchrl", "plain copy", "ours/torchrl", "ours/copy"],
        rows,
    )


def cluster_targets(plan: Plan, sync: Found, tensors: Found) -> Iterator[Target]:
    """What :mod:`benchmarks.cluster` has to reach."""
    main = [scheme for scheme in ("distributed", "rpc", "ray") if scheme in plan.schemes]
    for scheme in main:
        reached = _of_rival(sync, scheme, (1000.0, 16, 4))
        yield f"{CLUSTER[scheme]}, 1 GB, 4 workers, of torchrl's time", reached, 0.35
    for scheme in main:
        reached = _of_rival(tensors, scheme, (plan.tensors_megabytes, _MANY, plan.tensors_workers))
        yield f"{CLUSTER[scheme]}, {_MANY:,} tensors, of torchrl's time", reached, 0.01
    for workers in plan.workers if "distributed" in plan.schemes else ():
        figure = sync.get(("distributed", 1.0, 16, workers), Figure(()))
        name = f"Distributed, 1 MB, {workers} workers"
        yield f"{name}, ms", figure.times(1e3).median, 2.0
        yield f"{name}, of torchrl's time", _of_rival(sync, "distributed", (1.0, 16, workers)), 0.25
    if "distributed-sockets" in plan.schemes:
        one, four = (sync.get(("distributed-sockets", 1000.0, 16, hosts)) for hosts in (1, 4))
        yield "Distributed, a host each, 1 GB, time to 4 hosts / to 1", ratio(four, one), 2.0


def _of_rival(found: Found, scheme: str, case: tuple[float, int, int]) -> float | None:
    return ratio(found.get((scheme, *case)), found.get((rival(scheme), *case)))
