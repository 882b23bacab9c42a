"""Findings, and checks that are run beside each other, each with a time limit of its own."""

from __future__ import annotations

import functools
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, wait
from dataclasses import dataclass
from typing import Literal

from weight_update.threads import call_in_thread

BYTE = 42
"""The byte that checks write into memory that another process is to read."""
THREADS = "doctor"
"""Beginning of the names of threads of checks."""

Status = Literal["ok", "warn", "fail", "skipped"]


@dataclass(frozen=True)
class Finding:
    """The result of one check.

    Attributes:
        status: ``"fail"`` if a scheme cannot work, ``"warn"`` if something is missing that some programs
            need, ``"skipped"`` if there was nothing to check.
        found: what the check found.
        cure: what to do about it; empty if all is well.
    """

    status: Status
    found: str
    cure: str = ""


ok = functools.partial(Finding, "ok")
warn = functools.partial(Finding, "warn")
fail = functools.partial(Finding, "fail")
skipped = functools.partial(Finding, "skipped")


@dataclass(frozen=True)
class Check:
    """One thing to look at.

    Attributes:
        name: name of the check in the output.
        look: function that looks and returns its finding.
        cure: what to do if ``look`` fails with an error, or does not end.
        seconds: time limit.
    """

    name: str
    look: Callable[[], Finding]
    cure: str
    seconds: float = 5.0


def run(checks: Sequence[Check]) -> list[tuple[str, Finding]]:
    """Run all checks at once, and return their names and findings in order.

    A check that does not end in time is abandoned.
    """
    began = time.monotonic()
    running = [(check, call_in_thread(f"{THREADS}-{check.name}", check.look)) for check in checks]
    return [(check.name, _finding(check, result, began + check.seconds)) for check, result in running]


def _finding(check: Check, result: Future[Finding], deadline: float) -> Finding:
    if not wait([result], max(0.0, deadline - time.monotonic())).done:
        return fail(f"the check did not end within {check.seconds:g} s", check.cure)
    if (error := result.exception()) is not None:
        return fail(f"{type(error).__name__}: {error}", check.cure)
    return result.result()


def still_running() -> bool:
    """Return whether threads of checks that were abandoned still run."""
    return any(thread.name.startswith(THREADS) for thread in threading.enumerate())


def problem_of_reader(arguments: Sequence[str], seconds: float, pass_fds: Sequence[int] = ()) -> str:
    """Run a Python that prints a shared byte, which is ``BYTE``; return the reason why it cannot, or ""."""
    command = [sys.executable, *arguments]
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=seconds, check=False, pass_fds=pass_fds
    )
    if done.stdout.strip() == str(BYTE):
        return ""
    return (done.stderr.strip().splitlines() or ["it read something else"])[-1]
