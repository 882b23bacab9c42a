"""Updates, random or of policies in training, and schemes that send them in turns."""

from __future__ import annotations

import contextlib
import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, TypeVar

import numpy as np
import torch
import torch.multiprocessing as mp
from torch import nn
from torch.nn import functional as F

from benchmarks.processes import HERE, Place, Process, close_all
from benchmarks.report import Figure, Table, show_ratio
from weight_update import SyncReport, WeightSyncScheme
from weight_update.wire.memory import digest
from weight_update.wire.schema import WeightSchema

Weights = dict[str, torch.Tensor]

Move = Literal["mostly 1 ulp", "1..4 ulp", "random bits"]
MOVES: tuple[Move, ...] = ("mostly 1 ulp", "1..4 ulp", "random bits")

_LARGE_MEGABYTES = 50  # from here on matrices are as wide as those of a model of a billion parameters


@dataclass(frozen=True, eq=False)
class Update:
    """One step of a model from one version to the next.

    Attributes:
        name: description of the step.
        old: tensors of the receivers by name, in their dtypes.
        new: tensors of the trainer afterwards, perhaps in wider dtypes.
    """

    name: str
    old: Weights
    new: Weights

    @property
    def schema(self) -> WeightSchema:
        """The layout in the receivers' dtypes."""
        return WeightSchema.of(self.old)

    def flat(self, weights: Weights) -> torch.Tensor:
        """Return the flat buffer of a receiver that has ``weights``."""
        flat = torch.zeros(self.schema.nbytes, dtype=torch.uint8)
        torch._foreach_copy_(self.schema.views(flat), list(weights.values()))
        return flat


def layered(megabytes: float) -> Weights:
    """Return bfloat16 weights with the shapes of at least one transformer layer; deviation 0.02."""
    width = 2048 if megabytes >= _LARGE_MEGABYTES else 256
    shapes = {
        "qkv": (3 * width, width),
        "out": (width, width),
        "up": (4 * width, width),
        "down": (width, 4 * width),
        "norm": (width,),
    }
    layer = 2 * sum(math.prod(shape) for shape in shapes.values())
    random = torch.Generator().manual_seed(0)
    return {
        f"{index}.{name}": torch.randn(shape, generator=random).mul_(0.02).to(torch.bfloat16)
        for index in range(max(1, round(megabytes * 1e6 / layer)))
        for name, shape in shapes.items()
    }


def by_chance(old: Weights, fraction: float, move: Move) -> Update:
    """Return an update in which each element changes with probability ``fraction``."""
    new = {name: value.clone() for name, value in old.items()}
    change(new, fraction, move, np.random.default_rng(0))
    return Update(f"{fraction:.2%}, {move}", old, new)


def change(weights: Weights, fraction: float, move: Move, random: np.random.Generator) -> None:
    """Change elements of bfloat16 ``weights``, each with probability ``fraction``, in place.

    They move by 1 to 4 steps between neighbouring numbers, up or down, or get other bits. Of 10 elements that
    move by "mostly 1 ulp", 9 move by 1 step and the others by 2 to 8, about as AdamW moves weights.
    """
    for value in weights.values():
        bits = value.view(torch.uint16).numpy().reshape(-1)
        places = _places(bits.size, fraction, random)
        if move == "random bits":
            bits[places] ^= random.integers(1, 1 << 16, places.size, np.uint16)
        else:
            steps = random.integers(1, 5, places.size)
            if move == "mostly 1 ulp":
                steps = np.where(random.random(places.size) < 0.9, 1, random.integers(2, 9, places.size))
            steps *= random.choice([-1, 1], places.size)
            bits[places] += steps.astype(np.uint16)  # modulo 2**16


def _places(size: int, fraction: float, random: np.random.Generator) -> np.ndarray:
    """Draw ascending positions below ``size``, each with probability ``fraction``."""
    expected = size * fraction
    gaps = random.geometric(fraction, int(expected + 6 * math.sqrt(expected)) + 10)
    places = np.cumsum(gaps) - 1
    return places[places < size]


