"""Stream sockets that one thread uses while another one closes them."""

from __future__ import annotations

import select
import socket
import threading
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

from weight_update.errors import LinkClosedError
from weight_update.testing.chunks import in_background
from weight_update.transports import socket_stream
from weight_update.transports.socket_stream import SocketStream

LONG = 10.0


class LatePoll:
    """A poll object that calls ``before`` as the last thing before it waits."""

    def __init__(self, before: Callable[[], None]) -> None:
        self._poll, self._before = select.poll(), before
        self.register = self._poll.register

    def poll(self, milliseconds: float | None) -> Any:
        self._before()
        return self._poll.poll(milliseconds)


def test_a_thread_does_not_wait_for_the_socket_that_got_the_number_of_its_own(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    ours, theirs = socket.socketpair()
    stream, number = SocketStream(ours), ours.fileno()
    others: list[socket.socket] = []

    def close() -> None:
        stream.close()
        others.extend(socket.socketpair())

    late = SimpleNamespace(poll=lambda: LatePoll(close), POLLIN=select.POLLIN, POLLOUT=select.POLLOUT)
    monkeypatch.setattr(socket_stream, "select", late)
    assert stream.wait_readable(LONG), "it waited in vain"
    assert number not in [other.fileno() for other in others]
    assert ours.fileno() == -1, "the last thread that used it has closed it"
    with pytest.raises(LinkClosedError, match="this end was closed"):
        stream.recv(1)
    for other in [theirs, *others]:
        other.close()


def test_close_wakes_a_thread_that_waits() -> None:
    ours, theirs = socket.socketpair()
    stream, ended = SocketStream(ours), threading.Event()

    def read() -> None:
        with pytest.raises(LinkClosedError, match="the other end is gone"):
            stream.recv(1)
        ended.set()

    thread = in_background(read)
    assert not ended.wait(0.1)
    stream.close()
    assert ended.wait(LONG)
    thread.join()
    theirs.close()
    assert ours.fileno() == -1
