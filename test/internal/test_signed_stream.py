"""Signed messages between two ends that know one token, over a connection that strangers may change."""

from __future__ import annotations

import errno
import multiprocessing
import os
import resource
import socket
import struct
import threading
import time
from collections.abc import Iterator
from contextlib import closing, suppress
from typing import Any

import pytest
from stream_parts import signed_pair

from weight_update.errors import FormatError, LinkClosedError, SyncTimeoutError
from weight_update.testing.chunks import in_background
from weight_update.testing.processes import eventually
from weight_update.transports import signed_stream
from weight_update.transports.signed_stream import MAX_JSON_BYTES, SignedStream, dial, listen
from weight_update.transports.socket_stream import SocketStream, deadline_of

KEY = bytes(range(32))
LONG = 10.0
LARGEST = 1 << 20
FRONT = 36


class Ends:
    """The two ends of a connection, with the sockets of a stranger between them.

    Attributes:
        from_caller: socket on which the stranger reads the bytes that the caller sends.
        to_listener: socket on which the stranger writes to the listener.
    """

    def __init__(self) -> None:
        ours, self.from_caller = socket.socketpair()
        self.to_listener, theirs = socket.socketpair()
        self.caller = SignedStream(SocketStream(ours), KEY, listener=False)
        self.listener = SignedStream(SocketStream(theirs), KEY, listener=True)
        self.from_caller.settimeout(LONG)
        self.to_listener.settimeout(LONG)

    def said(self, body: bytes) -> bytes:
        """Return the bytes in which the caller sends ``body``."""
        self.caller.send(body, deadline_of(LONG))
        return self.from_caller.recv(FRONT + len(body), socket.MSG_WAITALL)

    def heard(self) -> bytes:
        return self.listener.receive(deadline_of(LONG), LARGEST)

    def close(self) -> None:
        for one in (self.caller, self.listener, self.from_caller, self.to_listener):
            one.close()


@pytest.fixture
def ends() -> Iterator[Ends]:
    with closing(Ends()) as ends:
        yield ends


@pytest.fixture
def pair() -> Iterator[tuple[SignedStream, SignedStream]]:
    """A caller and a listener, connected."""
    caller, listener = signed_pair(key=KEY)
    with closing(caller), closing(listener):
        yield caller, listener


def test_messages_arrive_in_order_both_ways(pair: tuple[SignedStream, SignedStream]) -> None:
    for one, other in (pair, pair[::-1]):
        for number in range(20):
            one.send(b"%d" % number, deadline_of(LONG))
        assert [other.receive(deadline_of(LONG), 2) for _ in range(20)] == [b"%d" % n for n in range(20)]
        assert not other.wait_readable(0.01)
        one.send(b"late", deadline_of(LONG))
        assert other.receive(deadline_of(LONG), 4) == b"late"


def test_last_words_of_an_end_that_is_gone_are_read_first(pair: tuple[SignedStream, SignedStream]) -> None:
    caller, listener = pair
    caller.send(b"first", deadline_of(LONG))
    caller.send(b"last", deadline_of(LONG))
    caller.close()
    assert [listener.receive(None, LARGEST) for _ in range(2)] == [b"first", b"last"]
    with pytest.raises(LinkClosedError, match="the other end is gone"):
        listener.receive(None, LARGEST)


@pytest.mark.parametrize("size", [0, 1, LARGEST])
def test_messages_of_any_size(pair: tuple[SignedStream, SignedStream], size: int) -> None:
    caller, listener = pair
    body = os.urandom(size)
    sending = in_background(caller.send, body, deadline_of(LONG))
    assert listener.receive(deadline_of(LONG), LARGEST) == body
    sending.join()


@pytest.mark.parametrize("place", [0, 3, 4, FRONT - 1, FRONT, -1])
def test_a_message_that_was_changed_on_the_way(ends: Ends, place: int) -> None:
    message = bytearray(ends.said(b"hello"))
    message[place] ^= 1
    ends.to_listener.sendall(message + bytes(300))
    with pytest.raises(FormatError, match="another protocol" if place == 3 else "not signed with ours"):
        ends.heard()


def test_a_message_that_comes_again(ends: Ends) -> None:
    message = ends.said(b"one")
    ends.to_listener.sendall(message * 2)
    assert ends.heard() == b"one"
    with pytest.raises(FormatError, match="not signed with ours"):
        ends.heard()