def obvious(
    old: Sequence[torch.Tensor], new: Sequence[torch.Tensor]
) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Return positions and values that differ, found the obvious way; nothing is narrowed or packed."""
    found = []
    for before, after in zip(old, new, strict=True):
        places = (before != after).nonzero()
        found.append((places, after[tuple(places.T)]))
    return found


_BATCH, _LENGTH = 4, 32  # sequences of a batch, tokens of a sequence
_FRAMES, _EPOCHS, _MINIBATCH = 256, 10, 128  # of PPO on CartPole, as in examples/train_cartpole.py
_DISCOUNT, _CLIP = 0.99, 0.2


class _Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.heads = width // 32
        self.before_attention, self.before_mlp = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        batch, length, width = x.shape
        qkv = self.qkv(self.before_attention(x)).view(batch, length, 3, self.heads, -1)
        seen = F.scaled_dot_product_attention(*qkv.permute(2, 0, 3, 1, 4), is_causal=True)
        x = x + self.out(seen.transpose(1, 2).reshape(batch, length, width))
        return x + self.down(F.gelu(self.up(self.before_mlp(x))))


class LanguageModel(nn.Module):
    """A decoder-only transformer, float32."""

    def __init__(self, width: int, layers: int, vocabulary: int) -> None:
        super().__init__()
        self.tokens = nn.Embedding(vocabulary, width)
        self.places = nn.Embedding(_LENGTH, width)
        self.blocks = nn.Sequential(*(_Block(width) for _ in range(layers)))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, vocabulary, bias=False)
        for parameter in self.parameters():
            if parameter.dim() == 2:
                nn.init.normal_(parameter, std=0.02)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """Return log-probabilities [batch, length - 1] of all ``tokens`` [batch, length] but the first."""
        seen, next_ = tokens[:, :-1], tokens[:, 1:]
        logits = self.head(self.norm(self.blocks(self.tokens(seen) + self.places.weight[: seen.shape[1]])))
        return -F.cross_entropy(logits.flatten(0, 1), next_.flatten(), reduction="none").view_as(next_)


def trained_language_model(quick: bool) -> Iterator[Update]:
    """Yield updates of a transformer that is pretrained briefly, then trained by policy gradient.

    It has 34 million parameters, or a hundredth of that if ``quick``. The optimizer is AdamW with float32
    masters; receivers hold bfloat16.
    """
    torch.manual_seed(0)
    vocabulary = 256 if quick else 8192
    model = LanguageModel(64, 2, vocabulary) if quick else LanguageModel(512, 8, vocabulary)
    _train(model, vocabulary, torch.optim.AdamW(model.parameters(), lr=3e-4), 10, reinforce=False)
    for rate, steps in ((1e-6, (1,)), (3e-6, (1, 8))):
        optimizer = torch.optim.AdamW(model.parameters(), lr=rate)
        _train(model, vocabulary, optimizer, 4, reinforce=True)  # Adam's very first steps are larger
        for count in steps:
            old = {name: value.detach().to(torch.bfloat16) for name, value in model.named_parameters()}
            _train(model, vocabulary, optimizer, count, reinforce=True)
            plural = "s" * (count > 1)
            yield Update(f"transformer, {rate:g}, {count} step{plural}", old, _copies(model))


def _train(
    model: LanguageModel, vocabulary: int, optimizer: torch.optim.Optimizer, steps: int, *, reinforce: bool
) -> None:
    for _ in range(steps):
        scores = model(_text(vocabulary))
        advantages = torch.randn(_BATCH, 1) if reinforce else torch.ones(1)
        optimizer.zero_grad()
        (-advantages * scores).mean().backward()
        optimizer.step()


def _text(vocabulary: int) -> torch.Tensor:
    """Return tokens [batch, length]; each is a function of the one before, with some noise."""
    tokens = [torch.randint(vocabulary, (_BATCH,))]
    for _ in range(_LENGTH):
        tokens.append((5 * tokens[-1] + 1 + torch.randint(8, (_BATCH,))) % vocabulary)
    return torch.stack(tokens, 1)


def _copies(model: nn.Module) -> Weights:
    return {name: value.detach().clone() for name, value in model.named_parameters()}


def trained_cartpole() -> Iterator[Update]:
    """Yield float32 updates of the policy of ``examples/train_cartpole.py``, which learns from one batch."""
    torch.manual_seed(0)
    policy = nn.Sequential(nn.Linear(4, 64), nn.Tanh(), nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 2))
    optimizer = torch.optim.Adam(policy.parameters(), lr=3e-4)
    batch_steps = _EPOCHS * _FRAMES // _MINIBATCH
    _learn(policy, optimizer, batch_steps)
    for steps in (1, batch_steps):
        old = _copies(policy)
        _learn(policy, optimizer, steps)
        yield Update(f"CartPole, 0.0003, {steps} step{'s' * (steps > 1)}", old, _copies(policy))


def _learn(policy: nn.Module, optimizer: torch.optim.Optimizer, steps: int) -> None:
    """Train by PPO on fresh frames; the advantages are normalized returns."""
    seen, actions, returns = _collect(policy)
    advantages = (returns - returns.mean()) / returns.std()
    with torch.no_grad():
        before = _scores(policy, seen, actions)
    for _ in range(steps):
        chosen = torch.randperm(_FRAMES)[:_MINIBATCH]
        ratio = (_scores(policy, seen[chosen], actions[chosen]) - before[chosen]).exp()
        gains = ratio * advantages[chosen], ratio.clamp(1 - _CLIP, 1 + _CLIP) * advantages[chosen]
        optimizer.zero_grad()
        (-torch.minimum(*gains).mean()).backward()
        optimizer.step()


def _scores(policy: nn.Module, seen: torch.Tensor, actions: torch.Tensor) -> torch.Tensor:
    return policy(seen).log_softmax(-1).gather(1, actions[:, None])[:, 0]


@torch.no_grad()
def _collect(policy: nn.Module) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return observations [frames, 4], actions and discounted returns [frames]."""
    import gymnasium  # benchmarks gpu runs without it

    env = gymnasium.make("CartPole-v1")
    seen, actions, lasts = [], [], []
    observation, _ = env.reset(seed=0)
    for _ in range(_FRAMES):
        seen.append(torch.from_numpy(observation))
        actions.append(torch.distributions.Categorical(logits=policy(seen[-1])).sample())
        observation, _, terminated, truncated, _ = env.step(int(actions[-1]))
        lasts.append(terminated or truncated)
        if lasts[-1]:
            observation, _ = env.reset()
    env.close()
    returns, following = torch.zeros(_FRAMES), 0.0
    for frame in reversed(range(_FRAMES)):
        following = 1.0 + _DISCOUNT * following * (not lasts[frame])
        returns[frame] = following
    return torch.stack(seen), torch.stack(actions), returns


