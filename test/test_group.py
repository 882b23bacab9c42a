"""Group commits: several models switch together, and the report covers all of them."""

from __future__ import annotations

import copy
import pickle
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager, suppress
from typing import Any

import pytest
import torch
from marks import slow
from pairs import connect_pair, same
from torch import nn

from weight_update import (
    BucketEncoding,
    GroupSyncFailedError,
    MemoryWeightSyncScheme,
    SchemaMismatchError,
    SharedMemWeightSyncScheme,
    SyncFailedError,
    SyncTimeoutError,
    WeightStrategy,
    WeightSyncScheme,
    group_schemes,
    send_together,
)
from weight_update.receiver.group_commit import commit_group
from weight_update.schemes import sender_side
from weight_update.sender.pipeline import Pipeline
from weight_update.sender.workers import WorkerState
from weight_update.testing import Apart, mlp
from weight_update.testing.processes import wait_until
from weight_update.wire.frames import Kind, WeightChunk

LIMIT, WAIT = 0.3, 20.0


class Models:
    """Two schemes of a group, each with workers 0 and 1 in this process."""

    def __init__(
        self,
        make: Callable[[], WeightSyncScheme] = lambda: MemoryWeightSyncScheme(timeout=LIMIT),
        target: Callable[[int], nn.Module] = lambda idx: mlp(2),
    ) -> None:
        self._target = target
        self.schemes = [make() for _ in range(2)]
        self.receivers: dict[tuple[int, int], WeightSyncScheme] = {}
        self.models: dict[tuple[int, int], nn.Module] = {}
        group_schemes(self.schemes)
        for position, scheme in enumerate(self.schemes):
            scheme.init_on_sender(model=mlp(1), model_id=f"model{position}", num_workers=2)
            joining = [threading.Thread(target=self.join, args=(position, idx)) for idx in range(2)]
            for thread in joining:
                thread.start()
            scheme.connect()
            for thread in joining:
                thread.join()

    def join(self, position: int, idx: int) -> None:
        receiver = _copy_of(self.schemes[position])
        self.models[position, idx] = self._target(idx)
        receiver.init_on_receiver(model=self.models[position, idx], worker_idx=idx)
        receiver.connect()
        self.receivers[position, idx] = receiver

    def __enter__(self) -> Models:
        return self

    def __exit__(self, *_: object) -> None:
        for scheme in (*self.receivers.values(), *self.schemes):
            scheme.shutdown()


def _copy_of(scheme: WeightSyncScheme) -> WeightSyncScheme:
    if isinstance(scheme, MemoryWeightSyncScheme):  # it stays in one process
        return copy.copy(scheme)
    return pickle.loads(pickle.dumps(scheme))


@pytest.fixture
def models() -> Iterator[Models]:
    with Models() as found:
        yield found


def test_an_error_covers_all_models(models: Models) -> None:
    """The workers compute for too long; the receivers of one process share a gate."""
    first, second = models.schemes
    with models.receivers[0, 1].hold(), pytest.raises(GroupSyncFailedError) as caught:
        in_thread(lambda: send_together({first: mlp(5), second: mlp(6)}))
    error = caught.value
    assert {scheme: set(failures) for scheme, failures in error.by_scheme.items()} == {
        first: {0, 1},
        second: {0, 1},
    }
    assert {scheme: report.version for scheme, report in error.reports.items()} == {first: 1, second: 1}
    assert set(error.failures) == {0, 1}
    assert str(error).count("worker 1:") == 2
    assert "model0" in str(error)
    assert "model1" in str(error)
    arrived = pickle.loads(pickle.dumps(error))  # schemes are not pickled with it
    assert type(arrived) is SyncFailedError
    assert str(arrived) == str(error)


def in_thread(action: Any) -> None:
    """Run ``action`` in a thread and raise its exception: hold() belongs to the thread of the caller."""
    errors: list[BaseException] = []

    def run() -> None:
        try:
            action()
        except SyncFailedError as error:
            errors.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    if errors:
        raise errors[0]


def test_a_hold_longer_than_the_timeout_only_delays_the_models(models: Models) -> None:
    """They change together at its end."""
    with models.receivers[0, 0].hold():
        with pytest.raises(GroupSyncFailedError, match="gets the newest version when it goes on"):
            send_together(dict.fromkeys(models.schemes))
        time.sleep(3 * LIMIT)
        assert models.receivers[1, 0].version == 0
    wait_until(lambda: all(receiver.version == 1 for receiver in models.receivers.values()))
    send_together(dict.fromkeys(models.schemes))
    assert all(receiver.version == 2 for receiver in models.receivers.values())