def test_messages_in_another_order(ends: Ends) -> None:
    one, two = ends.said(b"one"), ends.said(b"two")
    ends.to_listener.sendall(two + one)
    with pytest.raises(FormatError, match="not signed with ours"):
        ends.heard()


def test_a_message_that_was_left_out(ends: Ends) -> None:
    first, _, third = (ends.said(b"%d" % number) for number in range(3))
    ends.to_listener.sendall(first + third)
    assert ends.heard() == b"0"
    with pytest.raises(FormatError, match="not signed with ours"):
        ends.heard()


def test_a_message_that_comes_back(ends: Ends) -> None:
    """Each end signs as another writer, so nobody can send its words back to it."""
    ends.from_caller.sendall(ends.said(b"hello"))
    with pytest.raises(FormatError, match="not signed with ours"):
        ends.caller.receive(deadline_of(LONG), LARGEST)


@pytest.mark.parametrize("rubbish", [bytes(FRONT), b"\1" * 40, b"\xff" * 1000, b"GET / HTTP/1.1\r\n" * 9])
def test_rubbish_is_told_from_messages(ends: Ends, rubbish: bytes) -> None:
    ends.to_listener.sendall(rubbish)
    with pytest.raises(FormatError):
        ends.heard()


def test_another_key(ends: Ends) -> None:
    other = SignedStream(ends.listener.stream, bytes(32), listener=True)
    ends.to_listener.sendall(ends.said(b"hello"))
    with pytest.raises(FormatError, match="wrong token"):
        other.receive(deadline_of(LONG), LARGEST)


def test_a_message_that_is_too_large_is_not_read(ends: Ends) -> None:
    ends.to_listener.sendall(struct.pack("<I", LARGEST + 1) + bytes(32))  # and its body never comes
    with pytest.raises(FormatError, match=f"a message of {LARGEST + 1} bytes"):
        ends.heard()


@pytest.mark.parametrize("sent", [1, FRONT, FRONT + 2])
def test_half_a_message(ends: Ends, sent: int) -> None:
    ends.to_listener.sendall(ends.said(b"hello")[:sent])
    with pytest.raises(SyncTimeoutError):
        ends.listener.receive(deadline_of(0.1), LARGEST)
    ends.to_listener.close()
    with pytest.raises(LinkClosedError):
        ends.heard()


def test_nothing_comes(pair: tuple[SignedStream, SignedStream]) -> None:
    with pytest.raises(SyncTimeoutError, match=r"said nothing for 0\.05 s"):
        pair[0].receive_json(0.05)
    pair[1].send_json({"late": True}, LONG)
    assert pair[0].receive_json(LONG) == {"late": True}


@pytest.mark.parametrize(
    ("body", "problem"),
    [
        (b"", "not JSON"),
        (b"{", "not JSON"),
        (b"\xff", "not JSON"),
        (b"[" * 200_000, "not JSON"),
        (b"[]", "not a JSON object"),
        (b"null", "not a JSON object"),
        (b" " * (MAX_JSON_BYTES + 1), "bytes; the other end speaks another protocol"),
    ],
)
def test_a_message_that_is_no_json_object(
    pair: tuple[SignedStream, SignedStream], body: bytes, problem: str
) -> None:
    sending = in_background(send_or_end, pair[0], body)
    with pytest.raises(FormatError, match=problem):
        pair[1].receive_json(LONG)
    pair[1].close()
    sending.join()


def send_or_end(stream: SignedStream, body: bytes) -> None:
    with suppress(LinkClosedError):
        stream.send(body, deadline_of(LONG))


def test_a_number_that_json_does_not_have_is_not_sent(pair: tuple[SignedStream, SignedStream]) -> None:
    with pytest.raises(ValueError, match="JSON"):
        pair[0].send_json({"loss": float("nan")}, LONG)
    pair[0].send_json({"loss": 1.0}, LONG)
    assert pair[1].receive_json(LONG) == {"loss": 1.0}


def test_a_send_waits_no_longer_than_it_may(pair: tuple[SignedStream, SignedStream]) -> None:
    start = time.monotonic()
    with pytest.raises(SyncTimeoutError):
        pair[0].send(bytes(64 << 20), deadline_of(0.1))
    assert time.monotonic() - start < LONG


