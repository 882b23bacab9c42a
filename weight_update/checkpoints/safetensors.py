"""Named tensors as one file in the safetensors format.

The code follows the description in the README of https://github.com/huggingface/safetensors. That library
reads our files, and this module reads its files. Nothing is pickled::

    offset  size  field
    0       8     N, length of the header
    8       N     JSON {name: {"dtype": "F32", "shape": [2, 3], "data_offsets": [begin, end]}, ...}, spaces
    8 + N         data, each tensor row by row; offsets count from here; no holes

All integers are little endian. The ``"__metadata__"`` of the format holds, as JSON, what the format lacks:

- ``"weight_update.tied"`` maps the other names of a tensor to the name that has its data.
- ``"weight_update.dtypes"`` gives the dtypes that the format does not know (complex32, complex128). Such
  tensors are written as bytes, with one more dimension for the bytes of an element.
- ``"weight_update.extra"`` has the extra state of modules by name, as :mod:`weight_update.wire.extra_state`
  writes it.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from typing import Any

import torch

from weight_update.errors import CorruptCheckpointError, FormatError, UnsupportedSourceError
from weight_update.strategy.named_weights import from_items
from weight_update.wire.extra_state import decode_extra, encode_all
from weight_update.wire.memory import byte_view, bytes_of
from weight_update.wire.schema import DTYPES, TensorMeta, WeightSchema, aligned, dtype_name

_CODES = {
    "bool": "BOOL",
    "bfloat16": "BF16",
    "complex64": "C64",
    **{f"{kind}{bits}": f"{kind[0].upper()}{bits}" for kind in ("uint", "int") for bits in (8, 16, 32, 64)},
    **{f"float{bits}": f"F{bits}" for bits in (16, 32, 64)},
    "float8_e4m3fn": "F8_E4M3",
    "float8_e4m3fnuz": "F8_E4M3FNUZ",
    "float8_e5m2": "F8_E5M2",
    "float8_e5m2fnuz": "F8_E5M2FNUZ",
    "float8_e8m0fnu": "F8_E8M0",
}
_DTYPES = {code: DTYPES[name] for name, code in _CODES.items() if name in DTYPES}
_METADATA = "__metadata__"
_TIED, _OTHERS, _EXTRA = "weight_update.tied", "weight_update.dtypes", "weight_update.extra"
_ALIGNMENT = 64
_MAX_HEADER_BYTES = 100_000_000  # the limit of the safetensors library


def pack(weights: Mapping[str, Any]) -> tuple[WeightSchema, list[memoryview]]:
    """Return a description of the tensors, and the contents of the file in order.

    ``weights`` and errors are those of :meth:`CheckpointStore.publish`. Contiguous CPU tensors are not
    copied.
    """
    # A TensorDict iterates over its batch.
    if not isinstance(weights, Mapping) or not all(isinstance(name, str) for name in weights.keys()):  # noqa: SIM118
        raise UnsupportedSourceError(
            "weights are a dict of tensors by name, such as module.state_dict(), not "
            f"{type(weights).__name__}"
        )
    if _METADATA in weights:
        raise ValueError(f"no tensor may be named {_METADATA!r} in a safetensors file")
    named = from_items(weights.items())
    if hollow := [name for name, tensor in named.tensors.items() if tensor.is_meta]:
        raise UnsupportedSourceError(f"on the meta device, without values to write: {', '.join(hollow[:10])}")
    tensors, schema = named.tensors, WeightSchema.of(named.tensors)
    # The widest dtypes first: without holes, each tensor then begins at a multiple of its element size.
    stored = sorted((schema.tensors[i] for i in schema.distinct), key=lambda meta: -meta.dtype.itemsize)
    header = _header(schema, stored, encode_all(named.extra))
    return schema, [memoryview(header), *(bytes_of(tensors[meta.name]) for meta in stored)]


def _header(schema: WeightSchema, stored: list[TensorMeta], extra: dict[str, Any]) -> bytes:
    names, rows, end = schema.names, dict[str, Any](), 0
    for meta in stored:
        name = dtype_name(meta.dtype)
        code, more = (_CODES[name], []) if name in _CODES else ("U8", [meta.dtype.itemsize])
        rows[meta.name] = {
            "dtype": code,
            "shape": [*meta.shape, *more],
            "data_offsets": [end, end + meta.nbytes],
        }
        end += meta.nbytes
    others = {meta.name: dtype_name(meta.dtype) for meta in stored if dtype_name(meta.dtype) not in _CODES}
    tied = {names[other]: names[first] for first, other in schema.ties}
    metadata = {"format": "pt"}
    ours = {_TIED: tied, _OTHERS: others, _EXTRA: extra}
    metadata.update({key: json.dumps(value) for key, value in ours.items() if value})
    text = json.dumps({_METADATA: metadata, **rows}, separators=(",", ":")).encode()
    padded = text.ljust(aligned(8 + len(text), _ALIGNMENT) - 8)
    if len(padded) > _MAX_HEADER_BYTES:
        raise UnsupportedSourceError(
            f"{len(padded) / 1e6:.0f} MB of names and extra state do not fit into the header of a file "
            f"({_MAX_HEADER_BYTES / 1e6:.0f} MB); keep large tensors in parameters or buffers instead"
        )
    return len(padded).to_bytes(8, "little") + padded


def unpack(flat: torch.Tensor) -> dict[str, Any]:
    """Return the tensors and the extra state of a file, by name; CorruptCheckpointError for other contents.

    Tensors are views of ``flat`` (1-D uint8, CPU), the contents of the file, where the alignment allows it.
    """
    try:
        return _unpack(flat)
    except (KeyError, TypeError, ValueError, AttributeError, RecursionError, FormatError) as error:
        raise CorruptCheckpointError(f"not a safetensors file: {type(error).__name__}: {error}") from None


def _unpack(flat: torch.Tensor) -> dict[str, Any]:
    size = int.from_bytes(byte_view(flat[:8]), "little")
    if not 2 <= size <= min(flat.numel() - 8, _MAX_HEADER_BYTES):
        raise ValueError(f"a header of {size} bytes in a file of {flat.numel()}")
    rows = json.loads(bytes(byte_view(flat[8 : 8 + size])), object_pairs_hook=_once)
    metadata = rows.pop(_METADATA, {})
    others, tied, extra = (json.loads(metadata.get(key, "{}")) for key in (_OTHERS, _TIED, _EXTRA))
    data = flat[8 + size :]
    _check_no_holes([row["data_offsets"] for row in rows.values()], data.numel())
    weights: dict[str, Any] = {name: _tensor(data, row, others.get(name)) for name, row in rows.items()}
    weights.update({name: weights[first] for name, first in tied.items()})
    weights.update({name: decode_extra(value) for name, value in extra.items()})
    return weights


def _once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        raise ValueError("a name occurs twice")
    return found


def _check_no_holes(places: list[list[int]], nbytes: int) -> None:
    end = 0
    for first, last in sorted(places):
        if first != end or last < first:
            raise ValueError(f"a tensor occupies {first}..{last}, but the next byte is {end}")
        end = last
    if end != nbytes:
        raise ValueError(f"tensors of {end} bytes in {nbytes} bytes of data")


def _tensor(data: torch.Tensor, row: Mapping[str, Any], other: str | None) -> torch.Tensor:
    first, last = row["data_offsets"]
    shape = row["shape"] if other is None else row["shape"][:-1]
    dtype = _DTYPES[row["dtype"]] if other is None else DTYPES[other]
    if any(type(size) is not int or size < 0 for size in shape):  # first: prod() would repeat a text
        raise ValueError(f"a shape of {shape!r:.100}")
    if math.prod(shape) * dtype.itemsize != last - first:
        raise ValueError(f"{last - first} bytes for {dtype} of shape {shape}")
    if math.prod(size or 1 for size in shape) >= 1 << 63:  # torch counts the elements with an int64
        raise ValueError(f"a shape of {shape}")
    piece = data[first:last]
    if not len(piece) or piece.data_ptr() % dtype.itemsize:  # empty, or another program did not sort them
        piece = piece.clone()
    return piece.view(dtype).view(shape)
