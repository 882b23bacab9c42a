"""A language model whose trainer and inference engine hold it in different formats.

The trainer learns to write digits in reverse. Its model has the names and fused weights of Megatron-Core, in
fp32; the engine, a process of its own, has those of Hugging Face's Llama, split and in bf16. Updates are
converted on the trainer, weight by weight, and travel in chunks while the next chunk is converted; the engine
loads each chunk when it comes, and generates again when the version is complete. After each update its tokens
are compared with those of an engine that loaded a whole checkpoint of the trainer.

    python examples/llm_rollout.py --updates 3
"""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Iterator, Mapping
from multiprocessing.connection import Connection
from pathlib import Path

import torch
import torch.multiprocessing as mp
from torch import nn
from torch.nn import functional as F

from weight_update import BucketEncoding, SharedMemWeightSyncScheme, WeightStrategy, WeightSyncScheme
from weight_update.convert import megatron_to_hf, split_qkv
from weight_update.engines import ExclusiveEngine

LAYERS, HEADS, GROUPS, WIDTH, HIDDEN = 2, 4, 2, 64, 128
DIGITS, EQUALS, BEGIN, TOKENS = 5, 10, 11, 12
Cache = tuple[torch.Tensor, torch.Tensor]


# -- what both formats compute -------------------------------------------------------------------------


