"""Encodings: tensors to payloads and back.

New ones derive from :class:`WholeEncoding` or :class:`DeltaEncoding` and register a name.
"""

from weight_update.encodings.base import (
    Decoder,
    Delta,
    DeltaEncoding,
    Difference,
    Encoder,
    Encoding,
    Lend,
    Tracker,
    WholeEncoding,
    decoder_for,
    read_delta,
    register_encoding,
    resolve_encoding,
)
from weight_update.encodings.bucket import BucketEncoding
from weight_update.encodings.config import encoding_from_config
from weight_update.encodings.dense import DenseEncoding
from weight_update.encodings.patch.encoding import PatchEncoding

__all__ = [
    "BucketEncoding",
    "Decoder",
    "Delta",
    "DeltaEncoding",
    "DenseEncoding",
    "Difference",
    "Encoder",
    "Encoding",
    "Lend",
    "PatchEncoding",
    "Tracker",
    "WholeEncoding",
    "decoder_for",
    "encoding_from_config",
    "read_delta",
    "register_encoding",
    "resolve_encoding",
]
