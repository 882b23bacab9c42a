"""Figures, plain tables of them, and the options and the output that all benchmarks share."""

from __future__ import annotations

import argparse
import os
import platform
import statistics
import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from datetime import datetime, timezone
from importlib.metadata import version
from pathlib import Path

import torch

__all__ = [
    "Figure",
    "Table",
    "machine",
    "numbers",
    "parser",
    "publish",
    "ratio",
    "say",
    "show_ratio",
    "sizes",
]


@dataclass(frozen=True)
class Figure:
    """Several measurements of the same thing.

    Attributes:
        values: measurements; empty if there are none.
        failure: reason why there are none.
    """

    values: tuple[float, ...]
    failure: str | None = None

    @property
    def median(self) -> float | None:
        """The median, or None."""
        return statistics.median(self.values) if self.values else None

    def show(self, scale: float = 1.0, digits: int = 2) -> str:
        """Return ``median (min .. max)`` times ``scale``, or the reason why there is none."""
        if self.median is None:
            return self.failure or "not measured"
        low, mid, high = (
            f"{scale * x:.{digits}f}" for x in (min(self.values), self.median, max(self.values))
        )
        return f"{mid} ({low} .. {high})"

    def with_more(self, other: Figure) -> Figure:
        """Return a figure with the measurements of both."""
        return Figure(self.values + other.values, self.failure or other.failure)

    def times(self, factor: float) -> Figure:
        """Return a figure with all values multiplied by ``factor``."""
        return Figure(tuple(factor * value for value in self.values), self.failure)


def ratio(one: Figure | None, other: Figure | None) -> float | None:
    """Return the ratio of the medians, or None if one is missing."""
    if one is None or other is None or one.median is None or not other.median:
        return None
    return one.median / other.median


def show_ratio(one: Figure | None, other: Figure | None) -> str:
    """Return :func:`ratio` as a cell."""
    value = ratio(one, other)
    return "-" if value is None else f"{value:.3f}"


@dataclass(frozen=True)
class Table:
    """A table with a title.

    Attributes:
        title: one line.
        note: explanation of the figures.
        head: names of the columns.
        rows: cells, as text.
        missed: names of targets that the run did not reach.
    """

    title: str
    note: str
    head: Sequence[str]
    rows: Sequence[Sequence[str]]
    missed: Sequence[str] = ()


def machine(names: Sequence[str] = ("torch", "tensordict", "torchrl")) -> list[str]:
    """Return date, machine and versions of ``names``, one fact a line."""
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return [
        f"Date: {datetime.now(timezone.utc):%Y-%m-%d %H:%M} UTC",
        f"Machine: {len(os.sched_getaffinity(0))} cores, {memory / 1e9:.1f} GB of memory, "
        f"{platform.system()} {platform.release()} {platform.machine()}",
        f"Python {platform.python_version()}, "
        + ", ".join(f"{name} {version(name)}" for name in names)
        + f", {torch.get_num_threads()} threads in the sender, 1 in each worker",
    ]


def parser(name: str, description: str | None, quick: str) -> argparse.ArgumentParser:
    """Return a parser with the options of every benchmark.

    Args:
        name: of the benchmark.
        description: text whose first line is shown.
        quick: help for ``--quick``.
    """
    first = (description or "").partition("\n")[0]
    options = argparse.ArgumentParser(prog=f"python -m benchmarks {name}", description=first)
    options.add_argument("--quick", action="store_true", help=quick)
    options.add_argument("--rst", type=Path, metavar="FILE", help="also write the tables to this file")
    return options


def numbers(text: str) -> tuple[int, ...]:
    """Parse an option such as ``1,2,4``."""
    return tuple(int(part) for part in text.split(","))


def sizes(text: str) -> tuple[float, ...]:
    """Parse an option such as ``0.5,100``."""
    return tuple(float(part) for part in text.split(","))


def say(line: str) -> None:
    """Print the progress of a run to stderr."""
    print(f"... {line}", file=sys.stderr, flush=True)


def publish(name: str, facts: Sequence[str], tables: Iterable[Table], rst: Path | None) -> int:
    """Print each table as soon as it is measured, then the targets that were missed.

    Args:
        name: of the benchmark.
        facts: of :func:`machine`.
        tables: measured while they are iterated over.
        rst: file for the tables in reStructuredText; None for none.

    Returns:
        Exit status: 1 if a target was missed.
    """
    print("\n".join(facts) + "\n", flush=True)
    shown: list[Table] = []
    for table in tables:
        print("\n".join([table.title, table.note, "", *_grid(table), ""]), flush=True)
        shown.append(table)
        if rst is not None:
            rst.write_text(_to_rst(facts, shown, name))
    missed = [target for table in shown for target in table.missed]
    if missed:
        print("Missed targets:", *missed, sep="\n  ", flush=True)
    return 1 if missed else 0


def _to_rst(facts: Sequence[str], tables: Sequence[Table], name: str) -> str:
    parts = [f".. Written by python -m benchmarks {name}; do not edit.", "", *(f"- {fact}" for fact in facts)]
    for table in tables:
        parts += ["", table.title, "~" * len(table.title), "", table.note, "", *_grid(table)]
    return "\n".join(parts) + "\n"


def _grid(table: Table) -> list[str]:
    """Return the lines of a simple table of reStructuredText; its first column is never empty."""
    lines = [list(table.head), *(list(row) for row in table.rows)]
    widths = [max(len(line[column]) for line in lines) for column in range(len(table.head))]
    rule = "  ".join("=" * width for width in widths)
    body = ["  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)) for line in lines]
    body = [line.rstrip() for line in body]
    return [rule, body[0], rule, *body[1:], rule]
