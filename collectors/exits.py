"""The end of worker processes: waiting for it, and its description."""

from __future__ import annotations

import signal
import time
from collections.abc import Iterable
from multiprocessing.connection import wait
from typing import Any

_REAP_SECONDS = 5.0
_CAUSES = {-one.value: one.name for one in signal.Signals}  # by exit code
_CAUSES[-signal.SIGKILL] += ", often the kernel when memory ran out"
_CAUSES[1] = "probably an exception; see its output"


def describe_exit(process: Any) -> str:
    """Return "has ended" with the exit code of a process, and its cause: an exception or a signal by name."""
    code = process.exitcode
    cause = _CAUSES.get(code)
    return f"has ended (exit code {code}{f', {cause}' if cause else ''})"


def await_all(processes: Iterable[Any], seconds: float) -> None:
    """Wait until all processes have ended and ``is_alive()`` says so, at most ``seconds``."""
    deadline = time.monotonic() + seconds
    for process in processes:
        process.join(max(deadline - time.monotonic(), 0.0))


def await_any(processes: Iterable[Any], seconds: float) -> None:
    """Wait until a process has ended and ``is_alive()`` says so, at most ``seconds``.

    A sentinel is ready as soon as a dying process closes its files. ``is_alive()`` is still True then, until
    ``join()`` has reaped the process.
    """
    by_sentinel = {process.sentinel: process for process in processes}
    await_all([by_sentinel[ready] for ready in wait(list(by_sentinel), seconds)], _REAP_SECONDS)
