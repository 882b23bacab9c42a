"""Locks on the slots that forked children of a receiver read, so that the sender does not write there.

A forked child has the mappings of its parent, but no connection to the sender. Therefore the parent locks
each slot in use before a fork (``flock``), through a descriptor that only the child keeps. The lock ends when
the child does, or executes another program.
"""

from __future__ import annotations

import contextlib
import fcntl
import mmap
import os
import threading
import weakref


class SlotFile:
    """The file of a slot that this process has mapped; it stays open as long as it is mapped."""

    def __init__(self, fd: int, mapping: mmap.mmap) -> None:
        self.users = 0  # number of payloads in the slot that are in use in this process
        self._fd = os.dup(fd)
        weakref.finalize(mapping, self._close).atexit = False
        _files[self._fd] = self

    def _close(self) -> None:
        self.users = 0  # first: the descriptor's number may get another owner
        os.close(self._fd)

    def lock(self) -> int:
        """Return a new descriptor that holds a lock until its last copy is closed.

        Raises:
            OSError: the file cannot be opened again.
        """
        locked = os.open(f"/proc/self/fd/{self._fd}", os.O_RDONLY | os.O_CLOEXEC)
        with contextlib.suppress(BlockingIOError):  # the sender writes there soon, so it is in use no more
            fcntl.flock(locked, fcntl.LOCK_SH | fcntl.LOCK_NB)
        return locked


class _Fork(threading.local):
    """Descriptors with the locks for the child that this thread is about to fork."""

    def __init__(self) -> None:
        self.locks: list[int] = []


_files: weakref.WeakValueDictionary[int, SlotFile] = weakref.WeakValueDictionary()
_fork = _Fork()
_kept: list[int] = []
"""Descriptors with the locks of this process, as a child; they stay open."""


def _lock_slots() -> None:
    for file in [ref() for ref in _files.valuerefs()]:  # other threads may add files meanwhile
        if file is not None and file.users:
            with contextlib.suppress(OSError):
                _fork.locks.append(file.lock())


def _leave_locks_to_child() -> None:
    while _fork.locks:
        os.close(_fork.locks.pop())


def _keep_locks() -> None:
    _lock_slots()  # once more: between the locks and the fork, an update may have come in another slot
    _kept.extend(_fork.locks)
    _fork.locks.clear()


os.register_at_fork(before=_lock_slots, after_in_parent=_leave_locks_to_child, after_in_child=_keep_locks)
