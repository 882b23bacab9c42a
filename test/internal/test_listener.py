"""A listener admits processes that know the token, whatever strangers do at the same time."""

from __future__ import annotations

import errno
import logging
import os
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing
from functools import partial
from multiprocessing import get_context
from multiprocessing.connection import Connection
from typing import Any

import pytest
from background import repeating
from marks import slow

from weight_update.errors import JoinRefusedError, LinkClosedError, undo_on_error
from weight_update.testing.chunks import hello
from weight_update.testing.processes import eventually
from weight_update.transports import listener as module
from weight_update.transports.handshake import prove_token
from weight_update.transports.listener import Listener
from weight_update.transports.shared_memory.transport import SharedMemListener, SharedMemTransport
from weight_update.transports.socket_stream import SocketStream

TOKEN = "confidential"
LONG = 10.0


class Service:
    """A listener whose connections echo their first four bytes."""

    def __init__(self, family: int, start: bool = True) -> None:
        sock = socket.socket(family)
        sock.bind(
            "\0weight_update-test-" + os.urandom(8).hex() if family == socket.AF_UNIX else ("127.0.0.1", 0)
        )
        sock.listen(128)
        self.family, self.address, self.sock = family, sock.getsockname(), sock
        self.listener = Listener(sock, TOKEN, "test", echo, "test-listener", logging.getLogger("test"))
        if start:
            self.listener.start()

    def stranger(self) -> socket.socket:
        sock = socket.socket(self.family)
        with undo_on_error(sock.close):
            sock.connect(self.address)
        sock.settimeout(LONG)
        return sock

    def join(self, token: str = TOKEN) -> SocketStream:
        stream = SocketStream(self.stranger())
        with undo_on_error(stream.close):
            prove_token(stream, token, "test", time.monotonic() + LONG)
        return stream

    def admits(self) -> bool:
        """Return whether a caller that knows the token is served."""
        with closing(self.join()) as stream:
            stream.send(b"ping", None)
            return read(stream) == b"ping"


def echo(stream: SocketStream, key: bytes, deadline: float) -> None:
    assert len(key) == 32
    data = stream.recv(4, deadline)
    if data == b"fail":
        raise RuntimeError("the server has a bug")
    stream.send(data, deadline)
    stream.close()


def read(stream: SocketStream) -> bytes:
    return stream.recv(4, time.monotonic() + LONG)


def ends(sock: socket.socket) -> bool:
    """Return whether the other end closes the connection."""
    try:
        while sock.recv(1000):
            pass
    except ConnectionResetError:
        pass
    except TimeoutError:
        return False
    return True


@pytest.fixture(params=[socket.AF_UNIX, socket.AF_INET], ids=["unix", "tcp"])
def service(request: pytest.FixtureRequest) -> Iterator[Service]:
    before = set(threading.enumerate())
    served = Service(request.param)
    yield served
    served.listener.close()
    eventually(lambda: set(threading.enumerate()) <= before)
    assert set(threading.enumerate()) <= before


def test_who_knows_the_token_is_served(service: Service) -> None:
    assert service.admits()
    assert service.admits()


def test_a_wrong_token_is_refused_at_both_ends(service: Service, caplog: pytest.LogCaptureFixture) -> None:
    with pytest.raises(JoinRefusedError, match="wrong token"):
        service.join("another")
    assert eventually(lambda: "refused a connection: wrong token" in caplog.text)
    assert TOKEN not in caplog.text
    assert service.admits()


def test_a_connection_that_ends_at_once_may_be_no_worker(
    service: Service, caplog: pytest.LogCaptureFixture
) -> None:
    """A scanner of ports is an example."""
    service.stranger().close()
    assert eventually(lambda: "has timed out, or it is no worker" in caplog.text)


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can start a process of another user")
def test_another_user_is_refused_though_it_knows_the_token(caplog: pytest.LogCaptureFixture) -> None:
    service = Service(socket.AF_UNIX)
    ours, theirs = get_context("fork").Pipe(duplex=False)
    process = get_context("fork").Process(target=join_as_another_user, args=(service, theirs))
    process.start()
    theirs.close()
    with closing(ours):
        assert "run both as one user" in ours.recv()
    process.join()
    assert eventually(lambda: "belongs to user 65534" in caplog.text)
    service.listener.close()


def join_as_another_user(service: Service, pipe: Connection) -> None:
    os.setuid(65534)
    try:
        pipe.send(str(service.join()))
    except JoinRefusedError as error:
        pipe.send(str(error))


@pytest.mark.parametrize(
    "service", [socket.AF_UNIX, slow(socket.AF_INET)], indirect=True, ids=["unix", "tcp"]
)
def test_many_idle_connections_cost_little(service: Service) -> None:
    threads, descriptors = threading.active_count(), open_descriptors()
    with ExitStack() as stack:
        strangers = [stack.enter_context(service.stranger()) for _ in range(400)]
        assert service.admits()
        assert threading.active_count() <= threads + 1  # that of who was admitted may just be ending
        assert open_descriptors() <= descriptors + 400 + module.MAX_PENDING + 1
        assert ends(strangers[0])  # the oldest had to go
    assert service.admits()


