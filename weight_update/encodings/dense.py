"""The dense encoding: every byte of every tensor, in the layout of the schema; and copies into flat buffers.

A plain copy reads the memory that it writes, unless the caches hold it. The compiled loop of ``copying.c``
does not read it, so a large copy takes less time. Where the loop is missing (see
:mod:`weight_update.wire.compiled`), and for tensors that need more than a copy, torch does the work.
"""

from __future__ import annotations

import ctypes
import functools
import itertools
import operator
import weakref
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from weight_update.encodings.base import Decoder, Encoder, Lend, WholeEncoding, register_encoding
from weight_update.errors import FormatError
from weight_update.progress import Progress
from weight_update.threads import in_threads
from weight_update.wire.compiled import load
from weight_update.wire.fixed import PLAIN, FixedTensors, is_plain
from weight_update.wire.memory import await_stream
from weight_update.wire.schema import BITS, WeightSchema

Array = npt.NDArray[Any]
_Pairs = Sequence[tuple[torch.Tensor, torch.Tensor]]

SERIAL = 32736
"""Elements that torch copies on one thread; whole vectors, because a remainder converts NaNs differently."""

# Bytes from which the compiled loop is faster than torch. With several threads of torch that is sooner: they
# spin for a while after a copy, so workers on the same processors wait.
_LARGE, _LARGE_ON_ONE = 1 << 20, 8 << 20
_FOR_ONE = 32 << 20  # bytes for each further thread; with fewer, two threads were no faster than one
_EACH = 32 << 10  # bytes of a tensor, on average; looking at smaller ones takes longer than is gained
_PIECE = 8 << 20  # bytes for one thread at a time
_BATCHES = 64  # between which progress is noted

_NBYTES, _IS_CUDA = map(operator.attrgetter, ("nbytes", "is_cuda"))
_COPIED_EXACTLY = {
    *(torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64),
    *(torch.float32, torch.float64, torch.complex64, torch.complex128),
}
_CONVERTED_TOGETHER = {torch.float16, torch.bfloat16, torch.float32, torch.float64}

library: ctypes.CDLL | None = load(Path(__file__).parent, "_copying", 1)
"""The compiled library; None where there is none."""


class ViewCache:
    """A cache of views into the few buffers that are used again and again; 5,000 views take 15 ms.

    Views are dropped with the tensor object for which they were made, or with the cache. A buffer has the
    views of one schema at a time.
    """

    def __init__(self, schema: WeightSchema) -> None:
        self._schema = schema
        # By id: torch.utils.weak.WeakTensorKeyDictionary makes an update of 1 MB take 13 us longer.
        self._known: dict[int, _Known] = {}

    def views(self, flat: torch.Tensor, schema: WeightSchema | None = None) -> list[torch.Tensor]:
        """Return :meth:`WeightSchema.views` of ``flat``; ``schema`` takes the place of the cache's own."""
        schema, found = schema or self._schema, self._known.get(id(flat))
        if found is not None and found.schema is schema:
            return found.views
        with torch.inference_mode(False):
            views = schema.views(flat.data)  # views of another tensor object, which they keep alive
        # The callback has no code of Python: a signal handler that raised in it would keep the views for the
        # next buffer with this id.
        buffer = weakref.ref(flat, functools.partial(self._known.pop, id(flat)))
        self._known[id(flat)] = _Known(buffer, schema, views)
        return views

    def __del__(self) -> None:
        self._known.clear()  # it refers to itself


class _Known(NamedTuple):
    """The views of a buffer, and the reference that drops them when the buffer is gone."""

    buffer: weakref.ref[torch.Tensor]
    schema: WeightSchema
    views: list[torch.Tensor]


@register_encoding
@dataclass(frozen=True)
class DenseEncoding(WholeEncoding):
    """Encoding that sends all weights in one payload: the flat buffer that the schema describes."""

    name: ClassVar[str] = "dense/1"
    on_gpu: ClassVar[bool] = True

    def encoder(self, schema: WeightSchema) -> Encoder:
        return _DenseEncoder(schema)

    def payload_sizes(self, schema: WeightSchema) -> list[int]:
        return [schema.nbytes]

    @classmethod
    def decoder(cls, schema: WeightSchema) -> Decoder:
        return _DenseDecoder(schema)


