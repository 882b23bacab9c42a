"""shutdown() closes everything, also when one part cannot be closed."""

from __future__ import annotations

import copy
import gc
import os
import select
import signal
import threading
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any

import pytest
from interpreters import ROOT, run_python
from pairs import connect_pair, interrupt_once
from torch import nn

from collectors.nodes import free_port
from weight_update import (
    DistributedWeightSyncScheme,
    LifecycleError,
    LinkClosedError,
    MemoryWeightSyncScheme,
    MultiProcessWeightSyncScheme,
    RPCTransport,
    RPCWeightSyncScheme,
    SharedMemTransport,
    SharedMemWeightSyncScheme,
    SyncFailedError,
    TransportBackend,
    WeightStrategy,
    WeightSyncScheme,
)
from weight_update.receiver.receiver import Receiver
from weight_update.schemes import rpc as rpc_scheme
from weight_update.schemes.base import End
from weight_update.sender import delivery, handle
from weight_update.sender.buffers import BufferPool
from weight_update.sender.delivery import AnswerThreads
from weight_update.sender.sender import Sender
from weight_update.sender.workers import GroupAssignment, Outbox, WorkerState
from weight_update.testing.processes import wait_until
from weight_update.transports.memory import MemoryTransport
from weight_update.transports.shared_memory.transport import SharedMemListener, SlotStream
from weight_update.wire.frames import Kind, WeightChunk

INTERRUPTED = """
import contextlib, multiprocessing, sys
import pytest
from pairs import interrupt_once
from torch import nn
from weight_update import LinkClosedError, SharedMemWeightSyncScheme
from weight_update.receiver.receiver import Receiver
from weight_update.report import WorkerEvent
from weight_update.sender.sender import Sender
from weight_update.testing.processes import wait_until

def shut_down_interrupted(scheme, owner):
    kept.append(scheme)  # until the process ends
    interrupt_once(pytest.MonkeyPatch(), owner, "close", after=False)
    with contextlib.suppress(KeyboardInterrupt):
        scheme.shutdown()
        print("not interrupted")

def trainer():
    scheme = SharedMemWeightSyncScheme(timeout=10.0)
    scheme.init_on_sender(model=nn.Linear(2, 2), num_workers=1)
    to_worker.send(scheme)
    events = []
    scheme.add_observer(events.append)
    scheme.connect()
    if ending == "trainer":
        shut_down_interrupted(scheme, Sender)
    else:
        wait_until(lambda: any(isinstance(one, WorkerEvent) and one.kind == "left" for one in events))
        print("left", flush=True)

def worker():
    scheme = from_trainer.recv()
    scheme.init_on_receiver(model=nn.Linear(2, 2), worker_idx=0)
    scheme.connect()
    if ending == "worker":
        shut_down_interrupted(scheme, Receiver)
    else:
        try:
            scheme.receive()
        except LinkClosedError as error:
            print(error, flush=True)

(ending, where), kept = sys.argv[1:], []
if __name__ == "__main__":
    main, other = (worker, trainer) if (ending == "worker") == (where == "main") else (trainer, worker)
    from_trainer, to_worker = multiprocessing.Pipe(duplex=False)
    multiprocessing.get_context("fork").Process(target=other).start()
    main()
"""


class Stubborn(SharedMemTransport):
    """A transport that closes, and then raises."""

    def close(self) -> None:
        super().close()
        raise OSError("no space left on device")


class StubbornScheme(SharedMemWeightSyncScheme):
    """A scheme whose links to worker 0 are stubborn."""

    def open_sender(self, workers: Sequence[int], ctx: Any) -> dict[int, TransportBackend]:
        links = super().open_sender(workers, ctx)
        links[0].__class__ = Stubborn
        return links

    def create_transport(self, *, worker_idx: int, end: End) -> TransportBackend:
        link = super().create_transport(worker_idx=worker_idx, end=end)
        link.__class__ = Stubborn
        return link


