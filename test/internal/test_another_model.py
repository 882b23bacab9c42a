"""Another model, assigned to a connected receiver: ``scheme.model = other``."""

from __future__ import annotations

import contextlib
import copy
import threading
from collections.abc import Callable, Iterator

import pytest
import torch
from engine_parts import Notebook
from pairs import PATHS, add_one, connect_pair, same
from torch import nn

from weight_update import (
    LifecycleError,
    MemoryWeightSyncScheme,
    SchemaMismatchError,
    WeightStrategy,
    WeightSyncScheme,
)
from weight_update.receiver import flat_buffers
from weight_update.testing.processes import wait_until

WAIT = 20.0

Join = Callable[[nn.Module, nn.Module], tuple[WeightSyncScheme, WeightSyncScheme]]


@pytest.fixture(params=PATHS)
def join(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[Join]:
    monkeypatch.setattr(flat_buffers, "_MANY", 1 if request.param == "flat buffer" else 1 << 30)
    options = {"encoding": "dense", "stable_addresses": False, **PATHS[request.param]}
    with contextlib.ExitStack() as stack:

        def connect(source: nn.Module, target: nn.Module) -> tuple[WeightSyncScheme, WeightSyncScheme]:
            strategy = WeightStrategy("state_dict", encoding=options["encoding"])
            stable = options["stable_addresses"]
            sender = stack.enter_context(
                MemoryWeightSyncScheme(strategy, timeout=WAIT, stable_addresses=stable)
            )
            return sender, stack.enter_context(connect_pair(sender, source, target))

        yield connect


class Noted(nn.Linear):
    """A module with extra state."""

    def __init__(self, note: int = 0) -> None:
        super().__init__(4, 4)
        self.note = note

    def get_extra_state(self) -> int:
        return self.note

    def set_extra_state(self, note: int) -> None:
        self.note = note


def net() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4))


def test_a_model_that_does_not_fit_is_not_taken(join: Join) -> None:
    source, target, other = net(), net(), net()
    sender, receiver = join(source, target)
    other[0] = nn.Linear(4, 5)
    with pytest.raises(SchemaMismatchError, match=r"the new model(.|\n)*0\.weight"):
        receiver.model = other
    assert receiver.model is target
    assert not other._forward_pre_hooks
    add_one(source)
    sender.send()
    assert same(source, target)


def test_an_engine_does_not_replace_a_model(join: Join) -> None:
    source, target = net(), net()
    sender, receiver = join(source, target)
    with pytest.raises(LifecycleError, match="create a receiver for the new engine"):
        receiver.model = Notebook()
    assert receiver.model is target
    add_one(source)
    sender.send()
    assert same(source, target)


def test_no_model_leaves_the_one_before_as_it_is(join: Join) -> None:
    source, target = net(), net()
    sender, receiver = join(source, target)
    before = copy.deepcopy(source)
    receiver.model = None
    for _ in range(3):
        add_one(source)
        sender.send()
    assert same(before, target)
    weights = receiver.receive(timeout=0)
    assert all(map(torch.equal, weights.values(), source.state_dict().values()))
    other = net()
    receiver.model = other
    assert same(source, other)


def test_it_gets_the_weights_before_a_rejoin_without_weights(join: Join) -> None:
    source, other = net(), net()
    sender, receiver = join(source, net())
    header = {"schema": next(iter(sender._sender._groups.all())).schema.to_header(), "digests": None}
    receiver._receiver.staging.begin_with({**header, **next(iter(sender._sender._groups.all())).welcome()})
    receiver.model = other
    assert same(source, other)


def test_it_gets_the_extra_state_in_force(join: Join) -> None:
    source, other = Noted(7), Noted()
    _, receiver = join(source, Noted())
    receiver.model = other
    assert other.note == 7
    assert torch.equal(other.weight, source.weight)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_an_update_that_waits_comes_first(
    join: Join, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    source, other = net(), net().to(dtype)
    sender, receiver = join(source, net())
    gate, holds, ends = receiver._receiver.gate, threading.Event(), threading.Event()
    bind = receiver._receiver.bind

    def bind_while_held(model: nn.Module) -> None:
        threading.Timer(0.2, ends.set).start()
        bind(model)

    def hold() -> None:
        with receiver.hold():
            holds.set()
            ends.wait(WAIT)

    threading.Thread(target=hold).start()
    assert holds.wait(WAIT)
    add_one(source)
    handle = sender.send_async()
    wait_until(lambda: gate._updates)
    monkeypatch.setattr(receiver._receiver, "bind", bind_while_held)
    receiver.model = other
    handle.wait(WAIT)
    assert receiver.version == 1
    assert other[0].weight.dtype is dtype
    assert same(source, other.float())


def test_the_model_before_keeps_its_version(join: Join) -> None:
    source, target, other = net(), net(), net()
    for model in (source, target, other):
        model[1].weight = model[0].bias
    sender, receiver = join(source, target)
    receiver.model = other
    kept = copy.deepcopy(source)
    for _ in range(3):
        add_one(source)
        sender.send()
        assert same(source, other)
        assert same(kept, target)
    assert target[1].weight.data_ptr() == target[0].bias.data_ptr()


def test_patches_stay_patches(join: Join, caplog: pytest.LogCaptureFixture) -> None:
    source = nn.Linear(64, 64)
    sender, receiver = join(source, nn.Linear(64, 64))
    other, wide = nn.Linear(64, 64), nn.Linear(64, 64).double()
    for model in (other, wide, other, other):
        receiver.model = model
        with torch.no_grad():
            source.weight[0, 0] += 1
        assert sender.send().encoding == sender.strategy.encoding.label
        assert same(source, copy.deepcopy(model).float())
    assert "asks for all weights" not in caplog.text


def test_an_assignment_inside_hold_is_refused_at_once(join: Join) -> None:
    source, target = net(), net()
    sender, receiver = join(source, target)
    with receiver.hold():
        add_one(source)
        handle = sender.send_async()
        wait_until(lambda: receiver._receiver.gate._updates)
        with pytest.raises(LifecycleError, match=r"inside hold\(\)"):
            receiver.model = net()
    handle.wait(WAIT)
    assert same(source, target)
