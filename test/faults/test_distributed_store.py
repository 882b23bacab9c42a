"""Whatever strangers send to the store, workers can join and connections keep working.

As a program it is a soak test: ``python test/faults/test_distributed_store.py 600`` runs for ten minutes.
"""

from __future__ import annotations

import contextlib
import os
import random
import socket
import struct
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path

from background import one_thread

if __name__ == "__main__":
    sys.path[:0] = [
        str(Path(__file__).parent),
        str(Path(__file__).parents[1]),
        str(Path(__file__).parents[2]),
    ]

import psutil
import pytest
import torch
from faults_tools import (
    Processes,
    Remote,
    Stripes,
    assert_whole,
    compute,
    end_compute,
    eventually,
    fill,
    join,
    leave,
)
from marks import quick_for

from weight_update import DistributedWeightSyncScheme
from weight_update.transports.distributed.rendezvous import SenderStore

SHAPE = (8, 4096)  # more than what travels with a signal


def make_here() -> Stripes:
    return Stripes(*SHAPE)


def make_elsewhere() -> Stripes:
    os.environ["WEIGHT_UPDATE_HOST"] = f"host of {os.getpid()}"
    return Stripes(*SHAPE)


class Training:
    """A trainer with a worker on another host and one on its own, into which updates flow."""

    def __init__(self, procs: Processes) -> None:
        self.procs, self.model = procs, make_here()
        self.scheme = procs.scheme(DistributedWeightSyncScheme, timeout=10.0)
        self.scheme.init_on_sender(model=self.model, num_workers=2)
        self.workers = [self.start(0, make_elsewhere), self.start(1, make_here)]
        self.scheme.connect(timeout=20.0)
        for worker in self.workers:
            worker.result()
            worker.call(compute)

    def start(self, idx: int, make_model: Callable[[], Stripes]) -> Remote:
        worker = self.procs.start(self.scheme, idx, make_model)
        worker.begin(join)
        return worker

    def send(self) -> None:
        """Send an update, which all workers apply."""
        self.scheme.send(fill(self.model, (self.scheme.version or 0) + 1))

    def connections(self) -> list[object]:
        """Return the connections to the first workers; they stay the same as long as none breaks."""
        return [self.scheme._sender.table[idx].link._connection for idx in range(2)]

    def dismiss(self, worker: Remote) -> None:
        """Make a worker leave, and wait until the trainer has noticed."""
        worker.call(leave)
        assert eventually(lambda: worker.idx not in self.scheme.worker_versions)
        self.procs.forget(worker)

    def goes_on(self) -> None:
        """Check that updates arrive, and that workers join on this host and on others."""
        self.send()
        late = [self.start(idx, make) for idx, make in ((2, make_here), (3, make_elsewhere))]
        for worker in late:
            worker.result()
        self.send()
        for worker in late:
            self.dismiss(worker)
        self.send()
        for worker in self.workers:
            assert_whole(worker.call(end_compute))
            worker.call(compute)


@pytest.fixture(scope="module")
def training() -> Iterator[Training]:
    with one_thread(), closing(Processes()) as procs:
        yield Training(procs)


