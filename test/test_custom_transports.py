"""The transports and schemes of ``examples/custom_transport.py`` keep the library's contracts."""

import contextlib
import copy
import itertools
import os
import pickle
import re
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from multiprocessing.connection import Client
from pathlib import Path
from typing import Any

import pytest
import torch

from examples.custom_transport import FileScheme, FileTransport, PipeListener, PipeScheme, PipeTransport
from weight_update import (
    Capabilities,
    FormatError,
    JoinRefusedError,
    LinkClosedError,
    MemoryTransport,
    MemoryWeightSyncScheme,
    SyncFailedError,
    TransportBackend,
    WeightChunk,
    WeightSyncScheme,
)
from weight_update.schemes.base import End
from weight_update.sender import delivery
from weight_update.testing import LateJoinerContract, SchemeContract, TransportContract, greet
from weight_update.testing.chunks import (
    Ends,
    exchange,
    hello,
    must_receive,
    number,
)
from weight_update.testing.processes import wait_until
from weight_update.testing.transports import SIZES
from weight_update.wire.frames import Kind

LARGE = 65_536
EXAMPLE = Path(__file__).resolve().parent.parent / "examples" / "custom_transport.py"


@pytest.mark.smoke
class TestFileTransport(TransportContract):
    @pytest.fixture(autouse=True)
    def _place(self, tmp_path: Path) -> None:
        self.directory = tmp_path

    def make_ends(self) -> Ends:
        sender, receiver = FileTransport(self.directory, "sender"), self.make_successor()
        greet(sender, receiver)
        return sender, receiver

    def make_successor(self) -> FileTransport:
        return FileTransport(self.directory, "receiver")


class Wrong(FileTransport):
    def recv_chunk(self, timeout: float | None = None, allocate: Any = None) -> Any:
        return b"chunk" if super().recv_chunk(timeout, allocate) else None


class Sleepy(MemoryTransport):
    """A transport that does not notice the end of its link, and keeps its receiver waiting."""

    def recv_chunk(self, timeout: float | None = None, allocate: Any = None) -> WeightChunk | None:
        end = time.monotonic() + (2.0 if timeout is None else timeout)
        while time.monotonic() <= end:
            with contextlib.suppress(LinkClosedError):
                if (chunk := super().recv_chunk(0, allocate)) is not None:
                    return chunk
            time.sleep(0.001)
        return None


class Lossy(MemoryTransport):
    """A transport that drops payloads, and sends although its link is closed."""

    def send_chunk(self, chunk: WeightChunk, timeout: float | None = None) -> None:
        with contextlib.suppress(LinkClosedError):
            super().send_chunk(replace(chunk, payload=None), timeout)


class Reusing(MemoryTransport):
    """A transport that receives every payload in the same memory."""

    memory = torch.empty(1 << 20, dtype=torch.uint8)

    def recv_chunk(self, timeout: float | None = None, allocate: Any = None) -> WeightChunk | None:
        return super().recv_chunk(timeout, allocate or (lambda nbytes: self.memory[:nbytes]))


class Referring(MemoryTransport):
    """A transport that reads payloads after ``send_chunk`` has returned."""

    def send_chunk(self, chunk: WeightChunk, timeout: float | None = None) -> None:
        self._outbox.put(chunk)


class Borrowing(Referring):
    """A transport that copies only small payloads before ``send_chunk`` returns."""

    def send_chunk(self, chunk: WeightChunk, timeout: float | None = None) -> None:
        kind = Referring if chunk.payload_bytes > LARGE else MemoryTransport
        kind.send_chunk(self, chunk, timeout)


class Ring(MemoryTransport):
    """A transport that receives payloads in eight buffers, one after the other."""

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self.memory = itertools.cycle(torch.empty(8, 1 << 20, dtype=torch.uint8).unbind())

    def recv_chunk(self, timeout: float | None = None, allocate: Any = None) -> WeightChunk | None:
        return super().recv_chunk(timeout, allocate or (lambda nbytes: next(self.memory)[:nbytes]))


