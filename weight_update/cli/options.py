"""Types of command-line options."""

from __future__ import annotations

import math
from typing import Any

import click

MOST_SECONDS = 10**6
"""The largest number of seconds of an option; ``poll()`` does not take much more."""


class FiniteRange(click.FloatRange):
    """A range of numbers without infinity and NaN."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> float:
        found = float(super().convert(value, param, ctx))
        if not math.isfinite(found):
            self.fail(f"{value} is not a finite number", param, ctx)
        return found
