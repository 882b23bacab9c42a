"""Payloads that follow their frames on the connection to a worker on another host."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from stream_parts import signed_pair

from weight_update.errors import FormatError, LinkClosedError, NotEnoughMemoryError
from weight_update.testing.chunks import assert_same, in_background
from weight_update.transports.base import Allocate
from weight_update.transports.distributed.connection import FOLLOWS, Connection, WorkerConnection
from weight_update.transports.distributed.relay.payload_stream import PIECE, PayloadStream
from weight_update.transports.distributed.transfer import Checksum, joint_hex
from weight_update.transports.shared_memory.slots import SlotTable
from weight_update.wire.frames import Kind, WeightChunk

LONG = 20.0


class Following(Connection):
    """A connection on which all payloads follow their frames."""

    def place(self, chunk: WeightChunk, timeout: float | None) -> bytes:
        return FOLLOWS


Ends = tuple[Following, WorkerConnection]


@pytest.fixture
def ends() -> Iterator[Ends]:
    """Yield the sender's end and the worker's end, whose host relay waits for a command."""
    (received, frames), (awaited, commands) = signed_pair(tcp=True), signed_pair(tcp=True)
    sender = Following(frames, "token")
    worker = WorkerConnection(
        received, "token", connect=lambda number: awaited, directory=None, slots=SlotTable()
    )
    yield sender, worker
    for one in (sender, worker, commands, awaited):
        one.close()


def update(version: int, nbytes: int) -> WeightChunk:
    fields = {"base": None, "schema": "", "encoding": "", "index": 0, "count": 1, "commit": True}
    header = {"version": version, **fields, "group": None, "extra": {}}
    return WeightChunk(Kind.UPDATE, header, torch.randint(0, 256, (nbytes,), dtype=torch.uint8))


def passed(ends: Ends, chunk: WeightChunk, allocate: Allocate | None = None) -> WeightChunk:
    """Send a chunk, and return it as it arrives."""
    sending = in_background(ends[0].send, chunk, LONG)
    try:
        found = ends[1].recv(LONG, allocate)
    finally:
        sending.join()
    assert found is not None
    return found


@pytest.mark.parametrize("nbytes", [1, 5000, PIECE, 3 * PIECE + 5])
def test_a_payload_arrives_in_memory_of_the_worker(ends: Ends, nbytes: int) -> None:
    memory = torch.zeros(nbytes, dtype=torch.uint8)
    for version in range(3):
        chunk = update(version, nbytes)
        found = passed(ends, chunk, lambda size: memory[:size])
        assert_same(found, chunk)
        assert found.payload is not None
        assert found.payload.data_ptr() == memory.data_ptr()


def test_frames_without_payloads_in_between(ends: Ends) -> None:
    for version in range(3):
        chunk = update(version, 5000)
        assert_same(passed(ends, chunk), chunk)
        assert passed(ends, WeightChunk(Kind.COMMIT, {"version": version})).kind is Kind.COMMIT


def test_a_worker_without_memory_drops_the_payload(ends: Ends) -> None:
    def allocate(nbytes: int) -> torch.Tensor:
        raise NotEnoughMemoryError("no memory")

    with pytest.raises(NotEnoughMemoryError, match="no memory") as caught:
        passed(ends, update(7, PIECE), allocate)
    assert caught.value.version == 7
    chunk = update(8, PIECE)
    assert_same(passed(ends, chunk), chunk)


def test_a_payload_that_was_changed_on_the_way(ends: Ends, monkeypatch: pytest.MonkeyPatch) -> None:
    send = PayloadStream.send_payload

    def send_another(self: PayloadStream, payload: torch.Tensor, patience: float) -> str:
        other = payload.clone()
        other[100] ^= 1
        send(self, other, patience)
        total = Checksum()
        total.add(payload)
        return joint_hex([total])

    monkeypatch.setattr(PayloadStream, "send_payload", send_another)
    with pytest.raises(FormatError, match="the payload's checksum is wrong"):
        passed(ends, update(1, 5000))


def test_a_sender_that_ends_in_the_middle(ends: Ends, monkeypatch: pytest.MonkeyPatch) -> None:
    def end(self: PayloadStream, payload: torch.Tensor, patience: float) -> str:
        self.push(payload[:1000], patience)
        self.close()
        raise LinkClosedError("ended")

    monkeypatch.setattr(PayloadStream, "send_payload", end)
    with pytest.raises(LinkClosedError, match="ended"):
        ends[0].send(update(1, 5000), LONG)
    with pytest.raises(LinkClosedError, match="gone"):
        ends[1].recv(LONG, None)


def test_a_sender_takes_no_such_payload(ends: Ends) -> None:
    sender, worker = ends
    worker.place = sender.place  # type: ignore[method-assign]
    sending = in_background(worker.send, update(1, 5000), LONG)
    with pytest.raises(FormatError, match="only a sender"):
        sender.recv(LONG, None)
    sending.join()
