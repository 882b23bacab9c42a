"""Bytes to another process without a library: one TCP socket, or one gloo process group of two."""

from __future__ import annotations

import contextlib
import os
import socket
import threading
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from benchmarks.processes import Process

LOOPBACK = "127.0.0.1"
_PATIENCE = 60.0  # seconds to connect, or for one transfer
_ANSWER = 1  # byte


class _Tcp:
    """One end of a blocking TCP connection without delays."""

    def __init__(self, sock: socket.socket) -> None:
        sock.settimeout(None)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._sock = sock

    def send(self, payload: torch.Tensor) -> None:
        self._sock.sendall(memoryview(payload.numpy()))

    def receive(self, into: torch.Tensor) -> None:
        view = memoryview(into.numpy())
        while view:
            count = self._sock.recv_into(view)
            if count == 0:
                raise ConnectionError("the other end is gone")
            view = view[count:]

    def close(self) -> None:
        with contextlib.suppress(OSError):
            self._sock.shutdown(socket.SHUT_RDWR)
        self._sock.close()


class _Gloo:
    """One end of a process group of two."""

    def __init__(self, rank: int, address: str, port: int) -> None:
        limit = timedelta(seconds=_PATIENCE)
        store = dist.TCPStore(address, port, 2, rank == 0, limit)
        self._group = dist.ProcessGroupGloo(store, rank, 2, limit)
        self._other = 1 - rank

    def send(self, payload: torch.Tensor) -> None:
        self._group.send([payload], self._other, 0).wait()

    def receive(self, into: torch.Tensor) -> None:
        self._group.recv([into], self._other, 0).wait()

    def close(self) -> None: ...


class _Peer:
    """The receiving process: it answers each transfer with one byte.

    Args:
        nbytes: size of a transfer.
        enter: function that moves the process to its host; None if there is no such network.
    """

    def __init__(self, nbytes: int, enter: Callable[[], None] | None) -> None:
        if enter is not None:
            enter()
        torch.set_num_threads(1)
        self._payload = torch.zeros(nbytes, dtype=torch.uint8).fill_(1)

    def connect(self, kind: str, address: str, port: int) -> None:
        """Connect to the sender, and receive from now on, in a thread."""
        end: _Tcp | _Gloo
        if kind == "tcp":
            end = _Tcp(socket.create_connection((address, port), _PATIENCE))
        else:
            end = _Gloo(1, address, port)
        threading.Thread(target=self._serve, args=(end,), daemon=True).start()

    def _serve(self, end: _Tcp | _Gloo) -> None:
        answer = torch.zeros(_ANSWER, dtype=torch.uint8)
        with contextlib.suppress(OSError, RuntimeError):  # the sender is gone
            while True:
                end.receive(self._payload)
                end.send(answer)

    def marks(self) -> tuple[int, int]:
        """Return the first and the last byte."""
        return int(self._payload[0]), int(self._payload[-1])

    def close(self) -> None: ...


class Bare:
    """A sender of bytes to one process, with the methods of a trainer.

    Args:
        kind: ``"tcp"`` or ``"gloo"``.
        nbytes: size of a transfer.
        address: address of this process.
        enter: function that moves the other process to its host; None if there is no such network.
    """

    def __init__(self, kind: str, nbytes: int, address: str, enter: Callable[[], None] | None = None) -> None:
        self._peer = Process(_Peer, nbytes, enter, start="fork")  # before any thread is started
        self._payload = torch.zeros(nbytes, dtype=torch.uint8).fill_(1)
        self._answer = torch.zeros(_ANSWER, dtype=torch.uint8)
        self._updates = 0
        self._peer.answer()
        with socket.create_server((address, 0)) as listener:
            port = listener.getsockname()[1]
            if kind == "tcp":
                self._peer.send("connect", kind, address, port)
                listener.settimeout(_PATIENCE)
                self._end: Any = _Tcp(listener.accept()[0])
        if kind == "gloo":
            self._peer.send("connect", kind, address, port)
            self._end = _Gloo(0, address, port)
        self._peer.answer()

    def pids(self) -> tuple[int, ...]:
        """Return the ids of this process and of the other."""
        return (os.getpid(), self._peer.pid)

    def update(self) -> float:
        """Return the seconds of one transfer with its answer, and check that it arrived."""
        self._updates = self._updates % 255 + 1
        self._payload[0] = self._payload[-1] = self._updates
        start = time.perf_counter()
        self._end.send(self._payload)
        self._end.receive(self._answer)
        seconds = time.perf_counter() - start
        if self._peer.ask("marks") != (self._updates, self._updates):
            raise RuntimeError("the answer came before the bytes")
        return seconds

    def close(self) -> None:
        self._end.close()
        self._peer.close()
