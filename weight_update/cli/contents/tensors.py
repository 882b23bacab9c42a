"""Rows that describe tensors."""

from __future__ import annotations

from typing import Any

from weight_update.wire.schema import WeightSchema, dtype_name


def tensor_rows(schema: WeightSchema) -> list[dict[str, Any]]:
    """Return a row for each name: dtype, shape, bytes, and the first name of the same tensor."""
    first = {other: schema.names[owner] for owner, other in schema.ties}
    return [
        {
            "name": meta.name,
            "dtype": dtype_name(meta.dtype),
            "shape": list(meta.shape),
            "bytes": meta.nbytes,
            "tied_to": first.get(place),
        }
        for place, meta in enumerate(schema.tensors)
    ]
