"""Versions of weights as files in a directory that a trainer and its explorers share."""

from __future__ import annotations

import contextlib
import errno
import logging
import mmap
import os
import stat
import threading
import time
import uuid
import weakref
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from weight_update.arguments import require_local_path, require_seconds, whole_number
from weight_update.checkpoints.io import PART, digest, naming_free_space, open_regular, write_beside
from weight_update.checkpoints.lease import Lease
from weight_update.checkpoints.manifest import LAST_VERSION, Manifest, ManifestIndex, describe, leased_stem
from weight_update.checkpoints.safetensors import pack, unpack
from weight_update.errors import CorruptCheckpointError, LifecycleError

_log = logging.getLogger(__name__)

_FIRST_PAUSE, _LONGEST_PAUSE, _GROWTH = 0.05, 1.0, 1.5


class CheckpointStore:
    """Numbered versions of named weights in a directory, for one writer and any number of readers.

    Files are in the safetensors format. The manifest of a version is written last, and a version exists only
    with its manifest. Readers therefore see only complete versions, even if a process is killed. A version is
    removed when ``keep`` newer ones are complete and no process reads it. Readers and the writer may be on
    different machines. All of them write to the directory; readers write leases. On NFS, the client's
    attribute cache may delay a new version (mount option ``acdirmax``, 60 s unless set).

    Args:
        directory: path of the directory. If it does not exist, the first :meth:`publish` creates it for this
            user only, and until then it has no versions. In an existing directory, users who may read the
            directory may read checkpoints. Other files in it are not touched.
        keep: number of complete versions that stay, at least 1.
        lease_seconds: seconds without a renewed lease after which a reader or writer counts as dead; the same
            on all sides, and longer than a process is ever stopped.

    Raises:
        NotADirectoryError: ``directory`` is a file.
        ValueError: ``directory`` is a URL, ``keep`` is no integer of at least 1, or ``lease_seconds`` is not
            above 0.

    Attributes:
        directory: absolute path of the directory.
    """

    def __init__(
        self, directory: str | os.PathLike[str], keep: int = 2, *, lease_seconds: float = 60.0
    ) -> None:
        require_local_path(directory)
        self.directory: Path = Path(directory).absolute()  # a program may change its working directory
        if self.directory.exists() and not self.directory.is_dir():
            raise NotADirectoryError(errno.ENOTDIR, "give a directory, not a file", str(directory))
        self._lease_seconds = require_seconds("lease_seconds", lease_seconds)
        self._published = -1
        self._stems = set[str | None]()  # of the newest version, once this object has published
        self._index = ManifestIndex(self.directory)
        self._garbage = GarbageCollector(self._index, lease_seconds, whole_number(keep, "keep", least=1))

    def publish(self, version: int, weights: Mapping[str, Any], *, step: int) -> Path:
        """Write a version, and remove old ones. The version is on the disk when this returns.

        The first version may continue those of another store object, such as that of a trainer which was
        restarted. From then on, no other store object may write to the directory.

        Args:
            version: number that is not below the newest. An existing version is replaced.
            weights: tensors by name, of any device and dtype, and extra state of modules under names that end
                in ``_extra_state``, as in a state dict. They must not change meanwhile. Tensors on a device
                are copied to memory first.
            step: trainer step at which the weights were made.

        Returns:
            the path of the data file.

        Raises:
            LifecycleError: another store object has published since this one did.
            NotEnoughSpaceError: the disk is full, or files may not be that large. As after every error
                except the OSError below, the version does not exist, its bytes are free again and older
                versions stay.
            OSError: the files could not be written. If only the last step failed, which syncs the directory,
                the version exists, and may be lost in a power cut; publish it again.
            UnsupportedSourceError: ``weights`` is no dict; a tensor is sparse, quantized, of an unknown dtype
                or on the meta device; or extra state is of other types than None, bool, int, float, str,
                bytes, list, tuple, dict with string keys, and tensors.
            ValueError: the version is no integer, negative, or below the newest; the step is no integer, or
                negative; or a name is reserved.
        """
        version = whole_number(version, "version", least=0, most=LAST_VERSION)
        if (newest := self.latest()) is not None:
            self._require_next(version, newest)
        step = whole_number(step, "step", least=0)
        self.directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        self._garbage.collect()  # first: files that a dead writer left may be in the way
        schema, parts = pack(weights)
        stem = f"{self._index.path(version).stem}-{uuid.uuid4().hex}"
        nbytes = sum(map(len, parts))
        self._published = version
        # A publish that fails may leave either of them.
        self._stems = {stem, None if newest is None else newest.stem}
        with naming_free_space(self.directory, nbytes):
            lease = Lease(self.directory, stem, self._lease_seconds)
            try:
                path = self._write(Manifest(version, step, stem, nbytes, "", describe(schema)), parts)
            finally:
                lease.end()
        self._garbage.collect()
        return path

    def _require_next(self, version: int, newest: Manifest) -> None:
        """Raise LifecycleError or ValueError unless ``version`` can follow ``newest``."""
        if newest.version >= self._published >= 0 and newest.stem not in self._stems:
            raise LifecycleError(
                f"another trainer has published version {newest.version} in {self.directory} since this one "
                "did; end one of the two, or give each a directory of its own"
            )
        if version < newest.version:
            raise ValueError(
                f"version {version} is below {newest.version}, the newest in {self.directory}; "
                "go on counting from there, or use another directory"
            )

    def _write(self, plan: Manifest, parts: list[memoryview]) -> Path:
        data, manifest = self.directory / plan.file, self._index.path(plan.version)
        try:
            digested = write_beside(data.with_name(data.name + PART), data, parts)
            if (newest := self.latest()) is not None:  # another trainer may have published meanwhile
                self._require_next(plan.version, newest)
            text = replace(plan, digest=digested).encode()
            write_beside(self.directory / f"{plan.stem}.json{PART}", manifest, [memoryview(text)])
        except BaseException:
            found = self._index.good(plan.version)
            if found is None or found.stem != plan.stem:
                data.unlink(missing_ok=True)
            raise
        return data

    def latest(self) -> Manifest | None:
        """Return the manifest of the newest complete version; None if there is none.

        Broken versions are skipped until their files change, with one warning for each. A version whose
        manifest cannot be read now is skipped until it can. Wrong bits in the data are found by
        :meth:`reading`, and remembered.
        """
        return self._newest(above=-1)

    def last_number(self) -> int:
        """Return the highest number that has a manifest, broken or not; -1 if there is none."""
        return max(self._index.versions(), default=-1)

    def manifest(self, version: int) -> Manifest | None:
        """Return the manifest of a version; None if there is no complete version of this number."""
        return self._index.good(version)

    def wait_newer(
        self, version: int, timeout: float, ended: threading.Event | None = None
    ) -> Manifest | None:
        """Wait for a version above ``version``.

        This looks at the names in the directory every 50 ms at first, and every second in the end.

        Args:
            version: a number from -1 on; -1 for any version.
            timeout: seconds; 0 looks once.
            ended: event that ends the wait as if the time were over; None for no such event.

        Returns:
            the manifest of the newest complete version, or None if none came in time.

        Raises:
            OSError: the directory cannot be read.
            TypeError: ``timeout`` is no number.
            ValueError: ``version`` is no integer from -1 on, or ``timeout`` is below 0, infinite or NaN.
        """
        version = whole_number(version, "version", least=-1)
        timeout = require_seconds("timeout", timeout, zero=True)
        ended = threading.Event() if ended is None else ended
        deadline, pause = time.monotonic() + timeout, _FIRST_PAUSE
        while True:
            found, left = self._newest(above=version), deadline - time.monotonic()
            if found is not None or left <= 0 or ended.wait(min(pause, left)):
                return found
            pause = min(pause * _GROWTH, _LONGEST_PAUSE)

    def _newest(self, above: int) -> Manifest | None:
        listed = list[int]()
        while (versions := [v for v in self._index.versions() if v > above]) != listed:
            for version in versions:
                if (manifest := self._index.good(version)) is not None:
                    return manifest
            listed = versions  # all of them may have been removed, after newer ones were published
        return None

    @contextlib.contextmanager
    def reading(self, version: int) -> Iterator[dict[str, Any]]:
        """Yield the weights of a version: tensors on the CPU and extra state, by name.

        Names that were one tensor are one tensor again. The tensors are views of the mapped file, whose
        memory the processes of a machine share. You may keep them and write to them; this changes neither the
        file nor the tensors of other readers. The version is not removed inside the ``with`` block, nor while
        one of its tensors is kept.

        Raises:
            FileNotFoundError: there is no such version (any more).
            CorruptCheckpointError: the file or its manifest is broken; :meth:`latest` will skip it.
            OSError: the file cannot be read, or the directory cannot be written.
            ValueError: the version is no integer.
        """
        version = whole_number(version, "version", least=0)
        weights = self._read(version)  # kept until the end of the block
        yield weights

    def _read(self, version: int) -> dict[str, Any]:
        try:
            while True:
                manifest = self._index.load(version)
                with contextlib.ExitStack() as unused:
                    lease = Lease(self.directory, manifest.stem, self._lease_seconds)
                    unused.callback(lease.end)
                    if self._index.load(version) == manifest:  # read again, now that it is leased
                        mapping, weights = self._map(manifest)
                        weakref.finalize(mapping, lease.end)  # tensors keep the mapping
                        unused.pop_all()
                        return weights
        except FileNotFoundError as error:
            raise FileNotFoundError(
                error.errno,
                f"no version {version} in {self.directory} (it was removed, or never published); latest() "
                "gives the newest",
            ) from None

    def _map(self, manifest: Manifest) -> tuple[mmap.mmap, dict[str, Any]]:
        changed_at = self._index.changed_at(manifest)
        try:
            return map_file(self.directory / manifest.file, manifest.digest)
        except CorruptCheckpointError as error:
            self._index.distrust(manifest, error, changed_at)
            raise


