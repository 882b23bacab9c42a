"""The bucket encoding: all weights, in several payloads of bounded size.

Options as in RLinf's bucket syncer; the layout of payloads is ours, see ``docs/wire_format.rst``.
"""

from __future__ import annotations

import functools
import operator
import struct
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import ClassVar, Literal, get_args

import torch

from weight_update.arguments import require_bool
from weight_update.encodings import dense
from weight_update.encodings.base import Decoder, Encoder, Lend, WholeEncoding, register_encoding
from weight_update.encodings.dense import ViewCache, copy_tensors
from weight_update.errors import FormatError
from weight_update.progress import Progress
from weight_update.wire.memory import await_stream, byte_view
from weight_update.wire.schema import ALIGNMENT, DTYPES, TensorMeta, WeightSchema, aligned, dtype_name

BucketDtype = Literal["bfloat16", "float16", "float32"]
_Range = tuple[int, int, int, bool]
"""Position of a tensor, first and last + 1 of its bytes, and whether these are all of them."""
_SHORT_DTYPES = {"bf16": "bfloat16", "fp16": "float16", "fp32": "float32"}  # as RLinf's configurations say
_DTYPE = operator.attrgetter("dtype")
_HEAD = struct.Struct("<4sB3x16sQQQ")
_HEAD_BYTES = 64
_MAGIC = b"WUBK"
_TOGETHER = 1 << 20  # bytes that are copied by one call
_LARGE = 8 << 20  # bytes from which the compiled loop is faster than numpy


def require_size(option: str, value: object) -> None:
    """Raise ValueError unless ``value`` can be the size of a bucket."""
    if not isinstance(value, int) or value < ALIGNMENT:
        raise ValueError(f"{option} is an integer number of bytes, at least {ALIGNMENT}: {value!r}")


@register_encoding
@dataclass(frozen=True)
class BucketEncoding(WholeEncoding):
    """Encoding that sends all weights in buckets, one after the other.

    Args:
        bucket_size: largest number of bytes in a bucket, at least 64. A tensor that is larger is split.
        bucket_dtype: dtype in which floating tensors are sent, a ``torch.dtype`` or its name (``"bfloat16"``,
            ``"float16"``, ``"float32"``; short ``"bf16"``, ``"fp16"``, ``"fp32"``). They are converted back
            on arrival; other tensors keep their dtype. None keeps every dtype.
        bucket_device: device on which a bucket is assembled before it goes to the transport, e.g. ``"cuda"``
            to convert on the GPU and copy from it once. None writes directly into the transport's memory.
        load_instant: whether a receiver copies each bucket when it arrives, which frees the bucket's memory.
            If False, it keeps the buckets, and its weights are views into them. In both cases, no update is
            visible before all buckets have arrived.

    Raises:
        ValueError: an option has a value that is not allowed; the message lists the allowed values.
    """

    name: ClassVar[str] = "bucket/1"
    on_gpu: ClassVar[bool] = True
    bucket_size: int = 512 << 20
    bucket_dtype: torch.dtype | BucketDtype | Literal["bf16", "fp16", "fp32"] | None = None
    bucket_device: str | None = None
    load_instant: bool = True

    def __post_init__(self) -> None:
        require_size("bucket_size", self.bucket_size)
        require_bool("load_instant", self.load_instant)
        dtype: object = self.bucket_dtype
        if isinstance(dtype, str) and dtype in _SHORT_DTYPES:
            dtype = _SHORT_DTYPES[dtype]
            object.__setattr__(self, "bucket_dtype", dtype)
        label = dtype_name(dtype) if isinstance(dtype, torch.dtype) else dtype
        if label is not None and label not in get_args(BucketDtype):
            known = ", ".join(get_args(BucketDtype))
            raise ValueError(f"unknown bucket_dtype {dtype!r} (known: None, {known})")
        device = None if self.bucket_device is None else str(self.bucket_device).partition(":")[0]
        if device not in (None, "cpu", "cuda"):
            raise ValueError(f"unknown bucket_device {self.bucket_device!r} (known: None, cpu, cuda)")

    @property
    def receiver_copies(self) -> bool:
        return self.load_instant

    def encoder(self, schema: WeightSchema) -> Encoder:
        """Return a new encoder for ``schema``.

        Raises:
            ValueError: ``bucket_device`` is CUDA and there is none.
        """
        device = torch.device(self.bucket_device or "cpu")
        if device.type == "cuda" and not torch.cuda.is_available():
            raise ValueError("bucket_device='cuda' needs a CUDA device; give None or 'cpu' here")
        return _BucketEncoder(self, schema, None if device.type == "cpu" else device)

    @property
    def in_chunks(self) -> bool:
        return self.load_instant

    def payload_sizes(self, schema: WeightSchema) -> list[int]:
        cuts = _cuts(_as_sent(schema, self.dtype), self.bucket_size)
        return [_HEAD_BYTES + stop - start for start, stop in cuts]

    @classmethod
    def decoder(cls, schema: WeightSchema) -> Decoder:
        return _BucketDecoder(schema)

    @property
    def dtype(self) -> torch.dtype | None:
        """``bucket_dtype`` as a dtype."""
        return DTYPES[self.bucket_dtype] if isinstance(self.bucket_dtype, str) else self.bucket_dtype


