"""The adapter for SGLang, and engines in which generation and updates take turns.

SGLang is not installed here. The stand-in below has the methods of its documented interface, with the same
names, arguments and answers, and no more.
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
from weight_update.engines import ExclusiveEngine, SGLangEngine
from weight_update.testing import fingerprint, mlp, scramble

WAIT = 20.0


# -- stand-ins -----------------------------------------------------------------------------------------


class StandInModel:
    """``load_weights(weights: Iterable[tuple[str, Tensor]])``, as SGLang's models have it."""

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
