"""Findings, and checks that are run beside each other, each with a time limit of its own."""

from __future__ import annotations

import functools
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

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


class _Running:
    """A check in a thread of its own, which is abandoned if it does not end in time."""

    def __init__(self, check: Check) -> None:
        late = f"the check did not end within {check.seconds:g} s"
        self._check, self._finding = check, fail(late, check.cure)
        self._deadline = time.monotonic() + check.seconds
        self._thread = threading.Thread(target=self._look, name=f"{THREADS}-{check.name}", daemon=True)
        self._thread.start()

    def _look(self) -> None:
        try:
            self._finding = self._check.look()
        except Exception as error:  # noqa: BLE001 - any error of a check is a finding
            self._finding = fail(f"{type(error).__name__}: {error}", self._check.cure)

    def finding(self) -> Finding:
        """Return the finding, at the time limit at the latest."""
        self._thread.join(max(0.0, self._deadline - time.monotonic()))
        return self._finding


def run(checks: Sequence[Check]) -> list[tuple[str, Finding]]:
    """Run all checks at once, and return their names and findings in order."""
    running = [_Running(check) for check in checks]
    return [(check.name, one.finding()) for check, one in zip(checks, running, strict=True)]


def still_running() -> bool:
    """Return whether threads of checks that were abandoned still run."""
    return any(thread.name.startswith(THREADS) for thread in threading.enumerate())
