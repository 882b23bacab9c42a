"""The wire format: what a set of weights looks like as bytes.

A :class:`WeightSchema` gives every tensor a place in one flat buffer; a :class:`WeightChunk` is one
frame, a described header and raw bytes. ``docs/wire_format.rst`` shows the same byte by byte. Nothing
here is ever pickled: the header is JSON, the payload is raw memory.

A frame::

    offset  size  field
    0       4     magic, b"WUPD"
    4       1     format version, 1
    5       1     kind (:class:`Kind`)
    6       2     flags; bit 0: the payload checksum is present
    8       4     header length H, in bytes
    12      8     payload length P, in bytes
    20      4     CRC-32 of bytes 0..19 followed by the header
    24      4     CRC-32 of the payload, or 0 when flag bit 0 is off
    28      H     header: one UTF-8 JSON object
    28+H    P     payload

All integers are little endian.
"""

from __future__ import annotations

import enum
import functools
import hashlib
import hmac
import json
import math
import re
import struct
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch

from weight_update.errors import (
    FormatError,
    NotEnoughMemoryError,
    SchemaMismatchError,
    UnreachableMemoryError,
    UnsupportedSourceError,
)

__all__ = ["Kind", "TensorMeta", "WeightChunk", "WeightSchema", "byte_view", "digest"]

ALIGNMENT = 64
"""Every tensor starts at a multiple of this many bytes in the flat buffer."""

MAX_HEADER_BYTES = 64 << 20
MAX_PAYLOAD_BYTES = 1 << 42
_MAX_DIMENSIONS = 64  # of a tensor that torch can compute with
_MAX_NUMBER = 1 << 63
_WRAPPERS = re.compile(r"(?:(?<=\.)|^)(_orig_mod|module)\.")

_PRELUDE = struct.Struct("<4sBBHIQII")
PRELUDE_BYTES = _PRELUDE.size
_MAGIC = b"WUPD"
_FORMAT = 1
_HAS_CHECKSUM = 1

_DTYPE_NAMES = [
    "bool",
    "uint8",
    "uint16",
    "uint32",
    "uint64",
    "int8",
    "int16",
    "int32",
    "int64",
    "float16",
    "bfloat16",
    "float32",
    "float64",
    "complex32",
    "complex64",
    "complex128",
    "float8_e4m3fn",
    "float8_e4m3fnuz",
    "float8_e5m2",
    "float8_e5m2fnuz",
    "float8_e8m0fnu",
]
DTYPES: dict[str, torch.dtype] = {name: getattr(torch, name) for name in _DTYPE_NAMES if hasattr(torch, name)}
_to_json = json.JSONEncoder(separators=(",", ":")).encode
_NAME_OF_DTYPE = {dtype: name for name, dtype in DTYPES.items()}


def dtype_name(dtype: torch.dtype) -> str:
    """The wire name of a dtype, e.g. ``"bfloat16"``.

    Raises:
        UnsupportedSourceError: the dtype has no plain bytes-per-element layout (quantized types, ...).
    """
    try:
        return _NAME_OF_DTYPE[dtype]
    except KeyError:
        raise UnsupportedSourceError(
            f"tensors of dtype {dtype} cannot be synchronized; known: {', '.join(DTYPES)}"
        ) from None


@dataclass(frozen=True)
class TensorMeta:
    """Name, shape, dtype and place of one tensor.

    Attributes:
        name: dotted name, e.g. ``"module.0.weight"``.
        shape: sizes, ``()`` for a scalar.
        dtype: element type.
        offset: first byte in the flat buffer, a multiple of :data:`ALIGNMENT`.
    """

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    offset: int = 0

    @property
    def nbytes(self) -> int:
        """Bytes of the tensor when contiguous."""
        return math.prod(self.shape) * self.dtype.itemsize

    def kind(self) -> str:
        """The family of the dtype; values convert within a family, never across."""
        if self.dtype.is_complex:
            return "complex"
        if self.dtype.is_floating_point:
            return "floating"
        return str(self.dtype)

    def __str__(self) -> str:
        return f"{self.name}: {dtype_name(self.dtype)}{list(self.shape)}"


