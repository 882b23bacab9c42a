"""Late joiners, over every scheme that admits them."""

import contextlib
import copy
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from typing import Any

import pytest
import torch
from pairs import add_one, connect_pair, same
from torch import nn

from weight_update import (
    DistributedWeightSyncScheme,
    LifecycleError,
    MemoryWeightSyncScheme,
    MultiProcessWeightSyncScheme,
    PatchEncoding,
    SchemaMismatchError,
    SharedMemWeightSyncScheme,
    SyncTimeoutError,
    WeightStrategy,
    WeightSyncScheme,
)
from weight_update.convert import cast
from weight_update.schemes.sender_side import SenderSide
from weight_update.sender.delivery import AnswerThreads
from weight_update.sender.groups.base import FullGroup
from weight_update.sender.workers import WorkerState
from weight_update.testing import LateJoinerContract, mlp
from weight_update.testing.cases import Assemble
from weight_update.testing.late_joiners import KilledLateJoinerTests
from weight_update.testing.worker_processes import start_workers


class TestSharedMem(LateJoinerContract, KilledLateJoinerTests):
    def make_scheme(self, **options: Any) -> WeightSyncScheme:
        return SharedMemWeightSyncScheme(**options)


class TestDistributed(LateJoinerContract, KilledLateJoinerTests):
    def make_scheme(self, **options: Any) -> WeightSyncScheme:
        return DistributedWeightSyncScheme(**options)

    @pytest.mark.slow
    def test_indices_that_do_not_match(self, assemble: Assemble) -> None:
        super().test_indices_that_do_not_match(assemble)


@pytest.mark.slow
class TestPatches(LateJoinerContract, KilledLateJoinerTests):
    def make_scheme(self, **options: Any) -> WeightSyncScheme:
        return SharedMemWeightSyncScheme(WeightStrategy(encoding=PatchEncoding()), **options)


class TestMemory(LateJoinerContract):
    method = "thread"
    returns = False

    def make_scheme(self, **options: Any) -> WeightSyncScheme:
        return MemoryWeightSyncScheme(**options)

    @pytest.mark.slow
    def test_indices_that_do_not_match(self, assemble: Assemble) -> None:
        super().test_indices_that_do_not_match(assemble)


