"""What payloads between hosts can go through."""

from __future__ import annotations

from weight_update.transports.distributed.relay.gloo import Pair
from weight_update.transports.distributed.relay.nccl import NcclPair, require_nccl

__all__ = ["pair_of", "require_backend"]

_PAIRS: dict[str, type[Pair]] = {"gloo": Pair, "nccl": NcclPair}


def pair_of(backend: str) -> type[Pair]:
    """The kind of pair.

    Raises:
        ValueError: an unknown backend.
    """
    if backend not in _PAIRS:
        known = ", ".join(map(repr, _PAIRS))
        hint = "" if isinstance(backend, str) else "; a strategy is given as strategy="
        raise ValueError(f"unknown backend {backend!r:.60} (known: {known}{hint})")
    return _PAIRS[backend]


def require_backend(backend: str) -> None:
    """Check that this process can use it.

    Raises:
        ValueError: it is unknown, or cannot be used here; the message says what can.
    """
    if pair_of(backend) is NcclPair:
        require_nccl()
