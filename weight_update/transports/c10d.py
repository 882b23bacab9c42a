"""What is used of torch.distributed, whose compiled half has no complete type stubs."""

from __future__ import annotations

from typing import Any

import torch.distributed as dist

__all__ = ["DistError", "PrefixStore", "ProcessGroupGloo", "Store", "TCPStore", "disown", "own"]

_dist: Any = dist
DistError: type[RuntimeError] = _dist.DistError
PrefixStore: Any = _dist.PrefixStore
ProcessGroupGloo: Any = _dist.ProcessGroupGloo
TCPStore: Any = _dist.TCPStore


class Store:
    """A ``torch.distributed.TCPStore``, server or client, that goes away when :meth:`close` says so.

    Args:
        raw: the store; nobody else keeps it.
    """

    def __init__(self, raw: Any) -> None:
        self._raw: Any = own(raw)
        self.host: str = raw.host
        self.port: int = raw.port

    def clone(self) -> Any:
        """Another client connection, to a plain TCPStore.

        Raises:
            DistError: the store is gone.
        """
        return self._open().clone()

    def queue_push(self, name: str, item: bytes) -> None:
        """Add ``item`` to a queue; raises as :meth:`clone`."""
        self._open().queue_push(name, item)

    def close(self) -> None:
        """End it; a server's clients notice."""
        raw, self._raw = self._raw, None
        disown(raw)

    def _open(self) -> Any:
        raw = self._raw
        if raw is None:
            raise DistError("this store was closed")
        return raw


_owned: list[Any] = []


def own(thing: Any) -> Any:
    """Keep ``thing`` until :meth:`disown`; returns it.

    Objects that have threads must not be destroyed in a forked child, where those threads do not exist. A
    child inherits this list, and never empties it.
    """
    _owned.append(thing)
    return thing


def disown(thing: Any) -> None:
    """Let ``thing`` go, in the process that called :meth:`own`; once is enough."""
    _owned[:] = [one for one in _owned if one is not thing]
