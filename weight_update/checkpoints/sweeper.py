"""Removal of old versions and of what dead writers left."""

from __future__ import annotations

import logging

from weight_update.checkpoints.io import Remover
from weight_update.checkpoints.lease import Leases
from weight_update.checkpoints.manifest import Catalogue

__all__ = ["Sweeper"]

_log = logging.getLogger(__name__)


class Sweeper:
    """Keeps the newest versions in a directory, and those that somebody reads.

    A manifest goes first, then leases are looked at again, then the data goes. A reader makes its lease first
    and then looks whether the manifest is still there. So one of the two sees the other. Leases lie in the
    directory of the manifests because NFS reads the names anew after a change that it made itself.

    Args:
        catalogue: of the directory.
        lease_seconds: after which a lease that is not renewed counts as dead.
        keep: how many complete versions stay.
    """

    def __init__(self, catalogue: Catalogue, lease_seconds: float, keep: int) -> None:
        self._remover = Remover()
        self._leases = Leases(catalogue.directory, lease_seconds, self._remover)
        self._catalogue, self._keep = catalogue, keep

    def sweep(self) -> None:
        """Remove what nobody needs. What cannot be removed is logged once and tried again the next time."""
        try:
            self._hide_old_versions()
            self._remove_unnamed_files()
        except OSError as error:
            _log.warning("old checkpoints stay for now: %s", error)

    def _hide_old_versions(self) -> None:
        in_use, complete = self._leases.in_use(), 0
        for version in self._catalogue.versions():
            manifest = self._catalogue.good(version)
            if complete >= self._keep and (manifest is None or manifest.stem not in in_use):
                self._remover.remove(self._catalogue.path(version))
            complete += manifest is not None

    def _remove_unnamed_files(self) -> None:
        files = self._catalogue.data_files()
        in_use = self._leases.in_use()
        for version, stem, path in files:
            # In this order: a writer shows its manifest before it ends its lease.
            if stem not in in_use and not self._is_named(version, stem):
                self._remover.remove(path)

    def _is_named(self, version: int, stem: str) -> bool:
        if not self._catalogue.path(version).exists():
            return False
        manifest = self._catalogue.good(version)
        return manifest is None or manifest.stem == stem
