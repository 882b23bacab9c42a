"""Compare the schemes that leave the machine with TorchRL's, in one run and in turns.

All processes are on this machine.
"""

from __future__ import annotations

import argparse
import contextlib
import os
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

from benchmarks.compare import MEGABYTES, Found, Plan, figures_of, of_other, sync_table
from benchmarks.options import Options
from benchmarks.report import Figure, Table, machine, ratio, say
from benchmarks.targets import Target, count_workers, target, targets_table
from benchmarks.trainers import CLUSTER, COPY, RAY_ALONE, preload, rival, trainers
from benchmarks.workers import Case

QUICK = "Distributed, 1 MB, one worker, 2 repeats"

_MANY = 5000
_ROUNDS = 3  # times that the processes of a variant are started
_BUDGET = 20.0


def measure_cluster(plan: Plan, rounds: int, cases: Sequence[Case], ray: str | None) -> Found:
    """Measure each scheme in turns with its rival and a copy, A B C A B C, each time with new processes.

    Only the processes of one variant live at a time: TorchRL's idle workers look for news without pause, and
    would take the cores from ours.

    Args:
        plan: the extent of each round; its schemes are names of :data:`CLUSTER`.
        rounds: number of times that the processes of each variant are started.
        cases: models and workers.
        ray: address of the running Ray; None if no scheme needs it.
    """
    found: Found = {}
    for case in cases:
        for scheme in plan.schemes:
            say(f"{CLUSTER[scheme]}: {case.size} to {case.workers} workers")
            # The variants of "ray" are compared with what was measured beside "ray".
            alone = "-" in scheme or not plan.beside
            figures = found.setdefault((scheme, case), {})
            for variant in rounds * ((scheme,) if alone else (scheme, rival(scheme), COPY)):
                started = replace(case, start="forkserver", ray=_ray_of(variant, ray))
                with trainers([(variant, started)], plan.start_timeout) as live:
                    figure = figures_of(live, plan)[0]
                figures[variant] = figures.get(variant, Figure()).with_more(figure)
    return found


def _ray_of(variant: str, address: str | None) -> str | None:
    return address if "ray" in variant.removeprefix("torchrl-").split("-") else None


def _targets(options: argparse.Namespace, found: Found, many: Case) -> Iterator[Target]:
    """Yield the targets; ``many`` is the case with many tensors."""
    names = [scheme for scheme in ("distributed", "rpc", "ray") if scheme in options.schemes]
    for scheme in names:
        reached = of_other(found, scheme, Case(1000.0, 16, 4))
        yield target("{scheme}, 1 GB, 4 workers, of torchrl's time", reached, scheme=CLUSTER[scheme])
    for scheme in names:
        template = "{scheme}, {tensors:,} tensors, of torchrl's time"
        yield target(template, of_other(found, scheme, many), scheme=CLUSTER[scheme], tensors=many.tensors)
    for workers in options.workers if "distributed" in options.schemes else ():
        case, named = Case(1.0, 16, workers), count_workers(workers)
        milliseconds = (_figure(found, "distributed", case) or Figure()).times(1e3)
        yield target("Distributed, 1 MB, {workers}, ms", milliseconds.reached, workers=named)
        reached = of_other(found, "distributed", case)
        yield target("Distributed, 1 MB, {workers}, of torchrl's time", reached, workers=named)
    if "distributed-sockets" in options.schemes:
        one, four = (_figure(found, "distributed-sockets", Case(1000.0, 16, hosts)) for hosts in (1, 4))
        yield target("Distributed, a host each, 1 GB, time to 4 hosts / to 1", ratio(four, one))
    yield from _object_store_targets(options, found)


def _object_store_targets(options: argparse.Namespace, found: Found) -> Iterator[Target]:
    if "ray-object-store" in options.schemes:
        template = "Ray, object store, {size}, {workers}, of torchrl's time"
        for megabytes, size in ((1.0, "1 MB"), (100.0, "100 MB"), (1000.0, "1 GB")):
            for workers in options.workers:
                reached = of_other(found, "ray-object-store", Case(megabytes, 16, workers))
                yield target(template, reached, size=size, workers=count_workers(workers))
    if "ray-object-store-apart" in options.schemes:
        template = "Ray, object store, a host each, 1 GB, {workers}, of Ray's put and get alone"
        for workers in options.workers:
            case = Case(1000.0, 16, workers)
            ours, bare = (_figure(found, scheme, case) for scheme in ("ray-object-store-apart", RAY_ALONE))
            yield target(template, ratio(ours, bare), workers=count_workers(workers))


def _figure(found: Found, scheme: str, case: Case) -> Figure | None:
    return found.get((scheme, case), {}).get(scheme)


PARTS = ("sync", "tensors")


def add_options(known: Options) -> None:
    known.add("--sizes", (1.0, 100.0, 1000.0), "MB", quick=(1.0,))
    known.add("--tensors", (16, 1000, 5000), "numbers of tensors", quick=(16,))
    known.add("--workers", (1, 2, 4), "numbers of workers", quick=(1,))
    known.add_choice("--scheme", "schemes", CLUSTER, quick=("distributed",))
    known.add("--repeats", 6, "ten times that up to 10 MB", quick=2)
    known.add_choice("--only", "only", PARTS)


def _uses_ray(options: argparse.Namespace) -> bool:
    return any(scheme.startswith("ray") for scheme in options.schemes)


def facts(options: argparse.Namespace) -> list[str]:
    return machine(*["torchrl"] * options.beside, *["ray"] * _uses_ray(options))


def tables(options: argparse.Namespace) -> Iterator[Table]:
    rounds, few = (1, 1) if options.quick else (_ROUNDS, 2)
    repeats = -(-options.repeats // rounds)
    plan = Plan(options.schemes, options.beside, repeats, start_timeout=60.0, budget=_BUDGET / rounds)
    # With five processes a trainer, their imports would take longer than what is measured.
    preload(options.beside, *["ray"] * _uses_ray(options))
    found: Found = {}
    with _running_ray(max(options.sizes)) if _uses_ray(options) else contextlib.nullcontext() as ray:
        if "sync" in options.only:
            cases = [Case(megabytes, 16, count) for megabytes in options.sizes for count in options.workers]
            found |= measure_cluster(plan, rounds, cases, ray)
            title = "Across processes: synchronous update, 16 tensors"
            yield sync_table(title, CLUSTER, found, tensors=True)
        if "tensors" in options.only:
            schemes = [scheme for scheme in plan.schemes if scheme != RAY_ALONE]  # it sends bytes
            cases = [Case(MEGABYTES, count, few) for count in options.tensors]
            tensors = measure_cluster(replace(plan, schemes=schemes), rounds, cases, ray)
            yield sync_table("Across processes: many tensors", CLUSTER, tensors, tensors=True)
            found |= tensors
    targets = _targets(options, found, Case(MEGABYTES, _MANY, few))
    yield targets_table(targets, "Across processes: targets")


@contextlib.contextmanager
def _running_ray(megabytes: float) -> Iterator[str]:
    """Start Ray with room for four updates of so many megabytes, and yield its address."""
    import ray

    # Its workers must find this directory before the `benchmarks` that torchrl installs.
    root = str(Path(__file__).absolute().parent.parent)
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [root, os.environ.get("PYTHONPATH")]))
    context = ray.init(
        num_cpus=1,
        include_dashboard=False,
        object_store_memory=int(max(4 * megabytes, 100) * 1e6),
        log_to_driver=False,
        logging_level="error",
    )
    try:
        yield context.address_info["gcs_address"]
    finally:
        ray.shutdown()
