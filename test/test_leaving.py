"""Ends that leave as soon as an update is applied, or sent, do not make that update fail."""

import contextlib
import copy
import gc
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any, ClassVar

import pytest
import torch.distributed as dist
from pairs import connect_pair
from torch import nn

from weight_update import (
    BucketEncoding,
    DistributedWeightSyncScheme,
    JoinRefusedError,
    LifecycleError,
    LinkClosedError,
    MemoryWeightSyncScheme,
    SharedMemWeightSyncScheme,
    SyncFailedError,
    SyncTimeoutError,
    WeightChunk,
    WeightStrategy,
    WeightSyncScheme,
)
from weight_update.testing.processes import wait_until
from weight_update.wire.frames import Kind


class Cascade:
    """A context with workers of its own, which delays the answer to an update that is already visible."""

    _weight_sync_schemes: ClassVar = {"another model": None}

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds

    def update_policy_weights_(self, **weights: object) -> None:
        time.sleep(self.seconds)


class Connected:
    """A sender and a receiver that is connected to it."""

    def __init__(self, context: object = None) -> None:
        self.sender = MemoryWeightSyncScheme(timeout=10.0)
        self.receiver = connect_pair(self.sender, nn.Linear(2, 2), nn.Linear(2, 2), context=context)


@pytest.mark.parametrize("seconds", [0.2, 1.5])
def test_answer_goes_before_goodbye(seconds: float) -> None:
    context = Cascade(0.0)
    pair = Connected(context)
    context.seconds = seconds
    with pair.sender:
        handle = pair.sender.send_async()
        assert pair.receiver.receive(timeout=10.0) is not None
        pair.receiver.shutdown()
        assert handle.wait().apply_seconds[0] >= seconds


def test_an_update_whose_answer_was_an_error_is_not_waited_for() -> None:
    """shutdown() waits long for an answer that is due, but not for another attempt to join."""
    context = Cascade(0.0)
    pair = Connected(context)
    context.seconds = -1.0  # time.sleep() raises
    with pair.sender, pair.receiver:
        with pytest.raises(SyncFailedError, match="sleep length must be non-negative"):
            pair.sender.send()
        with pair.receiver._receiver._updates.busy:  # it was answered
            assert not pair.receiver._receiver._updates.answering


def test_having_applied_outlives_the_worker() -> None:
    pair = Connected()
    with pair.sender:
        handle = pair.sender.send_async()
        assert pair.receiver.receive(timeout=10.0) is not None
        pair.receiver.shutdown()
        wait_until_gone(pair.sender)
        assert handle.done()
        assert list(handle.wait().stall_seconds) == [0]
        assert handle.failures() == {}
        with pytest.raises(SyncFailedError, match="worker 0: it left"):
            pair.sender.send()


def wait_until_gone(sender: WeightSyncScheme) -> None:
    wait_until(lambda: sender.worker_versions[0] is None)


@pytest.mark.parametrize("kind", [MemoryWeightSyncScheme, SharedMemWeightSyncScheme])
def test_the_error_says_whether_a_worker_that_left_may_connect_again(kind: type[WeightSyncScheme]) -> None:
    with kind(timeout=10.0) as sender:
        connect_pair(sender, nn.Linear(2, 2), nn.Linear(2, 2)).shutdown()
        wait_until_gone(sender)
        with pytest.raises(SyncFailedError, match="worker 0: it left") as caught:
            sender.send()
        with copy.copy(sender) as again:
            again.init_on_receiver(model=nn.Linear(2, 2), worker_idx=0)
            if "it may connect again" in str(caught.value):
                again.connect()
            else:
                with pytest.raises(JoinRefusedError, match=r"worker 0 has left or was lost, .* anew"):
                    again.connect()


