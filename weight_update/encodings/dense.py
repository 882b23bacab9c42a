"""The dense encoding: every byte of every tensor, in the layout of the schema; and the cache of its views."""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import numpy as np
import torch

from weight_update.encodings import copying
from weight_update.encodings.base import Decoder, Encoder, Lend, WholeEncoding, register_encoding
from weight_update.encodings.copying import copy_tensors
from weight_update.errors import FormatError
from weight_update.wire.fixed import FixedTensors
from weight_update.wire.memory import await_stream
from weight_update.wire.schema import WeightSchema


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
        metas = [schema.tensors[i] for i in self._own]
        self._cache = ViewCache(WeightSchema(tuple(metas), schema.nbytes))
        self._offsets = np.array([one.offset for one in metas], np.uint64)
        self._sizes = np.array([one.nbytes for one in metas], np.int64)

    def encode(self, tensors: Sequence[torch.Tensor], lend: Lend) -> list[torch.Tensor]:
        flat = lend(self._schema.nbytes)
        if not self._gather(flat, tensors):
            copy_tensors(self._cache.views(flat), [tensors[i] for i in self._own], "encoding weights")
            if flat.is_cuda:
                await_stream(flat)
        return [flat]

    def _gather(self, flat: torch.Tensor, tensors: Sequence[torch.Tensor]) -> bool:
        """Copy many small tensors; return False, and copy none, if that needs more than a copy."""
        if copying.library is None or not isinstance(tensors, FixedTensors) or not flat.is_cpu:
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
        copying.gather(flat.data_ptr() + self._offsets, addresses, self._sizes)
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
