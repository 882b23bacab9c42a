"""The options of a benchmark: those that all benchmarks have, and its own."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any


class Options(argparse.ArgumentParser):
    """A parser of the options of one benchmark.

    The parsed options have one more attribute: ``beside``, whether other libraries are measured too.

    Args:
        name: of the benchmark.
        description: text whose first line is shown.
        quick: help for ``--quick``.
    """

    def __init__(self, name: str, description: str | None, quick: str) -> None:
        first = (description or "").partition("\n")[0]
        super().__init__(f"python -m benchmarks {name}", description=first, allow_abbrev=False)
        self._values: dict[str, tuple[Any, Any]] = {}  # of each own option: by default, and with --quick
        self.add_argument("--quick", action="store_true", help=quick)
        self.add_argument("--rst", type=Path, metavar="FILE", help="also write the tables to this file")
        self.add_argument("--against", metavar="REF", help="compare this checkout with another commit")
        self.add_argument(
            "--rounds",
            type=int,
            default=5,
            metavar="N",
            help="with --against: runs on each commit; default: 5",
        )
        # For --against: leave out other libraries, and write what was measured as JSON.
        self.add_argument("--figures", type=Path, help=argparse.SUPPRESS)

    def add(
        self,
        option: str,
        default: Any,
        help: str = "",
        *,
        quick: Any = None,
        kind: Callable[[str], Any] | None = None,
    ) -> None:
        """Add an option; a tuple is given as its values with commas between.

        Args:
            option: its name, such as ``--sizes``.
            default: its value where it is not given.
            help: the text for ``--help``, to which the default is added.
            quick: its value where only ``--quick`` is given; None for the default.
            kind: function that makes a value from text; by default the type of ``default``.
        """
        many = isinstance(default, tuple)
        parse = kind or type(default[0] if many else default)
        shown = ",".join(
            f"{one:g}" if isinstance(one, float) else str(one) for one in (default if many else [default])
        )
        self._add(
            option,
            (default, quick),
            type=(lambda text: tuple(parse(part) for part in text.split(","))) if many else parse,
            help="; ".join(filter(None, [help, f"default: {shown}"])),
        )

    def add_choice(
        self, option: str, dest: str, choices: Iterable[str], *, quick: Sequence[str] | None = None
    ) -> None:
        """Add an option that selects one of ``choices`` each time that it is given; all by default."""
        self._add(
            option,
            (tuple(choices), quick),
            dest=dest,
            action="append",
            choices=choices,
            help="may be given several times; default: all",
        )

    def _add(self, option: str, values: tuple[Any, Any], **keywords: Any) -> None:
        self._values[self.add_argument(option, **keywords).dest] = values

    def parse(self, arguments: Sequence[str]) -> argparse.Namespace:
        """Return the options, each with its value."""
        options = self.parse_args(arguments)
        options.beside = options.figures is None
        for name, (default, quick) in self._values.items():
            if getattr(options, name) is None:
                setattr(options, name, default if quick is None or not options.quick else quick)
        return options
