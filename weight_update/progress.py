"""Progress of long transfers: nothing for two seconds, then a bar on a terminal and log lines elsewhere."""

from __future__ import annotations

import contextlib
import logging
import math
import multiprocessing
import os
import shutil
import sys
import threading
import time
from collections.abc import Callable
from contextvars import ContextVar
from typing import TextIO

SHOW_AFTER = 2.0
"""Seconds that a transfer or a wait may take before it is shown."""

LEAST_BYTES = 8 << 20
"""Number of bytes below which a transfer is never shown."""

_SWITCH = "WEIGHT_UPDATE_PROGRESS"
_BAR_SECONDS, _LINE_SECONDS = 0.1, 10.0  # between two signs of one transfer
_BAR_CHARS = 10

_log = logging.getLogger(__name__)


def show_progress(on: bool) -> None:
    """Switch progress on or off, in this process and in processes that it starts from now on.

    Progress is on by default, unless the environment variable ``WEIGHT_UPDATE_PROGRESS`` is ``0``. This
    function sets that variable.
    """
    os.environ[_SWITCH] = "1" if on else "0"


class Progress:
    """The progress of one transfer; a context manager.

    Of several transfers at a time, the terminal shows the first until it ends.

    Args:
        what: text that names the transfer, such as ``"sending weights"``.
        total: number of bytes to transfer.
    """

    def __init__(self, what: str, total: int) -> None:
        self._what, self._total, self._done = what, total, 0
        self._terminal: TextIO | None = None
        self._began, self._next, self._logged = time.monotonic(), math.inf, False
        self._counting = threading.Lock()
        self._outer: Progress | None = None
        if total >= LEAST_BYTES and _is_on():
            self._terminal, self._next = _find_terminal(), self._began + SHOW_AFTER

    def advance(self, nbytes: int) -> None:
        """Note that ``nbytes`` more were transferred. Any thread may call this."""
        with self._counting:
            self._done = min(self._done + nbytes, self._total)
            now = time.monotonic()
            if now < self._next:
                return
            self._next = now + (_LINE_SECONDS if self._terminal is None else _BAR_SECONDS)
        self._show(now)

    def _show(self, now: float) -> None:
        global _shown
        share = self._done / self._total
        text = f"{share:.0%} of {self._total / 1e6:,.0f} MB in {now - self._began:.0f} s"
        if self._terminal is None:
            self._logged = True
            _log.info("%s: %s", self._what, text)
        elif _shown in (None, self):
            _shown = self
            bar = "#" * int(share * _BAR_CHARS)
            _write(self._terminal, f"{self._what} [{bar:<{_BAR_CHARS}}] {text}")

    def __enter__(self) -> Progress:
        self._outer = _current.get()
        _current.set(self)
        return self

    def __exit__(self, *exc_info: object) -> None:
        global _shown
        _current.set(self._outer)
        if self._logged:
            self._show(time.monotonic())
        if self._terminal is not None and _shown is self:
            _shown = None
            _write(self._terminal, "")


_current: ContextVar[Progress | None] = ContextVar("progress", default=None)  # the innermost of a thread
_shown: Progress | None = None  # on the terminal


def advancer() -> Callable[[int], None]:
    """Return a function that notes so many more transferred bytes, for any thread.

    It notes them in the progress whose context the calling thread is in, if any.
    """
    progress = _current.get()
    return (lambda nbytes: None) if progress is None else progress.advance


def notice(text: str) -> None:
    """Show a line of text, on the terminal or in the log, unless progress is switched off."""
    if not _is_on():
        return
    terminal = _find_terminal()
    if terminal is None:
        _log.info("%s", text)
    else:
        _write(terminal, "")  # over a bar
        _write(terminal, text, whole=True)


def _is_on() -> bool:
    return os.environ.get(_SWITCH) != "0"


def _find_terminal() -> TextIO | None:
    """Return the terminal, if this process has one and is the one of its group that writes to it."""
    with contextlib.suppress(AttributeError, ValueError):  # there may be no stderr, or it may be closed
        first = multiprocessing.parent_process() is None and os.environ.get("LOCAL_RANK", "0") == "0"
        if first and sys.stderr.isatty():
            return sys.stderr
    return None


def _write(terminal: TextIO, text: str, *, whole: bool = False) -> None:
    """Write over the line of the cursor: a part that fits and that the next text replaces, or ``whole``."""
    with contextlib.suppress(OSError, ValueError):  # a transfer goes on if the terminal is gone
        its_own = os.get_terminal_size(terminal.fileno()).columns or 80, 24
        width = shutil.get_terminal_size(fallback=its_own).columns - 1  # stdout may be a file
        terminal.write(f"{text}\n" if whole else f"\r{text[:width]:<{width}}\r")
        terminal.flush()
