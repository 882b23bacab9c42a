"""Output of all commands: one document, shown as tables or as JSON.

A document is a dict with text keys. A list of dicts is a table with a row for each dict. All other values
are facts.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import click
from rich import box
from rich.console import Console, Group
from rich.live import Live
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table
from rich.text import Text

__all__ = ["Document", "Row", "json_option", "progress", "screen", "show"]

Row = Mapping[str, Any]
Document = Mapping[str, Any]

_FILE_COLUMNS = 240
"""Width of tables that go to a file or a pipe, where lines should not be folded."""
_STYLES = {"ok": "green", "warn": "yellow", "fail": "bold red", "damaged": "bold red", "skipped": "dim"}
_STYLES |= {"joined": "green", "late": "yellow", "lost": "bold red"}

json_option: Callable[[Any], Any] = click.option(
    "--json", "as_json", is_flag=True, help="Print JSON instead of tables."
)
"""The option ``--json``, which every command has."""


def show(document: Document, *, as_json: bool) -> None:
    """Print a document to stdout."""
    if as_json:
        click.echo(json.dumps(document, indent=2))
        return
    _console(sys.stdout).print(_tables(document))


@contextlib.contextmanager
def screen(*, as_json: bool, live: bool) -> Iterator[Callable[[Document], None]]:
    """Return a function that shows one document after the other, as tables or as lines of JSON.

    With ``live``, a terminal shows each document in the place of the one before.
    """
    console = _console(sys.stdout)
    if as_json:
        yield lambda document: click.echo(json.dumps(document))
    elif live and console.is_terminal and not console.is_dumb_terminal:
        with Live(console=console, auto_refresh=False) as display:
            yield lambda document: display.update(_tables(document), refresh=True)
    else:
        yield lambda document: console.print(_tables(document))


def progress() -> Progress:
    """Return a display of progress on stderr, which shows nothing where that is not a terminal."""
    columns = TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn()
    return Progress(*columns, console=_console(sys.stderr), transient=True, disable=not sys.stderr.isatty())


def _console(file: Any) -> Console:
    return Console(file=file, width=None if file.isatty() else _FILE_COLUMNS, highlight=False)


def _tables(document: Document) -> Group:
    parts: list[Table] = []
    for is_table, group in itertools.groupby(document.items(), key=lambda item: _is_table(item[1])):
        if is_table:
            parts += [_table(_title(key), rows) for key, rows in group if rows]
        else:
            parts.append(_grid(group))
    return Group(*parts)


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
    if isinstance(value, dict):
        return ", ".join(f"{name} {_text(name, item)}" for name, item in value.items()) or "-"
    if isinstance(value, list):
        return "[" + ", ".join(str(item) for item in value) + "]"
    return str(value)


def _size(nbytes: int) -> str:
    for unit, step in (("GB", 10**9), ("MB", 10**6), ("kB", 10**3)):
        if nbytes >= step:
            return f"{nbytes / step:.3g} {unit}"
    return f"{nbytes} B"
