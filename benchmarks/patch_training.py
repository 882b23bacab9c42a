"""Updates of policies that are being trained, to measure patches on."""

from __future__ import annotations

from collections.abc import Iterator

import gymnasium
import torch
from torch import nn
from torch.nn import functional as F

from benchmarks.patch_updates import Update

__all__ = ["LanguageModel", "trained_cartpole", "trained_language_model"]

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
        """Log-probabilities [batch, length - 1] of all ``tokens`` [batch, length] but the first."""
        seen, next_ = tokens[:, :-1], tokens[:, 1:]
        logits = self.head(self.norm(self.blocks(self.tokens(seen) + self.places.weight[: seen.shape[1]])))
        return -F.cross_entropy(logits.flatten(0, 1), next_.flatten(), reduction="none").view_as(next_)


def trained_language_model(quick: bool) -> Iterator[Update]:
    """A transformer of 34 million parameters, pretrained for a moment, then trained by policy gradient.

    AdamW with float32 masters; receivers hold bfloat16. ``quick``: a hundredth of the size.
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
    """Tokens [batch, length]: each is a function of the one before, with some noise."""
    tokens = [torch.randint(vocabulary, (_BATCH,))]
    for _ in range(_LENGTH):
        tokens.append((5 * tokens[-1] + 1 + torch.randint(8, (_BATCH,))) % vocabulary)
    return torch.stack(tokens, 1)


def _copies(model: nn.Module) -> dict[str, torch.Tensor]:
    return {name: value.detach().clone() for name, value in model.named_parameters()}


def trained_cartpole() -> Iterator[Update]:
    """The policy of ``examples/train_cartpole.py``, float32, learning from one batch."""
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
    """PPO on fresh frames; returns less their mean are the advantages."""
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
    """Observations [frames, 4], actions and discounted returns [frames]."""
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