def test_those_who_never_show_the_token_are_closed(service: Service, monkeypatch: pytest.MonkeyPatch) -> None:
    """Sending single bytes does not extend the time."""
    monkeypatch.setattr(module, "_JOIN_SECONDS", 0.5)
    start = time.monotonic()
    with service.stranger() as silent, service.stranger() as dripping:
        drops = iter(b"WUH1" + bytes(1000))
        assert eventually(lambda: not sent(dripping, bytes([next(drops)])))
        assert ends(silent)
    assert time.monotonic() - start < LONG
    assert service.admits()


def test_the_first_request_is_due_as_well(service: Service, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_JOIN_SECONDS", 0.5)
    start = time.monotonic()
    with closing(service.join()) as stream:
        stream.send(b"pin", None)
        assert ends_soon(stream)
    assert time.monotonic() - start < LONG


def test_a_flood_keeps_nobody_out(service: Service) -> None:
    def flood(stack: ExitStack) -> None:
        try:
            stack.enter_context(service.stranger()).send(b"WUH1")
        except OSError:
            stack.close()

    with ExitStack() as one, ExitStack() as other, repeating(partial(flood, one), partial(flood, other)):
        assert eventually(lambda: tried(service.admits))


@pytest.mark.parametrize(
    "number",
    [errno.EMFILE, slow(errno.ENOMEM), errno.ECONNABORTED, slow(errno.EPERM)],
)
def test_errors_of_accept_end_nothing(service: Service, monkeypatch: pytest.MonkeyPatch, number: int) -> None:
    failing = Failing(service.listener._sock, OSError(number, os.strerror(number)), times=5)
    monkeypatch.setattr(service.listener, "_sock", failing)
    with service.stranger():  # wakes the thread
        assert eventually(lambda: failing.times == 0)
        assert service.admits()
    monkeypatch.undo()
    if number == errno.EMFILE:
        assert any("ulimit -n" in reason for reason in service.listener.refusals)


def test_an_unexpected_error_ends_nothing(
    service: Service, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    failing = Failing(service.listener._sock, ValueError("nobody thought of this"), times=2)
    monkeypatch.setattr(service.listener, "_sock", failing)
    with service.stranger():
        assert eventually(lambda: failing.times == 0)
        assert service.admits()
    monkeypatch.undo()
    assert eventually(lambda: "nobody thought of this" in caplog.text)


def test_an_error_of_the_service_ends_one_connection(
    service: Service, caplog: pytest.LogCaptureFixture
) -> None:
    with closing(service.join()) as stream:
        stream.send(b"fail", None)
        assert ends_soon(stream)
    assert service.admits()
    assert eventually(lambda: "the server has a bug" in caplog.text)


def test_too_many_threads(service: Service, monkeypatch: pytest.MonkeyPatch) -> None:
    """The caller gets no admission, and may retry."""

    def start(self: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", start)
        with pytest.raises(LinkClosedError):
            service.join()
    assert service.admits()


def test_strangers_cannot_fill_the_log(service: Service, caplog: pytest.LogCaptureFixture) -> None:
    for _ in range(50):
        with service.stranger() as stranger:
            stranger.send(b"GET / HTTP/1.1")
            assert ends(stranger)
    assert service.admits()
    assert len(caplog.records) <= 20


def test_close_ends_all(service: Service) -> None:
    with service.stranger() as stranger, closing(service.join()) as admitted:
        service.listener.close()
        service.listener.close()
        assert ends(stranger)
        assert ends_soon(admitted)
        with pytest.raises(ConnectionRefusedError):
            service.stranger()


def test_a_listener_that_was_never_started() -> None:
    service = Service(socket.AF_UNIX, start=False)
    with service.stranger() as stranger:
        service.listener.close()
        assert ends(stranger)


def test_a_refusal_is_told_though_the_worker_has_left() -> None:
    """The reason is noted, and not that the answer could not be sent."""

    def refuse(worker: int) -> SharedMemTransport:
        raise JoinRefusedError(f"no place for worker {worker}")

    listener = SharedMemListener(TOKEN, {}, refuse)
    ours, theirs = map(SocketStream, socket.socketpair())
    with closing(listener), closing(ours), closing(theirs):
        theirs.send(hello().encode(), None)
        theirs.close()
        with pytest.raises(JoinRefusedError, match="no place for worker 0"):
            listener._admit(ours, b"", time.monotonic() + LONG)


class Failing:
    """A listening socket whose ``accept`` fails a given number of times."""

    def __init__(self, sock: socket.socket, error: Exception, times: int) -> None:
        self._sock, self._error, self.times = sock, error, times

    def accept(self) -> Any:
        if self.times:
            self.times -= 1
            raise self._error
        return self._sock.accept()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._sock, name)


def ends_soon(stream: SocketStream) -> bool:
    stream.sock.settimeout(LONG)
    return ends(stream.sock)


def sent(sock: socket.socket, data: bytes) -> bool:
    try:
        sock.send(data)
    except ConnectionError:
        return False
    return True


def tried(action: Callable[[], bool]) -> bool:
    try:
        return action()
    except OSError:  # all errors of connections are of this kind
        return False


def open_descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))
