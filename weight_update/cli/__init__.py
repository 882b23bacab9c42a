"""The command ``weight-update``, which needs the extra ``cli``."""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path

__all__ = ["main"]

_PACKAGES = ("click", "packaging", "prometheus_client", "rich")  # of the extra


def main() -> None:
    """Run the command that ``sys.argv`` names, and end the process with its exit status."""
    try:
        from weight_update.cli.commands import weight_update
    except KeyboardInterrupt:
        sys.exit("Aborted!")  # as the commands say it
    except ModuleNotFoundError as error:
        package = str(error.name).partition(".")[0]
        if package not in _PACKAGES:
            raise
        sys.exit(f'weight-update needs the package {package}: pip install "weight-update[cli]"')
    for stream in ("stdout", "stderr"):
        if getattr(sys, stream) is None:  # the caller closed it
            void = open(os.devnull, "w", encoding="utf-8")  # noqa: SIM115 - open until the process ends
            setattr(sys, stream, void)
    weight_update(prog_name="weight-update", obj=_seconds_so_far())


def _seconds_so_far() -> float:
    """Return the age of this process: importing torch takes seconds. It is 0 if it cannot be known."""
    try:
        fields = Path("/proc/self/stat").read_text("utf-8").rpartition(")")[2].split()
        began = int(fields[19]) / os.sysconf("SC_CLK_TCK")  # field 22, of which two stand before the ")"
        return time.clock_gettime(time.CLOCK_BOOTTIME) - began
    except (OSError, ValueError, IndexError, AttributeError):
        return 0.0
