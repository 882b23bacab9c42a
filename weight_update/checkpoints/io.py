"""Files that are there whole or not at all, also after a crash or a power cut."""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import stat
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TypeVar

from weight_update.errors import NotEnoughSpaceError

__all__ = ["PART", "Remover", "naming_free_space", "open_regular", "read_regular", "write_beside"]

PART = ".part"
"""Ending of files that are being written."""

_T = TypeVar("_T")
_log = logging.getLogger(__name__)


class Remover:
    """Removal of files, one by one: what cannot be removed is logged once, and does not stop the others."""

    def __init__(self) -> None:
        self._failed: set[str] = set()

    def remove(self, path: Path) -> bool:
        """Remove a file; return whether it is gone."""
        try:
            path.unlink(missing_ok=True)
        except OSError as error:
            if str(path) not in self._failed:
                self._failed.add(str(path))
                _log.warning("old checkpoints stay for now: %s", error)
            return False
        self._failed.discard(str(path))
        return True


def open_regular(path: Path) -> int:
    """Open a file for reading, and never wait: a FIFO of that name is an error.

    Returns:
        the file descriptor.

    Raises:
        OSError: it cannot be opened, or is not a regular file.
    """
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    if not stat.S_ISREG(os.fstat(fd).st_mode):
        os.close(fd)
        raise OSError(errno.EINVAL, "not a regular file", str(path))
    return fd


def read_regular(path: Path) -> bytes:
    """Return the contents of a file; see :func:`open_regular`."""
    with open(open_regular(path), "rb") as file:
        return file.read()


def write_beside(part: Path, path: Path, write: Callable[[int], _T]) -> _T:
    """Write to ``part``, wait until the disk has it, and rename it to ``path`` in the same directory.

    Args:
        part: removed again if anything fails.
        path: replaced if it exists.
        write: gets the file descriptor.

    Raises:
        OSError: it could not be written.
    """
    mode = stat.S_IMODE(path.parent.stat().st_mode) & 0o666  # for nobody who may not read the directory
    fd = os.open(part, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, mode)
    try:
        try:
            result = write(fd)
            os.fsync(fd)
        finally:
            os.close(fd)
        os.replace(part, path)
    except BaseException:
        part.unlink(missing_ok=True)
        raise
    _sync_directory(path.parent)
    return result


def _sync_directory(directory: Path) -> None:
    fd = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


@contextlib.contextmanager
def naming_free_space(directory: Path, needed: int) -> Iterator[None]:
    """Say how much is free and needed (in bytes) where the disk, or a quota, is full.

    Raises:
        NotEnoughSpaceError: instead of the operating system's error.
    """
    try:
        yield
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.EDQUOT):
            raise
        stats = os.statvfs(directory)
        free = stats.f_bavail * stats.f_frsize
        quota = " and a quota is used up" if error.errno == errno.EDQUOT else ""
        message = (
            f"a checkpoint of {needed / 1e6:.1f} MB ({needed} bytes) is needed, "
            f"{free / 1e6:.1f} MB ({free} bytes) are free{quota}; "
            "free some space, keep fewer versions, or use another directory"
        )
        raise NotEnoughSpaceError(error.errno, message, str(directory)) from None
