import pytest
import torch
from background import repeating
from collector_parts import OPTIONS, Env, fill, require_exact, see_versions
from marks import slow
from tensordict import TensorDict
from tensordict.nn import TensorDictModule
from torch import nn

from collectors import Collector, MultiAsyncCollector, MultiSyncCollector
from weight_update import (
    MultiProcessWeightSyncScheme,
    NoWeightSyncScheme,
    SchemaMismatchError,
    SharedMemWeightSyncScheme,
    WeightStrategy,
)

ACTOR, CRITIC = "policy.module.actor", "policy.module.critic"


class Part(nn.Module):
    def __init__(self, size=40):
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(size))


class Pair(nn.Module):
    """Its output tells what both parts hold."""

    def __init__(self):
        super().__init__()
        self.actor, self.critic = Part(), Part()

    def forward(self, observation):
        return torch.stack([self.actor.weight.mean(), self.critic.weight.mean()]) + 0 * observation


def pair():
    return TensorDictModule(Pair(), in_keys=["observation"], out_keys=["action"])


def part_of(value, size=40):
    return TensorDict({"weight": torch.full((size,), float(value))})


def both(value):
    return {ACTOR: part_of(value), CRITIC: part_of(value)}


@pytest.mark.parametrize("scheme", [SharedMemWeightSyncScheme, slow(MultiProcessWeightSyncScheme)])
@pytest.mark.parametrize("cls", [MultiSyncCollector, MultiAsyncCollector])
def test_a_pair_is_never_mixed(cls, scheme):
    collector = cls(
        [Env] * 2,
        pair(),
        frames_per_batch=40,
        total_frames=-1,
        weight_sync_schemes={ACTOR: scheme(), CRITIC: scheme()},
        **OPTIONS,
    )
    sent = []

    def update():
        reports = collector.update_policy_weights_(weights_dict=both(len(sent) + 1))
        sent.append({key: report.version for key, report in reports.items()})

    try:
        frames = iter(collector)
        next(frames)
        with repeating(update):
            see_versions(frames, require_exact)
    finally:
        collector.shutdown()
    assert sent == [{ACTOR: number, CRITIC: number} for number in range(1, len(sent) + 1)]


@pytest.mark.parametrize("bad", [ACTOR, CRITIC])
def test_one_bad_model_changes_nothing_anywhere(bad, made):
    collector = made(
        MultiSyncCollector,
        [Env] * 2,
        pair(),
        weight_sync_schemes={ACTOR: SharedMemWeightSyncScheme(), CRITIC: SharedMemWeightSyncScheme()},
    )
    frames = iter(collector)
    collector.update_policy_weights_(weights_dict=both(1))
    with pytest.raises(SchemaMismatchError, match="weight"):
        collector.update_policy_weights_(weights_dict={**both(2), bad: part_of(2, size=39)})
    with pytest.raises(KeyError, match="other"):
        collector.update_policy_weights_(weights_dict={**both(2), "other": part_of(2)})
    assert next(frames)["action"].unique().tolist() == [1.0]
    collector.update_policy_weights_(weights_dict=both(3))
    assert next(frames)["action"].unique().tolist() == [3.0]
    collector.update_policy_weights_(part_of(4), model_id=CRITIC)
    assert next(frames)["action"].unique().tolist() == [3.0, 4.0]


class Scored(Pair):
    """A second output, which the environment does not know."""

    def forward(self, observation):
        action = super().forward(observation)
        return action, action.sum(-1, keepdim=True)


