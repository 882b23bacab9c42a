"""Sharded trainers send several models together; the leader has the workers as threads."""

from __future__ import annotations

import copy
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
import torch.distributed as dist
from marks import slow
from shard_parts import BUCKETS, Body, FailingConverter, Net, Ranks, set_failing, shard, train, whole
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

from weight_update import (
    GatherShards,
    MemoryWeightSyncScheme,
    SyncFailedError,
    WeightStrategy,
    WeightSyncScheme,
    group_schemes,
    send_together,
)
from weight_update.sender.handle import Outcomes
from weight_update.testing.models import fingerprint
from weight_update.testing.processes import eventually


@pytest.fixture(scope="module")
def two() -> Iterator[Ranks]:
    with Ranks(2) as ranks:
        ranks.all("group", [0, 1])
        yield ranks


# -- functions that run in ranks ------------------------------------------------------------------------


@dataclass
class Model:
    """One model of a rank, and of the worker that is a thread of the leader."""

    source: Any
    scheme: WeightSyncScheme
    target: Net = field(default_factory=lambda: Net(7))
    receiver: WeightSyncScheme | None = None


WAIT_STAGED = Outcomes.wait_staged
MODELS: list[Model] = []
"""The models of this rank."""


def connect_two(body: Body, options: dict[str, Any], timeout: float = 20.0) -> None:
    """Connect the schemes of two models, with one worker that has both."""
    MODELS.clear()
    for seed in range(2):
        strategy = WeightStrategy("state_dict", gather=GatherShards(body.groups[0, 1]), **options)
        scheme = MemoryWeightSyncScheme(strategy, timeout=timeout)
        MODELS.append(Model(shard(Net(seed), None), scheme))
    group_schemes(model.scheme for model in MODELS)
    with ThreadPoolExecutor() as pool:
        for model in MODELS:
            model.scheme.init_on_sender(model=model.source, num_workers=1)
            if dist.get_rank() == 0:
                model.receiver = copy.copy(model.scheme)
                model.receiver.init_on_receiver(model=model.target, worker_idx=0)
                pool.submit(model.receiver.connect)
        for model in MODELS:
            model.scheme.connect()


def send_two(body: Body) -> list[dict[int, int | None]]:
    """Send other weights of both models together; return the versions of the worker."""
    for model in MODELS:
        train(model.source, 1)
    send_together({model.scheme: None for model in MODELS})
    return [model.scheme.worker_versions for model in MODELS]


def compare_two(body: Body) -> list[bool]:
    """Return, on the leader, whether the worker has the weights of each model."""
    found = []
    for model in MODELS:
        expected, mine = fingerprint(whole(model.source)), fingerprint(model.target.state_dict())
        found.append(all(mine[name] == expected[name] for name in expected))
    return found


def send_while_one_joins(body: Body) -> dict[int, int | None]:
    """Send the first model; on the leader, a worker joins after the weights were read."""
    first = MODELS[0]
    train(first.source, 1)
    late = Model(first.source, first.scheme)
    if dist.get_rank() == 0:
        late.receiver = copy.copy(first.scheme)
        late.receiver.init_on_receiver(model=late.target, worker_idx=1)
        reader = first.scheme._process.sender._reader
        read = reader.read

        def read_and_join(*arguments: Any, **options: Any) -> Any:
            del reader.read
            found = read(*arguments, **options)
            late.receiver.connect()
            return found

        reader.read = read_and_join
    first.scheme.send()
    MODELS.append(late)
    if late.receiver is not None:
        eventually(lambda: first.scheme.worker_versions == {0: 1, 1: 1})
    return first.scheme.worker_versions


def stage_slowly(body: Body, seconds: float) -> None:
    """Have the leader wait for ``seconds``, as while weights are written to a worker by a slow link."""
    wait_staged = Outcomes.wait_staged

    def wait_longer(*args: Any) -> dict[int, Exception]:
        time.sleep(seconds)
        return wait_staged(*args)

    Outcomes.wait_staged = wait_longer  # type: ignore[method-assign]


def stage_quickly(body: Body) -> None:
    Outcomes.wait_staged = WAIT_STAGED  # type: ignore[method-assign]


