"""Train a policy on CartPole-v1 with PPO, in several worker processes.

Worker processes collect frames with copies of the actor; this process learns from them, and after each
batch, ``update_policy_weights_()`` updates every worker. At the end, a table shows the cost of
synchronization, and ``out/train_cartpole.png`` shows return and synchronization time.

    python examples/train_cartpole.py --scheme multiprocess --strategy state_dict --seed 1

The exit status is 0 if the task was solved: a mean return over 450 in the last 20 episodes.
"""

from __future__ import annotations

import argparse
import math
import statistics
import sys
import time
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path

import torch
from tensordict import TensorDictBase
from tensordict.nn import TensorDictModule
from torch import nn
from torchrl.envs import GymEnv, RewardSum, TransformedEnv
from torchrl.modules import MLP, ProbabilisticActor, ValueOperator
from torchrl.objectives import ClipPPOLoss
from torchrl.objectives.value import GAE
from tqdm import tqdm

from collectors import MultiSyncCollector
from weight_update import MultiProcessWeightSyncScheme, SharedMemWeightSyncScheme, SyncReport

SCHEMES = {"shared_mem": SharedMemWeightSyncScheme, "multiprocess": MultiProcessWeightSyncScheme}

SOLVED_RETURN = 450.0
EPISODES = 20  # the mean return is taken over this many of the latest episodes
FRAMES_PER_WORKER = 256  # in each batch
SMOKE_BATCHES = 6
EPOCHS = 10
MINIBATCH = 128


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--scheme", choices=SCHEMES, default="shared_mem")
    parser.add_argument("--strategy", choices=["tensordict", "state_dict"], default="tensordict")
    parser.add_argument("--frames", type=int, default=300_000, help="give up after this many (%(default)s)")
    parser.add_argument("--workers", type=int, default=3, help="worker processes (%(default)s)")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, default=Path("out"), help="directory of the plot (%(default)s)")
    parser.add_argument("--smoke", action="store_true", help="six batches only; getting through is success")
    args = parser.parse_args()
    if min(args.workers, args.frames) < 1:
        parser.error("--workers and --frames are at least 1")
    return args


# -- the task ------------------------------------------------------------------------------------------


def make_env() -> TransformedEnv:
    return TransformedEnv(GymEnv("CartPole-v1", categorical_action_encoding=True), RewardSum())


def make_network(outputs: int) -> MLP:
    return MLP(in_features=4, out_features=outputs, num_cells=[64, 64], activation_class=nn.Tanh)


def make_actor() -> ProbabilisticActor:
    return ProbabilisticActor(
        TensorDictModule(make_network(2), in_keys=["observation"], out_keys=["logits"]),
        in_keys=["logits"],
        distribution_class=torch.distributions.Categorical,
        return_log_prob=True,
    )


class Learner:
    """PPO with the actor that workers copy, and a critic that never leaves this process."""

    def __init__(self) -> None:
        self.actor = make_actor()
        critic = ValueOperator(make_network(1), in_keys=["observation"])
        self.advantage = GAE(gamma=0.99, lmbda=0.95, value_network=critic, average_gae=True)
        self.loss = ClipPPOLoss(self.actor, critic, clip_epsilon=0.2, entropy_coeff=0.01)
        self.optimizer = torch.optim.Adam(self.loss.parameters(), lr=1e-3, eps=1e-5)

    def learn(self, batch: TensorDictBase) -> None:
        """Improve actor and critic on a batch of shape [workers, frames]."""
        with torch.no_grad():
            self.advantage(batch)
        frames = batch.reshape(-1)
        for _ in range(EPOCHS):
            for chosen in torch.randperm(len(frames)).split(MINIBATCH):
                self.step(frames[chosen])

    def step(self, minibatch: TensorDictBase) -> None:
        losses = self.loss(minibatch)
        self.optimizer.zero_grad()
        (losses["loss_objective"] + losses["loss_critic"] + losses["loss_entropy"]).backward()
        nn.utils.clip_grad_norm_(self.loss.parameters(), 0.5)
        self.optimizer.step()


# -- history and report --------------------------------------------------------------------------------


@dataclass
class History:
    """Episodes and updates; ``*_at`` hold the number of frames at which each happened."""

    frames: int = 0
    stale_frames: int = 0
    seconds: float = 0.0
    returns: list[float] = field(default_factory=list)
    returns_at: list[int] = field(default_factory=list)
    means: list[float] = field(default_factory=list)
    reports: list[SyncReport] = field(default_factory=list)
    reports_at: list[int] = field(default_factory=list)

    def add_batch(self, batch: TensorDictBase, newest: int) -> None:
        """Count frames and finished episodes; ``newest`` is the version the workers should have used."""
        finished = batch["next", "episode_reward"][batch["next", "done"]].tolist()
        self.frames += batch.numel()
        self.stale_frames += int((batch["policy_version"] != newest).sum())
        self.returns += finished
        self.returns_at += [self.frames] * len(finished)

    def add_report(self, report: SyncReport) -> None:
        self.reports.append(report)
        self.reports_at.append(self.frames)
        self.means.append(self.mean_return)

    @property
    def mean_return(self) -> float:
        """Mean return of the latest episodes; 0 before the first one ended."""
        return statistics.fmean(self.returns[-EPISODES:] or [0.0])

    @property
    def solved(self) -> bool:
        return len(self.returns) >= EPISODES and self.mean_return > SOLVED_RETURN


