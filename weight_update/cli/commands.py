"""The list of commands. A new command is a file with a ``command``, and a place in :data:`COMMANDS`."""

from __future__ import annotations

from typing import Any

import click

from weight_update import WeightSyncError, __version__
from weight_update.cli import bench, doctor, inspect, watch

COMMANDS = (doctor.command, bench.command, inspect.command, watch.command)


class _Commands(click.Group):
    """A group that shows errors of the library without a traceback, with exit status 1."""

    def invoke(self, ctx: click.Context) -> Any:
        try:
            return super().invoke(ctx)
        except BrokenPipeError:  # a pager that was left, for example
            raise
        except (WeightSyncError, OSError) as error:
            raise click.ClickException(str(error)) from error

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(self.commands)  # in the order of COMMANDS


@click.group(cls=_Commands, epilog="Example: weight-update doctor")
@click.version_option(__version__)
def weight_update() -> None:
    """Check, measure, inspect and watch the synchronization of weights."""


for _command in COMMANDS:
    weight_update.add_command(_command)