def test_one_thread_sends_while_another_receives(pair: tuple[SignedStream, SignedStream]) -> None:
    """Both ends write more than the kernel keeps, and read at the same time."""
    count, body, got = 50, os.urandom(100_000), {}

    def read(end: SignedStream) -> None:
        got[end] = [end.receive(deadline_of(LONG), LARGEST) for _ in range(count)]

    def write(end: SignedStream) -> None:
        for _ in range(count):
            end.send(body, deadline_of(LONG))

    threads = [in_background(action, end) for end in pair for action in (read, write)]
    for thread in threads:
        thread.join(2 * LONG)
        assert not thread.is_alive()
    assert got == {end: [body] * count for end in pair}


@pytest.mark.parametrize("waits", ["receives", "sends"])
def test_close_wakes_a_thread_that_waits(pair: tuple[SignedStream, SignedStream], waits: str) -> None:
    begun, ended = threading.Event(), threading.Event()
    action = {
        "receives": lambda: pair[0].receive(None, LARGEST),
        "sends": lambda: pair[0].send(bytes(64 << 20), None),
    }[waits]

    def wait() -> None:
        begun.set()
        with pytest.raises(LinkClosedError):
            action()
        ended.set()

    thread = in_background(wait)
    assert begun.wait(LONG)
    pair[0].close()
    thread.join(LONG)
    assert ended.is_set()
    for action in (lambda: pair[0].send(b"x", None), lambda: pair[0].receive(None, 1)):
        with pytest.raises(LinkClosedError, match="closed"):
            action()


def test_a_connection_that_was_closed_has_no_address(pair: tuple[SignedStream, SignedStream]) -> None:
    """A host relay asks for the address, which :meth:`HostRelay.close` of another thread may forestall."""
    pair[0].close()
    with pytest.raises(LinkClosedError, match="closed"):
        _ = pair[0].local_address


# -- addresses -----------------------------------------------------------------------------------------


def test_who_listens_on_which_address() -> None:
    address = socket.gethostbyname(socket.gethostname())
    if address.startswith("127."):
        pytest.skip("this machine has no other address than loopback")
    with listen("127.0.0.1") as sock, pytest.raises(OSError, match="refused"):
        dial(address, sock.getsockname()[1], deadline_of(5.0))


def test_an_address_of_another_machine_and_a_taken_port() -> None:
    with pytest.raises(OSError, match="give address= of a network interface of this machine") as caught:
        listen("192.0.2.1")
    assert caught.value.errno == errno.EADDRNOTAVAIL
    with listen("127.0.0.1") as sock, pytest.raises(OSError, match=r"port=, or 0 for any$") as caught:
        listen("127.0.0.1", port := sock.getsockname()[1])
    assert f"cannot listen on 127.0.0.1:{port} (Address already in use); give address=" in str(caught.value)


def test_a_listener_without_a_descriptor_names_the_limit() -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (3, hard))
    try:
        with pytest.raises(OSError, match=r"\(Too many open files\); raise .*\(ulimit -n\)$") as caught:
            listen("127.0.0.1")
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    assert caught.value.errno == errno.EMFILE


def test_a_name_whose_first_address_refuses(monkeypatch: pytest.MonkeyPatch) -> None:
    with listen("127.0.0.1") as sock, socket.socket() as free:
        free.bind(("127.0.0.1", 0))  # and does not listen
        found = [(socket.AF_INET, socket.SOCK_STREAM, 0, "", one.getsockname()) for one in (free, sock)]
        monkeypatch.setattr(socket, "getaddrinfo", lambda *_, **__: found)
        with closing(dial("a name", 1, deadline_of(LONG))) as stream:
            assert stream.sock.getpeername() == sock.getsockname()
        monkeypatch.setattr(socket, "getaddrinfo", lambda *_, **__: found[:1])
        with pytest.raises(ConnectionRefusedError):
            dial("a name", 1, deadline_of(LONG))