def connect_two(scheme: WeightSyncScheme) -> list[WeightSyncScheme]:
    scheme.init_on_sender(model=nn.Linear(2, 2), num_workers=2)
    receivers = [copy.copy(scheme) for _ in range(2)]
    for idx, receiver in enumerate(receivers):
        receiver.init_on_receiver(model=nn.Linear(2, 2), worker_idx=idx)
    joining = [threading.Thread(target=receiver.connect) for receiver in receivers]
    for thread in joining:
        thread.start()
    scheme.connect()
    for thread in joining:
        thread.join()
    return receivers


def test_all_is_closed_though_one_close_raises() -> None:
    before, running = len(os.listdir("/proc/self/fd")), set(threading.enumerate())
    scheme = StubbornScheme(timeout=10.0)
    receivers = connect_two(scheme)
    with pytest.raises(OSError, match="no space left"):
        receivers[0].shutdown()
    with pytest.raises(OSError, match="no space left"):
        scheme.shutdown()
    with pytest.raises(OSError, match="no space left"):
        receivers[1].shutdown()
    assert [thread.name for thread in set(threading.enumerate()) - running if thread.is_alive()] == []
    del scheme, receivers
    gc.collect()
    assert len(os.listdir("/proc/self/fd")) <= before


def test_an_update_that_becomes_possible_during_the_goodbyes_is_sent(monkeypatch: pytest.MonkeyPatch) -> None:
    scheme = MemoryWeightSyncScheme(timeout=10.0)
    receivers = connect_two(scheme)
    hold, send, parting = receivers[1].hold(), MemoryTransport.send_chunk, threading.Event()

    def slow(link: MemoryTransport, chunk: WeightChunk, timeout: float | None = None) -> None:
        if chunk.kind is Kind.GOODBYE and not parting.is_set():  # to worker 0, which reads slowly
            parting.set()
            hold.__exit__()
            wait_until(lambda: receivers[1].version == 2)
        send(link, chunk, timeout)

    hold.__enter__()
    for _ in range(2):  # worker 1 is sent the second one when it has applied the first one
        scheme.send_async().of(0).wait()
    monkeypatch.setattr(MemoryTransport, "send_chunk", slow)
    scheme.shutdown()
    assert receivers[1].receive(timeout=10.0) is not None
    assert receivers[1].version == 2
    with pytest.raises(LinkClosedError, match="the sender was shut down"):
        receivers[1].receive(timeout=10.0)
    for receiver in receivers:
        receiver.shutdown()


def test_a_worker_that_leaves_as_the_sender_ends_has_left(monkeypatch: pytest.MonkeyPatch) -> None:
    """The sender reads its goodbye, and does not wait a second for it in vain."""
    scheme, handle = MemoryWeightSyncScheme(timeout=10.0), AnswerThreads._handle

    def handle_late(threads: AnswerThreads, worker: WorkerState, chunk: WeightChunk) -> None:
        if chunk.kind is Kind.APPLIED:
            wait_until(lambda: table.closed)
        handle(threads, worker, chunk)

    receiver = connect_pair(scheme, nn.Linear(2, 2), nn.Linear(2, 2))
    table = scheme._sender.table
    monkeypatch.setattr(AnswerThreads, "_handle", handle_late)
    scheme.send_async()
    wait_until(lambda: receiver.version == 1)
    receiver.shutdown()
    scheme.shutdown()
    assert table[0].left


def test_workers_that_a_sender_leaves_are_not_sent_to_it_again() -> None:
    announced = []

    class Link(RPCTransport):
        def close(self) -> None:
            announced.append("policy" in rpc_scheme._posted)
            super().close()

    class Scheme(RPCWeightSyncScheme):
        def create_transport(self, *, worker_idx: int, end: End) -> TransportBackend:
            return Link(**self.sender_options())

    scheme = Scheme()
    scheme.init_on_sender(model=nn.Linear(2, 2), num_workers=1)
    assert "policy" in rpc_scheme._posted
    scheme.shutdown()
    assert announced
    assert not any(announced)


