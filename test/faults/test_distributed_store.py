"""Whatever strangers write into the store, workers can join and connections to other hosts keep working."""

from __future__ import annotations

import contextlib
import json
import logging
import os
import random
import socket
import struct
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import closing

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
from torch.distributed import DistError, TCPStore

from weight_update import DistributedWeightSyncScheme, SyncFailedError, WeightChunk
from weight_update.transports.distributed.signed_queue import SignedQueue
from weight_update.transports.inherited_sockets import listening_sockets
from weight_update.transports.rate_limit import Refusals
from weight_update.wire.frames import Kind

SHAPE = (8, 4096)  # more than what travels with a signal


def make_here() -> Stripes:
    return Stripes(*SHAPE)


def make_elsewhere() -> Stripes:
    os.environ["WEIGHT_UPDATE_HOST"] = f"host of {os.getpid()}"
    return Stripes(*SHAPE)


class Training:
    """A trainer with a worker on another host, into which updates flow."""

    def __init__(self, procs: Processes) -> None:
        self.procs, self.model = procs, make_here()
        self.scheme = procs.scheme(DistributedWeightSyncScheme, timeout=10.0)
        self.scheme.init_on_sender(model=self.model, num_workers=1)
        self.far = self.start(0, make_elsewhere)
        self.scheme.connect(timeout=20.0)
        self.far.result()
        self.far.call(compute)

    def start(self, idx: int, make_model: Callable[[], Stripes]) -> Remote:
        worker = self.procs.start(self.scheme, idx, make_model)
        worker.begin(join)
        return worker

    def send(self) -> None:
        """Send an update, which all workers apply."""
        self.scheme.send(fill(self.model, (self.scheme.version or 0) + 1))

    def link(self) -> str:
        """Return the name of the connection to the worker on another host, or nothing between two."""
        return getattr(self.scheme._sender.table[0].link._connection, "name", "")

    def dismiss(self, worker: Remote) -> None:
        """Make a worker leave, and wait until the trainer has noticed."""
        worker.call(leave)
        assert eventually(lambda: worker.idx not in self.scheme.worker_versions)
        worker.kill()

    def goes_on(self) -> None:
        """Check that updates arrive, and that workers join on this host and on others."""
        self.send()
        late = [self.start(idx, make) for idx, make in ((1, make_here), (2, make_elsewhere))]
        for worker in late:
            worker.result()
        self.send()
        for worker in late:
            self.dismiss(worker)
        self.send()
        assert_whole(self.far.call(end_compute))
        self.far.call(compute)


@pytest.fixture(scope="module")
def training() -> Iterator[Training]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # a child forked after OpenMP ran hangs in its own parallel loops
    with closing(Processes()) as procs:
        yield Training(procs)
    torch.set_num_threads(threads)


def stranger_of(training: Training) -> TCPStore:
    """Return the store client of a stranger that speaks the protocol."""
    return TCPStore("127.0.0.1", training.scheme.port, is_master=False, wait_for_workers=False)


def join_request(link: str) -> bytes:
    """Return an unsigned join request."""
    header = {"token": "", "worker": 0, "pid": 1, "version": None, "schema": None, "error": None}
    info = json.dumps({"link": link, "host": "h"}).encode()
    return bytes(25) + struct.pack("<I", len(info)) + info + WeightChunk(Kind.HELLO, header).encode()


@pytest.fixture(autouse=True)
def all_is_logged(training: Training, monkeypatch: pytest.MonkeyPatch) -> None:
    """Begin a new period of the limit, so that each test sees what it causes."""
    monkeypatch.setattr(training.scheme._listener, "refusals", Refusals(logging.getLogger("strangers")))


@pytest.mark.parametrize("link", ["x" * 9000, "x" * 100, "", "../door"], ids=["long", "odd", "empty", "path"])
def test_a_join_request_with_a_forged_name(training: Training, caplog, link: str) -> None:
    with caplog.at_level(logging.WARNING):
        stranger_of(training).queue_push("door", join_request(link))
        assert eventually(lambda: "refused a connection: wrong token" in caplog.text, 5.0)
    training.goes_on()


@pytest.mark.parametrize("way", ["set", "add", "append"])
def test_the_join_queue_becomes_a_key(training: Training, way: str) -> None:
    stranger = stranger_of(training)
    if way == "add":
        stranger.add("door", 1)
    else:
        getattr(stranger, way)("door", "x")
    training.goes_on()


@pytest.mark.parametrize("way", ["down", "up"])
def test_the_queue_of_a_connection_becomes_a_key(training: Training, way: str) -> None:
    stranger_of(training).set(f"{training.link()}/{way}", "x")
    for _ in range(3):
        training.send()


@pytest.mark.parametrize("junk", [b"", b"x" * 8_000_000], ids=["empty", "large"])
@pytest.mark.parametrize("way", ["down", "up"])
def test_junk_in_the_queue_of_a_connection(training: Training, way: str, junk: bytes) -> None:
    stranger = stranger_of(training)
    for _ in range(5):
        stranger.queue_push(f"{training.link()}/{way}", junk)
    for _ in range(3):
        training.send()


