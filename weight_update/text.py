"""Parts of messages and tables: sizes, numbers of things, and errors in one line."""

from __future__ import annotations

import re

_SOURCE = re.compile(r"\[\S+\.(cc|h):\d+\] ")


def format_size(nbytes: int) -> str:
    """Return a number of bytes with three digits and its unit, such as ``"19.2 MB"``."""
    for unit, step in (("TB", 1e12), ("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if nbytes >= 0.9995 * step:
            return f"{nbytes / step:.3g} {unit}"
    return f"{nbytes} B"


def format_megabytes(nbytes: int) -> str:
    """Return a number of bytes such as ``"1.0 MB"``; fewer than 0.1 MB as :func:`format_size` does."""
    return f"{nbytes / 1e6:.1f} MB" if nbytes >= 1e5 else format_size(nbytes)


def format_number(value: float, digits: int = 3) -> str:
    """Return a number with so many digits, such as ``"1.23"``, or a larger one as an integer."""
    return f"{value:.{digits}g}" if abs(value) < 10**digits - 0.5 else f"{value:.0f}"


def format_seconds(seconds: float) -> str:
    """Return a time as a user would give it, such as ``"3 s"`` for 2.99999 and ``"0.25 s"``."""
    return f"{round(seconds, 1):g} s" if seconds >= 1 else f"{seconds:.2g} s"


def plural(number: int, noun: str) -> str:
    """Return a number and a noun, such as ``"1 worker"`` and ``"2 workers"``."""
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"


def brief(error: object) -> str:
    """Return the first line of an error's message, without the line of C++ source that gloo's begin with."""
    return _SOURCE.sub("", str(error).partition("\n")[0])