class _BucketEncoder(Encoder):
    def __init__(self, options: BucketEncoding, schema: WeightSchema, device: torch.device | None) -> None:
        self._options, self._device = options, device
        self._schema = _as_sent(schema, options.dtype)
        self._views = ViewCache(self._schema)
        self._buckets: list[tuple[int, int, list[_Range], WeightSchema]] = []
        for start, stop in _cuts(self._schema, options.bucket_size):
            ranges = list(self._inside(start, stop))
            self._buckets.append((start, stop, ranges, self._places(start, stop, ranges)))

    def encode(self, tensors: Sequence[torch.Tensor], lend: Lend) -> list[torch.Tensor]:
        if len(self._buckets) == 1:  # there is nothing to show before the end
            return list(self.stream(iter(tensors), lend))
        payloads = []
        with Progress("encoding weights", self._schema.nbytes) as progress:
            for payload in self.stream(iter(tensors), lend):
                payloads.append(payload)
                progress.advance(payload.numel())
        return payloads

    @torch.no_grad()
    def stream(self, tensors: Iterator[torch.Tensor], lend: Lend) -> Iterator[torch.Tensor]:
        last, position = torch.empty(0), -1
        for start, stop, ranges, places in self._buckets:
            payload = lend(_HEAD_BYTES + stop - start)
            memory = self._begin(payload, start, stop)
            copies = _Copies()
            for (i, first, end, whole), target in zip(ranges, self._views.views(memory, places), strict=True):
                while position < i:
                    last, position = next(tensors), position + 1
                if whole:
                    copies.add(target, last)
                else:
                    size = target.itemsize
                    copies.add(target, last.reshape(-1)[first // size : end // size])
                if end == self._schema.tensors[i].nbytes:
                    last = memory  # the iterator may reuse the memory of the tensor for the next one
            copies.make()
            if self._device is not None:
                payload.copy_(memory)
            await_stream(payload)
            if stop == self._buckets[-1][1]:
                for _ in tensors:  # tied tensors; the iterator may still raise
                    pass
            yield payload

    def _begin(self, payload: torch.Tensor, start: int, stop: int) -> torch.Tensor:
        """Write the head of a bucket, and return the memory in which to assemble the bucket."""
        name = "" if self._options.dtype is None else dtype_name(self._options.dtype)
        head = _HEAD.pack(
            _MAGIC, self._options.load_instant, name.encode(), start, stop, self._schema.nbytes
        ).ljust(_HEAD_BYTES, b"\0")
        memory = payload if self._device is None else torch.empty_like(payload, device=self._device)
        memory[:_HEAD_BYTES] = torch.frombuffer(bytearray(head), dtype=torch.uint8)
        return memory

    def _places(self, start: int, stop: int, ranges: Iterable[_Range]) -> WeightSchema:
        """Return the places of a bucket's tensors, and parts of tensors, in its payload."""
        metas = []
        for i, first, end, whole in ranges:
            meta = self._schema.tensors[i]
            shape = meta.shape if whole else ((end - first) // meta.dtype.itemsize,)
            offset = _HEAD_BYTES + meta.offset + first - start
            metas.append(TensorMeta(meta.name, shape, meta.dtype, offset))
        return WeightSchema(tuple(metas), _HEAD_BYTES + stop - start)

    def _inside(self, start: int, stop: int) -> Iterator[_Range]:
        """Yield the range of each tensor that lies between two bytes of the flat buffer."""
        for i in self._schema.distinct:
            meta = self._schema.tensors[i]
            first, last = max(start - meta.offset, 0), min(stop - meta.offset, meta.nbytes)
            if first < last:
                yield i, first, last, last - first == meta.nbytes


class _Copies:
    """A batch of small copies, which are faster together, while few tensors wait."""

    def __init__(self) -> None:
        self._targets: list[torch.Tensor] = []
        self._sources: list[torch.Tensor] = []
        self._waiting = 0

    def add(self, target: torch.Tensor, source: torch.Tensor) -> None:
        """Copy ``source`` into ``target`` now or in :meth:`make`."""
        self._targets.append(target)
        self._sources.append(source)
        self._waiting += target.nbytes
        if self._waiting >= _TOGETHER:
            self.make()

    def make(self) -> None:
        if self._targets:
            copy_tensors(self._targets, self._sources, "encoding weights")
        self._targets, self._sources, self._waiting = [], [], 0


class _BucketDecoder(Decoder):
    in_chunks = True

    def __init__(self, schema: WeightSchema) -> None:
        self._schema = schema
        self._flat: torch.Tensor | None = None  # filled bucket by bucket as they arrive
        self._dtype: torch.dtype | None = None
        self._sent, self._views, self._joiner = schema, ViewCache(schema), Joiner(schema)
        self._end = 0

    def feed(self, index: int, payload: torch.Tensor, allocate: Lend) -> torch.Tensor:
        head = self._head(index, payload)
        if index == 0:
            self._flat = allocate(head.total) if head.load_instant else None
        if self._flat is None:
            return payload
        copy_bytes(self._flat[head.start : head.stop], payload[_HEAD_BYTES:])
        return self._flat

    def stream(self, index: int, payload: torch.Tensor) -> list[tuple[int, torch.Tensor]]:
        head = self._head(index, payload)
        found = self._joiner.take(head.start, payload[_HEAD_BYTES:])
        dtypes = [self._schema.tensors[i].dtype for i, _ in found]
        values = _converted([value for _, value in found], dtypes)
        return [(i, value) for (i, _), value in zip(found, values, strict=True)]

    def decode(self, payloads: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        if not payloads:
            raise FormatError("the update has no buckets")
        if self._flat is not None and all(payload is self._flat for payload in payloads):
            values = self._views.views(self._flat)
        else:
            found: dict[int, torch.Tensor] = {}
            for index, payload in enumerate(payloads):
                head = self._head(index, payload)
                found.update(self._joiner.take(head.start, payload[_HEAD_BYTES:]))
            values = [found[i] for i in sorted(found)]
        self._flat = None
        if self._end != self._sent.nbytes:
            raise FormatError(f"the buckets end at byte {self._end} of {self._sent.nbytes}")
        return _converted(values, self._schema.dtypes)

    def _head(self, index: int, payload: torch.Tensor) -> _Head:
        """Return the head of the next bucket, which must follow the previous one without a gap."""
        head = _Head.of(payload)
        if index == 0:
            self._end = 0
            if head.dtype is not self._dtype:
                self._dtype, sent = head.dtype, _as_sent(self._schema, head.dtype)
                self._sent, self._views, self._joiner = sent, ViewCache(sent), Joiner(sent)
        if head.total != self._sent.nbytes or head.start != self._end or head.stop > head.total:
            raise FormatError(f"got a bucket of bytes {head.start} to {head.stop}, expected byte {self._end}")
        self._end = head.stop
        return head


def _converted(values: Sequence[torch.Tensor], dtypes: Sequence[torch.dtype]) -> list[torch.Tensor]:
    """Return ``values`` in ``dtypes``, converted on one thread, because more hang in forked processes."""
    if all(map(operator.is_, map(_DTYPE, values), dtypes)):
        return list(values)
    ready = []
    targets, sources = [], []
    for value, dtype in zip(values, dtypes, strict=True):
        ready.append(value if value.dtype is dtype else torch.empty_like(value, dtype=dtype))
        if value.dtype is not dtype:
            targets.append(ready[-1])
            sources.append(value)
    copy_tensors(targets, sources, "converting weights", serial=True)
    return ready


class Joiner:
    """A joiner of the parts of a schema's flat buffer, which returns each tensor with its last byte."""

    def __init__(self, schema: WeightSchema) -> None:
        self._tensors = schema.tensors
        self._ends = [meta.offset + meta.nbytes for meta in schema.tensors]
        self._order = sorted(range(len(self._ends)), key=self._ends.__getitem__)
        self._next = 0  # index into the order of the first incomplete tensor
        self._begun = torch.empty(0)  # bytes of that tensor, if it spans parts

    def take(self, start: int, body: torch.Tensor) -> list[tuple[int, torch.Tensor]]:
        """Return the position in the schema and the value of each tensor that ends in this part.

        A part begins where the previous one ended, or at 0. Values are views into ``body``, except of tensors
        that span parts.
        """
        if start == 0:
            self._next = 0
        stop, found = start + body.numel(), []
        for position in self._order[self._next :]:
            meta, end = self._tensors[position], self._ends[position]
            if end > stop and meta.offset >= stop:
                break
            first = max(meta.offset, start)
            raw = body[first - start : end - start]
            if first > meta.offset or end > stop:  # it spans parts
                if first == meta.offset:
                    self._begun = body.new_empty(meta.nbytes)
                place = first - meta.offset
                copy_bytes(self._begun[place : place + raw.numel()], raw)
                raw = self._begun
            if end > stop:
                break
            found.append((position, raw.view(meta.dtype).view(meta.shape)))
            self._next += 1
        if self._next == len(self._order):
            self._begun = torch.empty(0)  # the caller has it
        return found


def copy_bytes(target: torch.Tensor, source: torch.Tensor) -> None:
    """Copy 1-D uint8 tensors of one size, and wait until they are copied; they may overlap."""
    if target.is_cuda or source.is_cuda:
        target.copy_(source)
        await_stream(target)
    elif (
        dense.library is None
        or target.nbytes < _LARGE
        or target.untyped_storage().data_ptr() == source.untyped_storage().data_ptr()
    ):
        target.numpy()[:] = source.numpy()  # not torch: its threads hang in forked processes
    else:
        copy_tensors([target], [source], "copying a bucket", serial=True)


@dataclass(frozen=True)
class _Head:
    """The first 64 bytes of a bucket."""

    load_instant: bool
    dtype: torch.dtype | None
    start: int
    stop: int
    total: int

    @classmethod
    def of(cls, payload: torch.Tensor) -> _Head:
        if payload.numel() < _HEAD_BYTES:
            raise FormatError(f"a bucket begins with {_HEAD_BYTES} bytes, got {payload.numel()}")
        raw = bytes(byte_view(payload[: _HEAD.size].cpu()))
        magic, instant, name, start, stop, total = _HEAD.unpack(raw)
        label = name.rstrip(b"\0").decode("ascii", "replace")
        if magic != _MAGIC or instant > 1 or (label and label not in get_args(BucketDtype)):
            raise FormatError(f"not a bucket: starts with {raw[:24]!r}")
        if payload.numel() != _HEAD_BYTES + stop - start:
            raise FormatError(f"a bucket of {payload.numel()} bytes says it holds {start} to {stop}")
        return cls(bool(instant), DTYPES[label] if label else None, start, stop, total)


def _as_sent(schema: WeightSchema, dtype: torch.dtype | None) -> WeightSchema:
    """Return ``schema`` with its floating tensors in ``dtype``."""
    return schema if dtype is None else _with_dtype(schema, dtype)


_with_dtype = functools.lru_cache(maxsize=16)(WeightSchema.with_dtype)


def _cuts(schema: WeightSchema, size: int) -> Iterator[tuple[int, int]]:
    """Yield first and last + 1 byte of each bucket: whole tensors, or a part of a large one."""
    size = size // ALIGNMENT * ALIGNMENT
    start = end = 0
    for i in schema.distinct:
        meta = schema.tensors[i]
        last = aligned(meta.offset + meta.nbytes)
        if last - start > size and end > start:
            yield start, end
            start = end
        while last - start > size:
            yield start, start + size
            start += size
        end = last
    if end > start or schema.nbytes == 0:
        yield start, end
