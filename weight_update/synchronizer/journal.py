"""What a synchronizer must remember to go on after a restart: the number of the newest version."""

from __future__ import annotations

import json
import logging
import os
import threading
from pathlib import Path

from weight_update.checkpoints.io import read_regular

__all__ = ["Journal"]

_log = logging.getLogger(__name__)


class Journal:
    """A small file in a directory, replaced as a whole at each new version.

    It survives the death of the process. Weights are not in it.

    Args:
        directory: made if it does not exist, for this user alone.
    """

    def __init__(self, directory: str | os.PathLike[str]) -> None:
        self._path = Path(directory) / "synchronizer.json"
        self._path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        self._writing = threading.Lock()
        self._unwritten: tuple[int, int] | None = None

    def read(self) -> tuple[int, int] | None:
        """Version and trainer step last written; None if there is nothing that can be read."""
        try:
            fields = json.loads(read_regular(self._path))
            return int(fields["version"]), int(fields["step"])
        except FileNotFoundError:
            return None
        except (OSError, ValueError, KeyError, TypeError) as error:
            _log.warning("%s cannot be read and is ignored: %s", self._path, error)
            return None

    def note(self, version: int, step: int) -> None:
        """Take down a version for the next :meth:`flush`. Does not touch the disk."""
        self._unwritten = version, step

    def flush(self) -> None:
        """Write the version noted last, if that is still to be done; call it without a lock held."""
        if self._unwritten is None:
            return
        with self._writing:
            newest, self._unwritten = self._unwritten, None
            if newest is not None:
                self._write(*newest)

    def _write(self, version: int, step: int) -> None:
        """Replace what was written before; a full disk is logged, and the run goes on without."""
        beside = self._path.with_suffix(f".{os.getpid()}")
        try:
            beside.unlink(missing_ok=True)
            with beside.open("x") as file:
                file.write(json.dumps({"version": version, "step": step}))
            beside.replace(self._path)
        except OSError as error:
            _log.warning("%s could not be written; a restart begins with an older version: %s", beside, error)
