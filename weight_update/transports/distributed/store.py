"""TCPStore and other names of torch.distributed, whose compiled half has no complete type stubs."""

from __future__ import annotations

import threading
import time
import weakref
from typing import Any

import torch.distributed as dist

_FAREWELL_SECONDS = 2.0

_dist: Any = dist
HashStore: Any = _dist.HashStore
PrefixStore: Any = _dist.PrefixStore
StoreBase: Any = _dist.Store
ProcessGroupGloo: Any = _dist.ProcessGroupGloo
TCPStore: Any = _dist.TCPStore

_owned: list[Any] = []


def own(thing: Any) -> Any:
    """Keep ``thing`` alive until :meth:`disown`; return it.

    Objects with threads must not be destroyed in a forked child, where those threads do not exist. A child
    inherits this list, and never empties it.
    """
    _owned.append(thing)
    return thing


def disown(thing: Any) -> None:
    """Release ``thing``, in the process that called :meth:`own`; calling it twice is fine."""
    _owned[:] = [one for one in _owned if one is not thing]


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
