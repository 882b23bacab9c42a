"""Errors of a transport's own connections, as the base of reconnecting links passes them on."""

from __future__ import annotations

import errno
import gc
import logging
import threading
import weakref
from typing import Any

import pytest
from pairs import add_one, connect_pair, same
from torch import nn

from weight_update import (
    JoinListener,
    JoinRefusedError,
    LinkClosedError,
    ReconnectingLink,
    SharedMemWeightSyncScheme,
    WeightChunk,
)
from weight_update.testing.chunks import hello
from weight_update.testing.processes import wait_until
from weight_update.transports.shared_memory.transport import SlotStream


class Connection:
    """A connection on which nothing arrives, and whose other end takes nothing."""

    def __init__(self, ended: threading.Event) -> None:
        self.ended = ended

    def send(self, chunk: WeightChunk, timeout: float | None) -> None:
        raise OSError("it is gone")

    def recv(self, timeout: float | None, allocate: Any) -> WeightChunk | None:
        return None

    def close(self) -> None:
        self.ended.set()


class Link(ReconnectingLink[Connection]):
    def __init__(self, *, joins: bool, error: Exception | None = None) -> None:
        super().__init__(joins=joins)
        self.error = error

    def connect(self, timeout: float | None) -> Connection:
        assert self.error is not None
        raise self.error

    def accept(self, timeout: float | None) -> Connection | None:
        if self.error is not None:
            raise self.error
        return super().accept(timeout)


@pytest.mark.parametrize("number", [errno.EMFILE, errno.ENOMEM])
def test_a_shortage_is_not_the_end_of_the_sender(number: int) -> None:
    remedy = "; raise the process's limit of open files .ulimit -n.$" if number == errno.EMFILE else "$"
    with pytest.raises(OSError, match="short" + remedy) as caught:
        Link(joins=True, error=OSError(number, "short")).restart(1.0)
    assert not isinstance(caught.value, LinkClosedError)
    assert caught.value.errno == number


@pytest.mark.parametrize("error", [EOFError(), ConnectionRefusedError("nobody")])
def test_an_end_that_is_gone(error: Exception) -> None:
    with pytest.raises(LinkClosedError):
        Link(joins=True, error=error).restart(1.0)
    with pytest.raises(LinkClosedError):
        Link(joins=False, error=error).recv_chunk(1.0)


class Listener(JoinListener[Link]):
    """A listener to which workers come from a list."""

    def __init__(self, late_joiners: Any = None) -> None:
        super().__init__("token", {}, late_joiners)
        self.coming: list[tuple[Connection, WeightChunk]] = []

    def accept(self) -> tuple[Connection, WeightChunk] | None:
        self._closed.wait(0.01)
        return self.coming.pop() if self.coming else None

    def wake(self) -> None:
        pass


def refuse(worker_idx: int) -> Link:
    raise JoinRefusedError("no such worker")


def fail(worker_idx: int) -> Link:
    raise RuntimeError("can't start new thread")


@pytest.mark.parametrize("late_joiners", [refuse, fail])
def test_a_connection_that_is_not_admitted_is_closed_and_forgotten(
    late_joiners: Any, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.CRITICAL, logger=__name__)  # records keep errors, whose frames keep connections
    listener, ended = Listener(late_joiners), threading.Event()
    connection = Connection(ended)
    listener.coming.append((connection, hello("token")))
    gone = weakref.ref(connection)
    del connection
    listener.start()
    try:
        assert ended.wait(10.0)
        wait_until(lambda: gc.collect() >= 0 and gone() is None, 10.0)
        expected = "no such worker" if late_joiners is refuse else "can't start new thread"
        assert expected in next(iter(listener.refusals))
    finally:
        listener.close()


class Interrupted(Connection):
    """A connection on which a signal handler interrupts the first call that sends."""

    def send(self, chunk: WeightChunk, timeout: float | None) -> None:
        raise KeyboardInterrupt


class Reader(Link):
    """A receiver's end, with the connections that it has made."""

    def __init__(self) -> None:
        super().__init__(joins=True)
        self.made: list[Connection] = []

    def connect(self, timeout: float | None) -> Connection:
        self.made.append(Interrupted(threading.Event()))
        return self.made[-1]


def test_a_hello_that_was_interrupted_is_sent_again_on_another_connection() -> None:
    """A part of it may have been sent, and the sender would wait for the rest."""
    link = Reader()
    for _ in range(2):
        link.restart(1.0)
        with pytest.raises(KeyboardInterrupt):
            link.send_chunk(hello("token"), 1.0)
    assert [one.ended.is_set() for one in link.made] == [True, False]
    link.close()


def test_a_worker_comes_back_after_an_error_of_the_sender(monkeypatch: pytest.MonkeyPatch) -> None:
    """The memory that was lacking may be there when it comes back."""
    source, target, fails, recv = nn.Linear(2, 2), nn.Linear(2, 2), threading.Event(), SlotStream.recv

    def recv_or_fail(self: SlotStream, *arguments: Any) -> WeightChunk | None:
        if fails.is_set() and threading.current_thread().name == "weight_update-worker-0":
            fails.clear()
            raise MemoryError("no room")
        return recv(self, *arguments)

    monkeypatch.setattr(SlotStream, "recv", recv_or_fail)
    sender = SharedMemWeightSyncScheme(timeout=20.0)
    with sender, connect_pair(sender, source, target):
        fails.set()
        sender.send_async()
        wait_until(lambda: sender.worker_versions == {0: 1} and not fails.is_set())
        add_one(source)
        sender.send()
        assert same(source, target)
