"""What a synchronizer must remember to go on after a restart: the number of the newest version."""

from __future__ import annotations

import json
import logging
import os
from pathlib import Path

__all__ = ["Journal"]

_log = logging.getLogger(__name__)


class Journal:
    """A small file in a directory, replaced as a whole at each new version.

    It survives the death of the process. Weights are not in it.

    Args:
        directory: made if it does not exist.
    """

    def __init__(self, directory: str | os.PathLike[str]) -> None:
        self._path = Path(directory) / "synchronizer.json"
        self._path.parent.mkdir(parents=True, exist_ok=True)

    def read(self) -> tuple[int, int] | None:
        """Version and trainer step last written; None if there is nothing that can be read."""
        try:
            fields = json.loads(self._path.read_text())
            return int(fields["version"]), int(fields["step"])
        except FileNotFoundError:
            return None
        except (OSError, ValueError, KeyError, TypeError) as error:
            _log.warning("%s cannot be read and is ignored: %s", self._path, error)
            return None

    def write(self, version: int, step: int) -> None:
        """Replace what was written before; a full disk is logged, and the run goes on without."""
        beside = self._path.with_suffix(f".{os.getpid()}")
        try:
            beside.write_text(json.dumps({"version": version, "step": step}))
            beside.replace(self._path)
        except OSError as error:
            _log.warning("%s could not be written; a restart begins with an older version: %s", beside, error)
