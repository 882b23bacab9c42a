"""Signed messages through a store that strangers can reach."""

from __future__ import annotations

import contextlib
import errno
import multiprocessing
import os
import socket
import struct
import threading
import time
import uuid
from collections.abc import Iterator

import psutil
import pytest

from weight_update.errors import LinkClosedError, SyncTimeoutError, TransportError
from weight_update.transports.distributed.local_connection import LocalConnection
from weight_update.transports.distributed.local_rendezvous import LocalListener, call_local
from weight_update.transports.distributed.signed_queue import (
    SignedQueue,
    UnsignedError,
    find_store,
    open_store,
)
from weight_update.transports.distributed.store import Store
from weight_update.transports.inherited_sockets import listening_sockets
from weight_update.wire.frames import Kind, WeightChunk


@pytest.fixture
def server() -> Iterator[Store]:
    store = open_store("127.0.0.1")
    yield store
    store.close()


def client(server: Store) -> Store:
    return find_store("127.0.0.1", server.port, 5.0)


def test_messages_arrive_in_order(server: Store) -> None:
    there, here = SignedQueue(client(server), "box", "token"), SignedQueue(server, "box", "token")
    for number in range(20):
        there.put(b"%d" % number)
    assert [here.take(5.0) for _ in range(20)] == [b"%d" % number for number in range(20)]
    assert here.take(0.05) is None
    there.put(b"late")
    assert here.take(5.0) == b"late"
    here.close()


def test_last_words_of_an_end_that_is_gone_are_read_first(server: Store) -> None:
    there, here = SignedQueue(client(server), "box", "token"), SignedQueue(server, "box", "token")
    there.put(b"first")
    there.put(b"last", last=True)
    here.await_last(5.0)
    here.end(LinkClosedError("it is gone"))
    assert [here.take(5.0) for _ in range(2)] == [b"first", b"last"]
    with pytest.raises(LinkClosedError, match="it is gone"):
        here.take(5.0)


def test_who_listens_on_which_address(server: Store) -> None:
    address = socket.gethostbyname(socket.gethostname())
    if address.startswith("127."):
        pytest.skip("this machine has no other address than loopback")
    with pytest.raises(OSError, match="refused"):
        socket.create_connection((address, server.port), timeout=5.0)


def test_a_port_that_refuses_is_told_from_a_network_without_a_way(monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))  # and does not listen
        port = free.getsockname()[1]
        start = time.monotonic()
        with pytest.raises(LinkClosedError, match=r"refused.*may have shut down or died; .*give it address="):
            find_store("127.0.0.1", port, 0.3)
        assert 0.1 < time.monotonic() - start < 5.0

    def create_connection(*_: object) -> socket.socket:
        raise OSError(errno.EHOSTUNREACH, "No route to host")

    monkeypatch.setattr(socket, "create_connection", create_connection)
    with pytest.raises(LinkClosedError, match=r"No route to host\)\); if it is on another machine, give it"):
        find_store("127.0.0.1", port, 0.3)


@pytest.mark.parametrize("rubbish", [b"", b"x", b"\0" * 25, b"\1" * 25, b"\xff" * 1000])
def test_rubbish_is_told_from_messages(server: Store, rubbish: bytes) -> None:
    here, there = SignedQueue(server, "box", "token"), SignedQueue(client(server), "box", "token")
    client(server).queue_push("box", rubbish)
    there.put(b"hello")
    with pytest.raises(UnsignedError):
        here.take(5.0)
    assert here.take(5.0) == b"hello"
    here.close()


def test_another_token(server: Store) -> None:
    here, there = SignedQueue(server, "box", "token"), SignedQueue(client(server), "box", "another")
    there.put(b"hello")
    with pytest.raises(UnsignedError) as caught:
        here.take(5.0)
    assert caught.value.message == b"hello"
    here.close()