@dataclass(frozen=True)
class WeightSchema:
    """Names, shapes, dtypes and offsets of a set of weights in one flat buffer.

    Tied tensors (several names of one memory) share one offset, so their bytes travel once.

    Attributes:
        tensors: one entry for each name, in order.
        nbytes: size of the flat buffer in bytes (0 when all tensors are empty).
    """

    tensors: tuple[TensorMeta, ...]
    nbytes: int

    @classmethod
    def of(cls, named: Mapping[str, torch.Tensor]) -> WeightSchema:
        """Lay out ``named`` tensors one after the other, each aligned to 64 bytes.

        Raises:
            UnsupportedSourceError: a tensor is sparse, quantized or of an unknown dtype.
        """
        metas, end = [], 0
        places: dict[tuple[Any, ...], int] = {}
        for name, tensor in named.items():
            if tensor.layout is not torch.strided or tensor.is_quantized:
                raise UnsupportedSourceError(
                    f"{name!r} is a {tensor.layout} tensor of {tensor.dtype}; "
                    "only plain strided tensors can be synchronized"
                )
            dtype_name(tensor.dtype)
            meta = TensorMeta(name, tuple(tensor.shape), tensor.dtype)
            identity = memory_identity(tensor)
            offset = places.get(identity, end) if identity is not None else end
            if identity is not None:
                places[identity] = offset
            metas.append(TensorMeta(meta.name, meta.shape, meta.dtype, offset))
            if offset == end:
                end += _align(meta.nbytes)
        return cls(tuple(metas), end)

    @functools.cached_property
    def names(self) -> tuple[str, ...]:
        """All names, in order."""
        return tuple(meta.name for meta in self.tensors)

    @functools.cached_property
    def shapes(self) -> tuple[tuple[int, ...], ...]:
        """All shapes, in order."""
        return tuple(meta.shape for meta in self.tensors)

    @functools.cached_property
    def dtypes(self) -> tuple[torch.dtype, ...]:
        """All dtypes, in order."""
        return tuple(meta.dtype for meta in self.tensors)

    @functools.cached_property
    def distinct(self) -> tuple[int, ...]:
        """Positions of the entries that own their bytes: the first name of each offset."""
        seen: set[tuple[int, bool]] = set()
        positions = []
        for position, meta in enumerate(self.tensors):
            key = (meta.offset, meta.nbytes == 0)
            if meta.nbytes == 0 or key not in seen:
                seen.add(key)
                positions.append(position)
        return tuple(positions)

    @functools.cached_property
    def ties(self) -> tuple[tuple[int, int], ...]:
        """Pairs (first, other) of positions that share their bytes."""
        first: dict[int, int] = {}
        pairs = []
        for position, meta in enumerate(self.tensors):
            if meta.nbytes:
                owner = first.setdefault(meta.offset, position)
                if owner != position:
                    pairs.append((owner, position))
        return tuple(pairs)

    @functools.cached_property
    def dense_bytes(self) -> int:
        """Bytes of the distinct tensors, without padding."""
        return sum(self.tensors[i].nbytes for i in self.distinct)

    @functools.cached_property
    def elements(self) -> int:
        """Number of elements of the distinct tensors."""
        return sum(math.prod(self.tensors[i].shape) for i in self.distinct)

    @functools.cached_property
    def digest(self) -> str:
        """SHA-256 of the schema, in hex: equal exactly when two schemas are equal."""
        text = _to_json(self.to_header())
        return hashlib.sha256(text.encode()).hexdigest()

    def views(self, flat: torch.Tensor) -> list[torch.Tensor]:
        """One tensor for each entry, a view into ``flat`` (1-D uint8, at least ``nbytes`` long)."""
        out = []
        for meta in self.tensors:
            piece = flat[meta.offset : meta.offset + meta.nbytes]
            out.append(piece.view(meta.dtype).view(meta.shape))
        return out

    def for_receiver(self, theirs: WeightSchema) -> WeightSchema:
        """This schema as it best travels to a receiver: in its dtypes where those are not wider.

        What is converted before it travels has the same bits as what is converted after. Tied tensors keep
        our dtype where the receiver has several for them.
        """
        wanted = {meta.name: meta.dtype for meta in theirs.tensors}
        dtypes_at: dict[int, set[torch.dtype]] = {}
        for meta in self.tensors:
            if meta.nbytes:
                dtypes_at.setdefault(meta.offset, set()).add(wanted.get(meta.name, meta.dtype))
        dtypes = []
        for meta in self.tensors:
            dtype = wanted.get(meta.name, meta.dtype)
            several = meta.nbytes and len(dtypes_at[meta.offset]) > 1
            dtypes.append(meta.dtype if several or dtype.itemsize > meta.dtype.itemsize else dtype)
        return self._with_dtypes(dtypes)

    def with_dtype(self, dtype: torch.dtype) -> WeightSchema:
        """This schema with its floating tensors in ``dtype``, laid out anew."""
        return self._with_dtypes(
            [dtype if meta.dtype.is_floating_point else meta.dtype for meta in self.tensors]
        )

    def _with_dtypes(self, dtypes: Sequence[torch.dtype]) -> WeightSchema:
        metas, places, end = [], dict[int, int](), 0
        for meta, dtype in zip(self.tensors, dtypes, strict=True):
            offset = places.setdefault(meta.offset, end) if meta.nbytes else end
            metas.append(TensorMeta(meta.name, meta.shape, dtype, offset))
            if offset == end:
                end += _align(metas[-1].nbytes)
        return WeightSchema(tuple(metas), end)

    def require_same(self, other: WeightSchema, who: str, *, more: bool = False) -> None:
        """Check that ``other`` can take or give the tensors of this schema.

        Names and shapes must be equal; dtypes may differ within floating point or within complex
        (values are then converted to the receiver's dtype). ``other`` must not tie what we keep apart.

        Args:
            other: the schema of ``who``.
            who: how to call the other side in the message, e.g. ``"worker 1"``.
            more: whether ``other`` may have more names.

        Raises:
            SchemaMismatchError: with one line for each name that does not fit.
        """
        problems = [*differences(self, other, who, more=more), *untied(other, self, who)]
        if problems:
            hint = wrapper_hint({"the sender": self.names, who: other.names})
            raise SchemaMismatchError(
                f"{who} does not have the same weights as the sender ({len(problems)} differences{hint}):",
                tuple(problems),
            )

    def to_header(self) -> dict[str, Any]:
        """JSON-able form; :meth:`from_header` is its inverse."""
        return {
            "nbytes": self.nbytes,
            "tensors": [[m.name, list(m.shape), dtype_name(m.dtype), m.offset] for m in self.tensors],
        }

    @classmethod
    def from_header(cls, header: Any) -> WeightSchema:
        """Read a schema that came over a wire.

        Raises:
            FormatError: anything is not as :meth:`to_header` writes it: unknown dtype, negative size,
                offset outside the buffer, overlapping tensors, a name twice.
        """
        try:
            nbytes, rows = header["nbytes"], header["tensors"]
            metas = tuple(_meta_from_row(row) for row in rows)
        except (KeyError, TypeError, ValueError) as error:
            raise FormatError(f"not a schema: {error}") from None
        if type(nbytes) is not int or not 0 <= nbytes <= MAX_PAYLOAD_BYTES:
            raise FormatError(f"not a schema: nbytes is {nbytes!r}")
        if len({meta.name for meta in metas}) != len(metas):
            raise FormatError("not a schema: a name stands twice")
        _check_places(metas, nbytes)
        return cls(metas, nbytes)


