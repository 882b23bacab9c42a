"""Patches for a mixture of experts, whose weights a kernel of vLLM stores in its own form."""

from __future__ import annotations

from typing import Any

import pytest

pytest.importorskip("vllm", reason="make test-engines installs vLLM")

import torch
from test_vllm import join, send
from torch import nn
from vllm import _custom_ops
from vllm.config import VllmConfig
from vllm.model_executor.layers.fused_moe.unquantized_fused_moe_method import UnquantizedFusedMoEMethod
from vllm_parts import (
    EXPERTS,
    PATCH,
    Experts,
    OneWorker,
    assert_same,
    loaded_by_vllm,
    trainer_model,
    vllm_model,
)

from weight_update import DistributedWeightSyncScheme

MODEL = EXPERTS


@pytest.fixture(autouse=True)
def kernel_format(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have each load end with experts in a form of a kernel's own, as on GPUs."""
    process = UnquantizedFusedMoEMethod.process_weights_after_loading

    def shuffle(self: Any, layer: Any) -> None:
        process(self, layer)
        for weight in (layer.w13_weight, layer.w2_weight):
            weight.data.copy_(weight.data.flip(2))

    monkeypatch.setattr(UnquantizedFusedMoEMethod, "process_weights_after_loading", shuffle)
    # a compiled operation, which no reload calls
    monkeypatch.setattr(_custom_ops, "cpu_prepack_moe_weight", lambda weight, isa: weight)


def loaded(vllm_config: VllmConfig, policy: nn.Module) -> dict[str, torch.Tensor]:
    """Return what the model has after a load of all weights, experts in the kernel's form."""
    found = loaded_by_vllm(vllm_config, policy)
    return {name: value.flip(2) if ".experts." in name else value for name, value in found.items()}


def test_experts_are_reloaded_with_their_layer_only(vllm_config: VllmConfig) -> None:
    policy: Any = trainer_model()
    for layer in policy.model.layers:
        layer.mlp = Experts()
    model = vllm_model(vllm_config)
    worker = OneWorker(vllm_config, model)
    with DistributedWeightSyncScheme(strategy=PATCH) as scheme:
        join(scheme, worker, policy)
        assert_same(model, loaded(vllm_config, policy))
        loader = worker.engine.loader
        experts = {name for name, _ in policy.named_parameters() if ".experts." in name}
        assert loader.placements.others == experts
        before = {name: value.data_ptr() for name, value in model.named_parameters()}
        for change, in_place, reloaded in (
            (["model.layers.1.mlp.experts.2.up_proj.weight"], 0, 12),
            (["model.layers.0.mlp.gate.weight", "model.layers.0.self_attn.q_proj.weight"], 2, 0),
            ([*experts, "model.norm.weight"], 1, 24),
        ):
            for name in change:
                policy.get_parameter(name).data.view(-1)[::3] += 1.0
            send(scheme, worker)
            assert (loader.last_patch.in_place, loader.last_patch.reloaded) == (in_place, reloaded)
            assert_same(model, loaded(vllm_config, policy))
        assert {name: value.data_ptr() for name, value in model.named_parameters()} == before
    worker.close()
