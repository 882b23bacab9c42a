"""The adapters for vLLM and SGLang.

Neither package is installed here. The stand-ins below have the methods of their documented interfaces, with
the same names, arguments and answers, and no more; vLLM's workers are processes, as they are there.
"""

from __future__ import annotations

import copy
import threading
from collections.abc import Iterable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from weight_update import (
    BucketEncoding,
    LifecycleError,
    MemoryWeightSyncScheme,
    SyncFailedError,
    SyncTimeoutError,
    WeightStrategy,
)
from weight_update.engines import ExclusiveEngine, SGLangEngine, VLLMEngine, WorkerExtension
from weight_update.testing import fingerprint, mlp, scramble
from weight_update.testing.workers import RemoteObject

WAIT = 20.0


# -- stand-ins -----------------------------------------------------------------------------------------


class StandInModel:
    """``load_weights(weights: Iterable[tuple[str, Tensor]])``, as vLLM's and SGLang's models have it."""

    def __init__(self) -> None:
        self.weights: dict[str, torch.Tensor] = {}
        self.refuses: str | None = None

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> set[str]:
        names = set()
        for name, tensor in weights:
            if name == self.refuses:
                raise ValueError(f"no parameter named {name!r}")
            self.weights[name] = tensor
            names.add(name)
        return names


class StandInWorker(WorkerExtension):
    """A worker of vLLM, into which it mixes ``worker_extension_cls``."""

    def __init__(self) -> None:
        self.model_runner = SimpleNamespace(model=StandInModel())
        self.device = torch.device("cpu")

    def fingerprint(self) -> dict[str, str]:
        return fingerprint(self.model_runner.model.weights)

    def refuse(self, name: str | None) -> None:
        self.model_runner.model.refuses = name

    def end(self) -> None:
        """Do nothing; the process ends."""


