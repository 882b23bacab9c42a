"""TCPStore and other names of torch.distributed, whose compiled half has no complete type stubs."""

from __future__ import annotations

from typing import Any

import torch.distributed as dist

_dist: Any = dist
HashStore: Any = _dist.HashStore
PrefixStore: Any = _dist.PrefixStore
StoreBase: Any = _dist.Store
ProcessGroupGloo: Any = _dist.ProcessGroupGloo
TCPStore: Any = _dist.TCPStore

_owned: list[Any] = []


def own(thing: Any) -> Any:
    """Keep ``thing`` alive until :func:`disown`; return it.

    Objects with threads must not be destroyed in a forked child, where those threads do not exist. A child
    inherits this list, and never empties it.
    """
    _owned.append(thing)
    return thing


def disown(thing: Any) -> None:
    """Release ``thing``, in the process that called :func:`own`; calling it twice is fine."""
    _owned[:] = [one for one in _owned if one is not thing]
