"""The schemes keep their contract."""

import copy
import pickle
import signal
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor, wait
from pathlib import Path
from typing import Any

import pytest
import torch
from interpreters import use_template_for_forkserver
from marks import quick_for, slow
from pairs import connect_pair, same
from torch import nn

from weight_update import (
    BucketEncoding,
    DistributedWeightSyncScheme,
    InferenceEngine,
    JoinRefusedError,
    LifecycleError,
    MemoryWeightSyncScheme,
    MultiProcessWeightSyncScheme,
    NoWeightSyncScheme,
    RPCWeightSyncScheme,
    SchemaMismatchError,
    SharedMemWeightSyncScheme,
    SyncFailedError,
    SyncTimeoutError,
    UnsupportedSourceError,
    WeightStrategy,
    WeightSyncScheme,
)
from weight_update.testing import Apart, ApartInTwos, SchemeContract, mlp, scramble
from weight_update.testing.cases import assert_equal
from weight_update.testing.processes import eventually
from weight_update.testing.worker_processes import start_workers
from weight_update.transports.distributed.relay import router


class TestSharedMem(SchemeContract):
    def make_scheme(self, **options: Any) -> WeightSyncScheme:
        return SharedMemWeightSyncScheme(**options)


@pytest.mark.smoke  # the link of SharedMem, signalled in another way
class TestMultiProcess(SchemeContract):
    def make_scheme(self, **options: Any) -> WeightSyncScheme:
        return MultiProcessWeightSyncScheme(**options)


@pytest.mark.smoke  # the memory of SharedMem, found by another way
class TestDistributed(SchemeContract):
    """Workers on the sender's host, which map its memory."""

    def make_scheme(self, **options: Any) -> WeightSyncScheme:
        return DistributedWeightSyncScheme(**options)


