"""Strangers at the ports of DistributedWeightSyncScheme, which the network reaches, change nothing."""

from __future__ import annotations

import contextlib
import logging
import os
import socket
import struct
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing, contextmanager
from copy import copy
from functools import partial

import psutil
import pytest
import torch
from faults_tools import (
    Processes,
    Remote,
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
    leave,
    sending,
    version_of,
    within,
)
from marks import quick_for, slow
from stranger_parts import Tap
from torch.distributed import DistError, TCPStore

from weight_update import DistributedWeightSyncScheme, SyncFailedError, SyncTimeoutError, WeightChunk
from weight_update.errors import JoinRefusedError, LinkClosedError
from weight_update.transports.distributed.rendezvous import Announcement, find_sender
from weight_update.transports.rate_limit import Refusals
from weight_update.transports.signed_stream import MAX_JSON_BYTES, SignedStream
from weight_update.transports.signed_stream import call as call_sender
from weight_update.transports.socket_stream import deadline_of
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
    monkeypatch.setattr(busy.listener, "refusals", Refusals(logging.getLogger("strangers")))


def call(port: int, data: bytes) -> socket.socket:
    stranger = socket.create_connection(("127.0.0.1", port), timeout=10.0)
    stranger.sendall(data)
    return stranger


def client(scheme: DistributedWeightSyncScheme) -> TCPStore:
    """Return the store client of a stranger that speaks the protocol."""
    return TCPStore("127.0.0.1", scheme.port, is_master=False, wait_for_workers=False)


def sender_of(scheme: DistributedWeightSyncScheme) -> Announcement:
    return find_sender(scheme.address, scheme.port, scheme.token, 10.0)


def ports_of(scheme: DistributedWeightSyncScheme) -> dict[str, int]:
    return {"store": scheme.port, "listener": sender_of(scheme).port}


each_port = pytest.mark.parametrize("port", ["store", "listener"])


def listening() -> set[int]:
    """Return the ports that this process and its workers listen on."""
    me = psutil.Process()
    found = [one for process in (me, *me.children()) for one in process.net_connections("tcp")]
    return {one.laddr.port for one in found if one.status == psutil.CONN_LISTEN}


def ends(stranger: socket.socket) -> bool:
    """Return whether the other end ends the connection."""
    stranger.settimeout(10.0)
    try:
        while stranger.recv(1000):
            pass
    except ConnectionError:
        pass
    return True


RUBBISH = {
    "nothing": b"",
    "noise": bytes(range(256)) * 40,
    "http": b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n",
    "only_hello": VALIDATE,
    "a_wrong_hello": b"\0" + struct.pack("<I", 1),
    "an_unknown_request": VALIDATE + b"\xfe" * 100,
    "a_key_of_an_exabyte": VALIDATE + b"\1" + struct.pack("<Q", 1 << 60) + b"x" * 1000,
    "half_a_request": VALIDATE + b"\1" + struct.pack("<Q", 4) + b"ke",
    "half_a_handshake": b"WUH1" + bytes(40),
    "a_wrong_proof": b"WUH1" + bytes(64),
    "a_wrong_proof_and_a_message": b"WUH1" + bytes(64) + struct.pack("<I", 1 << 31) + bytes(10_000),
}


@each_port
@pytest.mark.parametrize(
    "data",
    quick_for(
        RUBBISH.values(), *(RUBBISH[name] for name in ("noise", "a_key_of_an_exabyte", "a_wrong_proof"))
    ),
    ids=RUBBISH,
)
def test_rubbish_on_the_port(busy: DistributedWeightSyncScheme, port: str, data: bytes) -> None:
    number = ports_of(busy)[port]
    with closing(call(number, data)), closing(call(number, data)):
        assert flows_on(busy)
    assert flows_on(busy)


def hello(token: str, worker: int) -> bytes:
    header = {"token": token, "worker": worker, "pid": 1, "version": None, "schema": None, "error": None}
    return WeightChunk(Kind.HELLO, header).encode()


def test_silent_callers_keep_no_worker_out(busy, procs: Processes) -> None:
    """More of them than may wait at once; a worker on another host joins all the same."""
    with ExitStack() as stack:
        for _ in range(200):
            stack.enter_context(closing(call(sender_of(busy).port, b"")))
        worker = procs.start(busy, 2, make_elsewhere)
        worker.call(join)
        assert flows_on(busy)
    worker.call(leave)
    assert eventually(lambda: 2 not in busy.worker_versions)
    worker.kill()
    assert flows_on(busy)


# -- processes that know the token, and say something else than workers do ----------------------------


def knowing(scheme: DistributedWeightSyncScheme, context: str | None = None) -> SignedStream:
    """Return a connection to the TCP listener whose handshake has succeeded."""
    sender = sender_of(scheme)
    return call_sender(
        scheme.address, sender.port, scheme.token, context or f"sender {sender.name}", deadline_of(10.0)
    )


