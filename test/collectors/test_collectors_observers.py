"""Observers of collectors: reports, events of workers, and the policy lag of each batch."""

import gc
import threading
import weakref

import pytest
import torch
from collector_parts import OPTIONS, Env, fill, make_policy
from tensordict import LazyStackedTensorDict, TensorDict
from tensordict.nn import TensorDictModule
from torch import nn
from torchrl.data import LazyTensorStorage, ReplayBuffer

from collectors import Collector, DistributedCollector, MultiAsyncCollector, MultiSyncCollector
from collectors.versions import versions_of
from weight_update import (
    LifecycleError,
    MemoryWeightSyncScheme,
    MultiProcessWeightSyncScheme,
    PolicyLag,
    SharedMemWeightSyncScheme,
    SyncReport,
    WorkerEvent,
)
from weight_update.testing.processes import eventually, wait_until


class Told(list):
    """An observer that keeps what it is told."""

    def __call__(self, event):
        self.append(event)

    def of(self, kind):
        return [one for one in self if isinstance(one, kind)]

    @property
    def versions(self):
        return [one.version for one in self.of(SyncReport)]

    @property
    def lags(self):
        return [(one.version, one.frames, one.mean, one.max) for one in self.of(PolicyLag)]


@pytest.fixture
def made(made):
    def make(cls, policy=None, envs=None, **options):
        envs = [Env] * 2 if envs is None else envs
        given = {"frames_per_batch": 20, "total_frames": -1, **OPTIONS, **options}
        return made(cls, envs, make_policy() if policy is None else policy, **given)

    return make


@pytest.mark.parametrize("schemes", [None, {"policy": MemoryWeightSyncScheme()}])
def test_a_collector_without_workers(made, schemes):
    collector, told = made(Collector, envs=Env, weight_sync_schemes=schemes), Told()
    collector.add_observer(told)
    frames = iter(collector)
    next(frames)
    collector.update_policy_weights_()
    collector.update_policy_weights_(weights_dict={"policy": make_policy(2.0)})
    next(frames)
    collector.shutdown()
    assert told.versions == [1, 2]
    assert told.lags == [(0, 20, 0.0, 0), (2, 20, 0.0, 0)]
    with pytest.raises(LifecycleError, match="shut down"):
        collector.add_observer(told)


@pytest.mark.parametrize("scheme", [SharedMemWeightSyncScheme, MultiProcessWeightSyncScheme])
def test_workers_with_different_versions(made, scheme):
    policy = make_policy()
    collector, told = made(MultiSyncCollector, policy, weight_sync_schemes={"policy": scheme()}), Told()
    collector.add_observer(told)
    frames = iter(collector)
    next(frames)
    collector.update_policy_weights_(worker_ids=[0])
    collector.update_policy_weights_(worker_ids=[0])
    next(frames)
    collector.update_policy_weights_()
    next(frames)
    assert eventually(lambda: len(told) == 6)
    assert told.versions == [1, 2, 3]
    assert [sorted(one.apply_seconds) for one in told.of(SyncReport)] == [[0], [0], [0, 1]]
    assert told.lags == [(0, 20, 0.0, 0), (2, 20, 1.0, 2), (3, 20, 0.0, 0)]


def test_a_version_that_no_worker_has_counts(made):
    """The trainer's version is the newest one that it sent, applied or not."""
    scheme = SharedMemWeightSyncScheme(sync=False)
    policy = TensorDictModule(Slow(), in_keys=["observation"], out_keys=["action"])
    collector, told = made(MultiAsyncCollector, policy, weight_sync_schemes={"policy": scheme}), Told()
    collector.add_observer(told)
    for _ in zip(range(20), collector, strict=False):
        collector.update_policy_weights_()
    assert eventually(lambda: len(told.of(PolicyLag)) == 20)
    versions = [one.version for one in told.of(PolicyLag)]
    assert versions == list(range(20))
    assert all(0 <= one.mean <= one.max <= one.version for one in told.of(PolicyLag))