_WARM = 2

K = TypeVar("K")
Key = tuple[str, str]
"""Scheme and encoding."""

Sent = tuple[float, SyncReport]
"""Seconds from the call of ``send()`` to its return, and the report."""


def measure_schemes(
    schemes: Mapping[K, WeightSyncScheme],
    live: Weights,
    advance: Callable[[int], None],
    turns: int,
    places: Sequence[Place] = (HERE,),
    device: str = "cpu",
) -> dict[K, list[Sent]]:
    """Let every scheme send ``live`` to a receiver at each place, in turns.

    Args:
        schemes: not initialized yet.
        live: the trainer's weights.
        advance: changes ``live`` in place before turn ``n``.
        turns: number of turns that are kept.
        places: places of the receivers' processes.
        device: device of the trainer's and the receivers' weights.

    Raises:
        RuntimeError: a receiver ended with other weights than the trainer.
        Failed: the receivers' process died.
    """
    found: dict[K, list[Sent]] = {key: [] for key in schemes}
    with connected(list(schemes.values()), live, places, device) as receivers:
        for turn in range(_WARM + turns):
            advance(turn)
            for key, scheme in schemes.items():
                if device.startswith("cuda"):
                    torch.cuda.synchronize(device)
                start = time.perf_counter()
                report = scheme.send(weights=live)  # returns when the worker has applied it
                found[key].append((time.perf_counter() - start, report))
        require_same(receivers, live, list(found))
    return {key: sent[_WARM:] for key, sent in found.items()}


