"""Update an actor and a critic as one step: every worker switches both at the same moment, or neither.

First by hand, with ``group_schemes`` and ``send_together``; then through a collector, with
``weights_dict``. Both times, the program also sends a critic that does not fit, and no worker changes.

    python examples/multiple_models.py
"""

from __future__ import annotations

from multiprocessing.queues import Queue

import torch
import torch.multiprocessing as mp
from tensordict import TensorDictBase
from tensordict.nn import TensorDictModule
from torch import nn
from torchrl.data import Composite, Unbounded
from torchrl.envs import GymEnv, Transform, TransformedEnv

from collectors import MultiSyncCollector
from weight_update import (
    SchemaMismatchError,
    SharedMemWeightSyncScheme,
    WeightSyncScheme,
    group_schemes,
    send_together,
)

WORKERS = 2


def make_actor() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 64), nn.Tanh(), nn.Linear(64, 2))


def make_critic(inputs: int = 4) -> nn.Module:
    return nn.Sequential(nn.Linear(inputs, 64), nn.Tanh(), nn.Linear(64, 1))


def learn(step: int, *models: nn.Module) -> None:
    """Stand in for learning: each model then answers with the number of the step."""
    with torch.no_grad():
        for model in models:
            for parameter in model.parameters():
                parameter.zero_()
            model[-1].bias.fill_(step)


# -- by hand -------------------------------------------------------------------------------------------


def work(schemes: dict[str, WeightSyncScheme], index: int, orders: Queue, answers: Queue) -> None:
    torch.set_num_threads(1)
    models = {"actor": make_actor(), "critic": make_critic()}
    for name, scheme in schemes.items():
        scheme.init_on_receiver(model=models[name], worker_idx=index)
        scheme.connect()
    while orders.get() == "look":
        with schemes["actor"].hold():  # the receivers of a group share one gate: this holds both models
            found = [model(torch.ones(4))[0].item() for model in models.values()]
        answers.put((index, *found))
    for scheme in schemes.values():
        scheme.shutdown()


class Workers:
    """Worker processes that report the steps of their models."""

    def __init__(self, schemes: dict[str, WeightSyncScheme]) -> None:
        context = mp.get_context("spawn")
        self.orders, self.answers = [context.Queue() for _ in range(WORKERS)], context.Queue()
        self.processes = [
            context.Process(target=work, args=(schemes, index, orders, self.answers), daemon=True)
            for index, orders in enumerate(self.orders)
        ]
        for process in self.processes:
            process.start()

    def show(self) -> None:
        for orders in self.orders:
            orders.put("look")
        for index, actor, critic in sorted(self.answers.get(timeout=60.0) for _ in self.orders):
            print(f"  worker {index}: actor of step {actor:g}, critic of step {critic:g}")

    def stop(self) -> None:
        for orders, process in zip(self.orders, self.processes, strict=True):
            orders.put("stop")
            process.join(30.0)


def by_hand() -> None:
    print("by hand")
    actor, critic = make_actor(), make_critic()
    actors, critics = SharedMemWeightSyncScheme(), SharedMemWeightSyncScheme()
    learn(0, actor, critic)
    group_schemes([actors, critics])  # before the workers start: the schemes carry the group to them
    actors.init_on_sender(model=actor, num_workers=WORKERS)
    critics.init_on_sender(model=critic, num_workers=WORKERS)
    workers = Workers({"actor": actors, "critic": critics})
    with actors, critics:
        actors.connect()
        critics.connect()
        workers.show()

        learn(1, actor, critic)
        send_together({actors: actor, critics: critic})
        workers.show()

        learn(2, actor)
        try:
            # No worker changes its actor, because the critic does not fit.
            send_together({actors: actor, critics: make_critic(inputs=5)})
        except SchemaMismatchError as error:
            print(f"  refused: {error.problems[0]}")
        workers.show()
        workers.stop()


# -- through a collector -------------------------------------------------------------------------------


class StateValue(Transform):
    """A transform that adds the critic's value to each observation."""

    def __init__(self, critic: nn.Module) -> None:
        super().__init__(in_keys=["observation"], out_keys=["state_value"])
        self.critic = critic

    def _apply_transform(self, observation: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            return self.critic(observation)

    def _reset(self, tensordict: TensorDictBase, tensordict_reset: TensorDictBase) -> TensorDictBase:
        return self._call(tensordict_reset)

    def transform_observation_spec(self, observation_spec: Composite) -> Composite:
        observation_spec["state_value"] = Unbounded(shape=(1,))
        return observation_spec


class Choose(nn.Module):
    """The actor as a policy: the action with the larger score."""

    def __init__(self, actor: nn.Module) -> None:
        super().__init__()
        self.actor = actor

    def forward(self, observation: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        scores = self.actor(observation)
        return scores, scores.argmax(-1)


def make_env() -> TransformedEnv:
    env = GymEnv("CartPole-v1", categorical_action_encoding=True)
    return TransformedEnv(env, StateValue(make_critic()))


CRITIC = "env.transform.critic"  # path of the critic, as seen from the collector of a worker


def through_collector() -> None:
    print("through a collector")
    actor, critic = make_actor(), make_critic()
    learn(0, actor, critic)
    policy = TensorDictModule(Choose(actor), in_keys=["observation"], out_keys=["scores", "action"])
    schemes = {"policy": SharedMemWeightSyncScheme(), CRITIC: SharedMemWeightSyncScheme()}
    # The collector initializes the scheme of its policy, but not that of a model that only workers have.
    schemes[CRITIC].init_on_sender(model_id=CRITIC, model=critic, num_workers=WORKERS)
    collector = MultiSyncCollector(
        [make_env] * WORKERS, policy, frames_per_batch=20, total_frames=-1, weight_sync_schemes=schemes
    )
    try:
        batches = iter(collector)
        show(next(batches))

        learn(1, actor, critic)
        collector.update_policy_weights_(weights_dict={"policy": policy, CRITIC: critic})
        show(next(batches))

        learn(2, actor)
        try:
            collector.update_policy_weights_(weights_dict={"policy": policy, CRITIC: make_critic(inputs=5)})
        except SchemaMismatchError as error:
            print(f"  refused: {error.problems[0]}")
        show(next(batches))
    finally:
        collector.shutdown()


def show(batch: TensorDictBase) -> None:
    """Print the step that made the frames of each worker; raise if there are several."""
    for index, frames in enumerate(batch):
        (actor,) = frames["scores"].unique().tolist()
        (critic,) = frames["next", "state_value"].unique().tolist()
        (version,) = frames["policy_version"].unique().tolist()
        print(f"  worker {index}: actor of step {actor:g}, critic of step {critic:g}, version {version}")


if __name__ == "__main__":
    by_hand()
    through_collector()
