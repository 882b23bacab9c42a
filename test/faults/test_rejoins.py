"""Workers whose connection fails join again, also when the next connection fails too."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest
from faults_tools import (
    SOCKET_KINDS,
    Processes,
    Remote,
    eventually,
    fill,
    join_from_another_host,
    small,
    version_of,
)
from marks import quick_for

from weight_update import (
    LinkClosedError,
    SyncFailedError,
    SyncTimeoutError,
    TransportBackend,
    WeightChunk,
)
from weight_update.wire.frames import Kind


class Pair:
    """A connected sender with one worker, and the sender's end of their link.

    Attributes:
        joins: join requests of the worker since it was connected.
    """

    def __init__(self, kind: str, procs: Processes, monkeypatch: pytest.MonkeyPatch) -> None:
        cls, options = SOCKET_KINDS[kind]
        self.scheme, self.model = procs.scheme(cls, timeout=5.0, **options), small()
        self.scheme.init_on_sender(model=self.model, num_workers=1)
        self.worker: Remote = procs.start(self.scheme, 0, small)
        self.worker.begin(join_from_another_host)
        self.scheme.connect(timeout=20.0)
        self.worker.result()
        self.link: TransportBackend = self.scheme._sender.table[0].link
        self.joins = 0
        self._admit = self.link.on_join_request
        monkeypatch.setattr(self.link, "on_join_request", self._count)

    def _count(self, hello: WeightChunk) -> None:
        assert self._admit is not None
        self._admit(hello)
        self.joins += 1

    def sends(self, version: int) -> bool:
        """Send ``version`` until the worker takes it, for ten seconds at most."""
        deadline = time.monotonic() + 10.0
        while time.monotonic() < deadline:
            with contextlib.suppress(SyncFailedError):
                self.scheme.send(fill(self.model, version))
                return True
            time.sleep(0.05)
        return False


@pytest.fixture(params=quick_for(SOCKET_KINDS, "shared_mem", "distributed"))
def pair(request: pytest.FixtureRequest, procs: Processes, monkeypatch: pytest.MonkeyPatch) -> Iterator[Pair]:
    return Pair(request.param, procs, monkeypatch)


def test_a_connection_that_fails_while_a_worker_joins_again(
    pair: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    send_chunk, failures = pair.link.send_chunk, iter([True, True])

    def fail(chunk: WeightChunk, timeout: float | None = None) -> None:
        if chunk.kind is Kind.WELCOME and next(failures, False):
            pair.link.disconnect()
            raise LinkClosedError("the connection fails")
        send_chunk(chunk, timeout)

    monkeypatch.setattr(pair.link, "send_chunk", fail)
    pair.link.disconnect()
    assert eventually(lambda: pair.joins >= 3)
    assert pair.sends(7)


def test_a_late_error_of_one_connection_does_not_end_the_next(
    pair: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    send_chunk, once = pair.link.send_chunk, threading.Event()

    def fail(chunk: WeightChunk, timeout: float | None = None) -> None:
        if chunk.kind is Kind.UPDATE and not once.is_set():
            once.set()
            pair.link.disconnect()
            assert eventually(lambda: pair.joins == 1, 10.0)
            time.sleep(0.2)  # the link has its next connection now
            raise SyncTimeoutError("the worker did not read it in time")
        send_chunk(chunk, timeout)

    monkeypatch.setattr(pair.link, "send_chunk", fail)
    with contextlib.suppress(SyncFailedError):
        pair.scheme.send(fill(pair.model, 1))
    assert eventually(lambda: pair.worker.call(version_of) == 1, 10.0)
    assert pair.sends(2)
    assert pair.joins == 1


def test_a_late_error_of_what_a_worker_says_does_not_end_its_next_connection(
    pair: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    recv_chunk, once = pair.link.recv_chunk, iter([True])

    def fail(timeout: float | None = None, allocate: Any = None) -> WeightChunk | None:
        if next(once, False):
            pair.link.disconnect()
            assert eventually(lambda: pair.joins == 1, 10.0)
            time.sleep(0.2)
            raise SyncTimeoutError("the worker said half a word")
        return recv_chunk(timeout, allocate)

    monkeypatch.setattr(pair.link, "recv_chunk", fail)
    pair.scheme.send_async(fill(pair.model, 1))  # send() would read the answer by itself
    assert eventually(lambda: pair.joins == 1, 10.0)
    assert pair.sends(2)
    assert pair.joins == 1