class _DenseEncoder(Encoder):
    def __init__(self, schema: WeightSchema) -> None:
        self._schema = schema
        self._own = [i for i in schema.distinct if schema.tensors[i].nbytes]
        metas = [schema.tensors[i] for i in self._own]
        self._cache = ViewCache(WeightSchema(tuple(metas), schema.nbytes))
        self._offsets = np.array([one.offset for one in metas], np.uint64)
        self._sizes = np.array([one.nbytes for one in metas], np.int64)
        self._total = int(self._sizes.sum())

    def encode(self, tensors: Sequence[torch.Tensor], lend: Lend) -> list[torch.Tensor]:
        flat = lend(self._schema.nbytes)
        if not self._gather(flat, tensors):
            copy_tensors(self._cache.views(flat), [tensors[i] for i in self._own], "encoding weights")
            if flat.is_cuda:
                await_stream(flat)
        return [flat]

    def _gather(self, flat: torch.Tensor, tensors: Sequence[torch.Tensor]) -> bool:
        """Copy many small tensors; return False, and copy none, if that needs more than a copy."""
        if library is None or not isinstance(tensors, FixedTensors) or not flat.is_cpu:
            return False
        key = "gathered", self._schema.digest
        if key not in tensors.memo:
            same = all(
                tensors[i].dtype is self._schema.dtypes[i] and tensors[i].shape == self._schema.shapes[i]
                for i in self._own
            )
            tensors.memo[key] = (
                np.array([tensors.addresses[i] for i in self._own], np.uint64) if same else None
            )
        addresses = tensors.memo[key]
        if addresses is None:
            return False
        targets = flat.data_ptr() + self._offsets
        copy_memory(targets, addresses, self._sizes, 0, self._total, past_caches=False)
        return True


