"""vLLM's workers as receivers: its factory, configuration, worker methods and model code, without a GPU."""

from __future__ import annotations

import socket
from dataclasses import replace
from functools import cached_property
from typing import Any

import pytest

pytest.importorskip("vllm", reason="make test-engines installs vLLM")

import torch
from torch import nn
from vllm.config import VllmConfig
from vllm.distributed.weight_transfer import ModuleSource, WeightTransferTrainerFactory
from vllm.distributed.weight_transfer.base import ParamMeta
from vllm_parts import PATCH, OneWorker, assert_same, loaded_by_vllm, tensors, train, vllm_model

from weight_update import (
    BucketEncoding,
    DistributedWeightSyncScheme,
    LifecycleError,
    LinkClosedError,
    PatchEncoding,
    RPCWeightSyncScheme,
    SharedMemWeightSyncScheme,
    SyncFailedError,
    SyncTimeoutError,
    WeightStrategy,
    WeightSyncScheme,
)
from weight_update.serving.vllm import Trainer, TrainerInitInfo, VLLMBackend, init_info
from weight_update.serving.vllm.joining import connect_with
from weight_update.serving.vllm.loader import ModelLoader


def join(scheme: WeightSyncScheme, worker: OneWorker, policy: nn.Module, **options: Any) -> None:
    scheme.init_on_sender(model=policy, num_workers=1)
    info = init_info(scheme, **options)
    connect_with(scheme, [lambda: worker.init_weight_transfer_engine(info)])


def send(scheme: WeightSyncScheme, worker: OneWorker) -> None:
    handle = scheme.send_async()
    worker.start_weight_update()
    worker.update_weights({"version": handle.version})
    worker.finish_weight_update()
    handle.wait(10.0)


def test_the_backend_comes_from_the_entry_point(worker: OneWorker) -> None:
    assert type(worker.engine) is VLLMBackend


def test_a_program_for_vllm_changes_one_line(
    vllm_config: VllmConfig, worker: OneWorker, policy: nn.Module
) -> None:
    info = TrainerInitInfo(rank=0, world_size=2)  # was NCCLTrainerInitInfo(...)
    trainer = WeightTransferTrainerFactory.trainer_init(info, client=worker, source=ModuleSource(policy))
    assert isinstance(trainer, Trainer)
    assert worker.engine.version == 0
    assert_same(worker.model, loaded_by_vllm(vllm_config, policy))
    train(policy)
    trainer.send_weights()
    assert (worker.engine.version, worker.weight_version) == (1, "1")
    assert_same(worker.model, loaded_by_vllm(vllm_config, policy))
    trainer.shutdown()


@pytest.mark.parametrize(
    "kind", [SharedMemWeightSyncScheme, DistributedWeightSyncScheme, RPCWeightSyncScheme]
)
@pytest.mark.parametrize("in_chunks", [False, True])
def test_any_scheme_sends_the_same_bits(
    vllm_config: VllmConfig, worker: OneWorker, policy: nn.Module, kind: Any, in_chunks: bool
) -> None:
    strategy = WeightStrategy("state_dict", encoding=BucketEncoding(bucket_size=20_000))
    with kind(strategy=strategy) as scheme:
        join(scheme, worker, policy, in_chunks=in_chunks)
        train(policy)
        send(scheme, worker)
        assert_same(worker.model, loaded_by_vllm(vllm_config, policy))


def test_a_patch_is_written_in_place(vllm_config: VllmConfig, worker: OneWorker, policy: nn.Module) -> None:
    with DistributedWeightSyncScheme(strategy=PATCH) as scheme:
        join(scheme, worker, policy)
        before = {name: value.data_ptr() for name, value in worker.model.named_parameters()}
        for version in (1, 2, 3):
            train(policy, 0.01)
            send(scheme, worker)
            assert worker.engine.version == version
            assert_same(worker.model, loaded_by_vllm(vllm_config, policy))
        counts = worker.engine.loader.last_patch
        assert (counts.in_place, counts.reloaded) == (len(policy.state_dict()), 0)
        assert counts.elements < 0.05 * sum(p.numel() for p in policy.parameters())
        assert {name: value.data_ptr() for name, value in worker.model.named_parameters()} == before