class Kind(enum.IntEnum):
    """What a frame is for. R = receiver, S = sender."""

    HELLO = 1  # R -> S: who I am, my token, my schema, or why I cannot join
    WELCOME = 2  # S -> R: you are in; the schema that counts and its layout
    REFUSED = 3  # S -> R: you are not in, and why
    UPDATE = 4  # S -> R: weights
    STAGED = 5  # R -> S: the update is here, whole, and waits for COMMIT
    COMMIT = 6  # S -> R: apply what you staged
    ABORT = 7  # S -> R: forget what you staged
    APPLIED = 8  # R -> S: the update is visible
    FAILED = 9  # R -> S: the update is not visible, and why
    GOODBYE = 10  # either way: orderly end
    BEHIND = 11  # R -> S: the update changes a version that I do not have; send all
    TAKEN = (
        12  # R -> S: this part of an update is read, its memory is free again; the last is not answered so
    )


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


@dataclass(frozen=True, eq=False)
class WeightChunk:
    """One frame: a kind, a JSON header and raw bytes. It checks itself on construction.

    Attributes:
        kind: what the frame is for.
        header: JSON-able; the fields of each kind are checked, others are refused.
        payload: 1-D uint8 tensor on the CPU, or None for no bytes.

    Raises:
        FormatError: a field is missing, unknown, of the wrong type or out of range.
    """

    kind: Kind
    header: Mapping[str, Any]
    payload: torch.Tensor | None = None

    def __post_init__(self) -> None:
        fields, optional = _REQUIRED[self.kind], _OPTIONAL.get(self.kind, {})
        if not fields.keys() <= self.header.keys() <= {**fields, **optional}.keys():
            raise FormatError(
                f"{self.kind.name} frame has fields {sorted(self.header)}, not {sorted(fields)}"
            )
        for name, value in self.header.items():
            expected = fields.get(name) or optional[name]
            wrong_bool = isinstance(value, bool) and expected is not bool
            if wrong_bool or not isinstance(value, expected) or not _in_range(value):
                raise FormatError(f"{self.kind.name} frame: {name} is {value!r:.80}")
        if (self.header.get("version") or 0) < 0 or self.header.get("index", 0) < 0:
            raise FormatError(f"{self.kind.name} frame: negative version or index")
        if self.kind is Kind.UPDATE and not self.header["index"] < self.header["count"]:
            raise FormatError(f"chunk {self.header['index']} of {self.header['count']}")
        if self.payload is not None and (self.payload.dtype != torch.uint8 or self.payload.dim() != 1):
            raise FormatError("a payload is a 1-D uint8 tensor")

    @property
    def payload_bytes(self) -> int:
        """Length of the payload."""
        return 0 if self.payload is None else self.payload.numel()

    def shows(self, token: str) -> bool:
        """Whether this HELLO carries ``token``; takes as long for a wrong one as for the right one."""
        shown = self.header["token"].encode(errors="surrogatepass")
        return hmac.compare_digest(shown, token.encode())

    def with_token(self, token: str) -> WeightChunk:
        """Return this HELLO with ``token``, which does not travel where the connection is authenticated."""
        return replace(self, header={**self.header, "token": token})

    def encode_head(self, *, checksum: bool = True) -> bytes:
        """Prelude and header: everything but the payload."""
        header = _to_json(dict(self.header)).encode()
        size = self.payload_bytes
        covered = checksum and size > 0
        crc = zlib.crc32(byte_view(self.payload)) if covered and self.payload is not None else 0
        start = _PRELUDE.pack(
            _MAGIC, _FORMAT, self.kind, _HAS_CHECKSUM if covered else 0, len(header), size, 0, 0
        )[:20]
        head_crc = zlib.crc32(header, zlib.crc32(start))
        return start + struct.pack("<II", head_crc, crc) + header

    def encode(self, *, checksum: bool = True) -> bytes:
        """The whole frame as bytes (this copies the payload)."""
        head = self.encode_head(checksum=checksum)
        return head if self.payload is None else head + bytes(byte_view(self.payload))

    @classmethod
    def decode(
        cls,
        data: bytes | bytearray | memoryview,
        allocate: Callable[[int], torch.Tensor] | None = None,
    ) -> WeightChunk:
        """Read a frame that fills ``data`` exactly.

        Args:
            data: the frame; it may be reused when this returns.
            allocate: gives a 1-D uint8 CPU tensor of exactly so many bytes to copy the payload into; the
                default is fresh memory.

        Raises:
            FormatError: too short, too long, or anything in it is not valid.
        """
        view = memoryview(data).cast("B")
        prelude = Prelude.decode(view[:PRELUDE_BYTES])
        body = PRELUDE_BYTES + prelude.header_bytes
        if len(view) != body + prelude.payload_bytes:
            raise FormatError(f"frame says {body + prelude.payload_bytes} bytes but there are {len(view)}")
        payload = None
        if prelude.payload_bytes:
            make = allocate or _fresh_bytes
            payload = make(prelude.payload_bytes)
            byte_view(payload)[:] = view[body:]
        return prelude.assemble(bytes(view[PRELUDE_BYTES:body]), payload)


