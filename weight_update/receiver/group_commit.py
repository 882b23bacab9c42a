"""Group commit: the models of one group in this process switch at the same moment."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future, wait
from dataclasses import dataclass, field
from typing import Any

from weight_update.errors import SyncTimeoutError, WorkerError, kept_error


@dataclass
class _GroupCommit:
    """One commit of a group, from its first member's arrival to its outcome."""

    members: list[Any] = field(default_factory=list)
    seconds: Future[float] = field(default_factory=Future)


_pending: dict[str, _GroupCommit] = {}
_lock = threading.Lock()


def commit_group(
    key: str, size: int, member: Any, action: Callable[[list[Any]], float], timeout: float
) -> float:
    """Wait for the other members of a group, ``size`` in all, whose commit has the same ``key``.

    The last one to arrive calls ``action`` with the list of all members. Its result, or exception, is
    everyone's.

    Raises:
        SyncTimeoutError: other members did not arrive in time, so ``action`` is not called.
    """
    with _lock:
        commit = _pending.setdefault(key, _GroupCommit())
        commit.members.append(member)
        last = len(commit.members) == size
        if last:
            del _pending[key]
    if last:
        try:
            commit.seconds.set_result(action(commit.members))
        except BaseException as error:
            known = isinstance(error, Exception)
            commit.seconds.set_exception(error if known else WorkerError(f"it ended with {error!r}"))
            raise
    elif wait([commit.seconds], timeout).not_done:
        with _lock:
            if _pending.get(key) is commit:
                del _pending[key]
                commit.seconds.set_exception(SyncTimeoutError("the other models of the group did not arrive"))
    # The last member may have arrived just now: then the action's outcome counts.
    if (failure := commit.seconds.exception()) is not None:
        raise kept_error(failure)
    return commit.seconds.result()
