"""Output of all commands: one document, shown as tables or as JSON.

A document is a dict with text keys. A list of dicts is a table with a row for each dict. All other values
are facts. On a terminal, tables have colors and fit the width. A table with too many columns for the width
becomes lists of names and values. Elsewhere a row is one line of plain text.
"""

from __future__ import annotations

import contextlib
import io
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

from weight_update.text import format_number, format_size

Row = Mapping[str, Any]
Document = Mapping[str, Any]

_UNFOLDED = 1_000_000
"""Columns within which no line is folded."""
_LEGIBLE = 5
"""Characters that a column of a table is wide, unless its words are shorter; narrower ones cannot be read."""
_SENTENCE, _PROSE_WIDTH = 5, 12
"""Words from which on a text is a sentence, and characters that a column of sentences is wide."""
_STYLES = {"ok": "green", "warn": "yellow", "fail": "bold red", "skipped": "dim"}
_STYLES |= {"damaged": "bold red", "unreadable": "bold red"}
_STYLES |= {"joined": "green", "late": "yellow", "lost": "bold red", "failed": "bold red"}

json_option: Callable[[Any], Any] = click.option(
    "--json", "as_json", is_flag=True, help="Print JSON instead of tables."
)
"""The option ``--json``, which every command has."""


def show(document: Document, *, as_json: bool) -> None:
    """Print a document to stdout."""
    if as_json:
        click.echo(json.dumps(document, indent=2))
    else:
        _draw(document)


@contextlib.contextmanager
def screen(*, as_json: bool, live: bool) -> Iterator[Callable[[Document], None]]:
    """Return a function that shows one document after the other, as tables or as lines of JSON.

    With ``live``, a terminal shows each document in the place of the one before.
    """
    console = Console(file=sys.stdout, highlight=False)
    if as_json:
        yield lambda document: click.echo(json.dumps(document))
    elif live and sys.stdout.isatty() and not console.is_dumb_terminal:
        with Live(console=console, auto_refresh=False) as display:
            yield lambda document: display.update(Group(*_tables(document, console.width)), refresh=True)
    else:
        yield _draw


def progress() -> Progress:
    """Return a display of progress on stderr, which shows nothing where that is not a terminal."""
    columns = TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn()
    console = Console(file=sys.stderr, highlight=False)
    return Progress(*columns, console=console, transient=True, disable=not sys.stderr.isatty())


def _draw(document: Document) -> None:
    """Print tables to stdout: without colors, rules, folds and trailing blanks unless it is a terminal."""
    if sys.stdout.isatty():
        console = Console(file=sys.stdout, highlight=False)
        console.print(*_tables(document, console.width))
        return
    console = Console(file=io.StringIO(), width=_UNFOLDED, color_system=None, force_terminal=False)
    for place, part in enumerate(_tables(document, _UNFOLDED)):
        part.box = None
        with console.capture() as captured:
            console.print(part)
        if place:
            click.echo()
        click.echo("\n".join(line.rstrip() for line in captured.get().splitlines()))


def _tables(document: Document, width: int) -> list[Table]:
    parts: list[Table] = []
    for is_table, group in itertools.groupby(document.items(), key=lambda item: _is_table(item[1])):
        if is_table:
            parts += [_table(_title(key), rows, width) for key, rows in group if rows]
        else:
            parts.append(_pairs(group))
    return parts


def _is_table(value: Any) -> bool:
    return isinstance(value, list) and all(isinstance(row, dict) for row in value)


def _pairs(facts: Iterable[tuple[str, Any]]) -> Table:
    """Return a table of names and values, in which long values are folded."""
    grid = Table.grid(padding=(0, 2))
    grid.add_column()
    grid.add_column(overflow="fold")
    for key, value in facts:
        grid.add_row(_title(key), _cell(key, value))
    return grid


def _table(title: str, rows: Sequence[Row], width: int) -> Table:
    keys = list(dict.fromkeys(key for row in rows for key in row))
    if not _fits(keys, rows, width):
        return _list(title, rows)
    table = Table(title=title, title_justify="left", title_style="bold", box=box.SIMPLE_HEAD, pad_edge=False)
    for key in keys:
        numbers = all(isinstance(row.get(key), int | float | None) for row in rows)
        table.add_column(_title(key), justify="right" if numbers else "left", overflow="fold")
    for row in rows:
        *cells, last = (_cell(key, row.get(key)) for key in keys)
        table.add_row(*cells, "" if row.get(keys[-1]) is None else last)
    return table


def _fits(keys: Sequence[str], rows: Sequence[Row], width: int) -> bool:
    """Return whether a table with these columns can be read in ``width`` characters."""
    needed = 3 * len(keys) - 2  # between columns
    for key in keys:
        texts = [text.split() for text in (_title(key), *(_text(key, row.get(key)) for row in rows))]
        longest = max((len(word) for text in texts for word in text), default=0)
        is_prose = max(map(len, texts)) >= _SENTENCE
        needed += _PROSE_WIDTH if is_prose else min(longest, _LEGIBLE)
    return needed <= width


def _list(title: str, rows: Sequence[Row]) -> Table:
    """Return rows as lists of names and values, each below an empty line."""
    grid = _pairs(fact for row in rows for fact in [("", ""), *row.items()])
    grid.title, grid.title_justify, grid.title_style = title, "left", "bold"
    return grid


def _title(key: str) -> str:
    return "result" if key == "good" else key.replace("_", " ")


def _cell(key: str, value: Any) -> Text:
    text = _shown(_text(key, value))
    return Text(text, style=_STYLES.get(text, ""))


def _shown(text: str) -> str:
    """Escape characters that end a line, control a terminal, or are not in the encoding of the output.

    Names from files may hold any character.
    """
    visible = "".join(one if one.isprintable() else ascii(one)[1:-1] for one in text)
    encoding = sys.stdout.encoding or "utf-8"
    return visible.encode(encoding, "backslashreplace").decode(encoding)


def _text(key: str, value: Any) -> str:
    if value is None:
        return "-"
    if key == "good":
        return "ok" if value else "failed"
    if key.endswith("bytes") and isinstance(value, int):
        return format_size(value)
    if isinstance(value, float):
        return format_number(value, 4)
    if isinstance(value, dict):
        return ", ".join(f"{name} {_text(name, item)}" for name, item in value.items()) or "-"
    if isinstance(value, list):
        return "[" + ", ".join(str(item) for item in value) + "]"
    return str(value)
