"""GRPO on a language model whose trainer and inference engine hold it in different formats.

The trainer learns to write digits in reverse: first a little from examples, then from rewards for what it
sampled. Its model has the names and fused weights of Megatron-Core, in fp32. The engine, a process of its
own, is a Llama of Hugging Face's transformers, split and in bf16, with continuous batching. Updates are
converted on the trainer, weight by weight, and travel in chunks while the next chunk is converted. The engine
loads each chunk when it comes, between two decoding steps.

After each update, the engine samples the same tokens, with the same log probabilities, as a new model that
loaded a whole checkpoint of the trainer. A stale or torn policy would show there, or in the reward, which
rises. The program fails otherwise.

    python examples/llm_rollout.py --updates 12
"""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.multiprocessing as mp
from torch import nn
from torch.nn import functional as F

from weight_update import BucketEncoding, SharedMemWeightSyncScheme, WeightStrategy, WeightSyncScheme
from weight_update.convert import megatron_to_hf, split_qkv
from weight_update.engines import Answer, TransformersEngine

LAYERS, HEADS, GROUPS, WIDTH, HIDDEN = 2, 4, 2, 64, 128
DIGITS, EQUALS, BEGIN, TOKENS = 5, 10, 11, 12
TIMEOUT = 60.0
Sampled = tuple[list[int], list[float]]


# -- the trainer's model: Megatron's names, fused ------------------------------------------------------


