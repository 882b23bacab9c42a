"""Strangers are refused by the listener of SharedMemWeightSyncScheme, without an effect on others."""

from __future__ import annotations

import contextlib
import json
import logging
import multiprocessing as mp
import os
import signal
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import closing
from typing import Any

import pytest
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
    wait_version,
    weights_of,
)
from marks import quick_for

from weight_update import SharedMemWeightSyncScheme, WeightChunk
from weight_update.testing.processes import freeze
from weight_update.transports.handshake import prove_token
from weight_update.transports.socket_stream import SocketStream
from weight_update.wire.frames import Kind

WORKERS = 2


def hello(token: str, worker: int, **other) -> bytes:
    header = {
        "token": token,
        "worker": worker,
        "pid": 1,
        "version": None,
        "schema": None,
        "error": None,
        **other,
    }
    return WeightChunk(Kind.HELLO, header).encode()


def connect_raw(address: str, data: bytes) -> socket.socket:
    stranger = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    stranger.settimeout(10.0)
    stranger.connect(address)
    stranger.sendall(data)
    return stranger


def prove(scheme: SharedMemWeightSyncScheme, data: bytes, token: str | None = None) -> socket.socket:
    """Connect as a process that knows the token."""
    sock = connect_raw(scheme.address, b"")
    try:
        context = f"shared memory {scheme.address}"
        prove_token(SocketStream(sock), token or scheme.token, context, time.monotonic() + 10.0)
        sock.settimeout(10.0)
        sock.sendall(data)
    except BaseException:
        sock.close()
        raise
    return sock


def answer(stranger: socket.socket) -> bytes:
    """Return all that comes until the connection is closed."""
    parts = []
    try:
        while part := stranger.recv(65536):
            parts.append(part)
    except ConnectionResetError:  # closed with our bytes unread
        pass
    return b"".join(parts)


@pytest.fixture
def busy(procs: Processes) -> Iterator[tuple[SharedMemWeightSyncScheme, list]]:
    """Return a scheme that sends updates all the time, to workers that compute all the time."""
    scheme, model = procs.scheme(SharedMemWeightSyncScheme, timeout=10.0), Stripes(24, 4096)
    workers = procs.launch(scheme, model, lambda: Stripes(24, 4096), WORKERS)
    for worker in workers:
        worker.call(compute)
    with sending(scheme, model):
        yield scheme, workers
    last = scheme.send(fill(model, scheme.version + 1)).version
    assert [worker.call(version_of) for worker in workers] == [last] * WORKERS
    for worker in workers:
        assert_whole(worker.call(end_compute), at_least=10)


def long_header() -> bytes:
    header = json.dumps({"x": "y" * 100_000}).encode()
    return WeightChunk(Kind.GOODBYE, {}).encode()[:8] + len(header).to_bytes(4, "little") + bytes(16) + header


RUBBISH = {
    "noise": bytes(range(256)) * 40,
    "http": b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n" * 3,
    "zeros": bytes(4096),
    "another_kind": WeightChunk(Kind.GOODBYE, {}).encode(),
    "a_checksum_that_fails": long_header(),
    "a_worker_that_is_no_number": hello("", 0).replace(b'"worker":0', b'"worker":x'),
}


@pytest.mark.parametrize(
    "data", quick_for(RUBBISH.values(), RUBBISH["noise"], RUBBISH["a_checksum_that_fails"]), ids=RUBBISH
)
def test_rubbish_is_refused_and_logged(busy, caplog: pytest.LogCaptureFixture, data: bytes) -> None:
    """Garbage from strangers, and from processes that know the token."""
    scheme, _ = busy
    for connect in (lambda: connect_raw(scheme.address, data), lambda: prove(scheme, data)):
        caplog.clear()
        with caplog.at_level(logging.WARNING), closing(connect()) as stranger:
            assert b"WUPD" not in answer(stranger)
            assert eventually(lambda: "refused a connection" in caplog.text, 5.0)
    assert flows_on(scheme)


