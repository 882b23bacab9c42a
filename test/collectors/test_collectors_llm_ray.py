"""RayLLMCollector, whose actor runs an LLMCollector with our schemes."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from collector_parts import Env, fill, make_policy, policy_of_nine
from torchrl.data import LazyStackStorage
from torchrl.data.replay_buffers.ray_buffer import RayReplayBuffer

from collectors import LLMCollector
from collectors.llm import RayLLMCollector
from weight_update import (
    LifecycleError,
    RayWeightSyncScheme,
    SchemaMismatchError,
    SyncFailedError,
    SyncReport,
    WorkerError,
)
from weight_update.testing.processes import wait_until

ray = pytest.importorskip("ray", reason='Ray is not installed: pip install "weight-update[ray]"')
from ray_parts import small_cluster, update_until_error  # noqa: E402

pytestmark = pytest.mark.timeout(180)
WAIT = 60.0


@pytest.fixture(scope="module")
def cluster() -> Iterator[None]:
    """One Ray for the module, whose workers can import what tests can."""
    with small_cluster(*reversed(Path(__file__).parents[:3]), forks=True):
        yield


def make_env() -> Env:
    return Env(batch_size=(1,))


def seen(batch: Any) -> tuple[list[int], set[float]]:
    """Versions and weights that made the turns of a batch."""
    versions = batch["policy_version"].flatten().tolist()
    assert batch["next", "policy_version"].flatten().tolist() == versions
    return versions, set(batch["action"].flatten().tolist())


@pytest.fixture
def collect(made: Any, cluster: None) -> Any:
    def build(policy: Any, env: Any = make_env, **options: Any) -> RayLLMCollector:
        return made(
            RayLLMCollector, env, policy=policy, **{"dialog_turns_per_batch": 2, "num_cpus": 0.5, **options}
        )

    return build


@pytest.mark.slow  # test_collectors_llm.py has turns, and test_collectors_ray.py has actors
@pytest.mark.parametrize("sync_iter", [True, False])
def test_every_turn_has_the_weights_of_its_version(collect: Any, sync_iter: bool) -> None:
    policy = make_policy(0.0)
    collector = collect(policy, total_dialog_turns=8, sync_iter=sync_iter)
    assert isinstance(collector._weight_sync_schemes["policy"], RayWeightSyncScheme)
    assert (collector.dialog_turns_per_batch, collector.total_dialog_turns) == (2, 8)
    versions = []
    for number, batch in enumerate(collector, start=1):
        assert batch.shape == (1, 2), "the batch as LLMCollector makes it"
        found, weights = seen(batch)
        assert weights == set(map(float, found))
        versions.append(found)
        report = collector.update_policy_weights_(fill(policy, float(number)))
        assert isinstance(report, SyncReport)
        assert report.version == collector.policy_version == number
    assert len(versions) == 4
    assert versions == sorted(versions)
    if sync_iter:
        assert versions == [[0, 0], [1, 1], [2, 2], [3, 3]]
    with pytest.raises(LifecycleError, match="this collector was shut down"):
        collector.update_policy_weights_()


@pytest.mark.slow
def test_a_replay_buffer_that_the_actor_fills(collect: Any) -> None:
    buffer = RayReplayBuffer(storage=LazyStackStorage(1000), batch_size=4, remote_config={"num_cpus": 0.1})
    policy = make_policy(1.0)
    collector = collect(policy, replay_buffer=buffer)
    collector.update_policy_weights_()
    assert collector.next() is None
    assert buffer.write_count == 2
    assert not collector.is_running()
    collector.start()
    assert collector.is_running()
    wait_until(lambda: buffer.write_count > 4, WAIT)
    for value in (2.0, 3.0):
        assert collector.update_policy_weights_(fill(policy, value)).version == value
    now = buffer.write_count
    wait_until(lambda: buffer.write_count > now + 4, WAIT)
    versions, weights = seen(buffer[:])
    assert weights == set(map(float, versions))
    assert versions[0] == 1
    assert versions[-1] == 3
    collector.async_shutdown()
    assert not collector.is_running()


class Breaks(Env):
    def _step(self, tensordict: Any) -> Any:
        raise ZeroDivisionError("this environment broke")


def broken_env() -> Any:
    return Breaks(batch_size=(1,))


@pytest.mark.slow
def test_errors_reach_the_caller(collect: Any) -> None:
    collector = collect(make_policy(), env=broken_env)
    with pytest.raises(SchemaMismatchError):
        collector.update_policy_weights_(torch.nn.Linear(1, 1))
    with pytest.raises(ZeroDivisionError, match="this environment broke"):
        next(iter(collector))
    with pytest.raises(LifecycleError, match="this collector was shut down") as caught:
        collector.update_policy_weights_()
    assert "this environment broke" in str(caught.value.__cause__)


@pytest.mark.slow
def test_an_error_in_the_thread_of_start_reaches_the_caller(collect: Any) -> None:
    buffer = RayReplayBuffer(storage=LazyStackStorage(1000), batch_size=4, remote_config={"num_cpus": 0.1})
    collector = collect(make_policy(), env=broken_env, replay_buffer=buffer)
    collector.update_policy_weights_()
    collector.start()
    wait_until(lambda: not collector.is_running(), WAIT)
    with pytest.raises(LifecycleError, match="this collector was shut down") as caught:
        collector.update_policy_weights_()
    assert "this environment broke" in str(caught.value.__cause__)


@pytest.mark.slow
def test_an_actor_that_dies_is_named(collect: Any) -> None:
    collector = collect(make_policy(1.0))
    collector.update_policy_weights_()
    batches = iter(collector)
    assert seen(next(batches)) == ([1, 1], {1.0})
    ray.kill(collector.remote_collectors[0])
    with pytest.raises(SyncFailedError, match=r"worker 0: Actor\(.*killed by `ray.kill`"):
        update_until_error(collector)
    with pytest.raises(WorkerError, match=r"(?s)worker 0 is lost.*remote_config has.*`ray.kill`"):
        next(batches)


@pytest.mark.slow
def test_an_actor_that_ray_restarts_has_the_newest_weights(collect: Any) -> None:
    policy = make_policy(1.0)
    collector = collect(policy, remote_config={"max_restarts": -1})
    collector.update_policy_weights_()
    batches = iter(collector)
    assert seen(next(batches)) == ([1, 1], {1.0})
    ray.kill(collector.remote_collectors[0], no_restart=False)
    wait_until(lambda: collector._weight_sync_schemes["policy"].worker_versions[0] is None, WAIT)
    assert seen(next(batches)) == ([1, 1], {1.0})
    assert collector.update_policy_weights_(fill(policy, 2.0)).version == 2
    assert seen(next(batches)) == ([2, 2], {2.0})


@pytest.mark.slow
def test_a_policy_that_the_actor_makes(collect: Any) -> None:
    collector = collect(None, policy_factory=policy_of_nine, num_cpus=None)  # nor other options of the actor
    assert seen(collector.next()) == ([0, 0], {9.0})
    assert collector.update_policy_weights_(make_policy(3.0)).version == 1
    assert seen(collector.next()) == ([1, 1], {3.0})


@pytest.mark.slow
def test_the_model_inside_a_wrapper_of_transformers(collect: Any) -> None:
    """By the names of the transformers model, as its trainer has them."""
    parts = pytest.importorskip("test_collectors_llm", reason="transformers is not installed")
    policy, trainer = parts.policy_of(1), parts.model_of(2)
    schemes = {"policy.model": RayWeightSyncScheme("state_dict")}
    collector = collect(policy, env=parts.env_of, weight_sync_schemes=schemes)
    batch = collector.next()
    assert parts.collected(batch) == parts.answers_of(policy.model, batch)
    assert collector.update_policy_weights_(trainer, model_id="policy.model").version == 1
    batch = collector.next()
    assert parts.collected(batch) == parts.answers_of(trainer, batch)
    assert batch["policy_version"].flatten().tolist() == [1, 1]


def test_the_signature_lists_the_options_of_llm_collector() -> None:
    class Derived(RayLLMCollector):
        pass

    theirs = {*inspect.signature(LLMCollector).parameters}
    for cls in (RayLLMCollector, Derived):
        named = {*inspect.signature(cls).parameters}
        assert theirs | {"remote_config", "sync_iter"} <= named
        assert not {"self", "options", "frames_per_batch", "collector_class"} & named
