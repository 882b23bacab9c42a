"""A model whose loader writes to parameters directly, where vLLM's layerwise reload does not notice it."""

from __future__ import annotations

import pytest

pytest.importorskip("vllm", reason="make test-engines installs vLLM")

from test_vllm import join
from transformers import GptOssConfig, GptOssForCausalLM
from vllm import _custom_ops
from vllm.config import VllmConfig
from vllm_parts import PATCH, TINY, OneWorker, vllm_model

from weight_update import DistributedWeightSyncScheme

EXPERTS = {"num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": 32}
MODEL = {"architectures": ["GptOssForCausalLM"], "model_type": "gpt_oss", **EXPERTS}


def test_weights_that_a_reload_leaves_out_are_an_error(
    vllm_config: VllmConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    # a compiled operation, which no reload calls
    monkeypatch.setattr(_custom_ops, "cpu_prepack_moe_weight", lambda weight, isa: weight)
    worker = OneWorker(vllm_config, vllm_model(vllm_config))
    policy = GptOssForCausalLM(GptOssConfig(**{**TINY, **MODEL})).float()
    with DistributedWeightSyncScheme(strategy=PATCH) as scheme:
        with pytest.raises(RuntimeError, match=r"does not reach .*layers\.0\.mlp\.experts"):
            join(scheme, worker, policy)
        assert worker.engine.version is None
    worker.close()