@pytest.mark.parametrize(
    "schemes",
    [
        lambda: {ACTOR: SharedMemWeightSyncScheme()},
        lambda: {ACTOR: SharedMemWeightSyncScheme(), CRITIC: SharedMemWeightSyncScheme()},
        lambda: {ACTOR: SharedMemWeightSyncScheme(), "policy": NoWeightSyncScheme()},
    ],
    ids=["one part", "both parts", "no scheme for the whole"],
)
def test_a_policy_without_a_scheme_of_its_own(schemes, made):
    """Batches have every output of the policy, and parts without a scheme keep their first weights."""
    policy = TensorDictModule(Scored(), in_keys=["observation"], out_keys=["action", "score"])
    fill(policy, 5.0)
    collector = made(MultiSyncCollector, [Env] * 2, policy, weight_sync_schemes=schemes())
    fill(policy, 6.0)  # an optimizer step: no worker sees it
    frames = iter(collector)
    data = next(frames)
    assert data["action"].unique().tolist() == [5.0]
    assert data["score"].unique().tolist() == [10.0]
    report = collector.update_policy_weights_(part_of(1), model_id=ACTOR)
    data = next(frames)
    assert data["action"].unique().tolist() == [1.0, 5.0]
    assert data["score"].unique().tolist() == [6.0]
    assert data["policy_version"].unique().tolist() == [report.version]


class Refuses(nn.Module):
    """Takes any extra state but the number 13."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(4))
        self.number = 0

    def get_extra_state(self):
        return self.number

    def set_extra_state(self, state):
        if state == 13:
            raise ValueError("not that number")
        self.number = state


class Superstitious(nn.Module):
    def __init__(self):
        super().__init__()
        self.actor, self.critic = Part(4), Refuses()

    forward = Pair.forward


def test_a_worker_that_cannot_apply_one_model_applies_none(made):
    policy = TensorDictModule(Superstitious(), in_keys=["observation"], out_keys=["action"])
    strategy = WeightStrategy("state_dict")
    collector = made(
        MultiSyncCollector,
        [Env] * 2,
        policy,
        weight_sync_schemes={
            ACTOR: SharedMemWeightSyncScheme(strategy),
            CRITIC: SharedMemWeightSyncScheme(strategy),
        },
    )
    frames = iter(collector)
    fill(policy, 1.0)
    policy.module.critic.number = 13
    with pytest.raises(RuntimeError, match="not that number"):
        collector.update_policy_weights_(weights_dict={ACTOR: None, CRITIC: None})
    assert next(frames)["action"].unique().tolist() == [0.0]
    policy.module.critic.number = 14
    collector.update_policy_weights_(weights_dict={ACTOR: None, CRITIC: None})
    assert next(frames)["action"].unique().tolist() == [1.0]


@pytest.mark.parametrize("scheme", [None, SharedMemWeightSyncScheme])
def test_in_one_process(scheme, made):
    schemes = None if scheme is None else {ACTOR: scheme(), CRITIC: scheme()}
    collector = made(Collector, Env, pair(), weight_sync_schemes=schemes)
    frames = iter(collector)
    reports = collector.update_policy_weights_(weights_dict=both(1))
    assert {key: report.version for key, report in reports.items()} == {ACTOR: 1, CRITIC: 1}
    with pytest.raises(SchemaMismatchError):
        collector.update_policy_weights_(weights_dict={**both(2), CRITIC: part_of(2, size=39)})
    data = next(frames)
    assert data["action"].unique().tolist() == [1.0]
    assert data["policy_version"].unique().tolist() == [1]


class WithCritic(Collector):
    """A collector with a model beside the policy."""

    critic = nn.Linear(1, 1)

    def get_model(self, model_id):
        return self.critic if model_id == "critic_net" else super().get_model(model_id)


def test_a_subclass_may_know_further_models(made):
    schemes = {"critic_net": SharedMemWeightSyncScheme()}
    collector = made(
        WithCritic, Env, pair(), frames_per_batch=8, total_frames=-1, weight_sync_schemes=schemes, **OPTIONS
    )
    assert collector.update_policy_weights_(model_id="critic_net").version == 1


def test_one_process_with_a_scheme_for_a_part_runs_a_copy_of_the_policy(made):
    policy, schemes = pair(), {ACTOR: SharedMemWeightSyncScheme()}
    collector = made(Collector, Env, policy, weight_sync_schemes=schemes)
    frames = iter(collector)
    fill(policy, 1.0)
    assert next(frames)["action"].unique().tolist() == [0.0]
    collector.update_policy_weights_(model_id=ACTOR)
    assert next(frames)["action"][0].tolist() == [1.0, 0.0]