ODD = {
    "nothing": b"",
    "noise": bytes(range(256)),
    "no_json": b"{",
    "json_without_end": b"[" * 200_000,
    "a_list": b"[]",
    "too_much": b" " * (MAX_JSON_BYTES + 1),
    "nothing_to_do": b"{}",
    "no_name": b'{"do": "join", "host": "h"}',
    "no_host": b'{"do": "join", "name": "n"}',
    "a_name_that_is_no_text": b'{"do": "join", "name": 7, "host": "h"}',
    "payloads_of_nobody": b'{"do": "take payloads", "name": "nobody"}',
    "payloads_without_a_name": b'{"do": "take payloads"}',
}


@pytest.mark.parametrize("body", quick_for(ODD.values(), ODD["no_json"], ODD["payloads_of_nobody"]), ids=ODD)
def test_a_request_that_is_none(busy, caplog: pytest.LogCaptureFixture, body: bytes) -> None:
    with caplog.at_level(logging.WARNING), closing(knowing(busy)) as signed:
        try:
            signed.send(body, deadline_of(10.0))
        except LinkClosedError:
            assert len(body) > MAX_JSON_BYTES  # it is not read
        assert ends(signed.stream.sock)
        assert eventually(lambda: "refused a connection: " in caplog.text, 5.0)
    assert busy.token not in caplog.text
    assert "Traceback" not in caplog.text, caplog.text
    assert flows_on(busy)


FIRST_FRAMES = {
    "empty": b"",
    "short": b"\1\2\3",
    "no_frame": struct.pack("<II", 400, 0) + b"WUPD" * 100,
    "a_slot": struct.pack("<II", len(hello("", 0)), 9) + hello("", 0) + b"[1, 2, 3]",
    "goodbye": struct.pack("<II", len(WeightChunk(Kind.GOODBYE, {}).encode()), 0)
    + WeightChunk(Kind.GOODBYE, {}).encode(),
}


@pytest.mark.parametrize(
    "frame",
    quick_for(FIRST_FRAMES.values(), FIRST_FRAMES["no_frame"], FIRST_FRAMES["a_slot"]),
    ids=FIRST_FRAMES,
)
def test_a_first_frame_that_is_none(busy, caplog: pytest.LogCaptureFixture, frame: bytes) -> None:
    with caplog.at_level(logging.WARNING), closing(knowing(busy)) as signed:
        signed.send_json({"do": "join", "name": "n", "host": "h"}, 10.0)
        signed.send(frame, deadline_of(10.0))
        assert ends(signed.stream.sock)
        assert eventually(lambda: "refused a connection: " in caplog.text, 5.0)
    assert "Traceback" not in caplog.text, caplog.text
    assert flows_on(busy)


def test_a_proof_for_another_purpose(busy, caplog: pytest.LogCaptureFixture) -> None:
    """A proof of the token to another listener of the same program is worth nothing here."""
    with caplog.at_level(logging.WARNING), pytest.raises(JoinRefusedError, match="wrong token"):
        knowing(busy, "relay")
    assert eventually(lambda: "refused a connection: wrong token" in caplog.text, 5.0)
    assert flows_on(busy)


def join_with(me: Worker, **options: object) -> None:
    me.scheme = DistributedWeightSyncScheme(**options)
    me.scheme.init_on_receiver(model=me.model, worker_idx=me.idx)
    me.scheme.connect(timeout=10.0)


def test_a_worker_with_another_token(busy, procs: Processes) -> None:
    stranger = procs.start(busy, 0, make_here)
    with pytest.raises(WorkerRaised, match=r"JoinRefusedError: the sender at .* has another token"):
        stranger.call(partial(join_with, port=busy.port, token="0" * 32))
    assert flows_on(busy)


def test_there_are_no_other_ports(busy) -> None:
    """Workers listen only where another host is to forward payloads to them."""
    assert listening() - OTHER_PORTS == set(ports_of(busy).values())
    assert flows_on(busy)


# -- strangers on the way ------------------------------------------------------------------------------


class Misled:
    """Makes workers find the TCP listener behind a tap, as a stranger on the network does."""

    def __init__(self, tap: Tap) -> None:
        self._tap = tap

    def __call__(self, *args: object, **options: object) -> Announcement:
        found = find_sender(*args, **options)
        return Announcement(found.host, found.local, self._tap.port, found.name)


