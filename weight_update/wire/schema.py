"""Schemas: the names, shapes and dtypes of a set of weights, and each tensor's place in one flat buffer."""

from __future__ import annotations

import functools
import hashlib
import itertools
import json
import math
import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from weight_update.arguments import enclosing_names
from weight_update.errors import FormatError, SchemaMismatchError, UnsupportedSourceError
from weight_update.text import plural
from weight_update.wire.memory import has_memory, is_freed, memory_identity

ALIGNMENT = 64
"""Bytes to which every tensor is aligned in the flat buffer."""

MAX_PAYLOAD_BYTES = 1 << 42
_MAX_DIMENSIONS = 64  # that torch supports
_WRAPPERS = re.compile(r"(?:(?<=\.)|^)(_orig_mod|_checkpoint_wrapped_module|module)\.")


_DTYPE_NAMES = [
    *("bool", "uint8", "uint16", "uint32", "uint64", "int8", "int16", "int32", "int64"),
    *("float16", "bfloat16", "float32", "float64", "complex32", "complex64", "complex128"),
    *("float8_e4m3fn", "float8_e4m3fnuz", "float8_e5m2", "float8_e5m2fnuz", "float8_e8m0fnu"),
]
DTYPES: dict[str, torch.dtype] = {name: getattr(torch, name) for name in _DTYPE_NAMES}
BITS: dict[int, torch.dtype] = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
"""Integer dtype for the bits of an element, by bytes; torch computes with few unsigned ones."""

compact_json = json.JSONEncoder(separators=(",", ":")).encode
_NAME_OF_DTYPE = {dtype: name for name, dtype in DTYPES.items()}


def dtype_name(dtype: torch.dtype) -> str:
    """Return the wire name of a dtype, e.g. ``"bfloat16"``; UnsupportedSourceError for quantized ones."""
    try:
        return _NAME_OF_DTYPE[dtype]
    except KeyError:
        raise UnsupportedSourceError(
            f"tensors of dtype {dtype} cannot be synchronized; known: {', '.join(DTYPES)}"
        ) from None


