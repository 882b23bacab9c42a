"""Two processes of one host connect, and no third process can interfere."""

import multiprocessing
import socket
import time
import uuid
from collections.abc import Iterator
from contextlib import ExitStack, closing, suppress

import pytest

from weight_update.errors import JoinRefusedError, LinkClosedError, SyncTimeoutError
from weight_update.transports.distributed.local_rendezvous import LocalCall, LocalListener, call_local


@pytest.fixture
def name() -> str:
    return uuid.uuid4().hex


@pytest.fixture
def listener(name: str) -> Iterator[LocalListener]:
    with closing(LocalListener(name, "token")) as listener:
        yield listener


def calling(name: str, token: str) -> LocalCall:
    made = call_local(name, token)
    assert made is not None
    return made


def test_both_ends_connect(name: str, listener: LocalListener) -> None:
    made = calling(name, "token")
    with closing(made.stream) as caller, closing(listener.answer()) as answered:
        made.await_answer(None)
        caller.send(b"hello", None)
        got = answered.recv(5)
    assert got == b"hello"


def test_callers_without_the_token_are_disconnected(name: str, listener: LocalListener) -> None:
    with closing(socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)) as silent:
        silent.connect(f"\0weight_update-{name}")
        other, right = calling(name, "another token"), calling(name, "token")
        with closing(other.stream), closing(right.stream), closing(listener.answer()):
            right.await_answer(time.monotonic() + 5.0)
            for stranger in (silent, other.stream.sock):
                assert hears_the_end(stranger)


def test_no_authenticated_caller(name: str, listener: LocalListener) -> None:
    with closing(calling(name, "another token").stream), pytest.raises(LinkClosedError, match="gone"):
        listener.answer()


@pytest.mark.parametrize(
    "says",
    [bytes(32), b"", b"half", None],
    ids=["another proof", "nothing", "half a proof", "the caller's proof"],
)
def test_the_listener_must_know_the_token(name: str, says: bytes | None) -> None:
    with closing(socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)) as stranger:
        stranger.bind(f"\0weight_update-{name}")
        stranger.listen()
        made = calling(name, "token")
        with closing(made.stream), closing(stranger.accept()[0]) as answered:
            request = answered.recv(1000)
            assert b"token" not in request
            answered.sendall(request[32:] if says is None else says)
            late = says in (b"", b"half")
            with pytest.raises(
                SyncTimeoutError if late else LinkClosedError, match="in time" if late else "token"
            ):
                made.await_answer(time.monotonic() + 0.1)


def test_nobody_listens(name: str, listener: LocalListener) -> None:
    listener.close()
    with pytest.raises(JoinRefusedError, match="different host="):
        call_local(name, "token")


def test_there_is_no_room(name: str, listener: LocalListener) -> None:
    with ExitStack() as strangers:
        for _ in range(100):
            stranger = strangers.enter_context(closing(socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)))
            stranger.setblocking(False)
            with suppress(BlockingIOError):
                stranger.connect(f"\0weight_update-{name}")
        assert call_local(name, "token") is None


def test_a_child_forked_meanwhile_keeps_no_end_open(name: str, listener: LocalListener) -> None:
    pipe, theirs = multiprocessing.Pipe()
    made = calling(name, "token")
    with closing(made.stream) as caller, closing(listener.answer()) as answered:
        made.await_answer(None)
        child = multiprocessing.get_context("fork").Process(target=theirs.recv)
        child.start()
        caller.close()
        assert answered.wait_readable(5.0)
        assert hears_the_end(answered.sock)
    pipe.send(None)
    child.join()
    pipe.close()
    theirs.close()


def hears_the_end(sock: socket.socket) -> bool:
    try:
        return sock.recv(1) == b""
    except ConnectionResetError:  # what it had said was not read
        return True
