"""The dense encoding: every byte of every tensor, in the layout of the schema; and the cache of its views."""

from __future__ import annotations

import weakref
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import ClassVar

import torch

from weight_update.encodings.base import Decoder, Encoder, Lend, WholeEncoding, register_encoding
from weight_update.encodings.patch.diff_cpu import SERIAL
from weight_update.errors import FormatError
from weight_update.progress import Progress
from weight_update.wire.fixed import FixedTensors
from weight_update.wire.memory import await_stream
from weight_update.wire.schema import ALIGNMENT, TensorMeta, WeightSchema, aligned

_JOINED = 8  # number of tensors from which a single call is faster
_LARGE = 256 << 20  # bytes that take tens of milliseconds to copy
_BATCHES = 64
_WORD = torch.int64


class ViewCache:
    """A cache of views into the few buffers that are used again and again; 5,000 views take 15 ms.

    Views are dropped with the tensor object for which they were made.
    """

    def __init__(self, schema: WeightSchema) -> None:
        self._schema = schema
        # By id: torch.utils.weak.WeakTensorKeyDictionary makes an update of 1 MB take 13 us longer.
        self._known: dict[int, list[torch.Tensor]] = {}

    def views(self, flat: torch.Tensor) -> list[torch.Tensor]:
        """Return :meth:`WeightSchema.views` of ``flat``."""
        found = self._known.get(id(flat))
        if found is None:
            with torch.inference_mode(False):
                found = self._schema.views(flat.data)  # views of another tensor object, which they keep alive
            self._known[id(flat)] = found
            weakref.finalize(flat, self._known.pop, id(flat), None).atexit = False
        return found


@register_encoding
@dataclass(frozen=True)
class DenseEncoding(WholeEncoding):
    """All weights in one payload: the flat buffer that the schema describes."""

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
        self._some = len(self._own) < len(schema.tensors)
        metas = [schema.tensors[i] for i in self._own]
        groups = list(_groups(metas))
        self._together = [group for group in groups if group[1] - group[0] > 1]
        self._alone = [start for start, stop in groups if stop - start == 1]
        # views into a buffer: one for each group of several entries, then one for each other entry
        order = [*self._together, *((start, start + 1) for start in self._alone)]
        self._joined = ViewCache(WeightSchema(tuple(_joined(metas[a:b]) for a, b in order), schema.nbytes))
        self._single = ViewCache(WeightSchema(tuple(metas), schema.nbytes))
        self._packer: _Packer | None = None

    def encode(self, tensors: Sequence[torch.Tensor], lend: Lend) -> list[torch.Tensor]:
        flat = lend(self._schema.nbytes)
        if self._own:
            own = [tensors[i] for i in self._own] if self._some else list(tensors)
            with torch.inference_mode():  # faster than no_grad for many small tensors
                if not self._pack(flat, tensors) and not self._join(flat, own):
                    copy_all(self._single.views(flat), own, self._schema.nbytes)
            if flat.is_cuda:
                await_stream(flat)
        return [flat]

    def _pack(self, flat: torch.Tensor, tensors: Sequence[torch.Tensor]) -> bool:
        """Copy fixed tensors, many with one call; return False if there are none."""
        if not isinstance(tensors, FixedTensors) or not flat.is_cpu:
            return False
        if self._packer is None:
            self._packer = _Packer(self._schema, self._own)
        return self._packer.pack(flat, tensors)

    def _join(self, flat: torch.Tensor, own: list[torch.Tensor]) -> bool:
        """Copy each group with one call; return False if that is not possible or not faster."""
        if not self._together:
            return False
        views = self._joined.views(flat)
        for view, (start, stop) in zip(views, self._together, strict=False):
            if own[start].dtype is not view.dtype or own[start].device != view.device:
                return False
            try:
                torch.cat(own[start:stop], out=view)
            except (RuntimeError, TypeError):  # several devices, or dtypes that only copy_ converts
                return False
        if self._alone:
            copy_all(views[len(self._together) :], [own[i] for i in self._alone], flat.numel())
        return True


