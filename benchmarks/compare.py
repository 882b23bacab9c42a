"""Compare this library's schemes with TorchRL's, in one run and in turns.

    python -m benchmarks.compare                   # everything; about half an hour on two cores
    python -m benchmarks.compare --only stall      # one part
    python -m benchmarks.compare --quick           # a minute, to see that it works
    python -m benchmarks.compare --rst docs/benchmark_results.rst

Nothing else should run on the machine.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from pathlib import Path

from benchmarks.measure_memory import measure_memory, memory_table
from benchmarks.measure_stall import measure_stall, stall_table
from benchmarks.measure_sync import measure_sync, measure_tensors, sync_table, tensors_table
from benchmarks.plan import Plan, numbers, sizes
from benchmarks.report import Table, machine, to_rst, to_text
from benchmarks.targets import Results, targets_of, targets_table

__all__ = ["main"]

PARTS = ("sync", "tensors", "stall", "memory")


def main(arguments: list[str] | None = None) -> int:
    """Parse, measure, print; returns the exit status."""
    options = _parser().parse_args(arguments)
    facts = machine()
    print("\n".join(facts) + "\n", flush=True)
    tables = []
    for table in _tables(_plan(options), options.only or PARTS):
        print(to_text(table), flush=True)
        tables.append(table)
        if options.rst is not None:
            options.rst.write_text(to_rst(facts, tables, by="benchmarks.compare"))
    return 0


def _tables(plan: Plan, parts: tuple[str, ...]) -> Iterator[Table]:
    """The tables of a run, each as soon as it is measured."""
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
    yield targets_table(targets_of(results))


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.compare", description=__doc__.splitlines()[0])
    parser.add_argument("--sizes", type=sizes, metavar="MB,MB", help="default: 1,100,1000")
    parser.add_argument("--tensors", type=numbers, metavar="N,N", help="default: 16,1000,5000")
    parser.add_argument("--workers", type=numbers, metavar="N,N", help="default: 1,2,4,8")
    parser.add_argument("--scheme", action="append", choices=Plan().schemes, help="default: both")
    parser.add_argument("--repeats", type=int, help="default: 10; ten times that up to 10 MB")
    parser.add_argument("--timeout", type=float, help="seconds for one answer of a side; default: 60")
    parser.add_argument("--quick", action="store_true", help="1 MB, one worker, 2 repeats")
    parser.add_argument("--only", action="append", choices=PARTS, help="may be given several times")
    parser.add_argument("--rst", type=Path, metavar="FILE", help="write the tables there as well")
    return parser


def _plan(options: argparse.Namespace) -> Plan:
    chosen = {"sizes": (1.0,), "tensors": (16,), "workers": (1,), "repeats": 2} if options.quick else {}
    if options.quick:
        chosen |= {"tensors_workers": 1, "timeout": 40.0}
    names = ("sizes", "tensors", "workers", "repeats", "timeout")
    chosen |= {name: getattr(options, name) for name in names if getattr(options, name) is not None}
    if options.scheme:
        chosen["schemes"] = tuple(options.scheme)
    return Plan(**chosen)


if __name__ == "__main__":
    raise SystemExit(main())
