"""Manifests: descriptions of the versions in a directory of checkpoints.

::

    000000000012-<32 hex digits>.safetensors       the tensors of version 12
    000000000012.json                              its manifest; written last, it makes version 12 exist
    000000000012-<32 hex digits>.<more>.lease      a sign that version 12 is being read or written
    *.part                                         a file that is being written

All other files are left alone.
"""

from __future__ import annotations

import hashlib
import json
import logging
import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from weight_update.checkpoints.io import read_regular
from weight_update.checkpoints.lease import LEASE
from weight_update.errors import CorruptCheckpointError
from weight_update.wire.schema import WeightSchema, dtype_name

_FORMAT = "weight_update.checkpoint/1"
_DIGITS = 12
LAST_VERSION = 10**_DIGITS - 1
_VERSION = rf"(?P<version>\d{{{_DIGITS}}})"
_MANIFEST = re.compile(rf"{_VERSION}\.json")
_STEM = rf"(?P<stem>{_VERSION}-[0-9a-f]{{32}})"
_DATA = re.compile(rf"{_STEM}\.(safetensors|safetensors\.part|json\.part)")
_LEASE = re.compile(rf"{_STEM}\.[0-9a-f]{{32}}{re.escape(LEASE)}")
_TYPES = {"version": int, "step": int, "stem": str, "nbytes": int, "digest": str, "tensors": dict}
_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Manifest:
    """The description of one complete version.

    Attributes:
        version: number of the version.
        step: trainer step at which it was made.
        stem: name of its data file without ``.safetensors``.
        nbytes: size of the data file in bytes.
        digest: digest of the data file.
        tensors: dtype and shape by name, e.g. ``"float32[2, 3]"``.
    """

    version: int
    step: int
    stem: str
    nbytes: int
    digest: str
    tensors: Mapping[str, str]

    @property
    def file(self) -> str:
        """Name of the data file."""
        return f"{self.stem}.safetensors"

    def encode(self) -> bytes:
        """Return the manifest as JSON, with a checksum of its own."""
        fields = asdict(self)
        return json.dumps({"format": _FORMAT, "sha256": _checksum(fields), "manifest": fields}).encode()

    @classmethod
    def decode(cls, raw: bytes) -> Manifest:
        """Return the manifest that :meth:`encode` wrote; raise CorruptCheckpointError for other bytes."""
        try:
            found = json.loads(raw)
            fields = found["manifest"]
            if found["format"] != _FORMAT or found["sha256"] != _checksum(fields):
                raise ValueError("its format is unknown or its checksum is wrong")
            if {name: type(value) for name, value in fields.items()} != _TYPES:
                raise ValueError(f"its fields are not {', '.join(_TYPES)}")
        except (KeyError, TypeError, ValueError, AttributeError, RecursionError) as error:
            raise CorruptCheckpointError(f"not a manifest: {error}") from None
        return cls(**fields)


def describe(schema: WeightSchema) -> dict[str, str]:
    """Return dtype and shape by name, as a manifest has them."""
    return {meta.name: f"{dtype_name(meta.dtype)}{list(meta.shape)}" for meta in schema.tensors}


def leased_stem(name: str) -> str | None:
    """Return the stem of the data file that a lease is for; None if ``name`` is not that of a lease."""
    match = _LEASE.fullmatch(name)
    return match and match["stem"]


def _checksum(fields: Any) -> str:
    return hashlib.sha256(json.dumps(fields).encode()).hexdigest()


class ManifestIndex:
    """The manifests of a directory. Broken versions are skipped, with one warning for each."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self._skipped = set[int]()  # versions that are skipped now, which was logged
        self._wrong: dict[str, int] = {}  # stems of data files with wrong bits, and when these were changed
        self._seen = False  # whether the directory existed

    def path(self, version: int) -> Path:
        """Return the path of a manifest."""
        return self.directory / f"{version:0{_DIGITS}}.json"

    def versions(self) -> list[int]:
        """Return all numbers that have a manifest, broken or not, in descending order.

        Raises:
            OSError: the directory cannot be read. One that has not existed so far has no versions.
        """
        try:
            matches = [_MANIFEST.fullmatch(path.name) for path in self.directory.iterdir()]
        except FileNotFoundError:
            if self._seen:
                raise
            return []
        self._seen = True
        return sorted((int(match["version"]) for match in matches if match), reverse=True)

    def data_files(self) -> list[tuple[int, str, Path]]:
        """Return version, stem and path of all data files, and of all files that are being written."""
        pairs = [(_DATA.fullmatch(path.name), path) for path in self.directory.iterdir()]
        return [(int(match["version"]), match["stem"], path) for match, path in pairs if match]

    def load(self, version: int) -> Manifest:
        """Read a manifest and check the size of the data file.

        Raises:
            FileNotFoundError: there is no such version.
            CorruptCheckpointError: the manifest is broken, or does not fit the data file.
        """
        path = self.path(version)
        raw = read_regular(path)
        manifest = Manifest.decode(raw)
        if not _DATA.fullmatch(manifest.file) or manifest.version != version:
            raise CorruptCheckpointError(
                f"{path.name} describes version {manifest.version}, {manifest.file!r}"
            )
        try:
            size = (self.directory / manifest.file).stat().st_size
        except FileNotFoundError:
            if read_regular(path) != raw:  # replaced, or removed, just now
                return self.load(version)
            raise CorruptCheckpointError(f"{manifest.file} is missing") from None
        if size != manifest.nbytes:
            raise CorruptCheckpointError(f"{manifest.file} has {size} bytes, not {manifest.nbytes}")
        return manifest

    def version_of(self, path: Path) -> int | None:
        """Return the version whose manifest or data file has the name of ``path``; None for other files."""
        match = _MANIFEST.fullmatch(path.name) or _DATA.fullmatch(path.name)
        return int(match["version"]) if match else None

    def good(self, version: int) -> Manifest | None:
        """Return the manifest of a version; None if it is missing or broken, which is warned about once."""
        try:
            manifest = self.load(version)
            if manifest.stem in self._wrong and self._wrong[manifest.stem] == self.changed_at(manifest):
                return None
        except FileNotFoundError:
            return None
        except (OSError, CorruptCheckpointError) as error:  # it is looked at again: a file server may be away
            if version not in self._skipped:
                self._skipped.add(version)
                self._warn(version, error)
            return None
        self._skipped.discard(version)
        return manifest

    def distrust(self, manifest: Manifest, why: CorruptCheckpointError, changed_at: int) -> None:
        """Skip a version until its data file, last changed at ``changed_at``, changes again."""
        self._warn(manifest.version, why)
        self._wrong[manifest.stem] = changed_at

    def changed_at(self, manifest: Manifest) -> int:
        """Return the time at which the data file was last changed; FileNotFoundError if there is none.

        It is the time of the inode: a file that is restored from a copy may have the old time of its content.
        """
        return (self.directory / manifest.file).stat().st_ctime_ns

    def _warn(self, version: int, why: Exception) -> None:
        _log.warning("checkpoint %d in %s is skipped: %s", version, self.directory, why)
