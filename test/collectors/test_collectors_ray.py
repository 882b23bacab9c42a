"""RayCollector, and TorchRL's own with our scheme."""

from __future__ import annotations

import asyncio
import collections
import contextlib
import os
import re
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torchrl.collectors.distributed as torchrl_distributed
from collector_parts import OPTIONS, Env, fill, make_policy, policy_of_nine, weights_of
from marks import slow
from tensordict import TensorDict
from tensordict.nn import TensorDictModule
from torchrl.data import Unbounded
from torchrl.envs import TransformedEnv
from torchrl.envs.transforms.module import RayModuleTransform

from collectors import Collector, MultiSyncCollector, RayCollector, RayWeightUpdater
from collectors.in_process import receive_here
from collectors.ray_learner import LearnerSender, connect_actors
from weight_update import (
    LifecycleError,
    MemoryWeightSyncScheme,
    MultiProcessWeightSyncScheme,
    NothingToSendError,
    NoWeightSyncScheme,
    PolicyLag,
    RayModuleTransformScheme,
    RayWeightSyncScheme,
    SchemaMismatchError,
    SharedMemWeightSyncScheme,
    SyncFailedError,
    SyncReport,
    SyncTimeoutError,
    WorkerError,
)
from weight_update.testing.processes import freeze, wait_until

ray = pytest.importorskip("ray", reason='Ray is not installed: pip install "weight-update[ray]"')
from ray_parts import small_cluster, update_until_error  # noqa: E402

SMALL = {"num_cpus": 0.5}
pytestmark = pytest.mark.timeout(180)


@pytest.fixture(scope="module", autouse=True)
def cluster() -> Iterator[None]:
    """One Ray for the module, whose workers can import what tests can."""
    with small_cluster(*reversed(Path(__file__).parents[:3]), forks=True):
        yield


def seen(batch: Any) -> tuple[set[int], set[float]]:
    """Versions and weights that made the frames."""
    return set(batch["policy_version"].flatten().tolist()), set(batch["action"].flatten().tolist())


def make(policy: Any, actors: int = 2, **options: Any) -> RayCollector:
    defaults = {"frames_per_batch": 10 * actors, "total_frames": 1000, "remote_configs": SMALL}
    options = {**defaults, "collector_kwargs": OPTIONS, "sync": True, **options}
    return RayCollector([Env] * actors, policy, **options)


def test_every_way_to_update() -> None:
    policy = make_policy(1.0)
    collector, told = make(policy, total_frames=-1), []
    collector.add_observer(told.append)
    scheme = collector._weight_sync_schemes["policy"]
    assert isinstance(scheme, RayWeightSyncScheme)
    assert collector.policy_version is None
    report = collector.update_policy_weights_()
    assert isinstance(report, SyncReport)
    assert (report.version, sorted(report.apply_seconds)) == (1, [0, 1])  # 0 came when it connected
    assert collector.policy_version == 1
    frames = iter(collector)
    assert seen(next(frames)) == ({1}, {1.0})
    calls: list[dict[str, Any]] = [
        {},
        {"policy_or_weights": policy},
        {"weights": policy.state_dict()},
        {"policy": policy},
        {"weights_dict": {"policy": policy}},
        {"model_id": "policy", "policy_or_weights": policy},
        {"policy_or_weights": {0: policy, 1: policy}},
    ]
    for value, call in enumerate(calls, start=2):
        fill(policy, float(value))
        report = collector.update_policy_weights_(**call)
        report = report["policy"] if isinstance(report, dict) else report
        assert report.version == value
    assert seen(next(frames)) == ({8}, {8.0})
    collector.update_policy_weights_(fill(policy, 9.0), worker_ids=1)
    assert seen(next(frames)) == ({8, 9}, {8.0, 9.0})
    wait_until(lambda: [one.mean for one in told if isinstance(one, PolicyLag)] == [0.0, 0.0, 0.5])
    assert [one.version for one in told if isinstance(one, SyncReport)] == list(range(10))
    with pytest.raises(KeyError, match="critic"):
        collector.update_policy_weights_(policy, model_id="critic")
    ray.kill(collector.remote_collectors[0])
    with pytest.raises(SyncFailedError, match=r"worker 0: Actor\(Collector, .* killed by `ray.kill`"):
        update_until_error(collector)
    assert scheme.worker_versions == {0: None, 1: collector.policy_version}
    for _ in range(2):
        collector.shutdown()
    with pytest.raises(LifecycleError, match="shut down"):
        collector.update_policy_weights_()
    with pytest.raises(LifecycleError, match="this collector was shut down"):
        next(iter(collector))


