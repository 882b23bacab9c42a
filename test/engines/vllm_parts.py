"""A worker of vLLM without a GPU: vLLM's own configuration, parallel state, model code and worker methods."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from torch import nn
from transformers import Qwen3Config, Qwen3ForCausalLM
from vllm.config import VllmConfig, WeightTransferConfig, set_current_vllm_config
from vllm.distributed import (
    cleanup_dist_env_and_memory,
    init_distributed_environment,
    initialize_model_parallel,
)
from vllm.distributed.weight_transfer import WeightTransferEngineFactory
from vllm.engine.arg_utils import EngineArgs
from vllm.model_executor.model_loader.reload import record_metadata_for_reloading
from vllm.model_executor.model_loader.utils import initialize_model, process_weights_after_loading
from vllm.plugins import load_general_plugins
from vllm.v1.worker.gpu_worker import Worker

from weight_update import WeightStrategy

PATCH = WeightStrategy("state_dict", encoding="patch")

TINY = {
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "vocab_size": 96,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 64,
    "tie_word_embeddings": False,
}

EXPERTS = {
    "architectures": ["Qwen3MoeForCausalLM"],
    "model_type": "qwen3_moe",
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
    "decoder_sparse_step": 1,
    "norm_topk_prob": True,
    "mlp_only_layers": [],
}

LATENT = {
    **{name: value for name, value in TINY.items() if name != "head_dim"},
    "architectures": ["DeepseekV2ForCausalLM"],
    "model_type": "deepseek_v2",
    "num_key_value_heads": 4,
    "kv_lora_rank": 512,
    "q_lora_rank": None,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
    "first_k_dense_replace": 2,  # all layers: no mixture of experts
}
"""DeepSeek's attention, in the sizes that vLLM's kernels for GPUs know."""


def trainer_model(**changes: int) -> nn.Module:
    """Hugging Face's Qwen3 with random weights: what a trainer has, in the format of a checkpoint."""
    torch.manual_seed(0)
    return Qwen3ForCausalLM(Qwen3Config(**{**TINY, **changes})).to(torch.float32)


class Experts(nn.Module):
    """The feed-forward part of one layer of EXPERTS, under the names of a checkpoint."""

    def __init__(self, width: int = 32) -> None:
        super().__init__()
        self.gate = nn.Linear(width, 4, bias=False)
        shapes = {"gate_proj": (width, 32), "up_proj": (width, 32), "down_proj": (32, width)}
        self.experts = nn.ModuleList(
            nn.ModuleDict({part: nn.Linear(*shape, bias=False) for part, shape in shapes.items()})
            for _ in range(4)
        )


def config(directory: Path, **changes: Any) -> VllmConfig:
    (directory / "config.json").write_text(json.dumps({**TINY, **changes, "dtype": "float32"}))
    load_general_plugins()
    return EngineArgs(
        model=str(directory),
        skip_tokenizer_init=True,
        load_format="dummy",
        dtype="float32",
        enforce_eager=True,
        max_model_len=64,
        weight_transfer_config=WeightTransferConfig(backend="weight_update"),
    ).create_engine_config()


def parallel_state(vllm_config: VllmConfig) -> Iterator[None]:
    """vLLM's groups of one process, over gloo."""
    with tempfile.TemporaryDirectory() as place, set_current_vllm_config(vllm_config):
        init_distributed_environment(1, 0, f"file://{place}/store", 0, "gloo")
        initialize_model_parallel(1, 1)
        yield
        cleanup_dist_env_and_memory()


def vllm_model(vllm_config: VllmConfig) -> nn.Module:
    """vLLM's Qwen3 as its loader leaves it: dummy weights, processed, ready for layerwise reloads."""
    vllm_config.compilation_config.static_forward_context.clear()  # a second model has the same layers
    with set_current_vllm_config(vllm_config), torch.device("cpu"):
        model = initialize_model(vllm_config=vllm_config)
        record_metadata_for_reloading(model)
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.uniform_(-1, 1)
        process_weights_after_loading(model, vllm_config.model_config, torch.device("cpu"))
    return model.eval()


def tensors(model: nn.Module) -> dict[str, torch.Tensor]:
    return {name: value.clone() for name, value in (*model.named_parameters(), *model.named_buffers())}


def loaded_by_vllm(vllm_config: VllmConfig, policy: nn.Module) -> dict[str, torch.Tensor]:
    """Tensors that vLLM's own loader makes of a checkpoint of ``policy``, in a model of its own."""
    model = vllm_model(vllm_config)
    model.load_weights(policy.state_dict().items())
    return tensors(model)


def assert_same(model: nn.Module, expected: dict[str, torch.Tensor]) -> None:
    for name, value in tensors(model).items():
        assert torch.equal(value, expected[name]), name


@torch.no_grad()
def train(policy: nn.Module, share: float = 1.0) -> None:
    """Change a share of the elements of every weight."""
    for parameter in policy.parameters():
        chosen = torch.rand_like(parameter) < share
        parameter.view(-1)[0] += 1.0
        parameter[chosen] += 0.25


class OneWorker:
    """A worker whose calls are vLLM's own methods, in a thread of its own, as in vLLM's processes.

    It has the methods of ``VLLMWeightSyncClient``: arguments go through JSON, as over HTTP.
    """

    def __init__(self, vllm_config: VllmConfig, model: nn.Module) -> None:
        self.worker = Worker.__new__(Worker)
        self.worker.vllm_config = vllm_config
        self.worker.rank = 0
        self.worker._weight_update_active = False
        self.worker._weight_update_is_draft = False
        self.worker.model_runner = SimpleNamespace(reset_lora_state=lambda: None)
        with set_current_vllm_config(vllm_config):
            self.worker.weight_transfer_engine = WeightTransferEngineFactory.create_engine(
                vllm_config.weight_transfer_config, vllm_config, torch.device("cpu"), model
            )
        self.model, self.engine = model, self.worker.weight_transfer_engine
        self.weight_version = "default"
        self._thread = ThreadPoolExecutor(1, "vllm-worker")

    def call(self, method: str, *args: Any) -> Any:
        return self._thread.submit(getattr(self.worker, method), *json.loads(json.dumps(args))).result(60)

    def init_weight_transfer_engine(self, init_info: dict[str, Any]) -> None:
        self.call("init_weight_transfer_engine", init_info)

    def start_weight_update(self) -> None:
        self.call("start_weight_update")

    def update_weights(self, update_info: Any) -> None:
        self.call("update_weights", update_info)

    def finish_weight_update(self, weight_version: str | None = None) -> None:
        self.call("finish_weight_update")
        if weight_version is not None:
            self.weight_version = weight_version

    def close(self) -> None:
        self.engine.shutdown()
        self._thread.shutdown()
