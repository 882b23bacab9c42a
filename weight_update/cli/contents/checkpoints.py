"""Directories of checkpoints, and single version files. Nothing is written, not even a lease."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from weight_update.checkpoints.io import PART
from weight_update.checkpoints.lease import LEASE
from weight_update.checkpoints.manifest import Manifest, ManifestIndex, describe, leased_stem
from weight_update.checkpoints.store import map_file
from weight_update.cli.contents.tensors import tensor_rows
from weight_update.errors import CorruptCheckpointError
from weight_update.transports.object_store.manifest import MANIFEST_NAME
from weight_update.wire.schema import WeightSchema

_SUFFIX = ".safetensors"
_MEANINGS = {
    PART: "incomplete: a writer was interrupted, or still writes",
    LEASE: "lease of a process that reads or writes the version, or died while it did",
    _SUFFIX: "no manifest names it: it is older, or was interrupted",
}


def read_directory(directory: Path) -> dict[str, Any]:
    """Return the versions in a directory, and the tensors of the newest one that is complete.

    Raises:
        CorruptCheckpointError: there are no checkpoints; the message tells an object store from other
            directories.
    """
    index = ManifestIndex(directory)
    rows, named, unclear = list[dict[str, Any]](), set[str](), set[int]()
    newest, newest_weights = None, dict[str, Any]()
    for version in index.versions():
        try:
            row, manifest, weights = _read_version(index, version)
        except FileNotFoundError:  # the trainer removed it just now
            continue
        rows.append(row)
        if manifest is None:
            unclear.add(version)
        else:
            named.add(manifest.file)
        if newest is None and weights is not None:
            newest, newest_weights = version, weights
    others = _other_files(index, named, unclear)
    if not rows and not others:
        if (directory / MANIFEST_NAME).is_file():
            raise CorruptCheckpointError(
                f"{directory} holds versions of an ObjectStoreWeightSyncScheme, which workers verify when "
                "they read them; give one of its .frame files to see what that contains"
            )
        raise CorruptCheckpointError(
            f"{directory} holds no checkpoints; give the directory of a CheckpointStore"
        )
    return {
        "good": all(row["state"] == "ok" for row in rows),
        "kind": "checkpoint directory",
        "path": str(directory),
        "newest_complete_version": newest,
        **_cure(index, rows, newest),
        "versions": rows,
        "other_files": others,
        **_tensors(newest_weights),
    }


def read_version_file(path: Path) -> dict[str, Any]:
    """Return the contents of a manifest with its data file, or of a data file.

    Raises:
        CorruptCheckpointError: the name is neither that of a manifest nor that of a safetensors file.
    """
    index = ManifestIndex(path.parent)
    version = index.version_of(path)
    if version is None and path.suffix != _SUFFIX:
        raise CorruptCheckpointError(
            f"{path} is no file of weights; known: directories of checkpoints, their .json and {_SUFFIX} "
            "files, and files with frames of the wire format"
        )
    facts = {"kind": "version file", "path": str(path)}
    if version is not None and path.suffix != PART:
        with contextlib.suppress(FileNotFoundError):  # the trainer removed the manifest
            row, manifest, weights = _read_version(index, version)
            if path.suffix != _SUFFIX or manifest is None or manifest.file == path.name:
                cure = _cure(index, [row], _newest_complete(index)) if row["state"] == "damaged" else {}
                return {"good": row["state"] == "ok", **facts, **row, **cure, **_tensors(weights or {})}
    return _read_alone(path, facts)


def _newest_complete(index: ManifestIndex) -> int | None:
    """Return the newest version that is not damaged."""
    for version in index.versions():
        with contextlib.suppress(FileNotFoundError):  # the trainer removed it just now
            if _read_version(index, version)[0]["problem"] is None:
                return version
    return None


def _cure(index: ManifestIndex, rows: Sequence[Mapping[str, Any]], newest: int | None) -> dict[str, str]:
    """Return the fact that states what to do about damaged versions; no fact if there are none."""
    damaged = [row for row in rows if row["state"] == "damaged"]
    if not damaged:
        return {}
    complete = "wait for the next one" if newest is None else f"use version {newest}, the newest complete one"
    files = " and ".join(index.path(row["version"]).name for row in damaged)
    return {
        "cure": f"readers skip damaged versions and {complete}; to remove the damage, delete {files} (the "
        "next publish() removes its data)"
    }


def _read_alone(path: Path, facts: Mapping[str, Any]) -> dict[str, Any]:
    problem, weights, cure = None, dict[str, Any](), dict[str, str]()
    try:
        _, weights = map_file(path)
    except CorruptCheckpointError as error:
        problem = str(error)
        cure = {"cure": "delete it, or write it again; no reader uses it, because no manifest names it"}
    return {
        "good": problem is None,
        **facts,
        "state": "ok" if problem is None else "damaged",
        "bytes": path.stat().st_size,
        "checksum": "none: no manifest names this file",
        "problem": problem,
        **cure,
        **_tensors(weights),
    }


def _read_version(
    index: ManifestIndex, version: int
) -> tuple[dict[str, Any], Manifest | None, dict[str, Any] | None]:
    """Return the row of a version, its manifest and its weights; None for those that cannot be read.

    Raises:
        FileNotFoundError: there is no such version (any more).
    """
    manifest, weights, state, problem = None, None, "ok", None
    try:
        manifest = index.load(version)
        found = map_file(index.directory / manifest.file, manifest.digest)[1]
        _compare(manifest, found)
        weights = found
    except FileNotFoundError:
        raise
    except CorruptCheckpointError as error:
        state, problem = "damaged", str(error)
    except OSError as error:  # such as a lack of permission, or of the file server
        state, problem = "unreadable", str(error)
    row = {
        "version": version,
        "state": state,
        "step": None if manifest is None else manifest.step,
        "bytes": None if manifest is None else manifest.nbytes,
        "tensor_count": None if manifest is None else len(manifest.tensors),
        "file": None if manifest is None else manifest.file,
        "checksum": None if manifest is None else manifest.digest,
        "problem": problem,
    }
    return row, manifest, weights


def _compare(manifest: Manifest, found: Mapping[str, Any]) -> None:
    """Raise CorruptCheckpointError if the manifest describes other tensors."""
    there = describe(_schema_of(found))
    if different := sorted(there.items() ^ manifest.tensors.items()):
        names = ", ".join(dict.fromkeys(name for name, _ in different))
        raise CorruptCheckpointError(f"manifest and data file describe other tensors: {names:.200}")


def _tensors(weights: Mapping[str, Any]) -> dict[str, Any]:
    extra = [name for name, value in weights.items() if not isinstance(value, torch.Tensor)]
    return {**({"extra_state": extra} if extra else {}), "tensors": tensor_rows(_schema_of(weights))}


def _schema_of(weights: Mapping[str, Any]) -> WeightSchema:
    return WeightSchema.of({n: value for n, value in weights.items() if isinstance(value, torch.Tensor)})


def _other_files(index: ManifestIndex, named: set[str], unclear: set[int]) -> list[dict[str, Any]]:
    """Return a row for each file that is neither a manifest, nor in ``named``, nor of an unclear version."""
    rows = []
    for path in sorted(index.directory.iterdir()):
        meaning, version = _MEANINGS.get(path.suffix), index.version_of(path)
        ours = leased_stem(path.name) is not None or version is not None
        if meaning is not None and ours and path.name not in named and version not in unclear:
            with contextlib.suppress(FileNotFoundError):  # a running trainer has removed it
                rows.append({"file": path.name, "bytes": path.stat().st_size, "meaning": meaning})
    return rows
