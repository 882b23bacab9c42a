"""Files of one frame or more, as :meth:`WeightChunk.encode` writes them, one after the other."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from weight_update.checkpoints.io import read_regular
from weight_update.cli.contents.tensors import tensor_rows
from weight_update.encodings.base import decoder_for, read_delta
from weight_update.encodings.patch.encoding import PatchEncoding
from weight_update.encodings.patch.format import PatchHead
from weight_update.errors import FormatError
from weight_update.wire.frames import PRELUDE_BYTES, Kind, Prelude, WeightChunk, fresh_bytes, payloads_of
from weight_update.wire.schema import WeightSchema


def read_frames(path: Path) -> dict[str, Any]:
    """Return the frames of a file, with the patches and tensors that they describe.

    A payload is decoded if the file also has the WELCOME with its schema. Otherwise its checksum and, of
    patches, the head are verified.
    """
    raw = memoryview(b"".join(map(read_regular, _pieces(path))))
    reader = _Reader()
    for start, found in _frames(raw):
        reader.take(start, found)
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


def _pieces(path: Path) -> Iterator[Path]:
    """Yield the file and, for a frame of an object store, the files in which the frame goes on."""
    yield path
    if path.suffix == ".frame":
        rest = (path.with_name(f"{path.name}.{i}") for i in itertools.count(1))
        yield from itertools.takewhile(Path.exists, rest)


def _frames(raw: memoryview) -> Iterator[tuple[int, WeightChunk | FormatError]]:
    """Yield the offset of each frame, and the frame or its error; end if damage hides where a frame ends."""
    start = 0
    while start < len(raw):
        try:
            prelude = Prelude.decode(raw[start : start + PRELUDE_BYTES])
        except FormatError as error:
            yield start, error
            return
        end = start + PRELUDE_BYTES + prelude.header_bytes + prelude.payload_bytes
        try:
            yield start, WeightChunk.decode(raw[start:end])
        except FormatError as error:
            yield start, error
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

    def take(self, start: int, found: WeightChunk | FormatError) -> None:
        """Add a frame, or the error of a damaged one."""
        self.rows.append(_row(start, None if isinstance(found, FormatError) else found))
        try:
            if isinstance(found, FormatError):
                raise found
            if found.header.get("schema") is not None and found.kind in (Kind.HELLO, Kind.WELCOME):
                self.schema = WeightSchema.from_header(found.header["schema"])
            if found.kind is Kind.UPDATE:
                self._take_update(found)
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
        schema = self.schema if known else None
        if base is None:
            self.chain = [version]
            if schema is not None:
                _decode_all(parts, schema)
            return
        if self.chain and self.chain[-1] != base:
            raise FormatError(
                f"the update applies to version {base}, the update before makes {self.chain[-1]}"
            )
        made = _versions_of(parts, schema)
        self.chain = [*(self.chain or [base]), *made]
        if made[-1] != version:
            raise FormatError(f"the deltas end at version {made[-1]}, not {version}")


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


def _decode_all(parts: Sequence[WeightChunk], schema: WeightSchema) -> None:
    """Decode all weights of a full update; raise FormatError if the payloads do not fit the schema."""
    decoder = decoder_for(parts[0].header["encoding"], schema)
    payloads = payloads_of(parts)
    if not decoder.is_flat:
        payloads = [decoder.feed(place, one, fresh_bytes) for place, one in enumerate(payloads)]
    decoder.decode(payloads)


def _versions_of(parts: Sequence[WeightChunk], schema: WeightSchema | None) -> list[int]:
    """Return the versions that the deltas of an update make; raise FormatError if they do not follow."""
    header = parts[0].header
    encoding, latest, made = header["encoding"], header["base"], list[int]()
    if schema is None and encoding != PatchEncoding.name:
        return [header["version"]]  # deltas of other encodings cannot be read without the schema
    for chunk in parts:
        delta = _head_of(chunk) if schema is None else read_delta(encoding, payloads_of([chunk])[0], schema)
        if delta.base != latest:
            raise FormatError(f"a delta applies to version {delta.base}, the one before makes {latest}")
        latest = delta.version
        made.append(latest)
    return made