@dataclass(frozen=True)
class TensorMeta:
    """Name, shape, dtype and offset of one tensor.

    Attributes:
        name: dotted name, e.g. ``"module.0.weight"``.
        shape: sizes, ``()`` for a scalar.
        dtype: element type.
        offset: first byte in the flat buffer, a multiple of ``ALIGNMENT``.
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
        """Return the family of the dtype; values are converted only within a family."""
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

    Tied tensors (several names of one memory) share one offset, so their bytes are sent once.

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
            UnsupportedSourceError: a value is no tensor; or it is sparse, nested, quantized, of an unknown
                dtype, or a wrapper of other tensors, such as a DTensor.
        """
        for name, tensor in named.items():
            require_plain(name, tensor)
        rows = ((name, tuple(one.shape), one.dtype, memory_identity(one)) for name, one in named.items())
        return cls._laid_out(rows)

    @classmethod
    def _laid_out(cls, rows: Iterable[tuple[str, tuple[int, ...], torch.dtype, Any]]) -> WeightSchema:
        """Lay out rows of name, shape, dtype and identity; those of one identity, not None, are tied."""
        metas, places, end = [], dict[Any, int](), 0
        for name, shape, dtype, identity in rows:
            offset = end if identity is None else places.setdefault(identity, end)
            metas.append(TensorMeta(name, shape, dtype, offset))
            if offset == end:
                end += aligned(metas[-1].nbytes)
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
    def dimensions(self) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Numbers of dimensions, and sizes of all dimensions, in order."""
        return tuple(map(len, self.shapes)), tuple(itertools.chain.from_iterable(self.shapes))

    @functools.cached_property
    def dtypes(self) -> tuple[torch.dtype, ...]:
        """All dtypes, in order."""
        return tuple(meta.dtype for meta in self.tensors)

    @functools.cached_property
    def offsets(self) -> tuple[int, ...]:
        """All offsets, in order."""
        return tuple(meta.offset for meta in self.tensors)

    @functools.cached_property
    def mixes_sizes(self) -> bool:
        """Whether elements of several tensors differ in size."""
        return len({dtype.itemsize for dtype in self.dtypes}) > 1

    @functools.cached_property
    def distinct(self) -> tuple[int, ...]:
        """Positions of the entries that own their bytes: the first name of each offset."""
        shared = {other for _, other in self.ties}
        return tuple(i for i in range(len(self.tensors)) if i not in shared)

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
        """SHA-256 of the schema, in hex; equal exactly if two schemas are equal."""
        return hashlib.sha256(compact_json(self.to_header()).encode()).hexdigest()

    def views(self, flat: torch.Tensor) -> list[torch.Tensor]:
        """Return a view into ``flat`` (1-D uint8, at least ``nbytes`` long) for each entry."""
        return [flat[m.offset : m.offset + m.nbytes].view(m.dtype).view(m.shape) for m in self.tensors]

    def for_receiver(self, theirs: WeightSchema) -> WeightSchema:
        """Return this schema with the receiver's dtypes where those are not wider.

        Weights that the sender converts have the same bits as weights that the receiver converts. Tied
        tensors keep the sender's dtype if the receiver has several dtypes for them.
        """
        wanted = {meta.name: meta.dtype for meta in theirs.tensors}
        dtypes = [wanted.get(meta.name, meta.dtype) for meta in self.tensors]
        torn = {self.tensors[first].offset for first, other in self.ties if dtypes[first] != dtypes[other]}
        for position, meta in enumerate(self.tensors):
            several = meta.nbytes and meta.offset in torn
            if several or dtypes[position].itemsize > meta.dtype.itemsize:
                dtypes[position] = meta.dtype
        return self._with_dtypes(dtypes)

    def with_dtype(self, dtype: torch.dtype) -> WeightSchema:
        """Return this schema with its floating tensors in ``dtype`` and with new offsets."""
        dtypes = [dtype if meta.dtype.is_floating_point else meta.dtype for meta in self.tensors]
        return self._with_dtypes(dtypes)

    def _with_dtypes(self, dtypes: Sequence[torch.dtype]) -> WeightSchema:
        rows = zip(self.tensors, dtypes, strict=True)
        return self._laid_out((m.name, m.shape, dtype, m.offset if m.nbytes else None) for m, dtype in rows)

    def require_same(self, other: WeightSchema, who: str, *, more: bool = False) -> None:
        """Check that ``other`` fits this schema.

        Names and shapes must be equal; dtypes may differ within floating point or within complex
        (values are then converted to the receiver's dtype). ``other`` must not tie tensors that are separate
        here.

        Args:
            other: schema of the other side.
            who: name of the other side in the message, e.g. ``"worker 1"``.
            more: whether ``other`` may have further names.

        Raises:
            SchemaMismatchError: names do not fit; the error has one line for each.
        """
        problems = [*differences(self, other, who, more=more), *untied(other, self, who)]
        if problems:
            hint = wrapper_hint({"the sender": self.names, who: other.names})
            raise SchemaMismatchError(
                f"{who} does not have the same weights as the sender "
                f"({plural(len(problems), 'difference')}{hint}):",
                tuple(problems),
            )

    def to_header(self) -> dict[str, Any]:
        """Return the JSON-able form, which :meth:`from_header` reads."""
        return {
            "nbytes": self.nbytes,
            "tensors": [[m.name, list(m.shape), dtype_name(m.dtype), m.offset] for m in self.tensors],
        }

    @classmethod
    def from_header(cls, header: Any) -> WeightSchema:
        """Read a schema from the wire.

        Raises:
            FormatError: the header is not a result of :meth:`to_header`: it has an unknown dtype, a negative
                size, an offset outside the buffer, overlapping tensors, or a name twice.
        """
        try:
            nbytes, rows = header["nbytes"], header["tensors"]
            metas = tuple(_meta_from_row(row) for row in rows)
        except (KeyError, TypeError, ValueError) as error:
            raise FormatError(f"not a schema: {error}") from None
        if type(nbytes) is not int or not 0 <= nbytes <= MAX_PAYLOAD_BYTES:
            raise FormatError(f"not a schema: nbytes is {nbytes!r}")
        if len({meta.name for meta in metas}) != len(metas):
            raise FormatError("not a schema: a name occurs twice")
        _check_places(metas, nbytes)
        return cls(metas, nbytes)


def require_tensor(name: str, value: Any) -> None:
    """Raise UnsupportedSourceError, with the name, if a weight is not a tensor."""
    if not isinstance(value, torch.Tensor):
        raise UnsupportedSourceError(
            f"{name!r} is of type {type(value).__name__}; weights are tensors, and other state goes under a "
            "name whose last part is '_extra_state', such as 'module._extra_state'"
        )


def require_not_freed(name: str, tensor: torch.Tensor) -> None:
    """Raise UnsupportedSourceError for a weight whose memory was freed; torch crashes when it reads one."""
    if is_freed(tensor):
        raise UnsupportedSourceError(
            f"the memory of {name!r} was freed (its storage has 0 bytes), as when weights are offloaded; "
            "load them again first"
        )


def require_plain(name: str, tensor: Any) -> None:
    """Raise UnsupportedSourceError for a weight that :meth:`WeightSchema.of` does not take."""
    require_tensor(name, tensor)
    if tensor.layout is not torch.strided or tensor.is_quantized or tensor.is_nested:
        kind, plain = _kind_and_cure(tensor)
        raise UnsupportedSourceError(
            f"{name!r} is a {kind} tensor of {tensor.dtype}; only plain strided tensors can be "
            f"synchronized, such as the result of {plain}()"
        )
    require_not_freed(name, tensor)
    if not has_memory(tensor) and tensor.numel() and not tensor.is_meta:
        raise UnsupportedSourceError(
            f"{name!r} is of type {type(tensor).__name__}, without memory of its own; only plain strided "
            "tensors can be synchronized, such as the result of full_tensor() or dequantize()"
        )
    dtype_name(tensor.dtype)


def aligned(nbytes: int, alignment: int = ALIGNMENT) -> int:
    """Return the next multiple of ``alignment``."""
    return -(-nbytes // alignment) * alignment


def differences(ours: WeightSchema, theirs: WeightSchema, who: str, *, more: bool = False) -> Iterable[str]:
    """Yield a line for each name of ``ours`` that ``theirs`` lacks or has with another shape or dtype.

    Unless ``more`` is set, also yield a line for each name that only ``theirs`` has.
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
    """Return a hint for a message if two sets of names differ only by the prefix of a wrapper module.

    ``names`` has the names of each side, by the side's name in the message.
    """
    plain = {side: sorted(_WRAPPERS.sub("", name) for name in given) for side, given in names.items()}
    if len({tuple(given) for given in plain.values()}) > 1:
        return ""
    found = {
        side: Counter(one for name in given for one in _WRAPPERS.findall(name))
        for side, given in names.items()
    }
    for side, wrappers in found.items():
        extra = wrappers - sum((others for other, others in found.items() if other != side), Counter())
        if extra:
            added = " and ".join(f"{one}." for one in sorted(extra))
            return (
                f"; the names of {side} contain {added}, which torch.compile (_orig_mod), "
                "checkpoint_wrapper (_checkpoint_wrapped_module), DistributedDataParallel and "
                "TensorDictModule (module) add: give both sides the wrapper, or both the module that was "
                "wrapped, or let the sender rename its weights with convert="
            )
    return ""


def matching(prefixes: Sequence[str], names: Iterable[str]) -> set[str]:
    """Return the names that match ``prefixes``; ``"head"`` matches ``head`` and ``head.*``.

    Raises:
        ValueError: a prefix matches nothing; the message names it and the top-level names.
    """
    names = list(names)
    given = {prefix.rstrip("."): prefix for prefix in prefixes}
    found = {name: given.keys() & enclosing_names(name) for name in names}
    used = set().union(*found.values())
    for plain, prefix in given.items():
        if plain not in used:
            tops = ", ".join(sorted({name.partition(".")[0] for name in names})[:20])
            raise ValueError(f"the prefix {prefix!r} matches no weight; the top-level names are: {tops}")
    return {name for name, matched in found.items() if matched}


def untied(tied: WeightSchema, other: WeightSchema, where: str = "the workers") -> Iterable[str]:
    """Yield a line for each pair of names that ``tied`` ties but ``other``, the sender, does not."""
    places = {meta.name: meta.offset for meta in other.tensors}
    for first, second in tied.ties:
        a, b = tied.names[first], tied.names[second]
        if a in places and b in places and places[a] != places[b]:
            yield (
                f"{a} and {b}: tied in {where}, two different tensors in the sender; tie them there, and let "
                "neither clone() nor a converter untie them, as cast() does without only=; or untie them in "
                f"{where}"
            )


def _kind_and_cure(tensor: torch.Tensor) -> tuple[object, str]:
    """Return the kind of a tensor that is not plain, and the method that returns a plain one."""
    if tensor.is_nested:
        return "nested", "to_padded_tensor"
    return ("quantized", "dequantize") if tensor.is_quantized else (tensor.layout, "to_dense")


def _meta_from_row(row: Sequence[Any]) -> TensorMeta:
    name, shape, dtype, offset = row
    if not isinstance(name, str) or type(offset) is not int or not isinstance(shape, list):
        raise ValueError(f"invalid entry {row!r:.80}")
    if dtype not in DTYPES:
        raise ValueError(f"unknown dtype {dtype!r:.40} (known: {', '.join(DTYPES)})")
    if (
        len(shape) > _MAX_DIMENSIONS
        or any(type(size) is not int or size < 0 for size in shape)
        or math.prod(size or 1 for size in shape) > MAX_PAYLOAD_BYTES  # also where another size is 0
    ):
        raise ValueError(f"invalid shape {shape!r:.80}")
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