def test_a_signal_handler_ends_the_sender_during_send(monkeypatch: pytest.MonkeyPatch) -> None:
    running: list[list[str]] = []
    waits, poll = threading.Event(), select.poll

    class Poller:
        """A poller that tells when the caller waits: it then holds no lock that threads need to end."""

        def __init__(self) -> None:
            self._poller = poll()
            self.register, self.unregister = self._poller.register, self._poller.unregister

        def poll(self, milliseconds: float) -> list[tuple[int, int]]:
            waits.set()
            return self._poller.poll(milliseconds)

    def end(*_: object) -> None:
        scheme.shutdown()
        running.append([one.name for one in threading.enumerate() if "-worker-" in one.name])

    def interrupt() -> None:
        assert waits.wait(10.0)
        os.kill(os.getpid(), signal.SIGUSR1)

    before = signal.signal(signal.SIGUSR1, end)
    scheme = SharedMemWeightSyncScheme(timeout=20.0)
    receivers = connect_two(scheme)
    monkeypatch.setattr(handle, "select", SimpleNamespace(poll=Poller, POLLIN=select.POLLIN))
    try:
        with receivers[0].hold(), receivers[1].hold(), ThreadPoolExecutor(1) as pool:
            interrupting = pool.submit(interrupt)
            with pytest.raises(SyncFailedError):
                scheme.send()
            interrupting.result()
        assert running == [[]]
    finally:
        signal.signal(signal.SIGUSR1, before)
        for receiver in receivers:
            receiver.shutdown()


def receiver_of(sender: WeightSyncScheme) -> WeightSyncScheme:
    sender.init_on_sender(model=nn.Linear(2, 2), num_workers=1)
    receiver = copy.copy(sender)
    receiver.init_on_receiver(model=nn.Linear(2, 2), worker_idx=0)
    return receiver


@pytest.mark.parametrize(
    "kind",
    [
        MemoryWeightSyncScheme,
        SharedMemWeightSyncScheme,
        MultiProcessWeightSyncScheme,
        DistributedWeightSyncScheme,
    ],
)
def test_shutdown_ends_connect_of_a_worker(
    kind: type[WeightSyncScheme], monkeypatch: pytest.MonkeyPatch
) -> None:
    waits = threading.Event()
    attempt = Receiver._attempt

    def try_to_join(receiver: Receiver, timeout: float) -> None:
        waits.set()
        attempt(receiver, timeout)

    monkeypatch.setattr(Receiver, "_attempt", try_to_join)
    with kind(timeout=20.0, connect_timeout=20.0) as sender, ThreadPoolExecutor(1) as pool:
        receiver = receiver_of(sender)
        connecting = pool.submit(receiver.connect)
        assert waits.wait(10.0)
        receiver.shutdown()
        with pytest.raises(LinkClosedError, match="closed"):
            connecting.result(10.0)
        with pytest.raises(LifecycleError, match="was shut down"):
            receiver.connect()


def test_shutdown_ends_connect_of_a_worker_that_finds_no_sender() -> None:
    where = {"address": "127.0.0.1", "port": free_port(), "token": "secret"}
    receiver = DistributedWeightSyncScheme(**where, connect_timeout=20.0)
    receiver.init_on_receiver(model=nn.Linear(2, 2), worker_idx=0)
    with ThreadPoolExecutor(1) as pool:
        connecting = pool.submit(receiver.connect)
        time.sleep(0.5)
        receiver.shutdown()
        with pytest.raises(LinkClosedError, match="closed"):
            connecting.result(5.0)


@pytest.mark.parametrize("kind", [MemoryWeightSyncScheme, SharedMemWeightSyncScheme])
def test_shutdown_ends_connect_of_the_sender(kind: type[WeightSyncScheme]) -> None:
    """The error names no worker: none is to blame."""
    with kind(timeout=20.0, connect_timeout=20.0) as sender, ThreadPoolExecutor(1) as pool:
        sender.init_on_sender(model=nn.Linear(2, 2), num_workers=2)
        connecting = pool.submit(sender.connect)
        wait_until(lambda: sender._sender.table[1].thread is not None)
        sender.shutdown()
        with pytest.raises(LifecycleError, match="was shut down"):
            connecting.result(10.0)


