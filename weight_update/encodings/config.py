"""Encodings from the configuration tree that RLinf's YAML files use."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from weight_update.encodings.base import Encoding
from weight_update.encodings.bucket import BucketEncoding
from weight_update.encodings.patch import PatchEncoding

__all__ = ["encoding_from_config"]

_INIT_SYNC = {
    "enabled": "init_sync",
    "prefixes": "init_sync_prefixes",
    "bucket_size": "init_sync_bucket_size",
}
_PATCH = ["snapshot_device", "transport_device", "delta_encoding", "compression", "layout", "values"]
_BUCKET = ["bucket_size", "bucket_dtype", "bucket_device", "load_instant"]


def encoding_from_config(config: Mapping[str, Any]) -> tuple[Encoding, bool]:
    """The encoding that ``{"type": ..., "patch" | "bucket": {...}}`` describes, and its ``is_agent``.

    Raises:
        ValueError: a key or value is unknown; the message lists the known ones.
    """
    if set(config) == {"weight_syncer"}:
        config = config["weight_syncer"]
    _known(config, ["type", "patch", "bucket"], "weight_syncer")
    kind = config.get("type")
    if kind not in ("patch", "bucket"):
        raise ValueError(f"unknown type {kind!r} of weight_syncer (known: patch, bucket)")
    options = dict(config.get(kind) or {})
    if kind == "bucket":
        _known(options, [*_BUCKET, "is_agent"], "bucket")
        is_agent = bool(options.pop("is_agent", False))
        return BucketEncoding(**options), is_agent
    _known(options, [*_PATCH, "init_sync"], "patch")
    init_sync = dict(options.pop("init_sync", None) or {})
    _known(init_sync, list(_INIT_SYNC), "patch.init_sync")
    options.update({_INIT_SYNC[key]: value for key, value in init_sync.items()})
    return PatchEncoding(**options), False


def _known(given: Mapping[str, Any], keys: list[str], where: str) -> None:
    unknown = sorted(set(given) - set(keys))
    if unknown:
        raise ValueError(f"unknown keys in {where}: {', '.join(unknown)} (known: {', '.join(keys)})")