@pytest.mark.parametrize("serving", [True, False], ids=["serving", "before connect"])
def test_a_thread_comes_back_before_the_sender_has_forgotten_it(
    serving: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    forget = AnswerThreads._forget

    def forget_late(threads: AnswerThreads, worker: WorkerState) -> bool:
        time.sleep(0.2)
        return forget(threads, worker)

    monkeypatch.setattr(AnswerThreads, "_forget", forget_late)
    with MemoryWeightSyncScheme(timeout=10.0) as scheme:
        scheme.init_on_sender(model=mlp(1), num_workers=0)
        if serving:
            scheme.connect()
        else:
            with late_joiner(scheme) as receiver, pytest.raises(SyncTimeoutError, match="has it called conn"):
                receiver.connect(timeout=0.1)
            threading.Timer(0.3, scheme.connect).start()
        for _ in range(2):
            with late_joiner(scheme) as receiver:
                receiver.connect()
                assert scheme.send().apply_seconds.keys() == {3}


def test_late_joiners_with_narrower_dtypes_are_told_the_remedy(caplog: pytest.LogCaptureFixture) -> None:
    trainer = nn.Linear(64, 64)
    for convert, warnings in ((None, 1), (cast(torch.bfloat16), 0)):
        caplog.clear()
        strategy = WeightStrategy("state_dict", encoding="patch", convert=convert)
        with MemoryWeightSyncScheme(strategy, timeout=10.0) as scheme, ExitStack() as stack:
            scheme.init_on_sender(model=trainer, num_workers=0)
            scheme.connect()
            for index in (3, 4):
                receiver, worker = stack.enter_context(copy.copy(scheme)), nn.Linear(64, 64).bfloat16()
                receiver.init_on_receiver(model=worker, worker_idx=index)
                receiver.connect(timeout=5.0)
                assert torch.equal(worker.weight, trainer.weight.bfloat16())
            with torch.no_grad():
                trainer.weight[0, 0] += 1.0
                trainer.weight[1:].mul_(1 + 1e-6)  # nothing in bf16
            report = scheme.send()
            assert (report.encoding == "patch") == (convert is not None)
            assert torch.equal(worker.weight, trainer.weight.bfloat16())
        told = [one.getMessage() for one in caplog.records if "convert=cast" in one.getMessage()]
        assert len(told) == warnings
        assert all("worker 3 joined after connect(), and gets updates of 0.0166 MB" in one for one in told)


@pytest.mark.parametrize("dtypes", [(torch.float16, torch.float32), (torch.float32, torch.float16)])
def test_a_late_joiner_with_dtypes_of_its_own_need_not_wait(dtypes: tuple[torch.dtype, ...]) -> None:
    trainer, late = nn.Linear(8, 8), nn.Linear(8, 8).bfloat16()
    with MemoryWeightSyncScheme(timeout=10.0) as scheme, ExitStack() as stack, ThreadPoolExecutor() as pool:
        scheme.init_on_sender(model=trainer, num_workers=2)
        for index, dtype in enumerate(dtypes):
            receiver = stack.enter_context(copy.copy(scheme))
            receiver.init_on_receiver(model=nn.Linear(8, 8, dtype=dtype), worker_idx=index)
            pool.submit(receiver.connect)
        scheme.connect()
        receiver = stack.enter_context(copy.copy(scheme))
        receiver.init_on_receiver(model=late, worker_idx=2)
        receiver.connect(timeout=5.0)
        assert torch.equal(late.weight, trainer.weight.bfloat16())


def test_one_of_two_threads_becomes_a_late_joiner(monkeypatch: pytest.MonkeyPatch) -> None:
    both, admit = threading.Barrier(2), SenderSide.admit

    def admit_both(side: SenderSide, *arguments: Any) -> Any:
        with contextlib.suppress(threading.BrokenBarrierError):
            both.wait(0.3)
        return admit(side, *arguments)

    monkeypatch.setattr(SenderSide, "admit", admit_both)
    with MemoryWeightSyncScheme(timeout=10.0) as scheme, ThreadPoolExecutor(2) as pool:
        scheme.init_on_sender(model=mlp(1), num_workers=0)
        scheme.connect()
        with late_joiner(scheme) as one, late_joiner(scheme) as other:
            errors = [pool.submit(receiver.connect, timeout=5.0).exception for receiver in (one, other)]
            (error,) = filter(None, [get(10.0) for get in errors])
            assert "another receiver is worker 3" in str(error)
            assert "or shut down the other one first" in str(error)
            assert scheme.send().apply_seconds.keys() == {3}


def late_joiner(scheme: WeightSyncScheme) -> WeightSyncScheme:
    receiver = copy.copy(scheme)
    receiver.init_on_receiver(model=mlp(2), worker_idx=3)
    return receiver


def test_queues_must_exist_before_the_process() -> None:
    with MultiProcessWeightSyncScheme() as scheme:
        scheme.init_on_receiver(model=mlp(2), worker_idx=1)
        with pytest.raises(LifecycleError, match=r"no queues for worker 1; pass the scheme .* after init"):
            scheme.connect()
    scheme = MultiProcessWeightSyncScheme()
    with start_workers(scheme, [mlp(2)], model=mlp(1)) as procs:
        procs.hire(1, mlp(3))
        message = (
            r"no queues for worker 1 \(only for 0\): this scheme admits no late joiners; give init_on_sender"
            r"\(\) all workers, or use SharedMemWeightSyncScheme, where workers with common weights may join"
        )
        with pytest.raises(LifecycleError, match=message):
            procs.workers[1].call("connect")
        scheme.send(mlp(4))


def test_one_that_joins_while_weights_are_read_gets_them(monkeypatch: pytest.MonkeyPatch) -> None:
    """Reading may take long; the worker would keep the version before until the next update."""
    reading, source, target = SenderSide._reading, nn.Linear(4, 4), nn.Linear(4, 4)

    def read_and_join(side: SenderSide, *arguments: Any) -> Any:
        monkeypatch.setattr(SenderSide, "_reading", reading)
        found = reading(side, *arguments)
        late.connect()
        return found

    with SharedMemWeightSyncScheme(timeout=20.0) as sender:
        first = connect_pair(sender, source, nn.Linear(4, 4))
        late = copy.copy(sender)
        late.init_on_receiver(model=target, worker_idx=1)
        monkeypatch.setattr(SenderSide, "_reading", read_and_join)
        add_one(source)
        report = sender.send()
        assert (report.version, sender.worker_versions) == (1, {0: 1, 1: 1})
        assert report.apply_seconds.keys() == {0, 1}
        assert same(source, target)
        for one in (first, late):
            one.shutdown()


def test_nobody_waits_for_one_that_is_still_joining(monkeypatch: pytest.MonkeyPatch) -> None:
    """It may fail to join. If it does not, it has the update."""
    assigned, proceed, welcome = threading.Event(), threading.Event(), FullGroup.welcome

    def welcome_late(group: FullGroup) -> dict[str, Any]:
        assigned.set()
        proceed.wait(20.0)
        return welcome(group)

    source, target = nn.Linear(4, 4), nn.Linear(4, 4)
    with SharedMemWeightSyncScheme(timeout=20.0) as sender, ThreadPoolExecutor(1) as pool:
        first = connect_pair(sender, source, nn.Linear(4, 4))
        late = copy.copy(sender)
        late.init_on_receiver(model=target, worker_idx=1)
        monkeypatch.setattr(FullGroup, "welcome", welcome_late)
        joining = pool.submit(late.connect)
        assert assigned.wait(20.0)
        add_one(source)
        try:
            sending = threading.Thread(target=sender.send, daemon=True)
            sending.start()
            sending.join(5.0)
            assert not sending.is_alive()
            assert sender.last_report is not None
            assert sender.last_report.apply_seconds.keys() == {0}
        finally:
            proceed.set()
        joining.result(20.0)
        assert same(source, target)
        for one in (first, late):
            one.shutdown()


def test_connect_names_a_late_joiner_that_was_refused_and_ended() -> None:
    with MemoryWeightSyncScheme() as scheme, ThreadPoolExecutor(1) as pool:
        scheme.init_on_sender(model=mlp(1), num_workers=1)
        connecting = pool.submit(scheme.connect, timeout=1.5)
        with copy.copy(scheme) as receiver:
            receiver.init_on_receiver(model=nn.Linear(3, 3), worker_idx=3)
            with pytest.raises(SchemaMismatchError):
                receiver.connect(timeout=5.0)
        with pytest.raises(SyncTimeoutError, match=r"workers \[0\] did not .*\n.*refused:\n  worker 3: "):
            connecting.result()
