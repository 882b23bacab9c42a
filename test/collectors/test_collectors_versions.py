import copy
import time

import pytest
import torch
import torchrl.collectors
from collector_parts import (
    OPTIONS,
    STEPS,
    Env,
    Slow,
    fill,
    make_policy,
    policy_of_seven,
    require_exact,
    require_stamps,
    see_versions,
    updates,
    weights_of,
)
from marks import slow
from torchrl.data import LazyTensorStorage, ReplayBuffer
from torchrl.envs import SerialEnv
from torchrl.envs.llm.transforms import PolicyVersion

from collectors import Collector, MultiAsyncCollector, MultiCollector, MultiSyncCollector
from collectors.versions import choose_tracking
from weight_update import MemoryWeightSyncScheme, MultiProcessWeightSyncScheme, SharedMemWeightSyncScheme
from weight_update.testing.processes import wait_until


@pytest.mark.parametrize("cls", [MultiSyncCollector, MultiAsyncCollector])
@pytest.mark.parametrize("scheme", [SharedMemWeightSyncScheme, slow(MultiProcessWeightSyncScheme)])
def test_every_frame_names_its_version_while_updates_flow(cls, scheme, made):
    policy = make_policy()
    collector = made(cls, [Env] * 2, policy, frames_per_batch=60, weight_sync_schemes={"policy": scheme()})
    frames = iter(collector)
    with updates(collector, policy) as sent:
        seen = see_versions(frames, require_exact, enough=100)
    assert max(seen) <= len(sent)
    assert collector.policy_version == sent[-1]


def test_random_frames_name_the_version_in_force(made):
    policy = make_policy()
    collector = made(
        MultiSyncCollector, [Env] * 2, policy, frames_per_batch=20, total_frames=60, init_random_frames=40
    )
    for number, data in enumerate(collector):
        require_stamps(data)
        assert set(data["policy_version"].unique().tolist()) == {number}
        made_by_policy = bool((data["action"] == number).all())
        assert made_by_policy == (number == 2)
        collector.update_policy_weights_(fill(policy, number + 1))


@pytest.mark.parametrize("extend_buffer", [True, False])
def test_replay_buffer_holds_versions(extend_buffer, made):
    buffer = ReplayBuffer(storage=LazyTensorStorage(200), batch_size=10)
    policy = make_policy()
    collector = made(
        MultiSyncCollector,
        [Env] * 2,
        policy,
        frames_per_batch=20,
        total_frames=100,
        replay_buffer=buffer,
        extend_buffer=extend_buffer,
    )
    with updates(collector, policy):
        for _ in collector:
            pass
    assert len(buffer) >= 100
    stored = buffer[:]
    require_exact(stored)
    assert stored["policy_version"].max() > 1


def test_a_replay_buffer_that_is_not_here_is_not_examined():
    assert choose_tracking(None, ReplayBuffer.__new__(ReplayBuffer)) is True  # RayReplayBuffer has no storage
    later = ReplayBuffer(storage=lambda: LazyTensorStorage(200), batch_size=10, delayed_init=True)
    assert choose_tracking(None, later) is True
    assert not later.initialized


@pytest.mark.parametrize("emptied", [False, True])
def test_a_collector_and_a_replay_buffer_that_was_filled_without_versions(made, emptied):
    buffer = ReplayBuffer(storage=LazyTensorStorage(200), batch_size=10)
    options = {"frames_per_batch": 20, "total_frames": 40, "replay_buffer": buffer, "extend_buffer": True}
    for _ in made(Collector, Env, make_policy(), track_policy_version=False, **options):
        pass
    if emptied:
        buffer.empty()
    for _ in made(Collector, Env, fill(make_policy(), 3), **options):
        pass
    stored = buffer[:]
    assert len(stored) == (40 if emptied else 80)
    assert (stored["action"][-40:] == 3).all()
    assert stored.get("policy_version", None) is None