def test_a_second_receiver_is_not_told_to_shut_down_the_first_where_that_frees_no_index() -> None:
    with MemoryWeightSyncScheme(timeout=10.0) as sender:
        with connect_pair(sender, nn.Linear(2, 2), nn.Linear(2, 2)), copy.copy(sender) as other:
            other.init_on_receiver(model=nn.Linear(2, 2), worker_idx=0)
            with pytest.raises(JoinRefusedError, match=r"give each receiver an index of its own$"):
                other.connect()
        wait_until_gone(sender)
        with copy.copy(sender) as other:
            other.init_on_receiver(model=nn.Linear(2, 2), worker_idx=0)
            with pytest.raises(JoinRefusedError, match="cannot join again"):
                other.connect()


def test_a_receiver_that_could_not_connect_and_was_shut_down_is_not_told_to_connect() -> None:
    with SharedMemWeightSyncScheme() as sender:
        sender.init_on_sender(model=nn.Linear(2, 2), num_workers=1)
        receiver = copy.copy(sender)
    receiver.init_on_receiver(model=nn.Linear(2, 2), worker_idx=0)
    with pytest.raises(LinkClosedError):
        receiver.connect()
    with pytest.raises(LifecycleError, match="call init_on_receiver"):
        receiver.hold()
    receiver.shutdown()
    for call in receiver.hold, receiver.receive:
        with pytest.raises(LifecycleError, match="was shut down; make a new scheme"):
            call()


def test_a_sender_of_this_process_that_was_dropped_may_be_gone() -> None:
    sender = MemoryWeightSyncScheme()
    sender.init_on_sender(model=nn.Linear(2, 2), num_workers=1)
    with copy.copy(sender) as receiver:
        del sender
        gc.collect()
        receiver.init_on_receiver(model=nn.Linear(2, 2), worker_idx=0)
        with pytest.raises(LifecycleError, match="is not in this process, not initialized or gone; workers"):
            receiver.connect(timeout=0.1)


@pytest.fixture
def default_group() -> Iterator[None]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.mark.usefixtures("default_group")
def test_a_worker_that_looks_a_sender_up_finds_none_that_has_left() -> None:
    """It waits for the next one, also if it comes first."""
    with DistributedWeightSyncScheme() as first:
        first.init_on_sender(model=nn.Linear(2, 2), num_workers=0)
    with (
        DistributedWeightSyncScheme() as sender,
        DistributedWeightSyncScheme() as receiver,
        ThreadPoolExecutor() as pool,
    ):
        receiver.init_on_receiver(model=nn.Linear(2, 2), worker_idx=0)
        joining = pool.submit(receiver.connect, timeout=10)
        time.sleep(0.2)
        sender.init_on_sender(model=nn.Linear(2, 2), num_workers=1)
        sender.connect(timeout=10)
        joining.result()


@pytest.mark.usefixtures("default_group")
def test_a_sender_that_leaves_late_withdraws_no_later_one() -> None:
    first = DistributedWeightSyncScheme()
    first.init_on_sender(model=nn.Linear(2, 2), num_workers=0)
    with DistributedWeightSyncScheme() as sender, DistributedWeightSyncScheme() as receiver:
        sender.init_on_sender(model=nn.Linear(2, 2), num_workers=0)
        sender.connect()
        first.shutdown()
        receiver.init_on_receiver(model=nn.Linear(2, 2), worker_idx=0)
        receiver.connect(timeout=10)


@pytest.mark.parametrize("ended", [False, True])
def test_a_worker_forked_from_the_trainer_is_not_called_the_sender(ended: bool) -> None:
    """It may still call init_on_receiver(), also if its parent has ended the scheme."""
    with MemoryWeightSyncScheme() as scheme:
        scheme.init_on_sender(model=nn.Linear(2, 2), num_workers=1)
        with pytest.raises(LifecycleError, match="this is the sender"):
            scheme.hold()
        if ended:
            scheme.shutdown()
        owner, scheme._process.owner = scheme._process.owner, -1  # as a forked child finds it
        with pytest.raises(LifecycleError, match="not a connected receiver; call init_on_receiver"):
            scheme.hold()
        scheme._process.owner = owner


