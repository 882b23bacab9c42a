"""What is used of torch.distributed, whose compiled half has no complete type stubs."""

from __future__ import annotations

from typing import Any

import torch.distributed as dist

__all__ = ["DistError", "PrefixStore", "ProcessGroupGloo", "Store", "TCPStore"]

_dist: Any = dist
DistError: type[RuntimeError] = _dist.DistError
PrefixStore: Any = _dist.PrefixStore
ProcessGroupGloo: Any = _dist.ProcessGroupGloo
TCPStore: Any = _dist.TCPStore
Store = Any
"""A ``torch.distributed.TCPStore``."""
