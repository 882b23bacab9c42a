"""Payloads in pieces over a connection, and their way on to a next host."""

from __future__ import annotations

import gc
import os
import signal
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from stream_parts import signed_pair

from weight_update.errors import LinkClosedError, SyncTimeoutError
from weight_update.testing.chunks import in_background
from weight_update.testing.processes import eventually
from weight_update.transports.distributed import transfer
from weight_update.transports.distributed.relay import nccl, payload_stream
from weight_update.transports.distributed.relay.payload_stream import (
    PIECE,
    SEND_BUFFER,
    AwaitedStream,
    Forwarder,
    PayloadStream,
    discarded_pieces,
    pieces_of,
)
from weight_update.transports.distributed.transfer import BLOCK, Checksum, joint_hex

needs_library = pytest.mark.skipif(transfer.library is None, reason="there was no compiler at installation")

LONG = 20.0
NBYTES = 16 << 20  # more than the kernel takes from a sender whose other end does not read
Pair = tuple[PayloadStream, PayloadStream]


def connected(*, tcp: bool = False, connections: int = 1) -> Pair:
    """Return the two ends of a stream of so many connections; the first one sends payloads."""
    ends = AwaitedStream(), AwaitedStream()
    for number in reversed(range(connections)):
        for end, signed in zip(ends, signed_pair(tcp=tcp), strict=True):
            end.add(PayloadStream(signed), number, connections)
    ours, theirs = (end.get(0.0) for end in ends)
    return ours, theirs


@pytest.fixture(params=[pytest.param(True, marks=needs_library), False], ids=["compiled", "python"])
def compiled(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> bool:
    """Transfer pieces with or without the compiled loop."""
    if not request.param:
        monkeypatch.setattr(transfer, "library", None)
    return bool(request.param)


@pytest.fixture
def pair(compiled: bool) -> Iterator[Pair]:
    sender, receiver = connected()
    with closing(sender), closing(receiver):
        yield sender, receiver


@pytest.fixture(params=[1, 2, 3], ids=["one connection", "two", "three"])
def several(request: pytest.FixtureRequest, compiled: bool) -> Iterator[Pair]:
    """Return the two ends of a stream of several connections."""
    sender, receiver = connected(connections=request.param)
    with closing(sender), closing(receiver):
        yield sender, receiver


def random_bytes(count: int) -> torch.Tensor:
    return torch.randint(0, 256, (count,), dtype=torch.uint8)


@pytest.mark.parametrize("near", [True, False])
def test_the_send_buffer_is_small_only_if_the_other_machine_is_near(
    monkeypatch: pytest.MonkeyPatch, near: bool
) -> None:
    # on a busy machine, even the way over loopback may take longer than the real limit
    monkeypatch.setattr(payload_stream, "_NEAR", 60_000_000 if near else -1)
    sender, receiver = connected(tcp=True)
    with closing(sender), closing(receiver):
        size = sender.signed.stream.sock.getsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF)
    largest = int(Path("/proc/sys/net/core/wmem_max").read_text())
    assert (size == 2 * min(SEND_BUFFER, largest)) is near


def test_the_send_buffer_holds_a_piece_while_the_next_one_arrives() -> None:
    assert PIECE <= 2 * SEND_BUFFER, "else a link to a next host is idle for a part of the time"
    assert PayloadStream.sent_piece > 2 * SEND_BUFFER, "else sending takes longer"
    assert nccl.NcclStream.sent_piece == PIECE


@pytest.mark.parametrize("size", [0, 1, 2047, PIECE - 1, PIECE, PIECE + 1, 3 * BLOCK + 77, 8 * BLOCK])
def test_a_payload_arrives_whole_between_messages(several: Pair, size: int) -> None:
    sender, receiver = several
    payload, sums, expected = random_bytes(size), [], Checksum()
    for piece in pieces_of(payload):
        expected.add(piece)

    def send() -> None:
        sender.signed.send_json({"before": size}, LONG)
        sums.append(sender.send_payload(payload, LONG))
        sender.signed.send_json({"after": size}, LONG)

    sending = in_background(send)
    assert receiver.signed.receive_json(LONG) == {"before": size}
    into = torch.zeros_like(payload)
    total = receiver.recv_payload(pieces_of(into), LONG, Forwarder(None))
    assert receiver.signed.receive_json(LONG) == {"after": size}
    sending.join()
    assert torch.equal(into, payload)
    assert sums == [total] == [joint_hex([expected])]