def test_an_unknown_index_is_told_why(busy) -> None:
    scheme, _ = busy
    with closing(prove(scheme, hello("", -1))) as stranger:
        reply = WeightChunk.decode(answer(stranger))
    assert reply.kind is Kind.REFUSED
    assert "unknown worker index -1" in reply.header["reason"]
    assert flows_on(scheme)


def test_no_pending_connection_outlives_the_scheme(procs: Processes) -> None:
    scheme, model = procs.scheme(SharedMemWeightSyncScheme, timeout=10.0), Stripes(2, 4)
    before = set(threading.enumerate())
    procs.launch(scheme, model, lambda: Stripes(2, 4), 1)
    with (
        closing(connect_raw(scheme.address, b"WUH1")) as stranger,
        closing(prove(scheme, b"WUPD")) as silent,
    ):
        assert eventually(lambda: any("join" in thread.name for thread in threading.enumerate()), 5.0)
        scheme.shutdown()
        assert b"WUPD" not in answer(stranger) + answer(silent)
        assert eventually(lambda: set(threading.enumerate()) <= before, 5.0)


def test_a_stranger_that_takes_the_trainers_address(procs: Processes) -> None:
    """Workers neither show the stranger their token nor take weights from it."""
    assert_not_taken_over(procs, os.geteuid())


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can start a process of another user")
def test_another_user_takes_the_trainers_address(procs: Processes) -> None:
    assert_not_taken_over(procs, 65534)


def assert_not_taken_over(procs: Processes, user: int) -> None:
    ctx = mp.get_context("fork")
    (ours, theirs), (told, tells) = ctx.Pipe(), ctx.Pipe(duplex=False)
    scheme, model = SharedMemWeightSyncScheme(timeout=10.0, connect_timeout=10.0), Stripes(2, 4)
    trainer = ctx.Process(target=train, args=(theirs, scheme, model), daemon=True)
    trainer.start()
    theirs.close()
    scheme.address = ours.recv()  # as if the scheme had been pickled there
    worker = procs.start(scheme, 0, lambda: fill(Stripes(2, 4), -1.0))
    worker.call(join)
    freeze(worker.pid)  # it joins again as soon as the trainer is dead
    trainer.kill()
    trainer.join()
    stranger = ctx.Process(target=take_over, args=(tells, scheme.address, user), daemon=True)
    stranger.start()
    tells.close()
    try:
        assert told.recv() == "listens"
        worker.signal(signal.SIGCONT)
        heard = told.recv()
        assert scheme.token.encode() not in heard
        assert worker.call(wait_version, 7, 1.0) == 0
        weights = worker.call(weights_of)
        assert {value for tensor in weights.values() for value in tensor.tolist()} == {5.0}
        with pytest.raises(WorkerRaised, match="JoinRefusedError"):
            worker.call(receive)
    finally:
        for process in (trainer, stranger):
            process.kill()
            process.join()
        for pipe in (ours, told):
            pipe.close()


def train(pipe: Any, scheme: SharedMemWeightSyncScheme, model: Stripes) -> None:
    """Run the trainer's process, which dies by a signal."""
    scheme.init_on_sender(model=fill(model, 5.0), num_workers=1)
    pipe.send(scheme.address)
    scheme.connect()
    time.sleep(60.0)


def take_over(pipe: Any, address: str, user: int) -> None:
    """Run a stranger's process, which listens in the trainer's place and answers as well as it can."""
    os.setuid(user)
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as sock:
        sock.bind(address)
        sock.settimeout(10.0)
        sock.listen()
        pipe.send("listens")
        caller, _ = sock.accept()
        caller.settimeout(2.0)
        heard = b""
        with contextlib.suppress(TimeoutError, OSError):
            for _ in range(2):
                caller.sendall(b"WUH1\0" + os.urandom(32))
                heard += caller.recv(1 << 20)
        pipe.send(heard)


def receive(me: Worker) -> None:
    me.scheme.receive(5.0)
