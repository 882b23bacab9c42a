"""Frames: a described header and raw bytes.

``docs/wire_format.rst`` describes the format byte by byte. Nothing is pickled: the header is JSON, the
payload is raw memory.
"""

from __future__ import annotations

import enum
import hmac
import json
import struct
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import torch

from weight_update.errors import (
    FormatError,
    NotEnoughMemoryError,
    UnreachableMemoryError,
    UnsupportedSourceError,
)
from weight_update.wire.extra_state import decode_extra, encode_all
from weight_update.wire.memory import byte_view
from weight_update.wire.schema import MAX_PAYLOAD_BYTES, WeightSchema, compact_json

_PRELUDE = struct.Struct("<4sBBHIQII")
PRELUDE_BYTES = _PRELUDE.size
MAGIC = b"WUPD"
"""The first bytes of a frame."""
_FORMAT = 1
_HAS_CHECKSUM = 1
MAX_HEADER_BYTES = 64 << 20
_MAX_EXTRA_BYTES = MAX_HEADER_BYTES // 2
_MAX_NUMBER = 1 << 63
_NUMBERS = (int, float)
_JSON_BLANKS = " \t\r\n"
_read_json = json.JSONDecoder().raw_decode  # half the time of json.loads, for a short text


class Kind(enum.IntEnum):
    """The purpose of a frame. R = receiver, S = sender."""

    HELLO = 1  # R -> S: identity, token and schema of the receiver, or the reason why it cannot join
    WELCOME = 2  # S -> R: the receiver is admitted; the schema to use and its layout
    REFUSED = 3  # S -> R: the receiver is not admitted, and the reason
    UPDATE = 4  # S -> R: weights
    STAGED = 5  # R -> S: the whole update has arrived, and waits for COMMIT
    COMMIT = 6  # S -> R: apply the staged update
    ABORT = 7  # S -> R: drop the staged update
    APPLIED = 8  # R -> S: the update is visible
    FAILED = 9  # R -> S: the update is not visible, and the reason
    GOODBYE = 10  # either way: orderly end
    BEHIND = 11  # R -> S: the receiver does not have the base of the update; send all weights
    TAKEN = 12  # R -> S: a chunk, but not the last one, has been read; its memory is free again


_KINDS: dict[int, Kind] = {kind.value: kind for kind in Kind}
_REQUIRED: dict[Kind, dict[str, type | tuple[type, ...]]] = {
    Kind.HELLO: {
        "token": str,
        "worker": int,
        "pid": int,
        "version": (int, type(None)),
        "schema": (dict, type(None)),
        "error": (str, type(None)),
    },
    Kind.WELCOME: {
        "schema": dict,
        "strategy": str,
        "keep": bool,
        "version": (int, type(None)),
        "digests": (list, type(None)),
    },
    Kind.REFUSED: {"reason": str, "problems": list},
    Kind.UPDATE: {
        "version": int,
        "base": (int, type(None)),
        "schema": str,
        "encoding": str,
        "index": int,
        "count": int,
        "commit": bool,
        "group": (str, type(None)),
        "extra": dict,
    },
    Kind.STAGED: {"version": int},
    Kind.COMMIT: {"version": int},
    Kind.ABORT: {"version": int},
    Kind.APPLIED: {"version": int, "apply_seconds": (int, float), "stall_seconds": (int, float)},
    Kind.FAILED: {"version": int, "error": str, "traceback": str, "kept": bool},
    Kind.GOODBYE: {},
    Kind.BEHIND: {"version": int},
    Kind.TAKEN: {"version": int, "index": int},
}
_OPTIONAL: dict[Kind, dict[str, type | tuple[type, ...]]] = {Kind.HELLO: {"instance": str, "again": bool}}
_FIELDS = {kind: {**required, **_OPTIONAL.get(kind, {})} for kind, required in _REQUIRED.items()}


