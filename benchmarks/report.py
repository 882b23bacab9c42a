"""Figures, plain tables of them, and the output that all benchmarks share."""

from __future__ import annotations

import json
import math
import os
import platform
import statistics
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from datetime import datetime, timezone
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch


class Unable(Exception):
    """A benchmark cannot run here. The message says why, and what to do about it."""


@dataclass(frozen=True)
class Figure:
    """Several measurements of the same thing.

    Attributes:
        values: measurements; empty if there are none.
        failure: reason why there are none.
    """

    values: Sequence[float] = ()
    failure: str | None = None

    @property
    def median(self) -> float | None:
        """The median, or None."""
        return statistics.median(self.values) if self.values else None

    @property
    def reached(self) -> float | None:
        """The median for a target: infinite after a failure, so that the target is missed."""
        return math.inf if self.failure else self.median

    def show(self, scale: float = 1.0, digits: int = 2) -> str:
        """Return ``median (min .. max)`` times ``scale``, or the reason why there is none."""
        if self.median is None:
            return self.failure or "not measured"
        shown = (min(self.values), self.median, max(self.values))
        low, mid, high = (f"{scale * value:.{digits}f}" for value in shown)
        return f"{mid} ({low} .. {high})" if len(self.values) > 1 else mid

    def cell(self, scale: float = 1.0, digits: int = 2, *, more_is_better: bool = False) -> Cell:
        """Return a cell that shows the same text, and that ``--against`` compares."""
        return Cell(self, scale, digits, more_is_better)

    def with_more(self, other: Figure) -> Figure:
        """Return a figure with the measurements of both, or with none if one of them failed."""
        failure = self.failure or other.failure
        return Figure((), failure) if failure else Figure([*self.values, *other.values])

    def times(self, factor: float) -> Figure:
        """Return a figure with all values multiplied by ``factor``."""
        return Figure([factor * value for value in self.values], self.failure)


@dataclass(frozen=True)
class Cell:
    """A figure of this library in a table; ``--against`` compares it with that of another checkout.

    Attributes:
        figure: measurements.
        scale: factor between a measurement and the number shown.
        digits: number of digits shown after the decimal point.
        more_is_better: whether a larger figure is the better one.
    """

    figure: Figure
    scale: float
    digits: int
    more_is_better: bool

    def __str__(self) -> str:
        return self.figure.show(self.scale, self.digits)


@dataclass
class Times:
    """The seconds of each action, by turn.

    Attributes:
        seconds: times by action; the first turn warms up.
        nbytes: sizes of the results.
        settle: function that waits until a device is idle; called before and after each action.
    """

    seconds: dict[Any, list[float]] = field(default_factory=dict)
    nbytes: dict[Any, int] = field(default_factory=dict)
    settle: Callable[[], None] = lambda: None

    def add(self, what: Any, action: Callable[[], Any]) -> Any:
        """Run ``action`` and note its seconds."""
        self.settle()
        start = time.perf_counter()
        result = action()
        self.settle()
        self.seconds.setdefault(what, []).append(time.perf_counter() - start)
        return result

    def figure(self, *stages: Any) -> Figure:
        """Return the time of the stages together, in all turns but the first."""
        turns = zip(*(self.seconds[stage][1:] for stage in stages), strict=True)
        return Figure([sum(seconds) for seconds in turns])


def ratio(one: Figure | None, other: Figure | None) -> float | None:
    """Return the ratio of the medians: infinite if ``one`` failed, else None if one is missing."""
    reached = None if one is None else one.reached
    if reached is None or reached == math.inf:
        return reached
    return None if other is None or not other.median else reached / other.median


def show_ratio(one: Figure | None, other: Figure | None, digits: int = 3) -> str:
    """Return :func:`ratio` as a cell."""
    value = ratio(one, other)
    return "-" if value is None or value == math.inf else f"{value:.{digits}f}"


