"""vLLM's own HTTP routes and offline methods, with a worker behind them that needs no GPU."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import threading
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("vllm", reason="make test-engines installs vLLM")

import torch
import uvicorn
from fastapi import FastAPI
from torch import nn
from vllm.config import VllmConfig
from vllm.distributed.weight_transfer import HTTPVLLMWeightSyncClient, ModuleSource
from vllm.distributed.weight_transfer.base import WeightTransferInitRequest, WeightTransferUpdateRequest
from vllm.entrypoints.rl.offline import RLOfflineMixin
from vllm.entrypoints.rl.online.api_router import router as rl_router
from vllm.entrypoints.serve.dev.cache.api_router import router as cache_router
from vllm_parts import PATCH, OneWorker, assert_same, loaded_by_vllm, train, vllm_model

from weight_update import DistributedWeightSyncScheme, SyncFailedError, TransportError
from weight_update.serving.vllm import (
    LocalLLM,
    Trainer,
    TrainerInitInfo,
    VLLMServer,
    connect_servers,
    init_info,
)
from weight_update.serving.vllm.joining import connect_with
from weight_update.serving.vllm.loader import ModelLoader
from weight_update.testing.processes import wait_until


class EngineClient:
    """Stands in for ``AsyncLLM``: it hands the calls of the routes to one worker, and notes them."""

    def __init__(self, worker: OneWorker) -> None:
        self.worker, self.calls = worker, []
        self.vllm_config = worker.worker.vllm_config

    async def _call(self, method: str, *args: Any) -> None:
        self.calls.append(method)
        await asyncio.to_thread(getattr(self.worker, method), *args)

    async def init_weight_transfer_engine(self, request: WeightTransferInitRequest) -> None:
        await self._call("init_weight_transfer_engine", request.init_info)

    async def start_weight_update(self) -> None:
        await self._call("start_weight_update")

    async def update_weights(self, request: WeightTransferUpdateRequest) -> None:
        await self._call("update_weights", request.update_info)

    async def finish_weight_update(self, weight_version: str | None = None) -> None:
        await self._call("finish_weight_update", weight_version)

    async def get_weight_version(self) -> str:
        return self.worker.weight_version

    async def update_weight_version(self, new_version: str) -> None:
        self.calls.append("update_weight_version")
        self.worker.weight_version = new_version

    async def pause_generation(self, *, mode: str, clear_cache: bool) -> None:
        assert clear_cache
        self.calls.append(f"pause {mode}")

    async def resume_generation(self) -> None:
        self.calls.append("resume")

    async def reset_prefix_cache(self, running: bool, external: bool) -> bool:
        self.calls.append("reset_prefix_cache")
        return True


@pytest.fixture
def engine(worker: OneWorker) -> EngineClient:
    return EngineClient(worker)


@contextlib.contextmanager
def serving(engine: EngineClient) -> Iterator[str]:
    """A server with vLLM's routes."""
    app = FastAPI()
    app.include_router(rl_router)
    app.include_router(cache_router)
    app.state.engine_client = engine
    listening = socket.create_server(("127.0.0.1", 0))
    server = uvicorn.Server(uvicorn.Config(app, log_level="error"))
    thread = threading.Thread(target=server.run, kwargs={"sockets": [listening]}, daemon=True)
    thread.start()
    yield f"http://127.0.0.1:{listening.getsockname()[1]}"
    server.should_exit = True
    thread.join(20)


@pytest.fixture
def url(engine: EngineClient) -> Iterator[str]:
    with serving(engine) as found:
        yield found


UPDATE = ["start_weight_update", "update_weights", "finish_weight_update"]


def test_send_alone_updates_a_server(
    vllm_config: VllmConfig,
    url: str,
    engine: EngineClient,
    policy: nn.Module,
) -> None:
    server = VLLMServer(url)
    with DistributedWeightSyncScheme(strategy=PATCH) as scheme:
        scheme.init_on_sender(model=policy, num_workers=server.world_size())
        connect_servers(scheme, server)
        assert engine.calls == [
            "pause wait",
            "init_weight_transfer_engine",
            "update_weight_version",
            "resume",
        ]
        assert server.weight_version() == "0"
        for version in (1, 2):
            engine.calls.clear()
            train(policy, 0.01)
            scheme.send()
            assert engine.calls == ["pause wait", *UPDATE, "resume"]  # all of it before send() returns
            assert server.weight_version() == str(version)
            assert_same(engine.worker.model, loaded_by_vllm(vllm_config, policy))
    assert server.reset_prefix_cache() is True


def test_a_server_is_added_while_another_one_runs(
    vllm_config: VllmConfig,
    url: str,
    engine: EngineClient,
    policy: nn.Module,
) -> None:
    second = OneWorker(vllm_config, vllm_model(vllm_config))
    with DistributedWeightSyncScheme(strategy=PATCH) as scheme, serving(EngineClient(second)) as other:
        scheme.init_on_sender(model=policy, num_workers=1)
        connect_servers(scheme, VLLMServer(url))
        train(policy)
        scheme.send()
        connect_servers(scheme, VLLMServer(other), first_worker=1)
        assert second.engine.version == 1
        assert VLLMServer(other).weight_version() == "1"
        train(policy, 0.01)
        scheme.send()
        assert scheme.worker_versions == {0: 2, 1: 2}
        expected = loaded_by_vllm(vllm_config, policy)
        assert_same(engine.worker.model, expected)
        assert_same(second.model, expected)
        second.close()