def test_a_patch_of_weights_that_vllm_has_discarded(
    vllm_config: VllmConfig, worker: OneWorker, policy: nn.Module
) -> None:
    """As after ``sleep(level=2)`` and after a reload from disk: the worker loads its copy of all weights."""
    with DistributedWeightSyncScheme(strategy=PATCH) as scheme:
        join(scheme, worker, policy)
        first = tensors(worker.model)
        for discard in (nn.Module.state_dict, zero_weights, lambda model: reload(model, first), turn):
            train(policy, 0.01)
            discard(worker.model)
            send(scheme, worker)
            assert scheme.last_report is not None
            assert scheme.last_report.encoding == "patch"
            assert_same(worker.model, loaded_by_vllm(vllm_config, policy))
        train(policy, 0.01)
        send(scheme, worker)
        assert worker.engine.loader.last_patch.reloaded == 0
        assert_same(worker.model, loaded_by_vllm(vllm_config, policy))


def test_updates_leave_random_numbers_alone(worker: OneWorker, policy: nn.Module) -> None:
    """Of vLLM, which samples with them on the CPU, and of a program that runs an LLM."""
    with DistributedWeightSyncScheme(strategy=PATCH) as scheme:
        torch.manual_seed(5)
        before = torch.get_rng_state()
        join(scheme, worker, policy)
        assert torch.equal(torch.get_rng_state(), before)
        for _ in range(2):
            train(policy, 0.01)
            before = torch.get_rng_state()
            send(scheme, worker)
            assert torch.equal(torch.get_rng_state(), before)


@torch.no_grad()
def zero_weights(model: nn.Module) -> None:
    for parameter in model.parameters():
        parameter.zero_()


@torch.no_grad()
def turn(model: Any) -> None:
    """Replace a parameter by one whose elements lie in another order in memory."""
    weight = model.lm_head.weight
    weight.data = torch.zeros_like(weight).t().contiguous().t()


@torch.no_grad()
def reload(model: nn.Module, values: dict[str, torch.Tensor]) -> None:
    for name, parameter in model.named_parameters():
        parameter.copy_(values[name])