class _DenseDecoder(Decoder):
    is_flat: ClassVar[bool] = True

    def __init__(self, schema: WeightSchema) -> None:
        self._schema = schema
        self._cache = ViewCache(schema)

    def decode(self, payloads: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        if len(payloads) != 1 or payloads[0].numel() != self._schema.nbytes:
            sizes = [payload.numel() for payload in payloads]
            raise FormatError(f"dense payload of {sizes} bytes, the schema has {self._schema.nbytes}")
        return self._cache.views(payloads[0])


def copy_tensors(
    targets: Sequence[torch.Tensor], sources: Sequence[torch.Tensor], title: str, *, serial: bool = False
) -> None:
    """Copy tensors, converted to the dtypes and devices of ``targets``. Torch does not count the writes.

    Args:
        targets: tensors to write into, which overlap no others.
        sources: one tensor of the same shape for each target.
        title: text for the progress, see :class:`~weight_update.progress.Progress`.
        serial: whether to use one thread; those of torch hang in forked processes.
    """
    total = sum(map(_NBYTES, targets))
    one_thread = max(map(torch.Tensor.numel, targets), default=0) <= SERIAL
    if total < _LARGE or (one_thread and total < _LARGE_ON_ONE):
        _copy_by_torch(targets, sources, serial and not one_thread)
        return
    with Progress(title, total) as progress:
        if library is not None and total >= _EACH * len(targets):
            pairs = list(zip(targets, sources, strict=True))
            suiting = [takes_bytes(*pair) for pair in pairs]
            threads = 1 if serial else min(torch.get_num_threads(), total // _FOR_ONE)
            _stream([pair for pair, suits in zip(pairs, suiting, strict=True) if suits], threads, progress)
            others = [pair for pair, suits in zip(pairs, suiting, strict=True) if not suits]
            targets, sources = [target for target, _ in others], [source for _, source in others]
        step = -(-len(targets) // _BATCHES)
        for start in range(0, len(targets), step or 1):
            batch, parts = targets[start : start + step], sources[start : start + step]
            _copy_by_torch(batch, parts, serial)
            progress.advance(sum(map(_NBYTES, batch)))


def takes_bytes(target: torch.Tensor, source: torch.Tensor) -> bool:
    """Return whether a target takes the bytes of its source, which lie elsewhere."""
    same = source.dtype is target.dtype and source.shape == target.shape
    plain = {type(source), type(target)} <= PLAIN and is_plain(source) and is_plain(target)
    return same and plain and abs(source.data_ptr() - target.data_ptr()) >= target.nbytes


def _stream(pairs: _Pairs, threads: int, progress: Progress) -> None:
    """Copy contiguous tensors past the caches."""
    targets = np.array([target.data_ptr() for target, _ in pairs], np.uint64)
    sources = np.array([source.data_ptr() for _, source in pairs], np.uint64)
    sizes = np.array([target.nbytes for target, _ in pairs], np.int64)
    total = int(sizes.sum())

    def copy(start: int) -> None:
        stop = min(start + _PIECE, total)
        copy_memory(targets, sources, sizes, start, stop, past_caches=True)
        progress.advance(stop - start)

    in_threads(copy, range(0, total, _PIECE), threads)


def _copy_by_torch(targets: Sequence[torch.Tensor], sources: Sequence[torch.Tensor], serial: bool) -> None:
    if serial and targets:
        pairs = [part for pair in zip(targets, sources, strict=True) for part in _split(*pair)]
        targets, sources = zip(*pairs, strict=True)
    if targets:
        with torch.inference_mode():  # faster than no_grad for many small tensors
            copy_together(targets, sources)


def copy_together(targets: Sequence[torch.Tensor], sources: Sequence[torch.Tensor]) -> None:
    """Do the work of ``torch._foreach_copy_``; also between GPU tensors, copy every bit of every dtype.

    Between GPU tensors, torch changes the bits of 16-bit NaNs. It does not support float8, complex32 and
    unsigned integers of more than 8 bits, nor several dtypes at once.

    Copies between a GPU and the CPU are done on return, those between GPUs are queued.
    """
    in_use = torch.cuda.is_initialized()  # type: ignore[no-untyped-call]
    if not in_use or not any(map(_IS_CUDA, itertools.chain(targets, sources))):
        torch._foreach_copy_(list(targets), list(sources))
        return
    on_cpu = list(itertools.filterfalse(_IS_CUDA, itertools.chain(targets, sources)))
    # Torch copies others through memory of its own, and then does not wait before it reads or frees it.
    queued = all(map(torch.Tensor.is_contiguous, on_cpu))
    if any(map(_IS_CUDA, sources)):
        _copy_from_gpu(targets, sources, queued)
    else:
        torch._foreach_copy_(list(targets), list(sources), non_blocking=queued)
    if on_cpu:
        for device in {one.device for one in (*targets, *sources) if _IS_CUDA(one)}:
            torch.cuda.current_stream(device).synchronize()


def _copy_from_gpu(targets: Sequence[torch.Tensor], sources: Sequence[torch.Tensor], queued: bool) -> None:
    groups: dict[tuple[torch.dtype, torch.dtype], tuple[list[torch.Tensor], list[torch.Tensor]]] = {}
    for target, source in zip(targets, sources, strict=True):
        group = groups.setdefault((target.dtype, source.dtype), ([], []))
        group[0].append(target)
        group[1].append(source.resolve_conj().resolve_neg())
    for (to, of), (ours, theirs) in groups.items():
        if to is of and of not in _COPIED_EXACTLY:
            integers = BITS[of.itemsize]
            ours, theirs = ([one.view(integers) for one in part] for part in (ours, theirs))
        if to is of or {to, of} <= _CONVERTED_TOGETHER:
            torch._foreach_copy_(ours, theirs, non_blocking=queued)
        else:
            for target, source in zip(ours, theirs, strict=True):
                target.copy_(source, non_blocking=queued)


def _split(target: torch.Tensor, source: torch.Tensor) -> Iterable[tuple[torch.Tensor, torch.Tensor]]:
    size = max(target.numel(), 1) if target.is_cuda else SERIAL
    parts = torch.split(target.view(-1), size), torch.split(source.reshape(-1), size)
    return zip(*parts, strict=True)


def copy_memory(
    targets: Array, sources: Array, sizes: Array, start: int, stop: int, *, past_caches: bool
) -> None:
    """Copy pieces of memory, given by their addresses (uint64) and numbers of bytes (int64).

    Only the bytes from ``start`` to ``stop``, counted through all pieces, are copied.
    """
    assert library is not None
    addresses = (ctypes.c_void_p(array.ctypes.data) for array in (targets, sources, sizes))
    numbers = map(ctypes.c_int64, (len(sizes), start, stop))
    library.wu_copy(*addresses, *numbers, int(past_caches))
