"""Stand-in with the contract of branch ``ckpt``, until that is merged: take theirs."""

from __future__ import annotations

import contextlib
import json
import logging
import os
import pickle
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import torch

__all__ = ["CheckpointStore", "CorruptCheckpointError", "Manifest"]

_log = logging.getLogger(__name__)


class CorruptCheckpointError(Exception):
    """A file is broken."""


@dataclass
class Manifest:
    """Of one version."""

    version: int
    step: int


class CheckpointStore:
    """Versions in a directory."""

    def __init__(self, directory: str | os.PathLike[str], keep: int = 2) -> None:
        self._directory = Path(directory)
        self._directory.mkdir(parents=True, exist_ok=True)

    def publish(self, version: int, tensors: Mapping[str, torch.Tensor], *, step: int) -> Path:
        """Write a version."""
        path = self._directory / f"{version}.pt"
        try:
            torch.save({name: value.clone() for name, value in tensors.items()}, path)
        except RuntimeError as error:
            raise OSError(str(error)) from None
        beside = self._directory / f"{version}.tmp"
        beside.write_text(json.dumps([version, step]))
        return beside.rename(self._directory / f"{version}.json")

    def latest(self) -> Manifest | None:
        """The newest."""
        found = [Manifest(*json.loads(path.read_text())) for path in self._directory.glob("[0-9]*.json")]
        return max(found, key=lambda one: one.version, default=None)

    @contextlib.contextmanager
    def reading(self, version: int) -> Iterator[Mapping[str, torch.Tensor]]:
        """Read a version."""
        try:
            tensors = torch.load(self._directory / f"{version}.pt", weights_only=True)
        except (RuntimeError, pickle.UnpicklingError) as error:
            raise CorruptCheckpointError(str(error)) from None
        yield tensors

    def wait_newer(self, version: int, timeout: float) -> Manifest | None:
        """Wait for a newer one."""
        deadline = time.monotonic() + timeout
        while time.monotonic() < deadline:
            newest = self.latest()
            if newest is not None and newest.version > version:
                return newest
            time.sleep(0.02)
        return None