@pytest.mark.parametrize("cls", [MultiSyncCollector, MultiAsyncCollector])
def test_a_replay_buffer_that_was_filled_without_versions(cls, made):
    buffer = ReplayBuffer(storage=LazyTensorStorage(200), batch_size=10, shared=True)
    buffer.extend(Env().rollout(5).reshape(-1))
    options = {"frames_per_batch": 20, "total_frames": 40, "replay_buffer": buffer, "extend_buffer": True}
    with pytest.raises(RuntimeError, match=r"without the required \('next', 'policy_version'\) field"):
        cls([Env], make_policy(), track_policy_version=True, **options, **OPTIONS)
    collector = made(cls, [Env], fill(make_policy(), 3), **options)
    for _ in collector:
        pass
    stored = buffer[:]
    assert len(stored) >= 5 + 40
    assert (stored["action"][5:] == 3).all()
    assert stored.get("policy_version", None) is None
    assert collector.update_policy_weights_(make_policy()).version == collector.policy_version == 1


def test_policy_factory_and_user_named_versions(made):
    collector = made(
        MultiSyncCollector,
        [Env] * 2,
        policy_factory=policy_of_seven,
        frames_per_batch=20,
        total_frames=60,
        weight_sync_schemes={"policy": SharedMemWeightSyncScheme()},
    )
    for number, data in enumerate(collector):
        require_stamps(data)
        assert set(data["policy_version"].unique().tolist()) == {number}
        assert set(data["action"].unique().tolist()) == {7.0 + number}
        report = collector.update_policy_weights_(make_policy(8.0 + number))
        assert report.version == number + 1


@pytest.mark.parametrize("env", [Env, lambda: Env([3]), lambda: SerialEnv(2, Env)])
def test_one_process(env, made):
    policy = make_policy()
    collector = made(Collector, env, policy, frames_per_batch=24, total_frames=96, device="cpu")
    for number, data in enumerate(collector):
        require_exact(data)
        assert data["policy_version"].max() == number == collector.policy_version
        fill(policy, number + 1)
        assert collector.update_policy_weights_().version == number + 1
    assert number == 3
    assert "TellTale" in repr(collector)


def test_an_environment_gets_no_transform_and_can_be_copied(made):
    env = Env()
    collector = made(Collector, env, make_policy(), frames_per_batch=2 * STEPS)
    assert collector.env is env
    data = next(iter(collector))
    require_exact(data)
    assert set(data.keys(True, True)) == set(collector.fake_tensordict().keys(True, True))
    count = env.count
    other = copy.deepcopy(env)
    other.rollout(3, break_when_any_done=False)
    assert (env.count, other.count) == (count, 3)
    collector.shutdown(close_env=False)
    assert "step_and_maybe_reset" not in vars(env)


@pytest.mark.parametrize("tracks", [True, False])
def test_an_environment_with_a_step_of_its_own_keeps_it(tracks, made):
    env, steps = Env(), []

    def step(data):  # such as a compiled one
        steps.append(data)
        return Env.step_and_maybe_reset(env, data)

    env.step_and_maybe_reset = step
    for _ in range(2):
        options = {"frames_per_batch": STEPS, "track_policy_version": tracks, **OPTIONS}
        collector = made(Collector, env, make_policy(), **options)
        data = next(iter(collector))
        assert (("next", "policy_version") in data.keys(True)) == tracks
        collector.shutdown(close_env=False)
        assert env.step_and_maybe_reset is step
    assert len(steps) == 2 * STEPS


def test_an_environment_that_the_collector_wraps(made):
    options = {"frames_per_batch": 12, "max_frames_per_traj": 3, **OPTIONS}
    collector = made(Collector, Env, make_policy(), **options)
    collector.update_policy_weights_(weights_of(1.0))
    data = next(iter(collector))
    require_exact(data)
    assert set(data["policy_version"].tolist()) == {1}


