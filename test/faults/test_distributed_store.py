"""Whatever strangers write into the store, workers can join and connections keep working.

``make soak ARGS="--scheme distributed"`` has strangers that write all kinds of things.
"""

from __future__ import annotations

import copy
import os
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path

import psutil
import pytest
import torch
from background import one_thread, repeating
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
from torch.distributed import DistError, TCPStore

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


def stranger_of(training: Training) -> TCPStore:
    """Return the store client of a stranger that speaks the protocol."""
    return TCPStore("127.0.0.1", training.scheme.port, is_master=False, wait_for_workers=False)


def key_of(stranger: TCPStore) -> str:
    """Return the key of the announcement, as any process can find it."""
    names = [key.removeprefix("/") for key in stranger.list_keys()]
    return next(name for name in names if name.startswith("weight_update/"))


WAYS: dict[str, Callable[[TCPStore, str], object]] = {
    "set": lambda stranger, key: stranger.set(key, "x"),
    "delete": lambda stranger, key: stranger.delete_key(key),
}


@pytest.mark.parametrize("way", WAYS)
def test_the_announcement_is_spoiled_without_pause(training: Training, way: str) -> None:
    before = training.connections()
    stranger, done = stranger_of(training), [0]
    key = key_of(stranger)

    def spoil_once() -> None:
        WAYS[way](stranger, key)
        done[0] += 1

    with repeating(spoil_once):
        assert eventually(lambda: done[0] > 10)
        training.goes_on()
    assert training.connections() == before, "a connection broke"


def test_the_store_is_flooded(training: Training) -> None:
    before, stop = training.connections(), threading.Event()

    def flood(number: int) -> None:
        client, names = stranger_of(training), iter(range(1 << 30))
        while not stop.is_set():
            name = f"flood {number} {next(names) % 50}"
            try:
                client.set(name, bytes(100_000))
                client.queue_push(f"queue {name}", bytes(1000))
            except DistError:  # it was dropped, as it deserves
                client = stranger_of(training)

    flooding = [threading.Thread(target=flood, args=(number,)) for number in range(2)]
    for thread in flooding:
        thread.start()
    try:
        training.goes_on()
    finally:
        stop.set()
        for thread in flooding:
            thread.join()
    assert training.connections() == before


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


def test_the_end_of_the_senders_own_connection_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    """Without a traceback of a thread; the announcement that was written last stays in the store."""
    scheme = DistributedWeightSyncScheme()
    scheme.init_on_sender(weights={"weight": torch.zeros(2)}, num_workers=0)
    with scheme:
        scheme.connect()
        for one in psutil.Process().net_connections("tcp"):
            if one.raddr and one.raddr.port == scheme.port:
                with socket.socket(fileno=os.dup(one.fd)) as sock:
                    sock.shutdown(socket.SHUT_RDWR)
        eventually(lambda: "does not write its announcement again" in caplog.text)
        receiver = copy.copy(scheme)
        receiver.init_on_receiver(model={"weight": torch.zeros(2)}, worker_idx=0)
        with receiver:
            receiver.connect(timeout=10.0)


def test_a_store_that_takes_no_announcement_leaves_nothing_open(monkeypatch: pytest.MonkeyPatch) -> None:
    def announce(*_: object) -> None:
        raise DistError("the store is full")

    monkeypatch.setattr(SenderStore, "announce", announce)
    before = open_sockets()
    with pytest.raises(DistError, match="is full") as caught:
        DistributedWeightSyncScheme().init_on_sender(model=torch.nn.Linear(2, 2), num_workers=1)
    assert open_sockets() == before, caught  # whose frames would keep what nobody closed


def open_sockets() -> set[str]:
    names = (os.readlink(entry) for entry in Path("/proc/self/fd").iterdir() if entry.is_symlink())
    return {name for name in names if name.startswith("socket:")}
