"""Relay of one host, driven by the sender's client in the same process."""

from __future__ import annotations

import copy
import logging
import os
import socket
import threading
import time
from collections.abc import Iterator
from concurrent import futures
from contextlib import ExitStack, closing, contextmanager
from typing import Any

import pytest
import torch
from pairs import add_one, connect_pair, same
from stream_parts import signed_pair
from torch import nn

from weight_update.errors import JoinRefusedError, LinkClosedError
from weight_update.sender.delivery import Delivery
from weight_update.sender.workers import WorkerState
from weight_update.testing import Apart
from weight_update.testing.processes import eventually, wait_until
from weight_update.transports.distributed.connection import INLINE_BYTES, Connection
from weight_update.transports.distributed.relay import router as routing
from weight_update.transports.distributed.relay.client import RelayClient
from weight_update.transports.distributed.relay.host_relay import HostRelay
from weight_update.transports.distributed.relay.router import RemoteConnection, Router
from weight_update.transports.distributed.transfer import CHECKSUM
from weight_update.transports.listener import Listener
from weight_update.transports.shared_memory.slots import SharedBuffer, open_slot
from weight_update.transports.signed_stream import SignedStream, call, listen
from weight_update.transports.socket_stream import SocketStream, deadline_of
from weight_update.wire.frames import Kind, WeightChunk

HERE = "127.0.0.1"
TOKEN = "confidential"
LONG = 20.0
LOG = logging.getLogger("test")
NBYTES = 64 << 20  # more than the kernel takes from a sender whose other end does not read
SMALL = 3 << 20


class Joint:
    """A host relay, and the client that commands it.

    Attributes:
        failures: errors for which the relay gave up.
    """

    def __init__(self) -> None:
        self.failures: list[Exception] = []
        self.client = RelayClient(0, "gloo")
        self.here, there = signed_pair(tcp=True)
        self.relay = HostRelay(lambda number: self.here, TOKEN, None, self.failures.append)
        self.client.open(there)

    def ask(self, **command: Any) -> dict[str, Any]:
        self.client.send_command(command, LONG)
        return self.client.receive_answer(LONG)

    def take(self, slot: SharedBuffer, **options: Any) -> dict[str, Any]:
        """Send a payload; return the answer."""
        command = {"do": "take", "number": 1, "checksum": CHECKSUM, "patience": 5.0}
        command |= {"link": None, "onward": False} | self.client.take_command_for(slot.tensor) | options
        self.client.send_command(command, LONG)
        total = self.client.send_payload(slot.tensor, LONG) if command["link"] is None else None
        self.client.send_command({"do": "sum", "number": 1, "sum": options.get("sum", total)}, LONG)
        return self.client.receive_answer(LONG)

    def close(self) -> None:
        self.client.close()
        self.relay.close()
        self.relay._thread.join(LONG)
        assert not self.relay._thread.is_alive()


@pytest.fixture
def joint() -> Iterator[Joint]:
    with closing(Joint()) as joint:
        yield joint


@contextmanager
def slot_of_size(nbytes: int) -> Iterator[SharedBuffer]:
    slot = SharedBuffer(nbytes, None)
    slot.tensor.copy_(torch.randint(0, 256, (nbytes,), dtype=torch.uint8))
    yield slot
    slot.close()


def replica(answer: dict[str, Any], nbytes: int) -> torch.Tensor:
    """Return the payload where a worker of the host finds it."""
    return open_slot(os.getpid(), answer["fd"], answer["key"]).first(nbytes)


def call_relay(where: dict[str, Any], token: str = TOKEN) -> SignedStream:
    return call(where["address"], where["port"], token, "relay", deadline_of(LONG))


def test_a_payload_from_the_sender(joint: Joint) -> None:
    with slot_of_size(SMALL) as slot:
        for _ in range(3):
            slot.tensor.add_(1)
            answer = joint.take(slot)
            assert torch.equal(replica(answer, SMALL), slot.tensor)


def test_a_payload_that_was_changed_on_the_way(joint: Joint) -> None:
    with slot_of_size(SMALL) as slot:
        assert joint.take(slot, sum="0" * 32) == {"error": "the payload's checksum is wrong"}
        assert torch.equal(replica(joint.take(slot), SMALL), slot.tensor)


