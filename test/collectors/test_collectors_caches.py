"""Policies that keep results of their weights, such as the keys and values of a transformer."""

import pytest
import torch
from collector_parts import Env
from marks import slow
from tensordict import TensorDict
from tensordict.nn import TensorDictModule, TensorDictSequential
from torch import nn

from collectors import Collector, MultiSyncCollector
from weight_update import MemoryWeightSyncScheme, MultiProcessWeightSyncScheme, SharedMemWeightSyncScheme


class Keeping(nn.Module):
    """A module that computes once with its weights, and again when it is told that they have changed.

    Its first output is the result, its second output the number of times that it was told.
    """

    def __init__(self):
        super().__init__()
        self.scale, self.result, self.told = nn.Parameter(torch.zeros(())), None, 0

    def forward(self, observation):
        if self.result is None:
            self.result = float(self.scale)
        return torch.tensor([self.result, self.told]) + 0 * observation

    def mark_weight_update(self):
        self.result, self.told = None, self.told + 1


def keeping(key="action"):
    return TensorDictModule(Keeping(), in_keys=["observation"], out_keys=[key])


def scale(value):
    return TensorDict({"module": {"scale": torch.tensor(value)}})


def frames(collector):
    """Return what the policy kept in each frame of the next batch, and how often it was told by then."""
    kept, told = next(collector)["action"].unbind(-1)
    return set(kept.unique().tolist()), told.unique().tolist()


@pytest.mark.parametrize(
    ("cls", "kind"),
    [
        (Collector, None),
        (Collector, MemoryWeightSyncScheme),
        (MultiSyncCollector, SharedMemWeightSyncScheme),
        slow(MultiSyncCollector, MultiProcessWeightSyncScheme),
    ],
)
def test_a_policy_is_told_of_each_update_before_its_next_call(made, cls, kind):
    schemes = None if kind is None else {"policy": kind()}
    collector = made(
        cls, Env if cls is Collector else [Env], keeping(), frames_per_batch=4, weight_sync_schemes=schemes
    )
    batches = iter(collector)
    kept, (told,) = frames(batches)
    assert kept == {0.0}
    for value in (1.0, 2.0):
        collector.update_policy_weights_(scale(value))
        told += 1
        assert frames(batches) == ({value}, [told])
        assert frames(batches) == ({value}, [told])


def test_a_policy_is_told_of_updates_of_any_of_its_parts(made):
    policy = TensorDictSequential(keeping("first"), keeping("action"))
    schemes = {f"policy.module[{number}]": MemoryWeightSyncScheme() for number in range(2)}
    collector = made(Collector, Env, policy, frames_per_batch=4, weight_sync_schemes=schemes)
    batches = iter(collector)
    next(batches)
    for model_id, key, value in zip(schemes, ("first", "action"), (1.0, 2.0), strict=True):
        collector.update_policy_weights_(scale(value), model_id=model_id)
        assert next(batches)[key][..., 0].unique().tolist() == [value]