@pytest.mark.parametrize(("owner", "step"), [(GroupAssignment, "group_for"), (BufferPool, "take")])
def test_send_that_shutdown_overtakes_says_so_and_keeps_no_memory(
    monkeypatch: pytest.MonkeyPatch, owner: type, step: str
) -> None:
    """Another thread takes groups and memory away, whichever step of the update comes next."""
    real = getattr(owner, step)

    def overtaken(*arguments: Any) -> Any:
        pool.submit(sender.shutdown).result(20.0)
        return real(*arguments)

    with SharedMemWeightSyncScheme(timeout=20.0) as sender, ThreadPoolExecutor(1) as pool:
        receiver = connect_pair(sender, nn.Linear(2, 2), nn.Linear(2, 2))
        memory = sender._sender._pool
        monkeypatch.setattr(owner, step, overtaken)
        with pytest.raises(LifecycleError, match="was shut down"):
            sender.send()
        assert memory._slots == []
        receiver.shutdown()


@pytest.mark.parametrize("call", ["send", "connect"])
def test_an_error_of_the_program_is_not_hidden_by_shutdown(call: str) -> None:
    """A source raises an error after another thread has shut the scheme down."""
    fails = threading.Event()

    def read() -> nn.Module:
        if fails.is_set():
            sender.shutdown()
            raise ZeroDivisionError("the source broke")
        return nn.Linear(2, 2)

    with MemoryWeightSyncScheme(timeout=20.0) as sender:
        sender.init_on_sender(weights=read, num_workers=1 if call == "connect" else 0)
        if call == "send":
            sender.connect()
        fails.set()
        with pytest.raises(LifecycleError, match="was shut down") as caught:
            getattr(sender, call)()
        assert "the source broke" in str(caught.value.__cause__)


@pytest.mark.parametrize("max_in_flight", [None, 2])
def test_connect_that_shutdown_overtakes_before_it_waits_ends(
    monkeypatch: pytest.MonkeyPatch, max_in_flight: int | None
) -> None:
    """Reading the first weights may take long, and nobody comes after shutdown()."""
    real = Sender.connect

    def overtaken(*arguments: Any) -> Any:
        sender.shutdown()
        return real(*arguments)

    strategy = WeightStrategy(encoding="bucket", max_in_flight=max_in_flight)
    with SharedMemWeightSyncScheme(strategy, timeout=20.0) as sender, ThreadPoolExecutor(1) as pool:
        sender.init_on_sender(model=nn.Linear(2, 2), num_workers=1)
        monkeypatch.setattr(Sender, "connect", overtaken)
        connecting = pool.submit(sender.connect, timeout=30.0)
        with pytest.raises(LifecycleError, match="was shut down"):
            connecting.result(10.0)


@pytest.mark.parametrize("close_links", [False, True])
def test_a_thread_that_writes_ends_though_shutdown_overtakes_its_start(
    monkeypatch: pytest.MonkeyPatch, close_links: bool
) -> None:
    def start(idx: int, changed: threading.Condition) -> Outbox:
        outbox = Outbox(idx, changed)
        side._delivery.close()
        if close_links:
            side._close_links()
        return outbox

    monkeypatch.setattr(delivery, "Outbox", start)
    with SharedMemWeightSyncScheme(timeout=20.0) as sender:
        receiver = connect_pair(sender, nn.Linear(2, 2), nn.Linear(2, 2))
        side = sender._sender
        side._delivery._put(side.table[0], lambda: None)
        wait_until(lambda: not [one for one in threading.enumerate() if "-outbox-" in one.name])
        assert side.table[0].outbox is None
        receiver.shutdown()


def test_shutdown_at_the_end_of_connect_is_not_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    start = Receiver.start
    with SharedMemWeightSyncScheme(timeout=20.0) as sender, ThreadPoolExecutor(1) as pool:
        receiver = receiver_of(sender)

        def start_and_shut_down(self: Receiver) -> None:
            start(self)
            receiver.shutdown()

        monkeypatch.setattr(Receiver, "start", start_and_shut_down)
        connecting = pool.submit(receiver.connect)
        sender.connect()
        with pytest.raises(LifecycleError, match="was shut down"):
            connecting.result(10.0)
        wait_until(lambda: sender.worker_versions == {0: None})
        assert not receiver.synchronized_on_receiver