def test_blocks_travel_over_all_connections(compiled: bool) -> None:
    sender, receiver = connected(connections=3)
    with closing(sender), closing(receiver):
        payload = random_bytes(4 * BLOCK)
        sending = in_background(sender.send_payload, payload, LONG)
        for number, blocks in enumerate([(0, 3), (1,), (2,)]):
            got = torch.zeros(BLOCK, dtype=torch.uint8)
            for block in blocks:
                receiver.streams[number].pull(got, LONG, Checksum())
                assert torch.equal(got, payload[block * BLOCK :][:BLOCK])
        sending.join()


@pytest.mark.parametrize("end", [0, 1])
def test_one_connection_that_breaks_ends_all(end: int) -> None:
    pair = connected(connections=3)
    with closing(pair[0]), closing(pair[1]):
        pair[1 - end].streams[2].signed.close()
        actions = (
            lambda: pair[0].send_payload(torch.zeros(NBYTES, dtype=torch.uint8), LONG),
            lambda: pair[1].recv_payload(discarded_pieces(NBYTES), LONG, Forwarder(None)),
        )
        start = time.monotonic()
        with pytest.raises(LinkClosedError, match="the other end is gone"):
            actions[end]()
        assert time.monotonic() - start < LONG / 2
        for stream in pair[end].streams:
            with pytest.raises(LinkClosedError, match="closed"):
                stream.push_now(torch.zeros(1, dtype=torch.uint8))


def test_ctrl_c_ends_the_threads_of_all_connections() -> None:
    pair = connected(connections=3)
    with closing(pair[0]), closing(pair[1]):
        in_background(lambda: (time.sleep(0.3), os.kill(os.getpid(), signal.SIGINT)))
        start = time.monotonic()
        with pytest.raises(KeyboardInterrupt):
            pair[0].send_payload(torch.zeros(NBYTES, dtype=torch.uint8), LONG)  # the other end does not read
        assert time.monotonic() - start < LONG / 2
        assert eventually(
            lambda: not any("connection" in thread.name for thread in threading.enumerate()), LONG
        )


def test_a_process_that_can_start_no_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: Any, **__: Any) -> None:
        raise RuntimeError("can't start new thread")

    pair = connected(connections=2)
    monkeypatch.setattr(payload_stream, "call_in_thread", refuse)
    with (
        closing(pair[0]),
        closing(pair[1]),
        pytest.raises(LinkClosedError, match="no thread for connection 0"),
    ):
        pair[0].send_payload(random_bytes(2 * BLOCK), LONG)


def test_a_stream_is_open_when_all_its_connections_are() -> None:
    awaited, ends = AwaitedStream(), [connected() for _ in range(5)]
    streams = [end for end, _ in ends]
    awaited.add(streams[0], 0, 2)
    with pytest.raises(SyncTimeoutError):
        awaited.get(0.0)
    for stream, odd in ((streams[1], 0), (streams[2], 2), (streams[3], None)):
        awaited.add(stream, odd, 2)  # type: ignore[arg-type]
        with pytest.raises(LinkClosedError):
            stream.push_now(torch.zeros(1, dtype=torch.uint8))
    awaited.add(streams[4], 1, 2)
    assert awaited.get(0.0).streams == [streams[0], streams[4]]
    for pair in ends:
        for one in pair:
            one.close()


def test_connections_that_come_before_and_after_the_close_are_closed() -> None:
    awaited, ends = AwaitedStream(), [connected() for _ in range(2)]
    awaited.add(ends[0][0], 0, 2)
    awaited.close()
    awaited.add(ends[1][0], 1, 2)
    with pytest.raises(LinkClosedError):
        awaited.get(0.0)
    for here, there in ends:
        with pytest.raises(LinkClosedError):
            there.signed.receive_json(LONG)
        there.close()
        here.close()


