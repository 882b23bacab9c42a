"""The files of slots, in memory or in a directory, and the limits that keep a process from one."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import io
import os
import shutil
from collections.abc import Callable, Iterator
from typing import Any

from weight_update.errors import NotEnoughMemoryError, TransportError
from weight_update.text import format_megabytes
from weight_update.transports.memory_limits import require_memory

_ADD_SEALS = getattr(fcntl, "F_ADD_SEALS", 1033)
_SEAL_SEAL, _SEAL_SHRINK, _SEAL_GROW = 1, 2, 4
_SEAL_FUTURE_WRITE = 16  # Linux 5.1: mappings that exist stay writable; Python has no constant for it
LIMITS = {
    errno.EMFILE: "the process's limit of open files (ulimit -n)",
    errno.EFBIG: "the process's limit of file sizes (ulimit -f)",
}
"""Limits that a user can raise, by the error that they cause."""


def new_file(key: str, size: int, directory: str | None) -> io.FileIO:
    """Return the empty file of a slot, which has no name, unless its ``size`` exceeds the memory at hand."""
    if directory is None and not hasattr(os, "memfd_create"):
        raise TransportError(
            "shared memory slots need Linux (memfd_create); use the memory or a network transport here"
        )
    require_memory("a shared slot", size)
    if directory is None:
        return _file_of(os.memfd_create, f"weight_update-{key}", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    return _nameless_file(directory)


def _file_of(create: Callable[..., int], *args: Any) -> io.FileIO:
    """Return a file that owns the descriptor ``create(*args)``; no signal handler runs in between."""
    return next(map(io.FileIO, map(create, *([arg] for arg in args))))


def fill(fd: int, size: int, directory: str | None) -> None:
    """Give a file its memory, or raise NotEnoughMemoryError."""
    try:
        os.posix_fallocate(fd, 0, size)
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.ENOMEM):
            raise
        where, free, cure = "memory", "", "free memory or raise the container's limit"
        if directory is not None and error.errno == errno.ENOSPC:
            where, free = directory, f", {format_megabytes(shutil.disk_usage(directory).free)} are free"
            cure = "free space there, enlarge it (/dev/shm: docker run --shm-size=..., or mount -o "
            cure += "remount,size=...), or leave directory= out"
        raise NotEnoughMemoryError(
            f"{where} is too small: a shared slot of {format_megabytes(size)} is needed{free}; {cure}"
        ) from None


def _nameless_file(directory: str) -> io.FileIO:
    flags = os.O_TMPFILE | os.O_EXCL | os.O_RDWR | os.O_CLOEXEC  # O_EXCL: no process can give it a name
    try:
        return _file_of(os.open, directory, flags, 0o600)
    except OSError as error:
        raise OSError(
            error.errno,
            f"cannot keep shared memory in directory={directory!r} ({error.strerror}); give a directory in "
            "which this process can create files, such as '/dev/shm', or leave directory= out",
        ) from None


def seal(fd: int) -> None:
    """Fix the size of anonymous memory, and forbid every write except through existing mappings."""
    size = _SEAL_SEAL | _SEAL_SHRINK | _SEAL_GROW
    try:
        fcntl.fcntl(fd, _ADD_SEALS, size | _SEAL_FUTURE_WRITE)
    except OSError:  # an older kernel; the descriptors for other processes are read-only anyway
        fcntl.fcntl(fd, _ADD_SEALS, size)


@contextlib.contextmanager
def naming_limits(needed: str) -> Iterator[None]:
    """Raise NotEnoughMemoryError, with what is ``needed``, where the system has no memory or descriptor."""
    try:
        yield
    except NotEnoughMemoryError:
        raise
    except (OSError, MemoryError) as error:
        number = error.errno if isinstance(error, OSError) else errno.ENOMEM
        if (limit := LIMITS.get(number or 0)) is not None:
            raise NotEnoughMemoryError(f"{error}: {needed} is needed; raise {limit}") from None
        if number != errno.ENOMEM:
            raise
        raise NotEnoughMemoryError(
            f"this process could not map {needed} ({error}); free memory, or raise its limit (ulimit -v) or "
            "the container's"
        ) from None
