"""The figures as a picture."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import click


def require_matplotlib() -> None:
    """Raise click.ClickException if matplotlib is not installed."""
    try:
        import matplotlib  # noqa: F401
    except ImportError:
        raise click.ClickException('--png needs matplotlib: pip install "matplotlib>=3.8"') from None


def draw(path: Path, title: str, rows: Sequence[dict[str, Any]], copy_ms: float | None) -> None:
    """Write a PNG with a bar for each row, its quartiles, and a line for the plain copy."""
    from matplotlib.figure import Figure

    shown = [row for row in rows if row["median_ms"] is not None]
    names = [f"{row['scheme']}, {row['encoding']}" for row in shown]
    medians = [row["median_ms"] for row in shown]
    below = [row["median_ms"] - row["lower_quartile_ms"] for row in shown]
    above = [row["upper_quartile_ms"] - row["median_ms"] for row in shown]
    figure = Figure(figsize=(8, 1.5 + 0.5 * len(shown)), layout="constrained")
    axes = figure.subplots()
    axes.barh(names, medians, xerr=[below, above], capsize=4)
    if copy_ms is not None:
        axes.axvline(copy_ms, color="black", linestyle="--", label="plain copy")
        axes.legend()
    axes.invert_yaxis()
    axes.set_xlabel("milliseconds until all workers have the update: median and quartiles")
    axes.set_title(title)
    figure.savefig(path, format="png", dpi=150)
