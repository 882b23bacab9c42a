"""The libraries that are compared, and a plain copy."""

from __future__ import annotations

from typing import Any

__all__ = ["CLUSTER", "COPY", "LABELS", "make_scheme", "rival"]

COPY = "copy"
LABELS = {
    "shared": "SharedMem, ours",
    "torchrl-shared": "SharedMem, torchrl",
    "process": "MultiProcess, ours",
    "torchrl-process": "MultiProcess, torchrl",
    COPY: "one plain copy",
}
CLUSTER = {
    "distributed": "Distributed",
    "distributed-sockets": "Distributed, a host each",
    "rpc": "RPC",
    "ray": "Ray",
    "ray-object-store": "Ray, object store",
}
"""Our sides that can leave the machine."""

_SCHEMES = {
    "shared": ("SharedMemWeightSyncScheme", {"strategy": "tensordict"}),
    "process": ("MultiProcessWeightSyncScheme", {"strategy": "tensordict"}),
    "distributed": ("DistributedWeightSyncScheme", {}),
    "distributed-sockets": ("DistributedWeightSyncScheme", {}),
    "rpc": ("RPCWeightSyncScheme", {}),
    "ray": ("RayWeightSyncScheme", {}),
    "ray-object-store": ("RayWeightSyncScheme", {"data": "object_store"}),
}


def make_scheme(side: str) -> Any:
    """A scheme of one side, with the options that both libraries start with."""
    if side.startswith("torchrl-"):
        # Only the processes of TorchRL's side pay for importing it.
        import torchrl.weight_update as library
    else:
        import weight_update as library  # type: ignore[no-redef]
    name, options = _SCHEMES[side.removeprefix("torchrl-")]
    return getattr(library, name)(**options)


def rival(side: str) -> str:
    """TorchRL's side that one of ours is compared with."""
    return f"torchrl-{side.partition('-')[0]}"
