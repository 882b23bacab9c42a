"""Memory that payloads are written into and received into."""

from __future__ import annotations

from collections.abc import Callable

import torch

Allocate = Callable[[int], torch.Tensor]
"""Returns a 1-D uint8 CPU tensor of exactly so many bytes to receive a payload into."""


class Buffer:
    """Memory that a payload is written into before it is sent.

    Attributes:
        tensor: 1-D uint8 tensor of exactly the requested size; on the CPU unless the transport was told to
            keep payloads on a GPU.
        use: number of times it was lent to be written; a different number means different contents.
    """

    def __init__(self, tensor: torch.Tensor) -> None:
        self.tensor = tensor
        self.use = 0

    def close(self) -> None:
        """Give the memory back; receivers that still read it keep it alive on their side."""
