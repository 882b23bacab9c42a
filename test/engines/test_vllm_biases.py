"""Patches of biases, which vLLM's layerwise reload treats in a way of their own."""

from __future__ import annotations

from typing import Any

import pytest

pytest.importorskip("vllm", reason="make test-engines installs vLLM")

from test_vllm import join, send
from transformers import Qwen2Config, Qwen2ForCausalLM
from vllm.config import VllmConfig
from vllm_parts import PATCH, TINY, OneWorker, assert_same, loaded_by_vllm, train

from weight_update import DistributedWeightSyncScheme

MODEL = {"architectures": ["Qwen2ForCausalLM"], "model_type": "qwen2"}


def test_a_patch_changes_biases(vllm_config: VllmConfig, worker: OneWorker) -> None:
    sizes: dict[str, Any] = {**TINY, **MODEL}
    policy = Qwen2ForCausalLM(Qwen2Config(**sizes)).float()
    names = {name for name, _ in policy.named_parameters()}
    assert any(name.endswith("q_proj.bias") for name in names)
    with DistributedWeightSyncScheme(strategy=PATCH) as scheme:
        join(scheme, worker, policy)
        for _ in range(2):
            train(policy, 0.01)
            send(scheme, worker)
            assert worker.engine.loader.last_patch.in_place == len(names)
            assert_same(worker.model, loaded_by_vllm(vllm_config, policy))