def test_a_directory_that_does_not_exist_on_this_host(joint: Joint) -> None:
    joint.relay._directory = "/nowhere"
    with slot_of_size(SMALL) as slot:
        answer = joint.take(slot)
        assert answer["fd"] == -1
        assert "directory='/nowhere'" in answer["key"]
        joint.relay._directory = None
        assert torch.equal(replica(joint.take(slot), SMALL), slot.tensor)


def remote_of(joint: Joint, router: Router, host: str) -> RemoteConnection:
    """Return the connection of a worker on ``host``, which has joined."""
    remote = RemoteConnection(joint.here, TOKEN, name=host, host=host, client=joint.client, router=router)
    router.add(remote)
    return remote


def test_a_router_forgets_slots_that_the_sender_has_freed(joint: Joint) -> None:
    router = Router()
    remote = remote_of(joint, router, "there")
    for _ in range(3):
        with slot_of_size(SMALL) as slot:
            router.deliver(slot.tensor, remote, LONG)
        del slot
    assert eventually(lambda: not router._payloads, LONG)


def test_a_worker_that_was_lost_before_its_welcome_is_not_added_to_the_router(joint: Joint) -> None:
    router = Router()
    remote = RemoteConnection(joint.here, TOKEN, name="1", host="there", client=joint.client, router=router)
    remote.lose(LinkClosedError("it joined again"))
    with pytest.raises(LinkClosedError):
        remote.send(WeightChunk(Kind.GOODBYE, {}), LONG)
    assert router.named("1") is None


