"""Extra state of modules (``get_extra_state``) as JSON, and back.

Extra state is any Python object that a module saves beside its tensors. It is never pickled, so it must be
built from None, bool, int, float, str, bytes, list, tuple, dict (with string keys) and tensors. Any other
type is an error that names it.
"""

from __future__ import annotations

import base64
from collections.abc import Mapping
from typing import Any

import torch

from weight_update.errors import FormatError, UnsupportedSourceError
from weight_update.wire.memory import bytes_of, has_memory, is_freed
from weight_update.wire.schema import DTYPES, dtype_name

_PLAIN = (type(None), bool, int, float, str)


def encode_all(extra: Mapping[str, Any]) -> dict[str, Any]:
    """Return the JSON-able forms of extra state by name; UnsupportedSourceError if one has none."""
    encoded = {}
    for name, value in extra.items():
        try:
            encoded[name] = encode_extra(value)
        except UnsupportedSourceError as error:
            raise UnsupportedSourceError(f"{name!r}: {error}") from None
    return encoded


def encode_extra(value: Any) -> Any:
    """Return the JSON-able form of one extra state; UnsupportedSourceError if it has none."""
    try:
        return _encode(value)
    except RecursionError:
        raise UnsupportedSourceError("extra state is nested too deeply, or contains itself") from None


def decode_extra(value: Any) -> Any:
    """Return the extra state that :func:`encode_extra` encoded; FormatError for anything else."""
    try:
        return _decode(value)
    except (AttributeError, KeyError, OverflowError, RuntimeError, TypeError, ValueError) as error:
        raise FormatError(f"not an extra state: {error!s:.200}") from None


def _encode(value: Any) -> Any:
    if type(value) in _PLAIN:
        return value
    if isinstance(value, bytes):
        return {"$bytes": base64.b64encode(value).decode()}
    if isinstance(value, torch.Tensor):
        return {"$tensor": _encode_tensor(value)}
    if isinstance(value, list):
        return [_encode(item) for item in value]
    if isinstance(value, tuple):
        return {"$tuple": [_encode(item) for item in value]}
    if isinstance(value, dict) and all(isinstance(key, str) for key in value):
        return {"$dict": {key: _encode(item) for key, item in value.items()}}
    raise UnsupportedSourceError(
        f"extra state holds an object of type {type(value).__name__}; supported are None, bool, int, float, "
        "str, bytes, tensors, and lists, tuples and string-keyed dicts of them"
    )


def _encode_tensor(tensor: torch.Tensor) -> list[Any]:
    hollow = tensor.numel() > 0 and (not has_memory(tensor) or is_freed(tensor))
    if tensor.layout is not torch.strided or tensor.is_quantized or tensor.is_meta or hollow:
        raise UnsupportedSourceError(
            f"extra state holds a {tensor.layout} tensor of {tensor.dtype} on {tensor.device}; "
            "only plain tensors with memory can be synchronized"
        )
    data = base64.b64encode(bytes_of(tensor)).decode()
    return [dtype_name(tensor.dtype), list(tensor.shape), data]


def _decode(value: Any) -> Any:
    if type(value) in _PLAIN:
        return value
    if isinstance(value, list):
        return [_decode(item) for item in value]
    ((tag, body),) = value.items()
    if tag == "$bytes":
        return base64.b64decode(body, validate=True)
    if tag == "$tuple" and isinstance(body, list):
        return tuple(_decode(item) for item in body)
    if tag == "$dict":
        return {key: _decode(item) for key, item in body.items()}
    if tag == "$tensor":
        return _decode_tensor(*body)
    raise ValueError(f"unknown tag {tag!r:.40} with {type(body).__name__}")


def _decode_tensor(name: str, shape: Any, data: str) -> torch.Tensor:
    if not isinstance(shape, list) or any(type(size) is not int or size < 0 for size in shape):
        raise ValueError(f"invalid shape {shape!r:.80}")
    raw = bytearray(base64.b64decode(data, validate=True))
    if not raw:  # view, not empty: memory is bounded by the data, whatever the shape says
        return torch.empty(0, dtype=DTYPES[name], device="cpu").view(shape)
    return torch.frombuffer(raw, dtype=torch.uint8).view(DTYPES[name]).view(shape)
