"""Calls of TorchRL's schemes and strategies that ours take as well."""

import sys
import types
from collections import OrderedDict

import pytest
import torch
import torchrl.weight_update
from tensordict import TensorDict
from torch import nn

import weight_update
from weight_update import WeightStrategy, WeightSyncScheme


class Counts(nn.Module):
    """A module with extra state, and another one inside if ``depth`` is more than 0."""

    def __init__(self, count, depth=0):
        super().__init__()
        self.linear = nn.Linear(2, 2)
        self.count, self.mean = count, torch.full((3,), float(count))
        if depth:
            self.inner = Counts(count + 1, depth - 1)

    def get_extra_state(self):
        return OrderedDict(count=torch.tensor(self.count), mean=self.mean)

    def set_extra_state(self, state):
        self.count, self.mean = int(state["count"]), state["mean"]


def theirs():
    return torchrl.weight_update.WeightStrategy(extract_as="tensordict")


@pytest.mark.parametrize(
    ("backend", "name"),
    [
        ("none", "NoWeightSyncScheme"),
        ("direct", "NoWeightSyncScheme"),
        ("shared", "SharedMemWeightSyncScheme"),
        ("thread", "SharedMemWeightSyncScheme"),
        ("process", "MultiProcessWeightSyncScheme"),
        ("multiprocessing", "MultiProcessWeightSyncScheme"),
        ("distributed", "DistributedWeightSyncScheme"),
        ("rpc", "RPCWeightSyncScheme"),
        ("ray", "RayWeightSyncScheme"),
    ],
)
def test_a_scheme_by_its_backend(backend, name):
    scheme = WeightSyncScheme.from_backend(backend, sync=False)
    assert type(scheme) is getattr(weight_update, name)
    assert scheme.sync is False
    assert type(torchrl.weight_update.WeightSyncScheme.from_backend(backend)).__name__ == name


def test_a_scheme_while_another_thread_imports_torchrl(monkeypatch):
    monkeypatch.setitem(sys.modules, "torchrl.weight_update", types.ModuleType("torchrl.weight_update"))
    weight_update.SharedMemWeightSyncScheme().init_on_receiver(model=nn.Linear(2, 2), worker_idx=0)


def test_an_unknown_backend_names_the_known_ones():
    with pytest.raises(ValueError, match="Unsupported weight-sync backend 'carrier'") as error:
        WeightSyncScheme.from_backend("carrier")
    assert all(repr(name) in str(error.value) for name in ("none", "thread", "ray"))


def test_extra_state_has_the_key_of_torchrl():
    weights = WeightStrategy("tensordict").extract_weights(Counts(3))
    assert (
        set(weights.keys())
        == set(theirs().extract_weights(Counts(3)).keys())
        == {"linear", "__extra_state__"}
    )
    assert weights["__extra_state__"]["count"] == 3


@pytest.mark.parametrize("inplace", [True, False])
def test_extra_state_comes_back_as_often_as_it_is_applied(inplace):
    strategy, target = WeightStrategy("tensordict"), Counts(0, depth=2)
    weights = strategy.extract_weights(Counts(5, depth=2))
    for _ in range(2):
        strategy.apply_weights(target, weights, inplace)
        assert (target.count, target.inner.count, target.inner.inner.count) == (5, 6, 7)
        assert target.mean.tolist() == [5.0] * 3
        target.count, target.inner.count = 0, 0
        target.mean.zero_()


def test_what_torchrl_extracted_is_read():
    target = Counts(0)
    WeightStrategy("tensordict").apply_weights(target, theirs().extract_weights(Counts(4)))
    assert (target.count, target.mean.tolist()) == (4, [4.0] * 3)


@pytest.mark.parametrize("extract", [WeightStrategy("tensordict").extract_weights, theirs().extract_weights])
def test_extra_state_enters_a_tensordict(extract):
    strategy = WeightStrategy("tensordict")
    held: TensorDict = extract(Counts(1))
    strategy.apply_weights(held, strategy.extract_weights(Counts(9)))
    target = Counts(0)
    strategy.apply_weights(target, held)
    assert (target.count, target.mean.tolist()) == (9, [9.0] * 3)
