"""``weight-update bench``: measure this machine, and recommend a scheme and an encoding."""

from __future__ import annotations

import contextlib
import logging
import os
import statistics
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import click
from click.core import ParameterSource

from weight_update.cli.measuring.advice import case_row, network_advice, recommendation
from weight_update.cli.measuring.chart import draw, require_matplotlib
from weight_update.cli.measuring.models import ModelSource
from weight_update.cli.measuring.rounds import ENCODINGS, RAY, SCHEMES, Plan, Results, measure
from weight_update.cli.options import MOST_SECONDS, FiniteRange
from weight_update.cli.output import json_option, progress, show
from weight_update.progress import show_progress
from weight_update.text import format_size, plural
from weight_update.transports.ray.rendezvous import import_ray

_LEAST_SECONDS = 1.0
_LOCAL = tuple(name for name in SCHEMES if name != RAY)


def _picture(ctx: click.Context, param: click.Parameter, value: Path | None) -> Path | None:
    """Check that a picture can be written, before anything is measured."""
    del ctx, param
    if value is None:
        return None
    if value.suffix.lower() != ".png":
        raise click.BadParameter(f"the picture is a PNG: {str(value)!r} must end with .png")
    if not value.parent.is_dir():
        raise click.BadParameter(f"the directory {value.parent} does not exist")
    require_matplotlib()
    return value


@click.command("bench", epilog="Example: weight-update bench --size 200 --workers 4 --changed 0.02")
@click.option(
    "--size",
    type=FiniteRange(min=0, min_open=True),
    default=50.0,
    show_default=True,
    help="Size of the model in MB, in bfloat16; not with --model.",
)
@click.option(
    "--model",
    "path",
    metavar="MODULE:ATTRIBUTE",
    help="Import path of your own module, or of a function that returns it, such as my_policy:Policy.",
)
@click.option(
    "--workers", type=click.IntRange(min=1), default=2, show_default=True, help="Number of worker processes."
)
@click.option(
    "--changed",
    type=FiniteRange(0, 1),
    default=0.01,
    show_default=True,
    help="Share of the elements that change in each update.",
)
@click.option(
    "--scheme",
    "schemes",
    type=click.Choice(tuple(SCHEMES)),
    multiple=True,
    default=_LOCAL,
    help="Scheme to measure; may be given several times.  [default: all but ray]",
)
@click.option(
    "--encoding",
    "encodings",
    type=click.Choice(ENCODINGS),
    multiple=True,
    default=ENCODINGS,
    help="Encoding to measure; may be given several times.  [default: all]",
)
@click.option(
    "--seconds",
    type=FiniteRange(min=_LEAST_SECONDS, max=MOST_SECONDS),
    default=60.0,
    show_default=True,
    help="Time limit, from the start of the command. The measurement ends earlier when it has enough rounds.",
)
@click.option(
    "--png",
    type=click.Path(dir_okay=False, writable=True, path_type=Path),
    callback=_picture,
    help="Write a picture to this file, which ends with .png; other formats are not supported.",
)
@json_option
@click.pass_context
def command(
    ctx: click.Context,
    size: float,
    path: str | None,
    workers: int,
    changed: float,
    schemes: tuple[str, ...],
    encodings: tuple[str, ...],
    seconds: float,
    png: Path | None,
    as_json: bool,
) -> None:
    """Measure updates on this machine, and recommend a scheme and an encoding.

    All schemes and encodings send the same changes in turns, to real worker processes on this machine.
    Workers of the distributed scheme get their weights over loopback, as over a network. The table shows the
    time from send() until all workers have applied the update. The exit status is 1 if anything could not be
    measured.
    """
    if path is not None and ctx.get_parameter_source("size") is not ParameterSource.DEFAULT:
        raise click.UsageError("--size is for a model that bench makes; leave it out, or leave out --model")
    show_progress(False)  # bars of transfers would break the one of bench
    sys.path.insert(0, os.getcwd())  # for the module of the user, also in workers
    schemes, encodings = _in_order(SCHEMES, schemes), _in_order(ENCODINGS, encodings)
    left = max(_LEAST_SECONDS, seconds - (ctx.obj or 0.0))
    plan = Plan(ModelSource(size, path), workers, schemes, encodings, changed, left)
    with _ray() if RAY in schemes else contextlib.nullcontext(), progress() as display:
        task = display.add_task("starting", total=1.0)
        results = measure(plan, lambda what, share: display.update(task, description=what, completed=share))
    document = _document(plan, results)
    show(document, as_json=as_json)
    if png is not None:
        title = (
            f"{format_size(document['model_bytes'])} to {plural(workers, 'worker')}, {changed:.2%} changed"
        )
        draw(png, title, document["updates"], document["plain_copy_ms"])
    ctx.exit(0 if document["good"] else 1)


def _in_order(known: Iterable[str], chosen: tuple[str, ...]) -> tuple[str, ...]:
    return tuple(name for name in known if name in chosen)


def _document(plan: Plan, results: Results) -> dict[str, Any]:
    rows = [case_row(case, results.copies) for case in results.cases]
    return {
        "good": all(row["problem"] is None and row["updates"] for row in rows),
        "model_bytes": results.nbytes,
        "tensors": results.tensors,
        "workers": plan.workers,
        "changed_share": plan.share,
        "plain_copy_ms": 1e3 * statistics.median(results.copies) if results.copies else None,
        "updates": rows,
        **recommendation(results),
        "network": network_advice(results),
    }


@contextlib.contextmanager
def _ray() -> Iterator[None]:
    """Run Ray while the block runs."""
    try:
        ray = import_ray()
    except ImportError as error:
        raise click.ClickException(str(error)) from None
    ray.init(include_dashboard=False, log_to_driver=False, logging_level=logging.ERROR)
    try:
        yield
    finally:
        ray.shutdown()
