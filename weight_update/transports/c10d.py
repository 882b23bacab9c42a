"""What is used of torch.distributed, whose compiled half has no complete type stubs."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Iterator
from typing import Any

import torch.distributed as dist

__all__ = [
    "DistError",
    "PrefixStore",
    "ProcessGroupGloo",
    "Store",
    "TCPStore",
    "disown",
    "own",
    "process_group_nccl",
]

_DRAIN_SECONDS, _LOOK_SECONDS = 0.5, 0.005

_dist: Any = dist
DistError: type[RuntimeError] = _dist.DistError
PrefixStore: Any = _dist.PrefixStore
ProcessGroupGloo: Any = _dist.ProcessGroupGloo
TCPStore: Any = _dist.TCPStore


def process_group_nccl() -> Any:
    """The class; there is none without NCCL."""
    return _dist.ProcessGroupNCCL


class Store:
    """A ``torch.distributed.TCPStore``, server or client, that goes away when :meth:`close` says so.

    Args:
        raw: the store; nobody else keeps it.
        server: whether it is the server.

    Attributes:
        unread: queues whose last item was put and perhaps not read yet.
    """

    def __init__(self, raw: Any, *, server: bool = False) -> None:
        self._raw: Any = own(raw)
        self._server = server
        self.host: str = raw.host
        self.port: int = raw.port
        self.unread: list[str] = []
        self._spare: list[Any] = []
        self._lending = threading.Lock()

    def clone(self) -> Any:
        """Another client connection, to a plain TCPStore.

        Raises:
            DistError: the store is gone.
        """
        return self._open().clone()

    @contextlib.contextmanager
    def lend(self) -> Iterator[Any]:
        """A client connection that nobody else uses meanwhile; raises as :meth:`clone`.

        It is used again: making one looks names up, which takes seconds where a resolver is slow.
        """
        with self._lending:
            client = self._spare.pop() if self._spare else None
        if client is None:
            client = self.clone()
        yield client
        with self._lending:
            self._spare.append(client)

    def queue_push(self, name: str, item: bytes) -> None:
        """Add ``item`` to a queue; raises as :meth:`clone`."""
        self._open().queue_push(name, item)

    def close(self) -> None:
        """End it; a server when what it put last was read, else clients complain in the C++ log."""
        raw, self._raw = self._raw, None
        self._spare.clear()
        deadline = time.monotonic() + _DRAIN_SECONDS
        with contextlib.suppress(DistError):
            while raw is not None and self._server and any(map(raw.queue_len, self.unread)):
                if time.monotonic() > deadline:
                    break
                time.sleep(_LOOK_SECONDS)
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
