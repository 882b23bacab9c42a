"""Output of all commands: one document, shown as tables or as JSON.

A document is a dict with text keys. A list of dicts is a table with a row for each dict. All other values
are facts.
"""

from __future__ import annotations

import itertools
import json
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import click
from rich import box
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table
from rich.text import Text

__all__ = ["Document", "Row", "json_option", "progress", "show"]

Row = Mapping[str, Any]
Document = Mapping[str, Any]

_FILE_COLUMNS = 240
"""Width of tables that go to a file or a pipe, where lines should not be folded."""
_STYLES = {"ok": "green", "warn": "yellow", "fail": "bold red", "damaged": "bold red", "skipped": "dim"}

json_option: Callable[[Any], Any] = click.option(
    "--json", "as_json", is_flag=True, help="Print JSON instead of tables."
)
"""The option ``--json``, which every command has."""


def show(document: Document, *, as_json: bool) -> None:
    """Print a document to stdout."""
    if as_json:
        click.echo(json.dumps(document, indent=2))
        return
    console = _console(sys.stdout)
    for is_table, group in itertools.groupby(document.items(), key=lambda item: _is_table(item[1])):
        if is_table:
            for key, rows in group:
                if rows:
                    console.print(_table(_title(key), rows))
        else:
            console.print(_grid(group))


def progress() -> Progress:
    """Return a display of progress on stderr, which shows nothing where that is not a terminal."""
    columns = TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn()
    return Progress(*columns, console=_console(sys.stderr), transient=True, disable=not sys.stderr.isatty())


def _console(file: Any) -> Console:
    return Console(file=file, width=None if file.isatty() else _FILE_COLUMNS, highlight=False)


def _is_table(value: Any) -> bool:
    return isinstance(value, list) and all(isinstance(row, dict) for row in value)


def _grid(facts: Iterable[tuple[str, Any]]) -> Table:
    grid = Table.grid(padding=(0, 2))
    for key, value in facts:
        grid.add_row(_title(key), _cell(key, value))
    return grid


def _table(title: str, rows: Sequence[Row]) -> Table:
    keys = list(dict.fromkeys(key for row in rows for key in row))
    table = Table(title=title, title_justify="left", title_style="bold", box=box.SIMPLE_HEAD, pad_edge=False)
    for key in keys:
        numbers = all(isinstance(row.get(key), int | float | None) for row in rows)
        table.add_column(_title(key), justify="right" if numbers else "left", overflow="fold")
    for row in rows:
        table.add_row(*(_cell(key, row.get(key)) for key in keys))
    return table


def _title(key: str) -> str:
    return key.replace("_", " ")


def _cell(key: str, value: Any) -> Text:
    text = _text(key, value)
    return Text(text, style=_STYLES.get(text, ""))


def _text(key: str, value: Any) -> str:
    if value is None:
        return "-"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if key.endswith("bytes") and isinstance(value, int):
        return _size(value)
    if isinstance(value, float):
        return f"{value:.4g}"
    if isinstance(value, list):
        return "[" + ", ".join(str(item) for item in value) + "]"
    return str(value)


def _size(nbytes: int) -> str:
    for unit, step in (("GB", 10**9), ("MB", 10**6), ("kB", 10**3)):
        if nbytes >= step:
            return f"{nbytes / step:.3g} {unit}"
    return f"{nbytes} B"