@dataclass(frozen=True)
class Table:
    """A table with a title.

    Attributes:
        title: one line.
        note: explanation of the figures.
        head: names of the columns.
        rows: cells of each row, shown as ``str`` shows them; ``--against`` compares each :class:`Cell`.
        names: columns that together name a row.
        verdicts: name of each target, and whether the run met it: ``yes``, ``no`` or ``not measured``.
    """

    title: str
    note: str
    head: Sequence[str]
    rows: Sequence[Sequence[object]]
    names: Sequence[int] = (0,)
    verdicts: Sequence[tuple[str, str]] = ()


def machine(*packages: str, threads: int = 1) -> list[str]:
    """Return date, machine, versions of torch, tensordict and ``packages``, and threads; one fact a line."""
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    own = torch.get_num_threads()
    return [
        f"Date: {datetime.now(timezone.utc):%Y-%m-%d %H:%M} UTC",
        f"Machine: {len(os.sched_getaffinity(0))} cores, {memory / 1e9:.1f} GB of memory, "
        f"{platform.system()} {platform.release()} {platform.machine()}",
        f"Python {platform.python_version()}, "
        + ", ".join(f"{name} {version(name)}" for name in ("torch", "tensordict", *packages))
        + f", {own} thread{'s' * (own != 1)} in the sender, {threads} in each worker",
    ]


def file_system(directory: str | Path) -> str:
    """Return the kind of file system, such as ``ext4``."""
    mounts = [line.split()[1:3] for line in Path("/proc/self/mounts").read_text().splitlines()]
    real = os.path.realpath(directory)
    above = [(len(place), kind) for place, kind in mounts if Path(real).is_relative_to(place)]
    return max(above)[1]


def say(line: str) -> None:
    """Print the progress of a run to stderr."""
    print(f"... {line}", file=sys.stderr, flush=True)


def publish(
    name: str, facts: Sequence[str], tables: Iterable[Table], rst: Path | None, figures: Path | None = None
) -> int:
    """Print each table as soon as it is measured, then how many targets were met, and which were missed.

    Args:
        name: of the benchmark.
        facts: of :func:`machine`.
        tables: measured while they are iterated over.
        rst: file for the tables in reStructuredText; None for none.
        figures: file for the measurements in JSON; None for none. Targets are not judged then.

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
    if figures is not None:
        figures.write_text(json.dumps([figure for table in shown for figure in _figures_of(table)]))
        return 0
    return _summary([verdict for table in shown for verdict in table.verdicts])


def _summary(verdicts: Sequence[tuple[str, str]]) -> int:
    counts = Counter(met for _, met in verdicts)
    if verdicts:
        print(f"Targets: {counts['yes']} met, {counts['no']} missed, {counts['not measured']} not measured.")
    return report_missed("Missed targets:", [name for name, met in verdicts if met == "no"])


def report_missed(title: str, names: Sequence[str]) -> int:
    """Print the names if there are any, and return the exit status: 1 then, else 0."""
    if names:
        print(title, *names, sep="\n  ", flush=True)
    return 1 if names else 0


def _figures_of(table: Table) -> Iterator[dict[str, Any]]:
    """Yield the cells of the table that ``--against`` compares."""
    for row in table.rows:
        name = ", ".join(str(row[column]) for column in table.names)
        for column, cell in zip(table.head, row, strict=True):
            if isinstance(cell, Cell):
                place = {"table": table.title, "row": name, "column": column}
                yield {**place, **vars(cell), "figure": cell.figure.values}


def _to_rst(facts: Sequence[str], tables: Sequence[Table], name: str) -> str:
    parts = [f".. Written by python -m benchmarks {name}; do not edit.", "", *(f"- {fact}" for fact in facts)]
    for table in tables:
        parts += ["", table.title, "~" * len(table.title), "", table.note, "", *_grid(table)]
    return "\n".join(parts) + "\n"


def _grid(table: Table) -> list[str]:
    """Return the lines of a simple table of reStructuredText; its first column is never empty."""
    lines = [list(table.head), *([str(cell) for cell in row] for row in table.rows)]
    widths = [max(len(line[column]) for line in lines) for column in range(len(table.head))]
    rule = "  ".join("=" * width for width in widths)
    body = ["  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)) for line in lines]
    body = [line.rstrip() for line in body]
    return [rule, body[0], rule, *body[1:], rule]