@contextmanager
def tapped(
    procs: Processes, monkeypatch: pytest.MonkeyPatch, kind: type[Tap]
) -> Iterator[tuple[DistributedWeightSyncScheme, Stripes, Remote, Tap]]:
    """Yield a scheme, its model, a worker that has version 1, and the tap on both connections of it."""
    scheme, model = procs.scheme(DistributedWeightSyncScheme, timeout=5.0), make_here()
    scheme.init_on_sender(model=model, num_workers=1)
    with closing(kind(sender_of(scheme).port)) as tap:
        monkeypatch.setattr("weight_update.transports.distributed.transport.find_sender", Misled(tap))
        worker = procs.start(scheme, 0, make_elsewhere)
        worker.begin(join)
        scheme.connect(timeout=10.0)
        worker.result()
        scheme.send(fill(model, 1))
        # One connection is for frames, and one for payloads, which this update does not need.
        assert eventually(lambda: len(tap.heard) == 2 and b"take payloads" in tap.heard[1])
        yield scheme, model, worker, tap
        worker.kill()


def test_what_a_worker_said_is_not_heard_twice(
    procs: Processes, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A stranger that recorded the traffic repeats both connections of a worker, byte for byte."""
    with tapped(procs, monkeypatch, Tap) as (scheme, model, worker, tap):
        assert not any(scheme.token.encode() in said for said in tap.heard)
        with caplog.at_level(logging.WARNING):
            for said in [bytes(said) for said in tap.heard]:
                with closing(call(tap.to, said)) as stranger:
                    assert ends(stranger)
            assert eventually(lambda: caplog.text.count("refused a connection: wrong token") == 2, 5.0)
        for version in range(2, 6):
            scheme.send(fill(model, version))
            assert worker.call(version_of) == version


class Meddler(Tap):
    """A tap that changes one bit of what a client says, once, when it is told to."""

    wanted = False

    def change(self, data: bytes) -> bytes:
        if self.wanted and len(data) > 40:
            self.wanted = False
            return data[:-1] + bytes([data[-1] ^ 1])
        return data


def test_a_message_that_was_changed_on_the_way_ends_its_connection(
    procs: Processes, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The worker joins again, and what was changed is not taken for its word."""
    with tapped(procs, monkeypatch, Meddler) as (scheme, model, worker, tap):
        # The connection for payloads is there: it is not the one whose message is changed.
        before, tap.wanted = scheme._sender.table[0].link._connection, True
        with pytest.raises(SyncFailedError, match="worker 0"):
            scheme.send(fill(model, 2))
        assert not tap.wanted

        def joined_again() -> bool:
            return scheme._sender.table[0].link._connection not in (None, before)

        assert eventually(joined_again, 20.0)
        assert eventually(lambda: scheme.worker_versions == {0: 2}, 20.0)
        scheme.send(fill(model, 3))
        assert worker.call(version_of) == 3


class Narrow(Tap):
    """A tap that lets a part of the first weights through, and nothing after that."""

    left = 100_000

    def _pass_on(self, one: socket.socket, other: socket.socket, said: bytearray | None) -> None:
        if said is not None:
            super()._pass_on(one, other, said)
            return
        with one, contextlib.suppress(OSError):
            while self.left > 0 and (part := one.recv(self.left)):
                self.left -= len(part)
                other.sendall(part)
            time.sleep(8.0)
            other.shutdown(socket.SHUT_RDWR)


@pytest.mark.parametrize("stripes", [slow(8), 800], ids=["after_the_frame", "through_the_relay"])
def test_connect_ends_in_time_if_the_link_fails_while_weights_arrive(
    stripes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    make = partial(Stripes, stripes, 4096)
    with DistributedWeightSyncScheme(timeout=5.0) as scheme, ThreadPoolExecutor(1) as pool:
        scheme.init_on_sender(model=make(), num_workers=1)
        sending = pool.submit(scheme.connect, timeout=8.0)
        with closing(Narrow(sender_of(scheme).port)) as tap, copy(scheme) as receiver:
            monkeypatch.setattr("weight_update.transports.distributed.transport.find_sender", Misled(tap))
            receiver.host = "elsewhere"
            receiver.init_on_receiver(model=make(), worker_idx=0)
            with within(6.0), pytest.raises((SyncTimeoutError, LinkClosedError)):
                receiver.connect(timeout=3.0)
        with pytest.raises(SyncFailedError):
            sending.result()


# -- the store -----------------------------------------------------------------------------------------


@pytest.mark.slow  # test_listener.py has a quick flood
def test_a_flood_of_large_values(busy) -> None:
    me, stranger = psutil.Process(), client(busy)
    before, peak = me.memory_info().rss, 0
    for _ in range(80):  # 640 MB; what the allocator keeps varies, but does not grow with them
        stranger.set("a key", bytes(8_000_000))
        peak = max(peak, me.memory_info().rss - before)
    assert stranger.delete_key("a key")
    assert flows_on(busy)
    assert peak < 300e6, f"{peak / 1e6:.0f} MB"


def test_a_value_that_is_too_large(busy) -> None:
    with pytest.raises(DistError):
        client(busy).queue_push("door", bytes(9 << 20))
    assert flows_on(busy)
