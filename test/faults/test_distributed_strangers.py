"""Strangers at the port of DistributedWeightSyncScheme, which the network reaches, change nothing."""

from __future__ import annotations

import contextlib
import json
import logging
import os
import socket
import struct
import threading
from collections.abc import Iterator
from contextlib import closing
from functools import partial

import psutil
import pytest
import torch
from faults_tools import (
    Processes,
    Stripes,
    Worker,
    WorkerRaised,
    assert_whole,
    compute,
    end_compute,
    eventually,
    fill,
    flows_on,
    join,
    sending,
    version_of,
)
from torch.distributed import DistError, TCPStore

from weight_update import DistributedWeightSyncScheme, WeightChunk
from weight_update.transports.rate_limit import Refusals
from weight_update.wire.frames import Kind

WORKERS = 2
SHAPE = (24, 4096)  # 400 KB: more than what travels with a signal
VALIDATE = b"\0" + struct.pack("<I", 0x3C85F7CE)
"""Return the first bytes that a client of a TCPStore sends."""


def make_here() -> Stripes:
    return Stripes(*SHAPE)


def make_elsewhere() -> Stripes:
    os.environ["WEIGHT_UPDATE_HOST"] = "elsewhere"  # weights cross a socket to this one
    return Stripes(*SHAPE)


OTHER_PORTS: set[int] = set()
"""Ports on which this process listened before these tests."""


