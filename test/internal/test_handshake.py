"""Both ends prove that they know the token, and the token is never sent."""

from __future__ import annotations

import os
import socket
import struct
import time
from collections.abc import Iterator
from contextlib import closing
from multiprocessing import get_context

import pytest

from weight_update.errors import FormatError, JoinRefusedError, LinkClosedError, SyncTimeoutError
from weight_update.testing.chunks import in_background
from weight_update.testing.processes import eventually
from weight_update.transports.handshake import _REPLY, _REQUEST, answer_caller, prove_token
from weight_update.transports.socket_stream import SocketStream

TOKEN = "confidential"
REQUEST_BYTES = _REQUEST.size


@pytest.fixture
def ends() -> Iterator[tuple[SocketStream, SocketStream]]:
    """Return a connected caller and listener."""
    caller, listener = (SocketStream(sock) for sock in socket.socketpair())
    with closing(caller), closing(listener):
        yield caller, listener


def read(stream: SocketStream, size: int) -> bytes:
    return stream.recv(size, soon())


def soon() -> float:
    return time.monotonic() + 5.0


def answer(listener: SocketStream) -> bytes:
    """Act as a listener; return the key."""
    for verified in answer_caller(listener, TOKEN, "here"):
        if verified is not None:
            last, key = verified
            listener.send(last, soon())
            return key
        assert listener.wait_readable(5.0)
    raise AssertionError("the handshake has no end")


def greeting() -> bytes:
    """Return the first message of any listener."""
    return b"WUH1\0" + os.urandom(32)


def call(
    caller: SocketStream, token: str = TOKEN, context: str = "here"
) -> tuple[list[bytes], list[Exception]]:
    """Act as a caller in a thread; its key or its error is added to one of the lists."""
    keys: list[bytes] = []
    errors: list[Exception] = []

    def run() -> None:
        try:
            keys.append(prove_token(caller, token, context, soon()))
        except Exception as error:  # noqa: BLE001 - the test looks at it
            errors.append(error)
            caller.close()

    in_background(run)
    return keys, errors


def settled(*lists: list) -> bool:
    return eventually(lambda: any(lists), 5.0)


def test_both_ends_get_one_key(ends) -> None:
    keys, errors = call(ends[0])
    key = answer(ends[1])
    assert settled(keys, errors)
    assert keys == [key]
    assert len(key) == 32


def test_each_connection_has_another_key() -> None:
    found = set()
    for _ in range(3):
        caller, listener = (SocketStream(sock) for sock in socket.socketpair())
        with closing(caller), closing(listener):
            call(caller)
            found.add(answer(listener))
    assert len(found) == 3


@pytest.mark.parametrize(("token", "context"), [("another", "here"), (TOKEN, "elsewhere"), ("", "here")])
def test_a_wrong_token_is_refused_at_both_ends(ends, token: str, context: str) -> None:
    keys, errors = call(ends[0], token, context)
    with pytest.raises(JoinRefusedError, match="wrong token"):
        answer(ends[1])
    assert settled(keys, errors)
    assert isinstance(errors[0], JoinRefusedError)
    assert "wrong token" in str(errors[0])


def test_who_answers_must_know_the_token(ends) -> None:
    """A process that took the listener's place learns nothing and is not believed."""
    caller, stranger = ends
    keys, errors = call(caller)
    first = greeting()
    stranger.send(first, soon())
    request = read(stranger, REQUEST_BYTES)
    assert TOKEN.encode() not in request
    stranger.send(first[:5] + request[36:], soon())  # the caller's own proof, sent back
    assert settled(keys, errors)
    assert isinstance(errors[0], JoinRefusedError)
    assert "does not know the token" in str(errors[0])


def test_a_proof_is_good_for_one_connection_only(ends) -> None:
    caller, listener = ends
    keys, _ = call(caller)
    listener.send(greeting(), soon())
    request = read(listener, REQUEST_BYTES)
    stranger, other = (SocketStream(sock) for sock in socket.socketpair())
    with closing(stranger), closing(other):
        stranger.send(request, soon())
        with pytest.raises(JoinRefusedError, match="wrong token"):
            answer(other)
    assert not keys


def test_a_silent_listener_costs_no_more_than_the_timeout(ends) -> None:
    start = time.monotonic()
    with pytest.raises(SyncTimeoutError):
        prove_token(ends[0], TOKEN, "here", start + 0.1)
    assert time.monotonic() - start < 5.0


def test_a_dripping_listener_costs_no_more_than_the_timeout(ends) -> None:
    caller, listener = ends
    ending = time.monotonic() + 0.3

    def drip() -> None:
        for byte in greeting():
            time.sleep(0.25)
            try:
                listener.send(bytes([byte]), None)
            except LinkClosedError:
                return

    in_background(drip)
    with pytest.raises(SyncTimeoutError):
        prove_token(caller, TOKEN, "here", ending)
    assert time.monotonic() < ending + 5.0


@pytest.mark.parametrize("says", [b"HTTP/1.1 400 Bad Request\r\nConnection: close\r\n\r\n", bytes(100)])
def test_something_else_listens(ends, says: bytes) -> None:
    ends[1].send(says, soon())
    with pytest.raises(JoinRefusedError, match="not a listener of this library"):
        prove_token(ends[0], TOKEN, "here", soon())


def test_something_else_calls(ends) -> None:
    caller, listener = ends
    handshake = answer_caller(listener, TOKEN, "here")
    next(handshake)
    caller.send(b"WU", soon())
    next(handshake)
    caller.send(b"PD", soon())
    with pytest.raises(FormatError, match="did not send a join request"):
        next(handshake)


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can start a process of another user")
def test_a_listener_of_another_user_is_not_told_anything() -> None:
    heard, theirs = get_context("fork").Pipe(duplex=False)
    process = get_context("fork").Process(target=listen_as_another_user, args=(theirs,))
    process.start()
    theirs.close()
    with closing(socket.socket(socket.AF_UNIX)) as sock, closing(heard):
        sock.connect(heard.recv())
        with pytest.raises(JoinRefusedError, match="user 65534"):
            prove_token(SocketStream(sock), TOKEN, "here", soon())
        sock.close()
        assert heard.recv() == b""
    process.join()


def listen_as_another_user(pipe) -> None:
    os.setuid(65534)
    with socket.socket(socket.AF_UNIX) as sock:
        sock.bind("\0weight_update-test-" + os.urandom(8).hex())
        sock.listen()
        pipe.send(sock.getsockname())
        with sock.accept()[0] as caller:
            pipe.send(caller.recv(1000))


def test_the_messages_have_the_size_that_the_manual_tells() -> None:
    assert _REPLY.size == struct.calcsize("<4sB32s") == 37
    assert REQUEST_BYTES == struct.calcsize("<4s32s32s") == 68
