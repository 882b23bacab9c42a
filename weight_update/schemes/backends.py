"""Schemes by the name of the backend that carries weights."""

from __future__ import annotations

from typing import Literal, get_args

from weight_update.schemes.base import WeightSyncScheme
from weight_update.schemes.distributed import DistributedWeightSyncScheme
from weight_update.schemes.multiprocess import MultiProcessWeightSyncScheme
from weight_update.schemes.no_sync import NoWeightSyncScheme
from weight_update.schemes.ray import RayWeightSyncScheme
from weight_update.schemes.rpc import RPCWeightSyncScheme
from weight_update.schemes.shared_mem import SharedMemWeightSyncScheme

__all__ = ["WeightSyncBackend", "scheme_of"]

WeightSyncBackend = Literal[
    "none", "direct", "shared", "thread", "process", "multiprocessing", "distributed", "rpc", "ray"
]
"""The names that :meth:`WeightSyncScheme.from_backend` takes, which are TorchRL's."""

_ALIASES = {"direct": "none", "thread": "shared", "multiprocessing": "process"}
_SCHEMES: dict[str, type[WeightSyncScheme]] = {
    "none": NoWeightSyncScheme,
    "shared": SharedMemWeightSyncScheme,
    "process": MultiProcessWeightSyncScheme,
    "distributed": DistributedWeightSyncScheme,
    "rpc": RPCWeightSyncScheme,
    "ray": RayWeightSyncScheme,
}


def scheme_of(backend: str) -> type[WeightSyncScheme]:
    """Return the scheme for a backend.

    Raises:
        ValueError: an unknown backend; the message lists the known ones.
    """
    found = _SCHEMES.get(_ALIASES.get(backend, backend))
    if found is None:
        known = ", ".join(map(repr, get_args(WeightSyncBackend)))
        raise ValueError(f"Unsupported weight-sync backend {backend!r}; give one of {known}")
    return found
