"""Patches that an inference engine takes as changes of the weights that it has."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from engine_parts import Notebook, Pointing
from pairs import connect_pair
from torch import nn

from weight_update import (
    InferenceEngine,
    MemoryWeightSyncScheme,
    PatchEncoding,
    SchemaMismatchError,
    SyncFailedError,
    WeightStrategy,
    group_schemes,
    send_together,
)
from weight_update.testing import Zoo, fingerprint

Connect = Callable[..., tuple[MemoryWeightSyncScheme, MemoryWeightSyncScheme]]


@pytest.fixture
def connect() -> Iterator[Connect]:
    """Connect a sender of a module, with patches, to a receiver with an engine; return both schemes."""
    ends: list[MemoryWeightSyncScheme] = []

    def build(source: nn.Module, engine: InferenceEngine, sender: Any = None, **options: Any) -> Any:
        sender = sender or patching(**options)
        ends.append(sender)
        ends.append(connect_pair(sender, source, engine))
        return sender, ends[-1]

    yield build
    for end in reversed(ends):
        end.shutdown()


def net(seed: int) -> nn.Sequential:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(64, 64), nn.Identity(), nn.Linear(64, 64))


def patching(timeout: float = 20.0, **options: Any) -> MemoryWeightSyncScheme:
    strategy = WeightStrategy("state_dict", encoding=PatchEncoding(**options))
    return MemoryWeightSyncScheme(strategy, timeout=timeout)


def weights_of(source: nn.Module) -> dict[str, str]:
    return fingerprint(WeightStrategy("state_dict").named(source).tensors)


def change_some(source: nn.Module, seed: int) -> None:
    """Change about one element of six, in every second weight."""
    generator = torch.Generator().manual_seed(seed)
    for weight in list(source.state_dict().values())[seed % 2 :: 2]:
        if isinstance(weight, torch.Tensor) and weight.numel():
            raw = weight.contiguous().view(-1).view(torch.uint8).view(weight.numel(), -1)
            chosen = torch.rand(weight.numel(), generator=generator) < 1 / 6
            raw[chosen] ^= 1
            weight.copy_(raw.view(-1).view(weight.dtype).view(weight.shape))


@pytest.mark.parametrize(
    ("make", "options"), [(Zoo, {}), (net, {"values": "relative"}), (net, {"layout": "coo"})]
)
def test_an_engine_gets_the_elements_that_changed(connect: Connect, make: Any, options: Any) -> None:
    """The engine itself checks that changed elements make the whole weight; here all weights are checked."""
    source, engine = make(1), Notebook(changes=True)
    sender, _ = connect(source, engine, **options)
    assert [call for call, _ in engine.calls] == ["begin", "load", "finish"]
    for version in range(1, 5):
        engine.calls.clear()
        change_some(source, version)
        assert sender.send().encoding == "patch"
        (_, (call, names), _) = engine.calls
        assert call == f"changes of {version - 1}"
        assert 0 < len(names) < len(engine.loaded)
        assert fingerprint(engine.loaded) == weights_of(source)


def test_changes_are_small(connect: Connect) -> None:
    taken: list[tuple[str, Any, Any]] = []

    class Engine(Notebook):
        def load_changes(self, changes: Any, base: int) -> None:
            kept = list(changes)
            taken.extend((name, where.tolist(), new.tolist()) for name, where, new, _ in kept)
            super().load_changes(iter(kept), base)

    source = net(1)
    sender, _ = connect(source, Engine(changes=True))
    with torch.no_grad():
        source[0].weight[1, 2], source[2].bias[0] = 5.0, 7.0
    sender.send()
    columns = source[0].in_features
    assert taken == [("0.weight", [columns + 2], [5.0]), ("2.bias", [0], [7.0])]


@pytest.mark.parametrize("expected", [None, torch.bfloat16], ids=["of the sender", "bfloat16"])
def test_patches_that_always_carry_all_weights_are_a_warning(
    connect: Connect, caplog: pytest.LogCaptureFixture, expected: torch.dtype | None
) -> None:
    source = net(1)
    engine = Notebook(expected=None if expected is None else net(2).to(expected).state_dict())
    sender, _ = connect(source, engine)

    def train(steps: int, factor: float) -> list[str]:
        with torch.no_grad():
            for _ in range(steps):
                for parameter in source.parameters():
                    parameter *= factor
                sender.send()
        return [record.getMessage() for record in caplog.records if "updates, so" in record.getMessage()]

    assert train(2, 1 + 1e-6) == []
    assert train(1, 1.0) == [], "they are not in a row"
    assert train(2, 1 + 1e-6) == []
    found = train(5, 1 + 1e-6)
    assert len(found) == (1 if expected is None else 0)
    assert all("The workers take float32: if they compute in a narrower dtype" in text for text in found)


def test_an_engine_gets_unchanged_weights_that_it_stores_with_a_changed_one(connect: Connect) -> None:
    taken: list[tuple[str, int]] = []

    class Engine(Notebook):
        def load_changes(self, changes: Any, base: int) -> None:
            kept = list(changes)
            taken.extend((change.name, change.values.numel()) for change in kept)
            super().load_changes(iter(kept), base)  # which also checks the whole weights

    source = net(1)
    sender, _ = connect(source, Engine(changes=True, together=["0.weight", "2.weight"]))
    with torch.no_grad():
        source[0].weight[1, 2] = 5.0
    sender.send()
    with torch.no_grad():
        source[0].bias[0] = 7.0
    sender.send()
    assert taken == [("0.weight", 1), ("2.weight", 0), ("0.bias", 1)]


def test_an_engine_that_needs_weights_nobody_sends(connect: Connect) -> None:
    source, engine = net(1), Notebook(changes=True)
    sender, _ = connect(source, engine)
    engine.together = ["0.weight", "nobody"]
    with torch.no_grad():
        source[0].weight[1, 2] = 5.0
    with pytest.raises(SyncFailedError, match=r"needs_with\(\) of the engine names .*:\n  - nobody"):
        sender.send()
    engine.together = ()
    sender.send()
    assert fingerprint(engine.loaded) == weights_of(source)


def test_several_patches_at_once(connect: Connect) -> None:
    """A receiver that was busy gets all patches since its version, as one set of changes."""
    source, engine = Zoo(1), Notebook(changes=True)
    sender, receiver = connect(source, engine)
    with receiver.hold():
        for seed in range(1, 4):
            change_some(source, seed)
            handle = sender.send_async()
    handle.wait(20.0)
    assert [call for call, _ in engine.calls if call.startswith("changes")][-1] == "changes of 1"
    assert fingerprint(engine.loaded) == weights_of(source)


def test_the_default_loads_changed_weights_as_a_whole(connect: Connect) -> None:
    class Engine(Notebook):
        load_changes = InferenceEngine.load_changes

    source, engine = net(1), Engine(changes=True)
    sender, _ = connect(source, engine)
    engine.calls.clear()
    with torch.no_grad():
        source[0].weight[1, 2] = 5.0
    sender.send()
    assert engine.calls == [("begin", 1), ("load", ["0.weight"]), ("finish", 1)]
    assert fingerprint(engine.loaded) == weights_of(source)


def test_an_engine_without_changes_gets_all_weights(connect: Connect) -> None:
    source, engine = net(1), Notebook()
    sender, _ = connect(source, engine)
    engine.calls.clear()
    with torch.no_grad():
        source[0].weight[1, 2] = 5.0
    assert sender.send().encoding == "patch"
    assert engine.calls == [("begin", 1), ("load", list(source.state_dict())), ("finish", 1)]
    assert fingerprint(engine.loaded) == weights_of(source)


@pytest.mark.parametrize("expected", [torch.float32, torch.float64])
def test_changes_have_the_dtype_that_the_engine_expects(connect: Connect, expected: torch.dtype) -> None:
    source = net(1)
    engine = Notebook(expected=net(2).to(expected).to("meta").state_dict(), changes=True)
    sender, _ = connect(source, engine)
    with torch.no_grad():
        source[0].weight[1, 2] = 5.0
    sender.send()
    assert engine.calls[-2] == ("changes of 0", ["0.weight"])
    assert fingerprint(engine.loaded) == fingerprint(copy.deepcopy(source).to(expected).state_dict())


@pytest.mark.parametrize("place", [0, 1, "finish"])
def test_an_engine_that_fails_gets_all_weights_next(connect: Connect, place: int | str) -> None:
    source, engine = net(1), Notebook(changes=True)
    sender, receiver = connect(source, engine)
    change_some(source, 0)
    engine.fails = place
    with pytest.raises(SyncFailedError, match=f"the engine broke at {place}"):
        sender.send()
    assert engine.calls[-1] == ("abort", 1)
    assert receiver.version is None
    change_some(source, 1)
    sender.send()
    assert engine.calls[-2] == ("load", list(source.state_dict()))
    assert fingerprint(engine.loaded) == weights_of(source)


def test_an_engine_that_does_not_begin_gets_all_weights_next(connect: Connect) -> None:
    source, engine = net(1), Notebook(changes=True)
    sender, receiver = connect(source, engine)
    change_some(source, 0)
    engine.fails = "begin"
    with pytest.raises(SyncFailedError, match="the engine broke at begin"):
        sender.send()
    assert receiver.version == 0
    for version in (2, 3):
        change_some(source, version)
        assert sender.send().version == version
        assert fingerprint(engine.loaded) == weights_of(source)
    assert [call for call, _ in engine.calls[-5:]] == ["load", "finish", "begin", "changes of 2", "finish"]


def test_changes_that_an_engine_leaves(connect: Connect) -> None:
    source, engine = net(1), Notebook(changes=True)
    sender, _ = connect(source, engine)
    with torch.no_grad():
        source[0].weight[1, 2], source[2].bias[0] = 5.0, 7.0
    engine.skips = 1
    with pytest.raises(
        SyncFailedError, match=r"load_changes\(\) returned before it took all changes(.|\n)*2\.bias"
    ):
        sender.send()
    sender.send()
    assert fingerprint(engine.loaded) == weights_of(source)


def test_an_update_that_waited_too_long_for_generation(connect: Connect) -> None:
    source, engine = net(1), Notebook(changes=True)
    sender, receiver = connect(source, engine, patching(timeout=0.5))
    change_some(source, 0)
    with receiver.hold(), pytest.raises(SyncFailedError, match=r"(within|longer than) 0\.5 s"):
        sender.send()
    change_some(source, 1)
    sender.send()
    assert fingerprint(engine.loaded) == weights_of(source)


def test_a_step_of_several_models_that_is_aborted(connect: Connect) -> None:
    """A patch that had arrived, and was not put in force, leaves the engine as it was."""
    source, engine = net(1), Notebook(changes=True)
    schemes = [patching(), patching()]
    group_schemes(schemes)
    sender, _ = connect(source, engine, schemes[0])
    second, _ = connect(net(2), Notebook(), schemes[1])
    before = weights_of(source)
    change_some(source, 0)
    with pytest.raises(SchemaMismatchError):
        send_together({sender: None, second: {"unknown": torch.ones(1)}})
    assert fingerprint(engine.loaded) == before
    change_some(source, 1)
    sender.send()
    assert fingerprint(engine.loaded) == weights_of(source)


# -- engines that keep the tensors ---------------------------------------------------------------------


def test_patches_alternate_between_two_copies(connect: Connect) -> None:
    source, engine = Zoo(1), Pointing()
    sender, _ = connect(source, engine)
    places = set()
    for version in range(1, 8):
        if version == 4:  # comes as a whole
            source.load_state_dict(Zoo(99).state_dict())
        else:
            change_some(source, version)
        assert sender.send().encoding == ("bucket" if version == 4 else "patch")
        assert engine.loaded == weights_of(source)
        if version > 4:
            places.add(engine.kept["special"].data_ptr())
    assert len(places) == 2


def test_an_engine_that_keeps_tensors_and_was_busy(connect: Connect) -> None:
    source, engine = net(1), Pointing()
    sender, receiver = connect(source, engine)
    for seed in range(1, 9):
        with receiver.hold():
            for _ in range(2):
                change_some(source, seed)
                handle = sender.send_async()
            engine.require_unchanged()
        handle.wait(20.0)
        assert engine.loaded == weights_of(source)


def test_an_aborted_step_leaves_the_kept_tensors(connect: Connect) -> None:
    source, engine = net(1), Pointing()
    schemes = [patching(), patching()]
    group_schemes(schemes)
    sender, _ = connect(source, engine, schemes[0])
    second, _ = connect(net(2), Notebook(), schemes[1])
    for seed in range(4):
        before, state = dict(engine.loaded), copy.deepcopy(source.state_dict())
        change_some(source, seed)
        with pytest.raises(SchemaMismatchError):
            send_together({sender: None, second: {"unknown": torch.ones(1)}})
        engine.require_unchanged()
        assert engine.loaded == before
        source.load_state_dict(state)  # the next patch does not overwrite what was aborted
        change_some(source, seed + 10)
        report = sender.send()
        assert report.encoding == "patch"
        assert engine.loaded == weights_of(source)


def test_an_engine_that_keeps_tensors_and_fails(connect: Connect) -> None:
    source, engine = net(1), Pointing()
    sender, receiver = connect(source, engine)
    for seed in range(4):
        change_some(source, seed)
        engine.fails = seed % 2 == 0
        if engine.fails:
            with pytest.raises(SyncFailedError, match="the engine broke"):
                sender.send()
            assert receiver.version is None
        else:
            sender.send()
            assert engine.loaded == weights_of(source)