@pytest.mark.parametrize("extend_buffer", [True, slow(False)])
def test_one_process_into_a_buffer_with_a_copy_of_the_policy(extend_buffer, made):
    buffer = ReplayBuffer(storage=LazyTensorStorage(400), batch_size=10)
    policy = make_policy()
    collector = made(
        Collector,
        Env,
        policy,
        frames_per_batch=20,
        total_frames=400,
        init_random_frames=20,
        replay_buffer=buffer,
        extend_buffer=extend_buffer,
        weight_sync_schemes={"policy": SharedMemWeightSyncScheme()},
    )
    with updates(collector, policy):
        for _ in collector:
            pass
    stored = buffer[:]
    require_stamps(stored)
    require_exact(stored[20:])
    assert stored["policy_version"].max() > 3


@pytest.mark.parametrize("scheme", [None, MemoryWeightSyncScheme])
def test_versions_survive_a_checkpoint(scheme, made):
    def make():
        schemes = None if scheme is None else {"policy": scheme()}
        options = {"frames_per_batch": 10, "total_frames": 20, "weight_sync_schemes": schemes}
        return Collector(Env, make_policy(), **options, **OPTIONS)

    collector = make()
    for value in (1, 2, 3):
        collector.update_policy_weights_(make_policy(value))
    saved = collector.state_dict()
    collector.shutdown()
    other = made(make)
    other.load_state_dict(saved)
    frames = iter(other)
    data = next(frames)
    assert set(data["policy_version"].tolist()) == {3}
    require_exact(data)
    assert other.update_policy_weights_(make_policy(4)).version == 4
    require_exact(next(frames))


@pytest.mark.parametrize("scheme", [SharedMemWeightSyncScheme, slow(MultiProcessWeightSyncScheme)])
def test_versions_of_workers_survive_a_checkpoint(scheme, made):
    def make():
        return MultiSyncCollector(
            [Env] * 2,
            make_policy(),
            frames_per_batch=20,
            weight_sync_schemes={"policy": scheme()},
            **OPTIONS,
        )

    collector = make()
    for value in (1, 2, 3):
        collector.update_policy_weights_(make_policy(value))
    saved = collector.state_dict()
    collector.shutdown()
    other = made(make)
    other.load_state_dict(saved)
    assert other.policy_version == 3
    restored = other.state_dict()
    assert [int(restored[f"worker{idx}"]["policy_version"]) for idx in range(2)] == [3, 3]
    frames = iter(other)
    data = next(frames)
    assert set(data["policy_version"].flatten().tolist()) == {3}
    require_exact(data)
    for version in (4, 5):
        report = other.update_policy_weights_(make_policy(version))
        assert report.version == version == other.policy_version
        data = next(frames)
        assert set(data["policy_version"].flatten().tolist()) == {version}
        require_exact(data)


@pytest.mark.parametrize("scheme", [None, SharedMemWeightSyncScheme])
def test_a_state_is_not_changed_by_later_updates(scheme, made):
    schemes = None if scheme is None else {"policy": scheme()}
    collector = made(Collector, Env, make_policy(), frames_per_batch=5, weight_sync_schemes=schemes)
    collector.update_policy_weights_(weights_of(1.0))
    saved = collector.state_dict()
    collector.update_policy_weights_(weights_of(2.0))
    collector.load_state_dict(saved)
    data = next(iter(collector))
    assert set(data["policy_version"].tolist()) == {1}
    require_exact(data)


@pytest.mark.parametrize("scheme", [None, SharedMemWeightSyncScheme])
def test_a_state_has_the_weights_of_one_version(scheme, made):
    policy = make_policy()
    policy.register_state_dict_post_hook(lambda *args: time.sleep(0.05))
    schemes = None if scheme is None else {"policy": scheme()}
    collector = made(Collector, Env, policy, frames_per_batch=5, weight_sync_schemes=schemes)
    with updates(collector, make_policy()):
        for _ in range(10):
            state = collector.state_dict()
            values = torch.cat([*state["policy_state_dict"].values()]).unique().tolist()
            assert values == [state["policy_version"]]