@pytest.mark.smoke  # test_hosts.py has what is special
class TestDistributedAcrossHosts(SchemeContract):
    """Workers on one host each; all payloads, even small ones, go down a chain of hosts."""

    @pytest.fixture(autouse=True)
    def all_to_relays(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(router, "INLINE_BYTES", 0)
        monkeypatch.setattr(router, "DIRECT_BYTES", 0)

    def make_scheme(self, **options: Any) -> WeightSyncScheme:
        return Apart(**options)


@pytest.mark.slow
class TestDistributedDirectly(SchemeContract):
    """Workers on one host each; all payloads, even small ones, follow their frames."""

    @pytest.fixture(autouse=True)
    def all_directly(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(router, "INLINE_BYTES", 0)
        monkeypatch.setattr(router, "DIRECT_BYTES", 1 << 40)

    def make_scheme(self, **options: Any) -> WeightSyncScheme:
        return Apart(**options)


@pytest.mark.slow
class TestDistributedOnAnotherHost(TestDistributedAcrossHosts):
    """Two workers on one host that is not the sender's."""

    def make_scheme(self, **options: Any) -> WeightSyncScheme:
        return ApartInTwos(**options)


@pytest.mark.smoke  # the links are those of Distributed; test_rpc.py has what is special
class TestRPC(SchemeContract):
    """Workers that find the sender by the scheme; ``test_rpc`` has workers in an RPC world."""

    def make_scheme(self, **options: Any) -> WeightSyncScheme:
        return RPCWeightSyncScheme(**options)


@pytest.mark.smoke
class TestMemory(SchemeContract):
    method = "thread"

    def make_scheme(self, **options: Any) -> WeightSyncScheme:
        return MemoryWeightSyncScheme(**options)


@pytest.mark.parametrize("make", [SharedMemWeightSyncScheme, slow(MultiProcessWeightSyncScheme)])
@pytest.mark.parametrize("method", ["forkserver", slow("spawn")])
def test_spawned_workers(make: type[WeightSyncScheme], method: Any) -> None:
    """Workers that get the scheme pickled, and share nothing with the trainer."""
    source = mlp(1)
    scheme = make()
    use_template_for_forkserver()
    with start_workers(scheme, [mlp(2)], method, model=source) as procs:
        for version in range(3):
            assert_equal(procs, source)
            scramble(source, version)
            scheme.send()
        assert_equal(procs, source)


def test_no_scheme_does_nothing() -> None:
    sender, receiver, model = NoWeightSyncScheme(), NoWeightSyncScheme(), nn.Linear(2, 2)
    sender.init_on_sender(model=model, num_workers=3, anything="else")
    receiver.init_on_receiver(model=model, worker_idx=0)
    assert (sender.initialized_on_sender, receiver.initialized_on_receiver) == (True, True)
    for side in (sender, receiver):
        side.connect()
    report = sender.send(nn.Linear(3, 3), worker_ids=[0])
    assert (report.version, report.wire_bytes) == (0, 0)
    assert receiver.receive(timeout=None) is None
    handle = sender.send_async()
    assert (handle.done(), handle.wait().encoding, handle.failures()) == (True, "none", {})
    with receiver.hold():
        assert receiver.guarded(model) is model
    sender.shutdown()


KINDS = [
    MemoryWeightSyncScheme,
    SharedMemWeightSyncScheme,
    MultiProcessWeightSyncScheme,
    DistributedWeightSyncScheme,
]


@pytest.mark.parametrize("in_flight", [None, 2], ids=["whole", "pipeline"])
@pytest.mark.parametrize("kind", quick_for(KINDS, *KINDS[:2]))
def test_workers_are_told_that_connect_failed_in_the_trainer(
    kind: type[WeightSyncScheme], in_flight: int | None
) -> None:
    broken = [False]

    def convert(items: Iterator[Any]) -> Iterator[Any]:
        for name, value in items:
            if broken[0] and name == "bias":
                raise ZeroDivisionError("cannot convert")
            yield name, value

    strategy = WeightStrategy(
        encoding=BucketEncoding(bucket_size=64), convert=convert, max_in_flight=in_flight
    )
    with kind(strategy=strategy, connect_timeout=60.0) as sender, ThreadPoolExecutor(1) as pool:
        sender.init_on_sender(model=nn.Linear(8, 8), num_workers=1)
        broken[0] = True
        receiver = copy.copy(sender)
        receiver.init_on_receiver(model=nn.Linear(8, 8), worker_idx=0)
        joining = pool.submit(receiver.connect)
        deadline = time.monotonic() + 20
        while not joining.done() and time.monotonic() < deadline:  # it may not have asked to join yet
            with pytest.raises(ZeroDivisionError):
                sender.connect()
            wait([joining], 1.0)
        message = r"connect\(\) failed in the trainer: ZeroDivisionError: cannot convert"
        with pytest.raises(JoinRefusedError, match=message):
            joining.result(0.0)
        broken[0] = False  # both may call it again
        joining = pool.submit(receiver.connect)
        sender.connect()
        joining.result()
        assert sender.send().version == receiver.version
        receiver.shutdown()


def test_queues_that_are_pickled_for_no_process_that_starts() -> None:
    with MultiProcessWeightSyncScheme() as scheme:
        pickle.dumps(scheme)  # without queues
        scheme.init_on_sender(model=nn.Linear(2, 2), num_workers=1)
        with pytest.raises(LifecycleError, match=r"pass the scheme in Process\(args=...\), or use SharedMem"):
            pickle.dumps(scheme)


def test_workers_that_cannot_join_are_told_why_if_connect_fails_in_the_trainer() -> None:
    with MultiProcessWeightSyncScheme() as sender, ThreadPoolExecutor(2) as pool:
        sender.init_on_sender(model=nn.Linear(8, 8, device="meta"), num_workers=2)
        stranger, misfit = copy.copy(sender), copy.copy(sender)
        stranger.token = "another"
        stranger.init_on_receiver(model=nn.Linear(8, 8), worker_idx=0)
        misfit.init_on_receiver(model=nn.Linear(8, 9), worker_idx=1)
        joining = [pool.submit(one.connect, timeout=10.0) for one in (stranger, misfit)]
        while wait(joining, 0.5).not_done:
            with pytest.raises(UnsupportedSourceError, match="on the meta device"):
                sender.connect()
        with pytest.raises(JoinRefusedError, match="wrong token"):
            joining[0].result()
        with pytest.raises(SchemaMismatchError, match="weight"):
            joining[1].result()
        stranger.shutdown()
        misfit.shutdown()


@pytest.mark.parametrize(
    ("kind", "host"),
    [
        (SharedMemWeightSyncScheme, None),
        (DistributedWeightSyncScheme, None),
        (DistributedWeightSyncScheme, "another"),
    ],
)
def test_a_worker_that_a_listener_refused_may_connect_again(
    kind: type[WeightSyncScheme], host: str | None
) -> None:
    with kind(connect_timeout=20.0) as sender, ThreadPoolExecutor(1) as pool:
        sender.init_on_sender(model=nn.Linear(2, 2), num_workers=1, device_map_fn=lambda _, weights: weights)
        connecting = pool.submit(sender.connect)
        receiver: Any = copy.copy(sender)
        receiver.host = host
        receiver.init_on_receiver(model=nn.Linear(2, 2))
        with pytest.raises(JoinRefusedError, match="unknown worker index 7"):
            receiver.connect(worker_idx=7)
        receiver.connect(worker_idx=0)
        connecting.result()
        assert sender.send().version == receiver.version
        receiver.shutdown()


@pytest.mark.parametrize("encoding", ["dense", "patch", "bucket", "in flight"])
def test_the_version_of_a_checkpoint(encoding: str) -> None:
    """Workers get restored weights with the version that the checkpoint has."""
    in_flight = encoding == "in flight"
    strategy = WeightStrategy(
        "state_dict", encoding="bucket" if in_flight else encoding, max_in_flight=2 if in_flight else None
    )
    with MemoryWeightSyncScheme(strategy) as sender:
        sender.init_on_sender(model=mlp(1), num_workers=1)
        sender.continue_from(12)
        assert sender.version is None
        with pytest.raises(LifecycleError, match="not connected"):
            sender.send()
        with connect_pair(sender, mlp(1), mlp(2)) as receiver:
            assert (sender.version, receiver.version, sender.worker_versions) == (12, 12, {0: 12})
            if not in_flight:  # else it waits for the next update
                with copy.copy(sender) as late:
                    late.init_on_receiver(model=mlp(3), worker_idx=1)
                    late.connect()
                    assert late.version == 12
            assert sender.send().version == receiver.version == 13
            sender.continue_from(20)
            assert sender.send().version == 21


@pytest.mark.parametrize("encoding", ["dense", BucketEncoding(load_instant=False), "patch"])
def test_a_worker_saves_the_weights_that_it_has(encoding: Any, tmp_path: Path) -> None:
    source, target = nn.Linear(16, 3), nn.Linear(16, 3)
    with SharedMemWeightSyncScheme(WeightStrategy("state_dict", encoding=encoding)) as sender:
        receiver = connect_pair(sender, source, target)
        torch.save(target.state_dict(), tmp_path / "policy.pt")
        saved = torch.load(tmp_path / "policy.pt")
        assert all(torch.equal(saved[name], weight) for name, weight in source.state_dict().items())
        receiver.shutdown()


@pytest.mark.parametrize("encoding", ["dense", "patch", "in flight"])
def test_a_hold_longer_than_the_timeout_only_delays_the_update(encoding: str) -> None:
    """The worker applies it at the end of the hold, without another ``send()``."""
    in_flight = encoding == "in flight"
    strategy = WeightStrategy(
        encoding="bucket" if in_flight else encoding, max_in_flight=2 if in_flight else None
    )
    with MemoryWeightSyncScheme(strategy, timeout=0.3) as sender:
        model, policy = mlp(1), mlp(2)
        sender.init_on_sender(model=model, num_workers=1)
        with connect_pair(sender, model, policy) as receiver:
            scramble(model, 3)
            with receiver.hold():
                with pytest.raises(SyncFailedError, match="gets the newest version when it goes on"):
                    sender.send()
                time.sleep(0.8)
                assert receiver.version == 0
            assert receiver.receive(timeout=20.0) is not None
            assert receiver.version == 1
            assert same(model, policy)


def test_a_forward_pass_that_a_hold_waits_for_begins_after_the_timeout() -> None:
    with MemoryWeightSyncScheme(timeout=0.3) as sender:
        sender.init_on_sender(model=mlp(1), num_workers=1)
        with connect_pair(sender, mlp(1), policy := mlp(2)) as receiver, ThreadPoolExecutor(1) as other:
            with receiver.hold():
                sender.send_async()
                time.sleep(0.1)  # the update waits
                other.submit(policy, torch.ones(1, 4)).result(20.0)
            assert receiver.receive(timeout=20.0) is not None


class SlowEngine(InferenceEngine):
    """An engine that begins its first update when ``go`` is set."""

    def __init__(self) -> None:
        self.go = threading.Event()

    def begin_update(self, version: int) -> None:
        assert self.go.wait(20.0)

    def load_weights(self, weights: Iterator[tuple[str, Any]]) -> None:
        for _ in weights:
            pass

    def finish_update(self, version: int) -> None: ...


def test_first_weights_that_take_longer_than_connect_waits() -> None:
    with MemoryWeightSyncScheme() as sender, ThreadPoolExecutor(1) as pool:
        sender.init_on_sender(model=mlp(1), num_workers=1)
        engine, receiver = SlowEngine(), copy.copy(sender)
        receiver.init_on_receiver(model=engine, worker_idx=0)
        joining = pool.submit(receiver.connect)
        message = (
            r"workers \[0\] joined, but did not apply the first weights within 0.5 s; .*connect_timeout="
        )
        with pytest.raises(SyncTimeoutError, match=message):
            sender.connect(timeout=0.5)
        engine.go.set()
        joining.result()
        receiver.shutdown()


def test_a_worker_that_was_admitted_waits_for_weights() -> None:
    # The next send() has its weights.
    strategy = WeightStrategy("state_dict", encoding="bucket", max_in_flight=1)
    with MemoryWeightSyncScheme(strategy) as sender:
        sender.init_on_sender(model=mlp(1), num_workers=0)
        sender.connect()
        with copy.copy(sender) as receiver:
            receiver.init_on_receiver(model=mlp(2), worker_idx=0)
            message = (
                "worker 0 was admitted, but its first weights did not arrive in time; .*connect_timeout="
            )
            with pytest.raises(SyncTimeoutError, match=message):
                receiver.connect(timeout=1.5)


def test_a_worker_that_is_sent_a_newer_version_meanwhile_has_no_more_time() -> None:
    strategy = WeightStrategy("state_dict", encoding="bucket")  # the thread of the worker writes it
    sender, source = MemoryWeightSyncScheme(strategy, timeout=2.0), mlp(1)
    sender.init_on_sender(model=source, num_workers=1)
    sender.timeout, sender.late_updates_wait = 1.8, False  # of the receiver, which is a copy
    with sender, connect_pair(sender, source, mlp(2)) as receiver, receiver.hold():
        sender.send_async()
        start = time.monotonic()
        with pytest.raises(SyncFailedError, match=r"worker 0: .* within 2 s"):
            sender.send()  # it is written when the worker has refused the version before
        assert time.monotonic() - start < 3.0


@pytest.mark.parametrize(
    "kind", [SharedMemWeightSyncScheme, MultiProcessWeightSyncScheme, DistributedWeightSyncScheme]
)
def test_a_sender_that_is_shut_down_during_send_says_so(kind: type[WeightSyncScheme]) -> None:
    sender, source = kind(strategy="state_dict"), mlp(1)
    with connect_pair(sender, source, mlp(2)) as receiver, receiver.hold(), ThreadPoolExecutor(1) as pool:
        sent = pool.submit(sender.send)
        assert eventually(lambda: sender.last_report is not None and sender.last_report.version == 1)
        sender.shutdown()
        with pytest.raises(SyncFailedError, match="worker 0: the sender was shut down"):
            sent.result()


@pytest.mark.parametrize("sync", [True, False])
def test_a_converter_that_sends_would_wait_for_itself(sync: bool) -> None:
    calls: list[Callable[[], Any]] = []

    def convert(weights: Iterator[Any]) -> Iterator[Any]:
        for call in calls:
            call()
        yield from weights

    sender, source = (
        SharedMemWeightSyncScheme(WeightStrategy("state_dict", convert=convert), sync=sync),
        mlp(1),
    )
    with sender, connect_pair(sender, source, mlp(2)):
        for call in (sender.send, sender.send_async):
            calls[:] = [call]
            with pytest.raises(LifecycleError, match=r"inside send\(\) or wait\(\) of this scheme"):
                sender.send()
        calls.clear()
        sender.send()


class Alarming(nn.Linear):
    """A layer whose worker signals the trainer, a thread of this process, while it applies an update."""

    number = 0

    def get_extra_state(self) -> int:
        return self.number

    def set_extra_state(self, number: int) -> None:
        if number:
            signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGUSR1)
            time.sleep(0.2)


def send(scheme: SharedMemWeightSyncScheme) -> int:
    return scheme.send().version


def send_and_wait(scheme: SharedMemWeightSyncScheme) -> int:
    return scheme.send_async().wait().version


@pytest.mark.parametrize("inner", [send, send_and_wait])
@pytest.mark.parametrize("outer", [send, send_and_wait])
def test_a_signal_handler_that_sends_while_the_trainer_waits(
    outer: Callable[..., int], inner: Callable[..., int]
) -> None:
    errors: list[str] = []
    sender, source = SharedMemWeightSyncScheme("state_dict", timeout=30.0), Alarming(2, 2)

    def handle(*_: Any) -> None:
        source.number = 0  # what it sends raises no signal
        with pytest.raises(LifecycleError) as error:
            inner(sender)
        errors.append(str(error.value))

    with sender, connect_pair(sender, source, Alarming(2, 2)):
        before = signal.signal(signal.SIGUSR1, handle)
        try:
            source.number = 1
            start = time.monotonic()
            assert outer(sender) == 1
            assert time.monotonic() - start < 10.0
        finally:
            signal.signal(signal.SIGUSR1, before)
        assert "a signal handler cannot send" in errors[0]
        assert send(sender) > 1
