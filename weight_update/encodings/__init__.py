"""Encodings: tensors to payloads and back. New ones derive from :class:`Encoding` and register a name."""

from weight_update.encodings.base import (
    Decoder,
    Encoder,
    Encoding,
    decoder_for,
    register_encoding,
    resolve_encoding,
)
from weight_update.encodings.dense import DenseEncoding

__all__ = [
    "Decoder",
    "DenseEncoding",
    "Encoder",
    "Encoding",
    "decoder_for",
    "register_encoding",
    "resolve_encoding",
]
