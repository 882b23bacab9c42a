"""Processes of this pid namespace: whether one still executes."""

from __future__ import annotations

import os
import select
import weakref


class WatchedProcess:
    """A process of this pid namespace, recognized even after the kernel has used its id again.

    Raises:
        ProcessLookupError: there is no such process.
        AttributeError, OSError: this kernel, or a sandbox, does not tell.
    """

    def __init__(self, pid: int) -> None:
        self._fd = os.pidfd_open(pid)
        weakref.finalize(self, os.close, self._fd).atexit = False  # it is asked until the end of the process

    @property
    def ended(self) -> bool:
        """Whether all its threads have ended, even before it is reaped."""
        poller = select.poll()
        poller.register(self._fd, select.POLLIN)
        return any(event & select.POLLIN for _, event in poller.poll(0))


def may_run(pid: int) -> bool:
    """Return whether a process of this pid namespace may still execute; True when that is unknown."""
    try:
        return not WatchedProcess(pid).ended
    except ProcessLookupError:
        return False
    except (OSError, AttributeError):
        return True
