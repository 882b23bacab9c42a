"""Patches of few elements into a model whose tensors are copies of the receiver's buffer."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from pairs import connect_pair, same
from torch import nn

from weight_update import MemoryWeightSyncScheme, PatchEncoding, SyncFailedError, WeightStrategy
from weight_update.receiver import elements, flat_buffers

WAIT = 20.0


class Noted(nn.Module):
    """A module whose extra state it may refuse; two of its weights are tied."""

    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Parameter(torch.zeros(64, 64, dtype=torch.bfloat16))
        self.b = nn.Parameter(torch.zeros(500))
        self.c = self.b
        self.note, self.refuses = torch.zeros(()), False

    def get_extra_state(self) -> torch.Tensor:
        return self.note

    def set_extra_state(self, note: torch.Tensor) -> None:
        if self.refuses:
            raise ValueError("not this note")
        self.note = note


@pytest.fixture(params=["raw", "relative"])
def sender(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """A scheme for a stable model; tensors of all sizes count as large."""
    monkeypatch.setattr(elements, "_LARGE", 0)
    encoding = PatchEncoding(values=request.param)
    strategy = WeightStrategy("state_dict", encoding=encoding)
    with MemoryWeightSyncScheme(strategy=strategy, timeout=WAIT, stable_addresses=True) as scheme:
        yield scheme


@torch.no_grad()
def change(model: Noted, position: int) -> None:
    """Change one element of each weight."""
    model.a.view(-1)[position] += 1
    model.b[position] += 1


def test_only_elements_that_change_are_written(sender: Any) -> None:
    source = Noted()
    target = copy.deepcopy(source)
    with connect_pair(sender, source, target):
        addresses = [one.data_ptr() for one in target.parameters()]
        target.b.data[100] = 9.0  # not counted by torch
        for position in (3, 4):
            writes = target.b._version
            change(source, position)
            assert sender.send().encoding == "patch"
            assert target.b._version > writes
        assert target.b[100] == 9.0
        target.b.data[100] = 0.0
        assert same(source, target)
        assert addresses == [one.data_ptr() for one in target.parameters()]


def test_many_elements_are_copied_with_the_others(sender: Any) -> None:
    source = Noted()
    target = copy.deepcopy(source)
    with connect_pair(sender, source, target), torch.no_grad():
        target.b.data[400] = 9.0  # not counted by torch
        source.b[:300] += 1
        assert sender.send().encoding == "patch"
        assert same(source, target)


def test_a_weight_that_lies_otherwise_is_copied(sender: Any) -> None:
    source = Noted()
    target = copy.deepcopy(source)
    target.a = nn.Parameter(torch.zeros(64, 64, dtype=torch.bfloat16).t())
    with connect_pair(sender, source, target):
        change(source, 3)
        assert sender.send().encoding == "patch"
        assert same(source, target)


def test_a_dict_gets_elements_too(sender: Any) -> None:
    source, target = {"a": torch.zeros(1000)}, {"a": torch.zeros(1000)}
    with connect_pair(sender, source, target):
        target["a"].data[100] = 9.0  # not counted by torch
        source["a"][3] = 1.0
        assert sender.send().encoding == "patch"
        assert target["a"][[3, 100]].tolist() == [1.0, 9.0]


def test_a_patch_that_failed_inside_the_gate_is_taken_back(sender: Any) -> None:
    source = Noted()
    target = copy.deepcopy(source)
    with connect_pair(sender, source, target):
        target.refuses, before = True, copy.deepcopy(target)
        change(source, 3)
        with pytest.raises(SyncFailedError, match="not this note"):
            sender.send()
        assert same(before, target)
        target.refuses = False
        change(source, 4)
        assert sender.send().encoding == "patch"
        assert same(source, target)


def test_all_weights_follow_an_error_halfway(sender: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    source = Noted()
    target = copy.deepcopy(source)
    with connect_pair(sender, source, target):
        with monkeypatch.context() as context:
            context.setattr(flat_buffers, "write_elements", fail)
            change(source, 3)
            with pytest.raises(SyncFailedError, match="can't start new thread"):
                sender.send()
        change(source, 4)
        sender.send()
        assert same(source, target)


def fail(*_: Any, **__: Any) -> None:
    raise RuntimeError("can't start new thread")


def test_a_model_that_comes_while_a_patch_waits_gets_the_version_in_force(sender: Any) -> None:
    source = Noted()
    target = copy.deepcopy(source)
    with connect_pair(sender, source, target) as receiver:
        staging, stage = receiver._receiver.staging, receiver._receiver.staging.take
        second, seen = copy.deepcopy(target), list[bool]()

        def stage_and_bind(chunk: Any) -> Any:
            update = stage(chunk)
            if update is not None:
                staging.bind(second, WAIT)
                seen.append(same(target, second))
            return update

        staging.take = stage_and_bind
        change(source, 3)
        assert sender.send().encoding == "patch"
        assert seen == [True]
        assert same(source, second)
        assert not same(source, target)


def test_a_write_of_the_worker_while_a_patch_waits_asks_for_all_weights(sender: Any) -> None:
    source = Noted()
    target = copy.deepcopy(source)
    with connect_pair(sender, source, target) as receiver:
        staging, stage = receiver._receiver.staging, receiver._receiver.staging.take

        def stage_and_write(chunk: Any) -> Any:
            update = stage(chunk)
            staging.take = stage
            with torch.no_grad():
                target.b[50] = 9.0
            return update

        staging.take = stage_and_write
        change(source, 3)
        report = sender.send()
        assert report.wire_bytes > report.dense_bytes
        assert same(source, target)
