"""A trainer and two explorers, in three processes, learn CartPole with each style of synchronization.

    pip install "gymnasium>=1.0" matplotlib
    python examples/trainer_explorer.py                          # every style, as lines of text
    python examples/trainer_explorer.py --style fixed --method checkpoint --steps 40

Explorers play and put their experience into a queue; the trainer takes it out and learns (REINFORCE). A
``Synchronizer`` in the main process says when they exchange weights. The time lines show when each process
computed, with which version, and when it waited: compare them between the styles.
"""

from __future__ import annotations

import argparse
import queue
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import gymnasium
import torch
import torch.multiprocessing as mp
from torch import nn

from weight_update import ExplorerClient, Synchronizer, SyncMethod, SyncStyle, TrainerClient, TransportError

PLANS: dict[str, dict[str, Any]] = {
    "fixed": {"sync_interval": 2},
    "fixed_ahead": {"sync_interval": 2, "sync_offset": 1},
    "explorer_driven": {"sync_interval": 3},
    "trainer_driven": {"sync_interval": 2},
    "fully_async": {"sync_interval": 1, "max_staleness": 2},
}
EPISODES = 2
EXPLORERS = 2
ROOM = 3 * EXPLORERS  # an explorer may be ahead of the trainer by sync_interval + sync_offset steps
PACE = {"explorer 0": 0.02, "explorer 1": 0.06}  # seconds by which each episode takes longer
PASSES = 30


@dataclass
class Span:
    """An activity of a process from ``begin`` to ``end`` (seconds), and the version of its weights."""

    who: str
    what: str
    begin: float
    end: float
    version: int | None


@dataclass
class Recorder:
    """The spans of a process, which are sent to the main process when it ends."""

    who: str
    start: float
    spans: list[Span] = field(default_factory=list)

    @contextmanager
    def doing(self, what: str, version: int | None = None) -> Iterator[None]:
        """Record the time inside the block as a span."""
        begin = time.monotonic() - self.start
        yield
        self.spans.append(Span(self.who, what, begin, time.monotonic() - self.start, version))


def make_policy() -> nn.Module:
    """Return a policy that gives the logits of the two actions."""
    return nn.Sequential(nn.Linear(4, 64), nn.Tanh(), nn.Linear(64, 2))


def play(env: Any, policy: nn.Module, pace: float) -> tuple[Any, ...]:
    """Play one episode.

    Returns:
        arrays of observations (n, 4) float32, actions (n,) int64, and rewards to go (n,) float32. Tensors
        would go through a queue as shared memory, which costs more for so little data.
    """
    observation, _ = env.reset()
    seen, actions, over = [], [], False
    while not over:
        seen.append(torch.as_tensor(observation, dtype=torch.float32))
        with torch.no_grad():
            actions.append(torch.distributions.Categorical(logits=policy(seen[-1])).sample())
        observation, _, ended, cut, _ = env.step(int(actions[-1]))
        over = ended or cut
    time.sleep(pace)
    to_go = torch.arange(len(seen), 0, -1, dtype=torch.float32)
    return torch.stack(seen).numpy(), torch.stack(actions).numpy(), to_go.numpy()


@dataclass
class Shared:
    """Objects that all processes of a run share.

    Attributes:
        experience: queue of episodes.
        records: queue of the spans of each process, and of the mean length of the last episodes.
        ready: barrier that all processes pass together once they have joined.
        over: event for the end.
        start: time of the start, on the monotonic clock.
    """

    experience: Any
    records: Any
    ready: Any
    over: Any
    start: float


