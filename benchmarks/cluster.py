"""Compare the schemes that leave the machine with TorchRL's, in one run and in turns.

    python -m benchmarks.cluster                        # everything; about ten minutes on two cores
    python -m benchmarks.cluster --scheme rpc           # one scheme
    python -m benchmarks.cluster --quick                # Distributed only, to see that it works
    python -m benchmarks.cluster --rst docs/benchmark_cluster.rst

All processes are on this machine, and nothing else should run on it.
"""

from __future__ import annotations

import argparse
import contextlib
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch.multiprocessing as mp

from benchmarks.measure_cluster import (
    Found,
    cluster_table,
    cluster_targets,
    measure_cluster,
    sync_cases,
    tensors_cases,
)
from benchmarks.plan import Plan, numbers, sizes
from benchmarks.report import Table, machine, to_rst, to_text
from benchmarks.sides import CLUSTER
from benchmarks.targets import targets_table

__all__ = ["main"]

PARTS = ("sync", "tensors")
_PRELOAD = ["torch.distributed.rpc", "weight_update", "torchrl.weight_update"]


def main(arguments: list[str] | None = None) -> int:
    """Parse, measure, print; returns the exit status."""
    options = _parser().parse_args(arguments)
    plan = _plan(options)
    uses_ray = any(scheme.startswith("ray") for scheme in plan.schemes)
    facts = machine(["torch", "tensordict", "torchrl", *(["ray"] if uses_ray else [])])
    print("\n".join(facts) + "\n", flush=True)
    tables = []
    # Processes of an RPC world that end together warn that the others have.
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
    # With five processes a side, their imports would take longer than what is measured.
    mp.set_forkserver_preload([*_PRELOAD, "ray"] if uses_ray else _PRELOAD)
    with _running_ray(plan.largest) if uses_ray else contextlib.nullcontext() as address:
        for table in _tables(plan, options.only or PARTS, address):
            print(to_text(table), flush=True)
            tables.append(table)
            if options.rst is not None:
                options.rst.write_text(to_rst(facts, tables, by="benchmarks.cluster"))
    return 0


def _tables(plan: Plan, parts: tuple[str, ...], ray: str | None) -> Iterator[Table]:
    """The tables of a run, each as soon as it is measured."""
    sync: Found = {}
    tensors: Found = {}
    if "sync" in parts:
        sync = measure_cluster(plan, sync_cases(plan), ray)
        yield cluster_table("Across processes: synchronous update, 16 tensors", sync)
    if "tensors" in parts:
        tensors = measure_cluster(plan, tensors_cases(plan), ray)
        yield cluster_table("Across processes: many tensors", tensors)
    yield targets_table(cluster_targets(plan, sync, tensors), "Across processes: targets")


@contextlib.contextmanager
def _running_ray(megabytes: float) -> Iterator[str]:
    """The address of a Ray of our own, with room for four updates of so many megabytes."""
    import ray

    # Its workers must find this directory before the `benchmarks` that torchrl installs.
    root = str(Path(__file__).parent.parent)
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


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.cluster", description=__doc__.splitlines()[0])
    parser.add_argument("--sizes", type=sizes, metavar="MB,MB", help="default: 1,100,1000")
    parser.add_argument("--tensors", type=numbers, metavar="N,N", help="default: 16,1000,5000")
    parser.add_argument("--workers", type=numbers, metavar="N,N", help="default: 1,2,4")
    parser.add_argument("--scheme", action="append", choices=CLUSTER, help="default: all")
    parser.add_argument("--repeats", type=int, help="default: 6; ten times that up to 10 MB")
    parser.add_argument("--quick", action="store_true", help="Distributed, 1 MB, one worker, 2 repeats")
    parser.add_argument("--only", action="append", choices=PARTS, help="may be given several times")
    parser.add_argument("--rst", type=Path, metavar="FILE", help="write the tables there as well")
    return parser


def _plan(options: argparse.Namespace) -> Plan:
    chosen: dict[str, Any] = {
        "schemes": tuple(CLUSTER),
        "workers": (1, 2, 4),
        "repeats": 6,
        "rounds": 3,
        "budget": 20.0,
        "start_timeout": 60.0,
    }
    if options.quick:
        chosen |= {"schemes": ("distributed",), "sizes": (1.0,), "tensors": (16,), "workers": (1,)}
        chosen |= {"tensors_workers": 1, "repeats": 2, "rounds": 1}
    names = ("sizes", "tensors", "workers", "repeats")
    chosen |= {name: getattr(options, name) for name in names if getattr(options, name) is not None}
    if options.scheme:
        chosen["schemes"] = tuple(options.scheme)
    return Plan(**chosen)


if __name__ == "__main__":
    raise SystemExit(main())
