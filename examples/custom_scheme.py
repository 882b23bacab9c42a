"""A transport that nobody ships: chunks travel as files in a directory.

Below are the transport, the scheme, and a demonstration: a trainer and two workers in processes of their
own. Because frames check themselves, versions are counted and updates are applied by the base classes,
a transport only has to move chunks, in order.

    python examples/custom_scheme.py
"""

from __future__ import annotations

import math
import tempfile
import threading
import time
import uuid
from contextlib import suppress
from multiprocessing.queues import Queue
from pathlib import Path
from typing import Any, Literal

import torch
import torch.multiprocessing as mp
from torch import nn

from weight_update import (
    Capabilities,
    LinkClosedError,
    TransportBackend,
    TransportError,
    WeightChunk,
    WeightStrategy,
    WeightSyncScheme,
)

End = Literal["sender", "receiver"]
LOOK_SECONDS = 0.002  # a directory sends no signal: a waiting end looks so often


class Visit:
    """One connection of a worker: its directory, and how many chunks this end has sent and received."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.sent = self.received = 0


class FileTransport(TransportBackend):
    """One end of a link: a file for each chunk, numbered in each direction, deleted when read.

    It works wherever both ends see one file system, on one machine or on several. It does not notice the
    death of a process: a worker that was killed is named when ``send()`` runs out of time.

    Each connection of the worker is a directory ``0``, ``1``, ...; a new one ends the one before, so a
    worker may leave and come back.

    Args:
        directory: of this link alone.
        end: which end this is.
    """

    capabilities = Capabilities(allows_rejoin=True)

    def __init__(self, directory: Path, end: End) -> None:
        directory.mkdir(parents=True, exist_ok=True)
        self._directory, self._end = directory, end
        self._other = "receiver" if end == "sender" else "sender"
        self._visit: Visit | None = None
        self._visits = 0
        self._lock = threading.Lock()
        self._closed = threading.Event()
        self._meet(may_begin=True)

    def send_chunk(self, chunk: WeightChunk, timeout: float | None = None) -> None:
        """See :meth:`TransportBackend.send_chunk`; never waits."""
        visit = self._meet(may_begin=True)
        if visit is None or self._is_over(visit):
            raise LinkClosedError(f"nobody is at the other end of {self._directory}")
        unfinished = visit.directory / f"{self._end}.unfinished"
        try:
            unfinished.write_bytes(chunk.encode())
            unfinished.rename(visit.directory / f"{self._end}-{visit.sent}")  # nobody ever reads half a file
        except OSError as error:
            raise TransportError(f"cannot write to {visit.directory}: {error}") from None
        visit.sent += 1

    def recv_chunk(self, timeout: float | None = None, allocate: Any = None) -> WeightChunk | None:
        """See :meth:`TransportBackend.recv_chunk`."""
        deadline = math.inf if timeout is None else time.monotonic() + timeout
        while True:
            visit = self._meet()
            over = self._is_over(visit)  # before looking for a file: what was said before the end counts
            if visit is not None:
                path = visit.directory / f"{self._other}-{visit.received}"
                if path.exists():
                    break
            if over:
                self._visit = None
                raise LinkClosedError(f"nobody is at the other end of {self._directory}")
            left = deadline - time.monotonic()
            if left <= 0:
                return None
            self._closed.wait(min(left, LOOK_SECONDS))
        visit.received += 1
        frame = path.read_bytes()
        path.unlink()
        return WeightChunk.decode(frame, allocate)

    def disconnect(self) -> None:
        """See :meth:`TransportBackend.disconnect`."""
        visit = self._visit
        if visit is not None:
            self._mark(visit.directory)

    def close(self) -> None:
        """See :meth:`TransportBackend.close`; the files go with the directory, which is the user's."""
        self._closed.set()
        self.disconnect()
        if self._end == "sender":
            self._mark(self._directory)

    def _meet(self, may_begin: bool = False) -> Visit | None:
        """The present visit: the receiver begins it, the sender finds it."""
        with self._lock:
            if self._visit is None and not self._closed.is_set():
                if self._end == "sender":
                    self._find()
                elif may_begin and self._directory.exists():
                    self._begin()
            return self._visit

    def _find(self) -> None:
        place = self._directory / str(self._visits)
        if place.exists():
            self._visit, self._visits = Visit(place), self._visits + 1

    def _begin(self) -> None:
        while self._visit is None:
            place = self._directory / str(self._visits)
            with suppress(FileExistsError):  # by an earlier process of this worker
                place.mkdir()
                self._visit = Visit(place)
            self._visits += 1

    def _is_over(self, visit: Visit | None) -> bool:
        if visit is None or self._closed.is_set():
            return self._closed.is_set() or self._end == "receiver"
        marks = [place / f"{self._other}.closed" for place in (visit.directory, self._directory)]
        newer = self._directory / str(self._visits)
        return not visit.directory.exists() or any(path.exists() for path in (*marks, newer))

    def _mark(self, directory: Path) -> None:
        with suppress(FileNotFoundError):  # the user has removed it
            (directory / f"{self._end}.closed").touch()


class FileScheme(WeightSyncScheme):
    """Workers get their weights from files.

    Args:
        directory: a directory that the trainer and all workers see.
        strategy: see :class:`WeightSyncScheme`.
        sync: see :class:`WeightSyncScheme`.
        options: the other options of :class:`WeightSyncScheme`.
    """

    def __init__(
        self,
        directory: str | Path,
        strategy: str | WeightStrategy = "tensordict",
        sync: bool = True,
        **options: Any,
    ) -> None:
        super().__init__(strategy, sync, **options)
        self.directory = Path(directory) / uuid.uuid4().hex  # apart from other schemes and earlier runs

    def create_transport(self, *, worker_idx: int, end: End) -> FileTransport:
        """See :meth:`WeightSyncScheme.create_transport`."""
        return FileTransport(self.directory / f"worker-{worker_idx}", end)


# -- demonstration -------------------------------------------------------------------------------------

WORKERS, UPDATES = 2, 3


def make_model() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 64), nn.Tanh(), nn.Linear(64, 2))


def checksum(model: nn.Module) -> float:
    return sum(parameter.double().sum().item() for parameter in model.parameters())


def work(scheme: FileScheme, index: int, results: Queue) -> None:
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
    with tempfile.TemporaryDirectory() as directory, FileScheme(directory) as scheme:
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
