"""Environment and policies of these tests; importable by workers."""

import contextlib
import multiprocessing
import time

import torch
from background import repeating
from tensordict import TensorDict
from tensordict.nn import TensorDictModule
from torch import multiprocessing as torch_multiprocessing
from torch import nn
from torchrl.data import Binary, Composite, Unbounded
from torchrl.envs import EnvBase

STEPS = 7
OPTIONS = {"auto_register_policy_transforms": False}


class TellTale(nn.Module):
    """Its output is the smallest and the largest of its weights: equal if they are of one version."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ParameterList([nn.Parameter(torch.zeros(3)) for _ in range(6)])

    def forward(self, observation):
        values = torch.stack([layer.sum() / 3 for layer in self.layers])
        ends = torch.stack([values.amin(), values.amax()])
        return ends + 0 * observation


class Env(EnvBase):
    """The observation is two zeros; an episode has ``STEPS`` steps."""

    def __init__(self, batch_size=()):
        super().__init__(batch_size=torch.Size(batch_size))
        shape = self.batch_size
        self.observation_spec = Composite(observation=Unbounded((*shape, 2)), shape=shape)
        self.action_spec = Unbounded((*shape, 2))
        self.reward_spec = Unbounded((*shape, 1))
        self.done_spec = Binary(1, (*shape, 1), dtype=torch.bool)
        self.count = 0

    def _reset(self, tensordict=None):
        self.count = 0
        return TensorDict({"observation": torch.zeros(*self.batch_size, 2)}, self.batch_size)

    def _step(self, tensordict):
        self.count += 1
        return TensorDict(
            {
                "observation": torch.zeros(*self.batch_size, 2),
                "reward": torch.ones(*self.batch_size, 1),
                "done": torch.full((*self.batch_size, 1), self.count >= STEPS),
            },
            self.batch_size,
        )

    def _set_seed(self, seed):
        pass


class Slow(Env):
    """An environment whose steps take a while."""

    def _step(self, tensordict):
        time.sleep(0.02)
        return super()._step(tensordict)


def use_forkserver():
    """Have workers of this program forked from a server that has imported everything."""
    multiprocessing.set_forkserver_preload(["torchrl.collectors", "torchrl.envs", "collectors"])
    torch_multiprocessing.set_start_method("forkserver", force=True)


def make_policy(value=0.0):
    return fill(TensorDictModule(TellTale(), in_keys=["observation"], out_keys=["action"]), value)


def policy_of_seven():
    return make_policy(7.0)


def policy_of_nine():
    return make_policy(9.0)


def fill(model, value):
    """Set all weights of ``model`` to ``value``."""
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.fill_(value)
    return model


def weights_of(value):
    """Weights for the policy, all of them ``value``."""
    return TensorDict.from_module(make_policy(value)).data


def require_exact(data):
    """Every frame was made by one version, and says which."""
    low, high = data["action"].unbind(-1)
    torch.testing.assert_close(low, high, rtol=0, atol=0)
    require_stamps(data)
    torch.testing.assert_close(data["policy_version"].float(), low, rtol=0, atol=0)


def require_stamps(data):
    stamps = data["policy_version"]
    assert stamps.dtype == torch.int64
    assert stamps.shape == data.shape
    torch.testing.assert_close(data["next", "policy_version"], stamps)


@contextlib.contextmanager
def updates(collector, policy):
    """Send version after version, as fast as they are applied; yields the list of versions sent."""
    sent = []

    def update():
        report = collector.update_policy_weights_(fill(policy, len(sent) + 1))
        assert report.version == len(sent) + 1
        sent.append(report.version)

    with repeating(update):
        yield sent


def see_versions(frames, check, enough=30):
    """Run ``check`` on batch after batch until ``enough`` different versions were seen in them."""
    seen = set()
    for _ in range(3000):
        data = next(frames)
        check(data)
        seen |= set(data["policy_version"].unique().tolist())
        if len(seen) >= enough:
            return seen
    raise AssertionError(f"only {len(seen)} versions")
