"""Every call of a client ends in time, also when the synchronizer's host is stopped or swallows packets."""

from __future__ import annotations

import logging
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from functools import partial
from typing import Any

import pytest
from marks import slow
from sync_parts import model_at
from sync_programs import serve
from test_processes import COMING, FORKSERVER

from weight_update import (
    ExplorerClient,
    LifecycleError,
    LinkClosedError,
    Synchronizer,
    SyncMethod,
    SyncTimeoutError,
    TrainerClient,
)
from weight_update.synchronizer.rpc import CONTEXT, SocketChannel
from weight_update.testing.processes import freeze
from weight_update.transports.listener import Listener
from weight_update.transports.signed_stream import SignedStream
from weight_update.transports.socket_stream import SocketStream, seconds_left

TIMEOUT = 0.5
SOON = 8 * TIMEOUT  # other programs run on this machine, too


def timed(call: Callable[[], Any], took: dict[str, float], name: str) -> threading.Thread:
    """Run a call, which is expected to fail, in a thread of its own, and note how long it took."""

    def run() -> None:
        began = time.monotonic()
        try:
            call()
        except (LifecycleError, LinkClosedError):
            pass
        finally:
            took[name] = time.monotonic() - began

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    return thread


CALLS: dict[str, Callable[[Any], Any]] = {
    "need_sync": lambda client: client.need_sync(),
    "sync_weight": lambda client: client.sync_weight(),
    "status": lambda client: client.status(),
    "latest_version": lambda client: client.latest_version(),
    "notify": lambda client: client.notify("require_sync"),
    "give_up": lambda client: client.give_up(),
    "close": lambda client: client.close(),
}


def test_a_host_that_is_stopped_ends_every_call_in_time() -> None:
    told, theirs = FORKSERVER.Pipe(duplex=False)
    process = FORKSERVER.Process(target=serve, args=(theirs,), daemon=True)
    process.start()
    try:
        assert told.poll(COMING)
        address, token = told.recv()
        trainer = TrainerClient(address, model_at(0), token=token).blocking
        clients = {name: ExplorerClient(address, model_at(-1), token=token).blocking for name in CALLS}
        for client in (*clients.values(), trainer):
            client.timeout = TIMEOUT
        freeze(process.pid)
        took: dict[str, float] = {}
        calls = [timed(lambda n=name: CALLS[n](clients[n]), took, name) for name in CALLS]
        calls.append(
            timed(
                lambda: ExplorerClient(address, model_at(-1), token=token, timeout=TIMEOUT), took, "a new one"
            )
        )
        calls.append(timed(trainer.need_sync, took, "the trainer's need_sync"))
        calls.append(timed(trainer.sync_weight, took, "the trainer's sync_weight"))
        for call in calls:
            call.join(SOON)
        late = [call for call in calls if call.is_alive()]
        assert not late, took
        assert all(seconds < SOON for seconds in took.values()), took
    finally:
        process.kill()
        process.join(10.0)
    for client in (*clients.values(), trainer):
        client.close()


def test_a_host_that_swallows_packets_is_given_up_in_time() -> None:
    with socket.socket() as deaf:
        deaf.bind(("127.0.0.1", 0))
        deaf.listen(0)
        where = deaf.getsockname()
        waiting = [socket.socket() for _ in range(4)]
        for sock in waiting:  # the queue is full: connections that come now are not answered
            sock.setblocking(False)
            sock.connect_ex(where)
        began = time.monotonic()
        with pytest.raises(LinkClosedError, match="no synchronizer"):
            ExplorerClient(f"{where[0]}:{where[1]}", model_at(-1), token="any", timeout=TIMEOUT)
        assert time.monotonic() - began < SOON
        for sock in waiting:
            sock.close()


def test_close_ends_a_call_that_connects() -> None:
    """The interpreter waits at exit for the threads of clients of asyncio."""
    with Synchronizer(SyncMethod.MEMORY) as where:
        server = where.serve()
        client = ExplorerClient(server.address, model_at(-1), token=server.token).blocking
        server.close()
        host, _, port = server.address.rpartition(":")
        took: dict[str, float] = {}
        with socket.create_server((host, int(port))) as silent:
            call = timed(client.need_sync, took, "need_sync")
            accepted, _ = silent.accept()
            with accepted:
                client.timeout = TIMEOUT  # of close() only
                timed(client.close, took, "close")
                call.join(SOON)
                assert not call.is_alive()


@pytest.mark.slow
def test_a_host_that_lives_may_take_longer_than_the_timeout() -> None:
    """While a transfer is under way the answer comes late, and that is no reason to give up."""
    with Synchronizer(SyncMethod.MEMORY) as where:
        server = where.serve()
        with ExplorerClient(server, model_at(-1), timeout=1.0) as client:
            slow = where.service.explorer_needs

            def slowly(**args: Any) -> Any:
                time.sleep(2.2)
                return slow(**args)

            where.service.explorer_needs = slowly
            began = time.monotonic()
            assert not client.blocking.need_sync()
            assert time.monotonic() - began >= 2.2


