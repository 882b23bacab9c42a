"""A transport whose workers connect to a listener: pipes of ``multiprocessing.connection``.

Below are the transport, its listener and its scheme, and a trainer with two workers in processes of their
own. Unlike files (``custom_transport.py``), pipes signal: nobody looks again and again, and a process that
dies is noticed at once. Workers may join late, with indices that the trainer did not know.

    python examples/custom_listener.py
"""

from __future__ import annotations

import os
import socket
import struct
from collections.abc import Sequence
from contextlib import suppress
from multiprocessing.connection import Client, Connection, Listener
from multiprocessing.queues import Queue
from typing import Any

import torch
import torch.multiprocessing as mp
from torch import nn

from weight_update import (
    JoinListener,
    ReconnectingLink,
    TransportBackend,
    WeightChunk,
    WeightSyncScheme,
)

HELLO_SECONDS = 5.0


# [transport]
class PipeConnection:
    """A pipe, and the socket under it: it can end a wait that is too long, or wake a thread that waits."""

    def __init__(self, pipe: Connection) -> None:
        self.pipe = pipe
        self.limit(socket.SO_RCVTIMEO, HELLO_SECONDS)  # between the pieces of one chunk

    def socket(self) -> socket.socket:
        return socket.socket(fileno=os.dup(self.pipe.fileno()))

    def limit(self, option: int, seconds: float) -> None:
        with self.socket() as sock:
            sock.setsockopt(
                socket.SOL_SOCKET, option, struct.pack("ll", int(seconds), int(seconds % 1 * 1e6))
            )

    def send(self, chunk: WeightChunk, timeout: float | None) -> None:
        self.limit(socket.SO_SNDTIMEO, 0.0 if timeout is None else max(timeout, 1e-3))  # 0 is no limit
        self.pipe.send_bytes(chunk.encode())

    def recv(self, timeout: float | None, allocate: Any) -> WeightChunk | None:
        if not self.pipe.poll(timeout):
            return None
        return WeightChunk.decode(self.pipe.recv_bytes(), allocate)

    def close(self) -> None:
        with suppress(OSError), self.socket() as sock:  # the descriptor goes with the last reference
            sock.shutdown(socket.SHUT_RDWR)


class PipeTransport(ReconnectingLink[PipeConnection]):
    """One end of a link through a pipe.

    Args:
        address: address of the listener; none makes a sender's end.
    """

    def __init__(self, address: str = "") -> None:
        super().__init__(joins=address != "")
        self.address = address

    def connect(self, timeout: float | None) -> PipeConnection:
        return PipeConnection(Client(self.address))


class PipeListener(JoinListener[PipeTransport]):
    """Accepts workers at an address in a directory that only this user may enter."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.listener = Listener(family="AF_UNIX", backlog=128)
        self.address = self.listener.address

    def accept(self) -> tuple[PipeConnection, WeightChunk | None]:
        connection = PipeConnection(self.listener.accept())
        return connection, connection.recv(HELLO_SECONDS, None)

    def wake(self) -> None:
        with suppress(OSError):  # it was closed before
            Client(self.address).close()
        self.listener.close()


# [end of transport]
# [scheme]
class PipeScheme(WeightSyncScheme):
    """Workers on this machine get their weights through pipes."""

    address: str

    def open_sender(self, workers: Sequence[int], ctx: Any) -> dict[int, TransportBackend]:
        links = super().open_sender(workers, ctx)
        listener = PipeListener(self.token, links, self.newcomers())
        self.listener, self.address = listener, listener.address  # the address travels with the scheme
        return links

    def create_transport(self, *, worker_idx: int, end: str) -> PipeTransport:
        return PipeTransport("" if end == "sender" else self.address)


# [end of scheme]
# -- demonstration -------------------------------------------------------------------------------------

WORKERS, UPDATES = 2, 3


def make_model() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 64), nn.Tanh(), nn.Linear(64, 2))


def checksum(model: nn.Module) -> float:
    return sum(parameter.double().sum().item() for parameter in model.parameters())


def work(scheme: PipeScheme, index: int, results: Queue) -> None:
    torch.set_num_threads(1)
    model = make_model()
    with scheme:
        scheme.init_on_receiver(model=model, worker_idx=index)
        scheme.connect()
        while scheme.version < UPDATES:
            scheme.receive(timeout=10.0)
        results.put((index, scheme.version, checksum(model)))


def main() -> None:
    context, model = mp.get_context("spawn"), make_model()
    results = context.Queue()
    with PipeScheme() as scheme:
        scheme.init_on_sender(model=model, num_workers=WORKERS)
        workers = [
            context.Process(target=work, args=(scheme, idx, results), daemon=True) for idx in range(WORKERS)
        ]
        for worker in workers:
            worker.start()
        scheme.connect()
        for _ in range(UPDATES):
            with torch.no_grad():
                for parameter in model.parameters():
                    parameter.add_(torch.randn_like(parameter))
            print(scheme.send())
        for index, version, found in sorted(results.get(timeout=30.0) for _ in workers):
            same = found == checksum(model)
            print(f"worker {index}: version {version}, {'the' if same else 'NOT the'} trainer's weights")
        for worker in workers:
            worker.join(30.0)


if __name__ == "__main__":
    main()
