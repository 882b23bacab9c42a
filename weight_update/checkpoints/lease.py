"""Leases: signs that a file is in use, for all processes and machines that share a directory.

A reader or writer of a file puts a lease beside it: an empty file whose modification time a thread renews. A
process that wants to remove the file watches that time. While it changes, the lease is alive. Times are only
compared with themselves, and periods are measured on the watcher's own monotonic clock, so clocks may differ
and jump.

File locks would do on one machine. Across machines several file systems keep them local without saying so,
and there a version would vanish under its readers.
"""

from __future__ import annotations

import errno
import logging
import os
import threading
import uuid
from pathlib import Path

from weight_update.errors import undo_on_error
from weight_update.threads import start_thread

LEASE = ".lease"
"""Suffix of leases."""

_RENEWALS = 6  # within the time after which a lease counts as dead
_log = logging.getLogger(__name__)


class Lease:
    """One use of a file, from construction to :meth:`end`. It lapses when the process dies.

    ``stem`` is the name of the file, without suffixes. After ``silence`` seconds without renewal others take
    the lease for dead.

    Raises:
        OSError: the directory is not writable.
    """

    def __init__(self, directory: Path, stem: str, silence: float) -> None:
        self._path = directory / f"{stem}.{uuid.uuid4().hex}{LEASE}"
        try:
            self._path.touch(exist_ok=False)
        except OSError as error:
            if error.errno not in (errno.EACCES, errno.EPERM, errno.EROFS):
                raise
            why = (
                f"{os.strerror(error.errno)}; readers, too, need to write to the directory, for their leases"
            )
            raise OSError(error.errno, why, str(directory)) from None
        self._ended, self._pid = threading.Event(), os.getpid()
        with undo_on_error(self.end):
            start_thread("weight_update-lease", _renew, self._path, self._ended, silence / _RENEWALS)

    def end(self) -> None:
        """End the use of the file. It may be called again, and does nothing in a forked process."""
        if os.getpid() == self._pid and not self._ended.is_set():
            self._ended.set()
            try:
                self._path.unlink(missing_ok=True)
            except OSError as error:  # the lease lapses by itself
                _log.warning("the lease %s could not be removed: %s", self._path, error)


def _renew(path: Path, ended: threading.Event, pause: float) -> None:
    while not ended.wait(pause):
        try:
            os.utime(path)  # the time of the file server, if there is one
        except FileNotFoundError:
            if not ended.is_set():
                why = "it was considered expired, or somebody removed it"
                _log.warning("the lease %s is gone (%s); its file may be removed", path, why)
            return
        except OSError as error:  # a server that is away for a moment
            _log.debug("the lease %s was not renewed: %s", path, error)
