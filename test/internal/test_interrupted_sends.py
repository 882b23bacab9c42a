"""Trainers that go on after a signal handler has raised in the middle of ``send()``."""

from __future__ import annotations

import functools
import multiprocessing
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import closing, suppress
from types import FrameType
from typing import Any

import pytest
import torch
from faults_tools import Processes, Stripes, fill
from pairs import connect_pair, interrupt_once
from torch import nn

from weight_update import (
    BucketEncoding,
    MultiProcessWeightSyncScheme,
    ReconnectingLink,
    SharedMemWeightSyncScheme,
    WeightStrategy,
)
from weight_update.encodings.patch import encoding as patch_encoding
from weight_update.encodings.patch.changes import Changes
from weight_update.encodings.patch.encoding import PatchTracker
from weight_update.schemes import updates
from weight_update.schemes.base import WeightSyncScheme
from weight_update.sender.buffers import BufferPool
from weight_update.sender.delivery import Delivery
from weight_update.sender.groups.base import FullGroup
from weight_update.sender.pipeline import Pipeline
from weight_update.sender.sender import Sender
from weight_update.testing.processes import wait_until
from weight_update.transports.multiprocess import MPTransport
from weight_update.transports.shared_memory.transport import SharedMemTransport, SlotStream
from weight_update.wire.frames import Kind, WeightChunk

SECONDS = 15.0
Pair = Callable[[WeightSyncScheme], tuple[nn.Linear, nn.Linear]]


@pytest.fixture
def pair() -> Iterator[Pair]:
    """Return a function that connects a scheme; its timeout is far longer than the tests wait."""
    ends: list[WeightSyncScheme] = []

    def connect(scheme: WeightSyncScheme) -> tuple[nn.Linear, nn.Linear]:
        model, target = nn.Linear(64, 64), nn.Linear(64, 64)
        ends.extend((connect_pair(scheme, model, target), scheme))
        return model, target

    yield connect
    for end in ends:
        end.shutdown()


def interrupted_send(scheme: WeightSyncScheme, model: nn.Linear) -> None:
    with torch.no_grad():
        model.weight[0] = 3.0
    with pytest.raises(KeyboardInterrupt):
        scheme.send()


def sender_of(scheme: WeightSyncScheme) -> Sender:
    sender = scheme._require_sender().sender
    assert isinstance(sender, Sender)
    return sender


def interrupted_after(scheme: WeightSyncScheme, number: int) -> bool:
    """Send, interrupted after one of the calls in SchemeUpdates, and again before the error is handled."""
    left = number

    def interrupt(frame: FrameType, event: str, _: object) -> None:
        nonlocal left
        caller = frame.f_back
        if event == "return" and caller is not None and caller.f_code.co_filename == updates.__file__:
            left -= 1
            if left < 0:
                raise KeyboardInterrupt  # which also ends the profiling

    try:
        sys.setprofile(interrupt)
        scheme.send()
        sys.setprofile(None)
    except KeyboardInterrupt:  # its traceback keeps frames
        send_again(scheme)
        return True
    return False


def test_between_the_calls_of_send(pair: Pair) -> None:
    scheme = SharedMemWeightSyncScheme(timeout=SECONDS)
    model, target = pair(scheme)
    number = 0
    while interrupted_after(scheme, number):
        number += 1
    assert number > 5
    assert torch.equal(model.weight, target.weight)


def send_again(scheme: WeightSyncScheme) -> None:
    """Send as soon as the worker is connected."""
    deadline = time.monotonic() + SECONDS
    while not sender_of(scheme).table[0].joined and time.monotonic() < deadline:
        time.sleep(0.01)
    scheme.send_async().wait(SECONDS)


@pytest.mark.parametrize("selected", [None, ["weight"]])
def test_a_commit_of_changes(pair: Pair, monkeypatch: pytest.MonkeyPatch, selected: list[str] | None) -> None:
    scheme = SharedMemWeightSyncScheme(WeightStrategy(encoding="patch", select=selected))
    model, target = pair(scheme)
    interrupt_once(monkeypatch, PatchTracker, "_write", after=True)
    interrupted_send(scheme, model)
    for row in 1, 2:
        with torch.no_grad():
            model.weight[row] = 4.0
        send_again(scheme)
        assert torch.equal(model.weight, target.weight)
        assert torch.equal(model.bias, target.bias)
    assert scheme.last_report is not None
    assert scheme.last_report.encoding == "patch"


