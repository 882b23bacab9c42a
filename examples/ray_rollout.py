"""Ray actors play CartPole, the driver trains, and one actor is killed on the way.

    pip install "weight-update[ray]" "gymnasium>=1.0"
    python examples/ray_rollout.py

Actors take each update between two forward passes, while they play. An update calls no method of theirs. Ray
restarts the killed actor, which joins with the newest version, while the other one plays on.
On a cluster, run it with ``--address auto``, and pass the address of the driver's node as ``--listen``,
or ``--data object_store`` if actors cannot reach that node.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from dataclasses import dataclass

import gymnasium
import ray
import torch
from torch import nn

from weight_update import RayWeightSyncScheme, SyncFailedError


def make_policy() -> nn.Module:
    """Return a policy that gives the logits of the two actions."""
    return nn.Sequential(nn.Linear(4, 64), nn.Tanh(), nn.Linear(64, 2))


@dataclass
class Episode:
    """The observations, actions and rewards of one actor, and the versions of the policy that it used."""

    observations: torch.Tensor
    actions: torch.Tensor
    rewards: torch.Tensor
    versions: set[int]


@ray.remote(num_cpus=0.5, max_restarts=-1)
class Player:
    """One environment and a policy that the scheme keeps current."""

    def __init__(self, scheme: RayWeightSyncScheme, idx: int) -> None:
        torch.set_num_threads(1)
        torch.manual_seed(idx)
        self.env, self.policy, self.scheme = gymnasium.make("CartPole-v1"), make_policy(), scheme
        scheme.init_on_receiver(model=self.policy, worker_idx=idx)
        scheme.connect()  # also when Ray starts this actor again: the policy then has the newest weights

    def play(self, episodes: int) -> list[Episode]:
        """Play some episodes, each to its end."""
        return [self._play() for _ in range(episodes)]

    def _play(self) -> Episode:
        observation, _ = self.env.reset()
        seen, done_actions, rewards, versions = [], [], [], set()
        over = False
        while not over:
            state = torch.as_tensor(observation, dtype=torch.float32)
            with self.scheme.hold(), torch.no_grad():  # so that the version is that of these weights
                versions.add(self.scheme.version)
                action = torch.distributions.Categorical(logits=self.policy(state)).sample()
            observation, reward, ended, cut, _ = self.env.step(int(action))
            seen.append(state)
            done_actions.append(action)
            rewards.append(float(reward))
            over = ended or cut
        return Episode(torch.stack(seen), torch.stack(done_actions), torch.tensor(rewards), versions)


def learn(policy: nn.Module, optimizer: torch.optim.Optimizer, episodes: list[Episode]) -> float:
    """Take one step of REINFORCE, and return the mean return of an episode."""
    to_go = [episode.rewards.flip(0).cumsum(0).flip(0) for episode in episodes]
    gain = torch.cat(to_go)
    gain = (gain - gain.mean()) / (gain.std() + 1e-6)
    logits = policy(torch.cat([episode.observations for episode in episodes]))
    log_probs = torch.distributions.Categorical(logits=logits).log_prob(
        torch.cat([episode.actions for episode in episodes])
    )
    optimizer.zero_grad()
    (-(log_probs * gain).mean()).backward()
    optimizer.step()
    return sum(float(episode.rewards.sum()) for episode in episodes) / len(episodes)


def send(scheme: RayWeightSyncScheme) -> str:
    """Update all players; return the time that it took, or the players that did not get it, as text."""
    try:
        report = scheme.send()
    except SyncFailedError as error:
        lost = ", ".join(f"player {idx}" for idx in error.failures)
        return f"{lost} is gone, the others have version {scheme.version}"
    return f"synchronized in {1e3 * sum(report.seconds.values()):.1f} ms"


def wait_until(condition: Callable[[], bool], seconds: float = 60.0) -> None:
    """Wait until ``condition()`` is true, at most ``seconds``."""
    deadline = time.monotonic() + seconds
    while not condition() and time.monotonic() < deadline:
        time.sleep(0.05)


def train(options: argparse.Namespace) -> None:
    """Play, learn, send."""
    policy = make_policy()
    optimizer = torch.optim.Adam(policy.parameters(), lr=1e-2)
    scheme = RayWeightSyncScheme(data=options.data, address=options.listen)
    players = [Player.remote(scheme, idx) for idx in range(options.players)]
    with scheme:
        scheme.init_on_sender(model=policy, remote_collectors=players)
        scheme.connect()  # waits for all players
        for update in range(1, options.updates + 1):
            here = [idx for idx, version in scheme.worker_versions.items() if version is not None]
            played = ray.get([players[idx].play.remote(options.episodes) for idx in here])
            episodes = [episode for one in played for episode in one]
            versions = sorted(set().union(*(episode.versions for episode in episodes)))
            mean = learn(policy, optimizer, episodes)
            if update == options.kill_at and options.players > 1:
                print(f"killing player 1 of {options.players}", flush=True)
                ray.kill(players[1], no_restart=False)
                wait_until(lambda: scheme.worker_versions[1] is None)
            sent = send(scheme)
            print(
                f"update {update:3d}: players {here}, versions {versions}, return {mean:6.1f}, {sent}",
                flush=True,
            )
        wait_until(lambda: None not in scheme.worker_versions.values())  # it may still be starting
        print(f"at the end players have {scheme.worker_versions}", flush=True)


def main() -> None:
    """Read the options and train."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--updates", type=int, default=30)
    parser.add_argument("--players", type=int, default=2)
    parser.add_argument("--episodes", type=int, default=4, help="of each player for one update")
    parser.add_argument("--kill-at", type=int, default=10, help="update at which player 1, if any, is killed")
    parser.add_argument("--data", choices=["torch", "object_store"], default="torch")
    parser.add_argument("--listen", default="127.0.0.1", help="address of the driver's network interface")
    parser.add_argument("--address", help="of a Ray cluster; by default one is started here")
    options = parser.parse_args()
    torch.manual_seed(0)
    if options.address:
        ray.init(address=options.address)
    else:
        ray.init(num_cpus=options.players, include_dashboard=False, log_to_driver=False)
    start = time.perf_counter()
    train(options)
    print(f"{options.updates} updates in {time.perf_counter() - start:.1f} s")
    ray.shutdown()


if __name__ == "__main__":
    main()