@dataclass(frozen=True, eq=False)
class WeightChunk:
    """One frame: a kind, a JSON header and raw bytes. Fields are validated on construction.

    Attributes:
        kind: purpose of the frame.
        header: JSON-able fields; the fields of each kind are checked, others are refused.
        payload: 1-D uint8 tensor on the CPU, or None for no bytes.

    Raises:
        FormatError: a field is missing, unknown, of the wrong type or out of range.
    """

    kind: Kind
    header: Mapping[str, Any]
    payload: torch.Tensor | None = field(default=None, repr=False)
    _heads: dict[bool, bytes] = field(default_factory=dict, init=False, repr=False)

    def __post_init__(self) -> None:
        required, fields = _REQUIRED[self.kind], _FIELDS[self.kind]
        if not required.keys() <= self.header.keys() <= fields.keys():
            raise FormatError(
                f"{self.kind.name} frame has fields {sorted(self.header)}, not {sorted(required)}"
            )
        for name, value in self.header.items():
            expected = fields[name]
            fits = type(value) is expected or (isinstance(value, expected) and not isinstance(value, bool))
            too_large = isinstance(value, _NUMBERS) and not -_MAX_NUMBER <= value < _MAX_NUMBER  # or NaN
            if too_large or not fits:
                raise FormatError(f"{self.kind.name} frame: {name} is {value!r:.80}")
        if (self.header.get("version") or 0) < 0 or self.header.get("index", 0) < 0:
            raise FormatError(f"{self.kind.name} frame: negative version or index")
        if self.kind is Kind.UPDATE and not self.header["index"] < self.header["count"]:
            raise FormatError(f"chunk {self.header['index']} of {self.header['count']}")
        payload: object = self.payload  # a transport of a user may give anything
        flat = isinstance(payload, torch.Tensor) and payload.dtype == torch.uint8 and payload.dim() == 1
        if payload is not None and not flat:
            raise FormatError("a payload is a 1-D uint8 tensor")

    @property
    def payload_bytes(self) -> int:
        """Length of the payload."""
        return 0 if self.payload is None else self.payload.numel()

    def shows(self, token: str) -> bool:
        """Return whether this HELLO carries ``token``; the comparison takes constant time."""
        shown = self.header["token"].encode(errors="surrogatepass")
        return hmac.compare_digest(shown, token.encode())

    def with_token(self, token: str) -> WeightChunk:
        """Return this HELLO with ``token``, which is not sent over an authenticated connection."""
        return replace(self, header={**self.header, "token": token})

    def encode_head(self, *, checksum: bool = True) -> bytes:
        """Return prelude and header, which is everything but the payload; they are encoded once."""
        summed = self.payload if checksum and self.payload_bytes else None
        head = self._heads.get(summed is not None)
        if head is None:
            header = compact_json(dict(self.header)).encode()
            flags, crc = (0, 0) if summed is None else (_HAS_CHECKSUM, zlib.crc32(byte_view(summed)))
            fields = MAGIC, _FORMAT, self.kind, flags, len(header), self.payload_bytes
            start = _PRELUDE.pack(*fields, 0, 0)[:20]
            head = start + struct.pack("<II", zlib.crc32(header, zlib.crc32(start)), crc) + header
            self._heads[summed is not None] = head
        return head

    def encode(self) -> bytes:
        """Return the whole frame as bytes; this copies the payload."""
        head = self.encode_head()
        return head if self.payload is None else head + bytes(byte_view(self.payload))

    @classmethod
    def decode(
        cls, data: bytes | bytearray | memoryview, allocate: Callable[[int], torch.Tensor] | None = None
    ) -> WeightChunk:
        """Read a frame that fills ``data`` exactly.

        Args:
            data: the frame; its memory may be reused after this call.
            allocate: function that returns a 1-D uint8 CPU tensor of a given size for the payload; None for
                new memory.

        Raises:
            FormatError: the frame is too short, too long, or not valid.
            NotEnoughMemoryError: raised by ``allocate``; it gets the version of the frame.
        """
        view = memoryview(data).cast("B")
        prelude = Prelude.decode(view[:PRELUDE_BYTES])
        body = PRELUDE_BYTES + prelude.header_bytes
        if len(view) != body + prelude.payload_bytes:
            raise FormatError(f"frame says {body + prelude.payload_bytes} bytes but there are {len(view)}")

        def filled(nbytes: int) -> torch.Tensor:
            payload = (allocate or fresh_bytes)(nbytes)
            byte_view(payload)[:] = view[body:]
            return payload

        return prelude.complete(bytes(view[PRELUDE_BYTES:body]), filled)