@pytest.mark.parametrize("size", [1, 2047, 2049, PIECE, BLOCK + 3000])
def test_sums_are_those_of_the_bytes_that_arrived(pair: Pair, size: int) -> None:
    """The bytes come in parts that end anywhere within a row."""
    payload, into, sums = random_bytes(size), torch.zeros(size, dtype=torch.uint8), []

    def receive() -> None:
        sums.append(pair[1].recv_payload(pieces_of(into), LONG, Forwarder(None)))

    receiving, rest = in_background(receive), payload
    while rest.numel():
        part, rest = rest[: 1 + rest.numel() // 3], rest[1 + rest.numel() // 3 :]
        pair[0].push(part, LONG)
        time.sleep(0.002)
    receiving.join(LONG)
    expected = Checksum()
    for piece in pieces_of(payload):
        expected.add(piece)
    assert torch.equal(into, payload)
    assert sums == [joint_hex([expected])]


def test_an_end_that_sends_a_byte_now_and_then(pair: Pair) -> None:
    """Bytes that keep coming do not keep the thread beyond its limit of time."""
    ended = threading.Event()

    def send_slowly() -> None:
        while not ended.wait(0.015):
            pair[0].push(torch.zeros(1, dtype=torch.uint8), LONG)

    sending, start = in_background(send_slowly), time.monotonic()
    try:
        with pytest.raises(SyncTimeoutError):
            pair[1].recv_payload(discarded_pieces(PIECE), 0.3, Forwarder(None))
    finally:
        ended.set()
    sending.join(LONG)
    assert time.monotonic() - start < LONG / 2


def test_the_checksum_shows_a_change_on_the_way(pair: Pair) -> None:
    payload, sums = random_bytes(2 * PIECE), []
    sending = in_background(lambda: sums.append(pair[0].send_payload(payload, LONG)))
    raw = pair[1].signed.stream.recv(payload.numel(), time.monotonic() + LONG)
    sending.join()
    changed = torch.frombuffer(bytearray(raw), dtype=torch.uint8)
    assert torch.equal(changed, payload)
    changed[PIECE + 5] ^= 16
    one, other = connected()
    with closing(one), closing(other):
        sending = in_background(one.push, changed, LONG)
        total = other.recv_payload(pieces_of(torch.empty_like(changed)), LONG, Forwarder(None))
        sending.join()
    assert sums != [total]


def test_pieces_share_the_memory_of_the_payload() -> None:
    payload = torch.zeros(2 * PIECE + 3, dtype=torch.uint8)
    pieces = pieces_of(payload)
    assert [piece.numel() for piece in pieces] == [PIECE, PIECE, 3]
    for number, piece in enumerate(pieces, 1):
        piece.fill_(number)
    assert payload.bincount().tolist() == [0, PIECE, PIECE, 3]
    discarded = discarded_pieces(payload.numel())
    assert [piece.numel() for piece in discarded] == [PIECE, PIECE, 3]
    assert len({piece.data_ptr() for piece in discarded}) == 1


def test_an_end_that_does_not_read(pair: Pair) -> None:
    start = time.monotonic()
    with pytest.raises(SyncTimeoutError):
        pair[0].send_payload(torch.zeros(NBYTES, dtype=torch.uint8), 0.1)
    assert time.monotonic() - start < LONG


def test_an_end_that_sends_half_a_payload(pair: Pair) -> None:
    payload = random_bytes(1000)
    pair[0].push(payload, LONG)
    start = time.monotonic()
    with pytest.raises(SyncTimeoutError):
        pair[1].recv_payload(discarded_pieces(PIECE), 0.1, Forwarder(None))
    assert time.monotonic() - start < LONG


def test_an_end_that_is_slow_is_waited_for(pair: Pair) -> None:
    """The limit is for each piece, not for the payload."""
    payload, start = random_bytes(4 * PIECE), time.monotonic()

    def read_slowly() -> None:
        for piece in pieces_of(torch.empty_like(payload)):
            time.sleep(0.3)
            pair[1].pull(piece, LONG, Checksum())

    pair[0].signed.stream.sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 1 << 16)
    reading = in_background(read_slowly)
    pair[0].send_payload(payload, 10.0)
    reading.join()
    assert time.monotonic() - start > 1.0


