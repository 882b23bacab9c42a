"""vLLM on GPUs: tokens after patches are those of a load from disk.

None of these tests has been run: see docs/engine_vllm.rst.
"""

from __future__ import annotations

import importlib.util
import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("vllm", reason="make test-engines installs vLLM")

import torch
from torch import nn
from transformers import DeepseekV2Config, DeepseekV2ForCausalLM
from vllm_parts import EXPERTS, LATENT, TINY, Experts, train, trainer_model

from weight_update import DistributedWeightSyncScheme, WeightStrategy
from weight_update.convert import cast
from weight_update.serving.vllm import LocalLLM, init_info
from weight_update.serving.vllm.joining import connect_with

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.timeout(600),
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
PROMPT = {"prompt_token_ids": [1, 2, 3, 4]}
SIZES: dict[str, Any] = {"hidden_size": 256, "intermediate_size": 512}
TWO = pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices")
RAY = pytest.mark.skipif(importlib.util.find_spec("ray") is None, reason="Ray is not installed")


def dense(directory: Path) -> nn.Module:
    sizes = {**SIZES, "head_dim": 64}
    write_config(directory, {**TINY, **sizes})
    return trainer_model(**sizes)


def experts(directory: Path) -> nn.Module:
    policy: Any = dense(directory)
    write_config(directory, {**TINY, **SIZES, "head_dim": 64, **EXPERTS})
    for layer in policy.model.layers:
        layer.mlp = Experts(SIZES["hidden_size"])
    return policy


def latent(directory: Path) -> nn.Module:
    write_config(directory, {**LATENT, **SIZES})
    return DeepseekV2ForCausalLM(DeepseekV2Config(**{**LATENT, **SIZES})).to(torch.float32)


def write_config(directory: Path, settings: dict[str, Any]) -> None:
    (directory / "config.json").write_text(json.dumps({**settings, "dtype": "bfloat16"}))


@contextmanager
def started(directory: Path, load_format: str, **options: Any) -> Iterator[Any]:
    from vllm import LLM

    llm = LLM(
        str(directory),
        skip_tokenizer_init=True,
        load_format=load_format,
        max_model_len=64,
        gpu_memory_utilization=0.3,
        weight_transfer_config={"backend": "weight_update"},
        **options,
    )
    try:
        yield llm
    finally:
        llm.llm_engine.engine_core.shutdown()


def tokens(llm: Any) -> list[int]:
    from vllm import SamplingParams

    greedy = SamplingParams(temperature=0.0, max_tokens=16, detokenize=False)
    return list(llm.generate([PROMPT], greedy)[0].outputs[0].token_ids)


def checkpoint(directory: Path, policy: nn.Module) -> None:
    from safetensors.torch import save_file

    weights = {name: value.to(torch.bfloat16).contiguous() for name, value in policy.state_dict().items()}
    save_file(weights, directory / "model.safetensors")


@pytest.mark.parametrize(
    ("kind", "options"),
    [
        (dense, {}),
        (dense, {"quantization": "fp8"}),
        (dense, {"enforce_eager": True}),
        (experts, {}),
        (latent, {}),
        pytest.param(dense, {"tensor_parallel_size": 2}, marks=TWO),
        pytest.param(dense, {"pipeline_parallel_size": 2}, marks=TWO),
        pytest.param(
            dense, {"tensor_parallel_size": 2, "distributed_executor_backend": "ray"}, marks=[TWO, RAY]
        ),
        pytest.param(experts, {"tensor_parallel_size": 2, "enable_expert_parallel": True}, marks=TWO),
    ],
)
def test_tokens_are_those_of_a_load_from_disk(tmp_path: Path, kind: Any, options: dict[str, Any]) -> None:
    policy = kind(tmp_path)
    workers = options.get("tensor_parallel_size", 1) * options.get("pipeline_parallel_size", 1)
    strategy = WeightStrategy("state_dict", encoding="patch", convert=cast(torch.bfloat16))
    found = []
    with (
        started(tmp_path, "dummy", **options) as llm,
        DistributedWeightSyncScheme(strategy=strategy) as scheme,
    ):
        local = LocalLLM(llm)
        scheme.init_on_sender(model=policy, num_workers=workers)
        info = init_info(scheme)
        connect_with(scheme, [lambda: local.init_weight_transfer_engine(info)])
        for version in range(1, 4):
            train(policy, 0.01)
            handle = scheme.send_async()
            local.update(handle.version)
            handle.wait(60.0)
            assert scheme.worker_versions == dict.fromkeys(range(workers), version)
            found.append(tokens(llm))  # the prompt is cached, if the cache was not reset
    checkpoint(tmp_path, policy)
    with started(tmp_path, "auto", **options) as llm:
        assert found[-1] == tokens(llm)