def test_connect_does_not_miss_a_worker_that_took_the_weights() -> None:
    """However late it looks: the worker was gone before another one came."""
    with MemoryWeightSyncScheme(timeout=10.0) as sender, ThreadPoolExecutor(1) as pool:
        sender.init_on_sender(model=nn.Linear(2, 2), num_workers=2)
        first, second = copy.copy(sender), copy.copy(sender)
        for idx, receiver in enumerate((first, second)):
            receiver.init_on_receiver(model=nn.Linear(2, 2), worker_idx=idx)
        connecting = pool.submit(sender.connect)
        first.connect()
        first.shutdown()
        wait_until_gone(sender)
        with second:
            second.connect()
            connecting.result()
            with pytest.raises(SyncFailedError, match="worker 0: it left"):
                sender.send()


@contextlib.contextmanager
def worker_that_ends(on_applied: Callable[[WeightChunk], WeightChunk | None]) -> Iterator[Any]:
    """A sender whose worker has connected and ended before the sender reads that it applied the weights."""
    with MemoryWeightSyncScheme(timeout=10.0) as sender, ThreadPoolExecutor(1) as pool:
        sender.init_on_sender(model=nn.Linear(2, 2), num_workers=1)
        link, ended, receiver = sender._sender.table[0].link, threading.Event(), copy.copy(sender)
        read = link.recv_chunk

        def read_late(*arguments: Any) -> WeightChunk | None:
            chunk = read(*arguments)
            if chunk is None or chunk.kind is not Kind.APPLIED:
                return chunk
            assert ended.wait(10.0)
            return on_applied(chunk)

        def work() -> None:
            receiver.init_on_receiver(model=nn.Linear(2, 2), worker_idx=0)
            receiver.connect()
            ended.set()

        link.recv_chunk = read_late
        sender.worker_alive = lambda _: not ended.is_set()
        worker = pool.submit(work)
        yield sender
        worker.result()
        receiver.shutdown()


def test_the_end_of_its_process_does_not_come_before_its_answer() -> None:
    def wait(chunk: WeightChunk) -> WeightChunk:
        time.sleep(0.5)  # connect() asks worker_alive in between
        return chunk

    with worker_that_ends(wait) as sender:
        sender.connect()
        assert sender.worker_versions == {0: 0}


def test_connect_names_a_process_that_ended_unreported() -> None:
    reason = r"did not apply .* within 1 s; the processes of \[0\] have ended \(scheme.worker_alive\)"
    with worker_that_ends(lambda chunk: None) as sender, pytest.raises(SyncTimeoutError, match=reason):
        sender.connect(timeout=1.0)


class Living:
    """A process that lives."""

    def is_alive(self) -> bool:
        return True


@pytest.mark.parametrize("failed", [False, True])
def test_connect_tells_workers_that_did_not_come_from_those_without_weights(failed: bool) -> None:
    """Both are late; what was given to connect() is what has to be raised."""
    with MemoryWeightSyncScheme() as scheme, copy.copy(scheme) as receiver:
        scheme.init_on_sender(model=nn.Linear(2, 2), num_workers=3)
        scheme.worker_alive = [Living()]
        table, go_on = scheme._sender.table, threading.Event()
        read = table[0].link.recv_chunk

        def read_late(*arguments: Any) -> WeightChunk | None:
            chunk = read(*arguments)
            if chunk is not None and chunk.kind is Kind.APPLIED:
                if failed:
                    table[2].lost = LinkClosedError("it ended")
                go_on.wait(10.0)
            return chunk

        table[0].link.recv_chunk = read_late
        receiver.init_on_receiver(model=nn.Linear(2, 2), worker_idx=0)
        with ThreadPoolExecutor(1) as pool:
            joins = pool.submit(receiver.connect)
            with pytest.raises((SyncTimeoutError, SyncFailedError)) as caught:
                scheme.connect(timeout=0.5)
            go_on.set()
            joins.result()
    if isinstance(caught.value, SyncFailedError):
        texts = {idx: str(error) for idx, error in caught.value.failures.items()}
        assert texts == {
            0: "joined, but did not apply the first weights within 0.5 s",
            1: "did not connect within 0.5 s",
            2: "it ended",
        }
        return
    assert "workers [1, 2] did not connect within 0.5 s" in str(caught.value)
    assert "workers [0] joined, but did not apply the first weights within 0.5 s" in str(caught.value)
    assert "raise connect_timeout=, or timeout= of connect() if that was given" in str(caught.value)
    assert "processes live" not in str(caught.value)  # nothing is known of the second and the third