def explore(server: tuple[str, str], idx: int, shared: Shared) -> None:
    """Run an explorer: play, pass the episodes on, and synchronize."""
    torch.set_num_threads(1)
    torch.manual_seed(idx)
    env, policy = gymnasium.make("CartPole-v1"), make_policy()
    recorder = Recorder(f"explorer {idx}", shared.start)
    with ExplorerClient(server[0], policy, id=idx, token=server[1]) as client:
        explorer = client.blocking
        shared.ready.wait(100.0)
        with suppress(TransportError):  # the synchronizer may end first
            while not shared.over.is_set():
                with recorder.doing("computes", explorer.version), client.hold():
                    episodes = [play(env, policy, PACE[recorder.who]) for _ in range(EPISODES)]
                while not shared.over.is_set() and not passed_on(episodes, shared, recorder):
                    synchronize(explorer, recorder)  # with SyncMethod.NCCL, the trainer may wait for this
                explorer.step += 1
                synchronize(explorer, recorder)
    shared.records.put(recorder.spans)
    shared.experience.cancel_join_thread()  # the trainer reads no more


def passed_on(episodes: Any, shared: Shared, recorder: Recorder) -> bool:
    """Put episodes into the queue of the trainer; return whether there was room."""
    with recorder.doing("waits for room"), suppress(queue.Full):
        shared.experience.put(episodes, timeout=0.1)
        return True
    return False


def learn(policy: nn.Module, optimizer: torch.optim.Optimizer, episodes: Sequence[Any]) -> float:
    """Take one step of REINFORCE, and return the mean length of an episode."""
    seen, actions, to_go = (
        torch.cat([torch.as_tensor(part) for part in parts]) for parts in zip(*episodes, strict=True)
    )
    gain = (to_go - to_go.mean()) / (to_go.std() + 1e-6)
    log_probs = torch.distributions.Categorical(logits=policy(seen)).log_prob(actions)
    optimizer.zero_grad()
    (-(log_probs * gain).mean()).backward()
    optimizer.step()
    for _ in range(PASSES):
        policy(seen).sum().backward()  # stands for the cost of a larger model
    return len(seen) / len(episodes)


