"""Doing things to processes of a test."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

__all__ = ["freeze"]


def freeze(pid: int, timeout: float = 10.0) -> None:
    """Stop a process (SIGSTOP) and wait until every thread of it stands still.

    The signal is only delivered when a thread is scheduled next: until then others of the process go on.

    Raises:
        TimeoutError: it did not stop in time.
    """
    os.kill(pid, signal.SIGSTOP)
    deadline = time.monotonic() + timeout
    while not all(_stands(stat) for stat in Path(f"/proc/{pid}/task").glob("*/stat")):
        if time.monotonic() > deadline:
            raise TimeoutError(f"process {pid} did not stop within {timeout:g} s")
        time.sleep(0.001)


def _stands(stat: Path) -> bool:
    try:
        return stat.read_text().rpartition(")")[2].split()[0] in "TtZX"
    except OSError:
        return True  # this thread ended meanwhile
