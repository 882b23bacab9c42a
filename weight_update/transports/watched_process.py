"""Processes of this pid namespace: whether one still executes."""

from __future__ import annotations

import os
import select
import weakref


class WatchedProcess:
    """A process of this pid namespace, recognized even after the kernel has used its id again.

    If this kernel, or a sandbox, does not tell, it counts as executing.
    """

    def __init__(self, pid: int) -> None:
        self.missing: bool = False  # whether there was no such process when this object was made
        self._fd: int | None = None
        try:
            self._fd = os.pidfd_open(pid)
        except ProcessLookupError:
            self.missing = True
        except (OSError, AttributeError):
            pass
        else:
            weakref.finalize(self, os.close, self._fd).atexit = False  # asked until the end of this process

    @property
    def ended(self) -> bool:
        """Whether all its threads have ended, even before it is reaped."""
        if self._fd is None:
            return self.missing
        poller = select.poll()
        poller.register(self._fd, select.POLLIN)
        return any(event & select.POLLIN for _, event in poller.poll(0))


def may_run(pid: int) -> bool:
    """Return whether a process of this pid namespace may still execute; True when that is unknown."""
    return not WatchedProcess(pid).ended
