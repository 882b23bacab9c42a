"""The dense encoding: every byte of every tensor, in the layout of the schema."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch

from weight_update.chunks import WeightSchema
from weight_update.encodings.base import Decoder, Encoder, Lend, WholeEncoding, register_encoding
from weight_update.encodings.views import ViewCache
from weight_update.errors import FormatError
from weight_update.kernels import await_stream

__all__ = ["DenseEncoding"]


@register_encoding
@dataclass(frozen=True)
class DenseEncoding(WholeEncoding):
    """All weights in one payload: the flat buffer that the schema describes."""

    name: ClassVar[str] = "dense/1"
    on_gpu: ClassVar[bool] = True

    def encoder(self, schema: WeightSchema) -> Encoder:
        """See :meth:`Encoding.encoder`."""
        return _DenseEncoder(schema)

    def payload_sizes(self, schema: WeightSchema) -> list[int]:
        """See :meth:`Encoding.payload_sizes`."""
        return [schema.nbytes]

    @classmethod
    def decoder(cls, schema: WeightSchema) -> Decoder:
        """See :meth:`Encoding.decoder`."""
        return _DenseDecoder(schema)


class _DenseEncoder(Encoder):
    def __init__(self, schema: WeightSchema) -> None:
        self._schema = schema
        self._own = [i for i in schema.distinct if schema.tensors[i].nbytes]
        self._some = len(self._own) < len(schema.tensors)
        self._cache = ViewCache(schema, self._own)

    def encode(self, tensors: Sequence[torch.Tensor], lend: Lend) -> list[torch.Tensor]:
        flat = lend(self._schema.nbytes)
        if self._own:
            views = self._cache.views(flat)
            with torch.inference_mode():  # for many small tensors quicker than without gradients
                torch._foreach_copy_(views, [tensors[i] for i in self._own] if self._some else list(tensors))
            await_stream(flat)
        return [flat]


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