@dataclass(frozen=True)
class Prelude:
    """The fixed first 28 bytes of a frame, for transports that read a stream piece by piece."""

    raw: bytes
    kind: Kind
    flags: int
    header_bytes: int
    payload_bytes: int
    head_crc: int
    payload_crc: int

    @classmethod
    def decode(cls, raw: bytes | memoryview, max_payload: int = MAX_PAYLOAD_BYTES) -> Prelude:
        """Read the prelude and check it before anything is allocated.

        Args:
            raw: exactly 28 bytes.
            max_payload: refuse frames that announce more bytes than this.

        Raises:
            FormatError: it is not a prelude, or announces too much.
        """
        raw = bytes(raw)
        if len(raw) != PRELUDE_BYTES:
            raise FormatError(f"a frame starts with {PRELUDE_BYTES} bytes, got {len(raw)}")
        magic, version, kind, flags, header, payload, head_crc, crc = _PRELUDE.unpack(raw)
        if magic != _MAGIC:
            raise FormatError(f"not a frame: starts with {magic!r}")
        if version != _FORMAT:
            raise FormatError(f"frame format {version} is unknown (this library reads {_FORMAT})")
        if kind not in Kind._value2member_map_:
            raise FormatError(f"unknown frame kind {kind}")
        if flags & ~_HAS_CHECKSUM:
            raise FormatError(f"unknown frame flags {flags:#x}")
        if crc and not flags & _HAS_CHECKSUM:
            raise FormatError("a payload checksum stands where the flags say that there is none")
        if header > MAX_HEADER_BYTES or payload > max_payload:
            raise FormatError(f"frame announces {header} + {payload} bytes, more than is allowed")
        return cls(raw, Kind(kind), flags, header, payload, head_crc, crc)

    @contextmanager
    def naming_version(self, header: bytes) -> Iterator[None]:
        """Give errors that say that the payload cannot be had the version that ``header`` names.

        Raises:
            FormatError: the payload cannot be had, and the header is not valid.
        """
        try:
            yield
        except (NotEnoughMemoryError, UnreachableMemoryError) as error:
            error.version = replace(self, flags=0).assemble(header, None).header.get("version")
            raise

    def assemble(self, header: bytes, payload: torch.Tensor | None) -> WeightChunk:
        """Check header and payload against the prelude and build the chunk.

        Raises:
            FormatError: a checksum does not hold, the header is not JSON, or its fields are wrong.
        """
        if zlib.crc32(header, zlib.crc32(self.raw[:20])) != self.head_crc:
            raise FormatError("the header's checksum does not hold")
        if self.flags & _HAS_CHECKSUM:
            data = byte_view(payload) if payload is not None else b""
            if zlib.crc32(data) != self.payload_crc:
                raise FormatError("the payload's checksum does not hold")
        try:
            fields = json.loads(header.decode())
        except (ValueError, RecursionError) as error:
            raise FormatError(f"the header is not JSON: {error}") from None
        if not isinstance(fields, dict):
            raise FormatError("the header is not a JSON object")
        return WeightChunk(self.kind, fields, payload)