def test_what_comes_again_is_skipped(server: Store) -> None:
    here, there = SignedQueue(server, "box", "token"), SignedQueue(client(server), "box", "token")
    there.put(b"one")
    stranger = server.connect()
    seen = stranger.pop("box")
    for _ in range(3):
        stranger.push("box", seen, 5.0)
    there.put(b"two")
    assert [here.take(5.0), here.take(5.0)] == [b"one", b"two"]
    here.close()


def test_close_wakes_and_ends(server: Store) -> None:
    here = SignedQueue(server, "box", "token")
    assert here.take(0.01) is None
    here.close()
    for _ in range(2):
        with pytest.raises(LinkClosedError):
            here.take(5.0)


def test_a_message_that_is_too_large(server: Store) -> None:
    here, there = SignedQueue(server, "box", "token"), SignedQueue(client(server), "box", "token")
    with pytest.raises(TransportError, match=r"9\.0 MB .* fewer tensors"):
        there.put(bytes(9_000_000))
    there.put(bytes(8_000_000))
    assert len(here.take(5.0)) == 8_000_000
    here.close()


def test_ends_that_nobody_reads_are_not_remembered_for_ever(server: Store) -> None:
    for number in range(200):
        SignedQueue(server, f"box {number}", "token").put(b"the end", last=True)
    assert len(server._unread) == 64


def test_strangers_on_the_port_do_not_stop_it(server: Store) -> None:
    here, there = SignedQueue(server, "box", "token"), SignedQueue(client(server), "box", "token")
    for data in (b"GET / HTTP/1.0\r\n\r\n", struct.pack("<Q", 1 << 62), b"\xff" * 4096):
        with socket.create_connection(("127.0.0.1", server.port)) as sock:
            sock.sendall(data)
    there.put(b"still here")
    assert here.take(5.0) == b"still here"
    here.close()


def test_a_child_keeps_nothing_open_of_a_store(server: Store) -> None:
    """Otherwise clients of a dead process would wait as long as one of its children lives."""
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


def test_a_store_that_cannot_be_opened_listens_no_more(monkeypatch: pytest.MonkeyPatch) -> None:
    before = listening_sockets()

    def fail(*_: object) -> None:
        raise LinkClosedError("no descriptors")

    monkeypatch.setattr("weight_update.transports.distributed.store.StoreClient", fail)
    try:
        open_store("127.0.0.1")
    except LinkClosedError:
        assert listening_sockets() == before


def test_a_put_waits_no_longer_for_another_thread_than_it_may(server: Store) -> None:
    signed_queue = SignedQueue(server, "q", "token")
    begun, go_on = threading.Event(), threading.Event()

    def push(*_: object) -> None:
        begun.set()
        go_on.wait(5.0)

    server.queue_push = push  # type: ignore[method-assign] # stands for a server that does not read
    other = threading.Thread(target=signed_queue.put, args=(b"first",))
    other.start()
    begun.wait(5.0)
    start = time.monotonic()
    with pytest.raises(SyncTimeoutError):
        signed_queue.put(b"second", timeout=0.1)
    assert time.monotonic() - start < 3.0
    go_on.set()
    other.join()
    assert signed_queue.count == 1


def test_a_send_waits_no_longer_for_the_answer_than_it_may(server: Store) -> None:
    name = uuid.uuid4().hex
    with contextlib.closing(LocalListener(name, "token")):  # it never answers
        connection = LocalConnection(call_local(name, "token"), server, name, "token")
        reader = threading.Thread(target=receive_until_closed, args=(connection,))
        reader.start()
        time.sleep(0.1)  # until it waits
        start = time.monotonic()
        sender = threading.Thread(target=send_in_vain, args=(connection,))
        sender.start()
        sender.join(3.0)
        took = time.monotonic() - start
        connection.close()
        reader.join()
        sender.join()
    assert took < 3.0


def receive_until_closed(connection: LocalConnection) -> None:
    with pytest.raises(LinkClosedError):
        connection.recv(None, None)


def send_in_vain(connection: LocalConnection) -> None:
    with pytest.raises(SyncTimeoutError):
        connection.send(WeightChunk(Kind.REFUSED, {"reason": "", "problems": []}), 0.1)