def test_a_goodbye_in_answer_to_a_join_request_ends_connect() -> None:
    with MemoryWeightSyncScheme(timeout=20.0) as sender, ThreadPoolExecutor(1) as pool:
        receiver = receiver_of(sender)
        connecting = pool.submit(receiver.connect)
        sender._sender.table[0].link.send_chunk(WeightChunk(Kind.GOODBYE, {}))
        with pytest.raises(LinkClosedError, match="the sender was shut down"):
            connecting.result(10.0)


def test_shutdown_while_a_payload_is_opened_logs_nothing(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    begun, receive = threading.Event(), SlotStream._receive_payload

    def receive_late(stream: SlotStream, nbytes: int) -> Any:
        begun.set()
        wait_until(lambda: not stream._slots._slots)  # close() forgets the slots that are open
        return receive(stream, nbytes)

    model = nn.Linear(2, 2)
    with SharedMemWeightSyncScheme(timeout=20.0) as sender:
        receiver = connect_pair(sender, nn.Linear(2, 2), model)
        for _ in range(4):  # all slots were handed over
            sender.send()
        monkeypatch.setattr(SlotStream, "_receive_payload", receive_late)
        sender.send_async()
        assert begun.wait(10.0)
        receiver.shutdown()
        wait_until(lambda: sender.worker_versions == {0: None})
    assert caplog.messages == []


def test_a_receiver_that_was_shut_down_leaves_no_hooks_on_its_model() -> None:
    model = nn.Linear(2, 2)
    with MemoryWeightSyncScheme() as scheme:
        with connect_pair(scheme, nn.Linear(2, 2), model):
            assert model._forward_pre_hooks
            assert model._forward_hooks
        assert not model._forward_pre_hooks
        assert not model._forward_hooks


@pytest.mark.parametrize("after", [False, True], ids=["before", "after"])
@pytest.mark.parametrize(
    ("owner", "method"),
    [(Sender, "close"), (Sender, "_say_goodbye"), (BufferPool, "close"), (SharedMemListener, "close")],
    ids=lambda value: getattr(value, "__name__", value),
)
def test_a_second_shutdown_finishes_an_interrupted_one(
    monkeypatch: pytest.MonkeyPatch, owner: Any, method: str, after: bool
) -> None:
    before, running = len(os.listdir("/proc/self/fd")), set(threading.enumerate())
    scheme, model = SharedMemWeightSyncScheme(timeout=10.0), nn.Linear(64, 64)
    receiver = connect_pair(scheme, model, nn.Linear(64, 64))
    interrupt_once(monkeypatch, owner, method, after=after)
    start = time.monotonic()
    with pytest.raises(KeyboardInterrupt):
        scheme.shutdown()
    assert time.monotonic() - start < 4.0  # it waits 5 s for threads that do not end
    with pytest.raises(LifecycleError, match="was shut down"):
        scheme.send()
    scheme.shutdown()
    receiver.shutdown()
    del receiver  # its model keeps the memory of its weights
    gc.collect()
    # A thread that admits the worker anew, which was not said goodbye, ends soon by itself.
    wait_until(lambda: not set(threading.enumerate()) - running)
    wait_until(lambda: len(os.listdir("/proc/self/fd")) <= before)


def test_a_second_shutdown_finishes_an_interrupted_one_of_a_worker(monkeypatch: pytest.MonkeyPatch) -> None:
    with SharedMemWeightSyncScheme(timeout=10.0) as scheme:
        receiver = connect_pair(scheme, nn.Linear(2, 2), nn.Linear(2, 2))
        interrupt_once(monkeypatch, Receiver, "close", after=False)
        with pytest.raises(KeyboardInterrupt):
            receiver.shutdown()
        receiver.shutdown()
        wait_until(lambda: scheme.worker_versions == {0: None})


@pytest.mark.parametrize("where", ["main", "child"])
@pytest.mark.parametrize(("ending", "seen"), [("trainer", "the sender was shut down"), ("worker", "left")])
def test_the_end_of_a_process_finishes_an_interrupted_shutdown(ending: str, seen: str, where: str) -> None:
    env = {"PYTHONPATH": f"{ROOT}:{ROOT / 'test'}"}
    ended = run_python("-c", INTERRUPTED, ending, where, env=env)
    assert (ended.stdout, ended.stderr) == (f"{seen}\n", "")
