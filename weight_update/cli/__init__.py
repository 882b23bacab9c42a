"""The command ``weight-update``, which needs the extra ``cli``."""

from __future__ import annotations

import sys

__all__ = ["main"]

_PACKAGES = ("click", "packaging", "rich")  # of the extra


def main() -> None:
    """Run the command that ``sys.argv`` names, and end the process with its exit status."""
    try:
        from weight_update.cli.commands import weight_update
    except ModuleNotFoundError as error:
        package = str(error.name).partition(".")[0]
        if package not in _PACKAGES:
            raise
        sys.exit(f'weight-update needs the package {package}: pip install "weight-update[cli]"')
    weight_update(prog_name="weight-update")
