"""vLLM's engine itself, which needs a GPU: generation, prefix caches, tensor parallelism, quantization.

None of these tests has been run: see the table in docs/engine_vllm.rst.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("vllm", reason="make test-engines installs vLLM")

import torch
from torch import nn
from vllm_parts import PATCH, TINY, train, trainer_model

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


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    tiny = {**TINY, "hidden_size": 256, "head_dim": 64, "intermediate_size": 512, "dtype": "bfloat16"}
    (tmp_path / "config.json").write_text(json.dumps(tiny))
    return tmp_path


def start(directory: Path, **options: Any) -> Any:
    from vllm import LLM

    return LLM(
        str(directory),
        skip_tokenizer_init=True,
        load_format="dummy",
        max_model_len=64,
        gpu_memory_utilization=0.3,
        weight_transfer_config={"backend": "weight_update"},
        **options,
    )


def tokens(llm: Any) -> list[int]:
    from vllm import SamplingParams

    greedy = SamplingParams(temperature=0.0, max_tokens=16, detokenize=False)
    return list(llm.generate([PROMPT], greedy)[0].outputs[0].token_ids)


def checkpoint(directory: Path, policy: nn.Module) -> None:
    from safetensors.torch import save_file

    weights = {name: value.to(torch.bfloat16).contiguous() for name, value in policy.state_dict().items()}
    save_file(weights, directory / "model.safetensors")


@pytest.fixture
def policy(directory: Path) -> nn.Module:
    tiny = json.loads((directory / "config.json").read_text())
    return trainer_model(**{key: tiny[key] for key in ("hidden_size", "head_dim", "intermediate_size")})


@pytest.mark.parametrize("options", [{}, {"quantization": "fp8"}, {"enforce_eager": True}])
def test_tokens_are_those_of_a_reload(directory: Path, policy: nn.Module, options: dict[str, Any]) -> None:
    strategy = WeightStrategy("state_dict", encoding="patch", convert=cast(torch.bfloat16))
    llm = start(directory, **options)
    local = LocalLLM(llm)
    with DistributedWeightSyncScheme(strategy=strategy) as scheme:
        scheme.init_on_sender(model=policy, num_workers=1)
        info = init_info(scheme)
        connect_with(scheme, [lambda: local.init_weight_transfer_engine(info)])
        found = []
        for _ in range(3):
            train(policy, 0.01)
            handle = scheme.send_async()
            local.update(handle.version)
            handle.wait(60.0)
            found.append(tokens(llm))  # the prompt is cached, if the cache was not reset
    checkpoint(directory, policy)
    llm.collective_rpc("reload_weights", kwargs={"weights_path": str(directory)})
    llm.reset_prefix_cache()
    assert found[-1] == tokens(llm)


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices")
def test_tensor_parallel_workers_change_together(directory: Path, policy: nn.Module) -> None:
    llm = start(directory, tensor_parallel_size=2)
    local = LocalLLM(llm)
    with DistributedWeightSyncScheme(strategy=PATCH) as scheme:
        scheme.init_on_sender(model=policy, num_workers=2)
        info = init_info(scheme)
        connect_with(scheme, [lambda: local.init_weight_transfer_engine(info)])
        train(policy, 0.01)
        handle = scheme.send_async()
        local.update(handle.version)
        handle.wait(60.0)
        assert scheme.worker_versions == {0: 1, 1: 1}
        with pytest.raises(Exception, match="several workers must load the same version"):
            local.update()