class Slow(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(2, 2)

    def forward(self, observation):
        threading.Event().wait(0.002)
        return self.layer(observation)


def test_lost_workers_are_told(made):
    collector = made(MultiAsyncCollector, on_worker_lost="continue")
    told = Told()
    collector.add_observer(told)
    frames = iter(collector)
    next(frames)
    collector.procs[1].kill()
    wait_until(lambda: [(one.kind, one.worker) for one in told.of(WorkerEvent)] == [("lost", 1)])
    for _ in range(3):
        assert sorted(collector.update_policy_weights_().apply_seconds) == [0]
    assert eventually(lambda: told.versions == [1, 2, 3])
    assert [list(one.failures) for one in told.of(SyncReport)] == [[1], [], []]
    assert [sorted(one.apply_seconds) for one in told.of(SyncReport)] == [[0], [0], [0]]


@pytest.mark.filterwarnings("ignore:split_trajs=True produces:UserWarning")
def test_padding_has_no_lag(made):
    collector, told = made(MultiSyncCollector, split_trajs=True), Told()
    collector.update_policy_weights_()
    collector.add_observer(told)
    data = next(iter(collector))
    assert data.numel() > 20
    assert eventually(lambda: told.lags == [(1, 20, 0.0, 0)])


def test_frames_of_a_split_policy(made):
    layers = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    policy = TensorDictModule(layers, in_keys=["observation"], out_keys=["action"])
    body, head = "policy.module[0]", "policy.module[1]"
    schemes = {body: SharedMemWeightSyncScheme(), head: SharedMemWeightSyncScheme()}
    collector, told = made(MultiSyncCollector, policy, weight_sync_schemes=schemes), Told()
    collector.add_observer(told)
    collector.update_policy_weights_(weights_dict={body: layers[0], head: layers[1]})
    next(iter(collector))
    assert eventually(lambda: len(told) == 3)
    assert (told.versions, told.lags) == ([1, 1], [(1, 20, 0.0, 0)])
    assert collector.policy_version == 1


def test_batches_without_versions_have_no_lag(made):
    buffer = ReplayBuffer(storage=LazyTensorStorage(200), batch_size=10)
    for options in ({"track_policy_version": False}, {"replay_buffer": buffer}):
        collector, told = made(MultiSyncCollector, **options), Told()
        collector.add_observer(told)
        next(iter(collector))
        collector.update_policy_weights_()
        collector.shutdown()
        assert [type(one) for one in told if not isinstance(one, WorkerEvent)] == [SyncReport]


def test_versions_of_a_checkpoint(made):
    policy = make_policy()
    first = made(MultiSyncCollector, policy)
    for value in (1, 2, 3):
        first.update_policy_weights_(fill(policy, value))
    second, told = made(MultiSyncCollector, policy), Told()
    second.load_state_dict(first.state_dict())
    second.add_observer(told)
    frames = iter(second)
    next(frames)
    assert second.update_policy_weights_().version == 4
    next(frames)
    assert eventually(lambda: told.lags == [(3, 20, 0.0, 0), (4, 20, 0.0, 0)])


def test_a_removed_observer_leaves_nothing(made):
    scheme, told = SharedMemWeightSyncScheme(), Told()
    collector = made(MultiSyncCollector, weight_sync_schemes={"policy": scheme})
    other = Told()
    removes = [collector.add_observer(one) for one in (told, other)]
    collector.update_policy_weights_()
    assert eventually(lambda: told.versions == other.versions == [1])
    removes[0]()
    collector.update_policy_weights_()
    assert eventually(lambda: other.versions == [1, 2])
    removes[1]()
    assert scheme._process.observers.functions == ()  # an update costs nothing extra again
    collector.add_observer(told)
    collector.update_policy_weights_()
    assert eventually(lambda: told.versions == [1, 3])


@pytest.mark.usefixtures("all_observer_errors")
def test_an_observer_that_raises_breaks_nothing(made, caplog):
    collector, told = made(MultiSyncCollector), Told()

    def broken(event):
        raise ArithmeticError(f"cannot count {event}")

    collector.add_observer(broken)
    collector.add_observer(told)
    next(iter(collector))
    assert collector.update_policy_weights_().version == 1
    assert eventually(lambda: (told.versions, len(told.lags)) == ([1], 1))
    assert "cannot count version 0: 20 frames" in caplog.text


def test_a_dropped_collector_ends_its_thread():
    collector = Collector(Env, make_policy(), frames_per_batch=10, total_frames=20, **OPTIONS)
    collector.add_observer(print)
    assert observer_threads() == 1
    gone = weakref.ref(collector)
    del collector
    gc.collect()
    assert gone() is None
    assert eventually(lambda: observer_threads() == 0)


def observer_threads():
    return sum(thread.name == "weight_update-observers" for thread in threading.enumerate())


def test_workers_through_torch_distributed():
    options = {"frames_per_batch": 16, "total_frames": -1, "sync": True, "launcher": "mp"}
    collector = DistributedCollector([Env] * 2, make_policy(), collector_kwargs=OPTIONS, **options)
    told = Told()
    collector.add_observer(told)
    frames = iter(collector)
    next(frames)
    collector.update_policy_weights_(make_policy(1.0), worker_ids=[0])
    next(frames)
    collector.shutdown()
    assert told.versions == [1]
    assert told.lags == [(0, 16, 0.0, 0), (1, 16, 0.5, 1)]


def test_batches_of_unequal_lengths_have_no_lag():
    lazy = LazyStackedTensorDict(
        *(TensorDict({"policy_version": torch.zeros(length)}, [length]) for length in (2, 3))
    )
    assert versions_of(lazy) is None
    assert versions_of(TensorDict({"policy_version": torch.ones(2, dtype=torch.int64)}, [2])).tolist() == [
        1,
        1,
    ]