def test_a_name_that_gets_another_address_while_its_first_one_is_silent(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """As after a restart of the trainer on another machine, when the first machine is gone."""
    monkeypatch.setattr(signed_stream, "_LOOKUP_SECONDS", 0.2)
    with listen("127.0.0.1") as sock, socket.create_server(("127.0.0.1", 0), backlog=0) as silent:
        full = socket.create_connection(silent.getsockname())  # the kernel drops those that come after it
        here = [silent, silent, sock]

        def look_up(*_: Any, **__: Any) -> list[Any]:
            one = here.pop(0) if len(here) > 1 else here[0]
            return [(socket.AF_INET, socket.SOCK_STREAM, 0, "", one.getsockname())]

        monkeypatch.setattr(socket, "getaddrinfo", look_up)
        with full:
            with closing(dial("a name", 1, deadline_of(LONG))) as stream:
                assert stream.sock.getpeername() == sock.getsockname()
            here[:] = [silent]
            with pytest.raises(TimeoutError):
                dial("a name", 1, deadline_of(0.5))


def test_a_name_that_takes_long_to_look_up(monkeypatch: pytest.MonkeyPatch) -> None:
    """As with a name server that is down, before the next one is asked."""
    monkeypatch.setattr(signed_stream, "_LOOKUP_SECONDS", 0.1)
    look_up = socket.getaddrinfo

    def look_up_slowly(*args: Any, **options: Any) -> list[Any]:
        time.sleep(0.2)
        return look_up(*args, **options)

    monkeypatch.setattr(socket, "getaddrinfo", look_up_slowly)
    with listen("127.0.0.1") as sock, closing(dial(*sock.getsockname(), deadline_of(LONG))):
        pass


def test_a_name_with_nothing_but_an_ipv6_address(monkeypatch: pytest.MonkeyPatch) -> None:
    """As in a cluster without IPv4. A name with both stands for its IPv4 address."""
    hosts = ("127.0.0.1", "::1")
    four, six = (socket.getaddrinfo(host, 0, type=socket.SOCK_STREAM)[0] for host in hosts)
    try:
        listen("::1").close()
    except OSError as error:
        pytest.skip(f"this machine has no IPv6: {error}")
    for found, host in (([six], "::1"), ([six, four], "127.0.0.1")):
        monkeypatch.setattr(socket, "getaddrinfo", lambda *_, found=found, **__: found)
        with listen("a name") as sock:
            assert sock.getsockname()[0] == host


# -- forked children -----------------------------------------------------------------------------------


def test_a_child_keeps_no_connection_open() -> None:
    """Otherwise the other end would wait as long as a child of a dead process lives."""
    ours, theirs = socket.socketpair()
    with listen("127.0.0.1") as sock, closing(dial(*sock.getsockname(), deadline_of(LONG))) as caller:
        accepted = SocketStream(sock.accept()[0])
        child = multiprocessing.get_context("fork").Process(target=wait_for_a_byte, args=(theirs,))
        child.start()
        try:
            assert ours.recv(1) == b"."
            caller.close()
            assert accepted.wait_readable(LONG)
            with pytest.raises(LinkClosedError):
                accepted.recv(1)
        finally:
            ours.send(b".")
            child.join(LONG)
            ours.close()
            theirs.close()
            accepted.close()


def wait_for_a_byte(theirs: socket.socket) -> None:
    theirs.send(b".")
    theirs.recv(1)


def test_a_child_keeps_what_is_not_ours() -> None:
    with (
        socket.create_server(("127.0.0.1", 0)) as other,
        socket.create_connection(other.getsockname()) as one,
    ):
        reading, writing = os.pipe()
        child = multiprocessing.get_context("fork").Process(target=say, args=(one, writing))
        child.start()
        child.join(LONG)
        os.close(writing)
        assert os.read(reading, 100) == b"from a pipe"
        os.close(reading)
        with other.accept()[0] as accepted:
            accepted.settimeout(5.0)
            assert accepted.recv(13) == b"from a socket"


def say(sock: socket.socket, pipe: int) -> None:
    sock.sendall(b"from a socket")
    os.write(pipe, b"from a pipe")


def test_a_connection_that_was_refused_keeps_no_descriptor() -> None:
    before = len(os.listdir("/proc/self/fd"))
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        for _ in range(20):
            with pytest.raises(ConnectionRefusedError):
                dial(*free.getsockname(), deadline_of(LONG))
        assert eventually(lambda: len(os.listdir("/proc/self/fd")) <= before + 1, 5.0)
