"""A receiver lives as long as its scheme or its model is referred to, and leaves when both are dropped."""

from __future__ import annotations

import copy
import gc
import logging
import pickle
import threading
import weakref
from collections.abc import Iterable, Iterator
from typing import Any

import pytest
import torch
from pairs import connect_pair
from torch import nn

from weight_update import (
    DistributedWeightSyncScheme,
    InferenceEngine,
    MemoryWeightSyncScheme,
    SharedMemWeightSyncScheme,
    SyncFailedError,
    WeightSyncScheme,
)
from weight_update.testing.processes import wait_until

KINDS = [MemoryWeightSyncScheme, SharedMemWeightSyncScheme, DistributedWeightSyncScheme]


class Engine(InferenceEngine):
    """An engine that keeps the sum of its weights."""

    def __init__(self) -> None:
        self.total = 0.0

    def begin_update(self, version: int) -> None:
        """Do nothing."""

    def finish_update(self, version: int) -> None:
        """Do nothing."""

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        self.total = sum(float(weight.sum()) for _, weight in weights)


@pytest.fixture(params=KINDS)
def sender(request: pytest.FixtureRequest) -> Iterator[WeightSyncScheme]:
    with request.param(timeout=10.0) as scheme:
        yield scheme
    gc.collect()


def make_model() -> nn.Linear:
    return nn.Linear(2, 2)


def connect_and_drop(sender: WeightSyncScheme, source: Any, target: Any) -> None:
    """Connect a receiver whose scheme nobody refers to when this returns."""
    connect_pair(sender, source, target)


def receiver_threads() -> list[threading.Thread]:
    return [one for one in threading.enumerate() if one.name.startswith("weight_update-receiver")]


def fill(model: nn.Module, value: float) -> None:
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.fill_(value)


def test_a_model_whose_scheme_was_dropped_is_kept_current(sender: WeightSyncScheme) -> None:
    source, target = make_model(), make_model()
    connect_and_drop(sender, source, target)
    gc.collect()
    for value in (1.0, 2.0):
        fill(source, value)
        assert sender.send().version == value
        assert torch.equal(target.weight, source.weight)


def test_an_engine_whose_scheme_was_dropped_is_kept_current() -> None:
    source, engine = make_model(), Engine()
    with MemoryWeightSyncScheme(timeout=10.0) as sender:
        connect_and_drop(sender, source, engine)
        gc.collect()
        fill(source, 1.0)
        sender.send()
        assert engine.total == 6.0


def test_without_model_and_scheme_the_worker_leaves(
    sender: WeightSyncScheme, caplog: pytest.LogCaptureFixture
) -> None:
    model = make_model()
    gone = weakref.ref(model)
    connect_and_drop(sender, make_model(), model)
    del model
    gc.collect()
    wait_until(lambda: not receiver_threads())
    assert gone() is None
    assert "worker 0 receives no more updates" in caplog.text
    with pytest.raises(SyncFailedError, match="worker 0: it left"):
        sender.send()


def test_a_plain_dict_needs_its_scheme(caplog: pytest.LogCaptureFixture) -> None:
    target = {name: value.clone() for name, value in make_model().state_dict().items()}
    with MemoryWeightSyncScheme("state_dict", timeout=10.0) as sender:
        connect_and_drop(sender, make_model(), target)
        gc.collect()
        wait_until(lambda: not receiver_threads())
        assert "keep one of them (the scheme, if the model is a plain dict)" in caplog.text
        with pytest.raises(SyncFailedError, match="worker 0: it left"):
            sender.send()


def test_a_model_that_replaced_another_keeps_the_receiver(sender: WeightSyncScheme) -> None:
    first, second, source = make_model(), make_model(), make_model()
    receiver = connect_pair(sender, source, first)
    receiver.model = second
    gone = weakref.ref(receiver)
    del first, receiver
    gc.collect()
    assert gone() is None
    fill(source, 1.0)
    sender.send()
    assert torch.equal(second.weight, source.weight)


@pytest.mark.parametrize("end", ["receiver", "sender"])
def test_after_the_end_a_model_is_freed_at_once(end: str, caplog: pytest.LogCaptureFixture) -> None:
    model, sender = make_model(), MemoryWeightSyncScheme(timeout=10.0)
    receiver = connect_pair(sender, make_model(), model)
    gone = weakref.ref(model)
    gc.collect()
    gc.disable()
    try:
        (receiver if end == "receiver" else sender).shutdown()
        wait_until(lambda: not receiver_threads())
        del receiver, model
        assert gone() is None
    finally:
        gc.enable()
        sender.shutdown()
    assert not [record for record in caplog.records if record.levelno >= logging.WARNING]


def test_a_copy_of_a_model_keeps_no_receiver() -> None:
    source, target = make_model(), make_model()
    with MemoryWeightSyncScheme(timeout=10.0) as sender:
        receiver = connect_pair(sender, source, target)
        copies = copy.deepcopy(target), pickle.loads(pickle.dumps(target))
        gone = weakref.ref(target)
        receiver.shutdown()
        del target, receiver
        gc.collect()
        assert gone() is None
        assert [type(one) for one in copies] == [nn.Linear, nn.Linear]