class Prelude(NamedTuple):
    """The first 28 bytes of a frame, for transports that read a stream."""

    raw: bytes
    kind: Kind
    header_bytes: int
    payload_bytes: int
    head_crc: int
    payload_crc: int | None

    @classmethod
    def decode(cls, raw: bytes | memoryview) -> Prelude:
        """Read 28 bytes; FormatError if they are not a prelude, or announce more bytes than are allowed."""
        raw = bytes(raw)
        if len(raw) != PRELUDE_BYTES:
            raise FormatError(f"a frame starts with {PRELUDE_BYTES} bytes, got {len(raw)}")
        magic, version, kind, flags, header, payload, head_crc, crc = _PRELUDE.unpack(raw)
        if magic != MAGIC:
            raise FormatError(f"not a frame: starts with {magic!r}")
        if version != _FORMAT:
            raise FormatError(f"frame format {version} is unknown (this library reads {_FORMAT})")
        if kind not in _KINDS:
            raise FormatError(f"unknown frame kind {kind}")
        if flags & ~_HAS_CHECKSUM:
            raise FormatError(f"unknown frame flags {flags:#x}")
        if crc and not flags & _HAS_CHECKSUM:
            raise FormatError("the frame has a payload checksum, but its flags say that there is none")
        if header > MAX_HEADER_BYTES or payload > MAX_PAYLOAD_BYTES:
            raise FormatError(f"frame announces {header} + {payload} bytes, more than is allowed")
        return cls(raw, _KINDS[kind], header, payload, head_crc, crc if flags else None)

    def complete(self, header: bytes, payload_of: Callable[[int], torch.Tensor]) -> WeightChunk:
        """Build the chunk as :meth:`assemble` does; ``payload_of`` returns the payload of the given size.

        Errors about the memory of the payload get the version in ``header``.
        """
        try:
            payload = payload_of(self.payload_bytes) if self.payload_bytes else None
        except (NotEnoughMemoryError, UnreachableMemoryError) as error:
            error.version = self._replace(payload_crc=None).assemble(header, None).header.get("version")
            raise
        return self.assemble(header, payload)

    def assemble(self, header: bytes, payload: torch.Tensor | None) -> WeightChunk:
        """Build the chunk; FormatError if a checksum does not hold or the header is not valid."""
        if zlib.crc32(header, zlib.crc32(self.raw[:20])) != self.head_crc:
            raise FormatError("the header's checksum is wrong")
        if self.payload_crc is not None:
            data = byte_view(payload) if payload is not None else b""
            if zlib.crc32(data) != self.payload_crc:
                raise FormatError("the payload's checksum is wrong")
        try:
            text = header.decode().strip(_JSON_BLANKS)
            fields, end = _read_json(text)
        except (ValueError, RecursionError) as error:
            raise FormatError(f"the header is not JSON: {error}") from None
        if end < len(text) or not isinstance(fields, dict):
            raise FormatError("the header is not one JSON object")
        return WeightChunk(self.kind, fields, payload)


def fresh_bytes(nbytes: int) -> torch.Tensor:
    """Return new memory for a payload."""
    return torch.empty(nbytes, dtype=torch.uint8, device="cpu")


@dataclass(frozen=True)
class Step:
    """The data of an update beside its tensors.

    Attributes:
        version: number of the version.
        extra: extra state of modules, encoded by :func:`~weight_update.wire.extra_state.encode_all`.
        group_commit: name of several models that switch together; see :func:`~weight_update.send_together`.
    """

    version: int
    extra: Mapping[str, Any] = field(default_factory=dict)
    group_commit: str | None = None

    @classmethod
    def of(cls, version: int, extra: Mapping[str, Any], group_commit: str | None = None) -> Step:
        """Return a step that carries the extra state ``extra``; UnsupportedSourceError if it cannot."""
        encoded = encode_all(extra) if extra else {}
        if encoded and (nbytes := len(compact_json(encoded))) > _MAX_EXTRA_BYTES:
            raise UnsupportedSourceError(
                f"the extra state of all modules has {nbytes / 1e6:.0f} MB as JSON, and at most "
                f"{_MAX_EXTRA_BYTES / 1e6:.0f} MB can be sent; keep large tensors in parameters or buffers"
            )
        return cls(version, encoded, group_commit)

    @property
    def commit(self) -> bool:
        """Whether workers apply the update at once; if False it is staged until COMMIT or ABORT."""
        return self.group_commit is None

    def committed(self) -> Step:
        """Return this step for a worker that joins after the commit and applies it at once, on its own."""
        return replace(self, group_commit=None)


def frames_of(
    step: Step,
    schema: WeightSchema,
    encoding: str,
    payloads: Iterable[torch.Tensor],
    count: int,
    base: int | None = None,
) -> Iterator[WeightChunk]:
    """Yield one frame for each of ``count`` payloads; the first carries the extra state.

    ``encoding`` is a wire name, and ``base`` the version that the payloads change; None if they are whole.
    """
    for index, payload in enumerate(payloads):
        header = {
            "version": step.version,
            "base": base,
            "schema": schema.digest,
            "encoding": encoding,
            "index": index,
            "count": count,
            "commit": step.commit,
            "group": step.group_commit,
            "extra": step.extra if index == 0 else {},
        }
        yield WeightChunk(Kind.UPDATE, header, payload)


def require_chunk(found: object, link: object) -> WeightChunk | None:
    """Return the result of ``link.recv_chunk()``; raise TypeError if it is neither a chunk nor None."""
    if found is None or isinstance(found, WeightChunk):
        return found
    raise TypeError(
        f"{type(link).__name__}.recv_chunk() returned {found!r:.60}; return a WeightChunk, or None where "
        "none came in time"
    )


def payloads_of(chunks: Sequence[WeightChunk]) -> list[torch.Tensor]:
    """Return the payloads of the frames of one update, an empty one where a frame has none."""
    return [fresh_bytes(0) if chunk.payload is None else chunk.payload for chunk in chunks]


def extra_of(chunks: Sequence[WeightChunk]) -> dict[str, Any]:
    """Return the extra state that the frames of one update carry."""
    return {name: decode_extra(value) for name, value in chunks[0].header["extra"].items()}
