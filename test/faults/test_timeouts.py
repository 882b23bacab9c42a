"""Every public call that takes a timeout returns in time, whatever the other end does not do."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch.distributed as dist
from faults_tools import WAIT, Apart, Processes, Remote, Stripes, Worker, fill
from marks import quick_for, slow

from benchmarks.network import Network, why_not
from weight_update import (
    DistributedWeightSyncScheme,
    MultiProcessWeightSyncScheme,
    SharedMemWeightSyncScheme,
    SyncFailedError,
    Synchronizer,
    SyncMethod,
    SyncTimeoutError,
    TransportError,
    WeightSyncScheme,
)
from weight_update.synchronizer import ExplorerClient, TrainerClient
from weight_update.testing.processes import eventually

LIMIT = 0.5
SLACK = 4.0
"""Seconds more than it was given that a call may take here, as the machine may be busy."""
SHAPE = (2, 64)
TOKEN = "secret"
Address = tuple[str, int]
Enter = Callable[[], None]


def make() -> Stripes:
    return Stripes(*SHAPE)


def in_time(call: Callable[[], Any], enter: Enter = lambda: None) -> Any:
    """Return what ``call`` returns or raises, which must not take longer than its timeout and the slack."""
    outcome: list[Any] = []

    def run() -> None:
        enter()
        start = time.monotonic()
        try:
            result = call()
        except Exception as error:  # noqa: BLE001 - the test looks at it
            result = error
        outcome.extend([result, time.monotonic() - start])

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    thread.join(LIMIT + SLACK + 1.0)
    assert outcome, f"it was still waiting after {LIMIT + SLACK + 1.0:g} s, with a timeout of {LIMIT:g} s"
    assert outcome[1] < LIMIT + SLACK
    return outcome[0]


# -- before there is a connection ----------------------------------------------------------------------


def open_scheme(me: Worker) -> Address:
    me.scheme = DistributedWeightSyncScheme(token=TOKEN)
    me.scheme.init_on_sender(model=me.model, num_workers=1)
    return me.scheme.address, me.scheme.port


def open_synchronizer(me: Worker) -> Address:
    me.scheme = Synchronizer(SyncMethod.MEMORY)
    host, _, port = me.scheme.serve(token=TOKEN).address.rpartition(":")
    return host, int(port)


def open_shared_memory(me: Worker) -> str:
    me.scheme = SharedMemWeightSyncScheme(token=TOKEN)
    me.scheme.init_on_sender(model=me.model, num_workers=1)
    return str(me.scheme.address)


def join_distributed(address: Address) -> None:
    scheme = DistributedWeightSyncScheme(address=address[0], port=address[1], token=TOKEN)
    join_and_leave(scheme)


def join_and_leave(scheme: WeightSyncScheme) -> None:
    scheme.init_on_receiver(model=make(), worker_idx=0)
    try:
        scheme.connect(timeout=LIMIT)
    finally:
        scheme.shutdown()


def become_trainer(address: Address) -> None:
    TrainerClient("{}:{}".format(*address), make(), token=TOKEN, timeout=LIMIT)


def become_explorer(address: Address) -> None:
    ExplorerClient("{}:{}".format(*address), make(), token=TOKEN, timeout=LIMIT)


CALLS = {
    "distributed": (join_distributed, open_scheme),
    "trainer": (become_trainer, open_synchronizer),
    "explorer": (become_explorer, open_synchronizer),
}
each_call = pytest.mark.parametrize(
    ("call", "open_there"),
    [CALLS["distributed"], slow(*CALLS["trainer"]), slow(*CALLS["explorer"])],
    ids=CALLS,
)


@each_call
def test_a_stopped_peer(procs: Processes, call: Callable[[Address], None], open_there) -> None:
    peer = procs.start(None, 0, make)
    address = peer.call(open_there)
    peer.signal(signal.SIGSTOP)
    assert isinstance(in_time(lambda: call(address)), TransportError | SyncTimeoutError)


@pytest.fixture
def hole() -> Iterator[tuple[Address, Enter]]:
    """An address from which nothing ever comes, and how a thread gets to where it is such a one."""
    reason = why_not()
    if reason is not None:
        pytest.skip(reason)
    with Network(["here", "there"]) as network:
        network.lose("there")
        yield (network.address["there"], 29599), lambda: network.enter("here")


@each_call
def test_a_black_hole(hole: tuple[Address, Enter], call: Callable[[Address], None], open_there) -> None:
    address, enter = hole
    assert isinstance(in_time(lambda: call(address), enter), TransportError | SyncTimeoutError)


@contextlib.contextmanager
def full(family: socket.AddressFamily, address: Any) -> Iterator[Any]:
    """A listener that never accepts, and has no room for another connection."""
    with contextlib.ExitStack() as stack:
        listener = stack.enter_context(socket.socket(family, socket.SOCK_STREAM))
        listener.bind(address)
        listener.listen(0)
        for _ in range(4):
            caller = stack.enter_context(socket.socket(family, socket.SOCK_STREAM))
            caller.setblocking(False)
            with contextlib.suppress(BlockingIOError):
                caller.connect(listener.getsockname())
        time.sleep(0.05)
        yield listener.getsockname()


@each_call
def test_a_full_backlog(call: Callable[[Address], None], open_there) -> None:
    with full(socket.AF_INET, ("127.0.0.1", 0)) as address:
        assert isinstance(in_time(lambda: call(address)), TransportError | SyncTimeoutError)


def join_shared_memory(address: str) -> None:
    join_and_leave(SharedMemWeightSyncScheme(address=address, token=TOKEN))


def test_a_stopped_peer_on_a_unix_socket(procs: Processes) -> None:
    peer = procs.start(None, 0, make)
    address = peer.call(open_shared_memory)
    peer.signal(signal.SIGSTOP)
    result = in_time(lambda: join_shared_memory(address))
    assert isinstance(result, TransportError | SyncTimeoutError)


def test_a_full_backlog_on_a_unix_socket() -> None:
    name = f"\0weight_update-full-{os.getpid()}"
    with full(socket.AF_UNIX, name):
        result = in_time(lambda: join_shared_memory(name))
    assert isinstance(result, TransportError | SyncTimeoutError)


def open_default_store(me: Worker) -> int:
    me.scheme = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    return int(me.scheme.port)


@pytest.fixture
def default_store(procs: Processes) -> Iterator[Remote]:
    """Make a default process group; yield the process that has its store."""
    peer = procs.start(None, 0, make)
    store = dist.TCPStore("127.0.0.1", peer.call(open_default_store), is_master=False, wait_for_workers=False)
    dist.init_process_group("gloo", store=store, rank=0, world_size=1)
    threads = threading.active_count()
    yield peer
    peer.kill()
    eventually(lambda: threading.active_count() <= threads)  # a child forked amid a C++ error could hang
    dist.destroy_process_group()


def test_a_default_process_group_whose_store_stops(default_store: Remote) -> None:
    default_store.signal(signal.SIGSTOP)
    assert isinstance(in_time(lambda: join_and_leave(DistributedWeightSyncScheme())), SyncTimeoutError)


def test_a_sender_that_leaves_when_the_store_of_its_announcement_is_stopped(default_store: Remote) -> None:
    scheme = DistributedWeightSyncScheme()
    scheme.init_on_sender(model=make(), num_workers=0)
    default_store.signal(signal.SIGSTOP)
    assert in_time(scheme.shutdown) is None


class FailingStore:
    """Raises at once, as a store of a file does when its time is up, with what is no ``DistError``."""

    def wait(self, *_: Any) -> None:
        raise RuntimeError("Wait timeout")


def test_what_a_default_store_raises_reaches_the_caller(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("weight_update.schemes.distributed._default_store", FailingStore)
    monkeypatch.setattr(dist, "is_initialized", lambda: True)
    result = in_time(lambda: join_and_leave(DistributedWeightSyncScheme()))
    assert isinstance(result, SyncTimeoutError)
    assert "Wait timeout" in str(result)


# -- connections whose other end stops -----------------------------------------------------------------


KINDS = {
    "shared_mem": SharedMemWeightSyncScheme,
    "queues": MultiProcessWeightSyncScheme,
    "distributed": DistributedWeightSyncScheme,
    "apart": Apart,
}


def join_and_wait(me: Worker) -> None:
    me.scheme.init_on_receiver(model=me.model, worker_idx=me.idx)
    me.scheme.connect(timeout=WAIT)


def employ(procs: Processes, kind: type[WeightSyncScheme]) -> tuple[WeightSyncScheme, Remote]:
    scheme = procs.scheme(kind, timeout=LIMIT)
    scheme.init_on_sender(model=make(), num_workers=1, ctx=procs._ctx)
    worker = procs.start(scheme, 0, make)
    worker.begin(join_and_wait)
    scheme.connect(timeout=WAIT)
    worker.result()
    return scheme, worker


@pytest.mark.parametrize("kind", quick_for(KINDS.values(), DistributedWeightSyncScheme), ids=KINDS)
def test_a_worker_that_stops(procs: Processes, kind: type[WeightSyncScheme]) -> None:
    scheme, worker = employ(procs, kind)
    worker.signal(signal.SIGSTOP)
    assert isinstance(in_time(lambda: scheme.send(fill(make(), 1.0))), SyncFailedError)
    assert isinstance(in_time(lambda: scheme.send(fill(make(), 2.0), worker_ids=0)), SyncFailedError)
    handle = in_time(lambda: scheme.send_async(fill(make(), 3.0)))
    assert isinstance(in_time(lambda: handle.wait(LIMIT)), SyncFailedError)
    assert in_time(scheme.shutdown) is None


@pytest.mark.parametrize(
    "kind", quick_for(KINDS.values(), SharedMemWeightSyncScheme, DistributedWeightSyncScheme), ids=KINDS
)
def test_a_worker_that_does_not_come(procs: Processes, kind: type[WeightSyncScheme]) -> None:
    scheme = procs.scheme(kind, timeout=LIMIT)
    scheme.init_on_sender(model=make(), num_workers=1, ctx=procs._ctx)
    assert isinstance(in_time(lambda: scheme.connect(timeout=LIMIT)), SyncTimeoutError)
    assert in_time(scheme.shutdown) is None


def answer_nobody(me: Worker, kind: type[WeightSyncScheme]) -> dict[str, Any]:
    """Open a scheme, let in one worker, and wait for another that is not coming."""
    me.scheme = kind(token=TOKEN, timeout=LIMIT)
    me.scheme.init_on_sender(model=me.model, num_workers=1)
    port = {} if kind is SharedMemWeightSyncScheme else {"port": me.scheme.port}
    return {"address": me.scheme.address, **port}


def connect_once(me: Worker) -> None:
    me.scheme.connect(timeout=WAIT)


@pytest.mark.parametrize("kind", [slow(SharedMemWeightSyncScheme), DistributedWeightSyncScheme, slow(Apart)])
def test_a_trainer_that_stops(procs: Processes, kind: type[WeightSyncScheme]) -> None:
    trainer = procs.start(None, 0, make)
    where = trainer.call(answer_nobody, kind)
    scheme = kind(token=TOKEN, timeout=LIMIT, **where)
    scheme.init_on_receiver(model=make(), worker_idx=0)
    assert isinstance(
        in_time(lambda: scheme.connect(timeout=LIMIT)), SyncTimeoutError
    )  # it does not answer yet
    trainer.begin(connect_once)
    scheme.connect(timeout=WAIT)
    trainer.result()
    trainer.signal(signal.SIGSTOP)
    assert in_time(lambda: scheme.receive(timeout=LIMIT)) is None
    assert in_time(scheme.shutdown) is None
