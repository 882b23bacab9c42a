"""Functions that wait for a condition, and that stop a process."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from pathlib import Path


def eventually(condition: Callable[[], object], seconds: float = 10.0) -> bool:
    """Return whether ``condition`` becomes true within ``seconds``."""
    deadline = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.005)
    return True


def wait_until(condition: Callable[[], object], seconds: float = 10.0) -> None:
    """Wait until ``condition`` is true.

    Raises:
        TimeoutError: it was not within ``seconds``.
    """
    if not eventually(condition, seconds):
        raise TimeoutError(f"a condition of the test did not become true within {seconds:g} s")


def freeze(pid: int) -> None:
    """Stop a process (SIGSTOP) and wait until all of its threads have stopped.

    The signal is only delivered when a thread is scheduled next: until then other threads go on.

    Raises:
        TimeoutError: the process did not stop in time.
    """
    os.kill(pid, signal.SIGSTOP)
    tasks = Path(f"/proc/{pid}/task")
    if not eventually(lambda: all(map(_has_stopped, tasks.glob("*/stat")))):
        raise TimeoutError(f"process {pid} did not stop in time")


def _has_stopped(stat: Path) -> bool:
    try:
        return stat.read_text("utf-8").rpartition(")")[2].split()[0] in "TtZX"
    except OSError:
        return True  # this thread ended meanwhile