def test_an_update_for_the_worker_before_does_not_keep_its_successor_from_its_welcome(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The payload would wait for a connection that the successor makes when it is welcomed."""
    send, joining = Delivery.send, list[futures.Future[None]]()

    def send_late(delivery: Delivery, worker: WorkerState, chunks: list[WeightChunk]) -> None:
        monkeypatch.setattr(Delivery, "send", send)
        before = worker.link._connection
        joining.append(pool.submit(successor.connect))
        wait_until(lambda: worker.link._connection is not before)
        send(delivery, worker, chunks)

    source, target = (nn.Linear(600, 600) for _ in range(2))
    with Apart(timeout=5.0, connect_timeout=20.0) as sender, futures.ThreadPoolExecutor(1) as pool:
        replaced = connect_pair(sender, source, nn.Linear(600, 600))
        successor = copy.copy(sender)
        successor.init_on_receiver(model=target, worker_idx=0)
        monkeypatch.setattr(Delivery, "send", send_late)
        add_one(source)
        sender.send()
        joining[0].result(LONG)
        assert same(source, target)
        for receiver in (replaced, successor):
            receiver.shutdown()


def test_a_worker_that_leaves_during_a_payload_is_heard(joint: Joint) -> None:
    """Its goodbye is not dropped because the connection for payloads ends first."""
    router, (here, there) = Router(), signed_pair()
    remote = RemoteConnection(here, TOKEN, name="1", host="there", client=joint.client, router=router)
    router.add(remote)
    Connection(there, TOKEN).send(WeightChunk(Kind.GOODBYE, {}), LONG)
    joint.relay.close()
    with slot_of_size(SMALL) as slot, futures.ThreadPoolExecutor(1) as pool:
        sending = pool.submit(router.deliver, slot.tensor, remote, LONG)
        futures.wait([sending], 0.3)
        goodbye = remote.recv(LONG, None)
        remote.close()
        with pytest.raises(LinkClosedError):
            sending.result(LONG)
    assert goodbye is not None
    assert goodbye.kind is Kind.GOODBYE
    there.close()


def test_other_hosts_do_not_wait_for_the_goodbye_of_one(
    joint: Joint, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first host gets the payload while the second one, whose relay has ended, may still say goodbye."""
    monkeypatch.setattr(routing, "_GOODBYE_SECONDS", LONG)
    router = Router()
    with closing(Joint()) as after, slot_of_size(SMALL) as slot, futures.ThreadPoolExecutor(2) as pool:
        remotes = remote_of(joint, router, "first"), remote_of(after, router, "second")
        after.relay.close()
        router.expect(slot.tensor, remotes)
        lost = pool.submit(router.deliver, slot.tensor, remotes[1], 4 * LONG)
        wait_until(lambda: after.client.incoming_link is None and remotes[1] in router._busy)
        router.deliver(slot.tensor, remotes[0], LONG)
        assert remotes[1].lost is None
        remotes[1].close()
        with pytest.raises(LinkClosedError):
            lost.result(LONG)


def test_an_unexpected_error_loses_all_hosts_of_the_chain(
    joint: Joint, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object) -> bytes:
        time.sleep(0.5)  # the other host answers meanwhile
        raise RuntimeError("unexpected")

    router = Router()
    with closing(Joint()) as after, slot_of_size(INLINE_BYTES) as one, slot_of_size(INLINE_BYTES) as other:
        remotes = remote_of(joint, router, "first"), remote_of(after, router, "second")
        router.expect(one.tensor, remotes)
        with monkeypatch.context() as patch:
            patch.setattr(joint.client, "receive_location", fail)
            with pytest.raises(RuntimeError, match="unexpected"):
                router.deliver(one.tensor, remotes[0], LONG)
        with pytest.raises(LinkClosedError):  # its answer is not taken for the one to this payload
            router.deliver(other.tensor, remotes[1], LONG)


def test_a_sender_that_is_gone_ends_the_relay(joint: Joint) -> None:
    joint.client.close()
    joint.relay._thread.join(LONG)
    assert not joint.relay._thread.is_alive()
    assert joint.failures == []  # the frames of the sender end, too


def test_a_sender_that_cannot_be_reached_is_reported() -> None:
    failures: list[Exception] = []

    def connect(number: int) -> SignedStream:
        raise LinkClosedError("no way")

    relay = HostRelay(connect, TOKEN, None, failures.append)
    relay._thread.join(LONG)
    assert list(map(str, failures)) == ["no connection for payloads (no way)"]


def test_a_second_connection_that_cannot_be_made_is_reported() -> None:
    failures: list[Exception] = []
    here, there = signed_pair(tcp=True)

    def connect(number: int) -> SignedStream:
        if number == 1:
            raise LinkClosedError("no way")
        return here

    relay, client = HostRelay(connect, TOKEN, None, failures.append), RelayClient(0, "gloo", 2)
    client.open(there)
    relay._thread.join(LONG)
    assert list(map(str, failures)) == ["no connection for payloads (no way)"]
    with pytest.raises(LinkClosedError):
        there.receive_json(LONG)
    client.close()


def test_connections_are_made_at_the_same_time() -> None:
    together, pairs = threading.Barrier(2, timeout=LONG), [signed_pair(tcp=True) for _ in range(3)]

    def connect(number: int) -> SignedStream:
        if number:
            together.wait()
        return pairs[number][0]

    relay, client = HostRelay(connect, TOKEN, None, list[Exception]().append), RelayClient(0, "gloo", 3)
    for number, (_, there) in enumerate(pairs):
        client.open(there, number)
    assert len(relay._sender.get(LONG).streams) == 3
    client.close()
    relay._thread.join(LONG)


# -- a chain of hosts ----------------------------------------------------------------------------------


def link(before: Joint, after: Joint, name: str = "link") -> None:
    where = after.ask(do="listen", name=name)
    assert before.ask(do="link", name=name, patience=5.0, **where) == {}


def take_along(before: Joint, after: Joint, slot: SharedBuffer) -> list[dict[str, Any]]:
    """Send a payload to the first host, which forwards it; return both answers."""
    command = {"do": "take", "number": 1, "checksum": CHECKSUM, "patience": 5.0}
    onward = {"link": None, "onward": True} | before.client.take_command_for(slot.tensor)
    before.client.send_command(command | onward, LONG)
    from_link = {"link": "link", "onward": False} | after.client.take_command_for(slot.tensor)
    after.client.send_command(command | from_link, LONG)
    total = before.client.send_payload(slot.tensor, LONG)
    for one in (before, after):
        one.client.send_command({"do": "sum", "number": 1, "sum": total}, LONG)
    return [one.client.receive_answer(LONG) for one in (before, after)]


def assert_arrives(before: Joint, after: Joint, slot: SharedBuffer) -> None:
    """Send a payload to the first host, which forwards it; both must then have it."""
    for answer in take_along(before, after, slot):
        assert torch.equal(replica(answer, SMALL), slot.tensor)


def test_a_payload_goes_along_a_chain(joint: Joint) -> None:
    with closing(Joint()) as after, slot_of_size(SMALL) as slot:
        link(joint, after)
        for _ in range(3):
            slot.tensor.add_(1)
            assert_arrives(joint, after, slot)
        link(joint, after)  # anew
        assert_arrives(joint, after, slot)


def test_a_next_host_that_is_gone(joint: Joint) -> None:
    with closing(Joint()) as after:
        where = after.ask(do="listen", name="link")
    answer = joint.ask(do="link", name="link", patience=1.0, **where)
    assert "refused" in answer["error"]
    with slot_of_size(SMALL) as slot:
        assert torch.equal(replica(joint.take(slot), SMALL), slot.tensor)


def hear_end(stranger: socket.socket) -> bool:
    """Return whether the relay ends a connection."""
    stranger.settimeout(LONG)
    try:
        while stranger.recv(1000):
            pass
    except ConnectionError:
        pass
    return True


def test_a_stranger_that_knows_the_link_but_not_the_token(
    joint: Joint, caplog: pytest.LogCaptureFixture
) -> None:
    with closing(Joint()) as after, slot_of_size(SMALL) as slot:
        where = after.ask(do="listen", name="link")
        with pytest.raises(JoinRefusedError, match="wrong token"):
            call_relay(where, "another")
        assert eventually(lambda: "refused a connection: wrong token" in caplog.text, LONG)
        assert joint.ask(do="link", name="link", patience=5.0, **where) == {}
        assert_arrives(joint, after, slot)


@pytest.mark.parametrize("says", [b"", b"GET / HTTP/1.1\r\n", b"WUH1", bytes(100)])
def test_strangers_at_the_port_of_a_relay(joint: Joint, says: bytes) -> None:
    """Silent ones, talkative ones, and many of them: the host before it in the chain still gets through."""
    with closing(Joint()) as after, slot_of_size(SMALL) as slot, ExitStack() as stack:
        where = after.ask(do="listen", name="link")
        for _ in range(150):
            there = (where["address"], where["port"])
            stack.enter_context(socket.create_connection(there, LONG)).sendall(says)
        link(joint, after)
        assert_arrives(joint, after, slot)


@pytest.mark.parametrize("name", ["another", None, 7, {"a": 1}])
def test_a_link_that_nobody_expects_is_closed(joint: Joint, name: object) -> None:
    with closing(Joint()) as after, slot_of_size(SMALL) as slot:
        where = after.ask(do="listen", name="link")
        with closing(call_relay(where)) as odd:
            odd.send_json({"name": name, "connection": 0}, LONG)
            assert hear_end(odd.stream.sock)
        link(joint, after)
        take_along(joint, after, slot)
        with closing(call_relay(where)) as second:  # a link is not taken over by another one of its name
            second.send_json({"name": "link", "connection": 0}, LONG)
            assert hear_end(second.stream.sock)
        assert_arrives(joint, after, slot)


@pytest.mark.slow  # its limits of time are short
def test_a_next_host_that_does_not_read_leaves_time_for_another_one(joint: Joint) -> None:
    """The sender gives up a relay that does not answer within twice the patience."""
    patience = 1.0
    accepted: list[SocketStream] = []
    listener = Listener(
        listen(HERE), TOKEN, "relay", lambda stream, key, deadline: accepted.append(stream), "next", LOG
    )
    listener.start()
    try:
        port = listener._sock.getsockname()[1]
        assert joint.ask(do="link", name="link", patience=5.0, address=HERE, port=port) == {}
        with slot_of_size(NBYTES) as slot:
            answer = joint.take(slot, patience=patience, onward=True, checksum="none")
            assert answer["fd"] >= 0
            with socket.create_server((HERE, 0)) as silent:  # it never answers the handshake
                begun = time.monotonic()
                where = {"address": HERE, "port": silent.getsockname()[1]}
                command = {"do": "link", "name": "nobody", "patience": patience, **where}
                joint.client.send_command(command, patience)
                assert "error" in joint.client.receive_answer(2 * patience)
                assert patience < time.monotonic() - begun < 2 * patience
    finally:
        listener.close()
        for stream in accepted:
            stream.close()