@pytest.mark.parametrize("selected", [None, ["weight"]])
def test_a_snapshot_without_memory(
    pair: Pair, monkeypatch: pytest.MonkeyPatch, selected: list[str] | None
) -> None:
    monkeypatch.setattr(patch_encoding, "_FEW", 1)  # a thread of its own writes the snapshot
    scheme = SharedMemWeightSyncScheme(WeightStrategy(encoding="patch", select=selected))
    model, target = pair(scheme)
    real = PatchTracker._write

    def write(tracker: PatchTracker, changes: Changes) -> None:
        monkeypatch.setattr(PatchTracker, "_write", real)
        raise MemoryError

    monkeypatch.setattr(PatchTracker, "_write", write)
    with torch.no_grad():
        model.weight[0] = 4.0
    scheme.send()
    with pytest.raises(MemoryError):
        scheme.send()
    for row in 1, 2:
        with torch.no_grad():
            model.weight[row] = 4.0
        scheme.send()
        assert torch.equal(model.weight, target.weight)
        assert torch.equal(model.bias, target.bias)
    assert scheme.last_report is not None
    assert scheme.last_report.encoding == "patch"


@pytest.mark.parametrize(
    ("owner", "method"),
    [(BufferPool, "take"), (FullGroup, "stage"), (FullGroup, "commit")],
)
def test_an_update_of_all_weights(
    pair: Pair, monkeypatch: pytest.MonkeyPatch, owner: type, method: str
) -> None:
    """Neither its weights nor its memory are lost."""
    scheme = SharedMemWeightSyncScheme()
    model, target = pair(scheme)
    interrupt_once(monkeypatch, owner, method, after=True)
    interrupted_send(scheme, model)
    send_again(scheme)
    assert torch.equal(model.weight, target.weight)
    in_use = [slot.in_use for slot in sender_of(scheme)._pool._slots]
    assert in_use.count(True) == 1, "the group and the worker use one slot"


@pytest.mark.parametrize("kind", [SharedMemWeightSyncScheme, MultiProcessWeightSyncScheme])
@pytest.mark.parametrize("encoding", ["dense", "patch"])
def test_an_update_that_is_not_written(
    pair: Pair, monkeypatch: pytest.MonkeyPatch, kind: type[WeightSyncScheme], encoding: str
) -> None:
    scheme = kind(WeightStrategy(encoding=encoding))
    model, target = pair(scheme)
    interrupt_once(monkeypatch, Delivery, "_load", after=True)
    interrupted_send(scheme, model)
    send_again(scheme)
    assert torch.equal(model.weight, target.weight)