class Copyless(MemoryTransport):
    """A transport that ignores ``allocate`` for large payloads."""

    def recv_chunk(self, timeout: float | None = None, allocate: Any = None) -> WeightChunk | None:
        chunk = super().recv_chunk(timeout)
        if chunk is None or chunk.payload is None or allocate is None or chunk.payload_bytes > LARGE:
            return chunk
        return replace(chunk, payload=allocate(chunk.payload_bytes).copy_(chunk.payload))


class Overtaking(MemoryTransport):
    """A transport that sends large chunks in a thread of their own."""

    def send_chunk(self, chunk: WeightChunk, timeout: float | None = None) -> None:
        delay = 0.1 if chunk.payload_bytes > LARGE else 0.0
        threading.Timer(delay, super().send_chunk, (chunk, timeout)).start()
        time.sleep(0.001)


class Forgetful(MemoryTransport):
    """A transport that drops a large chunk of which a part arrived in a call that does not wait."""

    def recv_chunk(self, timeout: float | None = None, allocate: Any = None) -> WeightChunk | None:
        chunk = super().recv_chunk(timeout, allocate)
        return None if chunk is not None and chunk.payload_bytes > LARGE and timeout == 0 else chunk


class Oblivious(MemoryTransport):
    """A transport whose ``send_chunk`` does not notice that the other end was closed."""

    own_end = False

    def send_chunk(self, chunk: WeightChunk, timeout: float | None = None) -> None:
        with contextlib.nullcontext() if self.own_end else contextlib.suppress(LinkClosedError):
            super().send_chunk(chunk, timeout)

    def close(self) -> None:
        self.own_end = True
        super().close()


class Polite(MemoryTransport):
    """A transport that waits until the other end has read, though it declares that it does not."""

    capabilities = Capabilities(send_never_blocks=True)

    def send_chunk(self, chunk: WeightChunk, timeout: float | None = None) -> None:
        super().send_chunk(chunk, timeout)
        end = time.monotonic() + 2.0
        while not self._outbox.empty() and time.monotonic() < end:
            time.sleep(0.001)


class Locked(MemoryTransport):
    """A transport that cannot send while it waits."""

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self.lock = threading.Lock()

    def send_chunk(self, chunk: WeightChunk, timeout: float | None = None) -> None:
        with self.lock:
            super().send_chunk(chunk, timeout)

    def recv_chunk(self, timeout: float | None = None, allocate: Any = None) -> WeightChunk | None:
        with self.lock:
            return super().recv_chunk(timeout, allocate)


@pytest.mark.parametrize(
    ("kind", "test", "arguments", "message"),
    [
        (
            Sleepy,
            "close_wakes_whoever_waits",
            (0, 1),
            r"recv_chunk\(None\) still waits after close\(\) of the other",
        ),
        (
            Sleepy,
            "both_ends_learn_of_close",
            (0,),
            r"recv_chunk\(\) returned after close\(\) of its end; it has to",
        ),
        (
            Sleepy,
            "a_last_word_can_be_read",
            (),
            r"returned None after the receiver's close\(\); it has to raise Link",
        ),
        (
            Lossy,
            "both_ends_learn_of_close",
            (0,),
            r"send_chunk\(\) returned after close\(\) of its end; it has to",
        ),
        (Lossy, "payload_arrives_whole", (7,), "a payload arrived with another size"),
        (Reusing, "payloads_of_consecutive_chunks_are_kept_apart", (), "bytes of a payload changed"),
        (Referring, "payload_may_be_reused_after_sending", (1000,), "bytes of a payload changed"),
        (Borrowing, "payload_may_be_reused_after_sending", (SIZES[-1],), "bytes of a payload changed"),
        (Ring, "payloads_of_consecutive_chunks_are_kept_apart", (), "bytes of a payload changed"),
        (Copyless, "payload_goes_where_the_receiver_says", (SIZES[-1],), "payload in other memory"),
        (Overtaking, "order_of_large_and_small_chunks", (), "another kind or header"),
        (Forgetful, "order_of_large_and_small_chunks", (), "keeps the part of a chunk that arrived"),
        (Polite, "send_never_blocks_where_that_is_declared", (), "waits for the other end, though"),
        (
            Oblivious,
            "both_ends_learn_of_close",
            (0,),
            r"send_chunk\(\) returned after recv_chunk\(\) of its end had raised LinkClosedError",
        ),
        (Locked, "waiting_end_can_send", (0,), r"send_chunk\(\) waited for a recv_chunk\(\) of the same end"),
    ],
)
def test_the_contract_says_what_a_transport_did_wrong(
    kind: type[MemoryTransport], test: str, arguments: tuple[int, ...], message: str
) -> None:
    contract, ends = TransportContract(), kind.pair()
    contract.limit, contract.moment, contract.slack = 0.5, 0.05, 0.1
    if kind is Overtaking:  # what comes is wrong, which a busy machine may show later
        contract.limit = 30.0
    if kind in (Referring, Borrowing):  # the sender writes into the payload before the other end reads it
        contract.moment = 30.0
    with pytest.raises((AssertionError, pytest.fail.Exception), match=message):
        getattr(contract, f"test_{test}")(ends, *arguments)


