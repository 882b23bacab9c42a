"""A warning for workers that were forked from a process with OpenMP threads."""

from __future__ import annotations

import contextlib
import logging
import os
import threading
from pathlib import Path

import torch

_log = logging.getLogger(__name__)
_TASKS = Path("/proc/self/task")


def _library_threads() -> set[str]:
    """Return the threads that libraries started without a name, among them those of OpenMP."""
    threads: set[str] = set()
    with contextlib.suppress(OSError):  # no such folder on this system
        ours = {str(thread.native_id) for thread in threading.enumerate()}
        name = Path("/proc/self/comm").read_bytes()
        for task in {path.name for path in _TASKS.iterdir()} - ours:
            with contextlib.suppress(OSError):  # it ended meanwhile
                if (_TASKS / task / "comm").read_bytes() == name:
                    threads.add(task)
    return threads


class _Fork:
    """State of the last fork."""

    at_import = _library_threads()
    """Threads that existed before any computation; NumPy's work after a fork."""
    lost_threads = False
    """Whether the parent had more threads than these at the last fork."""
    suspect = False
    """Whether that fork made this process, and no warning was logged yet."""


def _before() -> None:
    _Fork.lost_threads = bool(_library_threads() - _Fork.at_import)


def _in_child() -> None:
    _Fork.suspect = _Fork.lost_threads


os.register_at_fork(before=_before, after_in_child=_in_child)


def warn_if_forked() -> None:
    """Log a warning, once, if multithreaded operations may hang in this process."""
    if _Fork.suspect and torch.get_num_threads() > 1:
        _Fork.suspect = False
        _log.warning(
            "this worker was forked from a process whose libraries had started threads, as OpenMP does when "
            "PyTorch computes: operations of several threads may hang here for ever. Start workers with "
            "multiprocessing.get_context('spawn'), or call torch.set_num_threads(1) first in each of them"
        )