def test_a_call_that_a_living_synchronizer_does_not_answer_is_told_with_its_whole_time() -> None:
    with Synchronizer(SyncMethod.MEMORY) as where:
        server = where.serve()
        with ExplorerClient(server, model_at(-1)) as client:
            over = threading.Event()
            where.service.explorer_needs = lambda **args: {"done": over.wait(10.0)}
            calling = partial(client.blocking.channel.call, "explorer_needs", {}, 3.5, 0.5)
            with pytest.raises(LinkClosedError, match=r"call was not answered within 4 s, unlike others"):
                calling()
            over.set()


def test_the_time_of_a_call_may_end_while_another_is_answered(monkeypatch: pytest.MonkeyPatch) -> None:
    answered = iter([True, False])

    def is_alive(channel: SocketChannel, deadline: float) -> bool:
        if not next(answered):
            time.sleep(deadline - time.monotonic())
            return False
        return True

    monkeypatch.setattr(SocketChannel, "_is_alive", is_alive)
    with Synchronizer(SyncMethod.MEMORY) as where:
        server = where.serve()
        with ExplorerClient(server, model_at(-1)) as client:
            over = threading.Event()
            where.service.explorer_needs = lambda **args: {"done": over.wait(10.0)}
            with pytest.raises(LinkClosedError, match=r"call was not answered within 0.7 s, unlike others"):
                client.blocking.channel.call("explorer_needs", {}, 0.5, 0.2)
            over.set()


@contextmanager
def server_that(answers: Callable[[SocketStream, SignedStream, bytes], None]) -> Iterator[SocketChannel]:
    """Yield the channel to a server that runs ``answers`` on each connection, with the bytes of the reply."""
    sock = socket.create_server(("127.0.0.1", 0))
    address = "{}:{}".format(*sock.getsockname())

    def serve(stream: SocketStream, key: bytes, deadline: float) -> None:
        wire = SignedStream(stream, key, listener=True)
        wire.receive_json(seconds_left(deadline))
        answers(stream, wire, reply_of(key))
        stream.wait_readable(10.0)  # the client ends the connection
        stream.close()

    listener = Listener(sock, "token", CONTEXT, serve, "test-listener", logging.getLogger(__name__))
    listener.start()
    with closing(listener), closing(SocketChannel(address, "token")) as channel:
        yield channel


def reply_of(key: bytes) -> bytes:
    """Return the first reply of a server, as it travels."""
    left, right = socket.socketpair()
    with left, right:
        SignedStream(SocketStream(left), key, listener=True).send_json({"done": True}, 5.0)
        return right.recv(1000)


def test_a_synchronizer_that_was_stopped_is_named_when_a_client_connects() -> None:
    with socket.create_server(("127.0.0.1", 0)) as stopped:  # the kernel takes connections, nobody answers
        address = "{}:{}".format(*stopped.getsockname())
        channel = SocketChannel(address, "token")
        with closing(channel), pytest.raises(LinkClosedError, match=f"^the synchronizer at {address}: "):
            channel.call("status", {}, TIMEOUT)


@pytest.mark.parametrize("longer", [0.0, slow(10.0)])
@pytest.mark.parametrize("sent", [1, 37], ids=["in the front", "in the body"])
def test_a_host_that_stops_in_the_middle_of_a_reply_is_given_up_in_time(sent: int, longer: float) -> None:
    with server_that(lambda stream, wire, reply: stream.send(reply[:sent], None)) as channel:
        took: dict[str, float] = {}
        call = timed(lambda: channel.call("status", {}, TIMEOUT, longer), took, "status")
        call.join(SOON)
        assert not call.is_alive()
        assert took["status"] >= TIMEOUT / 2


@pytest.mark.slow
def test_a_reply_that_comes_in_two_parts_is_whole() -> None:
    def in_two(stream: SocketStream, wire: SignedStream, reply: bytes) -> None:
        stream.send(reply[:20], None)
        time.sleep(1.2)  # longer than the first look of a client that has 2 s, and may wait longer
        stream.send(reply[20:], None)

    with server_that(in_two) as channel:
        assert channel.call("status", {}, 2.0, 10.0) == {"done": True}


def test_a_host_that_does_not_read_is_given_up_in_time() -> None:
    left, right = socket.socketpair()
    with left, right:
        wire = SignedStream(SocketStream(left), bytes(32), listener=False)
        began = time.monotonic()
        with pytest.raises(SyncTimeoutError):
            wire.send_json({"text": " " * (1 << 20)}, 0.1)
        assert time.monotonic() - began < SOON
