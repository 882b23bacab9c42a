"""Bytes and time of patches, on real updates and on random ones, beside what one would have otherwise.

::

    python -m benchmarks.patch                  # about five minutes on two cores
    python -m benchmarks.patch --quick          # half a minute, to see that it works
    python -m benchmarks.patch --rst docs/benchmark_patch.rst

Nothing else should run on the machine.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from benchmarks.patch_bytes import Sizes, bytes_table, measure_bytes
from benchmarks.patch_sync import measure_sync, sync_table
from benchmarks.patch_targets import targets_table
from benchmarks.patch_times import ALL, FEW, Times, links_table, measure_times, times_table
from benchmarks.patch_training import trained_cartpole, trained_language_model
from benchmarks.patch_updates import MOVES, by_chance, layered
from benchmarks.report import Table, machine, to_rst, to_text

__all__ = ["main"]

_FRACTIONS = (0.0001, 0.01, 0.05, 0.2)
_TARGET = 0.01  # the fraction for which targets are set
_MOST_MEGABYTES = 100.0  # of the models whose bytes are counted: what an element costs stays the same
_MOST_SYNC_MEGABYTES = 200.0  # eight senders and eight receivers hold it at once


@dataclass(frozen=True)
class Plan:
    """The options of one run.

    Attributes:
        megabytes: of the model whose patches are timed.
        turns: how often each thing is timed.
        quick: small networks are trained.
    """

    megabytes: float
    turns: int
    quick: bool


def main(arguments: list[str] | None = None) -> int:
    """Parse, measure, print; returns the exit status."""
    options = _parser().parse_args(arguments)
    quick = options.quick
    plan = Plan(options.megabytes or (4.0 if quick else 500.0), options.turns or (2 if quick else 7), quick)
    facts = machine()
    print("\n".join(facts) + "\n", flush=True)
    tables = []
    for table in _tables(plan):
        print(to_text(table), flush=True)
        tables.append(table)
        if options.rst is not None:
            options.rst.write_text(to_rst(facts, tables, by="benchmarks.patch"))
    return 0


def _tables(plan: Plan) -> Iterator[Table]:
    """The tables of a run, each as soon as it is measured."""
    yield bytes_table("Bytes: policies in training", _trained(plan))
    old = layered(min(plan.megabytes, _MOST_MEGABYTES))
    for move in MOVES:
        _say(f"bytes: changes of {move}")
        found = (measure_bytes(by_chance(old, fraction, move)) for fraction in _FRACTIONS)
        yield bytes_table(f"Bytes: changes of {move} by chance", found)
    times = _timed(plan)
    yield times_table(plan.megabytes, times.values())
    yield links_table(plan.megabytes, times.values())
    megabytes = min(plan.megabytes, _MOST_SYNC_MEGABYTES)
    _say(f"send() until applied, {megabytes:g} MB")
    yield sync_table(megabytes, measure_sync(megabytes, plan.turns))
    yield targets_table(times[_TARGET])


def _trained(plan: Plan) -> Iterator[Sizes]:
    for updates in (trained_language_model(plan.quick), trained_cartpole()):
        for update in updates:
            _say(f"bytes: {update.name}")
            yield measure_bytes(update)


def _timed(plan: Plan) -> dict[float, Times]:
    old = layered(plan.megabytes)
    found = {}
    for fraction in _FRACTIONS:
        _say(f"times: {fraction:.2%} of {plan.megabytes:g} MB")
        variants = ALL if fraction == _TARGET else FEW
        found[fraction] = measure_times(by_chance(old, fraction, "1..4 ulp"), variants, plan.turns)
    return found


def _say(line: str) -> None:
    """Tell what is going on."""
    print(f"... {line}", file=sys.stderr, flush=True)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.patch", description=__doc__.splitlines()[0])
    parser.add_argument("--megabytes", type=float, help="size of the model that is timed; default: 500")
    parser.add_argument("--turns", type=int, help="how often each thing is timed; default: 7")
    parser.add_argument("--quick", action="store_true", help="4 MB, 2 turns, small networks")
    parser.add_argument("--rst", type=Path, metavar="FILE", help="write the tables there as well")
    return parser


if __name__ == "__main__":
    raise SystemExit(main())