@pytest.fixture(scope="module")
def busy() -> Iterator[DistributedWeightSyncScheme]:
    """Send updates all the time, to a worker that maps them and to one behind a socket."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # a child forked after OpenMP ran hangs in its own parallel loops
    OTHER_PORTS.update(listening())
    with closing(Processes()) as procs:
        scheme, model = procs.scheme(DistributedWeightSyncScheme, timeout=10.0), make_here()
        scheme.init_on_sender(model=model, num_workers=WORKERS)
        workers = [procs.start(scheme, 0, make_here), procs.start(scheme, 1, make_elsewhere)]
        for worker in workers:
            worker.begin(join)
        scheme.connect(timeout=20.0)
        for worker in workers:
            worker.result()
            worker.call(compute)
        with sending(scheme, model):
            yield scheme
        last = scheme.send(fill(model, scheme.version + 1)).version
        assert [worker.call(version_of) for worker in workers] == [last] * WORKERS
        for worker in workers:
            assert_whole(worker.call(end_compute), at_least=10)
    torch.set_num_threads(threads)


@pytest.fixture(autouse=True)
def all_is_logged(busy: DistributedWeightSyncScheme, monkeypatch: pytest.MonkeyPatch) -> None:
    """Begin a new period of the limit, so that each test sees what it causes."""
    monkeypatch.setattr(busy._listener, "refusals", Refusals(logging.getLogger("strangers")))


def call(port: int, data: bytes) -> socket.socket:
    stranger = socket.create_connection(("127.0.0.1", port), timeout=10.0)
    stranger.sendall(data)
    return stranger


def client(scheme: DistributedWeightSyncScheme) -> TCPStore:
    """Return the store client of a stranger that speaks the protocol."""
    return TCPStore("127.0.0.1", scheme.port, is_master=False, wait_for_workers=False)


def listening() -> set[int]:
    """Return the ports that this process and its workers listen on."""
    me = psutil.Process()
    found = [one for process in (me, *me.children()) for one in process.net_connections("tcp")]
    return {one.laddr.port for one in found if one.status == psutil.CONN_LISTEN}


RUBBISH = {
    "nothing": b"",
    "noise": bytes(range(256)) * 40,
    "http": b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n",
    "only_hello": VALIDATE,
    "a_wrong_hello": b"\0" + struct.pack("<I", 1),
    "an_unknown_request": VALIDATE + b"\xfe" * 100,
    "a_key_of_an_exabyte": VALIDATE + b"\1" + struct.pack("<Q", 1 << 60) + b"x" * 1000,
    "half_a_request": VALIDATE + b"\1" + struct.pack("<Q", 4) + b"ke",
}


@pytest.mark.parametrize("data", RUBBISH.values(), ids=RUBBISH)
def test_rubbish_on_the_port(busy: DistributedWeightSyncScheme, data: bytes) -> None:
    with closing(call(busy.port, data)), closing(call(busy.port, data)):
        assert flows_on(busy)
    assert flows_on(busy)


def test_many_at_once(busy: DistributedWeightSyncScheme) -> None:
    strangers = [call(busy.port, b"x" * n) for n in range(100)]
    assert flows_on(busy)
    for stranger in strangers:
        stranger.close()
    assert flows_on(busy)


def join_request(info: object, hello: bytes = b"") -> bytes:
    text = info if isinstance(info, bytes) else json.dumps(info).encode()
    return struct.pack("<I", len(text)) + text + hello


def hello(token: str, worker: int) -> bytes:
    header = {"token": token, "worker": worker, "pid": 1, "version": None, "schema": None, "error": None}
    return WeightChunk(Kind.HELLO, header).encode()


JOIN_REQUESTS = {
    "empty": b"",
    "short": b"\1\2\3",
    "noise": bytes(range(256)),
    "no_json": join_request(b"{"),
    "json_without_end": join_request(b"[" * 200_000),
    "no_link": join_request({"host": "h"}),
    "a_link_that_is_no_text": join_request({"link": "\ud800", "host": "h"}, hello("0", 0)),
    "somebody": join_request({"link": "stranger", "host": "h"}, hello("0" * 32, 0)),
    "no_frame": join_request({"link": "stranger", "host": "h"}, b"WUPD" * 100),
}


@pytest.mark.parametrize("signature", [b"", bytes(25)], ids=["unsigned", "wrongly_signed"])
@pytest.mark.parametrize("data", JOIN_REQUESTS.values(), ids=JOIN_REQUESTS)
def test_join_requests_of_strangers(
    busy, caplog: pytest.LogCaptureFixture, data: bytes, signature: bytes
) -> None:
    with caplog.at_level(logging.WARNING):
        client(busy).queue_push("door", signature + data)
        assert eventually(lambda: "refused a connection: wrong token" in caplog.text, 5.0)
    assert busy._token not in caplog.text
    assert flows_on(busy)


def join_with(me: Worker, **options: object) -> None:
    me.scheme = DistributedWeightSyncScheme(**options)
    me.scheme.init_on_receiver(model=me.model, worker_idx=me.idx)
    me.scheme.connect(timeout=10.0)


def test_a_worker_with_another_token(busy, procs: Processes, caplog: pytest.LogCaptureFixture) -> None:
    stranger = procs.start(busy, 0, make_here)
    with (
        caplog.at_level(logging.WARNING),
        pytest.raises(WorkerRaised, match="JoinRefusedError: the tokens of the two ends differ"),
    ):
        stranger.call(partial(join_with, port=busy.port, token="0" * 32))
    assert "refused a connection: wrong token" in caplog.text
    assert flows_on(busy)


def test_strangers_cannot_connect_to_the_other_ports(busy) -> None:
    """Each process that receives payloads through a socket listens; its other end is connected already."""
    ports = listening() - OTHER_PORTS - {busy.port}
    assert len(ports) >= 2
    for port in ports:
        with pytest.raises(TimeoutError):
            socket.create_connection(("127.0.0.1", port), timeout=0.3)
    assert flows_on(busy)


class Tap:
    """A proxy of a port that records the bytes of its clients."""

    def __init__(self, port: int) -> None:
        self._to, self.heard = port, []
        self._server = socket.create_server(("127.0.0.1", 0))
        self.port = self._server.getsockname()[1]
        threading.Thread(target=self._run, daemon=True).start()

    def _run(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                client = self._server.accept()[0]
                there = socket.create_connection(("127.0.0.1", self._to))
                self.heard.append(said := bytearray())
                threading.Thread(target=self._pass_on, args=(client, there, said), daemon=True).start()
                threading.Thread(target=self._pass_on, args=(there, client, bytearray()), daemon=True).start()

    @staticmethod
    def _pass_on(one: socket.socket, other: socket.socket, said: bytearray) -> None:
        with one, contextlib.suppress(OSError):
            while part := one.recv(1 << 16):
                said += part
                other.sendall(part)
            other.shutdown(socket.SHUT_WR)

    def close(self) -> None:
        self._server.shutdown(socket.SHUT_RDWR)
        self._server.close()


def test_what_a_worker_said_is_not_heard_twice(procs: Processes, caplog: pytest.LogCaptureFixture) -> None:
    """A stranger that recorded the traffic repeats a join request, byte for byte."""
    scheme, model = procs.scheme(DistributedWeightSyncScheme, timeout=5.0), make_here()
    scheme.init_on_sender(model=model, num_workers=1)
    with closing(Tap(scheme.port)) as tap:
        worker = procs.start(scheme, 0, make_here)
        worker.begin(partial(join_with, port=tap.port, token=scheme._token))
        scheme.connect(timeout=10.0)
        worker.result()
        scheme.send(fill(model, 1))
        assert not any(scheme._token.encode() in said for said in tap.heard)
        (said,) = [bytes(said) for said in tap.heard if b"door" in said]
        with caplog.at_level(logging.WARNING):
            call(scheme.port, said).close()
            assert eventually(lambda: "is a repeated one" in caplog.text, 5.0)
        for version in range(2, 6):
            scheme.send(fill(model, version))
            assert worker.call(version_of) == version
        worker.kill()


@pytest.mark.slow  # test_listener.py has a quick flood
def test_a_flood_of_large_join_requests(busy) -> None:
    me, stranger = psutil.Process(), client(busy)
    before, peak = me.memory_info().rss, 0
    for _ in range(
        80
    ):  # 640 MB; what the allocator keeps varies from run to run, but does not grow with them
        stranger.queue_push("door", bytes(8_000_000))
        assert eventually(lambda: stranger.queue_len("door") < 10)
        peak = max(peak, me.memory_info().rss - before)
    assert flows_on(busy)
    assert peak < 300e6, f"{peak / 1e6:.0f} MB"


def test_a_key_that_is_too_large(busy) -> None:
    with pytest.raises(DistError):
        client(busy).queue_push("door", bytes(9 << 20))
    assert flows_on(busy)


def test_a_store_gives_no_secret_away(busy) -> None:
    """A stranger that speaks the protocol finds no key; queues cannot be listed."""
    assert client(busy).list_keys() == []
    assert flows_on(busy)
