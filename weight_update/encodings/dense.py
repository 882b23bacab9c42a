"""The dense encoding: every byte of every tensor, in the layout of the schema."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch

from weight_update.chunks import WeightSchema
from weight_update.encodings.base import Decoder, Encoder, Encoding, Lend, register_encoding
from weight_update.errors import FormatError

__all__ = ["DenseEncoding"]

_REMEMBERED = 4


@register_encoding
@dataclass(frozen=True)
class DenseEncoding(Encoding):
    """All weights in one payload: the flat buffer that the schema describes."""

    name: ClassVar[str] = "dense/1"

    def encoder(self, schema: WeightSchema) -> Encoder:
        """See :meth:`Encoding.encoder`."""
        return _DenseEncoder(schema)

    @classmethod
    def decoder(cls, schema: WeightSchema) -> Decoder:
        """See :meth:`Encoding.decoder`."""
        return _DenseDecoder(schema)


class _ViewCache:
    """Views into the few buffers that come back again and again; making 5,000 views takes 15 ms.

    Args:
        schema: what lies in the buffers.
        only: positions of the entries wanted; None for all.
    """

    def __init__(self, schema: WeightSchema, only: Sequence[int] | None = None) -> None:
        self._schema, self._only = schema, only
        self._known: dict[int, tuple[torch.Tensor, list[torch.Tensor]]] = {}

    def views(self, flat: torch.Tensor) -> list[torch.Tensor]:
        found = self._known.get(id(flat))
        if found is None:
            if len(self._known) >= _REMEMBERED:
                self._known.pop(next(iter(self._known)))
            views = self._schema.views(flat)
            if self._only is not None:
                views = [views[i] for i in self._only]
            found = self._known[id(flat)] = (flat, views)
        return found[1]


class _DenseEncoder(Encoder):
    def __init__(self, schema: WeightSchema) -> None:
        self._schema = schema
        self._own = [i for i in schema.distinct if schema.tensors[i].nbytes]
        self._cache = _ViewCache(schema, self._own)

    @torch.no_grad()
    def encode(self, tensors: Sequence[torch.Tensor], lend: Lend) -> list[torch.Tensor]:
        flat = lend(self._schema.nbytes)
        if self._own:
            torch._foreach_copy_(self._cache.views(flat), [tensors[i] for i in self._own])
        return [flat]


class _DenseDecoder(Decoder):
    def __init__(self, schema: WeightSchema) -> None:
        self._schema = schema
        self._cache = _ViewCache(schema)

    def decode(self, payloads: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        if len(payloads) != 1 or payloads[0].numel() != self._schema.nbytes:
            sizes = [payload.numel() for payload in payloads]
            raise FormatError(f"dense payload of {sizes} bytes, the schema has {self._schema.nbytes}")
        return self._cache.views(payloads[0])