def test_a_failure_to_stage_covers_all_models(models: Models) -> None:
    first, second = models.schemes
    for position in range(2):
        models.receivers[position, 1].shutdown()
    wait_until(lambda: all(scheme.worker_versions[1] is None for scheme in models.schemes))
    before = [tensor.clone() for tensor in models.models[0, 0].state_dict().values()]
    with pytest.raises(GroupSyncFailedError, match="no model was updated on any worker") as caught:
        send_together({first: mlp(5), second: mlp(6)})
    assert {scheme: set(failures) for scheme, failures in caught.value.by_scheme.items()} == {
        first: {1},
        second: {1},
    }
    after = models.models[0, 0].state_dict().values()
    assert all(torch.equal(one, other) for one, other in zip(before, after, strict=True))


def test_a_commit_of_another_version_applies_nothing() -> None:
    model = mlp(2)
    with SharedMemWeightSyncScheme(timeout=WAIT) as scheme, connect_pair(scheme, mlp(1), model) as receiver:
        sender = scheme._sender
        worker = sender.table[0]
        handle = scheme.stage(mlp(3), None, "step/1")
        wait_until(lambda: worker.staged == handle.version)
        before = worker.connections
        commit = WeightChunk(Kind.COMMIT, {"version": handle.version + 1})
        sender._delivery.broadcast([worker], commit)
        wait_until(lambda: worker.connections > before and worker.version == 0)
        assert receiver.version == 0
        assert same(mlp(1), model)


@pytest.mark.parametrize("grouped", [False, True])
def test_a_worker_that_creates_its_schemes_must_group_them(grouped: bool) -> None:
    """Otherwise the models have a gate each, and hold() would keep updates away from one of them only."""
    with ExitStack() as stack:
        senders = [stack.enter_context(SharedMemWeightSyncScheme(timeout=30.0)) for _ in range(2)]
        group_schemes(senders)
        receivers = []
        for sender in senders:
            sender.init_on_sender(model=mlp(1), num_workers=1)
            own = SharedMemWeightSyncScheme(address=sender.address, token=sender.token)
            receivers.append(stack.enter_context(own))
        if grouped:
            group_schemes(receivers)
        for sender, receiver in zip(senders, receivers, strict=True):
            connect_pair(sender, None, mlp(2), receiver)
        if grouped:
            send_together(dict.fromkeys(senders))
        else:
            with (
                receivers[0].hold(),
                pytest.raises(GroupSyncFailedError, match="call group_schemes"),
            ):
                in_thread(lambda: send_together(dict.fromkeys(senders)))
        assert [receiver.version for receiver in receivers] == [grouped, grouped]


def test_a_worker_that_writes_while_patches_wait_gets_all_weights_with_the_next_step() -> None:
    strategy, holds = WeightStrategy(encoding="patch"), threading.Event()
    with Models(lambda: MemoryWeightSyncScheme(strategy, timeout=5.0)) as models:
        sources = {scheme: mlp(5 + position) for position, scheme in enumerate(models.schemes)}
        first, model = models.schemes[0], models.models[0, 1]
        send_together(sources)

        def write() -> None:
            with models.receivers[0, 1].hold(), torch.no_grad():
                holds.set()
                wait_until(lambda: first._require_sender().sender.table[1].staged == 2)
                next(model.parameters()).fill_(7.0)

        with ThreadPoolExecutor(1) as pool:
            writing = pool.submit(write)
            holds.wait()
            with pytest.raises(GroupSyncFailedError, match="this worker wrote into its weights"):
                send_together(sources)
            writing.result()
        send_together(sources)
        for (position, _), target in models.models.items():
            expected = sources[models.schemes[position]].state_dict()
            assert all(torch.equal(expected[name], one) for name, one in target.state_dict().items())


def test_the_error_of_patches_for_models_with_the_same_parameters_names_the_fix() -> None:
    strategy, targets = WeightStrategy(encoding="patch"), [mlp(2), mlp(2)]
    with (
        Models(lambda: MemoryWeightSyncScheme(strategy, timeout=5.0), targets.__getitem__) as models,
        pytest.raises(GroupSyncFailedError, match="same parameters: use one scheme for both"),
    ):
        send_together(dict.fromkeys(models.schemes, mlp(3)))