@contextlib.contextmanager
def connected(
    schemes: Sequence[WeightSyncScheme],
    weights: Weights,
    places: Sequence[Place] = (HERE,),
    device: str = "cpu",
) -> Iterator[list[Process]]:
    """Start a process at each place that receives by every scheme, and yield the processes."""
    context, devices = mp.get_context("spawn"), [torch.device(device)] * len(places)
    for scheme in schemes:
        scheme.init_on_sender(weights=weights, devices=devices, num_workers=len(places), ctx=context)
    shapes = {name: tuple(value.shape) for name, value in weights.items()}
    processes = [
        Process(_Receivers, schemes, shapes, device, idx, place=place) for idx, place in enumerate(places)
    ]
    try:
        for scheme in schemes:
            scheme.connect()
        for process in processes:
            process.answer()
        yield processes
    finally:
        close_all(processes)  # they say goodbye while the senders are still there
        for scheme in schemes:
            scheme.shutdown()


class _Receivers:
    """The receivers of one place, one for each scheme."""

    def __init__(
        self, schemes: Sequence[WeightSyncScheme], shapes: dict[str, tuple[int, ...]], device: str, idx: int
    ) -> None:
        if device == "cpu":
            torch.set_num_threads(1)
        self._schemes = schemes
        self._models = [_empty_model(shapes).to(device) for _ in schemes]
        for scheme, model in zip(schemes, self._models, strict=True):
            scheme.init_on_receiver(model=model, worker_idx=idx)
            scheme.connect()

    def digests(self) -> list[dict[str, str]]:
        """Return the digests of the weights that came by each scheme."""
        return [_digests(model.state_dict()) for model in self._models]

    def close(self) -> None:
        for scheme in self._schemes:
            scheme.shutdown()


def _empty_model(shapes: dict[str, tuple[int, ...]]) -> nn.Module:
    """Return a module with bfloat16 parameters of these names, each of which has one dot."""
    layers: dict[str, nn.ParameterDict] = {}
    for name, shape in shapes.items():
        layer, _, leaf = name.partition(".")
        value = nn.Parameter(torch.zeros(shape, dtype=torch.bfloat16), requires_grad=False)
        layers.setdefault(layer, nn.ParameterDict())[leaf] = value
    return nn.ModuleDict(layers)


def _digests(weights: Weights) -> dict[str, str]:
    return {name: digest(value.cpu()) for name, value in weights.items()}


def require_same(receivers: Sequence[Process], weights: Weights, labels: Sequence[object]) -> None:
    """Raise RuntimeError unless every receiver has the trainer's weights; ``labels`` name the schemes."""
    for process in receivers:
        process.send("digests")
    expected = _digests(weights)
    for process in receivers:
        for label, found in zip(labels, process.answer(), strict=True):
            if found != expected:
                raise RuntimeError(f"{label}: the receiver has other weights than the trainer")


def stages(sent: Sequence[Sent]) -> tuple[Figure, Figure, Figure, Figure]:
    """Return the seconds of ``send()``, and of its encoding, acknowledgement and stall."""
    reports = [report for _, report in sent]
    encode, ack = (Figure([r.seconds.get(name, 0.0) for r in reports]) for name in ("encode", "ack"))
    stall = Figure([report.stall_seconds[0] for report in reports])
    return Figure([seconds for seconds, _ in sent]), encode, ack, stall


def sent_table(megabytes: float, note: str, found: Mapping[Key, Sequence[Sent]]) -> Table:
    """Return a table with one row for each scheme and encoding, of which one is ``"dense"``."""
    rows = []
    for (scheme, label), sent in found.items():
        figures = stages(sent)
        nbytes = Figure((sent[-1][1].wire_bytes,)).cell(1e-6)
        of_dense = show_ratio(figures[0], stages(found[scheme, "dense"])[0], 2)
        rows.append([scheme, label, nbytes, *(figure.cell(1e3, 1) for figure in figures), of_dense])
    head = ["scheme", "encoding", "MB sent", "send()", "encode", "ack", "stall", "of dense"]
    return Table(f"send() until applied, {megabytes:.0f} MB", note, head, rows, names=(0, 1))