@pytest.mark.slow  # test_rejoins.py has workers that join again
@pytest.mark.parametrize("way", ["down", "up"])
def test_a_connection_whose_messages_are_taken_is_made_anew(training: Training, way: str) -> None:
    """The gap is noticed with the next message, and the worker joins again under a fresh name."""
    before = training.link()
    thief, stolen = stranger_of(training), threading.Event()

    def steal() -> None:
        while not stolen.is_set():
            with contextlib.suppress(DistError):  # it is empty
                thief.queue_pop(f"{before}/{way}", False)
                stolen.set()

    stealing = threading.Thread(target=steal)
    stealing.start()

    def recovers() -> bool:
        try:
            training.send()
        except SyncFailedError:
            return False
        return stolen.is_set() and training.link() not in ("", before)

    training.scheme.timeout = training.scheme._sender.timeout = 1.0
    try:
        assert eventually(recovers, 30.0)
    finally:
        stolen.set()
        stealing.join()
        training.scheme.timeout = training.scheme._sender.timeout = 10.0
    training.goes_on()


class Vandal:
    """A stranger that writes into every queue and key of the protocol, including repeated messages."""

    def __init__(self, training: Training, seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
        self._random = random.Random(seed)
        self._training, self._stop = training, threading.Event()
        self._names = {"door", f"{training.link()}/down", f"{training.link()}/up"}
        self._heard: list[bytes] = [b"x"]
        self._client = stranger_of(training)
        self.errors: list[BaseException] = []
        self.done = 0
        put, opened = SignedQueue.put, SignedQueue._open

        def overheard(box: SignedQueue, message: bytes, **options: object) -> None:
            self._names.add(box.name)
            self._hear(message)
            put(box, message, **options)

        def open_too(box: SignedQueue, raw: bytes) -> object:
            self._names.add(box.name)
            self._hear(bytes(raw))
            return opened(box, raw)

        monkeypatch.setattr(SignedQueue, "put", overheard)
        monkeypatch.setattr(SignedQueue, "_open", open_too)
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def end(self) -> None:
        self._stop.set()
        self._thread.join()
        assert self.errors == []

    def _hear(self, message: bytes) -> None:
        self._heard = [*self._heard[-50:], message[:100_000]]

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
        name, value = pick(sorted(self._names)), self._value()
        name = pick([name] * 8 + ["", "door/", name[:40], "x" * 8000, "link/" + "0" * 32, f"{name}/0"])
        way = pick(
            ["set", "add", "append", "push", "push", "push", "push", "delete", "multi_set", "swap", "raw"]
        )
        try:
            if way == "raw":
                self._say(self._random.randbytes(pick([1, 5, 9, 100])))
            elif way == "add":
                self._client.add(name, self._random.randrange(-5, 5))
            elif way == "delete":
                self._client.delete_key(name)
            elif way == "multi_set":
                self._client.multi_set([name, "door"], [value, value])
            elif way == "swap":
                self._client.compare_set(name, "x", "y")
            elif way == "push":
                self._client.queue_push(name, value)
            else:
                getattr(self._client, way)(name, value)
            self._client.num_keys()
        except DistError:  # this client was dropped, as it deserves
            self._client = stranger_of(self._training)

    def _say(self, data: bytes) -> None:
        with socket.create_connection(("127.0.0.1", self._training.scheme.port)) as sock:
            sock.sendall(b"\0" + struct.pack("<I", 0x3C85F7CE) + data)

    def _value(self) -> bytes:
        """Return noise, a message that was sent before, or one like it, of any size."""
        pick, heard = self._random.choice, bytearray(self._random.choice(self._heard))
        kind = pick(["noise", "again", "bits", "cut", "long", "request", "name", "huge"])
        if kind == "bits" and heard:
            for _ in range(self._random.randrange(1, 4)):
                heard[self._random.randrange(len(heard))] ^= 1 << self._random.randrange(8)
        return {
            "noise": self._random.randbytes(self._random.randrange(200)),
            "again": bytes(heard),
            "bits": bytes(heard),
            "cut": bytes(heard[: self._random.randrange(len(heard) + 1)]),
            "long": bytes(heard) * 3,
            "request": join_request(self._random.randbytes(16).hex()),
            "name": join_request("x" * self._random.randrange(10_000)),
            "huge": bytes(9 << 20) if self._random.random() < 0.05 else b"",
        }[kind]


@pytest.mark.slow  # the other tests have one kind of junk each
@pytest.mark.parametrize("seconds", [4.0, 120.0])
@pytest.mark.timeout(300)
def test_whatever_strangers_write(
    training: Training, monkeypatch: pytest.MonkeyPatch, seconds: float
) -> None:
    seed = random.randrange(1 << 32)
    print(f"seed {seed}")
    link = training.link()
    vandal = Vandal(training, seed, monkeypatch)
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
    assert vandal.done > 50
    assert training.link() == link  # the connection never broke
    training.goes_on()


class Mute(DistributedWeightSyncScheme):
    """A scheme that cannot announce itself."""

    def announce(self, where: object) -> None:
        raise RuntimeError("nowhere to announce it")


def test_a_sender_that_cannot_be_announced_stops_listening() -> None:
    before = listening_sockets()
    with pytest.raises(RuntimeError, match="nowhere"):
        Mute().init_on_sender(model=torch.nn.Linear(2, 2), num_workers=1)
    assert listening_sockets() == before
