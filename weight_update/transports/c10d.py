"""What is used of torch.distributed, whose compiled half has no complete type stubs."""

from __future__ import annotations

import atexit
import contextlib
import os
import socket
import stat
import threading
import time
import weakref
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
    "keep_alive",
    "leave_in_order",
    "own",
    "process_group_nccl",
]

_DRAIN_SECONDS, _LOOK_SECONDS = 0.5, 0.005
_AWAITED = 63
"""Queues of readers that were killed are never read: of so many, the oldest are not waited for."""
_VANISHED_SECONDS = 180
"""A machine that is silent for so long is gone; a link may be down for less."""
_PROBES = 9
_FAREWELL_SECONDS = 2.0

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
    """

    def __init__(self, raw: Any, *, server: bool = False) -> None:
        self._raw: Any = own(raw)
        self._server = server
        if not server:
            _keep_clients_alive(raw.port)
        self.host: str = raw.host
        self.port: int = raw.port
        self._unread: list[str] = []
        self._spare: list[Any] = []
        self._lending = threading.Lock()

    def clone(self) -> Any:
        """Another client connection, to a plain TCPStore.

        Raises:
            DistError: the store is gone.
        """
        clone = self._open().clone()
        _keep_clients_alive(self.port)
        return clone

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

    def reach(self) -> None:
        """Return when the server has what was put; raises as :meth:`clone`."""
        self._open().queue_len("")

    def await_reader(self, name: str) -> None:
        """A server's :meth:`close` waits a little until the queue, to which nothing more is put, was read."""
        raw = self._raw
        if self._server and raw is not None:
            unread = [one for one in self._unread if one != name and raw.queue_len(one)]
            self._unread = [*unread[-_AWAITED:], name]

    def close(self) -> None:
        """End it; a server when what it put last was read, else clients complain in the C++ log."""
        raw, self._raw = self._raw, None
        self._spare.clear()
        deadline = time.monotonic() + _DRAIN_SECONDS
        with contextlib.suppress(DistError):
            while raw is not None and self._server and any(map(raw.queue_len, self._unread)):
                if time.monotonic() > deadline:
                    break
                time.sleep(_LOOK_SECONDS)
        disown(raw)

    def _open(self) -> Any:
        raw = self._raw
        if raw is None:
            raise DistError("this store was closed")
        return raw


def keep_alive(sock: socket.socket) -> None:
    """Have the kernel end this connection, or those to be accepted here, when the other machine vanishes."""
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, max(_VANISHED_SECONDS // _PROBES, 1))
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, max(_VANISHED_SECONDS // _PROBES, 1))
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, 1000 * _VANISHED_SECONDS)


def _keep_clients_alive(port: int) -> None:
    """:meth:`keep_alive` for what a TCPStore connected to ``port``: it does not show its sockets."""
    for fd in map(int, os.listdir("/proc/self/fd")):
        with contextlib.suppress(OSError):  # it is closed by now, or not connected
            if not stat.S_ISSOCK(os.fstat(fd).st_mode):
                continue
            with socket.socket(fileno=os.dup(fd)) as sock:
                if sock.family in (socket.AF_INET, socket.AF_INET6) and sock.getpeername()[1] == port:
                    keep_alive(sock)


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


_threads: weakref.WeakSet[threading.Thread] = weakref.WeakSet()


def leave_in_order(thread: threading.Thread) -> None:
    """Have the interpreter's end wait a little for ``thread``, which may come back from C++ just then.

    The process would abort.
    """
    _threads.add(thread)


@atexit.register
def _await_threads() -> None:
    deadline = time.monotonic() + _FAREWELL_SECONDS
    for thread in [one for one in _threads if one.is_alive()]:
        thread.join(max(deadline - time.monotonic(), 0.0))