@pytest.fixture(params=[slow("dense"), "patch"])
def rejoining(request: pytest.FixtureRequest) -> Iterator[Models]:
    """Models whose receivers join again when their connection fails."""
    strategy = WeightStrategy(encoding=request.param)
    with Models(lambda: SharedMemWeightSyncScheme(strategy, timeout=2.0)) as found:
        yield found


def test_a_worker_that_could_not_apply_the_weights_it_joined_with(rejoining: Models) -> None:
    sender, receiver = rejoining.schemes[0], rejoining.receivers[0, 1]
    with receiver.hold():  # for longer than the timeout
        receiver._receiver.link.disconnect()
        wait_until(lambda: sender._sender.table[1].failures)
    send_together(dict.fromkeys(rejoining.schemes))
    assert [scheme.worker_versions for scheme in rejoining.schemes] == [{0: 1, 1: 1}] * 2


@contextmanager
def interrupted_at_its_end() -> Iterator[None]:
    yield
    raise KeyboardInterrupt


@pytest.mark.parametrize("step", ["stage", "handle", "publish", "commit", "broadcast"])
def test_a_step_after_an_interrupted_one(
    step: str, rejoining: Models, monkeypatch: pytest.MonkeyPatch
) -> None:
    sender = rejoining.schemes[0]._sender
    owner, name = {
        "stage": (sender._delivery, "update"),
        "handle": (sender_side, "SendHandle"),
        "publish": (sender_side, "_outside_inference_mode"),
        "commit": (next(iter(sender._groups.all())), "commit"),
        "broadcast": (sender._delivery, "broadcast"),
    }[step]
    before = getattr(owner, name)

    def interrupt(*args: Any) -> Any:
        monkeypatch.undo()
        if step == "publish":
            return interrupted_at_its_end()
        if step == "stage":  # the workers have it, and the caller never hears of it
            before(*args)
        raise KeyboardInterrupt

    workers = [worker for scheme in rejoining.schemes for worker in scheme._sender.table]
    connections = [worker.connections for worker in workers]
    monkeypatch.setattr(owner, name, interrupt)
    sources = {scheme: mlp(7) for scheme in rejoining.schemes}
    with pytest.raises(KeyboardInterrupt):
        send_together(sources)
    reports = send_together(sources)
    if step not in (
        "stage",
        "handle",
        "publish",
    ):  # else a worker may find that the memory of its patch was used again
        assert [worker.connections for worker in workers] == connections
    for scheme in rejoining.schemes:
        assert set(reports[scheme].apply_seconds) == {0, 1}
        assert set(scheme.worker_versions.values()) == {reports[scheme].version}


def test_a_step_after_one_whose_pipeline_failed() -> None:
    """The first worker was sent all of its weights when those of the second one turn out to be wrong."""
    encoding = BucketEncoding(bucket_size=4096)
    strategy = WeightStrategy("state_dict", encoding=encoding, max_in_flight=2)
    with Models(lambda: SharedMemWeightSyncScheme(strategy, timeout=2.0)) as models:
        first, second = models.schemes
        wrong = {**mlp(5).state_dict(), "2.bias": torch.ones(3)}
        with pytest.raises(SchemaMismatchError, match=r"2\.bias"):
            send_together({first: {0: mlp(5), 1: wrong}, second: mlp(6)})
        reports = send_together({first: mlp(7), second: mlp(8)})
        assert [set(report.apply_seconds) for report in reports.values()] == [{0, 1}] * 2


def test_a_worker_that_restarts_joins_a_pipeline() -> None:
    """It connects its models one after the other, each of which waits for weights."""
    strategy = WeightStrategy(encoding=BucketEncoding(bucket_size=4096), max_in_flight=2)
    with Models(lambda: SharedMemWeightSyncScheme(strategy, timeout=2.0)) as models:
        for position in range(2):
            models.receivers.pop((position, 1)).shutdown()
        together = {scheme: mlp(7) for scheme in models.schemes}
        joining = threading.Thread(target=lambda: [models.join(position, 1) for position in range(2)])
        joining.start()
        deadline = time.monotonic() + WAIT
        while joining.is_alive():
            assert time.monotonic() < deadline
            with suppress(GroupSyncFailedError):
                send_together(together)
        reports = send_together(together)
        assert [set(report.apply_seconds) for report in reports.values()] == [{0, 1}] * 2