@pytest.fixture
def keeping(url: str, engine: EngineClient, policy: nn.Module) -> Iterator[DistributedWeightSyncScheme]:
    """Connect a sender with a server that keeps its requests during updates; forget the calls of that."""
    with DistributedWeightSyncScheme(strategy=PATCH) as scheme:
        scheme.init_on_sender(model=policy, num_workers=1)
        connect_servers(scheme, VLLMServer(url), pause="keep")
        engine.calls.clear()
        yield scheme


def test_a_server_stays_paused_after_an_update_that_failed(
    vllm_config: VllmConfig,
    keeping: DistributedWeightSyncScheme,
    engine: EngineClient,
    policy: nn.Module,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def refuse(*_: Any) -> None:
        raise ValueError("no room")

    with monkeypatch.context() as patched:
        patched.setattr(ModelLoader, "patch", refuse)
        with pytest.raises(SyncFailedError, match="no room"):
            keeping.send()
    assert engine.calls[:2] == ["pause keep", "start_weight_update"]
    assert "resume" not in engine.calls
    train(policy)
    keeping.send()
    assert engine.calls[-1] == "resume"
    assert_same(engine.worker.model, loaded_by_vllm(vllm_config, policy))


def test_a_server_that_does_not_begin_an_update_generates_again(
    vllm_config: VllmConfig,
    keeping: DistributedWeightSyncScheme,
    engine: EngineClient,
    policy: nn.Module,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async def refuse() -> None:
        raise ValueError("not now")

    before = loaded_by_vllm(vllm_config, policy)
    train(policy)
    with monkeypatch.context() as patched:
        patched.setattr(engine, "start_weight_update", refuse)
        with pytest.raises(SyncFailedError, match="start_weight_update answered 500"):
            keeping.send()
    assert engine.calls[0] == "pause keep"
    assert engine.calls[-1] == "resume"
    assert_same(engine.worker.model, before)
    keeping.send()
    assert_same(engine.worker.model, loaded_by_vllm(vllm_config, policy))


def test_an_interrupted_connection_is_restored(
    vllm_config: VllmConfig, url: str, engine: EngineClient, policy: nn.Module
) -> None:
    """The trainer sends the version again that the workers have, and the server generates afterwards."""
    with DistributedWeightSyncScheme(strategy=PATCH, timeout=20.0) as scheme:
        scheme.init_on_sender(model=policy, num_workers=1)
        connect_servers(scheme, VLLMServer(url))
        engine.calls.clear()
        engine.worker.engine.scheme._receiver.link.disconnect()
        wait_until(lambda: "resume" in engine.calls, 20.0)
        assert engine.calls == ["pause wait", *UPDATE, "resume"]
        assert engine.worker.engine.version == 0
        assert_same(engine.worker.model, loaded_by_vllm(vllm_config, policy))
        train(policy, 0.01)
        scheme.send()
        assert engine.calls[-1] == "resume"
        assert_same(engine.worker.model, loaded_by_vllm(vllm_config, policy))


def test_a_server_that_is_gone_is_named(worker: OneWorker, policy: nn.Module) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listening:
        nobody = f"http://127.0.0.1:{listening.getsockname()[1]}"
    with pytest.raises(TransportError, match=f"no vLLM server answers at {nobody}/get_world_size"):
        VLLMServer(nobody).world_size()
    with DistributedWeightSyncScheme(strategy=PATCH) as scheme:
        scheme.init_on_sender(model=policy, num_workers=1)
        info = init_info(scheme, control=nobody)
        connect_with(scheme, [lambda: worker.init_weight_transfer_engine(info)])
        with pytest.raises(SyncFailedError, match=r"no vLLM server answers at .*/pause"):
            scheme.send()
        assert worker.engine.version == 0  # the version before stays in force


@pytest.mark.parametrize("client", [HTTPVLLMWeightSyncClient, VLLMServer])
def test_the_trainer_of_vllms_api_over_http(
    vllm_config: VllmConfig,
    url: str,
    engine: EngineClient,
    policy: nn.Module,
    client: Any,
) -> None:
    info = TrainerInitInfo("127.0.0.1", 0, 2, rank=0)
    trainer = Trainer.trainer_init(info, client=client(url), source=ModuleSource(policy))
    train(policy)
    trainer.send_weights()
    trainer.shutdown()
    assert engine.calls == ["init_weight_transfer_engine", *UPDATE]
    assert_same(engine.worker.model, loaded_by_vllm(vllm_config, policy))


class OfflineLLM(RLOfflineMixin):
    """vLLM's offline methods, with one worker instead of an engine."""

    def __init__(self, worker: OneWorker) -> None:
        self.worker, self.resets = worker, 0
        self.llm_engine = SimpleNamespace(
            collective_rpc=lambda method, kwargs=None: worker.call(method, *(kwargs or {}).values()),
            set_weight_version=lambda version: setattr(worker, "weight_version", version),
        )

    def reset_prefix_cache(self) -> bool:
        self.resets += 1
        return True


def test_an_llm_of_this_process(
    vllm_config: VllmConfig,
    worker: OneWorker,
    policy: nn.Module,
) -> None:
    offline = OfflineLLM(worker)
    llm = LocalLLM(offline)
    with DistributedWeightSyncScheme(strategy=PATCH) as scheme:
        scheme.init_on_sender(model=policy, num_workers=1)
        info = init_info(scheme)
        connect_with(scheme, [lambda: llm.init_weight_transfer_engine(info)])
        assert offline.resets == 1
        train(policy, 0.01)
        handle = scheme.send_async()
        llm.update()
        handle.wait(10.0)
        assert offline.resets == 2
        assert_same(worker.model, loaded_by_vllm(vllm_config, policy))
        handle = scheme.send_async()
        llm.update(handle.version)
        assert worker.weight_version == "2"
    assert torch.equal(worker.model.model.norm.weight, policy.model.norm.weight)
