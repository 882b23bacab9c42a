"""Files of one frame or more, as :meth:`WeightChunk.encode` writes them, one after the other."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch

from weight_update.checkpoints.io import read_regular
from weight_update.cli.contents.tensors import tensor_rows
from weight_update.encodings.base import decoder_for, read_delta
from weight_update.encodings.patch.encoding import PatchEncoding
from weight_update.encodings.patch.format import PatchHead
from weight_update.errors import FormatError
from weight_update.wire.frames import PRELUDE_BYTES, Kind, Prelude, WeightChunk, payloads_of
from weight_update.wire.schema import WeightSchema

MAGIC = b"WUPD"
"""The first bytes of a frame."""


def read_frames(path: Path) -> dict[str, Any]:
    """Return the frames of a file, with the patches and tensors that they describe.

    A payload is decoded if the file also has the WELCOME with its schema. Otherwise its checksum and, of
    patches, the head are verified.
    """
    raw = memoryview(read_regular(path))
    reader = _Reader()
    for start, chunk, problem in _frames(raw):
        reader.take(start, chunk, problem)
    reader.finish()
    schema = reader.schema
    return {
        "good": all(row["state"] == "ok" for row in reader.rows),
        "kind": "frames",
        "path": str(path),
        "bytes": len(raw),
        "chain": " -> ".join(map(str, reader.chain)) or None,
        "frames": reader.rows,
        "patches": reader.patches,
        "tensors": [] if schema is None else tensor_rows(schema),
    }


def _frames(raw: memoryview) -> Iterator[tuple[int, WeightChunk | None, str | None]]:
    """Yield offset, frame and problem; after damage that hides where a frame ends, nothing follows."""
    start = 0
    while start < len(raw):
        try:
            prelude = Prelude.decode(raw[start : start + PRELUDE_BYTES])
        except FormatError as error:
            yield start, None, str(error)
            return
        end = start + PRELUDE_BYTES + prelude.header_bytes + prelude.payload_bytes
        try:
            yield start, WeightChunk.decode(raw[start:end]), None
        except FormatError as error:
            yield start, None, str(error)
        start = end


class _Reader:
    """The rows of a file, frame by frame.

    Attributes:
        rows: one row for each frame.
        patches: one row for each patch.
        schema: newest schema of a WELCOME or HELLO.
        chain: versions, in the order in which the frames make them.
    """

    def __init__(self) -> None:
        self.rows: list[dict[str, Any]] = []
        self.patches: list[dict[str, Any]] = []
        self.schema: WeightSchema | None = None
        self.chain: list[int] = []
        self._parts: list[WeightChunk] = []

    def take(self, start: int, chunk: WeightChunk | None, problem: str | None) -> None:
        """Add a frame; ``chunk`` is None for a damaged one."""
        self.rows.append(_row(start, chunk))
        try:
            if chunk is None:
                raise FormatError(str(problem))
            if chunk.header.get("schema") is not None and chunk.kind in (Kind.HELLO, Kind.WELCOME):
                self.schema = WeightSchema.from_header(chunk.header["schema"])
            if chunk.kind is Kind.UPDATE:
                self._take_update(chunk)
        except FormatError as error:
            self._blame(str(error))
            self._parts.clear()

    def finish(self) -> None:
        """Mark the last frame if its update is not complete."""
        if self._parts:
            header = self._parts[-1].header
            self._blame(f"the file ends after chunk {header['index'] + 1} of {header['count']}")

    def _blame(self, problem: str) -> None:
        self.rows[-1].update(state="damaged", problem=problem)

    def _take_update(self, chunk: WeightChunk) -> None:
        header = chunk.header
        if header["index"] != len(self._parts):
            raise FormatError(f"chunk {header['index'] + 1} follows chunk {len(self._parts)} of the update")
        if self._parts and header["version"] != self._parts[0].header["version"]:
            raise FormatError("a chunk of another version before the update is complete")
        self._parts.append(chunk)
        if header["base"] is not None and header["encoding"] == PatchEncoding.name:
            self.patches.append(_patch_row(len(self.rows), chunk))
        if len(self._parts) == header["count"]:
            parts, self._parts = self._parts, []
            self._complete(parts)

    def _complete(self, parts: Sequence[WeightChunk]) -> None:
        header = parts[0].header
        version, base = header["version"], header["base"]
        known = self.schema is not None and self.schema.digest == header["schema"]
        if base is None:
            self.chain = [version]
            if known:
                _decode_all(parts, self.schema)
            return
        if self.chain and self.chain[-1] != base:
            raise FormatError(
                f"the update applies to version {base}, the update before makes {self.chain[-1]}"
            )
        made = [base, *_versions_of(parts, self.schema if known else None), version]
        self.chain = [*(self.chain or [base]), *made[1:-1]]
        if made[-2] != version:
            raise FormatError(f"the deltas end at version {made[-2]}, not {version}")


def _row(start: int, chunk: WeightChunk | None) -> dict[str, Any]:
    header = {} if chunk is None else chunk.header
    update = chunk is not None and chunk.kind is Kind.UPDATE
    return {
        "offset": start,
        "kind": None if chunk is None else chunk.kind.name,
        "state": "ok",
        "version": header.get("version"),
        "base": header.get("base"),
        "encoding": header.get("encoding"),
        "chunk": f"{header['index'] + 1} of {header['count']}" if update else None,
        "payload_bytes": None if chunk is None else chunk.payload_bytes,
        "problem": None,
    }


def _patch_row(frame: int, chunk: WeightChunk) -> dict[str, Any]:
    head = _head_of(chunk)
    return {
        "frame": frame,
        "base": head.base,
        "version": head.version,
        "layout": head.layout,
        "positions": "deltas" if head.delta else "absolute",
        "values": "relative" if head.relative else "raw",
        "changed_elements": sum(count for _, count in head.sections),
        "byte_ranges": head.ranges,
        "arrays": head.arrays,
        "bytes": chunk.payload_bytes,
    }


def _head_of(chunk: WeightChunk) -> PatchHead:
    return PatchHead.decode(payloads_of([chunk])[0].numpy())


def _decode_all(parts: Sequence[WeightChunk], schema: WeightSchema | None) -> None:
    """Decode all weights of a full update; raise FormatError if the payloads do not fit the schema."""
    assert schema is not None
    decoder = decoder_for(parts[0].header["encoding"], schema)
    payloads = payloads_of(parts)
    if not decoder.is_flat:
        payloads = [decoder.feed(place, one, _fresh) for place, one in enumerate(payloads)]
    decoder.decode(payloads)


def _fresh(nbytes: int) -> torch.Tensor:
    return torch.empty(nbytes, dtype=torch.uint8)


def _versions_of(parts: Sequence[WeightChunk], schema: WeightSchema | None) -> list[int]:
    """Return the versions that the deltas of an update make; raise FormatError if they do not follow."""
    encoding = parts[0].header["encoding"]
    steps = list[tuple[int, int]]()
    for chunk in parts:
        if schema is not None:
            delta = read_delta(encoding, payloads_of([chunk])[0], schema)
            steps.append((delta.base, delta.version))
        elif encoding == PatchEncoding.name:
            steps.append((_head_of(chunk).base, _head_of(chunk).version))
    if not steps:
        return [parts[0].header["version"]]
    for (_, made), (base, _) in pairwise([(0, parts[0].header["base"]), *steps]):
        if made != base:
            raise FormatError(f"a delta applies to version {base}, the one before makes {made}")
    return [version for _, version in steps]
