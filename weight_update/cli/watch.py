"""``weight-update watch``: follow the updates of a running trainer."""

from __future__ import annotations

import contextlib
import time
import urllib.error
import urllib.parse
from collections.abc import Iterator
from http.client import HTTPException

import click

from weight_update.cli.metrics import Metrics, document_of, fetch
from weight_update.cli.options import MOST_SECONDS, FiniteRange
from weight_update.cli.output import Document, json_option, screen

_CURE = (
    "Add a PrometheusObserver to the trainer's scheme, and give its attribute url. Other machines reach it "
    "only if it has addr=, such as PrometheusObserver(9400, addr='10.0.0.5')"
)


def _address(ctx: click.Context, param: click.Parameter, value: str) -> str:
    del ctx, param
    try:
        parts = urllib.parse.urlsplit(value)
        valid = parts.scheme in ("http", "https") and parts.hostname and parts.port != 0
    except ValueError:  # the port is no number, for example
        valid = False
    if not valid or not value.isascii() or any(one <= " " for one in value):
        raise click.BadParameter(
            f"{value!r} is not an address such as http://127.0.0.1:9400/metrics. {_CURE}"
        )
    return value


@click.command("watch", epilog="Example: weight-update watch http://127.0.0.1:9400/metrics")
@click.argument("url", callback=_address)
@click.option(
    "--every",
    type=FiniteRange(min=0, min_open=True, max=MOST_SECONDS),
    default=1.0,
    show_default=True,
    help="Seconds between two looks.",
)
@click.option("--once", is_flag=True, help="Look once, and end.")
@json_option
def command(url: str, every: float, once: bool, as_json: bool) -> None:
    """Follow the updates of a running trainer, and the state of every worker.

    URL is the address of the trainer's PrometheusObserver. Workers that are lost or late come first. With
    --json, each look is one line. Ctrl-C ends the command. The exit status is 1 if the trainer cannot be
    reached, or no longer answers.
    """
    with contextlib.suppress(KeyboardInterrupt), screen(as_json=as_json, live=not once) as draw:
        for document in _looks(url, every):
            draw(document)
            if once:
                return


def _looks(url: str, every: float) -> Iterator[Document]:
    """Yield one document after the other, for ever.

    Raises:
        click.ClickException: the trainer cannot be reached, or no longer answers.
    """
    before: Metrics | None = None
    while True:
        try:
            now = fetch(url)
            document = document_of(now, before)
        except (OSError, HTTPException, ValueError, OverflowError) as error:
            reason = _reason(error)
            if before is None:
                raise click.ClickException(f"cannot watch {url}: {reason}. {_CURE}") from error
            raise click.ClickException(f"{url} can no longer be watched: {reason}") from error
        before = now
        yield document
        time.sleep(every)


def _reason(error: Exception) -> str:
    if isinstance(error, urllib.error.HTTPError):
        error.close()
        return f"the answer is HTTP status {error.code}"
    if isinstance(error, urllib.error.URLError):
        return str(error.reason)
    if isinstance(error, HTTPException):
        return f"the answer is not HTTP ({type(error).__name__})"
    return str(error)
