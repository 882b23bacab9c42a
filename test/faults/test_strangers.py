"""The door of SharedMemWeightSyncScheme: whoever does not belong is turned away, and nobody notices."""

from __future__ import annotations

import json
import logging
import socket
import threading
from collections.abc import Iterator
from contextlib import closing

import pytest
from faults_tools import (
    Crew,
    Stripes,
    assert_whole,
    compute,
    end_compute,
    eventually,
    fill,
    flows_on,
    sending,
    version_of,
)

from weight_update import SharedMemWeightSyncScheme, WeightChunk
from weight_update.chunks import Kind

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


def knock(address: str, data: bytes) -> socket.socket:
    stranger = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    stranger.settimeout(10.0)
    stranger.connect(address)
    stranger.sendall(data)
    return stranger


def answer(stranger: socket.socket) -> bytes:
    """All that comes until the door is closed again."""
    parts = []
    try:
        while part := stranger.recv(65536):
            parts.append(part)
    except ConnectionResetError:  # closed with our bytes unread
        pass
    return b"".join(parts)


@pytest.fixture
def busy(crew: Crew) -> Iterator[tuple[SharedMemWeightSyncScheme, list]]:
    """A scheme whose updates flow all the time, into workers that compute all the time."""
    scheme, model = crew.scheme(SharedMemWeightSyncScheme, timeout=10.0), Stripes(24, 4096)
    workers = crew.launch(scheme, model, lambda: Stripes(24, 4096), WORKERS)
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
    "a_token_that_is_no_text": hello("\ud800", 0),
}


@pytest.mark.parametrize("data", RUBBISH.values(), ids=RUBBISH)
def test_rubbish_is_refused_and_logged(busy, caplog: pytest.LogCaptureFixture, data: bytes) -> None:
    scheme, _ = busy
    with caplog.at_level(logging.WARNING), closing(knock(scheme._address, data)) as stranger:
        assert b"WELCOME" not in answer(stranger)
        assert eventually(lambda: "refused a connection" in caplog.text, 5.0)
    assert flows_on(scheme)


def test_wrong_token_for_a_connected_worker(busy, caplog: pytest.LogCaptureFixture) -> None:
    scheme, _ = busy
    with caplog.at_level(logging.WARNING), closing(knock(scheme._address, hello("0" * 32, 0))) as stranger:
        reply = WeightChunk.decode(answer(stranger))
    assert reply.kind is Kind.REFUSED
    assert "token" in reply.header["reason"]
    assert scheme._token not in caplog.text
    assert flows_on(scheme)


def test_half_a_frame_and_silence(busy) -> None:
    scheme, _ = busy
    whole = hello(scheme._token, 0)
    with (
        closing(knock(scheme._address, whole[:10])),
        closing(knock(scheme._address, whole[:-5])),
        closing(knock(scheme._address, b"")),
    ):
        assert flows_on(scheme)


def test_many_at_once(busy) -> None:
    scheme, _ = busy
    strangers = [knock(scheme._address, b"x" * n) for n in range(100)]
    assert flows_on(scheme)
    for stranger in strangers:
        stranger.close()
    assert flows_on(scheme)


def test_nobody_who_knocked_outlives_the_scheme(crew: Crew) -> None:
    scheme, model = crew.scheme(SharedMemWeightSyncScheme, timeout=10.0), Stripes(2, 4)
    before = set(threading.enumerate())
    crew.launch(scheme, model, lambda: Stripes(2, 4), 1)
    with closing(knock(scheme._address, b"")), closing(knock(scheme._address, b"WUPD")) as stranger:
        assert eventually(lambda: sum("join" in thread.name for thread in threading.enumerate()) == 2, 5.0)
        scheme.shutdown()
        assert answer(stranger) == b""
        assert eventually(lambda: set(threading.enumerate()) <= before, 5.0)
