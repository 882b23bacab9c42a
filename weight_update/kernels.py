"""Order between a GPU, which works later, and a process that tells others that it is done."""

from __future__ import annotations

import torch

__all__ = ["await_stream"]


def await_stream(tensor: torch.Tensor) -> None:
    """Wait for all that this thread has queued on the GPU of ``tensor``; nothing to wait for on the CPU."""
    if tensor.is_cuda:
        torch.cuda.current_stream(tensor.device).synchronize()
