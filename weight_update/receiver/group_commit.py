"""Members of one group in this process that switch at one moment."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

from weight_update.errors import SyncTimeoutError, WorkerError

__all__ = ["run_jointly"]


class _Joint:
    def __init__(self, size: int) -> None:
        self.size = size
        self.members: list[Any] = []
        self.done = threading.Event()
        self.error: Exception | None = None
        self.seconds = 0.0


_joints: dict[str, _Joint] = {}
_lock = threading.Lock()


def run_jointly(
    key: str, size: int, member: Any, action: Callable[[list[Any]], float], timeout: float
) -> float:
    """Wait for the other members; the last to come runs ``action`` for all.

    Args:
        key: what the members have in common.
        size: how many there are.
        member: this one.
        action: called once with all members.
        timeout: seconds to wait for the last one to come.

    Returns:
        what ``action`` returned. What it raises is raised for each member.

    Raises:
        SyncTimeoutError: others did not come; ``action`` is not called then.
    """
    with _lock:
        joint = _joints.setdefault(key, _Joint(size))
        joint.members.append(member)
        last = len(joint.members) == joint.size
        if last:
            del _joints[key]
    if last:
        try:
            joint.seconds = action(joint.members)
        except BaseException as error:
            joint.error = error if isinstance(error, Exception) else WorkerError(f"it ended with {error!r}")
            raise
        finally:
            joint.done.set()
    elif not joint.done.wait(timeout):
        with _lock:
            if _joints.get(key) is joint:
                del _joints[key]
                joint.error = SyncTimeoutError("the other models of the group did not arrive")
                joint.done.set()
        joint.done.wait()  # else the last one came: the outcome of the action is the only true answer
    if joint.error is not None:
        raise joint.error
    return joint.seconds
