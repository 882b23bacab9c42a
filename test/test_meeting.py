"""Two processes of one host find each other, and nobody else gets in between."""

import multiprocessing
import socket
import time
import uuid
from collections.abc import Iterator
from contextlib import ExitStack, closing, suppress

import pytest

from weight_update.errors import JoinRefusedError, LinkClosedError, SyncTimeoutError
from weight_update.transports.distributed.local_rendezvous import Call, Ear, call


@pytest.fixture
def name() -> str:
    return uuid.uuid4().hex


@pytest.fixture
def ear(name: str) -> Iterator[Ear]:
    with closing(Ear(name, "token")) as ear:
        yield ear


def calling(name: str, token: str) -> Call:
    made = call(name, token)
    assert made is not None
    return made


def test_they_meet(name: str, ear: Ear) -> None:
    made = calling(name, "token")
    with closing(made.stream) as caller, closing(ear.answer()) as answered:
        made.await_answer(None)
        caller.send(b"hello", None)
        got = bytearray(5)
        answered.recv_into(memoryview(got))
    assert got == b"hello"


def test_strangers_who_call_first_are_sent_away(name: str, ear: Ear) -> None:
    with closing(socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)) as silent:
        silent.connect(f"\0weight_update-{name}")
        other, right = calling(name, "another token"), calling(name, "token")
        with closing(other.stream), closing(right.stream), closing(ear.answer()):
            right.await_answer(time.monotonic() + 5.0)
            for stranger in (silent, other.stream.sock):
                assert hears_the_end(stranger)


def test_nobody_who_may_has_called(name: str, ear: Ear) -> None:
    with closing(calling(name, "another token").stream), pytest.raises(LinkClosedError, match="gone"):
        ear.answer()


@pytest.mark.parametrize(
    "says",
    [bytes(32), b"", b"half", None],
    ids=["another proof", "nothing", "half a proof", "the caller's proof"],
)
def test_who_listens_there_must_know_the_token(name: str, says: bytes | None) -> None:
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


def test_nobody_listens(name: str, ear: Ear) -> None:
    ear.close()
    with pytest.raises(JoinRefusedError, match="different host="):
        call(name, "token")


def test_there_is_no_room(name: str, ear: Ear) -> None:
    with ExitStack() as strangers:
        for _ in range(100):
            stranger = strangers.enter_context(closing(socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)))
            stranger.setblocking(False)
            with suppress(BlockingIOError):
                stranger.connect(f"\0weight_update-{name}")
        assert call(name, "token") is None


def test_a_child_forked_meanwhile_keeps_no_end_open(name: str, ear: Ear) -> None:
    pipe, theirs = multiprocessing.Pipe()
    made = calling(name, "token")
    with closing(made.stream) as caller, closing(ear.answer()) as answered:
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
