"""Closing of several resources, each of which may fail."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack

ENDED = "this collector was shut down; make a new collector"
"""Message of the error of a call after the shutdown."""


def close_all(*closes: Callable[[], object]) -> None:
    """Call all functions in order, also after one has raised; then raise the last error."""
    with ExitStack() as stack:
        for close in reversed(closes):
            stack.callback(close)