@pytest.mark.parametrize("end", [0, 1])
def test_an_end_that_is_gone(pair: Pair, end: int) -> None:
    pair[end].close()
    actions = (
        lambda: pair[1].recv_payload(discarded_pieces(NBYTES), LONG, Forwarder(None)),
        lambda: pair[0].send_payload(torch.zeros(NBYTES, dtype=torch.uint8), LONG),
    )
    with pytest.raises(LinkClosedError) as failure:
        actions[end]()
    assert str(failure.value).count("the other end is gone") == 1


@pytest.mark.parametrize("waits", ["for a message", "for a payload", "to send"])
@pytest.mark.parametrize("closes", ["this end", "the other end"])
def test_closing_wakes_a_thread_that_waits(several: Pair, waits: str, closes: str) -> None:
    pair = several
    begun, ended = threading.Event(), threading.Event()
    action = {
        "for a message": lambda: pair[0].signed.receive_json(None),
        "for a payload": lambda: pair[0].recv_payload(discarded_pieces(NBYTES), LONG, Forwarder(None)),
        "to send": lambda: pair[0].send_payload(torch.zeros(NBYTES, dtype=torch.uint8), LONG),
    }[waits]

    def wait() -> None:
        begun.set()
        with pytest.raises(LinkClosedError):
            action()
        ended.set()

    thread = in_background(wait)
    assert begun.wait(LONG)
    pair[closes == "the other end"].close()
    thread.join(LONG)
    assert ended.is_set()


def test_an_end_that_was_closed_does_nothing(pair: Pair) -> None:
    pair[0].close()
    with pytest.raises(LinkClosedError, match="closed"):
        pair[0].signed.send_json({}, LONG)
    with pytest.raises(LinkClosedError, match="closed"):
        pair[0].push_now(torch.zeros(1, dtype=torch.uint8))


# -- the way on to the next host -----------------------------------------------------------------------


def receive_and_forward(pair: Pair, payload: torch.Tensor, forwarder: Forwarder) -> torch.Tensor:
    """Return the payload as it arrived at a host that forwards it."""
    sending = in_background(pair[0].send_payload, payload, LONG)
    into = torch.zeros_like(payload)
    pair[1].recv_payload(pieces_of(into), LONG, forwarder)
    sending.join()
    return into


def test_all_connections_forward_their_pieces(several: Pair) -> None:
    here, there = connected(connections=len(several[0].streams))
    with closing(here), closing(there):
        forwarder, payload = Forwarder(here), random_bytes(NBYTES)
        assert torch.equal(receive_and_forward(several, payload, forwarder), payload)
        got = torch.zeros_like(payload)
        reading = in_background(there.recv_payload, pieces_of(got), LONG, Forwarder(None))
        assert forwarder.finish(LONG)
        reading.join()
        assert torch.equal(got, payload)


def test_pieces_go_on_as_they_arrive(pair: Pair) -> None:
    """The next host has a part of the first piece while the second one has not been sent to this host."""
    here, there = connected()
    with closing(here), closing(there):
        forwarder, payload = Forwarder(here), random_bytes(2 * PIECE)
        got, into = torch.zeros_like(payload), torch.zeros_like(payload)
        receiving = in_background(pair[1].recv_payload, pieces_of(into), LONG, forwarder)
        pair[0].push(payload[:PIECE], LONG)
        there.pull(got[:1000], LONG, Checksum())
        assert receiving.is_alive()
        pair[0].push(payload[PIECE:], LONG)
        receiving.join(LONG)
        finishing = in_background(forwarder.finish, LONG)
        there.pull(got[1000:], LONG, Checksum())
        finishing.join(LONG)
        assert torch.equal(got, payload)


def test_a_next_host_that_stalls_does_not_delay_this_one(pair: Pair) -> None:
    here, there = connected()
    with closing(here), closing(there):
        forwarder, payload = Forwarder(here), random_bytes(NBYTES)
        assert torch.equal(receive_and_forward(pair, payload, forwarder), payload)
        assert not forwarder.finish(0.1)
        assert not forwarder.finish(LONG), "it is not tried again"


def test_a_next_host_that_reads_late_gets_all(pair: Pair) -> None:
    here, there = connected()
    with closing(here), closing(there):
        forwarder, payload = Forwarder(here), random_bytes(NBYTES)
        receive_and_forward(pair, payload, forwarder)
        got = torch.zeros_like(payload)
        reading = in_background(there.recv_payload, pieces_of(got), LONG, Forwarder(None))
        assert forwarder.finish(LONG)
        reading.join()
        assert torch.equal(got, payload)