def rms_norm(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    return F.rms_norm(x, weight.shape, weight, eps=1e-6)


def rotate(x: torch.Tensor, first: int) -> torch.Tensor:
    """Rotary embedding of ``(batch, heads, time, size)`` for positions from ``first`` on."""
    half = x.shape[-1] // 2
    frequencies = 1e4 ** (-torch.arange(half) / half)
    angles = torch.arange(first, first + x.shape[2])[:, None] * frequencies
    a, b = x.float().chunk(2, dim=-1)
    return torch.cat([a * angles.cos() - b * angles.sin(), b * angles.cos() + a * angles.sin()], -1).to(x)


def attend(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, cache: Cache | None
) -> tuple[torch.Tensor, Cache]:
    """Causal attention with grouped queries; ``(batch, time, heads * size)`` in and out."""
    q, k, v = (part.unflatten(-1, (-1, WIDTH // HEADS)).transpose(1, 2) for part in (q, k, v))
    first = 0 if cache is None else cache[0].shape[2]
    q, k = rotate(q, first), rotate(k, first)
    if cache is not None:
        k, v = torch.cat([cache[0], k], dim=2), torch.cat([cache[1], v], dim=2)
    many = [part.repeat_interleave(HEADS // GROUPS, dim=1) for part in (k, v)]
    out = F.scaled_dot_product_attention(q, *many, is_causal=cache is None)
    return out.transpose(1, 2).flatten(2), (k, v)


# -- the trainer's model: Megatron's names, fused ------------------------------------------------------


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
        x = x + self.self_attention["linear_proj"](attend(q, k, v, None)[0])
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
    """Rows of BEGIN, digits, EQUALS, the digits in reverse."""
    digits = torch.randint(0, 10, (count, DIGITS), generator=generator)
    begin, equals = (torch.full((count, 1), token) for token in (BEGIN, EQUALS))
    return torch.cat([begin, digits, equals, digits.flip(1)], dim=1)


def train(model: nn.Module, optimizer: torch.optim.Optimizer, steps: int, chance: torch.Generator) -> float:
    """Some steps of supervised learning; the last loss of an answer's token."""
    for _ in range(steps):
        rows = problems(64, chance)
        scores = model(rows[:, :-1])[:, DIGITS + 1 :]
        loss = F.cross_entropy(scores.flatten(0, 1), rows[:, DIGITS + 2 :].flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return loss.item()


# -- the engine's model: Hugging Face's names, split ---------------------------------------------------


def linears(**sizes: tuple[int, int]) -> nn.ModuleDict:
    return nn.ModuleDict({name: nn.Linear(*size, bias=False) for name, size in sizes.items()})


class SplitLayer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        narrow = (WIDTH, GROUPS * WIDTH // HEADS)
        self.self_attn = linears(q_proj=(WIDTH, WIDTH), k_proj=narrow, v_proj=narrow, o_proj=(WIDTH, WIDTH))
        self.mlp = linears(gate_proj=(WIDTH, HIDDEN), up_proj=(WIDTH, HIDDEN), down_proj=(HIDDEN, WIDTH))
        self.input_layernorm, self.post_attention_layernorm = nn.RMSNorm(WIDTH), nn.RMSNorm(WIDTH)

    def forward(self, x: torch.Tensor, cache: Cache | None) -> tuple[torch.Tensor, Cache]:
        y = rms_norm(x, self.input_layernorm.weight)
        out, cache = attend(*(self.self_attn[f"{part}_proj"](y) for part in "qkv"), cache)
        x = x + self.self_attn["o_proj"](out)
        y = rms_norm(x, self.post_attention_layernorm.weight)
        return x + self.mlp["down_proj"](F.silu(self.mlp["gate_proj"](y)) * self.mlp["up_proj"](y)), cache


class Split(nn.Module):
    """The names of ``LlamaForCausalLM``."""

    def __init__(self) -> None:
        super().__init__()
        layers = nn.ModuleList(SplitLayer() for _ in range(LAYERS))
        self.model = nn.ModuleDict(
            {"embed_tokens": nn.Embedding(TOKENS, WIDTH), "layers": layers, "norm": nn.RMSNorm(WIDTH)}
        )
        self.lm_head = nn.Linear(WIDTH, TOKENS, bias=False)

    def forward(
        self, tokens: torch.Tensor, caches: list[Cache | None]
    ) -> tuple[torch.Tensor, list[Cache | None]]:
        """Scores of the token after the last, and what attention is to remember."""
        x, after = self.model["embed_tokens"](tokens), []
        for layer, cache in zip(self.model["layers"], caches, strict=True):
            x, cache = layer(x, cache)
            after.append(cache)
        return self.lm_head(rms_norm(x[:, -1], self.model["norm"].weight)), after


class Engine(ExclusiveEngine):
    """Generates with one version of the weights: a generation ends before an update begins."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__(loads_in_chunks=True)
        self.model = model
        self.loads = 0

    def expected_weights(self) -> Mapping[str, torch.Tensor]:
        return self.model.state_dict()

    def load_weights(self, weights: Iterator[tuple[str, torch.Tensor]]) -> None:
        mine = self.model.state_dict()
        for name, tensor in weights:
            mine[name].copy_(tensor)
        self.loads += 1

    def generate(self, prompts: torch.Tensor, temperature: float) -> torch.Tensor:
        """``DIGITS`` tokens after each prompt; the most likely ones if ``temperature`` is 0."""
        with self.generating():
            return generate(self.model, prompts, temperature)


@torch.no_grad()
def generate(model: nn.Module, prompts: torch.Tensor, temperature: float) -> torch.Tensor:
    chance = torch.Generator().manual_seed(0)
    caches: list[Cache | None] = [None] * LAYERS
    tokens, answer = prompts, []
    for _ in range(DIGITS):
        scores, caches = model(tokens, caches)
        if temperature:
            likely = (scores.float() / temperature).softmax(-1)
            tokens = torch.multinomial(likely, 1, generator=chance)
        else:
            tokens = scores.argmax(-1, keepdim=True)
        answer.append(tokens)
    return torch.cat(answer, dim=1)


def serve(scheme: WeightSyncScheme, pipe: Connection) -> None:
    """The engine's process: answers prompts while updates come in the background."""
    torch.set_num_threads(1)  # the model is small
    engine = Engine(Split().bfloat16())
    with scheme:
        scheme.init_on_receiver(model=engine, worker_idx=0)
        scheme.connect()
        while (question := pipe.recv()) is not None:
            prompts, temperature, checkpoint = question
            if checkpoint is None:
                pipe.send((engine.generate(prompts, temperature), engine.version, engine.loads))
            else:  # what a new engine would say, all of whose weights come from a file
                fresh = Split().bfloat16()
                fresh.load_state_dict(torch.load(checkpoint))
                pipe.send((generate(fresh, prompts, temperature), None, None))


# -- the trainer ---------------------------------------------------------------------------------------


class Rollout:
    """The trainer's end of the engine's process."""

    def __init__(self, pipe: Connection, prompts: torch.Tensor) -> None:
        self.pipe, self.prompts = pipe, prompts
        self.version = self.loads = 0

    def ask(self, temperature: float, checkpoint: Path | None = None) -> torch.Tensor:
        self.pipe.send((self.prompts, temperature, checkpoint))
        if not self.pipe.poll(60.0):
            raise TimeoutError("the engine does not answer")
        tokens, version, loads = self.pipe.recv()
        if checkpoint is None:
            self.version, self.loads = version, loads
        return tokens

    def both(self, checkpoint: Path | None = None) -> list[torch.Tensor]:
        """The most likely tokens, and sampled ones."""
        return [self.ask(0.0, checkpoint), self.ask(1.0, checkpoint)]


def equal(some: list[torch.Tensor], others: list[torch.Tensor]) -> bool:
    return all(map(torch.equal, some, others))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--updates", type=int, default=3)
    parser.add_argument("--steps", type=int, default=30, help="of the trainer before each update")
    parser.add_argument("--bucket", type=int, default=32 << 10, help="bytes of a chunk")
    args = parser.parse_args()

    torch.manual_seed(0)
    torch.set_num_threads(1)  # the model is small
    chance = torch.Generator().manual_seed(0)
    model = Fused()
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    convert = megatron_to_hf(HEADS, GROUPS)
    encoding = BucketEncoding(bucket_size=args.bucket)
    scheme = SharedMemWeightSyncScheme(
        WeightStrategy("state_dict", encoding=encoding, convert=convert, max_in_flight=2)
    )
    scheme.init_on_sender(model=model, num_workers=1)
    context = mp.get_context("spawn")
    pipe, theirs = context.Pipe()
    process = context.Process(target=serve, args=(scheme, theirs), daemon=True)
    process.start()
    theirs.close()
    rows = problems(100, torch.Generator().manual_seed(1))
    rollout = Rollout(pipe, rows[:, : DIGITS + 2])

    with scheme, tempfile.TemporaryDirectory() as directory:
        scheme.connect()
        before = rollout.both()
        for _ in range(args.updates):
            loss = train(model, optimizer, args.steps, chance)
            loads = rollout.loads
            report = scheme.send()
            after = rollout.both()
            checkpoint = Path(directory) / "whole.pt"
            torch.save(dict(convert(iter(model.state_dict().items()))), checkpoint)
            right = (after[0] == rows[:, DIGITS + 2 :]).all(1).sum().item()
            seconds, same = sum(report.seconds.values()), equal(after, rollout.both(checkpoint))
            print(
                f"version {rollout.version}: loss {loss:.3f}, {right} of 100 reversed; "
                f"{report.wire_bytes / 1e3:.0f} kB in {rollout.loads - loads} loads, {1e3 * seconds:.1f} ms; "
                f"tokens as before: {equal(after, before)}, as after a full reload: {same}",
                flush=True,
            )
            before = after
        pipe.send(None)
        process.join(30.0)


if __name__ == "__main__":
    main()
