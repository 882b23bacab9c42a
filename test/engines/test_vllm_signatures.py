"""The names, parameters and routes of vLLM that the backend relies on."""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Callable
from typing import Any

import pytest

pytest.importorskip("vllm", reason="make test-engines installs vLLM")

from importlib.metadata import entry_points, version

from vllm.config import WeightTransferConfig, set_current_vllm_config
from vllm.distributed.weight_transfer import (
    TrainerWeightTransferEngine,
    VLLMWeightSyncClient,
    WeightSource,
    WeightTransferEngine,
    WeightTransferEngineFactory,
    WeightTransferTrainerFactory,
)
from vllm.distributed.weight_transfer.nccl_engine import NCCLTrainerInitInfo
from vllm.entrypoints.llm import LLM
from vllm.entrypoints.rl.offline import RLOfflineMixin
from vllm.entrypoints.rl.online.api_router import router as rl_router
from vllm.entrypoints.serve.dev.cache.api_router import router as cache_router
from vllm.model_executor.layers.attention import is_deferred_attention_layer
from vllm.model_executor.model_loader.mtp_validation import disable_mtp_completeness_check
from vllm.model_executor.model_loader.reload import finalize_layerwise_processing, initialize_layerwise_reload
from vllm.model_executor.model_loader.reload.layerwise import get_layerwise_info, make_online_process_loader
from vllm.model_executor.model_loader.reload.types import LayerReloadingInfo
from vllm.plugins import DEFAULT_PLUGINS_GROUP
from vllm.v1.worker.gpu_worker import Worker

from weight_update.serving.vllm import LocalLLM, Trainer, TrainerInitInfo, VLLMBackend, VLLMServer, register


def parameters(function: Callable[..., Any]) -> list[str]:
    return [name for name in inspect.signature(function).parameters if name not in ("self", "cls")]


def test_version() -> None:
    assert version("vllm").startswith("0.33.")


@pytest.mark.parametrize(
    ("function", "expected"),
    [
        (WeightTransferEngineFactory.register_engine, ["name", "module_path_or_cls", "class_name"]),
        (WeightTransferTrainerFactory.register_engine, ["name", "module_path_or_cls", "class_name"]),
        (WeightTransferEngineFactory.create_engine, ["config", "vllm_config", "device", "model"]),
        (WeightTransferTrainerFactory.trainer_init, ["init_info", "client", "source"]),
        (TrainerWeightTransferEngine.__init__, ["client", "source", "is_sender", "rank"]),
        (WeightSource.iter_full, []),
        (WeightSource.implements_iter_full, []),
        (Worker.init_weight_transfer_engine, ["init_info"]),
        (Worker.start_weight_update, []),
        (Worker.update_weights, ["update_info"]),
        (Worker.finish_weight_update, []),
        (Worker.shutdown_weight_transfer_engine, []),
        (RLOfflineMixin.init_weight_transfer_engine, ["request"]),
        (RLOfflineMixin.start_weight_update, []),
        (RLOfflineMixin.update_weights, ["request"]),
        (RLOfflineMixin.finish_weight_update, ["weight_version"]),
        (LLM.reset_prefix_cache, ["reset_running_requests", "reset_connector"]),
        (initialize_layerwise_reload, ["model"]),
        (finalize_layerwise_processing, ["model", "model_config"]),
        (get_layerwise_info, ["layer"]),
        (make_online_process_loader, ["layer", "param_name"]),
        (is_deferred_attention_layer, ["layer"]),
        (disable_mtp_completeness_check, []),
        (set_current_vllm_config, ["vllm_config", "check_compile", "prefix"]),
    ],
)
def test_parameters(function: Callable[..., Any], expected: list[str]) -> None:
    assert parameters(function) == expected


def test_what_vllm_notes_of_a_module_during_a_reload() -> None:
    noted = {field.name: field.type for field in dataclasses.fields(LayerReloadingInfo)}
    assert noted["load_numel"] is int
    assert noted["load_numel_total"] == int | None
    assert noted["loaded_weights"] == list[tuple[str, inspect.BoundArguments]]


def test_the_backend_has_the_methods_of_its_base() -> None:
    assert WeightTransferEngine.__abstractmethods__ == {
        "init_transfer_engine",
        "start_weight_update",
        "finish_weight_update",
        "receive_weights",
        "shutdown",
    }
    assert TrainerWeightTransferEngine.__abstractmethods__ == {"trainer_init", "send_weights"}
    for base, ours in ((WeightTransferEngine, VLLMBackend), (TrainerWeightTransferEngine, Trainer)):
        assert issubclass(ours, base)
        for name in base.__abstractmethods__:
            assert parameters(getattr(ours, name)) == parameters(getattr(base, name)), name
    assert parameters(VLLMBackend) == parameters(WeightTransferEngine)


@pytest.mark.parametrize("client", [VLLMServer, LocalLLM])
def test_clients_have_the_methods_of_the_protocol(client: type) -> None:
    names = [name for name in vars(VLLMWeightSyncClient) if not name.startswith("_")]
    assert len(names) == 4
    for name in names:
        assert parameters(getattr(client, name)) == parameters(getattr(VLLMWeightSyncClient, name)), name


def test_the_trainers_fields_are_those_of_the_nccl_backend() -> None:
    theirs = [name for name in parameters(NCCLTrainerInitInfo) if not name.startswith("packed")]
    assert set(theirs) <= set(parameters(TrainerInitInfo))
    assert parameters(TrainerInitInfo)[:3] == theirs[:3]


def test_routes() -> None:
    routes = {(route.path, *route.methods) for router in (rl_router, cache_router) for route in router.routes}
    assert routes >= {
        ("/pause", "POST"),
        ("/resume", "POST"),
        ("/init_weight_transfer_engine", "POST"),
        ("/shutdown_weight_transfer_engine", "POST"),
        ("/start_weight_update", "POST"),
        ("/update_weights", "POST"),
        ("/finish_weight_update", "POST"),
        ("/update_weight_version", "POST"),
        ("/weight_info", "GET"),
        ("/get_world_size", "GET"),
        ("/reset_prefix_cache", "POST"),
    }


def test_any_registered_name_is_a_backend() -> None:
    assert DEFAULT_PLUGINS_GROUP == "vllm.general_plugins"
    (found,) = entry_points(group=DEFAULT_PLUGINS_GROUP, name="weight_update")
    assert found.load() is register
    register()
    register()  # vLLM may load plugins more than once
    assert WeightTransferConfig(backend="weight_update").backend == "weight_update"