@pytest.mark.slow
@pytest.mark.parametrize("sync", [True, False])
def test_an_iteration_to_its_end_ends_the_collector(sync: bool, made: Any) -> None:
    collector = made(make, make_policy(1.0), total_frames=40, sync=sync)
    collector.update_policy_weights_()
    assert [seen(batch) for batch in collector] == [({1}, {1.0})] * 2
    with pytest.raises(LifecycleError, match="this collector was shut down"):
        collector.update_policy_weights_()


@pytest.mark.slow
def test_a_shutdown_in_a_coroutine_ends_the_schemes(made: Any) -> None:
    collector = made(make, make_policy(1.0), actors=1)
    collector.update_policy_weights_()
    scheme = collector._weight_sync_schemes["policy"]
    asyncio.run(collector.async_shutdown())
    with pytest.raises(LifecycleError, match="this collector was shut down"):
        collector.update_policy_weights_()
    with pytest.raises(LifecycleError, match="shut down"):
        scheme.send()


@pytest.mark.slow
def test_actors_that_do_not_start(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.setattr("collectors.ray.FRAMES_TIMEOUT", 1.0)
    monkeypatch.setattr("collectors.ray._WARN_SECONDS", 1.0)
    started = time.monotonic()
    with pytest.raises(
        SyncTimeoutError, match=r"actors of workers \[0, 1\] did not start in 2 s.*remote_configs"
    ):
        make(make_policy(1.0), remote_configs={"num_cpus": 100}, frames_timeout=2.0)
    assert time.monotonic() - started < 30.0
    (warning,) = [one.getMessage() for one in caplog.records if one.name == "collectors.ray"]
    assert re.match(r"the actors of workers \[0, 1\] did not start in 1 s; .* remote_configs", warning)


def broken_env() -> Any:
    raise ZeroDivisionError("no world today")


@pytest.mark.slow
def test_an_actor_that_raises_while_it_starts() -> None:
    with pytest.raises(WorkerError, match=r"(?s)worker 1 could not start: .*no world today"):
        RayCollector(
            [Env, broken_env],
            make_policy(),
            frames_per_batch=20,
            collector_kwargs=OPTIONS,
            remote_configs=SMALL,
        )


class Breaks(Env):
    def _step(self, tensordict: Any) -> Any:
        raise ZeroDivisionError("this environment broke")


@pytest.mark.parametrize("sync", [True, slow(False)])
def test_what_an_actor_raises_while_it_collects_is_raised(sync: bool, made: Any) -> None:
    collector = made(
        RayCollector,
        [Breaks],
        make_policy(),
        sync=sync,
        frames_per_batch=8,
        total_frames=-1,
        collector_kwargs=OPTIONS,
        remote_configs=SMALL,
    )
    collector.update_policy_weights_()
    with pytest.raises(ZeroDivisionError, match="this environment broke"):
        next(iter(collector))


@pytest.mark.slow
@pytest.mark.parametrize("sync", [True, False])
def test_a_dead_actor_is_named(sync: bool, made: Any) -> None:
    collector = made(make, make_policy(), sync=sync, total_frames=-1)
    collector.update_policy_weights_()
    frames = iter(collector)
    next(frames)
    ray.kill(collector.remote_collectors[1])
    with pytest.raises(WorkerError, match=r"(?s)worker 1 is lost \(.*max_restarts\).*killed by `ray.kill`"):
        collections.deque(frames, maxlen=0)


RESTARTS = {**SMALL, "max_restarts": -1}


@pytest.mark.slow
@pytest.mark.parametrize(("sync", "retries"), [(True, 0), (False, -1)])
def test_an_actor_that_ray_restarts_joins_again(sync: bool, retries: int, made: Any) -> None:
    policy = make_policy(1.0)
    configs = {**RESTARTS, "max_task_retries": retries}
    collector = made(make, policy, sync=sync, remote_configs=configs, total_frames=1_000_000)
    scheme = collector._weight_sync_schemes["policy"]
    version = collector.update_policy_weights_().version
    frames = iter(collector)
    ray.kill(collector.remote_collectors[1], no_restart=False)
    wait_until(lambda: scheme.worker_versions[1] is None, 30.0)
    deadline = time.monotonic() + 90.0
    while (joined := scheme.worker_versions[1] or 0) < 2 or joined < version:
        assert time.monotonic() < deadline
        versions, weights = seen(next(frames))
        assert min(versions) >= 1  # 0 would be the policy as constructed
        assert weights == set(map(float, versions))
        version += 1
        with contextlib.suppress(SyncFailedError):
            collector.update_policy_weights_(fill(policy, float(version)))
        time.sleep(0.1)
    report = collector.update_policy_weights_(fill(policy, version + 1.0))
    assert sorted(report.apply_seconds) == [0, 1]


@pytest.mark.slow
def test_an_actor_may_restart_during_automatic_updates(caplog: pytest.LogCaptureFixture, made: Any) -> None:
    policy = make_policy(1.0)
    collector = made(make, policy, remote_configs=RESTARTS, update_after_each_batch=True)
    collector.update_policy_weights_()
    frames = iter(collector)
    assert seen(next(frames)) == ({2}, {1.0})
    ray.kill(collector.remote_collectors[1], no_restart=False)
    fill(policy, 2.0)
    assert seen(next(frames)) == ({3}, {2.0})
    fill(policy, 3.0)
    assert seen(next(frames)) == ({4}, {3.0})
    assert "worker 1 has lost its link" in caplog.text


@pytest.mark.slow
def test_a_receiver_that_ended_in_a_living_actor(caplog: pytest.LogCaptureFixture, made: Any) -> None:
    """Its actor gets a new receiver before it collects again, so it does not keep old weights."""
    policy = make_policy(1.0)
    collector = made(make, policy, update_after_each_batch=True)
    collector.update_policy_weights_()
    frames = iter(collector)
    assert seen(next(frames)) == ({2}, {1.0})
    ended = collector.remote_collectors[1].__ray_call__.remote(end_receivers)
    ray.get(ended, timeout=30.0)
    for version in (3, 4):
        fill(policy, float(version))
        assert seen(next(frames)) == ({version}, {float(version)})
    assert "worker 1 has lost its link" in caplog.text


def add_one(collector: Any, policy: Any) -> None:
    kwargs = [{**OPTIONS, "frames_per_batch": 10}]
    collector.add_collectors(
        create_env_fn=[Env], num_envs=1, policy=policy, collector_kwargs=kwargs, remote_configs=[SMALL]
    )


@pytest.mark.slow
def test_an_actor_that_is_added_later_has_an_index_of_its_own(made: Any) -> None:
    policy = make_policy(1.0)
    collector = made(make, policy, actors=1)
    collector.update_policy_weights_()
    frames = iter(collector)
    assert seen(next(frames)) == ({1}, {1.0})
    add_one(collector, policy)
    assert collector._weight_sync_schemes["policy"].worker_versions == {0: 1, 1: 1}
    assert seen(next(frames)) == ({1}, {1.0})
    report = collector.update_policy_weights_(fill(policy, 2.0))
    assert (report.version, sorted(report.apply_seconds)) == (2, [0, 1])
    assert seen(next(frames)) == ({2}, {2.0})


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:RayCollector iteration started before weight synchronization")
@pytest.mark.parametrize("batches", [0, 1])
def test_an_actor_that_is_added_before_the_first_update(batches: int, made: Any) -> None:
    policy = make_policy(1.0)
    collector = made(make, policy, actors=1)
    add_one(collector, policy)
    frames = iter(collector)
    for _ in range(batches):
        assert seen(next(frames)) == ({0}, {1.0})
    collector.update_policy_weights_(fill(policy, 2.0))
    assert seen(next(frames)) == ({1}, {2.0})
    report = collector.update_policy_weights_(fill(policy, 3.0))
    assert sorted(report.apply_seconds) == [0, 1]


@pytest.mark.slow
def test_updates_that_fail_while_an_actor_joins_again(caplog: pytest.LogCaptureFixture, made: Any) -> None:
    """The actor joins once: it is not disconnected after its next batch because of those updates."""
    policy = make_policy(1.0)
    collector = made(make, policy, sync=False, total_frames=1_000_000)
    scheme = collector._weight_sync_schemes["policy"]
    collector.update_policy_weights_()
    frames = iter(collector)
    next(frames)
    actor = collector.remote_collectors[1]
    ray.get(actor.__ray_call__.remote(end_receivers), timeout=30.0)
    failed, deadline = 0, time.monotonic() + 60.0
    while scheme.worker_versions[1] is None or not failed:
        assert time.monotonic() < deadline
        try:
            collector.update_policy_weights_()
        except SyncFailedError:
            failed += 1
            if failed == 1:
                actor.__ray_call__.remote(lambda _: time.sleep(1.0))  # it joins after that
        next(frames)
    for _ in range(40):
        collector.update_policy_weights_()
        next(frames)
    assert failed > 1
    assert caplog.text.count("worker 1 has lost its link") == 1


def end_receivers(collector: Any) -> None:
    for scheme in collector._receiver_schemes.values():
        scheme.shutdown()


@pytest.mark.slow
def test_versions_go_on_above_that_of_a_state() -> None:
    collector = make(make_policy(1.0), actors=1, total_frames=-1)
    state = collector.state_dict()
    state[0]["policy_version"] = 6
    collector.load_state_dict(state)
    frames = iter(collector)
    with pytest.warns(UserWarning, match="before weight synchronization was initialized"):
        assert seen(next(frames)) == ({6}, {1.0})
    assert collector.update_policy_weights_(make_policy(2.0)).version == 7
    assert seen(next(frames)) == ({7}, {2.0})
    collector.load_state_dict(state)
    assert seen(next(frames)) == ({6}, {1.0})
    assert collector.update_policy_weights_(make_policy(3.0)).version == 8
    collector.shutdown()
    for call in (collector.state_dict, lambda: collector.set_seed(1), lambda: collector.map_fn("stats")):
        with pytest.raises(LifecycleError, match="this collector was shut down; make a new collector"):
            call()


@pytest.mark.slow
def test_the_legacy_updater(made: Any) -> None:
    with pytest.warns(
        DeprecationWarning, match=r"RayWeightUpdater is .*weight_update\.RayWeightSyncScheme\(\)"
    ):
        updater = RayWeightUpdater(weights_of(3.0), remote_collectors=[], max_interval=1)
    collector = made(make, make_policy(1.0), weight_updater=updater)
    assert isinstance(collector._weight_sync_schemes["policy"], RayWeightSyncScheme)
    assert updater.all_worker_ids() == [0, 1]
    assert collector.update_policy_weights_() is None  # every second one, with max_interval=1
    report = updater.push_weights()
    assert report is not None
    assert (report.version, sorted(report.apply_seconds)) == (1, [0, 1])
    frames = iter(collector)
    assert seen(next(frames)) == ({1}, {3.0})
    assert collector.update_policy_weights_(worker_ids=0) is None
    report = collector.update_policy_weights_(weights_of(4.0), worker_ids=0)
    assert isinstance(report, SyncReport)
    assert sorted(report.apply_seconds) == [0]
    assert seen(next(frames)) == ({1, 2}, {3.0, 4.0})
    assert collector.policy_version == 2


@pytest.mark.slow
def test_factories_and_the_object_store(made: Any) -> None:
    schemes = {"policy": RayWeightSyncScheme(data="object_store")}
    collector = made(make, None, 1, policy_factory=policy_of_nine, weight_sync_schemes=schemes)
    with pytest.warns(UserWarning, match="before weight synchronization"):  # TorchRL's
        batch = next(iter(collector))
    assert seen(batch) == ({0}, {9.0})
    assert collector.update_policy_weights_(make_policy(3.0)).version == 1
    assert seen(next(iter(collector))) == ({1}, {3.0})


@pytest.mark.slow
def test_torchrl_with_our_scheme(made: Any) -> None:
    """TorchRL's own collector, whose actors run our Collector."""
    policy = make_policy(1.0)
    collector = made(
        torchrl_distributed.RayCollector,
        [Env],
        policy,
        frames_per_batch=10,
        total_frames=1000,
        collector_class=Collector,
        collector_kwargs={**OPTIONS, "track_policy_version": True},
        remote_configs=SMALL,
        weight_sync_schemes={"policy": RayWeightSyncScheme()},
        sync=True,
    )
    frames = iter(collector)
    for value in (2.0, 3.0):
        fill(policy, value)
        collector.update_policy_weights_()
        assert seen(next(frames))[1] == {value}


@pytest.mark.slow  # test_collectors_together.py has schemes for parts
def test_a_scheme_for_a_part_of_the_policy(made: Any) -> None:
    part = {"policy.module": RayWeightSyncScheme(connect_timeout=30.0)}
    collector = made(make, make_policy(1.0), 1, weight_sync_schemes=part)
    other = make_policy(2.0).module
    assert collector.update_policy_weights_(other, model_id="policy.module").version == 1
    assert seen(next(iter(collector))) == ({1}, {2.0})


@pytest.mark.slow
def test_actors_with_several_processes(made: Any) -> None:
    """The update reaches the processes of each actor's own collector."""
    policy = make_policy(1.0)
    collector = made(make, policy, 1, num_workers_per_collector=2)
    assert collector.collector_class is MultiSyncCollector
    frames = iter(collector)
    for value in (2.0, 3.0):
        fill(policy, value)
        collector.update_policy_weights_()
        next(frames)
        assert seen(next(frames))[1] == {value}


@pytest.mark.slow
@pytest.mark.parametrize("sync", [True, False])
def test_waiting_for_a_stopped_actor_has_a_limit(sync: bool) -> None:
    collector = RayCollector(
        [Env] * 2,
        make_policy(),
        frames_per_batch=20,
        total_frames=1_000_000,
        sync=sync,
        remote_configs=SMALL,
        collector_kwargs=OPTIONS,
        frames_timeout=2.0,
    )
    pid = ray.get(collector.remote_collectors[1].__ray_call__.remote(lambda _: os.getpid()))
    try:
        collector.update_policy_weights_()
        frames = iter(collector)
        next(frames)
        freeze(pid)
        with pytest.raises(SyncTimeoutError, match=r"no batch of workers \[1\] came in 2 s"):
            collections.deque(frames, maxlen=0)
    finally:
        os.kill(pid, signal.SIGCONT)
        collector.shutdown(shutdown_ray=False)


@pytest.mark.slow
def test_schemes_that_know_no_actors(made: Any) -> None:
    collector = made(make, make_policy(), 1, weight_sync_schemes={"policy": SharedMemWeightSyncScheme()})
    report = collector.update_policy_weights_(weights_of(3.0))
    assert seen(next(iter(collector))) == ({report.version}, {3.0})
    with pytest.raises(LifecycleError, match="or use SharedMemWeightSyncScheme"):
        make(make_policy(), 1, weight_sync_schemes={"policy": MultiProcessWeightSyncScheme()})


def test_an_error_of_an_actor_that_connects_is_raised_at_once(made: Any) -> None:
    collector = made(make, make_policy(), 1, weight_sync_schemes={"policy": MemoryWeightSyncScheme()})
    start = time.monotonic()
    for _ in range(2):
        with pytest.raises(LifecycleError, match="in other processes need another scheme, such as Shared"):
            collector.update_policy_weights_()
    assert time.monotonic() - start < 30.0


def sleep(seconds: float) -> None:
    time.sleep(seconds)


def test_an_actor_that_does_not_end_its_call_is_named() -> None:
    call = ray.remote(num_cpus=0.5)(sleep)
    scheme = NoWeightSyncScheme()
    scheme.init_on_sender()
    scheme.connect_timeout = 5.0
    calls = [call.remote(0.0), call.remote(60.0)]
    ray.wait(calls[:1], timeout=60.0)  # Ray may take seconds to start a process
    try:
        with pytest.raises(SyncTimeoutError, match=r"actors of workers \[1\] did not connect in 5 s"):
            connect_actors([scheme], calls)
    finally:
        ray.cancel(calls[1], force=True)


def test_what_goes_wrong_in_the_constructor_leaves_nothing() -> None:
    with pytest.raises(TypeError, match="weight_update"):
        make(make_policy(), weight_sync_schemes={"policy": object()})
    scheme = RayWeightSyncScheme()
    scheme.init_on_sender(model=torch.nn.Linear(1, 1), num_workers=1)
    with pytest.raises(LifecycleError, match="initialized already"):
        make(make_policy(), 1, weight_sync_schemes={"policy": scheme})
    wait_until(lambda: ray.available_resources().get("CPU") == 4, 20.0)  # its actors are gone


def make_scorer() -> TensorDictModule:
    return TensorDictModule(torch.nn.Linear(2, 1), in_keys=["observation"], out_keys=["score"])


def make_other_scorer() -> TensorDictModule:
    return TensorDictModule(torch.nn.Linear(2, 2), in_keys=["observation"], out_keys=["score"])


def with_score(spec: Any) -> Any:
    spec["score"] = Unbounded(1)
    return spec


@pytest.mark.slow
def test_module_of_a_transform_through_a_collector() -> None:
    scheme = RayModuleTransformScheme()
    with pytest.raises(LifecycleError, match="has no transform"):
        scheme.init_on_sender()
    transform = RayModuleTransform(
        module_factory=make_scorer, observation_spec_transform=with_score, weight_sync_scheme=scheme
    )
    assert scheme.worker_versions == {0: 0}
    with pytest.raises(NothingToSendError):
        scheme.send()
    collector = Collector(
        TransformedEnv(Env(), transform),
        make_policy(),
        frames_per_batch=5,
        weight_sync_schemes={"scorer": scheme},
        **OPTIONS,
    )
    for value in (1.0, 2.0):
        report = collector.update_policy_weights_(fill(make_scorer(), value), model_id="scorer")
        assert report.version == value
        scores = collector.env.rollout(3)["next", "score"]  # TorchRL's collectors want them at reset, too
        assert scores.unique().tolist() == [value]  # observations are 0: the bias
    collector.shutdown()
    ours = RayModuleTransformScheme(model=make_other_scorer(), connect_timeout=30.0)
    with ours, pytest.raises(SchemaMismatchError, match="weight"):
        RayModuleTransform(module_factory=make_scorer, weight_sync_scheme=ours)


def publish(sender: Any, version: int, policy: Any) -> None:
    """Call ``sender`` as TorchRL's learner does."""
    sender._set_model_version(version)
    weights = TensorDict.from_module(policy).data
    if sender.synchronized_on_sender:
        sender.send(weights=weights)
    else:
        sender.connect(weights=weights)


@pytest.mark.slow
def test_a_learner_sends_the_policy(made: Any) -> None:
    policy = make_policy(1.0)
    collector = made(make, policy)
    frames = iter(collector)
    for new_generation, (first, second) in ((False, (3, 7)), (True, (7, 9))):  # learners may start again
        sender = collector._learner_weight_sync(new_generation=new_generation)
        assert collector._learner_weight_sync() is sender
        sender = ray.cloudpickle.loads(ray.cloudpickle.dumps(sender))  # it goes to another process
        sender.init_on_sender(model_id="policy", remote_collectors=sender._remote_collectors, num_workers=2)
        for version in (first, second):
            publish(sender, version, fill(policy, float(version)))
            assert seen(next(frames)) == ({version}, {float(version)})
        with pytest.raises(LifecycleError, match="the learner of the trainer sends"):
            collector.update_policy_weights_()
        sender.shutdown()
    assert seen(next(frames)) == ({9}, {9.0})


def test_a_learner_sends_before_its_first_step_again(made: Any) -> None:
    """TorchRL's does so after a restart and after a checkpoint, perhaps with version 0."""
    scheme, policy = MemoryWeightSyncScheme(), make_policy(1.0)
    receiver = made(receive_here, scheme, "policy", make_policy(), policy)
    sender = made(LearnerSender, scheme, [])
    for version, sent in ((0, 1), (0, 2), (5, 5)):
        publish(sender, version, make_policy(float(sent)))
        assert receiver.version == sent
        assert policy.module.layers[0].tolist() == [float(sent)] * 3


@pytest.mark.slow
def test_a_learner_cannot_serve_an_actor_that_ray_restarts(made: Any) -> None:
    collector = made(make, make_policy(1.0), remote_configs=RESTARTS)
    frames = iter(collector)
    sender = collector._learner_weight_sync()
    publish(sender, 3, make_policy(3.0))
    assert seen(next(frames)) == ({3}, {3.0})
    ray.kill(collector.remote_collectors[1], no_restart=False)
    with pytest.raises(WorkerError, match=r"Ray restarted the actor of worker 1.*make a new collector"):
        list(zip(range(20), frames, strict=False))  # a batch may have come before the end
    sender.shutdown()


@pytest.mark.slow
def test_a_learner_gets_the_error_of_an_actor(made: Any) -> None:
    @ray.remote(num_cpus=0)
    class Broken:
        def _connect_weights_scheme(self, model_version: int) -> None:
            raise ZeroDivisionError(f"version {model_version} does not fit")

    sender = made(LearnerSender, RayWeightSyncScheme(connect_timeout=60.0), [Broken.remote()])
    with pytest.raises(ZeroDivisionError, match="version 5 does not fit"):
        publish(sender, 5, make_policy())


@pytest.mark.slow
def test_a_collector_that_a_learner_cannot_serve() -> None:
    collector = make(make_policy(), actors=1)
    collector.update_policy_weights_()
    with pytest.raises(LifecycleError, match="sends its policy itself"):
        collector._learner_weight_sync()
    collector.shutdown()
    collector = make(make_policy(), actors=1, weight_sync_schemes={})
    with pytest.raises(TypeError, match="need a RayWeightSyncScheme"):
        collector._learner_weight_sync()
    collector.shutdown()