def test_weights_in_another_form_are_loaded_as_a_whole(
    vllm_config: VllmConfig, policy: nn.Module, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = vllm_model(vllm_config)
    process = type(model.lm_head.quant_method).process_weights_after_loading

    def negate(self: Any, layer: nn.Module) -> None:
        process(self, layer)
        if layer is model.lm_head:  # as kernels do that want weights in their own form
            layer.weight.data.neg_()

    monkeypatch.setattr(type(model.lm_head.quant_method), "process_weights_after_loading", negate)
    worker = OneWorker(vllm_config, model)
    with DistributedWeightSyncScheme(strategy=PATCH) as scheme:
        join(scheme, worker, policy)
        assert worker.engine.loader.placements.others == {"lm_head.weight"}
        train(policy, 0.01)
        send(scheme, worker)
        counts = worker.engine.loader.last_patch
        assert (counts.in_place, counts.reloaded) == (len(policy.state_dict()) - 1, 1)
        assert torch.equal(model.lm_head.weight[:96], -policy.lm_head.weight)
        assert torch.equal(model.model.norm.weight, policy.model.norm.weight)
    worker.close()


def test_weights_that_a_kernel_stores_as_one_are_reloaded_together(
    vllm_config: VllmConfig, policy: nn.Module, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = vllm_model(vllm_config)
    turned = [layer.self_attn.qkv_proj for layer in model.model.layers]
    kind = type(turned[0].quant_method)
    process = kind.process_weights_after_loading

    def turn(self: Any, layer: nn.Module) -> None:
        process(self, layer)
        if layer in turned:  # as for fp8: a loader of this layer cannot take the parameter any more
            layer.weight = nn.Parameter(layer.weight.data.t().contiguous().neg(), requires_grad=False)

    for layer in turned:
        layer.weight = nn.Parameter(layer.weight.data.t().contiguous().neg(), requires_grad=False)
    monkeypatch.setattr(kind, "process_weights_after_loading", turn)
    worker = OneWorker(vllm_config, model)
    with DistributedWeightSyncScheme(strategy=PATCH) as scheme:
        join(scheme, worker, policy)
        fused = [f"model.layers.{i}.self_attn.{part}_proj.weight" for i in (0, 1) for part in "qkv"]
        loader = worker.engine.loader
        assert loader.placements.others == set(fused)
        before = {name: value.data_ptr() for name, value in model.named_parameters()}
        for changed, reloaded in ((fused[:1], 3), ([*fused, "lm_head.weight"], 6), (["lm_head.weight"], 0)):
            for name in changed:
                policy.get_parameter(name).data.view(-1)[::7] += 1.0
            send(scheme, worker)
            expected = loaded_by_vllm(vllm_config, policy)
            assert (loader.last_patch.reloaded, loader.last_patch.in_place) == (
                reloaded,
                len(set(changed) - set(fused)),
            )
            for name, value in tensors(model).items():
                own = "qkv_proj" in name
                assert torch.equal(value, -expected[name].t() if own else expected[name]), name
        assert {name: value.data_ptr() for name, value in model.named_parameters()} == before
    worker.close()


def test_a_version_that_does_not_load_is_an_error_on_both_sides(
    vllm_config: VllmConfig, worker: OneWorker, policy: nn.Module, monkeypatch: pytest.MonkeyPatch
) -> None:
    info = TrainerInitInfo(rank=0, world_size=2, strategy=PATCH)
    trainer = WeightTransferTrainerFactory.trainer_init(info, client=worker, source=ModuleSource(policy))
    train(policy, 0.01)
    with monkeypatch.context() as patched:
        patched.setattr(type(worker.model), "load_weights", _refuse)
        patched.setattr(ModelLoader, "takes_patches", False)  # so that all weights are loaded
        with pytest.raises(SyncFailedError, match="no room for"):
            trainer.send_weights()
    assert worker.engine.version is None
    assert worker.weight_version == "default"
    train(policy, 0.01)
    trainer.send_weights()
    assert worker.engine.version == 2
    assert_same(worker.model, loaded_by_vllm(vllm_config, policy))
    trainer.shutdown()


def test_chunks_that_would_wait_for_a_call_that_comes_later(worker: OneWorker, policy: nn.Module) -> None:
    strategy = WeightStrategy("state_dict", encoding=BucketEncoding(bucket_size=20_000), max_in_flight=2)
    info = TrainerInitInfo(rank=0, world_size=2, timeout=20.0, strategy=strategy, in_chunks=True)
    with pytest.raises(ValueError, match="in_chunks=True cannot be combined with max_in_flight"):
        WeightTransferTrainerFactory.trainer_init(info, client=worker, source=ModuleSource(policy))
    info = replace(info, in_chunks=False)
    trainer = WeightTransferTrainerFactory.trainer_init(info, client=worker, source=ModuleSource(policy))
    train(policy)
    trainer.send_weights()
    assert worker.engine.version == 1
    trainer.shutdown()


class Stages(ModuleSource):
    """A source of a pipeline, whose second rank has the last weights."""

    @cached_property
    def metadata(self) -> list[ParamMeta]:
        whole = ModuleSource(self._module).metadata
        return [replace(meta, owners=(int(meta.name == "lm_head.weight"),)) for meta in whole]


@pytest.mark.parametrize("rank", [0, 1])
def test_weights_that_rank_0_does_not_have(worker: OneWorker, policy: nn.Module, rank: int) -> None:
    info = TrainerInitInfo(rank=rank, world_size=2)
    with pytest.raises(ValueError, match=r"rank 0 sends all weights, but .* give it these: lm_head\.weight;"):
        WeightTransferTrainerFactory.trainer_init(info, client=worker, source=Stages(policy))


def _refuse(self: nn.Module, weights: Any) -> None:
    name, _ = next(iter(weights))
    raise ValueError(f"no room for {name}")


def test_after_workers_could_not_join(
    vllm_config: VllmConfig, worker: OneWorker, policy: nn.Module, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Both ends are as before: the worker has no sender, and the trainer's port is free."""
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
    info = TrainerInitInfo(rank=0, world_size=2, master_port=port)
    with monkeypatch.context() as patched:
        patched.setattr(type(worker.model), "load_weights", _refuse)
        with pytest.raises(
            (ValueError, SyncFailedError), match="no room for"
        ):  # of the worker, or of the sender
            WeightTransferTrainerFactory.trainer_init(info, client=worker, source=ModuleSource(policy))
    worker.start_weight_update()
    with pytest.raises(RuntimeError, match="call init_weight_transfer_engine"):
        worker.update_weights({})
    trainer = WeightTransferTrainerFactory.trainer_init(info, client=worker, source=ModuleSource(policy))
    assert_same(worker.model, loaded_by_vllm(vllm_config, policy))
    trainer.shutdown()


def test_an_update_waits_for_vllm(worker: OneWorker, policy: nn.Module) -> None:
    with DistributedWeightSyncScheme(strategy="state_dict", timeout=0.5) as scheme:
        join(scheme, worker, policy)
        before = tensors(worker.model)
        train(policy)
        with pytest.raises(SyncFailedError):
            scheme.send()
        assert_same(worker.model, before)
        worker.start_weight_update()
        worker.update_weights({"timeout": 20.0})  # the next version, whichever it is
        worker.finish_weight_update()
        assert worker.engine.version == 1


def test_several_workers_need_the_number_of_a_version(
    worker: OneWorker, policy: nn.Module, monkeypatch: pytest.MonkeyPatch
) -> None:
    with DistributedWeightSyncScheme(strategy="state_dict") as scheme:
        join(scheme, worker, policy)
        monkeypatch.setattr(worker.engine.parallel_config, "world_size", 2)
        worker.start_weight_update()
        with pytest.raises(ValueError, match="several workers must load the same version"):
            worker.update_weights({})


def test_calls_for_other_versions_are_errors(worker: OneWorker, policy: nn.Module) -> None:
    worker.start_weight_update()
    with pytest.raises(RuntimeError, match="call init_weight_transfer_engine"):
        worker.update_weights({})
    with pytest.raises(ValueError, match="Invalid init_info"):
        worker.init_weight_transfer_engine({"packed": True})
    with DistributedWeightSyncScheme(strategy="state_dict") as scheme:
        join(scheme, worker, policy)
        worker.start_weight_update()
        with pytest.raises(SyncTimeoutError, match="version 7 did not arrive"):
            worker.update_weights({"version": 7, "timeout": 0.2})
        handle = scheme.send_async()
        worker.start_weight_update()
        worker.update_weights({"version": 1})
        handle.wait(10.0)
        worker.finish_weight_update()
        worker.start_weight_update()
        with pytest.raises(LifecycleError, match="has version 1; call update_weights with version 1"):
            worker.update_weights({"version": 0})


def test_a_trainer_that_sends_more_weights_than_the_one_before(
    vllm_config: VllmConfig, worker: OneWorker, policy: nn.Module
) -> None:
    """The worker finds out how the others are stored, too, and then takes patches of all weights."""
    few = WeightStrategy("state_dict", select=["model.layers.0."])
    with DistributedWeightSyncScheme(strategy=few) as scheme:
        join(scheme, worker, policy)
    with DistributedWeightSyncScheme(strategy=PATCH) as scheme:
        join(scheme, worker, policy)
        for reloaded in (False, True):
            train(policy, 0.01)
            send(scheme, worker)
            assert_same(worker.model, loaded_by_vllm(vllm_config, policy))
            assert (worker.engine.loader.last_patch is not None) is reloaded
        assert worker.engine.loader.last_patch.in_place == len(policy.state_dict())


def test_a_worker_that_starts_again_gets_the_newest_version(
    vllm_config: VllmConfig, worker: OneWorker, policy: nn.Module
) -> None:
    with DistributedWeightSyncScheme(strategy=PATCH) as scheme:
        join(scheme, worker, policy)
        train(policy)
        send(scheme, worker)
        worker.close()
        again = OneWorker(vllm_config, worker.model)
        again.init_weight_transfer_engine(init_info(scheme))
        assert again.engine.version == 1
        train(policy, 0.01)
        send(scheme, again)
        assert_same(again.model, loaded_by_vllm(vllm_config, policy))
        assert again.engine.loader.last_patch.reloaded == 0
        again.close()


def test_a_lost_trainer_ends_the_wait(worker: OneWorker, policy: nn.Module) -> None:
    scheme = DistributedWeightSyncScheme(strategy="state_dict")
    join(scheme, worker, policy)
    scheme.shutdown()
    worker.start_weight_update()
    with pytest.raises(LinkClosedError):
        worker.update_weights({"version": 1, "timeout": 50.0})


def test_bf16_patches(vllm_config: VllmConfig, worker: OneWorker, policy: nn.Module) -> None:
    policy.to(torch.bfloat16)  # the worker computes in fp32
    strategy = WeightStrategy("state_dict", encoding=PatchEncoding())
    with SharedMemWeightSyncScheme(strategy) as scheme:
        join(scheme, worker, policy)
        train(policy, 0.01)
        send(scheme, worker)
        assert_same(worker.model, loaded_by_vllm(vllm_config, policy))
