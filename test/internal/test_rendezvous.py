"""A worker finds the sender's announcement, or learns why not, whatever strangers write into the store."""

from __future__ import annotations

import contextlib
import errno
import itertools
import json
import multiprocessing
import os
import resource
import signal
import socket
import struct
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import closing
from dataclasses import asdict
from multiprocessing.connection import Connection

import psutil
import pytest
from background import repeating
from marks import slow
from torch.distributed import DistError, TCPStore

from weight_update.errors import JoinRefusedError, LinkClosedError, SyncTimeoutError, TransportError
from weight_update.testing.chunks import in_background
from weight_update.testing.processes import eventually, freeze
from weight_update.transports.distributed import rendezvous
from weight_update.transports.distributed import transport as distributed
from weight_update.transports.distributed.rendezvous import Announcement, SenderStore, find_sender
from weight_update.transports.host_name import this_host
from weight_update.transports.signed_stream import listen

HERE = "127.0.0.1"
TOKEN = "confidential"
WHERE = Announcement(host="h", local="a name", port=1234, name="0" * 32)
LONG = 20.0
SOON = 5.0
"""Seconds after which a worker that waits 2 s for another try must have given up, on a busy machine."""


@pytest.fixture
def store() -> Iterator[SenderStore]:
    with closing(SenderStore(HERE, 0)) as store:
        store.announce(WHERE, TOKEN)
        yield store


def find(port: int, timeout: float | None = LONG, **options: bool) -> Announcement:
    return find_sender(HERE, port, TOKEN, timeout, **options)


def stranger_of(store: SenderStore) -> TCPStore:
    """Return the store client of a stranger that speaks the protocol."""
    return TCPStore(HERE, store.port, is_master=False, wait_for_workers=False)


def key_of(stranger: TCPStore) -> str:
    """Return the key of the announcement, as any process can find it."""
    (key,) = (key.removeprefix("/") for key in stranger.list_keys())
    return str(key)


@contextlib.contextmanager
def repeatedly(action: Callable[[], object]) -> Iterator[None]:
    """Call ``action`` without pause meanwhile, several times before."""
    calls: list[object] = []
    with repeating(lambda: calls.append(action())):
        assert eventually(lambda: len(calls) > 3)
        yield


def test_the_announcement_is_found(store: SenderStore) -> None:
    assert find(store.port) == WHERE
    assert find(store.port, None) == WHERE
    assert find(store.port, again=True) == WHERE


def test_the_store_keeps_no_secret(store: SenderStore) -> None:
    stranger = stranger_of(store)
    key = key_of(stranger)
    value = stranger.get(key)
    assert TOKEN not in key
    assert TOKEN.encode() not in value
    assert value.endswith(json.dumps(asdict(WHERE)).encode())


def test_a_worker_that_comes_before_the_sender(store: SenderStore) -> None:
    """It waits until a process listens there, and until the announcement is written."""
    with socket.socket() as free:
        free.bind((HERE, 0))
        port = free.getsockname()[1]
    found: list[Announcement] = []
    worker = in_background(lambda: found.append(find(port)))
    with closing(SenderStore(HERE, port)) as late:
        worker.join(0.3)
        late.announce(WHERE, TOKEN)
        worker.join(LONG)
    assert found == [WHERE]


def test_another_token(store: SenderStore) -> None:
    start = time.monotonic()
    with pytest.raises(JoinRefusedError, match=r"has another token, or .* same token= \(or"):
        find_sender(HERE, store.port, "another", LONG)
    assert time.monotonic() - start < SOON


def test_a_store_of_another_program() -> None:
    theirs = TCPStore(HERE, 0, is_master=True, wait_for_workers=False)
    with pytest.raises(JoinRefusedError, match="another token"):
        find(theirs.port)


