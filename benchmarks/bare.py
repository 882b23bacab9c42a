"""Bytes to other processes without a library: by sockets, gloo, or Ray's object store."""

from __future__ import annotations

import contextlib
import select
import socket
import threading
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from benchmarks.processes import Place, Process, close_all
from benchmarks.workers import Case, Model, fill

TCP, SMALL_BUFFER, GLOO = BARE = ("tcp", "tcp-small-buffer", "gloo")
"""Bytes without a library, to one process; the second with the send buffer that this library sets."""
_PATIENCE = 60.0  # seconds to connect, or for one transfer
_ANSWER = 1  # byte


class _Tcp:
    """One end of a TCP connection without delays.

    It does not block, but polls, which takes less time over loopback.
    """

    def __init__(self, sock: socket.socket, kind: str) -> None:
        sock.setblocking(False)
        if kind == SMALL_BUFFER:
            from weight_update.transports.distributed.relay.payload_stream import SEND_BUFFER

            sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, SEND_BUFFER)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._sock = sock

    def send(self, payload: torch.Tensor) -> None:
        view = memoryview(payload.numpy())
        while view:
            view = view[self._ready(select.POLLOUT, self._sock.send, view) :]

    def receive(self, into: torch.Tensor) -> None:
        view = memoryview(into.numpy())
        while view:
            count = self._ready(select.POLLIN, self._sock.recv_into, view)
            if count == 0:
                raise ConnectionError("the other end is gone")
            view = view[count:]

    def _ready(self, event: int, action: Callable[[memoryview], int], view: memoryview) -> int:
        """Return the result of ``action`` as soon as the socket is ready for it."""
        poller = select.poll()
        poller.register(self._sock, event)
        while True:
            try:
                return action(view)
            except BlockingIOError:
                poller.poll()

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
    """The receiving process of transfers of ``nbytes``: it answers each with one byte."""

    def __init__(self, nbytes: int) -> None:
        torch.set_num_threads(1)
        self._payload = torch.zeros(nbytes, dtype=torch.uint8).fill_(1)

    def connect(self, kind: str, address: str, port: int) -> None:
        """Connect to the sender, and receive from now on, in a thread."""
        end: _Tcp | _Gloo
        if kind == GLOO:
            end = _Gloo(1, address, port)
        else:
            end = _Tcp(socket.create_connection((address, port), _PATIENCE), kind)
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
        kind: one of :data:`BARE`.
        case: size of a transfer, and the hosts.
    """

    def __init__(self, kind: str, case: Case) -> None:
        nbytes, address = round(case.megabytes * 1e6), case.address
        # before any thread is started
        self._peer = Process(_Peer, nbytes, start="fork", place=Place(enter=case.enter))
        self._payload = torch.zeros(nbytes, dtype=torch.uint8).fill_(1)
        self._answer = torch.zeros(_ANSWER, dtype=torch.uint8)
        self._updates = 0
        self._peer.answer()
        with socket.create_server((address, 0)) as listener:
            port = listener.getsockname()[1]
            if kind != GLOO:
                self._peer.send("connect", kind, address, port)
                listener.settimeout(_PATIENCE)
                self._end: Any = _Tcp(listener.accept()[0], kind)
        if kind == GLOO:
            self._peer.send("connect", kind, address, port)
            self._end = _Gloo(0, address, port)
        self._peer.answer()

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


class _RayPeer:
    """An actor that copies bytes from Ray's object store into its memory, in two places in turn."""

    def __init__(self, nbytes: int) -> None:
        self._memory = [torch.empty(nbytes, dtype=torch.uint8) for _ in range(2)]

    def take(self, refs: list[Any]) -> None:
        """Get the object and copy it; Ray would fetch an argument that is not in a list before the call."""
        import ray

        self._memory.reverse()
        np.copyto(self._memory[0].numpy(), ray.get(refs[0]))

    def marks(self) -> tuple[int, int]:
        """Return the first and the last byte."""
        return int(self._memory[0][0]), int(self._memory[0][-1])


class BareRay:
    """A sender of bytes through Ray's object store to actors, with the methods of a trainer.

    As connecting a scheme does, making it sends once.
    """

    def __init__(self, case: Case) -> None:
        import ray

        nbytes = round(case.megabytes * 1e6)
        ray.init(address=case.ray, log_to_driver=False, logging_level="error")
        self._ray = ray
        make = ray.remote(_RayPeer).options(num_cpus=0)
        self._peers = [make.remote(nbytes) for _ in range(case.workers)]
        self._payload = torch.zeros(nbytes, dtype=torch.uint8).fill_(1)
        self._updates = 0
        self.update()

    def update(self) -> float:
        """Return the seconds of one put with all gets and copies, and check that the bytes arrived."""
        self._updates = self._updates % 255 + 1
        self._payload[0] = self._payload[-1] = self._updates
        start = time.perf_counter()
        ref = self._ray.put(self._payload.numpy())
        self._ray.get([peer.take.remote([ref]) for peer in self._peers], timeout=_PATIENCE)
        seconds = time.perf_counter() - start
        marks = self._ray.get([peer.marks.remote() for peer in self._peers], timeout=_PATIENCE)
        if any(mark != (self._updates, self._updates) for mark in marks):
            raise RuntimeError("the actors have other bytes")
        return seconds

    def close(self) -> None:
        self._ray.shutdown()


class Copy:
    """One copy by all threads into existing memory, the least that an update can cost."""

    def __init__(self, case: Case) -> None:
        self._source = list(fill(Model(*case.model)).values(True, True))
        self._target = [torch.zeros_like(value).fill_(1.0) for value in self._source]

    def update(self) -> float:
        """Return the seconds of the copy."""
        start = time.perf_counter()
        torch._foreach_copy_(self._target, self._source)
        return time.perf_counter() - start

    def close(self) -> None: ...


class _Echo:
    """A process that answers each byte with a byte, as soon as it is woken."""

    def __init__(self, sock: socket.socket) -> None:
        threading.Thread(target=self._serve, args=(sock,), daemon=True).start()

    @staticmethod
    def _serve(sock: socket.socket) -> None:
        while sock.recv(1):
            sock.send(bytes(1))

    def close(self) -> None: ...


class Floor(Copy):
    """The least that an update over shared memory can cost, with the methods of a trainer.

    It is one plain copy, and then one wake-up each way: one byte to each of the processes over a Unix socket,
    and one byte back.
    """

    def __init__(self, case: Case) -> None:
        pairs = [socket.socketpair() for _ in range(case.workers)]
        self._peers = [Process(_Echo, theirs, start="fork") for _, theirs in pairs]
        self._socks = {ours.fileno(): ours for ours, _ in pairs}
        self._poller = select.poll()
        for (ours, theirs), peer in zip(pairs, self._peers, strict=True):
            self._poller.register(ours, select.POLLIN)
            theirs.close()
            peer.answer()
        super().__init__(case)  # after the processes were forked: it starts threads

    def update(self) -> float:
        """Return the seconds of the copy and all wake-ups."""
        start = time.perf_counter()
        torch._foreach_copy_(self._target, self._source)
        for sock in self._socks.values():
            sock.send(bytes(1))
        waiting = len(self._socks)
        while waiting:
            for descriptor, _ in self._poller.poll(_PATIENCE * 1e3):
                waiting -= len(self._socks[descriptor].recv(1))
        return time.perf_counter() - start

    def close(self) -> None:
        close_all(self._peers)