class _Packer:
    """Copies fixed tensors into a buffer as words, whatever their shapes; a run of them with one call."""

    def __init__(self, schema: WeightSchema, own: Sequence[int]) -> None:
        self._schema, self._own = schema, own
        metas = [schema.tensors[i] for i in own]
        self._runs = [run for run in _runs(metas) if run[1] - run[0] >= _JOINED]
        packed = {i for start, stop in self._runs for i in range(start, stop)}
        self._alone = [i for i in range(len(metas)) if i not in packed]
        self._gaps = [
            (after.offset - one.offset - one.nbytes) // _WORD.itemsize for one, after in pairwise(metas)
        ]
        # views into a buffer: one for each run, then one for each other entry
        whole = [_words(metas[start], metas[stop - 1]) for start, stop in self._runs]
        parts = (*whole, *(metas[i] for i in self._alone))
        self._cache = ViewCache(WeightSchema(parts, schema.nbytes))

    def pack(self, flat: torch.Tensor, tensors: FixedTensors) -> bool:
        """Copy the tensors; return False, and copy none, if that needs a conversion."""
        key = "pieces", self._schema.digest
        if key not in tensors.memo:
            tensors.memo[key] = self._pieces(tensors)
        pieces: tuple[list[list[torch.Tensor]], list[torch.Tensor]] | None = tensors.memo[key]
        if pieces is None:
            return False
        views, (runs, alone) = self._cache.views(flat), pieces
        for view, run in zip(views, runs, strict=False):
            torch.cat(run, out=view)
        if alone:
            torch._foreach_copy_(views[len(runs) :], alone)
        return True

    def _pieces(self, tensors: FixedTensors) -> tuple[list[list[torch.Tensor]], list[torch.Tensor]] | None:
        """Return the words of each run with those that fill its gaps, and the other tensors."""
        if any(tensors[i].dtype is not self._schema.tensors[i].dtype for i in self._own):
            return None
        zeros, runs = torch.zeros(ALIGNMENT // _WORD.itemsize, dtype=_WORD), []
        for start, stop in self._runs:
            run = []
            for i in range(start, stop):
                words = tensors.words[self._own[i]]
                if words is None:
                    return None
                run.append(words)
                if i + 1 < stop and self._gaps[i]:
                    run.append(zeros[: self._gaps[i]])
            runs.append(run)
        return runs, [tensors[self._own[i]] for i in self._alone]


def _runs(metas: Sequence[TensorMeta]) -> Iterator[tuple[int, int]]:
    """Yield first and last + 1 positions of runs of entries of whole words, one closely after the other.

    A run ends where torch would start threads to copy it.
    """
    start = None
    for i, meta in enumerate(metas):
        if start is not None:
            last, first = metas[i - 1], metas[start]
            close = aligned(last.offset + last.nbytes) == meta.offset
            small = meta.offset + meta.nbytes - first.offset < SERIAL * _WORD.itemsize
            if meta.nbytes % _WORD.itemsize or not close or not small:
                yield start, i
                start = None
        if start is None and not meta.nbytes % _WORD.itemsize:
            start = i
    if start is not None:
        yield start, len(metas)


def _words(first: TensorMeta, last: TensorMeta) -> TensorMeta:
    """Return one entry that covers a run from its first to its last entry."""
    size = last.offset + last.nbytes - first.offset
    return TensorMeta(first.name, (size // _WORD.itemsize,), _WORD, first.offset)


def copy_all(targets: list[torch.Tensor], sources: list[torch.Tensor], nbytes: int) -> None:
    """Copy tensors, at most ``nbytes`` in all; many bytes in batches, so that their progress can be shown."""
    if nbytes < _LARGE:
        torch._foreach_copy_(targets, sources)
        return
    step = -(-len(targets) // _BATCHES)
    with Progress("encoding weights", sum(target.nbytes for target in targets)) as progress:
        for start in range(0, len(targets), step):
            batch = targets[start : start + step]
            torch._foreach_copy_(batch, sources[start : start + step])
            progress.advance(sum(target.nbytes for target in batch))


def _groups(metas: Sequence[TensorMeta]) -> Iterator[tuple[int, int]]:
    """Yield first and last + 1 positions of groups of entries that one ``torch.cat`` can copy.

    One call takes a third of the time of single copies, unless it has to convert. The tensors of a group
    follow each other without gaps, have one dtype, and are equal in all but the first dimension. A group ends
    where torch would start threads to copy it.
    """
    start = nbytes = 0
    for stop, last in enumerate(metas, 1):
        nbytes += last.nbytes
        joins = stop < len(metas) and _follows(last, metas[stop])
        if joins and nbytes + metas[stop].nbytes < SERIAL * last.dtype.itemsize:
            continue
        if stop - start >= _JOINED:
            yield start, stop
        else:
            yield from ((one, one + 1) for one in range(start, stop))
        start, nbytes = stop, 0


def _follows(last: TensorMeta, one: TensorMeta) -> bool:
    return (
        last.offset + last.nbytes == one.offset
        and last.dtype is one.dtype
        and len(one.shape) == len(last.shape) > 0
        and last.shape[1:] == one.shape[1:]
    )


def _joined(metas: Sequence[TensorMeta]) -> TensorMeta:
    """Return one entry that covers the entries of a group."""
    shape = metas[0].shape
    if len(metas) > 1:
        shape = (sum(meta.shape[0] for meta in metas), *shape[1:])
    return replace(metas[0], shape=shape)


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
