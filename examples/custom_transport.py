"""Two transports of your own: through files in a directory, and through pipes of ``multiprocessing``.

Each transport has a scheme. The program runs a trainer and two worker processes. A transport only moves
chunks, in order. The base classes check them, count versions, apply updates and let workers join again.

Files need no listener. A directory sends no signal, so the end that waits for a file polls. Pipes have a
listener that workers connect to, also late joiners with indices that the trainer did not know. The end of a
process is noticed at once.

    python examples/custom_transport.py --transport pipes
"""

from __future__ import annotations

import argparse
import math
import os
import socket
import struct
import tempfile
import time
import uuid
from collections.abc import Callable, Sequence
from contextlib import suppress
from multiprocessing.connection import Client, Connection, Listener
from multiprocessing.queues import Queue
from pathlib import Path
from typing import Any

import torch
import torch.multiprocessing as mp
from torch import nn

from weight_update import (
    JoinListener,
    LinkClosedError,
    ReconnectingLink,
    TransportBackend,
    WeightChunk,
    WeightSyncScheme,
)

LOOK_SECONDS = 0.002
HELLO_SECONDS = 5.0


# -- through files, without a listener -----------------------------------------------------------------


# [files]
class FileConnection:
    """A directory with a numbered file for each chunk, which is deleted when it is read."""

    def __init__(self, place: Path, me: str, other: str) -> None:
        self.place, self.me, self.other = place, me, other
        self.sent = self.received = 0

    def send(self, chunk: WeightChunk, timeout: float | None) -> None:
        if is_over(self.place):
            raise LinkClosedError(f"nobody is at the other end of {self.place}")
        unfinished = self.place / f"{self.me}.unfinished"
        unfinished.write_bytes(chunk.encode())
        unfinished.rename(self.place / f"{self.me}-{self.sent}")  # the reader never sees half a file
        self.sent += 1

    def recv(self, timeout: float | None, allocate: Any) -> WeightChunk | None:
        path = self.place / f"{self.other}-{self.received}"
        if not appears(path, timeout, lambda: is_over(self.place)):
            return None
        self.received += 1
        frame = path.read_bytes()
        path.unlink()
        return WeightChunk.decode(frame, allocate)

    def close(self) -> None:
        mark_closed(self.place)


class FileTransport(ReconnectingLink[FileConnection]):
    """One end of a link through a directory, in which each connection of the worker makes one: 0, 1, ..."""

    def __init__(self, directory: Path, end: str) -> None:
        super().__init__(joins=end == "receiver")
        directory.mkdir(parents=True, exist_ok=True)
        self.directory, self.end, self.number = directory, end, 0

    def connect(self, timeout: float | None) -> FileConnection:
        while (place := self.directory / str(self.number)).exists():
            self.number += 1
        place.mkdir()
        return FileConnection(place, "receiver", "sender")

    def accept(self, timeout: float | None) -> FileConnection | None:
        place = self.directory / str(self.number)
        if not appears(place, timeout, lambda: self.closed):
            return None
        self.number += 1
        return FileConnection(place, "sender", "receiver")

    def close(self) -> None:
        super().close()
        if self.end == "sender":
            mark_closed(self.directory)  # no worker waits any more


# [end of files]
def appears(path: Path, timeout: float | None, ended: Callable[[], bool]) -> bool:
    """Wait until ``path`` exists. A directory sends no signal, so this polls.

    Raises:
        LinkClosedError: ``ended()`` is true, and the path does not exist.
    """
    deadline = math.inf if timeout is None else time.monotonic() + timeout
    while True:
        over = ended()  # first: what was sent before the end still counts
        if path.exists():
            return True
        if over:
            raise LinkClosedError(f"nobody is at the other end of {path.parent}")
        if time.monotonic() >= deadline:
            return False
        time.sleep(LOOK_SECONDS)


def mark_closed(directory: Path) -> None:
    with suppress(FileNotFoundError):  # the user has removed it
        (directory / "closed").touch()


def is_over(place: Path) -> bool:
    """Return whether an end of a connection was closed, or the worker has made the next connection."""
    successor = place.with_name(str(int(place.name) + 1))
    ends = (successor, place / "closed", place.parent / "closed")
    return not place.exists() or any(end.exists() for end in ends)


class FileScheme(WeightSyncScheme):
    """A scheme whose workers get their weights from files in a directory that all processes see."""

    def __init__(self, directory: str | Path, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.directory = Path(directory) / uuid.uuid4().hex  # apart from other schemes and earlier runs

    def create_transport(self, *, worker_idx: int, end: str) -> FileTransport:
        return FileTransport(self.directory / f"worker-{worker_idx}", end)


# -- through pipes, with a listener --------------------------------------------------------------------


# [pipes]
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
    """A listener at an address in a directory that only this user may enter."""

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


# [end of pipes]


class PipeScheme(WeightSyncScheme):
    """A scheme whose workers, on this machine, get their weights through pipes."""

    address: str

    def open_sender(self, workers: Sequence[int], ctx: Any) -> dict[int, TransportBackend]:
        links = super().open_sender(workers, ctx)
        listener = PipeListener(self.token, links, self.late_joiner_links())
        self.listener, self.address = listener, listener.address  # the address travels with the scheme
        return links

    def create_transport(self, *, worker_idx: int, end: str) -> PipeTransport:
        return PipeTransport("" if end == "sender" else self.address)


# -- demonstration -------------------------------------------------------------------------------------

WORKERS, UPDATES = 2, 3


def make_model() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 64), nn.Tanh(), nn.Linear(64, 2))


def checksum(model: nn.Module) -> float:
    return sum(parameter.double().sum().item() for parameter in model.parameters())


def work(scheme: WeightSyncScheme, index: int, results: Queue) -> None:
    torch.set_num_threads(1)
    model = make_model()
    with scheme:
        scheme.init_on_receiver(model=model, worker_idx=index)
        scheme.connect()
        while scheme.version < UPDATES:
            scheme.receive(timeout=10.0)
        results.put((index, scheme.version, checksum(model)))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--transport", choices=["files", "pipes"], default="files")
    transport = parser.parse_args().transport
    context, model = mp.get_context("spawn"), make_model()
    results = context.Queue()
    with (
        tempfile.TemporaryDirectory() as directory,
        FileScheme(directory) if transport == "files" else PipeScheme() as scheme,
    ):
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