class Leaking(FileTransport):
    """A transport that opens a file for each connection, and closes none."""

    def connect(self, timeout: float | None) -> Any:
        self.opened = [*getattr(self, "opened", []), os.open(self.directory, os.O_RDONLY)]
        return super().connect(timeout)


def test_a_transport_that_leaves_descriptors_open(tmp_path: Path) -> None:
    sender, receiver = FileTransport(tmp_path, "sender"), Leaking(tmp_path, "receiver")
    with contextlib.closing(sender), contextlib.closing(receiver):
        greet(sender, receiver)
        with pytest.raises(AssertionError, match="13 descriptors stayed open after 13 connections"):
            TransportContract().test_connections_release_their_descriptors((sender, receiver))
    for descriptor in receiver.opened:
        os.close(descriptor)


def test_a_transport_that_returns_no_chunk(tmp_path: Path) -> None:
    message = r"Wrong.recv_chunk\(\) returned b'chunk'; return a WeightChunk, or None"
    sender, receiver = FileTransport(tmp_path, "sender"), Wrong(tmp_path, "receiver")
    receiver.restart(10.0)
    receiver.send_chunk(hello(), 10.0)
    must_receive(sender)
    sender.send_weights({"a": torch.ones(2)})
    with pytest.raises(TypeError, match=message):
        receiver.receive_weights(10.0)
    with pytest.raises(FormatError, match="a payload is a 1-D uint8 tensor"):
        replace(number(1), payload=b"bytes")


class Broken(MemoryTransport):
    """A transport whose worker may join again, and whose ``recv_chunk`` always raises."""

    capabilities = Capabilities(allows_rejoin=True)
    errors = itertools.chain([OverflowError("first")] * 20, itertools.repeat(ZeroDivisionError("second")))

    def recv_chunk(self, timeout: float | None = None, allocate: Any = None) -> WeightChunk | None:
        raise next(self.errors)


class BrokenScheme(MemoryWeightSyncScheme):
    def create_transport(self, *, worker_idx: int, end: End) -> TransportBackend:
        return Broken.pair()[0]


