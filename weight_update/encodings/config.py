"""Encodings from the configuration tree of RLinf's YAML files."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from typing import Any

from weight_update.arguments import require_bool
from weight_update.encodings.base import Encoding
from weight_update.encodings.bucket import BucketEncoding
from weight_update.encodings.patch.encoding import PatchEncoding

_INIT_SYNC = {
    "enabled": "init_sync",
    "prefixes": "init_sync_prefixes",
    "bucket_size": "init_sync_bucket_size",
}
_PATCH = ["snapshot_device", "transport_device", "delta_encoding", "compression", "layout", "values"]
_BUCKET = ["bucket_size", "bucket_dtype", "bucket_device", "load_instant"]
_COLLECTIVES = ["use_ring_sync", "nccl_max_ctas", "nccl_min_ctas"]
"""Options of RLinf's collective groups, which both of its syncers share; they have no meaning here."""


def encoding_from_config(config: Mapping[str, Any]) -> tuple[Encoding, bool]:
    """Return the encoding that ``{"type": ..., "patch" | "bucket": {...}}`` describes, and its ``is_agent``.

    Options of RLinf's collective groups are accepted, with a warning that they have no effect.

    Raises:
        ValueError: a key or value is unknown; the message lists the known keys or values.
    """
    if isinstance(config, Mapping) and set(config) == {"weight_syncer"}:
        config = config["weight_syncer"]
    config = _tree(config, ["type", "patch", "bucket", *_COLLECTIVES], "weight_syncer")
    if unused := [key for key in _COLLECTIVES if key in config]:
        warnings.warn(
            f"weight_syncer: {', '.join(unused)} tune RLinf's NCCL broadcasts and change nothing here; the "
            "backend and network of a scheme are options of the scheme",
            stacklevel=3,
        )
    kind = config.get("type")
    if kind not in ("patch", "bucket"):
        raise ValueError(f"unknown type {kind!r} of weight_syncer (known: patch, bucket)")
    if kind == "bucket":
        options = _tree(config.get(kind), [*_BUCKET, "is_agent"], "bucket")
        is_agent = require_bool("is_agent", options.pop("is_agent", False))
        return BucketEncoding(**options), is_agent
    options = _tree(config.get(kind), [*_PATCH, "init_sync"], "patch")
    init_sync = _tree(options.pop("init_sync", None), list(_INIT_SYNC), "patch.init_sync")
    options.update({_INIT_SYNC[key]: value for key, value in init_sync.items()})
    return PatchEncoding(**options), False


def _tree(given: Any, keys: list[str], where: str) -> dict[str, Any]:
    if given is not None and not isinstance(given, Mapping):
        raise ValueError(f"{where} must be a dict with the keys {', '.join(keys)}, not {given!r}")
    unknown = sorted(map(str, set(given or {}) - set(keys)))
    if unknown:
        raise ValueError(f"unknown keys in {where}: {', '.join(unknown)} (known: {', '.join(keys)})")
    return dict(given or {})