def test_the_start_of_a_thread_that_writes(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    """A thread that was just started ends."""
    scheme = SharedMemWeightSyncScheme(WeightStrategy(encoding=BucketEncoding(bucket_size=64)))
    model, target = pair(scheme)
    sender_of(scheme).table[0].close_outbox()
    wait_until(lambda: not outboxes())
    interrupt_once(monkeypatch, threading.Thread, "start", after=True)
    interrupted_send(scheme, model)
    send_again(scheme)
    wait_until(lambda: len(outboxes()) == 1)
    assert torch.equal(model.weight, target.weight)


def outboxes() -> list[str]:
    return [thread.name for thread in threading.enumerate() if "-outbox-" in thread.name]


def test_a_frame_that_may_be_cut_in_two(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    """It may be of another kind than an update, as COMMIT is."""
    scheme = SharedMemWeightSyncScheme()
    model, target = pair(scheme)
    worker = sender_of(scheme).table[0]
    connections = worker.connections
    interrupt_once(monkeypatch, SharedMemTransport, "send_chunk", after=False)
    with pytest.raises(KeyboardInterrupt):
        sender_of(scheme)._delivery.broadcast([worker], WeightChunk(Kind.ABORT, {"version": 5}))
    wait_until(lambda: worker.connections > connections)
    send_again(scheme)
    assert torch.equal(model.weight, target.weight)


def test_an_interrupt_ends_no_connection_that_nothing_was_written_to(monkeypatch: pytest.MonkeyPatch) -> None:
    with closing(Processes()) as processes:
        scheme, model = processes.scheme(SharedMemWeightSyncScheme), Stripes(2, 64)
        processes.launch(scheme, model, functools.partial(Stripes, 2, 64), 2)
        table = sender_of(scheme).table
        before = [worker.connections for worker in table]
        interrupt_once(monkeypatch, SharedMemTransport, "send_chunk", after=False)
        with pytest.raises(KeyboardInterrupt):
            scheme.send(fill(model, 1))
        wait_until(lambda: table[0].connections > before[0] and table[0].joined)
        assert table[1].connections == before[1]


@pytest.mark.parametrize(
    ("owner", "method"), [(ReconnectingLink, "disconnect"), (SlotStream, "close"), (Delivery, "lose")]
)
def test_a_second_interrupt_while_a_worker_is_lost(
    pair: Pair, monkeypatch: pytest.MonkeyPatch, owner: Any, method: str
) -> None:
    """The frame is cut in two, so the worker joins again only if its connection ends."""
    scheme = SharedMemWeightSyncScheme()
    model, target = pair(scheme)
    interrupt_once(monkeypatch, SharedMemTransport, "send_chunk", after=False)
    interrupt_once(monkeypatch, owner, method, after=False)
    interrupted_send(scheme, model)
    send_again(scheme)
    assert torch.equal(model.weight, target.weight)


def test_a_handler_whose_error_has_no_text(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    class Alarm(Exception):
        pass

    def alarm() -> None:
        raise Alarm

    scheme, reasons = SharedMemWeightSyncScheme(), list[str]()
    model, target = pair(scheme)
    scheme.add_observer(lambda event: reasons.append(getattr(event, "reason", "")))
    interrupt_once(monkeypatch, SharedMemTransport, "send_chunk", after=False, handle=alarm)
    with pytest.raises(Alarm):
        scheme.send()
    wait_until(lambda: any(one.startswith("a signal handler interrupted the call") for one in reasons))
    send_again(scheme)
    assert torch.equal(model.weight, target.weight)


def test_a_version_that_a_pipeline_begins(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    scheme = SharedMemWeightSyncScheme(WeightStrategy(encoding="bucket", max_in_flight=2))
    model, target = pair(scheme)
    interrupt_once(monkeypatch, Pipeline, "run", after=False)
    interrupted_send(scheme, model)
    send_again(scheme)
    assert torch.equal(model.weight, target.weight)


@pytest.mark.timeout(20, method="thread")
@pytest.mark.parametrize(("owner", "method"), [(SharedMemTransport, "send_chunk"), (Delivery, "_load")])
def test_a_signal_handler_that_shuts_down(
    pair: Pair, monkeypatch: pytest.MonkeyPatch, owner: Any, method: str
) -> None:
    scheme = SharedMemWeightSyncScheme()
    model, _ = pair(scheme)
    interrupt_once(monkeypatch, owner, method, after=False, handle=scheme.shutdown)
    interrupted_send(scheme, model)


@pytest.mark.parametrize("call", ["acquire", "read"])
def test_a_queue_is_read_after_a_read_that_was_interrupted(call: str) -> None:
    """Handlers of signals run after a call of C."""
    context = multiprocessing.get_context("spawn")
    queues = context.Queue(), context.Queue()
    sender, receiver = MPTransport(*queues, end="sender"), MPTransport(*queues, end="receiver")

    def interrupt(frame: FrameType, event: str, called: Any) -> None:
        if event == "c_return" and called.__name__ == call:
            sys.setprofile(None)
            raise KeyboardInterrupt

    for _ in range(2):
        sender.send_chunk(WeightChunk(Kind.GOODBYE, {}))
    wait_until(queues[0]._reader.poll)
    try:
        sys.setprofile(interrupt)
        with suppress(KeyboardInterrupt):
            receiver.recv_chunk(SECONDS)
    finally:
        sys.setprofile(None)
    assert receiver.recv_chunk(SECONDS) is not None
    for end in (sender, receiver):
        end.close()


def test_a_queue_sends_after_an_interrupted_start_of_its_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    context = multiprocessing.get_context("spawn")
    weights, acks = context.Queue(), context.Queue()
    link = MPTransport(weights, acks, end="sender")
    interrupt_once(monkeypatch, threading.Thread, "start", after=False)
    with pytest.raises(KeyboardInterrupt):
        link.send_chunk(WeightChunk(Kind.GOODBYE, {}))
    link.send_chunk(WeightChunk(Kind.GOODBYE, {}))
    assert weights.get(timeout=SECONDS) is not None
    link.close()


@pytest.mark.parametrize("where", ["while it wakes the thread", "before it releases the lock"])
def test_a_queue_takes_items_after_one_whose_put_was_interrupted(
    monkeypatch: pytest.MonkeyPatch, where: str
) -> None:
    """The thread of the queue sends the item that follows, which tells the worker to join again."""
    context = multiprocessing.get_context("spawn")
    weights, acks = context.Queue(), context.Queue()
    link, condition = MPTransport(weights, acks, end="sender"), weights._notempty
    link.send_chunk(WeightChunk(Kind.GOODBYE, {}))
    assert weights.get(timeout=SECONDS) is not None
    wait_until(lambda: bool(condition._waiters))

    def interrupted(item: Any, timeout: float | None) -> None:
        weights._sem.acquire()
        condition.acquire()
        weights._buffer.append(item)
        if where == "while it wakes the thread":
            condition._waiters[0].release()  # notify() was about to remove it
            condition.release()
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(weights, "put", interrupted)
        with pytest.raises(KeyboardInterrupt):
            link.send_chunk(WeightChunk(Kind.GOODBYE, {}))
    assert weights.get(timeout=SECONDS) is not None
    time.sleep(0.1)  # the thread of the queue waits again
    threading.Thread(target=link.disconnect, daemon=True).start()  # it would wait for ever for a lock
    assert weights.get(timeout=SECONDS) is None
    link.close()