def test_a_next_host_that_dies_affects_nobody(pair: Pair) -> None:
    here, there = connected()
    with closing(here):
        there.close()
        forwarder, payload = Forwarder(here), random_bytes(2 * PIECE)
        assert torch.equal(receive_and_forward(pair, payload, forwarder), payload)
        assert not forwarder.finish(LONG)


def test_a_next_host_whose_backend_waits_in_vain_affects_nobody(
    pair: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As NCCL does, which takes a whole piece or none."""

    def push_now(self: PayloadStream, piece: torch.Tensor) -> int:
        raise SyncTimeoutError("the other end did not take part")

    here, there = connected()
    with closing(here), closing(there):
        monkeypatch.setattr(PayloadStream, "push_now", push_now)
        forwarder, payload = Forwarder(here), random_bytes(2 * PIECE)
        assert torch.equal(receive_and_forward(pair, payload, forwarder), payload)
        assert not forwarder.finish(LONG)


def test_without_a_next_host_nothing_is_forwarded(pair: Pair) -> None:
    assert not Forwarder(None).finish(LONG)


# -- NCCL ----------------------------------------------------------------------------------------------


def test_a_connection_whose_nccl_fails_is_closed(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    """The machine may lack CUDA, so the constructor of NCCL's group is one that raises."""

    def unavailable(*_: Any) -> None:
        raise RuntimeError("NCCL error")

    monkeypatch.setattr(nccl, "require_nccl", lambda: None)
    monkeypatch.setattr(torch.distributed, "ProcessGroupNCCL", unavailable, raising=False)
    monkeypatch.setattr(torch.cuda, "init", lambda: None)
    monkeypatch.setattr(nccl, "gpu_in_use", lambda: 0)
    with pytest.raises(LinkClosedError, match="no NCCL connection"):
        nccl.payload_stream(pair[0].signed, "nccl", 0)
    with pytest.raises(LinkClosedError):
        pair[1].signed.receive_json(LONG)


def test_what_one_end_of_nccl_sets_the_other_gets(pair: Pair) -> None:
    """NCCL exchanges its addresses over the connection; no store that strangers reach is involved."""
    here, there = nccl._ExchangeStore(pair[0].signed), nccl._ExchangeStore(pair[1].signed)
    setting = in_background(here.set, "address", b"\0\xff" * 50)
    assert there.get("address") == b"\0\xff" * 50
    setting.join()
    assert here.get("address") == b"\0\xff" * 50
    pair[0].close()
    with pytest.raises(LinkClosedError):
        there.get("never set")


def test_nccl_can_call_its_store_for_as_long_as_it_lives(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    """torch keeps only the C++ half of a store, whose methods are gone when the Python object is."""

    class Group:
        def __init__(self, store: Any, rank: int, size: int) -> None:
            self.store = torch.distributed.PrefixStore(f"{rank}", store)

        def abort(self) -> None:
            pass

    monkeypatch.setattr(nccl, "require_nccl", lambda: None)
    monkeypatch.setattr(torch.distributed, "ProcessGroupNCCL", Group, raising=False)
    monkeypatch.setattr(torch.cuda, "init", lambda: None)
    monkeypatch.setattr(nccl, "gpu_in_use", lambda: 0)
    stream: Any = nccl.payload_stream(pair[0].signed, "nccl", 0)
    gc.collect()
    stream._nccl.store.set("address", "here")
    assert pair[1].signed.receive_json(LONG) == {"key": "0/address", "value": b"here".hex()}
    stream.close()


def test_nccl_uses_the_gpu_of_its_process(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    """Connections are made in threads of their own, whose current device is the first one."""
    monkeypatch.setattr(nccl, "require_nccl", lambda: None)
    group = SimpleNamespace(abort=lambda: None)
    monkeypatch.setattr(torch.distributed, "ProcessGroupNCCL", lambda *_: group, raising=False)
    monkeypatch.setattr(torch.cuda, "init", lambda: None)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 3)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch._C, "_cuda_hasPrimaryContext", lambda index: index == 2, raising=False)
    stream = nccl.NcclStream(pair[0].signed, 0)
    assert stream._device == torch.device("cuda", 2)
    stream.close()
