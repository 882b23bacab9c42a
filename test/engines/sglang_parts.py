"""A tiny model for SGLang, and what its engine and its server are started with on the CPU."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import torch
from pairs import connect_pair

from weight_update import MemoryWeightSyncScheme, PatchEncoding, WeightStrategy

ROOT = Path(__file__).parents[2]
PROMPT = [5, 6, 7, 8, 9, 10, 11, 12]
TOKENS = 8
WAIT = 60.0

HERE = Path(__file__).parent

# SGLang's processes find this library, stand-ins for CUDA packages, the tests' models, and its CPU backend.
ENVIRONMENT = {
    "PYTHONPATH": os.pathsep.join(map(str, [ROOT, HERE / "without_gpu", HERE])),
    "SGLANG_EXTERNAL_MODEL_PACKAGE": "sglang_models",
    "SGLANG_USE_CPU_ENGINE": "1",
    "SGLANG_CPU_OMP_THREADS_BIND": "0|0",  # the core of each rank
}

OPTIONS: dict[str, Any] = {
    "load_format": "dummy",
    "device": "cpu",
    "dtype": "bfloat16",
    "skip_tokenizer_init": True,
    "attention_backend": "torch_native",
    "sampling_backend": "pytorch",
    "grammar_backend": "none",
    "disable_cuda_graph": True,
    "disable_overlap_schedule": True,
    "max_total_tokens": 4096,
    "max_running_requests": 4,
    "log_level": "warning",
    "custom_weight_loader": ["weight_update.engines.sglang.load"],
}


def trainer(folder: Path, architecture: str = "Qwen3ForCausalLM") -> Any:
    """Return a tiny Qwen3 of Hugging Face, whose configuration is in ``folder`` for SGLang's class."""
    from transformers import Qwen3Config, Qwen3ForCausalLM

    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=256,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        max_position_embeddings=512,
        tie_word_embeddings=False,
        bos_token_id=1,
        eos_token_id=2,
    )
    model = Qwen3ForCausalLM(config).to(torch.bfloat16)
    model.config.architectures = [architecture]
    model.config.save_pretrained(folder)
    return model


@torch.no_grad()
def change(model: Any, seed: int, share: float = 0.1) -> None:
    """Change a share of the elements."""
    generator = torch.Generator().manual_seed(seed)
    for weight in model.parameters():
        chosen = torch.rand(weight.shape, generator=generator) < share
        weight[chosen] += 0.3 * torch.randn(int(chosen.sum()), generator=generator).to(weight.dtype)


def answer_of(model: Any) -> list[int]:
    """Return the tokens that Hugging Face's generation gives for PROMPT."""
    tokens = model.generate(
        torch.tensor([PROMPT]),
        max_new_tokens=TOKENS,
        min_new_tokens=TOKENS,
        do_sample=False,
        eos_token_id=None,
    )
    return list(tokens[0, len(PROMPT) :].tolist())


def sampling(count: int = TOKENS) -> dict[str, Any]:
    return {"temperature": 0, "max_new_tokens": count, "ignore_eos": True}


def connected(source: Any, engine: Any) -> tuple[MemoryWeightSyncScheme, MemoryWeightSyncScheme]:
    """Return a sender of ``source`` with patches, and the receiver with ``engine``."""
    sender = MemoryWeightSyncScheme(WeightStrategy("state_dict", encoding=PatchEncoding()), timeout=WAIT)
    return sender, connect_pair(sender, source, engine)