def digest(tensor: torch.Tensor) -> str:
    """A digest (BLAKE2b, 128 bits, in hex) of the bits of a contiguous CPU tensor."""
    flat = tensor.as_strided((tensor.numel(),), (1,))  # one element may have any stride
    raw = flat.view(torch.uint8)
    return hashlib.blake2b(byte_view(raw), digest_size=16).hexdigest()


def byte_view(flat: torch.Tensor) -> memoryview:
    """The memory of a contiguous 1-D uint8 CPU tensor, without a copy."""
    return memoryview(flat.numpy()).cast("B")  # type: ignore[arg-type]  # arrays are buffers


def _in_range(value: Any) -> bool:
    """Whether a number fits 64 bits and is one; True for everything else."""
    return not isinstance(value, int | float) or -_MAX_NUMBER <= value < _MAX_NUMBER


def _fresh_bytes(nbytes: int) -> torch.Tensor:
    return torch.empty(nbytes, dtype=torch.uint8)


def memory_identity(tensor: torch.Tensor) -> tuple[Any, ...] | None:
    """A key that is equal for two tensors exactly when they are the same view of the same memory.

    None where there is no memory to share: empty and meta tensors.
    """
    if tensor.numel() == 0:
        return None
    if tensor.device.type == "meta":
        return ("meta", id(tensor))
    return (
        tensor.data_ptr(),
        tensor.device,
        tensor.dtype,
        tuple(tensor.shape),
        tensor.stride(),
        tensor.is_conj(),
        tensor.is_neg(),
    )


