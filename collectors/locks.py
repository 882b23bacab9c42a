"""Locks that the workers of a MultiCollector share."""

from __future__ import annotations

import errno
import fcntl
import os
import tempfile
import threading
import time
import weakref
from multiprocessing.reduction import DupFd
from typing import Any

_RETRY_SECONDS = 0.001
_locks: weakref.WeakSet[ProcessLock] = weakref.WeakSet()


class ProcessLock:
    """A lock between processes that the kernel releases when the process that holds it ends.

    A lock of ``multiprocessing`` stays locked for ever if its process is killed. This one is a POSIX record
    lock (``fcntl.lockf``) on a file without a name. It is pickled like a lock of ``multiprocessing``: as an
    argument of a process. It is not reentrant, and a process may have only one copy of it, because the kernel
    also releases the lock when a process closes any descriptor of the file.
    """

    def __init__(self) -> None:
        with tempfile.TemporaryFile() as file:
            self._open(os.dup(file.fileno()))

    def acquire(self) -> None:
        """Wait until the lock is free, and take it."""
        self._thread.acquire()  # a record lock is held by the process
        try:
            while not self._acquire_from_processes():
                time.sleep(_RETRY_SECONDS)
        except BaseException:
            self._thread.release()
            raise

    def release(self) -> None:
        """Release the lock; a thread that did not acquire it may do so as well."""
        fcntl.lockf(self._fd, fcntl.LOCK_UN)
        self._thread.release()

    def __enter__(self) -> None:
        self.acquire()

    def __exit__(self, *error: object) -> None:
        self.release()

    def __getstate__(self) -> Any:
        return DupFd(self._fd)

    def __setstate__(self, state: Any) -> None:
        self._open(state.detach())

    def __del__(self) -> None:
        if hasattr(self, "_fd"):
            os.close(self._fd)

    def _open(self, fd: int) -> None:
        self._fd = fd
        self._thread = threading.Lock()
        _locks.add(self)

    def _acquire_from_processes(self) -> bool:
        """Take the record lock; return False where the kernel suspects a deadlock.

        The kernel sees processes, not threads: two processes may wait for each other in different threads.
        """
        try:
            fcntl.lockf(self._fd, fcntl.LOCK_EX)
        except OSError as error:
            if error.errno != errno.EDEADLK:
                raise
            return False
        return True


def _renew_thread_locks() -> None:
    """Free the locks of threads that a forked child does not have."""
    for lock in _locks:
        lock._thread = threading.Lock()


os.register_at_fork(after_in_child=_renew_thread_locks)


class WithProcessLock:
    """An attribute whose value has a lock, which becomes a :class:`ProcessLock` when the attribute is set.

    Args:
        lock: name of the lock in the value.
    """

    def __init__(self, lock: str) -> None:
        self._lock = lock

    def __set_name__(self, owner: type, name: str) -> None:
        self._name = name

    def __get__(self, instance: Any, owner: type) -> Any:
        if instance is None:
            return self
        try:
            return vars(instance)[self._name]
        except KeyError:
            raise AttributeError(self._name) from None

    def __set__(self, instance: Any, value: Any) -> None:
        if not isinstance(getattr(value, self._lock), ProcessLock):
            setattr(value, self._lock, ProcessLock())
        vars(instance)[self._name] = value
