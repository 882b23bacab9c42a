"""Compare the schemes that leave the machine with TorchRL's, in one run and in turns.

All processes are on this machine.
"""

from __future__ import annotations

import argparse
import contextlib
import os
from collections.abc import Iterable, Iterator
from dataclasses import replace
from pathlib import Path

import torch.multiprocessing as mp

from benchmarks.compare import Found, Plan, beside, figures_of
from benchmarks.report import Figure, Table, chosen, machine, numbers, ratio, say, sizes
from benchmarks.targets import Target, count_workers, target, targets_table
from benchmarks.trainers import CLUSTER, COPY, RAY_ALONE, Case, rival, trainers

QUICK = "Distributed, 1 MB, one worker, 2 repeats"

_MANY = 5000


def sync_cases(plan: Plan) -> list[tuple[float, int, int]]:
    """Return megabytes, tensors and workers for all sizes and numbers of workers."""
    return [(megabytes, 16, workers) for megabytes in plan.sizes for workers in plan.workers]


def tensors_cases(plan: Plan) -> list[tuple[float, int, int]]:
    """Return megabytes, tensors and workers for few and many tensors."""
    return [(plan.tensors_megabytes, tensors, plan.tensors_workers) for tensors in plan.tensors]


def measure_cluster(plan: Plan, cases: Iterable[tuple[float, int, int]], ray: str | None) -> Found:
    """Measure each scheme in turns with its rival and a copy, A B C A B C, each time with new processes.

    Only the processes of one variant live at a time: TorchRL's idle workers look for news without pause, and
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
            say(f"{CLUSTER[scheme]}: {megabytes:g} MB in {tensors} tensors to {workers} workers")
            # The variants of "ray" are compared with what was measured beside "ray".
            alone = "-" in scheme or not plan.beside
            for variant in plan.rounds * ((scheme,) if alone else (scheme, rival(scheme), COPY)):
                started = [(variant, Case(*case, start="forkserver", ray=_ray_of(variant, ray)))]
                with trainers(started, plan.start_timeout) as live:
                    figure = figures_of(live, round_plan)[0]
                name = f"{COPY}-{scheme}" if variant == COPY else variant
                found[(name, *case)] = found.get((name, *case), Figure(())).with_more(figure)
    return found


def _ray_of(variant: str, address: str | None) -> str | None:
    return address if "ray" in variant.removeprefix("torchrl-").split("-") else None


def cluster_table(title: str, found: Found) -> Table:
    """Return a table with one row for each of our schemes and each case."""
    rows = [
        [CLUSTER[variant], *(f"{number:g}" for number in case), *beside(found, variant, case)]
        for variant, *case in found
        if variant in CLUSTER
    ]
    return Table(
        title,
        "Milliseconds from the call of send() to its return, when all workers have applied the update: "
        "median (min .. max).",
        ["scheme", "MB", "tensors", "workers", "ours", "torchrl", "plain copy", "ours/torchrl", "ours/copy"],
        rows,
        names=(0, 1, 2, 3),
    )


def _targets(plan: Plan, sync: Found, tensors: Found) -> Iterator[Target]:
    names = [scheme for scheme in ("distributed", "rpc", "ray") if scheme in plan.schemes]
    for scheme in names:
        reached = _of_rival(sync, scheme, (1000.0, 16, 4))
        yield target("{scheme}, 1 GB, 4 workers, of torchrl's time", reached, scheme=CLUSTER[scheme])
    for scheme in names:
        reached = _of_rival(tensors, scheme, (plan.tensors_megabytes, _MANY, plan.tensors_workers))
        template = "{scheme}, {tensors:,} tensors, of torchrl's time"
        yield target(template, reached, scheme=CLUSTER[scheme], tensors=_MANY)
    for workers in plan.workers if "distributed" in plan.schemes else ():
        figure = sync.get(("distributed", 1.0, 16, workers), Figure(()))
        template, named = "Distributed, 1 MB, {workers}, ", count_workers(workers)
        yield target(template + "ms", figure.times(1e3).median, workers=named)
        reached = _of_rival(sync, "distributed", (1.0, 16, workers))
        yield target(template + "of torchrl's time", reached, workers=named)
    if "distributed-sockets" in plan.schemes:
        one, four = (sync.get(("distributed-sockets", 1000.0, 16, hosts)) for hosts in (1, 4))
        yield target("Distributed, a host each, 1 GB, time to 4 hosts / to 1", ratio(four, one))
    yield from _object_store_targets(plan, sync)


def _object_store_targets(plan: Plan, sync: Found) -> Iterator[Target]:
    if "ray-object-store" in plan.schemes:
        template = "Ray, object store, {size}, {workers}, of torchrl's time"
        for megabytes, size in ((1.0, "1 MB"), (100.0, "100 MB"), (1000.0, "1 GB")):
            for workers in plan.workers:
                reached = _of_rival(sync, "ray-object-store", (megabytes, 16, workers))
                yield target(template, reached, size=size, workers=count_workers(workers))
    if "ray-object-store-apart" in plan.schemes:
        template = "Ray, object store, a host each, 1 GB, {workers}, of Ray's put and get alone"
        for workers in plan.workers:
            ours, bare = (
                sync.get((variant, 1000.0, 16, workers)) for variant in ("ray-object-store-apart", RAY_ALONE)
            )
            yield target(template, ratio(ours, bare), workers=count_workers(workers))


def _of_rival(found: Found, scheme: str, case: tuple[float, int, int]) -> float | None:
    return ratio(found.get((scheme, *case)), found.get((rival(scheme), *case)))


PARTS = ("sync", "tensors")


def add_options(known: argparse.ArgumentParser) -> None:
    known.add_argument("--sizes", type=sizes, metavar="MB,MB", help="default: 1,100,1000")
    known.add_argument("--tensors", type=numbers, metavar="N,N", help="default: 16,1000,5000")
    known.add_argument("--workers", type=numbers, metavar="N,N", help="default: 1,2,4")
    known.add_argument("--scheme", action="append", dest="schemes", choices=CLUSTER, help="default: all")
    known.add_argument("--repeats", type=int, help="default: 6; ten times that up to 10 MB")
    known.add_argument("--only", action="append", choices=PARTS, help="may be given several times")


def _plan(options: argparse.Namespace) -> Plan:
    whole = {"schemes": tuple(CLUSTER), "workers": (1, 2, 4), "repeats": 6, "rounds": 3}
    quick = {"schemes": ("distributed",), "sizes": (1.0,), "tensors": (16,), "workers": (1,)}
    quick |= {"tensors_workers": 1, "repeats": 2, "rounds": 1}
    given = chosen(options, ("sizes", "tensors", "workers", "schemes", "repeats"), quick)
    return Plan(**{**whole, **given}, budget=20.0, start_timeout=60.0, beside=options.figures is None)


def _uses_ray(plan: Plan) -> bool:
    return any(scheme.startswith("ray") for scheme in plan.schemes)


def facts(options: argparse.Namespace) -> list[str]:
    plan = _plan(options)
    return machine(["torch", "tensordict", *["torchrl"] * plan.beside, *["ray"] * _uses_ray(plan)])


def tables(options: argparse.Namespace) -> Iterator[Table]:
    plan, parts = _plan(options), options.only or PARTS
    # Processes of an RPC world that end together warn that the others have.
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
    # With five processes a trainer, their imports would take longer than what is measured.
    preload = ["torch.distributed.rpc", "weight_update"]
    mp.set_forkserver_preload(
        [*preload, *["torchrl.weight_update"] * plan.beside, *["ray"] * _uses_ray(plan)]
    )
    with _running_ray(plan.largest) if _uses_ray(plan) else contextlib.nullcontext() as ray:
        sync: Found = {}
        tensors: Found = {}
        if "sync" in parts:
            sync = measure_cluster(plan, sync_cases(plan), ray)
            yield cluster_table("Across processes: synchronous update, 16 tensors", sync)
        if "tensors" in parts:
            schemes = tuple(scheme for scheme in plan.schemes if scheme != RAY_ALONE)  # it sends bytes
            tensors = measure_cluster(replace(plan, schemes=schemes), tensors_cases(plan), ray)
            yield cluster_table("Across processes: many tensors", tensors)
    yield targets_table(_targets(plan, sync, tensors), "Across processes: targets")


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
