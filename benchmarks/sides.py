"""The libraries that are compared, and a plain copy."""

from __future__ import annotations

from typing import Any

__all__ = ["COPY", "LABELS", "make_scheme"]

COPY = "copy"
LABELS = {
    "shared": "SharedMem, ours",
    "torchrl-shared": "SharedMem, torchrl",
    "process": "MultiProcess, ours",
    "torchrl-process": "MultiProcess, torchrl",
    COPY: "one plain copy",
}


def make_scheme(side: str) -> Any:
    """A scheme of one of the :data:`LABELS`, with the options that both libraries start with."""
    if side.startswith("torchrl-"):
        # Only the processes of TorchRL's side pay for importing it.
        import torchrl.weight_update as library
    else:
        import weight_update as library  # type: ignore[no-redef]
    if side.endswith("shared"):
        return library.SharedMemWeightSyncScheme(strategy="tensordict")
    return library.MultiProcessWeightSyncScheme(strategy="tensordict")