def test_an_interrupted_pipeline_to_another_host_is_aborted_before_its_last_chunks(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    strategy = WeightStrategy("state_dict", encoding=BucketEncoding(bucket_size=128), max_in_flight=8)
    with Models(lambda: Apart(strategy=strategy, timeout=WAIT)) as models:
        workers = [worker for scheme in models.schemes for worker in scheme._sender.table]
        connections = [worker.connections for worker in workers]
        sources = {scheme: mlp(7) for scheme in models.schemes}
        write, aborted = Pipeline._write, threading.Event()

        def write_later(self: Pipeline, worker: WorkerState, chunk: WeightChunk) -> None:
            if chunk.header["index"] > 0:
                aborted.wait(WAIT)
            write(self, worker, chunk)

        def interrupt(*_: Any) -> None:
            time.sleep(0.2)  # the first chunks are on their way
            raise KeyboardInterrupt

        with monkeypatch.context() as patch:
            patch.setattr(Pipeline, "_write", write_later)
            patch.setattr(sender_side, "SendHandle", interrupt)
            with pytest.raises(KeyboardInterrupt):
                send_together(sources)
            aborted.set()
        reports = send_together(sources)
        assert [set(report.apply_seconds) for report in reports.values()] == [{0, 1}] * 2
        assert [worker.connections for worker in workers] == connections


def test_a_worker_that_can_never_apply_the_weights_it_joined_with(
    rejoining: Models, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its own error is raised, not one about the wait."""

    def refuse(update: Any) -> None:
        raise RuntimeError("the model refuses")

    sender, receiver = rejoining.schemes[0], rejoining.receivers[0, 1]
    monkeypatch.setattr(receiver._receiver.staging, "begin", refuse)
    receiver._receiver.link.disconnect()
    wait_until(lambda: sender._sender.table[1].failures)
    with pytest.raises(GroupSyncFailedError, match="the model refuses") as caught:
        send_together(dict.fromkeys(rejoining.schemes))
    assert {scheme: set(errors) for scheme, errors in caught.value.by_scheme.items()} == {sender: {1}}
    monkeypatch.undo()
    send_together(dict.fromkeys(rejoining.schemes))
    assert sender.worker_versions == {0: 2, 1: 2}


def test_a_slow_switch_is_no_failure() -> None:
    """Once all members have arrived, each waits for the outcome, however long the last one takes."""
    came: list[float] = []

    def first() -> None:
        came.append(commit_group("slow", 2, "first", slow_switch, LIMIT / 3))

    thread = threading.Thread(target=first)
    thread.start()
    assert commit_group("slow", 2, "second", slow_switch, 10.0) == 7.0
    thread.join(10.0)
    assert came == [7.0]


def slow_switch(members: list[str]) -> float:
    assert sorted(members) == ["first", "second"]
    time.sleep(LIMIT)
    return 7.0


def test_a_member_that_does_not_come_in_time_switches_nobody() -> None:
    with pytest.raises(SyncTimeoutError, match="did not arrive"):
        commit_group("late", 2, "first", slow_switch, 0.05)
    with pytest.raises(SyncTimeoutError, match="did not arrive"):
        commit_group("late", 2, "second", slow_switch, 0.05)


def test_an_end_of_the_switch_reaches_all() -> None:
    errors: list[BaseException] = []

    def end(_: list[str]) -> float:
        raise SystemExit(3)

    def member(name: str) -> None:
        try:
            commit_group("ended", 2, name, end, 5.0)
        except BaseException as error:  # noqa: BLE001 - the test looks at it
            errors.append(error)

    threads = [threading.Thread(target=member, args=(name,)) for name in ("first", "second")]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(3.0)
    assert len(errors) == 2


def test_observers_are_told_of_every_model(models: Models) -> None:
    first, second = models.schemes
    told: list[tuple[str, int]] = []
    for name, scheme in (("first", first), ("second", second)):
        scheme.add_observer(lambda event, name=name: told.append((name, event.version)))
    send_together({first: mlp(5), second: mlp(6)})
    wait_until(lambda: sorted(told) == [("first", 1), ("second", 1)])