def test_tracking_can_be_left_to_the_caller(made):
    silent = Collector(
        Env, make_policy(), frames_per_batch=10, total_frames=10, track_policy_version=False, **OPTIONS
    )
    assert "policy_version" not in list(next(iter(silent)).keys())
    silent.shutdown()
    named = made(
        Collector,
        Env,
        make_policy(),
        frames_per_batch=10,
        total_frames=20,
        track_policy_version=PolicyVersion("uuid"),
    )
    before = named.policy_version
    named.update_policy_weights_()
    assert isinstance(before, str)
    assert named.policy_version != before


def test_a_state_without_a_version_is_restored(made):
    """Of a collector that writes no versions, or of TorchRL's without the option."""
    options = {"frames_per_batch": 10, "total_frames": -1, **OPTIONS}
    saved = made(Collector, Env, fill(make_policy(), 3), track_policy_version=False, **options).state_dict()
    assert "policy_version" not in saved
    for tracks in (False, True):
        collector = made(Collector, Env, make_policy(), track_policy_version=tracks, **options)
        collector.load_state_dict(saved)
        assert (next(iter(collector))["action"] == 3).all()


class OfTorchRL(torchrl.collectors.Collector):
    """A collector of a program whose import was not changed."""


class OfOurs(Collector):
    pass


@pytest.mark.parametrize("cls", [MultiSyncCollector, MultiAsyncCollector])
@pytest.mark.parametrize("kind", [OfTorchRL, torchrl.collectors.Collector, OfOurs])
def test_a_class_of_torchrl_writes_no_wrong_versions(cls, kind, made):
    policy = make_policy()
    options = {"frames_per_batch": STEPS, "total_frames": -1, "collector_class": kind, **OPTIONS}
    collector = made(cls, [Env], policy, **options)
    collector.update_policy_weights_(fill(policy, 1))
    data = next(iter(collector))
    assert (data["action"] == 1).all()
    if kind is OfOurs:
        require_exact(data)
        return
    assert data.get("policy_version", None) is None
    message = "collector_class is (OfTorchRL|Collector), a collector of TorchRL, .* derive it from collectors"
    with pytest.raises(TypeError, match=message):
        cls([Env], policy, track_policy_version=True, **options)


def test_multi_collector_chooses_its_kind():
    for sync, kind in ((True, MultiSyncCollector), (False, MultiAsyncCollector)):
        collector = MultiCollector([Env], make_policy(), sync=sync, frames_per_batch=10, **OPTIONS)
        assert type(collector) is kind
        assert isinstance(collector, MultiCollector)
        require_exact(next(iter(collector)))
        collector.shutdown()


def test_frames_of_the_batch_that_a_shutdown_awaits_name_their_version(made):
    buffer = ReplayBuffer(storage=LazyTensorStorage(400), batch_size=10)
    options = {"frames_per_batch": 20, "replay_buffer": buffer, **OPTIONS}
    collector = made(Collector, Slow, make_policy(), **options)
    collector.update_policy_weights_(weights_of(1.0))
    collector.start()
    wait_until(lambda: buffer.write_count > 0)
    time.sleep(0.1)  # it is within the next batch
    collector.shutdown()
    assert len(buffer) >= 40
    require_exact(buffer[:])


def test_a_state_that_is_loaded_while_updates_flow_has_its_version(made):
    policy = make_policy()
    schemes = {"policy": MemoryWeightSyncScheme()}
    options = {"frames_per_batch": 1, "weight_sync_schemes": schemes, **OPTIONS}
    collector = made(Collector, Env, make_policy(), **options)
    saved, frames = collector.state_dict(), iter(collector)
    with updates(collector, policy):
        for _ in range(300):
            collector.load_state_dict(saved)
            require_exact(next(frames))
