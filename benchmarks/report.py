"""Figures, and plain tables of them."""

from __future__ import annotations

import os
import platform
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime, timezone
from importlib.metadata import version

import torch

__all__ = ["Figure", "Table", "machine", "ratio", "show_ratio", "to_rst", "to_text"]


@dataclass(frozen=True)
class Figure:
    """Several measurements of one thing.

    Attributes:
        values: the measurements; empty if there is none.
        failure: why there is none.
    """

    values: tuple[float, ...]
    failure: str | None = None

    @property
    def median(self) -> float | None:
        """The median, or None."""
        return statistics.median(self.values) if self.values else None

    def show(self, scale: float = 1.0, digits: int = 2) -> str:
        """``median (min .. max)`` times ``scale``, or why there is none."""
        if self.median is None:
            return self.failure or "not measured"
        low, mid, high = (
            f"{scale * x:.{digits}f}" for x in (min(self.values), self.median, max(self.values))
        )
        return f"{mid} ({low} .. {high})"

    def with_more(self, other: Figure) -> Figure:
        """The measurements of both."""
        return Figure(self.values + other.values, self.failure or other.failure)

    def times(self, factor: float) -> Figure:
        """All values multiplied."""
        return Figure(tuple(factor * value for value in self.values), self.failure)


def ratio(one: Figure | None, other: Figure | None) -> float | None:
    """Median by median; None where one is missing."""
    if one is None or other is None or one.median is None or not other.median:
        return None
    return one.median / other.median


def show_ratio(one: Figure | None, other: Figure | None) -> str:
    """:func:`ratio` as a cell."""
    value = ratio(one, other)
    return "-" if value is None else f"{value:.3f}"


@dataclass(frozen=True)
class Table:
    """A table with a title.

    Attributes:
        title: one line.
        note: how to read it.
        head: names of the columns.
        rows: cells, as text.
    """

    title: str
    note: str
    head: Sequence[str]
    rows: Sequence[Sequence[str]]


def machine(names: Sequence[str] = ("torch", "tensordict", "torchrl")) -> list[str]:
    """When and where this runs, and the versions of ``names``, one fact a line."""
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return [
        f"Date: {datetime.now(timezone.utc):%Y-%m-%d %H:%M} UTC",
        f"Machine: {len(os.sched_getaffinity(0))} cores, {memory / 1e9:.1f} GB of memory, "
        f"{platform.system()} {platform.release()} {platform.machine()}",
        f"Python {platform.python_version()}, "
        + ", ".join(f"{name} {version(name)}" for name in names)
        + f", {torch.get_num_threads()} threads in the sender, 1 in each worker",
    ]


def to_text(table: Table) -> str:
    """For a terminal."""
    return "\n".join([table.title, table.note, "", *_grid(table), ""])


def to_rst(facts: Sequence[str], tables: Sequence[Table], by: str) -> str:
    """For the documentation; ``by`` is the module that measured."""
    parts = [f".. Written by python -m {by}; do not edit.", "", *(f"- {fact}" for fact in facts)]
    for table in tables:
        parts += ["", table.title, "~" * len(table.title), "", table.note, "", *_grid(table)]
    return "\n".join(parts) + "\n"


def _grid(table: Table) -> list[str]:
    """A simple table of reStructuredText; its first column is never empty."""
    lines = [list(table.head), *(list(row) for row in table.rows)]
    widths = [max(len(line[column]) for line in lines) for column in range(len(table.head))]
    rule = "  ".join("=" * width for width in widths)
    body = ["  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)) for line in lines]
    body = [line.rstrip() for line in body]
    return [rule, body[0], rule, *body[1:], rule]