def milliseconds(label: str, seconds: Iterable[float]) -> str:
    values = [1e3 * value for value in seconds]
    return f"  {label:<22} {statistics.median(values):>9.2f} {max(values):>9.2f}"


def cost_table(history: History) -> str:
    """Return the cost of synchronization, as text."""
    reports = history.reports
    spent = sum(report.total_seconds for report in reports)
    bytes_sent = sum(report.wire_bytes for report in reports)
    stages = list(dict.fromkeys(stage for report in reports for stage in report.seconds))
    lines = [
        f"  {'updates':<22} {len(reports):>9}",
        f"  {'kB an update':<22} {bytes_sent / len(reports) / 1e3:>9.1f}",
        f"  {'share of wall time':<22} {spent / history.seconds:>9.2%}",
        f"  {'stale frames':<22} {history.stale_frames:>9} of {history.frames:,}",
        "",
        f"  {'milliseconds':<22} {'median':>9} {'max':>9}",
        *(milliseconds(stage, (r.seconds.get(stage, 0.0) for r in reports)) for stage in stages),
        milliseconds("an update in all", (r.total_seconds for r in reports)),
        milliseconds("stall of a worker", (s for r in reports for s in r.stall_seconds.values())),
    ]
    return "\n".join(lines)


def plot(history: History, title: str, path: Path) -> None:
    """Plot return and synchronization time over frames."""
    import matplotlib as mpl  # here, because workers import this file too

    mpl.use("Agg")
    import matplotlib.pyplot as plt

    figure, (above, below) = plt.subplots(2, 1, figsize=(9, 6), sharex=True, layout="constrained")
    figure.suptitle(title)
    above.scatter(history.returns_at, history.returns, s=10, alpha=0.3, linewidths=0, label="episode")
    above.plot(history.reports_at, history.means, linewidth=2, label=f"mean of the last {EPISODES}")
    above.axhline(SOLVED_RETURN, color="black", linestyle=":", linewidth=1, label="solved")
    above.set(ylabel="return", ylim=(0, 515))
    totals = [1e3 * report.total_seconds for report in history.reports]
    stalls = [1e3 * max(report.stall_seconds.values()) for report in history.reports]
    below.plot(history.reports_at, totals, color="tab:red", label="update, until all workers have applied it")
    below.plot(history.reports_at, stalls, color="tab:green", label="longest stall of a worker")
    below.set(xlabel="frames", ylabel="milliseconds", yscale="log")
    below.yaxis.set_major_formatter("{x:g}")
    below.xaxis.set_major_formatter("{x:,.0f}")
    for axes, place in ((above, "lower right"), (below, "center right")):
        axes.grid(alpha=0.3)
        axes.legend(loc=place, fontsize="small")
        axes.spines[["top", "right"]].set_visible(False)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=120)
    plt.close(figure)


# -- the run -------------------------------------------------------------------------------------------


def train(args: argparse.Namespace) -> History:
    """Collect, learn, update the workers, until solved or out of frames."""
    batch_frames = args.workers * FRAMES_PER_WORKER
    batches = SMOKE_BATCHES if args.smoke else math.ceil(args.frames / batch_frames)
    learner = Learner()
    collector = MultiSyncCollector(
        [make_env] * args.workers,
        learner.actor,
        frames_per_batch=batch_frames,
        total_frames=batches * batch_frames,
        weight_sync_schemes={"policy": SCHEMES[args.scheme](strategy=args.strategy)},
    )
    try:
        collector.set_seed(args.seed)
        with tqdm(total=batches * batch_frames, unit=" frames") as bar:
            return follow(collector, learner, bar)
    finally:
        collector.shutdown()  # and the scheme with it


def follow(collector: MultiSyncCollector, learner: Learner, bar: tqdm) -> History:
    history, start = History(), time.perf_counter()
    newest = 0  # the version that the workers begin with
    for batch in collector:
        history.add_batch(batch, newest)
        learner.learn(batch)
        report = collector.update_policy_weights_()
        newest = report.version
        history.add_report(report)
        bar.update(batch.numel())
        bar.set_postfix(
            {
                "return": f"{history.mean_return:.0f}",
                "version": report.version,
                "sync ms": f"{1e3 * report.total_seconds:.1f}",
            }
        )
        if history.solved:
            break
    history.seconds = time.perf_counter() - start
    return history


def main() -> int:
    args = parse_args()
    torch.set_num_threads(1)  # the cores belong to the workers; these networks are too small to share
    torch.manual_seed(args.seed)
    history = train(args)
    verdict = "solved" if history.solved else "not solved"
    print(
        f"\nCartPole-v1 {verdict}: mean return {history.mean_return:.1f} after {history.frames:,} frames "
        f"in {history.seconds:.1f} s"
    )
    print(f"\nSynchronizing {args.workers} workers ({args.scheme}, {args.strategy})\n")
    print(cost_table(history))
    path = args.out / "train_cartpole.png"
    plot(history, f"CartPole-v1, {args.workers} workers, {args.scheme}, {args.strategy}", path)
    print(f"\nplot: {path}")
    return 0 if history.solved or args.smoke else 1


if __name__ == "__main__":
    sys.exit(main())