@pytest.mark.parametrize(
    "kind", [MemoryWeightSyncScheme, SharedMemWeightSyncScheme, DistributedWeightSyncScheme]
)
@pytest.mark.parametrize("encoding", ["dense", BucketEncoding(bucket_size=256)], ids=["dense", "buckets"])
def test_a_busy_worker_gets_what_the_sender_sent_before_its_end(
    kind: type[WeightSyncScheme], encoding: Any
) -> None:
    source, model = nn.Linear(32, 32), nn.Linear(32, 32)
    strategy = WeightStrategy(encoding=encoding)
    with kind(timeout=10.0, strategy=strategy) as sender, connect_pair(sender, source, model) as receiver:
        with receiver._receiver._updates.busy:  # as on a machine that has no time for this worker
            sender.send_async(nn.Linear(32, 32).requires_grad_(False).apply(fill_with_seven))
            sender.shutdown()
        assert receiver.receive(timeout=10.0) is not None
        assert all(bool((one.detach() == 7.0).all()) for one in model.parameters())
        with pytest.raises(LinkClosedError, match="the sender was shut down"):
            receiver.receive(timeout=10.0)


@pytest.mark.parametrize("kind", [SharedMemWeightSyncScheme, DistributedWeightSyncScheme])
def test_send_waits_for_a_worker_that_is_being_welcomed(kind: type[WeightSyncScheme]) -> None:
    source, welcomed, go_on = nn.Linear(2, 2), threading.Event(), threading.Event()
    with (
        kind(timeout=10.0) as sender,
        connect_pair(sender, source, nn.Linear(2, 2)),
        ThreadPoolExecutor(1) as pool,
    ):
        admission = sender._sender.admission
        assign = admission._assign

        def assign_late(*arguments: Any) -> Any:
            welcomed.set()
            assert go_on.wait(10.0)
            return assign(*arguments)

        admission._assign = assign_late
        with copy.copy(sender) as successor:
            successor.init_on_receiver(model=nn.Linear(2, 2), worker_idx=0)
            joining = pool.submit(successor.connect)
            assert welcomed.wait(10.0)
            handle = sender.send_async()
            assert not handle.done()
            assert handle.failures() == {}
            with pytest.raises(SyncFailedError, match="has not applied it yet"):
                handle.wait(timeout=0.0)
            go_on.set()
            assert handle.wait().apply_seconds.keys() == {0}
            joining.result(10.0)
            assert successor.version == handle.version


def fill_with_seven(model: nn.Module) -> None:
    for one in model.parameters():
        one.fill_(7.0)


@pytest.mark.parametrize("kind", [MemoryWeightSyncScheme, SharedMemWeightSyncScheme])
def test_send_does_not_wait_for_a_worker_whose_connect_took_too_long(kind: type[WeightSyncScheme]) -> None:
    """With a pipeline, a worker that joins gets weights with the next send(), which may come later."""
    strategy = WeightStrategy(encoding=BucketEncoding(bucket_size=64), max_in_flight=1)
    model = nn.Linear(64, 64)
    with kind(strategy, timeout=10.0) as sender:
        sender.init_on_sender(model=nn.Linear(64, 64), num_workers=0)
        sender.connect()
        receiver = copy.copy(sender)
        receiver.init_on_receiver(model=model, worker_idx=0)
        with pytest.raises(SyncTimeoutError, match="its first weights did not arrive in time"):
            receiver.connect(timeout=0.3)
        start = time.monotonic()
        sender.send()
        assert time.monotonic() - start < 5.0
        with ThreadPoolExecutor(1) as pool:
            joining = pool.submit(receiver.connect)
            while not joining.done():
                sender.send()
            joining.result()
        receiver.shutdown()
