"""Weights on a GPU: dense and patch, to the CPU's memory and to a worker on the GPU, also by CUDA IPC.

::

    python -m benchmarks.gpu                        # some minutes on one GPU
    python -m benchmarks.gpu --quick                # half a minute, to see that it works
    python -m benchmarks.gpu --rst docs/benchmark_gpu.rst

Needs torch and tensordict alone; ``nvcomp_lz4`` is measured where the extra ``nvcomp`` is installed. Without
a CUDA device it says so and exits with status 2.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch

from benchmarks.gpu_colocated import colocated_table, measure_colocated, measure_copy
from benchmarks.gpu_sync import measure_sync, sync_table
from benchmarks.gpu_times import Variant, build_table, dense_table, measure_build, measure_dense
from benchmarks.patch_updates import by_chance, layered
from benchmarks.report import Table, machine, to_rst, to_text
from weight_update.compression import resolve_compression

__all__ = ["Plan", "main", "measure", "plan"]

_FRACTIONS = (0.0001, 0.01, 0.05, 0.2)
_SYNC_FRACTION = 0.01


@dataclass(frozen=True)
class Plan:
    """What one run measures.

    Attributes:
        megabytes: of the model, in bfloat16.
        turns: how often each thing is timed, after one turn that warms up.
        fractions: of elements that change.
        variants: ways to build a patch.
    """

    megabytes: float
    turns: int
    fractions: tuple[float, ...]
    variants: tuple[Variant, ...]


def plan(megabytes: float | None, quick: bool, compressions: tuple[str, ...]) -> Plan:
    """The plan for these options; ``nvcomp_lz4`` goes with ``transport_device="cuda"`` only."""
    variants = [
        Variant(snapshot, transport, compression, values)
        for values in ("raw", "relative")
        for compression in compressions
        for snapshot in ("cpu", "cuda")
        for transport in ("cpu", "cuda")
        if transport == "cuda" or compression == "none"
    ]
    fractions = _FRACTIONS[1:2] if quick else _FRACTIONS
    return Plan(megabytes or (20.0 if quick else 500.0), 2 if quick else 9, fractions, tuple(variants))


def main(arguments: list[str] | None = None) -> int:
    """Parse, measure, print; returns the exit status."""
    options = _parser().parse_args(arguments)
    if not torch.cuda.is_available():
        print("benchmarks.gpu needs a CUDA device, and torch sees none here", file=sys.stderr)
        return 2
    chosen = plan(options.megabytes, options.quick, _compressions())
    facts = [*machine(("torch", "tensordict")), _gpu()]
    print("\n".join(facts) + "\n", flush=True)
    tables = []
    for table in measure(chosen, torch.device("cuda")):
        print(to_text(table), flush=True)
        tables.append(table)
        if options.rst is not None:
            options.rst.write_text(to_rst(facts, tables, by="benchmarks.gpu"))
    return 0


def measure(chosen: Plan, device: torch.device) -> Iterator[Table]:
    """The tables of a run, each as soon as it is measured."""
    old = layered(chosen.megabytes)
    yield dense_table(chosen.megabytes, measure_dense(old, device, chosen.turns))
    for fraction in chosen.fractions:
        _say(f"patches: {fraction:.2%} of {chosen.megabytes:g} MB")
        update = by_chance(old, fraction, "1..4 ulp")
        yield build_table(update.name, measure_build(update, chosen.variants, device, chosen.turns))
    _say("send() until applied")
    update = by_chance(old, _SYNC_FRACTION, "1..4 ulp")
    yield sync_table(chosen.megabytes, update.name, measure_sync(update, device, chosen.turns))
    _say("slots on the GPU and in host memory")
    copy = measure_copy(update, device, chosen.turns)
    yield colocated_table(chosen.megabytes, copy, measure_colocated(update, device, chosen.turns))


def _compressions() -> tuple[str, ...]:
    try:
        resolve_compression("nvcomp_lz4")
    except ImportError as reason:
        _say(f"without nvcomp_lz4: {reason}")
        return ("none",)
    return ("none", "nvcomp_lz4")


def _gpu() -> str:
    found = torch.cuda.get_device_properties(torch.device("cuda"))
    return f"GPU: {found.name}, {found.total_memory / 1e9:.0f} GB, CUDA {torch.version.cuda}"


def _say(line: str) -> None:
    """Tell what is going on."""
    print(f"... {line}", file=sys.stderr, flush=True)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.gpu", description=__doc__.splitlines()[0])
    parser.add_argument("--megabytes", type=float, help="size of the model in bfloat16; default: 500")
    parser.add_argument("--quick", action="store_true", help="20 MB, 2 turns, 1 %% changed only")
    parser.add_argument("--rst", type=Path, metavar="FILE", help="write the tables there as well")
    return parser


if __name__ == "__main__":
    raise SystemExit(main())