class StandInLLM:
    """``vllm.LLM`` with two workers.

    It has ``collective_rpc(method, timeout, args, kwargs)``, ``reset_prefix_cache()`` and ``generate(...)``.
    """

    def __init__(self) -> None:
        self.workers = [RemoteObject(StandInWorker) for _ in range(2)]
        self.calls: list[str] = []
        self.resets = True

    def collective_rpc(
        self,
        method: str,
        timeout: float | None = None,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> list[Any]:
        self.calls.append(method)
        for worker in self.workers:
            worker.post(method, *args, **(kwargs or {}))
        if any(worker.busy(timeout) for worker in self.workers):
            raise TimeoutError(method)
        errors, values = [], []
        for worker in self.workers:
            try:
                values.append(worker.answer())
            except ValueError as error:
                errors.append(error)
        if errors:
            raise errors[0]
        return values

    def reset_prefix_cache(self) -> bool:
        self.calls.append("reset_prefix_cache")
        return self.resets

    def generate(self, prompts: Any, sampling_params: Any = None) -> list[str]:
        return [f"{prompt}, {sampling_params}" for prompt in prompts]

    def close(self) -> None:
        for worker in self.workers:
            worker.stop()


class StandInSGLang:
    """``sglang.Engine``.

    It has ``update_weights_from_tensor(named_tensors, load_format, flush_cache)``, ``flush_cache()`` and
    ``generate(...)``.
    """

    def __init__(self) -> None:
        self.model = StandInModel()
        self.calls: list[Any] = []
        self.flushes = True

    def update_weights_from_tensor(
        self,
        named_tensors: list[tuple[str, torch.Tensor]],
        load_format: str | None = None,
        flush_cache: bool = True,
    ) -> tuple[bool, str]:
        assert load_format is None
        self.calls.append(len(named_tensors))
        if flush_cache:
            self.flush_cache()
        for _, tensor in named_tensors:
            tensor.share_memory_()  # as its serializer does, to the whole storage
        try:
            self.model.load_weights(named_tensors)
        except ValueError as error:
            return False, str(error)
        return True, "Success"

    def flush_cache(self) -> SimpleNamespace:
        self.calls.append("flush_cache")
        return SimpleNamespace(success=self.flushes, message="")

    def generate(self, prompt: Any = None, sampling_params: Any = None) -> dict[str, str]:
        return {"text": f"{prompt}, {sampling_params}"}


@pytest.fixture
def llm() -> Iterator[StandInLLM]:
    stand_in = StandInLLM()
    yield stand_in
    stand_in.close()


@pytest.fixture
def connected() -> Iterator[Any]:
    schemes = []

    def connect(source: Any, engine: Any, size: int = 64, limit: int | None = None) -> Any:
        strategy = WeightStrategy("state_dict", encoding=BucketEncoding(size), max_in_flight=limit)
        scheme = MemoryWeightSyncScheme(strategy, timeout=WAIT)
        scheme.init_on_sender(model=source, num_workers=1)
        receiver = copy.copy(scheme)
        receiver.init_on_receiver(model=engine, worker_idx=0)
        schemes.extend([receiver, scheme])
        thread = threading.Thread(target=receiver.connect)
        thread.start()
        scheme.connect()
        thread.join(WAIT)
        return scheme

    yield connect
    for scheme in schemes:
        scheme.shutdown()


def tensors_of(source: Any) -> dict[str, str]:
    return fingerprint(dict(source.state_dict()))


# -- tests ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("in_chunks", [False, True], ids=["staged", "in chunks"])
@pytest.mark.parametrize("batch_bytes", [1, 150, 1 << 20])
def test_vllm(llm: StandInLLM, connected: Any, batch_bytes: int, in_chunks: bool) -> None:
    source = mlp(1)
    engine = VLLMEngine(llm, batch_bytes=batch_bytes, loads_in_chunks=in_chunks)
    with pytest.raises(LifecycleError, match="no complete version"):
        engine.generate(["hello"])
    scheme = connected(source, engine, limit=2 if in_chunks else None)
    for seed in range(2, 4):
        scramble(source, seed, finite=True)
        llm.calls.clear()
        scheme.send()
        assert llm.calls[-1] == "reset_prefix_cache"
        assert set(llm.calls[:-1]) == {"load_shared_weights"}
        assert llm.collective_rpc("fingerprint") == [tensors_of(source)] * 2
    assert engine.generate(["hello"], "greedy") == ["hello, greedy"]
    assert engine.version == 2


def test_vllm_that_does_not_know_a_weight(llm: StandInLLM, connected: Any) -> None:
    engine = VLLMEngine(llm)
    scheme = connected(mlp(1), engine)
    llm.collective_rpc("refuse", args=("2.weight",))
    with pytest.raises(SyncFailedError, match=r"no parameter named '2\.weight'"):
        scheme.send()
    with pytest.raises(LifecycleError, match="no complete version"):
        engine.generate(["hello"])
    llm.collective_rpc("refuse", args=(None,))
    scheme.send()
    assert engine.generate(["hello"]) == ["hello, None"]


def test_vllm_that_keeps_its_cache(llm: StandInLLM, connected: Any) -> None:
    scheme = connected(mlp(1), VLLMEngine(llm))
    llm.resets = False
    with pytest.raises(SyncFailedError, match="did not reset its prefix cache"):
        scheme.send()


@pytest.mark.parametrize("in_chunks", [False, True], ids=["staged", "in chunks"])
def test_sglang(connected: Any, in_chunks: bool) -> None:
    source, stand_in = mlp(1), StandInSGLang()
    engine = SGLangEngine(stand_in, batch_bytes=100, loads_in_chunks=in_chunks)
    scheme = connected(source, engine, limit=2 if in_chunks else None)
    for seed in range(2, 4):
        scramble(source, seed, finite=True)
        stand_in.calls.clear()
        scheme.send()
        assert stand_in.calls.count("flush_cache") == 1
        assert stand_in.calls[-1] == "flush_cache"
        assert sum(stand_in.calls[:-1]) == 4
        assert fingerprint(stand_in.model.weights) == tensors_of(source)
    assert engine.generate("hello", {"temperature": 0}) == {"text": "hello, {'temperature': 0}"}


def test_sglang_that_fails(connected: Any) -> None:
    stand_in = StandInSGLang()
    engine = SGLangEngine(stand_in)
    scheme = connected(mlp(1), engine)
    stand_in.model.refuses = "0.bias"
    with pytest.raises(SyncFailedError, match=r"SGLang did not load '0\.weight' to '2\.bias'.*'0\.bias'"):
        scheme.send()
    stand_in.model.refuses = None
    stand_in.flushes = False
    with pytest.raises(SyncFailedError, match="did not flush its cache"):
        scheme.send()
    with pytest.raises(LifecycleError, match="no complete version"):
        engine.generate("hello")
    stand_in.flushes = True
    scheme.send()
    assert engine.generate("hello") == {"text": "hello, None"}


class Idle(ExclusiveEngine):
    def load_weights(self, weights: Iterator[tuple[str, torch.Tensor]]) -> None:
        self.loaded = dict(weights)


def test_generation_and_updates_take_turns() -> None:
    engine = Idle(timeout=0.05)
    engine.begin_update(0)
    with pytest.raises(SyncTimeoutError, match="an update took longer"), engine.generating():
        pass
    engine.finish_update(0)
    with engine.generating(), pytest.raises(SyncTimeoutError, match="generation took longer"):
        engine.begin_update(1)
    engine.begin_update(1)
    engine.finish_update(1)
    assert engine.version == 1
