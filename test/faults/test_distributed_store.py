"""Whatever strangers write into the store, workers can join and connections keep working.

As a program it is a soak test: ``python test/faults/test_distributed_store.py 600`` runs for ten minutes.
"""

from __future__ import annotations

import contextlib
import copy
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

from background import one_thread, repeating

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
    deadline = time.monotonic() + 10.0
    while time.monotonic() < deadline:
        for key in stranger.list_keys():
            name = key.removeprefix("/")
            if name.startswith("weight_update/"):
                return str(name)
    raise AssertionError("there is no announcement")


WAYS = ["set", "set much", "append", "add", "push", "pop", "swap", "delete"]


def spoil(stranger: TCPStore, key: str, way: str) -> None:
    """Change a key in one way; the store may refuse it."""
    with contextlib.suppress(DistError, ValueError):
        if way == "set":
            stranger.set(key, "x")
        elif way == "set much":
            stranger.set(key, "x" * 4_000_000)
        elif way == "append":
            stranger.append(key, "x")
        elif way == "add":
            stranger.add(key, 1)
        elif way == "push":
            stranger.queue_push(key, b"x")
        elif way == "pop":
            stranger.queue_pop(key, False)
        elif way == "swap":
            stranger.compare_set(key, "x", "y")
        else:
            stranger.delete_key(key)


@pytest.mark.parametrize("way", quick_for(WAYS, "set", "delete"))
def test_the_announcement_is_spoiled_without_pause(training: Training, way: str) -> None:
    before = training.connections()
    stranger, done = stranger_of(training), [0]
    key = key_of(stranger)

    def spoil_once() -> None:
        spoil(stranger, key, way)
        done[0] += 1

    with repeating(spoil_once):
        assert eventually(lambda: done[0] > 10)
        training.goes_on()
    assert training.connections() == before, "a connection broke"


@pytest.mark.slow  # the test below has keys of these kinds, too
@pytest.mark.parametrize("way", ["set", "add", "append", "push"])
def test_other_keys(training: Training, way: str) -> None:
    before = training.connections()
    stranger = stranger_of(training)
    for key in ("door", "", "x" * 8000, "weight_update/", "weight_update/" + "0" * 64):
        spoil(stranger, key, way)
    training.goes_on()
    assert training.connections() == before


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


class Vandal:
    """A stranger that writes into every key of the store, and repeats what it finds there."""

    def __init__(self, training: Training, seed: int) -> None:
        self._random = random.Random(seed)
        self._training, self._stop = training, threading.Event()
        self._client = stranger_of(training)
        self._key = key_of(self._client)
        self._heard: list[bytes] = [b"x", self._client.get(self._key)]
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
            while not self._stop.is_set():
                self._once()
                self.done += 1
                self._stop.wait(self._random.random() * 0.01)
        except BaseException as error:  # noqa: BLE001 - the test looks at it
            self.errors.append(error)

    def _once(self) -> None:
        pick = self._random.choice
        value, key = self._value(), self._key
        name = pick([key] * 8 + ["", "door/", key[:40], "x" * 8000, "weight_update/", f"{key}/0"])
        way = pick(
            ["set", "set", "add", "append", "push", "pop", "delete", "delete", "multi_set", "swap", "raw"]
        )
        try:
            if way == "raw":
                self._say(self._random.randbytes(pick([1, 5, 9, 100])))
            elif way == "add":
                self._client.add(name, self._random.randrange(-5, 5))
            elif way == "delete":
                self._client.delete_key(name)
            elif way == "multi_set":
                self._client.multi_set([name, key], [value, value])
            elif way == "swap":
                self._client.compare_set(name, "x", "y")
            elif way == "push":
                self._client.queue_push(name, value)
            elif way == "pop":
                self._client.queue_pop(name, False)
            else:
                getattr(self._client, way)(name, value)
            self._client.num_keys()
        except (DistError, ValueError):  # this client was dropped, as it deserves
            self._client = stranger_of(self._training)

    def _say(self, data: bytes) -> None:
        with socket.create_connection(("127.0.0.1", self._training.scheme.port)) as sock:
            sock.sendall(b"\0" + struct.pack("<I", 0x3C85F7CE) + data)

    def _value(self) -> bytes:
        """Return noise, the announcement, or a value like it, of any size."""
        pick, heard = self._random.choice, bytearray(self._random.choice(self._heard))
        kind = pick(["noise", "again", "bits", "cut", "long", "large", "huge"])
        if kind == "bits" and heard:
            for _ in range(self._random.randrange(1, 4)):
                heard[self._random.randrange(len(heard))] ^= 1 << self._random.randrange(8)
        return {
            "noise": self._random.randbytes(self._random.randrange(200)),
            "again": bytes(heard),
            "bits": bytes(heard),
            "cut": bytes(heard[: self._random.randrange(len(heard) + 1)]),
            "long": bytes(heard) * 3,
            "large": bytes(100_000),
            "huge": bytes(9 << 20) if self._random.random() < 0.05 else b"",
        }[kind]


def fuzz_store(training: Training, seconds: float) -> tuple[int, int]:
    """Let a stranger write for some seconds while updates flow and workers come and go.

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


@pytest.mark.slow  # the other tests have one kind of junk each
@pytest.mark.parametrize("seconds", [4.0, 120.0])
@pytest.mark.timeout(300)
def test_whatever_strangers_write(training: Training, seconds: float) -> None:
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


if __name__ == "__main__":
    torch.set_num_threads(1)
    with closing(Processes()) as all_processes:
        did, came = fuzz_store(Training(all_processes), float(sys.argv[1]))
    print(f"{did} things were written, {came} workers came and went, no connection broke")