def _align(nbytes: int) -> int:
    return -(-nbytes // ALIGNMENT) * ALIGNMENT


def differences(ours: WeightSchema, theirs: WeightSchema, who: str, *, more: bool = False) -> Iterable[str]:
    """One line for each name of ``ours`` that ``theirs`` lacks or has otherwise.

    And one for each name that it has beyond them, unless it may have ``more``.
    """
    left = {meta.name: meta for meta in ours.tensors}
    right = {meta.name: meta for meta in theirs.tensors}
    for name, meta in left.items():
        other = right.get(name)
        if other is None:
            yield f"{meta}: missing in {who}"
        elif other.shape != meta.shape:
            yield f"{meta}: shape {list(other.shape)} in {who}"
        elif other.dtype != meta.dtype and other.kind() != meta.kind():
            yield f"{meta}: dtype {dtype_name(other.dtype)} in {who}"
    for name, meta in right.items():
        if name not in left and not more:
            yield f"{meta}: unexpected, only in {who}"


def wrapper_hint(names: Mapping[str, Sequence[str]]) -> str:
    """Return the cure, if two sets of names differ only by what a wrapper module puts into them.

    Args:
        names: those of each of the two sides, by how the message calls the side.

    Returns:
        the text to add to a message; empty if the names differ otherwise.
    """
    plain = {side: sorted(_WRAPPERS.sub("", name) for name in given) for side, given in names.items()}
    if len({tuple(given) for given in plain.values()}) > 1:
        return ""
    found = {
        side: {one for name in given for one in _WRAPPERS.findall(name)} for side, given in names.items()
    }
    for side, wrappers in found.items():
        extra = wrappers.difference(*(others for other, others in found.items() if other != side))
        if extra:
            added = " and ".join(f"{one}." for one in sorted(extra))
            return (
                f"; the names of {side} contain {added}, which torch.compile (_orig_mod) and "
                "DistributedDataParallel (module) add: give the scheme the module that was wrapped"
            )
    return ""


def untied(tied: WeightSchema, other: WeightSchema, where: str = "the workers") -> Iterable[str]:
    """One line for each pair of names that ``tied`` ties and ``other``, the sender, has as two tensors."""
    places = {meta.name: meta.offset for meta in other.tensors}
    for first, second in tied.ties:
        a, b = tied.names[first], tied.names[second]
        if a in places and b in places and places[a] != places[b]:
            yield f"{a} and {b}: tied in {where}, two different tensors in the sender"


def _meta_from_row(row: Sequence[Any]) -> TensorMeta:
    name, shape, dtype, offset = row
    if not isinstance(name, str) or type(offset) is not int or not isinstance(shape, list):
        raise ValueError(f"entry {row!r:.80}")
    if dtype not in DTYPES:
        raise ValueError(f"unknown dtype {dtype!r:.40} (known: {', '.join(DTYPES)})")
    if len(shape) > _MAX_DIMENSIONS or any(
        type(size) is not int or not 0 <= size <= MAX_PAYLOAD_BYTES for size in shape
    ):
        raise ValueError(f"shape {shape!r:.80}")
    if math.prod(size or 1 for size in shape) > MAX_PAYLOAD_BYTES:  # also where another size is 0
        raise ValueError(f"shape {shape!r:.80}")
    return TensorMeta(name, tuple(shape), DTYPES[dtype], offset)


def _check_places(metas: Sequence[TensorMeta], nbytes: int) -> None:
    places: dict[tuple[int, int], TensorMeta] = {}
    for meta in metas:
        if meta.offset < 0 or meta.offset % ALIGNMENT or meta.offset + meta.nbytes > nbytes:
            raise FormatError(f"{meta.name!r} lies outside the buffer or is not aligned")
        if meta.nbytes:
            twin = places.setdefault((meta.offset, meta.nbytes), meta)
            if (twin.shape, twin.dtype) != (meta.shape, meta.dtype):
                raise FormatError(f"{meta.name!r} and {twin.name!r} overlap")
    end = 0
    for offset, size in sorted(places):
        if offset < end:
            raise FormatError("two tensors overlap")
        end = offset + size
