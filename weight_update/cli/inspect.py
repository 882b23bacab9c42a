"""``weight-update inspect``: print and verify checkpoints, version files and frames."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from weight_update.checkpoints.io import open_regular
from weight_update.cli.contents.checkpoints import read_directory, read_version_file
from weight_update.cli.contents.frames import read_frames
from weight_update.cli.output import json_option, show
from weight_update.errors import CorruptCheckpointError
from weight_update.wire.frames import MAGIC


@click.command("inspect", epilog="Example: weight-update inspect /shared/run-7")
@click.argument("path", type=click.Path(exists=True, path_type=Path))
@json_option
@click.pass_context
def command(ctx: click.Context, path: Path, as_json: bool) -> None:
    """Print what PATH holds, and verify it.

    PATH is a directory of checkpoints, a version file in it (.json or .safetensors), or a file of one frame
    or more of the wire format. Nothing is changed. The exit status is 1 if anything is damaged or unreadable,
    and 2 if PATH holds no weights or cannot be read.
    """
    try:
        document = _read(path)
    except (CorruptCheckpointError, OSError) as error:
        raise click.BadParameter(str(error), param_hint="PATH") from error
    show(document, as_json=as_json)
    ctx.exit(0 if document["good"] else 1)


def _read(path: Path) -> dict[str, Any]:
    if path.is_dir():
        return read_directory(path)
    with open(open_regular(path), "rb") as file:
        is_frame = file.read(len(MAGIC)) == MAGIC
    return read_frames(path) if is_frame else read_version_file(path)