class Vandal:
    """A stranger at the port of the store, which asks, writes, and sends noise without pause."""

    def __init__(self, training: Training, seed: int) -> None:
        self._random = random.Random(seed)
        self._port, self._stop = training.scheme.port, threading.Event()
        self._open: list[socket.socket] = []
        self.errors: list[BaseException] = []
        self.done = 0
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def end(self) -> None:
        self._stop.set()
        self._thread.join()
        assert self.errors == []

    def _run(self) -> None:
        try:
            with contextlib.ExitStack() as stack:
                stack.callback(lambda: [sock.close() for sock in self._open])
                while not self._stop.is_set():
                    self._once()
                    self.done += 1
                    self._stop.wait(self._random.random() * 0.01)
        except BaseException as error:  # noqa: BLE001 - the test looks at it
            self.errors.append(error)

    def _once(self) -> None:
        sock = socket.create_connection(("127.0.0.1", self._port))
        sock.setblocking(False)
        self._open.append(sock)
        with contextlib.suppress(OSError):  # it was dropped, as it deserves
            sock.sendall(self._words())
        if len(self._open) > 20:
            self._open.pop(self._random.randrange(20)).close()

    def _words(self) -> bytes:
        """Return what a client of a TCPStore says, up to some point."""
        pick, noise = self._random.choice, self._random.randbytes(self._random.randrange(200))
        key, much = b"/weight_update/" + noise[:64].ljust(64, b"0"), bytes(100_000)
        command = pick([0, 1, 2, 3, 3, 3, 4, 5, 7, 8, 13, 14, 255]).to_bytes(1, "little")
        said = command + struct.pack("<Q", len(key)) + key + pick([b"", noise, much])
        hello = struct.pack("<BIBI", 0, 0x3C85F7CE, 13, 7)
        return pick([b"", noise, hello[:5], hello, hello + noise, hello + said, hello + said * 50])


def fuzz_store(training: Training, seconds: float) -> tuple[int, int]:
    """Let a stranger go on for some seconds while updates flow and workers come and go.

    Returns:
        number of things that the stranger did, and of workers that came and went.
    """
    seed = random.randrange(1 << 32)
    print(f"seed {seed}")
    before, descriptors = training.connections(), len(os.listdir("/proc/self/fd"))
    vandal = Vandal(training, seed)
    deadline = time.monotonic() + seconds
    idx = 10
    try:
        while time.monotonic() < deadline:
            training.send()
            idx += 1
            late = training.start(idx, random.Random(idx).choice([make_here, make_elsewhere]))
            while not late.answered():
                training.send()
            late.result()
            training.dismiss(late)
    finally:
        vandal.end()
    assert training.connections() == before, "a connection broke"
    training.goes_on()
    assert eventually(lambda: len(os.listdir("/proc/self/fd")) < descriptors + 20), "descriptors leak"
    return vandal.done, idx - 10


@pytest.mark.parametrize("seconds", quick_for([4.0, 120.0], 4.0))
@pytest.mark.timeout(300)
def test_whatever_strangers_send(training: Training, seconds: float) -> None:
    done, workers = fuzz_store(training, seconds)
    assert done > 50
    assert workers >= 1


class Mute(DistributedWeightSyncScheme):
    """A scheme that cannot announce itself."""

    def announce(self, where: object) -> None:
        raise RuntimeError("nowhere to announce it")


def listening() -> set[tuple[str, int]]:
    """Return the addresses on which this process listens."""
    found = psutil.Process().net_connections("tcp")
    return {tuple(one.laddr) for one in found if one.status == psutil.CONN_LISTEN}


def test_a_sender_that_cannot_be_announced_stops_listening() -> None:
    before = listening()
    with pytest.raises(RuntimeError, match="nowhere"):
        Mute().init_on_sender(model=torch.nn.Linear(2, 2), num_workers=1)
    assert listening() == before


def test_a_store_that_cannot_answer_leaves_nothing_open(monkeypatch: pytest.MonkeyPatch) -> None:
    def announce(*_: object) -> None:
        raise RuntimeError("no thread")

    monkeypatch.setattr(SenderStore, "announce", announce)
    before = open_sockets()
    with pytest.raises(RuntimeError, match="no thread") as caught:
        DistributedWeightSyncScheme().init_on_sender(model=torch.nn.Linear(2, 2), num_workers=1)
    assert open_sockets() == before, caught  # whose frames would keep what nobody closed


def open_sockets() -> set[str]:
    names = (os.readlink(entry) for entry in Path("/proc/self/fd").iterdir() if entry.is_symlink())
    return {name for name in names if name.startswith("socket:")}


if __name__ == "__main__":
    torch.set_num_threads(1)
    with closing(Processes()) as all_processes:
        did, came = fuzz_store(Training(all_processes), float(sys.argv[1]))
    print(f"{did} things were sent, {came} workers came and went, no connection broke")
