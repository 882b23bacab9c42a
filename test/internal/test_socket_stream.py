"""Stream sockets that one thread uses while another one closes them."""

from __future__ import annotations

import multiprocessing
import os
import resource
import select
import socket
import threading
import time
from collections.abc import Callable
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest

from weight_update.errors import LinkClosedError, SyncTimeoutError
from weight_update.testing.chunks import in_background
from weight_update.transports import socket_stream
from weight_update.transports.socket_stream import SocketStream, deadline_of

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


def send_descriptors(reads: bool) -> None:
    """Send more descriptors than may be on their way; root has no such limit."""
    if os.geteuid() == 0:
        os.setuid(65534)
    os.closerange(3, 1 << 16)  # of the process of the tests, which may have more
    resource.setrlimit(resource.RLIMIT_NOFILE, (64, 64))
    stream, reader = map(SocketStream, socket.socketpair())
    fd, count = os.memfd_create("sent"), 200

    def read() -> None:
        descriptors: list[int] = []
        for _ in range(count):
            time.sleep(0.001)
            reader.recv_available(1, descriptors)
            os.close(descriptors.pop())

    if reads:
        threading.Thread(target=read, daemon=True).start()
    for _ in range(count):
        stream.send_with_fd(b"x", fd, deadline_of(LONG if reads else 0.1))


def fail_to_send_descriptors() -> None:
    with pytest.raises(SyncTimeoutError, match="ulimit -n"):
        send_descriptors(False)


@pytest.mark.parametrize("reads", [True, False])
def test_more_descriptors_than_may_be_on_their_way(reads: bool) -> None:
    work = partial(send_descriptors, True) if reads else fail_to_send_descriptors
    process = multiprocessing.get_context("fork").Process(target=work)
    process.start()
    process.join(LONG)
    assert process.exitcode == 0
