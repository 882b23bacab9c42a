"""Threads that may run C++ code of PyTorch while the interpreter exits."""

from __future__ import annotations

import threading
import time
import weakref

_FAREWELL_SECONDS = 2.0

_threads: weakref.WeakSet[threading.Thread] = weakref.WeakSet()


def leave_in_order(thread: threading.Thread) -> None:
    """Make the interpreter's exit wait briefly for ``thread``, which may return from C++ at that moment.

    Otherwise the process would abort.
    """
    _threads.add(thread)


def _await_threads() -> None:
    deadline = time.monotonic() + _FAREWELL_SECONDS
    for thread in [one for one in _threads if one.is_alive()]:
        thread.join(max(deadline - time.monotonic(), 0.0))


# At exit, finalizers run from the newest to the oldest: schemes are shut down first, which ends the threads.
weakref.finalize(leave_in_order, _await_threads)