def train(server: tuple[str, str], steps: int, shared: Shared) -> None:
    """Run the trainer: take experience, learn, and synchronize, also while there is no experience."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    policy, recorder = make_policy(), Recorder("trainer", shared.start)
    optimizer = torch.optim.Adam(policy.parameters(), lr=1e-2)
    lengths: list[float] = []
    with TrainerClient(server[0], policy, token=server[1], timeout=5.0) as client:
        trainer = client.blocking
        shared.ready.wait(100.0)
        synchronize(trainer, recorder)
        episodes: list[Any] = []
        while trainer.step < steps:
            with recorder.doing("waits for experience"), suppress(queue.Empty):
                episodes += shared.experience.get(timeout=0.02)
            # A step of the trainer takes one step of each explorer, so both sides count alike.
            if len(episodes) == EXPLORERS * EPISODES:
                with recorder.doing("computes", trainer.version):
                    lengths.append(learn(policy, optimizer, episodes))
                trainer.step, episodes = trainer.step + 1, []
            synchronize(trainer, recorder)
        shared.over.set()
    shared.records.put(recorder.spans)
    shared.records.put(sum(lengths[-10:]) / len(lengths[-10:]))


def synchronize(side: Any, recorder: Recorder) -> None:
    """Synchronize if it is time."""
    if side.need_sync():
        with recorder.doing("synchronizes"):
            side.sync_weight()


def run(name: str, method: SyncMethod, steps: int, directory: str) -> tuple[list[Span], float]:
    """Run a plan; return the spans of all processes, and the mean length of the last episodes."""
    style = SyncStyle(name.removesuffix("_ahead"))
    ctx = mp.get_context("spawn")
    ready = ctx.Barrier(EXPLORERS + 1)
    shared = Shared(ctx.Queue(maxsize=ROOM), ctx.Queue(), ready, ctx.Event(), time.monotonic())
    with Synchronizer(method, style, directory=directory, **PLANS[name]) as synchronizer:
        served = synchronizer.serve()
        server = served.address, served.token
        processes = [
            ctx.Process(target=explore, args=(server, idx, shared), daemon=True) for idx in range(EXPLORERS)
        ]
        processes.append(ctx.Process(target=train, args=(server, steps, shared), daemon=True))
        for one in processes:
            one.start()
        results = [shared.records.get(timeout=120.0 + 2.0 * steps) for _ in range(len(processes) + 1)]
        for one in processes:
            one.join(10.0)
    spans = [span for part in results if isinstance(part, list) for span in part]
    return spans, next(part for part in results if isinstance(part, float))


def line(spans: Sequence[Span], who: str, begin: float, end: float, width: int = 78) -> str:
    """Return a row: the last digit of the version while computing, ``~`` while synchronizing."""
    row = [" "] * width
    for span in spans:
        if span.who == who and span.what in ("computes", "synchronizes"):
            sign = "~" if span.what == "synchronizes" else str(span.version or 0)[-1]
            first = max(0, int((span.begin - begin) / (end - begin) * width))
            last = min(width, int((span.end - begin) / (end - begin) * width) + 1)
            row[first:last] = sign * (last - first)
    return "".join(row)


def show(name: str, spans: list[Span], length: float) -> None:
    """Print the middle of the time line, and the shares of the time."""
    begin = max(min(span.begin for span in spans if span.who == who) for who in {s.who for s in spans})
    end = max(span.end for span in spans)
    middle = (begin + end) / 2
    window = (middle - min(1.0, (end - begin) / 2), middle + min(1.0, (end - begin) / 2))
    print(f"\n{name}: {window[1] - window[0]:.1f} s of {end - begin:.1f} s, last episodes {length:.0f} long")
    for who in sorted({span.who for span in spans}):
        mine = [span for span in spans if span.who == who]
        shares = {
            what: sum(max(s.end - max(s.begin, begin), 0) for s in mine if s.what == what) / (end - begin)
            for what in ("computes", "synchronizes")
        }
        text = ", ".join(f"{what} {share:4.0%}" for what, share in shares.items())
        print(f"  {who:10} |{line(spans, who, *window)}| {text}", flush=True)


def draw(runs: dict[str, list[Span]], file: Path) -> None:
    """Draw one panel for each style, one row for each process, one colour for each version."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, panels = pyplot.subplots(len(runs), 1, figsize=(12, 1.8 * len(runs)), squeeze=False)
    colours = pyplot.get_cmap("tab20").colors  # type: ignore[attr-defined]
    for (name, spans), panel in zip(runs.items(), panels[:, 0], strict=True):
        for height, who in enumerate(sorted({span.who for span in spans}, reverse=True)):
            for span in (span for span in spans if span.who == who):
                if span.what == "computes":
                    colour = colours[(span.version or 0) % len(colours)]
                elif span.what == "synchronizes":
                    colour = "black"
                else:
                    continue
                panel.broken_barh([(span.begin, span.end - span.begin)], (height, 0.8), facecolors=colour)
        panel.set_yticks([0.4, 1.4, 2.4], sorted({span.who for span in spans}, reverse=True))
        panel.set_title(f"{name}  (a colour is a version; black: synchronizing; white: waiting)", fontsize=9)
    panels[-1, 0].set_xlabel("seconds")
    figure.tight_layout()
    figure.savefig(file)
    print(f"\nthe whole time lines are in {file}", flush=True)


def main() -> None:
    """Read the options, run the styles, and show the results."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--style", choices=[*PLANS, "all"], default="all")
    parser.add_argument("--method", choices=[method.value for method in SyncMethod], default="memory")
    parser.add_argument("--steps", type=int, default=60, help="of the trainer, in each run")
    parser.add_argument("--picture", type=Path, help="write the time lines to this file (PNG, SVG, PDF)")
    options = parser.parse_args()
    if options.steps < 1:
        parser.error(f"--steps is at least 1, not {options.steps}")
    runs = {}
    for name in PLANS if options.style == "all" else [options.style]:
        with tempfile.TemporaryDirectory() as directory:
            spans, length = run(name, SyncMethod(options.method), options.steps, directory)
        show(name, spans, length)
        runs[name] = spans
    if options.picture is not None:
        draw(runs, options.picture)


if __name__ == "__main__":
    main()
