"""Reinforcement learning with patches: an update sends only the weights that changed.

A small transformer learns to sort digits. The trainer has fp32 weights and AdamW at the learning rate of RL
fine-tuning. Two workers have bf16 copies, sample answers without pause and send them back with their
rewards. At such a rate, few weights move far enough in a step to become another bf16 number. Only these are
sent.

A short supervised warm-up stands for the checkpoint that RL begins with. Then one line for each update states
how much it sent. At the end, each worker compares its weights with the trainer's, bit for bit.

    python examples/patch_sync.py --encoding patch --compression zstd
"""

from __future__ import annotations

import argparse
import hashlib
import statistics
from multiprocessing.queues import Queue

import torch
import torch.multiprocessing as mp
from torch import nn
from torch.nn import functional
from tqdm import tqdm

from weight_update import Encoding, MultiProcessWeightSyncScheme, PatchEncoding, SyncReport, WeightStrategy

WORKERS = 2
DIGITS = 8  # of a prompt, and of its answer
SEPARATOR = 10
PROMPTS, TRIES = 8, 16  # of a rollout; tries at one prompt are compared with each other
WARMUP_RATE, RATE = 1e-3, 3e-6


class Sorter(nn.Module):
    """A model that gives ``[batch, time, 10]`` logits of the digit after each of ``[batch, time]`` tokens."""

    def __init__(self, width: int = 128, layers: int = 3) -> None:
        super().__init__()
        self.tokens = nn.Embedding(11, width)
        self.places = nn.Parameter(0.02 * torch.randn(2 * DIGITS, width))
        layer = nn.TransformerEncoderLayer(width, 4, 4 * width, 0.0, batch_first=True, norm_first=True)
        self.layers = nn.TransformerEncoder(layer, layers, nn.LayerNorm(width), enable_nested_tensor=False)
        self.head = nn.Linear(width, 10)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.tokens(tokens) + self.places[: tokens.shape[1]]
        mask = nn.Transformer.generate_square_subsequent_mask(tokens.shape[1], dtype=x.dtype)
        return self.head(self.layers(x, mask, is_causal=True))


def make_task(count: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return prompts ``[count, DIGITS + 1]`` and the right answers ``[count, DIGITS]``."""
    digits = torch.randint(0, 10, (count, DIGITS))
    return functional.pad(digits, (0, 1), value=SEPARATOR), digits.sort(-1).values


def log_probs(model: Sorter, tokens: torch.Tensor) -> torch.Tensor:
    """Return the log probability of each digit of the answers in ``tokens``: ``[batch, DIGITS]``."""
    logits = model(tokens[:, :-1])[:, DIGITS:].log_softmax(-1)
    return logits.gather(-1, tokens[:, DIGITS + 1 :, None]).squeeze(-1)


def work(index: int, scheme: MultiProcessWeightSyncScheme, rollouts: Queue, final: Queue) -> None:
    torch.set_num_threads(1)  # workers and trainer share the cores
    torch.manual_seed(index)
    model = Sorter().bfloat16().eval()
    with scheme:
        scheme.init_on_receiver(model=model, worker_idx=index)
        scheme.connect()
        while final.empty():
            rollouts.put(rollout(model))  # updates arrive between any two forward passes
        verdict = "the" if fingerprint(model) == final.get() else "NOT the"
        rollouts.put(f"worker {index}: version {scheme.version}, {verdict} trainer's weights in bf16")


@torch.no_grad()
def rollout(model: Sorter) -> tuple[list[list[int]], list[float]]:
    """Return prompts with sampled answers, and the share of right digits in each."""
    tokens, right = (each.repeat_interleave(TRIES, 0) for each in make_task(PROMPTS))
    for _ in range(DIGITS):
        chances = model(tokens)[:, -1].float().softmax(-1)
        tokens = torch.cat([tokens, chances.multinomial(1)], -1)
    rewards = (tokens[:, DIGITS + 1 :] == right).float().mean(-1)
    return tokens.tolist(), rewards.tolist()


def fingerprint(model: nn.Module) -> str:
    """Return a hash of all bits of the model's weights in bf16."""
    found = hashlib.sha256()
    for name, tensor in model.state_dict().items():
        found.update(name.encode() + tensor.bfloat16().contiguous().view(torch.uint8).numpy().tobytes())
    return found.hexdigest()


class Trainer:
    """REINFORCE; an answer is compared with the others to the same prompt."""

    def __init__(self) -> None:
        self.model = Sorter()
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=WARMUP_RATE)

    def warm_up(self, steps: int) -> None:
        for _ in tqdm(range(steps), desc="warm-up", disable=None):
            self.step(-log_probs(self.model, torch.cat(make_task(64), -1)).mean())
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=RATE, weight_decay=0.0)

    def learn(self, tokens: list[list[int]], rewards: list[float]) -> None:
        groups = torch.tensor(rewards).view(PROMPTS, TRIES)
        advantages = (groups - groups.mean(-1, keepdim=True)) / (groups.std(-1, keepdim=True) + 1e-3)
        self.step(-(advantages.view(-1, 1) * log_probs(self.model, torch.tensor(tokens))).mean())

    def step(self, loss: torch.Tensor) -> None:
        self.optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.optimizer.step()