def test_a_port_that_refuses_is_told_from_a_network_without_a_way(monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.socket() as free:
        free.bind((HERE, 0))  # and does not listen
        port = free.getsockname()[1]
        start = time.monotonic()
        with pytest.raises(LinkClosedError, match=r"refused.*may have shut down or died; .*give it address="):
            find(port, 0.3)
        assert 0.1 < time.monotonic() - start < SOON

    def dial(*_: object) -> socket.socket:
        raise OSError(errno.EHOSTUNREACH, "No route to host")

    monkeypatch.setattr(rendezvous, "dial", dial)
    with pytest.raises(LinkClosedError, match=r"No route to host\); if it is on another machine, give it"):
        find(port, 0.3)


def test_a_known_sender_that_has_gone_is_not_waited_for(store: SenderStore) -> None:
    assert find(store.port) == WHERE
    store.close()
    start = time.monotonic()
    with pytest.raises(LinkClosedError, match="is gone"):
        find(store.port, LONG, again=True)
    assert time.monotonic() - start < SOON


def test_close_ends_the_store_and_its_thread(store: SenderStore) -> None:
    def announcing() -> list[threading.Thread]:
        return [one for one in threading.enumerate() if one.name == "weight_update-announce"]

    assert announcing()
    store.close()
    store.close()
    assert eventually(lambda: not announcing(), SOON)
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection((HERE, store.port), timeout=SOON)


@pytest.mark.parametrize("announced", [True, False])
def test_a_server_that_is_stopped(announced: bool) -> None:
    with sender_process(announced) as (process, port):
        freeze(process.pid)
        start = time.monotonic()
        with pytest.raises(SyncTimeoutError, match=r"did not answer within 0\.5 s: it is stopped"):
            find(port, 0.5)
        assert time.monotonic() - start < SOON


SAYINGS = {
    "nothing": b"",
    "noise": bytes(range(256)),
    "a pong, then nothing": struct.pack("<I", 0),
    "a pong, and half a value": struct.pack("<IQ", 0, 100) + b"half",
}


@pytest.mark.parametrize("says", SAYINGS.values(), ids=SAYINGS)
def test_something_else_listens_there(says: bytes) -> None:
    """It reads all, says something, and stays silent: the worker gives up in time."""
    with socket.create_server((HERE, 0)) as server:
        in_background(say_to_one, server, says)
        start = time.monotonic()
        with pytest.raises((SyncTimeoutError, JoinRefusedError)):
            find(server.getsockname()[1], 0.5)
        assert time.monotonic() - start < SOON


def say_to_one(server: socket.socket, says: bytes) -> None:
    with contextlib.suppress(OSError):
        sock = server.accept()[0]
        with sock:
            sock.sendall(says)
            while sock.recv(1 << 16):
                pass


def test_a_value_of_a_gigabyte_is_not_read() -> None:
    """A TCPStore keeps no value so large; a stranger that took over the port may claim one."""
    with socket.create_server((HERE, 0)) as server:
        says = struct.pack("<IQ", 0, 1 << 30) + bytes(1 << 20)
        in_background(say_to_one, server, says)
        before = psutil.Process().memory_info().rss
        with pytest.raises(LinkClosedError, match="what answers there is not a sender"):
            find(server.getsockname()[1], 0.05)
        assert psutil.Process().memory_info().rss - before < 100e6


def test_a_web_server_listens_there() -> None:
    with socket.create_server((HERE, 0)) as server:
        says = b"HTTP/1.1 400 Bad Request\r\nConnection: close\r\n\r\n"
        in_background(say_to_one, server, says)
        message = r"what answers there is not a sender: it sent b'HTTP/1\.1 400'\)"
        with pytest.raises(LinkClosedError, match=message):
            find(server.getsockname()[1], 0.05)


# -- strangers in the store ----------------------------------------------------------------------------


FORGED = {
    "empty": b"",
    "garbage": b"x" * 100,
    "large": bytes(8_000_000),
    "not UTF-8": b"\xff" * 200,
    "unsigned": bytes(32) + json.dumps(asdict(WHERE)).encode(),
}


@pytest.mark.parametrize("value", FORGED.values(), ids=FORGED)
def test_a_stranger_overwrote_the_announcement(store: SenderStore, value: bytes) -> None:
    stranger = stranger_of(store)
    stranger.set(key_of(stranger), value)
    assert find(store.port) == WHERE


@pytest.mark.parametrize("other", ["another token", "another place"])
def test_a_stranger_announces_itself(store: SenderStore, other: str) -> None:
    """An announcement of another sender, or with another port under the old signature, misleads nobody."""
    stranger = stranger_of(store)
    key = key_of(stranger)
    if other == "another token":
        with closing(SenderStore(HERE, 0)) as second:
            second.announce(WHERE, "their token")
            theirs = stranger_of(second)
            forged = theirs.get(key_of(theirs))
    else:
        forged = stranger.get(key).replace(b"1234", b"4321")
    stranger.set(key, forged)
    assert find(store.port) == WHERE


def test_a_stranger_deleted_the_announcement(store: SenderStore) -> None:
    stranger = stranger_of(store)
    assert stranger.delete_key(key_of(stranger))
    assert find(store.port) == WHERE


@pytest.mark.parametrize("way", ["append", "add", "push", "swap"])
def test_a_stranger_changes_the_announcement(store: SenderStore, way: str) -> None:
    stranger = stranger_of(store)
    key = key_of(stranger)
    with contextlib.suppress(DistError, ValueError):  # the store may refuse it
        if way == "append":
            stranger.append(key, "x")
        elif way == "add":
            stranger.delete_key(key)
            stranger.add(key, 1)
        elif way == "push":
            stranger.queue_push(key, b"x")
        else:
            stranger.compare_set(key, stranger.get(key).decode("latin-1"), "x")
    assert find(store.port) == WHERE


# with much, the stranger wins on a busy machine: docs/cluster.rst says so
@pytest.mark.parametrize("way", ["overwrites", "deletes", slow("overwrites with much"), slow("appends much")])
def test_a_stranger_goes_on_and_on(store: SenderStore, way: str) -> None:
    stranger, much = stranger_of(store), "x" * 4_000_000
    key = key_of(stranger)
    actions = {
        "overwrites": lambda: stranger.set(key, "x"),
        "deletes": lambda: stranger.delete_key(key),
        "overwrites with much": lambda: stranger.set(key, much),
        "appends much": lambda: stranger.append(key, much),
    }
    with repeatedly(actions[way]):
        for _ in range(3):
            assert find(store.port) == WHERE
    assert find(store.port) == WHERE


def test_strangers_on_the_port(store: SenderStore) -> None:
    with contextlib.ExitStack() as stack:
        for data in (b"", b"GET / HTTP/1.0\r\n\r\n", struct.pack("<Q", 1 << 62), b"\xff" * 4096):
            for _ in range(30):
                sock = stack.enter_context(socket.create_connection((HERE, store.port)))
                sock.sendall(data)
        assert find(store.port) == WHERE
    assert find(store.port) == WHERE


# -- children of the sender ----------------------------------------------------------------------------


@contextlib.contextmanager
def sender_process(announced: bool = True, child: str = "") -> Iterator[tuple[multiprocessing.Process, int]]:
    """Run a store in another process, which may start a child; yield the process and the store's port."""
    ctx = multiprocessing.get_context("fork")
    ours, theirs = ctx.Pipe()
    process = ctx.Process(target=be_sender, args=(theirs, announced, child))
    process.start()
    theirs.close()
    started = 0
    try:
        assert ours.poll(LONG)
        port, started = ours.recv()
        yield process, port
    finally:
        process.kill()
        process.join()
        ours.close()
        if started:
            os.kill(started, signal.SIGKILL)


def be_sender(pipe: Connection, announced: bool, child: str) -> None:
    store = SenderStore(HERE, 0)
    if announced:
        store.announce(WHERE, TOKEN)
        find(store.port)
    started = 0
    if child == "program":
        started = subprocess.Popen(["sleep", "60"], close_fds=False).pid
    elif child == "fork":
        started = os.fork()
        if started == 0:
            time.sleep(60.0)
            os._exit(0)
    pipe.send((store.port, started))
    time.sleep(60.0)


@pytest.mark.parametrize("child", ["fork", "program"])
def test_a_child_does_not_hide_the_death_of_the_sender(child: str) -> None:
    with sender_process(child=child) as (process, port):
        assert find(port) == WHERE
        process.kill()
        process.join()
        start = time.monotonic()
        with pytest.raises(LinkClosedError, match="is gone"):
            find(port, LONG, again=True)
        assert time.monotonic() - start < SOON


def test_a_port_is_free_again_after_close_though_a_child_lives(store: SenderStore) -> None:
    ctx = multiprocessing.get_context("fork")
    ours, theirs = ctx.Pipe()
    child = ctx.Process(target=greet_and_wait, args=(theirs,))
    child.start()
    try:
        assert ours.recv() == "here"
        store.close()
        with closing(SenderStore(HERE, store.port)) as again:
            again.announce(WHERE, TOKEN)
            assert find(store.port) == WHERE
    finally:
        ours.send(None)
        child.join(LONG)
        ours.close()
        theirs.close()


def greet_and_wait(pipe: Connection) -> None:
    pipe.send("here")
    pipe.recv()


def test_a_store_that_cannot_be_opened_listens_no_more(monkeypatch: pytest.MonkeyPatch) -> None:
    before = listening()

    def fail(*_: object, **__: object) -> None:
        raise RuntimeError("no descriptors")

    monkeypatch.setattr(rendezvous, "TCPStore", fail)
    with pytest.raises(TransportError, match=r"cannot open its store at .* \(no descriptors\); if"):
        SenderStore(HERE, 0)
    assert listening() == before
    assert rendezvous._listening == set()


def test_a_pytorch_without_libuv(monkeypatch: pytest.MonkeyPatch) -> None:
    """PyTorch advises a store that strangers can stop; our error does not."""

    def fail(*_: object, **__: object) -> None:
        raise DistError(
            "use_libuv was requested but PyTorch was built without libuv support, "
            "run with USE_LIBUV=0 to disable it."
        )

    monkeypatch.setattr(rendezvous, "TCPStore", fail)
    with pytest.raises(TransportError, match=r"built without libuv.*; install PyTorch's own build") as raised:
        SenderStore(HERE, 0)
    assert "USE_LIBUV" not in str(raised.value)
    assert "ulimit" not in str(raised.value)


@contextlib.contextmanager
def free_descriptors(number: int) -> Iterator[None]:
    """Let this process open ``number`` more files."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    used = {int(number) for number in os.listdir("/proc/self/fd")}
    free = itertools.islice((number for number in itertools.count() if number not in used), number)
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(free) + 1, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


@pytest.mark.parametrize("number", [1, 3, 4, 8])  # PyTorch aborts the process with 3 or 4
def test_a_store_with_few_descriptors(number: int) -> None:
    with free_descriptors(number), pytest.raises(TransportError, match=r"its store .*\(ulimit -n\)"):
        SenderStore(HERE, 0)
    assert rendezvous._listening == set()
    SenderStore(HERE, 0).close()


def test_a_store_whose_server_has_no_descriptor_for_its_client(monkeypatch: pytest.MonkeyPatch) -> None:
    """PyTorch waits for 300 seconds unless it is told otherwise, or without end."""
    monkeypatch.setattr(rendezvous, "REPLY_SECONDS", 1.0)
    monkeypatch.setattr(rendezvous, "_DESCRIPTORS", 0)  # workers take them meanwhile
    start = time.monotonic()
    with contextlib.ExitStack() as stack:
        sock = stack.enter_context(listen(HERE))
        monkeypatch.setattr(rendezvous, "listen", lambda *_: sock)
        for _ in range(20):  # of workers that wait
            stack.enter_context(socket.create_connection(sock.getsockname()))
        with free_descriptors(8):
            problem = "(ulimit -n)"
            try:
                SenderStore(HERE, 0).close()  # its server may have dropped the workers
            except TransportError as error:
                problem = str(error)
            assert "(ulimit -n)" in problem
    assert time.monotonic() - start < 20.0


def test_a_store_whose_server_never_answers(monkeypatch: pytest.MonkeyPatch) -> None:
    """As it happens in the test before if the client gets the last descriptor."""

    def wait(address: str, port: int, **_: object) -> None:
        with socket.create_connection((address, port)) as sock:
            sock.recv(1)

    monkeypatch.setattr(rendezvous, "REPLY_SECONDS", 0.3)
    monkeypatch.setattr(rendezvous, "TCPStore", wait)
    before = listening()
    with pytest.raises(TransportError, match=r"cannot open its store at .* reset by peer\); if"):
        SenderStore(HERE, 0)
    monkeypatch.setattr(rendezvous, "TCPStore", lambda *_, **__: time.sleep(1.0))
    with pytest.raises(TransportError, match=r"cannot open its store at .* not answer in 0\.3 s\); if"):
        SenderStore(HERE, 0)
    assert listening() == before
    assert rendezvous._listening == set()


def listening() -> set[int]:
    """Return the ports on which this process listens."""
    found = psutil.Process().net_connections("tcp")
    return {one.laddr.port for one in found if one.status == psutil.CONN_LISTEN}


def test_a_sender_of_this_host_whose_socket_is_not_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """The address that the worker was given is right: the sender announced itself there."""
    found = Announcement(this_host(), "weight_update-nobody", 1, "sender")
    monkeypatch.setattr(distributed, "find_sender", lambda *_, **__: found)
    link = distributed.DistributedTransport("127.0.0.1", 1)
    with contextlib.closing(link), pytest.raises(LinkClosedError, match="no sender at") as caught:
        link.connect(1.0)
    assert "another network namespace: then give it and this worker different host=" in str(caught.value)
    assert "address=" not in str(caught.value)
