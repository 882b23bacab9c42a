"""Signed messages through a store that strangers can reach."""

from __future__ import annotations

import multiprocessing
import os
import socket
import struct
from collections.abc import Iterator

import psutil
import pytest

from weight_update.errors import LinkClosedError, TransportError
from weight_update.transports.c10d import Store
from weight_update.transports.mailbox import Mailbox, UnsignedError, find_store, open_store


@pytest.fixture
def server() -> Iterator[Store]:
    store = open_store("127.0.0.1")
    yield store
    store.close()


def client(server: Store) -> Store:
    return find_store("127.0.0.1", server.port, 5.0)


def test_messages_arrive_in_order(server: Store) -> None:
    there, here = Mailbox(client(server), "box", "token"), Mailbox(server, "box", "token")
    for number in range(20):
        there.put(b"%d" % number)
    assert [here.take(5.0) for _ in range(20)] == [b"%d" % number for number in range(20)]
    assert here.take(0.05) is None
    there.put(b"late")
    assert here.take(5.0) == b"late"
    here.close()


def test_who_listens_on_which_address(server: Store) -> None:
    address = socket.gethostbyname(socket.gethostname())
    if address.startswith("127."):
        pytest.skip("this machine has no other address than loopback")
    with pytest.raises(OSError, match="refused"):
        socket.create_connection((address, server.port), timeout=5.0)


@pytest.mark.parametrize("rubbish", [b"", b"x", b"\0" * 25, b"\1" * 25, b"\xff" * 1000])
def test_rubbish_is_told_from_messages(server: Store, rubbish: bytes) -> None:
    here, there = Mailbox(server, "box", "token"), Mailbox(client(server), "box", "token")
    client(server).queue_push("box", rubbish)
    there.put(b"hello")
    with pytest.raises(UnsignedError):
        here.take(5.0)
    assert here.take(5.0) == b"hello"
    here.close()


def test_another_token(server: Store) -> None:
    here, there = Mailbox(server, "box", "token"), Mailbox(client(server), "box", "another")
    there.put(b"hello")
    with pytest.raises(UnsignedError) as caught:
        here.take(5.0)
    assert caught.value.message == b"hello"
    here.close()


def test_what_comes_again_is_skipped(server: Store) -> None:
    here, there = Mailbox(server, "box", "token"), Mailbox(client(server), "box", "token")
    there.put(b"one")
    stranger = server.connect()
    seen = stranger.pop("box")
    for _ in range(3):
        stranger.push("box", seen, 5.0)
    there.put(b"two")
    assert [here.take(5.0), here.take(5.0)] == [b"one", b"two"]
    here.close()


def test_close_wakes_and_ends(server: Store) -> None:
    here = Mailbox(server, "box", "token")
    assert here.take(0.01) is None
    here.close()
    for _ in range(2):
        with pytest.raises(LinkClosedError):
            here.take(5.0)


def test_a_message_that_is_too_large(server: Store) -> None:
    here, there = Mailbox(server, "box", "token"), Mailbox(client(server), "box", "token")
    with pytest.raises(TransportError, match=r"9\.0 MB .* fewer tensors"):
        there.put(bytes(9_000_000))
    there.put(bytes(8_000_000))
    assert len(here.take(5.0)) == 8_000_000
    here.close()


def test_ends_that_nobody_reads_are_not_remembered_for_ever(server: Store) -> None:
    for number in range(200):
        Mailbox(server, f"box {number}", "token").put(b"the end", last=True)
    assert len(server._unread) == 64


def test_strangers_on_the_port_do_not_stop_it(server: Store) -> None:
    here, there = Mailbox(server, "box", "token"), Mailbox(client(server), "box", "token")
    for data in (b"GET / HTTP/1.0\r\n\r\n", struct.pack("<Q", 1 << 62), b"\xff" * 4096):
        with socket.create_connection(("127.0.0.1", server.port)) as sock:
            sock.sendall(data)
    there.put(b"still here")
    assert here.take(5.0) == b"still here"
    here.close()


def test_a_child_keeps_nothing_open_of_a_store(server: Store) -> None:
    """Else clients of a process that died would wait for as long as one of its children lives."""
    waiting = client(server)
    ours, theirs = socket.socketpair()
    child = multiprocessing.get_context("fork").Process(target=look_and_wait, args=(server.port, theirs))
    child.start()
    try:
        assert ours.recv(1) == b"0"
        waiting.queue_push("box", b"x")
        assert waiting.queue_len("box") == 1  # what was closed there is open here
    finally:
        ours.send(b".")
        child.join(10.0)
        ours.close()
        theirs.close()
        waiting.close()


def look_and_wait(port: int, theirs: socket.socket) -> None:
    sockets = psutil.Process().net_connections("tcp")
    theirs.send(b"%d" % sum(one.laddr.port == port for one in sockets))
    theirs.recv(1)


def test_a_child_keeps_what_is_not_of_a_store(server: Store) -> None:
    with (
        socket.create_server(("127.0.0.1", 0)) as other,
        socket.create_connection(other.getsockname()) as one,
    ):
        reading, writing = os.pipe()
        child = multiprocessing.get_context("fork").Process(target=say, args=(one, writing))
        child.start()
        child.join(10.0)
        os.close(writing)
        assert os.read(reading, 100) == b"from a pipe"
        os.close(reading)
        with other.accept()[0] as accepted:
            accepted.settimeout(5.0)
            assert accepted.recv(13) == b"from a socket"


def say(sock: socket.socket, pipe: int) -> None:
    sock.sendall(b"from a socket")
    os.write(pipe, b"from a pipe")
