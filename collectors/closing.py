"""Closing of several resources, each of which may fail."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack


def close_all(*closes: Callable[[], object]) -> None:
    """Call all functions in order, also after one has raised; then raise the last error."""
    with ExitStack() as stack:
        for close in reversed(closes):
            stack.callback(close)