def test_a_link_that_fails_again_and_again_does_not_flood_the_log(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Each kind of error is logged once, with its traceback, and rarely again."""
    monkeypatch.setattr(delivery, "_PAUSE_SECONDS", 0.001)
    with BrokenScheme() as scheme:
        scheme.init_on_sender(model=torch.nn.Linear(2, 2), num_workers=1)
        with pytest.raises(SyncFailedError, match="worker 0: first"):
            scheme.connect(timeout=5.0)
        wait_until(lambda: caplog.records and caplog.records[-1].exc_info[0] is ZeroDivisionError)
        time.sleep(0.1)
    assert [record.exc_info[0] for record in caplog.records] == [OverflowError, ZeroDivisionError]


class Cut(MemoryTransport):
    """A link whose receiver gets a WELCOME and then an error."""

    def recv_chunk(self, timeout: float | None = None, allocate: Any = None) -> WeightChunk | None:
        chunk = super().recv_chunk(timeout, allocate)
        if chunk is not None and chunk.kind is Kind.UPDATE:
            raise LinkClosedError("the cable was cut")
        return chunk


class CutScheme(MemoryWeightSyncScheme):
    def create_transport(self, *, worker_idx: int, end: End) -> TransportBackend:
        link = super().create_transport(worker_idx=worker_idx, end=end)
        if end == "receiver":
            link.__class__ = Cut
        return link


def test_a_worker_that_cannot_join_again_gets_the_error_of_its_link() -> None:
    with CutScheme(connect_timeout=10.0) as sender, ThreadPoolExecutor(1) as pool:
        sender.init_on_sender(model=torch.nn.Linear(2, 2), num_workers=1)
        receiver = copy.copy(sender)
        receiver.init_on_receiver(model=torch.nn.Linear(2, 2), worker_idx=0)
        connecting = pool.submit(receiver.connect)
        with pytest.raises(SyncFailedError, match="worker 0"):
            sender.connect()
        with pytest.raises(LinkClosedError, match="the cable was cut"):
            connecting.result(10.0)


class CountingScheme(MemoryWeightSyncScheme):
    """A scheme whose lock cannot be pickled, and whose count begins anew in each process."""

    def process_state(self) -> dict[str, Any]:
        return {**super().process_state(), "lock": None, "count": 0}


def test_a_worker_does_not_inherit_the_state_of_the_process() -> None:
    scheme = CountingScheme(timeout=5.0)
    assert (scheme.lock, scheme.count) == (None, 0)
    scheme.lock, scheme.count, scheme.option = threading.Lock(), 3, "kept"
    for received in (copy.copy(scheme), pickle.loads(pickle.dumps(scheme))):
        assert (received.lock, received.count) == (None, 0)
        assert (received.option, received.timeout) == ("kept", 5.0)
    assert scheme.count == 3


@pytest.mark.slow  # test_examples.py runs the example that has it
class TestFileScheme(SchemeContract):
    @pytest.fixture(autouse=True)
    def _place(self, tmp_path: Path) -> None:
        self.directory = tmp_path

    def make_scheme(self, **options: Any) -> WeightSyncScheme:
        return FileScheme(self.directory, **options)


@pytest.mark.smoke
class TestPipeTransport(TransportContract):
    def make_ends(self) -> Ends:
        sender = PipeTransport()
        self.listener = PipeListener("token", {0: sender}, refuse)
        self.listener.start()
        receiver = self.make_successor()
        greet(sender, receiver)
        return sender, receiver

    def make_successor(self) -> PipeTransport:
        return PipeTransport(self.listener.address)

    def teardown_method(self) -> None:
        self.listener.close()


def refuse(worker_idx: int) -> PipeTransport:
    raise JoinRefusedError(f"unknown worker index {worker_idx}")


def test_strangers_do_not_stop_a_listener() -> None:
    case = TestPipeTransport()
    sender, receiver = case.make_ends()
    for message in (b"rubbish", number(1).encode()):
        with Client(case.listener.address) as stranger:
            stranger.send_bytes(message)
    Client(case.listener.address).close()
    impostor = case.make_successor()
    impostor.restart(10.0)
    impostor.send_chunk(hello("another token"), 10.0)
    assert "wrong token" in must_receive(impostor).header["reason"]
    assert exchange(sender, receiver, number(2)).header == {"version": 2}
    successor = case.make_successor()
    case.join_again(sender, successor)
    for end in (impostor, receiver, successor, sender, case.listener):
        end.close()
    assert any("not a HELLO" in one for one in case.listener.refusals)


@pytest.mark.smoke
class TestPipeScheme(SchemeContract, LateJoinerContract):
    def make_scheme(self, **options: Any) -> WeightSyncScheme:
        return PipeScheme(**options)


@pytest.mark.parametrize(("name", "lines"), [("files", 45), ("pipes", 60)])
def test_the_transports_are_short_and_use_public_names(name: str, lines: int) -> None:
    text = EXAMPLE.read_text()
    part = text.partition(f"# [{name}]\n")[2].partition(f"# [end of {name}]")[0]
    assert 0 < len([line for line in part.splitlines() if line]) <= lines
    assert re.findall(r"\._(?!_)\w+|from weight_update\.|import _", text) == []