def map_file(path: Path, expected: str | None = None) -> tuple[mmap.mmap, dict[str, Any]]:
    """Map a data file; return the mapping, which tensors keep, and tensors and extra state by name.

    ``expected`` is the digest that the file must have; None does not compare it.

    Raises:
        CorruptCheckpointError: the file has another digest, or is not a safetensors file.
        OSError: the file cannot be read.
    """
    with open(open_regular(path), "rb", 0) as file:
        fd, nbytes = file.fileno(), os.fstat(file.fileno()).st_size
        if expected is not None and digest(fd, nbytes) != expected:
            raise CorruptCheckpointError(f"the digest of {path.name} is wrong")
        if nbytes == 0:
            raise CorruptCheckpointError(f"{path.name} is empty")
        mapping = mmap.mmap(fd, nbytes, access=mmap.ACCESS_COPY)
    return mapping, unpack(torch.frombuffer(mapping, dtype=torch.uint8))


class GarbageCollector:
    """Removal of old versions that no process reads, and of files that dead writers left.

    The manifest is removed first, then leases are looked at again, then the data file is removed. A reader
    makes its lease first and then checks that the manifest is still there. So one of the two sees the other.
    Leases lie in the directory of the manifests because an NFS client reads the names anew after a change
    that it made itself. A lease counts as dead if it stays the same for ``lease_seconds``.
    """

    def __init__(self, index: ManifestIndex, lease_seconds: float, keep: int) -> None:
        self._index, self._silence, self._keep = index, lease_seconds, keep
        self._seen: dict[str, tuple[int, float]] = {}  # of each lease: its time, and since when
        self._unremovable: set[Path] = set()  # files of which that was logged

    def collect(self) -> None:
        """Remove all files that are not needed. Log a file that cannot be removed once, and try it again."""
        try:
            # In this order: a writer publishes its manifest before it ends its lease.
            files = self._index.data_files()
            in_use = self._in_use()
            manifests = {version: self._index.good(version) for version in self._index.versions()}
            self._remove_old_manifests(manifests, in_use)
            in_use |= self._in_use()
            for version, stem, path in files:
                manifest = manifests.get(version)
                named = manifest is None or manifest.stem == stem  # by a broken manifest, too
                if stem not in in_use and not (named and self._index.path(version).exists()):
                    self._remove(path)
        except OSError as error:
            _log.warning("old checkpoints could not be removed yet: %s", error)

    def _in_use(self) -> set[str]:
        """Return the stems of the files that are in use, and remove dead leases."""
        now = time.monotonic()
        seen = dict[str, tuple[int, float]]()
        in_use = set[str]()
        for name in os.listdir(self._index.directory):
            if (stem := leased_stem(name)) is None or (renewed := self._renewed(name)) is None:
                continue
            before, since = self._seen.get(name, (renewed, now))
            seen[name] = renewed, since if before == renewed else now
            if now - seen[name][1] <= self._silence:
                in_use.add(stem)
            else:
                self._remove(self._index.directory / name)
        self._seen = seen
        return in_use

    def _renewed(self, name: str) -> int | None:
        """Return the modification time of a lease; None if there is no such regular file.

        It is -1 while it cannot be found out, so that the lease lapses if that stays so.
        """
        path = self._index.directory / name
        with contextlib.suppress(OSError):  # NFS asks its server for the true times of a file that is opened
            os.close(open_regular(path))
        try:
            found = path.stat()
        except FileNotFoundError:
            return None
        except OSError:
            return -1
        return found.st_mtime_ns if stat.S_ISREG(found.st_mode) else None

    def _remove_old_manifests(self, manifests: Mapping[int, Manifest | None], in_use: set[str]) -> None:
        complete = 0
        for version, manifest in manifests.items():
            if complete >= self._keep and (manifest is None or manifest.stem not in in_use):
                self._remove(self._index.path(version))
            complete += manifest is not None

    def _remove(self, path: Path) -> None:
        try:
            path.unlink(missing_ok=True)
            self._unremovable.discard(path)
        except OSError as error:
            if path not in self._unremovable:
                self._unremovable.add(path)
                _log.warning("old checkpoints could not be removed yet: %s", error)