def line(report: SyncReport, reward: float) -> str:
    return (
        f"version {report.version:>4}  {report.encoding:<6}  changed {report.changed_fraction:>7.2%}  "
        f"sent {report.wire_bytes / 1e3:>7.1f} kB (dense {report.dense_bytes / 1e3:.1f})  "
        f"in {1e3 * report.total_seconds:>6.1f} ms  reward {reward:.3f}"
    )


def table(reports: list[SyncReport]) -> str:
    sent, dense = sum(r.wire_bytes for r in reports), sum(r.dense_bytes for r in reports)
    rows = {
        "changed %": [100 * r.changed_fraction for r in reports],
        "kB": [r.wire_bytes / 1e3 for r in reports],
        **{f"ms {stage}": [1e3 * r.seconds[stage] for r in reports] for stage in reports[0].seconds},
        "ms in all": [1e3 * r.total_seconds for r in reports],
        "ms stall of a worker": [1e3 * s for r in reports for s in r.stall_seconds.values()],
    }
    lines = [f"{'an update':<22}{'median':>10}{'least':>10}{'most':>10}"]
    for label, found in rows.items():
        cells = statistics.median(found), min(found), max(found)
        lines.append(f"{label:<22}" + "".join(f"{cell:>10.2f}" for cell in cells))
    together = f"all {len(reports)} updates: {sent / 1e6:.2f} MB sent, dense {dense / 1e6:.2f} MB"
    return "\n".join([*lines, together])


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--encoding", choices=["dense", "bucket", "patch"], default="patch")
    parser.add_argument(
        "--compression", choices=["none", "ans", "lz4", "zstd"], default="none", help="of a patch"
    )
    parser.add_argument("--values", choices=["raw", "relative"], default="relative", help="of a patch")
    parser.add_argument("--steps", type=int, default=200, help="updates of the workers (%(default)s)")
    parser.add_argument("--warmup", type=int, default=160, help="supervised steps before (%(default)s)")
    args = parser.parse_args()
    if args.steps < 1:
        parser.error(f"--steps is at least 1, not {args.steps}")
    return args


def train(trainer: Trainer, scheme: MultiProcessWeightSyncScheme, rollouts: Queue, steps: int) -> None:
    reports, rewards = [], []
    for _ in tqdm(range(steps), unit=" updates", disable=None):  # no bar where there is no terminal
        tokens, found = rollouts.get(timeout=60.0)
        trainer.learn(tokens, found)
        reports.append(scheme.send())  # returns when both workers have it
        rewards.append(statistics.fmean(found))
        tqdm.write(line(reports[-1], rewards[-1]))
    few = max(1, steps // 5)
    first, last = statistics.fmean(rewards[:few]), statistics.fmean(rewards[-few:])
    print(f"\n{table(reports)}\nmean reward: first {few} updates {first:.3f}, last {few} {last:.3f}\n")


def main() -> None:
    args = parse_args()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    encoding: str | Encoding = args.encoding
    if encoding == "patch":
        encoding = PatchEncoding(compression=args.compression, values=args.values)
    trainer, context = Trainer(), mp.get_context("spawn")
    trainer.warm_up(args.warmup)
    rollouts, final = context.Queue(maxsize=WORKERS), context.Queue()
    with MultiProcessWeightSyncScheme(WeightStrategy("state_dict", encoding=encoding)) as scheme:
        scheme.init_on_sender(model=trainer.model, num_workers=WORKERS, ctx=context)
        common = (scheme, rollouts, final)
        workers = [context.Process(target=work, args=(i, *common), daemon=True) for i in range(WORKERS)]
        for worker in workers:
            worker.start()
        scheme.connect()
        train(trainer, scheme, rollouts, args.steps)
        for _ in workers:
            final.put(fingerprint(trainer.model))
        verdicts: list[str] = []
        while len(verdicts) < WORKERS:  # rollouts that were not used come first
            found = rollouts.get(timeout=60.0)
            verdicts += [found] if isinstance(found, str) else []
        print("\n".join(sorted(verdicts)))
        for worker in workers:
            worker.join(30.0)


if __name__ == "__main__":
    main()