def rms_norm(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    return F.rms_norm(x, weight.shape, weight, eps=1e-6)


def rotate(x: torch.Tensor) -> torch.Tensor:
    """Apply a rotary embedding to ``(batch, heads, time, size)``."""
    half = x.shape[-1] // 2
    angles = torch.arange(x.shape[2])[:, None] * 1e4 ** (-torch.arange(half) / half)
    a, b = x.chunk(2, dim=-1)
    return torch.cat([a * angles.cos() - b * angles.sin(), b * angles.cos() + a * angles.sin()], -1)


def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    """Compute causal attention with grouped queries; ``(batch, time, heads * size)`` in and out."""
    q, k, v = (part.unflatten(-1, (-1, WIDTH // HEADS)).transpose(1, 2) for part in (q, k, v))
    many = [part.repeat_interleave(HEADS // GROUPS, dim=1) for part in (rotate(k), v)]
    out = F.scaled_dot_product_attention(rotate(q), *many, is_causal=True)
    return out.transpose(1, 2).flatten(2)


class NormLinear(nn.Linear):
    """A linear layer with the norm before it, as Transformer Engine has it."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__(inputs, outputs, bias=False)
        self.layer_norm_weight = nn.Parameter(torch.ones(inputs))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(rms_norm(x, self.layer_norm_weight))


class FusedLayer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        size = WIDTH // HEADS
        self.self_attention = nn.ModuleDict(
            {
                "linear_qkv": NormLinear(WIDTH, (HEADS + 2 * GROUPS) * size),
                "linear_proj": nn.Linear(WIDTH, WIDTH, bias=False),
            }
        )
        self.mlp = nn.ModuleDict(
            {"linear_fc1": NormLinear(WIDTH, 2 * HIDDEN), "linear_fc2": nn.Linear(HIDDEN, WIDTH, bias=False)}
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        fused = self.self_attention["linear_qkv"](x)
        q, k, v = (part.movedim(0, -1) for part in split_qkv(fused.movedim(-1, 0), HEADS, GROUPS))
        x = x + self.self_attention["linear_proj"](attend(q, k, v))
        gate, up = self.mlp["linear_fc1"](x).chunk(2, dim=-1)
        return x + self.mlp["linear_fc2"](F.silu(gate) * up)


class Fused(nn.Module):
    """The names below Megatron-Core's ``GPTModel``."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.ModuleDict({"word_embeddings": nn.Embedding(TOKENS, WIDTH)})
        self.decoder = nn.ModuleDict(
            {
                "layers": nn.ModuleList(FusedLayer() for _ in range(LAYERS)),
                "final_layernorm": nn.RMSNorm(WIDTH),
            }
        )
        self.output_layer = nn.Linear(WIDTH, TOKENS, bias=False)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embedding["word_embeddings"](tokens)
        for layer in self.decoder["layers"]:
            x = layer(x)
        return self.output_layer(rms_norm(x, self.decoder["final_layernorm"].weight))


def problems(count: int, generator: torch.Generator) -> torch.Tensor:
    """Return rows of BEGIN, digits, EQUALS, the digits in reverse."""
    digits = torch.randint(0, 10, (count, DIGITS), generator=generator)
    begin, equals = (torch.full((count, 1), token) for token in (BEGIN, EQUALS))
    return torch.cat([begin, digits, equals, digits.flip(1)], dim=1)


def imitate(model: nn.Module, optimizer: torch.optim.Optimizer, steps: int, chance: torch.Generator) -> None:
    """Take some steps of supervised learning."""
    for _ in range(steps):
        rows = problems(64, chance)
        scores = model(rows[:, :-1])[:, DIGITS + 1 :]
        loss = F.cross_entropy(scores.flatten(0, 1), rows[:, DIGITS + 2 :].flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()


# -- the engine: Hugging Face's names, split -----------------------------------------------------------


def new_llama() -> Any:
    """Return a model with the sizes of the trainer's, in bf16; its weights are to come."""
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=TOKENS,
        hidden_size=WIDTH,
        intermediate_size=HIDDEN,
        num_hidden_layers=LAYERS,
        num_attention_heads=HEADS,
        num_key_value_heads=GROUPS,
        max_position_embeddings=32,
        rms_norm_eps=1e-6,
        tie_word_embeddings=False,
        attn_implementation="sdpa",
    )
    return LlamaForCausalLM(config).to(torch.bfloat16)


def settings() -> dict[str, Any]:
    """Return how to sample; a small cache, because transformers would take most of the memory."""
    from transformers import ContinuousBatchingConfig, GenerationConfig

    return {
        "generation_config": GenerationConfig(
            max_new_tokens=DIGITS, do_sample=True, top_k=0, eos_token_id=-1, pad_token_id=0
        ),
        "continuous_batching_config": ContinuousBatchingConfig(
            page_size=8, num_blocks=1024, max_batch_tokens=1024, return_logprobs=True
        ),
    }


def sample_alone(ask: Callable[[list[int]], Sampled], prompts: list[list[int]]) -> list[Sampled]:
    """Answer one prompt at a time, from a fixed seed: rounding depends on what is computed together."""
    torch.manual_seed(0)
    return [ask(prompt) for prompt in prompts]


def sample_after_reload(checkpoint: Path, prompts: list[list[int]]) -> list[Sampled]:
    """Answer as a new model does that loads all weights from a file, by transformers alone."""
    fresh = new_llama()
    fresh.load_state_dict(torch.load(checkpoint))

    def ask(prompt: list[int]) -> Sampled:
        manager.add_request(prompt)
        while not (result := manager.get_result(timeout=TIMEOUT)).is_finished():
            pass
        return result.generated_tokens, result.logprobs

    with fresh.continuous_batching_context_manager(**settings()) as manager:
        return sample_alone(ask, prompts)


def serve(scheme: WeightSyncScheme, pipe: Connection) -> None:
    """Run the engine's process: answer prompts while updates come in the background."""
    torch.set_num_threads(1)  # the model is small
    engine = TransformersEngine(new_llama(), **settings(), loads_in_chunks=True)

    def ask(prompt: list[int]) -> Sampled:
        (answer,) = engine.generate([prompt])
        return answer.tokens, answer.logprobs

    with engine, scheme:
        scheme.init_on_receiver(model=engine, worker_idx=0)
        scheme.connect()
        while (question := pipe.recv()) is not None:
            prompts, checkpoint = question
            if checkpoint is None:
                pipe.send(engine.generate(prompts))
            else:
                pipe.send((sample_alone(ask, prompts), sample_after_reload(checkpoint, prompts)))


# -- the trainer ---------------------------------------------------------------------------------------


class Rollout:
    """The trainer's end of the engine's process."""

    def __init__(self, pipe: Connection, directory: Path) -> None:
        self.pipe, self.checkpoint = pipe, directory / "whole.pt"

    def sample(self, prompts: list[list[int]]) -> list[Answer]:
        """Return sampled answers with their versions."""
        return self._ask(prompts, None)

    def check(self, weights: dict[str, torch.Tensor], prompts: list[list[int]]) -> None:
        """Fail unless the engine answers as after a full reload of ``weights``."""
        torch.save(weights, self.checkpoint)
        mine, reloaded = self._ask(prompts, self.checkpoint)
        assert mine == reloaded, "the engine's tokens or log probabilities are not those of a full reload"

    def _ask(self, prompts: list[list[int]], checkpoint: Path | None) -> Any:
        self.pipe.send((prompts, checkpoint))
        if not self.pipe.poll(TIMEOUT):
            raise TimeoutError("the engine does not answer")
        return self.pipe.recv()


class Batch(NamedTuple):
    """Answers to several prompts, of each a group that lies together.

    ``rows`` are prompts and answers, one row each; ``logprobs`` are the engine's, of the answers' tokens;
    ``rewards`` are the fractions of right digits.
    """

    rows: torch.Tensor
    logprobs: torch.Tensor
    rewards: torch.Tensor


def collect(rollout: Rollout, version: int, count: int, group: int, chance: torch.Generator) -> Batch:
    """Have the engine answer ``count`` problems ``group`` times each, all by one version."""
    right = problems(count, chance).repeat_interleave(group, dim=0)
    prompts = right[:, : DIGITS + 2]
    answers = rollout.sample(prompts.tolist())
    assert all(answer.versions == [version] * DIGITS for answer in answers), "an old or a mixed version"
    written = torch.tensor([answer.tokens for answer in answers])
    rewards = (written == right[:, DIGITS + 2 :]).float().mean(1)
    logprobs = torch.tensor([answer.logprobs for answer in answers])
    return Batch(torch.cat([prompts, written], 1), logprobs, rewards)


def logprobs_of(model: nn.Module, rows: torch.Tensor) -> torch.Tensor:
    """Return the log probability of each token of an answer."""
    scores = model(rows[:, :-1])[:, DIGITS + 1 :].log_softmax(-1)
    return scores.gather(-1, rows[:, DIGITS + 2 :, None]).squeeze(-1)


def reinforce(
    model: nn.Module, optimizer: torch.optim.Optimizer, batch: Batch, group: int, steps: int
) -> None:
    """Take some steps of GRPO: advantages within a group, clipped ratios to what the engine computed."""
    rewards = batch.rewards.unflatten(0, (-1, group))
    advantages = (rewards - rewards.mean(1, keepdim=True)) / (rewards.std(1, keepdim=True) + 1e-3)
    advantages = advantages.flatten()[:, None]
    for _ in range(steps):
        ratio = (logprobs_of(model, batch.rows) - batch.logprobs).exp()
        loss = -torch.minimum(ratio * advantages, ratio.clamp(0.8, 1.2) * advantages).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--updates", type=int, default=12)
    parser.add_argument("--examples", type=int, default=45, help="steps of learning from examples, before")
    parser.add_argument("--problems", type=int, default=32, help="of each update")
    parser.add_argument("--group", type=int, default=8, help="answers to each problem")
    parser.add_argument("--steps", type=int, default=4, help="of GRPO for each update")
    parser.add_argument("--bucket", type=int, default=32 << 10, help="bytes of a chunk")
    args = parser.parse_args()
    if args.updates < 2:
        parser.error("--updates is at least 2: the reward of the last ones is compared with the first")
    if args.group < 2:
        parser.error("--group is at least 2: GRPO compares the answers to one problem")

    torch.manual_seed(0)
    torch.set_num_threads(1)  # the model is small
    chance = torch.Generator().manual_seed(0)
    model = Fused()
    imitate(model, torch.optim.AdamW(model.parameters(), lr=3e-3), args.examples, chance)
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
    convert = megatron_to_hf(HEADS, GROUPS)
    encoding = BucketEncoding(bucket_size=args.bucket)
    scheme = SharedMemWeightSyncScheme(
        WeightStrategy("state_dict", encoding=encoding, convert=convert, max_in_flight=2),
        connect_timeout=TIMEOUT,  # the engine imports transformers meanwhile
    )
    scheme.init_on_sender(model=model, num_workers=1)
    context = mp.get_context("spawn")
    pipe, theirs = context.Pipe()
    process = context.Process(target=serve, args=(scheme, theirs), daemon=True)
    process.start()
    theirs.close()

    rewards: list[float] = []
    with scheme, tempfile.TemporaryDirectory() as directory:
        scheme.connect()
        rollout = Rollout(pipe, Path(directory))
        for _ in range(args.updates):
            batch = collect(rollout, scheme.version, args.problems, args.group, chance)
            with torch.no_grad():
                apart = (logprobs_of(model, batch.rows) - batch.logprobs).abs().mean().item()
            rewards.append(batch.rewards.mean().item())
            reinforce(model, optimizer, batch, args.group, args.steps)
            report = scheme.send()
            weights = dict(convert(iter(model.state_dict().items())))
            rollout.check(weights, batch.rows[:: args.group, : DIGITS + 2].tolist()[:10])
            print(
                f"version {report.version}: reward before {rewards[-1]:.3f}, log probabilities within "
                f"{apart:.4f} of the trainer's; {report.wire_bytes / 1e3:.0f} kB in "
                f"{1e3 * sum(report.seconds.values()):.1f} ms; tokens as after a full reload",
                flush=True,
            )
            assert apart < 0.05, "the engine did not sample from the trainer's policy"
        pipe.send(None)
        process.join(TIMEOUT)
    first, last = rewards[0], sum(rewards[-3:]) / len(rewards[-3:])
    assert last > first + 0.1, f"the reward did not rise: {first:.3f}, then {last:.3f}"
    print(f"the reward rose from {first:.3f} to {last:.3f}")


if __name__ == "__main__":
    main()