def send_after_evaluation(body: Body, as_function: bool) -> bool:
    """Send a model that a forward pass alone left unsharded; return whether the worker has its weights."""
    torch.manual_seed(3)
    policy, model = nn.Linear(4, 4), nn.Linear(4, 4)
    fully_shard(policy, mp_policy=MixedPrecisionPolicy(param_dtype=torch.bfloat16))
    scheme, received = MemoryWeightSyncScheme(timeout=20.0, connect_timeout=5.0), True
    evaluate(policy)
    source: dict[str, Any] = {"weights": lambda: policy} if as_function else {"model": policy}
    with scheme, ThreadPoolExecutor() as pool:
        scheme.init_on_sender(**source, num_workers=1)
        receiver = copy.copy(scheme)
        if dist.get_rank() == 0:
            receiver.init_on_receiver(model=model, worker_idx=0)
            pool.submit(receiver.connect)
        scheme.connect()
        evaluate(policy)
        scheme.send()
        expected = whole(policy)
        if dist.get_rank() == 0:
            received = all(torch.equal(model.state_dict()[name], one) for name, one in expected.items())
            receiver.shutdown()
    return received


def send_in_step(body: Body) -> int | None:
    """Send the result of a function that all ranks have to call; return the version."""
    policy = fully_shard(nn.Linear(4, 4))

    def source() -> Any:
        dist.barrier()
        return policy

    with MemoryWeightSyncScheme(timeout=20.0) as scheme, ThreadPoolExecutor() as pool:
        scheme.init_on_sender(weights=source, num_workers=1)
        receiver = copy.copy(scheme)
        if dist.get_rank() == 0:
            receiver.init_on_receiver(model=nn.Linear(4, 4), worker_idx=0)
            pool.submit(receiver.connect)
        scheme.connect()
        return scheme.send().version


def evaluate(policy: nn.Module) -> None:
    with torch.no_grad():
        policy(torch.ones(1, 4))


def leave_second(body: Body) -> None:
    """Have the worker leave the second scheme."""
    if (receiver := MODELS[1].receiver) is not None:
        receiver.shutdown()


def end_two(body: Body) -> None:
    for model in MODELS:
        if model.receiver is not None:
            model.receiver.shutdown()
        model.scheme.shutdown()


# -- tests ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("options", [{}, {"encoding": "patch"}], ids=["dense", "patch"])
def test_a_worker_that_joins_while_weights_are_gathered_gets_them(
    two: Ranks, options: dict[str, Any]
) -> None:
    two.all("run", connect_two, options)
    assert two.all("run", send_while_one_joins)[0] == {0: 1, 1: 1}
    assert two.all("run", compare_two)[0] == [True, True, True]
    two.all("run", end_two)


@pytest.mark.parametrize(
    "options", [slow({}), {"encoding": "patch"}, BUCKETS], ids=["dense", "patch", "buckets"]
)
def test_two_models_change_together_on_all_ranks(two: Ranks, options: dict[str, Any]) -> None:
    two.all("run", connect_two, {**options, "convert": FailingConverter()})
    assert two.all("run", send_two) == [[{0: 1}, {0: 1}]] * 2
    assert two.all("run", compare_two)[0] == [True, True]
    two.all("run", set_failing, True)
    leader, follower = two.each("run", send_two)
    assert isinstance(leader, ValueError)
    assert isinstance(follower, SyncFailedError)
    assert two.all("run", compare_two)[0] == [False, False]
    two.all("run", set_failing, False)
    assert len(two.all("run", send_two)) == 2
    assert two.all("run", compare_two)[0] == [True, True]
    two.all("run", leave_second)
    errors = two.each("run", send_two)
    assert all(str(error).startswith("no model was updated on any worker") for error in errors), errors
    assert [list(error.failures) for error in errors] == [[0], [0]]
    two.all("run", end_two)


@pytest.mark.slow
def test_a_leader_that_waits_long_for_staging_is_waited_for(two: Ranks) -> None:
    two.all("run", connect_two, {}, 1.0)
    two.all("run", stage_slowly, 2.5)
    assert two.all("run", send_two) == [[{0: 1}, {0: 1}]] * 2
    two.all("run", stage_quickly)
    two.all("run", end_two)


@pytest.mark.parametrize("as_function", [False, True], ids=["model", "function"])
def test_a_model_that_a_forward_pass_left_unsharded_is_sharded(two: Ranks, as_function: bool) -> None:
    assert two.all("run", send_after_evaluation, as_function) == [True, True]


def test_a_source_may_be_a_function_with_collectives(two: Ranks) -> None:
    assert two.all("run", send_in_step) == [1, 1]
