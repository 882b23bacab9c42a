"""Patches for multi-head latent attention, whose parameters vLLM derives from weights."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

pytest.importorskip("vllm", reason="make test-engines installs vLLM")

import torch
from test_vllm import join, send
from torch import nn
from transformers import DeepseekV2Config, DeepseekV2ForCausalLM
from vllm.config import VllmConfig
from vllm.model_executor.model_loader.utils import process_weights_after_loading
from vllm_parts import (
    LATENT,
    PATCH,
    OneWorker,
    assert_same,
    tensors,
    train,
    vllm_model,
)

from weight_update import DistributedWeightSyncScheme

MODEL = LATENT


@pytest.fixture(scope="module", autouse=True)
def no_amx() -> Iterator[None]:
    """Hide AMX, for which vLLM chooses kernels that only its build for CPUs has."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.cpu, "_is_amx_tile_supported", lambda: False)
        yield


def loaded(vllm_config: VllmConfig, policy: nn.Module) -> dict[str, torch.Tensor]:
    """Return what vLLM's own loading makes of all weights, derived parameters included."""
    model = vllm_model(vllm_config)
    model.load_weights(policy.state_dict().items())
    process_weights_after_loading(model, vllm_config.model_config, torch.device("cpu"))
    return tensors(model)


def test_derived_parameters_follow_a_patch(vllm_config: VllmConfig) -> None:
    policy = DeepseekV2ForCausalLM(DeepseekV2Config(**LATENT)).to(torch.float32)
    model = vllm_model(vllm_config)
    worker = OneWorker(vllm_config, model)
    with DistributedWeightSyncScheme(strategy=PATCH) as scheme:
        join(scheme, worker, policy)
        assert_same(model, loaded(vllm_config, policy))
        derived = [value for name, value in model.named_parameters() if name.endswith(("W_UV", "W_UK_T"))]
        assert derived
        for value in derived:  # else they are views of the weight, which follow it by themselves
            value.data = torch.empty_strided(value.shape, value.stride()).copy_(value.data)
        before = {name: value.data_ptr() for name, value in model.named_parameters()}
        train(policy, 0.01)
        send(scheme, worker)
        counts = worker.engine.loader.last_patch
        assert (counts.in_place, counts.reloaded) == (len(policy.state_dict()), 0)
        assert_same(model, loaded(vllm_config, policy))
        assert {name: value.data_ptr() for name, value in model.named_parameters()} == before
    worker.close()
