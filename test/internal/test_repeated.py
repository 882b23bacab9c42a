"""A source that is read again and again: whatever changes in it is seen at the next read."""

from __future__ import annotations

import copy
from collections import OrderedDict
from collections.abc import Callable
from typing import Any

import pytest
import torch
from marks import slow
from structure_parts import (
    CHANGES,
    Layer,
    Model,
    Sharded,
    extra_state,
    first,
    loaded,
    other_memory,
    other_values,
    own_state_dict,
    removed_parameter,
    replaced,
    replaced_dict,
    transposed,
)
from tensordict import TensorDict
from torch import nn

from weight_update import DenseEncoding, MemoryWeightSyncScheme, SchemaMismatchError, WeightStrategy
from weight_update.strategy import repeated
from weight_update.strategy.named_weights import NamedWeights
from weight_update.strategy.repeated import RepeatedRead
from weight_update.testing import fingerprint, scramble
from weight_update.testing.worker_processes import start_workers
from weight_update.wire import fixed, unchanged
from weight_update.wire.fixed import MANY, FixedTensors
from weight_update.wire.schema import WeightSchema


class Reads:
    """Reads of one source, each compared with one that knows nothing of the reads before."""

    def __init__(self, source: Any, mode: str) -> None:
        self.source, self.strategy = source, WeightStrategy(mode)
        self.repeated = RepeatedRead(self.strategy)
        self.schema = self.strategy.named(source).schema()
        self.encoder = DenseEncoding().encoder(self.schema)
        self.slot = torch.zeros(self.schema.nbytes, dtype=torch.uint8)

    def read(self) -> NamedWeights:
        found, fresh = self.repeated.outgoing(self.source, None), self.strategy.outgoing(self.source)
        assert list(found.tensors) == list(fresh.tensors)
        for ours, theirs in zip(found.tensors.values(), fresh.tensors.values(), strict=True):
            assert ours is theirs or (ours.dtype is theirs.dtype and torch.equal(ours, theirs))
        assert found.extra == fresh.extra
        assert self.outcome(found) == self.outcome(fresh)
        return found

    def outcome(self, named: NamedWeights) -> str | bytes:
        """Return the bytes that are sent, or the error."""
        self.slot.zero_()
        try:
            named.require_agreed(self.schema, more=False)
        except SchemaMismatchError as error:
            return str(error)
        (payload,) = self.encoder.encode(named.in_order(self.schema.names), lambda _: self.slot)
        return payload.numpy().tobytes()

    def settle(self) -> NamedWeights:
        """Read until nothing is left to remember."""
        self.read()
        self.read()
        named = self.read()
        assert named.fixed is not None
        return named


@pytest.fixture(params=["as installed", "python"])
def comparisons(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Run a test with the compiled comparisons, and without."""
    if request.param == "python":
        monkeypatch.setattr(unchanged, "library", None)


@pytest.fixture(
    params=[
        ("as installed", "tensordict"),
        slow(("as installed", "state_dict")),
        ("python", "state_dict"),
        slow(("python", "tensordict")),
    ],
    ids="-".join,
)
def mode(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Return how a strategy reads weights; its comparisons are compiled or not."""
    comparisons, mode = request.param
    if comparisons == "python":
        monkeypatch.setattr(unchanged, "library", None)
    return str(mode)


@pytest.fixture
def reads(mode: str) -> Reads:
    return Reads(Model(), mode)


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
def test_a_change_is_seen(reads: Reads, change: Callable[[Model], Any]) -> None:
    reads.settle()
    change(reads.source)
    for _ in range(2):  # in the last of four reads, what came after the change is remembered
        reads.read()
        other_values(reads.source)
        reads.read()


def test_a_broken_module(reads: Reads) -> None:
    reads.settle()
    del first(reads.source).drop.__dict__["_buffers"]
    with pytest.raises(AttributeError, match="_buffers"):
        reads.read()


def test_an_unchanged_module_is_not_searched_again(reads: Reads) -> None:
    named = reads.settle()
    other_values(reads.source)
    again = reads.read()
    assert again.tensors is named.tensors
    assert again.fixed is named.fixed
    replaced(reads.source)
    assert reads.read().tensors is not named.tensors
    assert reads.settle().tensors is not named.tensors  # it is known again


@pytest.mark.parametrize(
    ("kind", "method", "replacement"),
    [
        (Model, "get_extra_state", lambda model: "other"),
        (nn.Linear, "get_extra_state", lambda module: "new"),
        (Model, "state_dict", own_state_dict),
        (nn.LayerNorm, "_save_to_state_dict", lambda *_: None),
        (Model, "named_parameters", lambda model, **_: iter([("own", nn.Parameter(torch.ones(3)))])),
        (Layer, "named_modules", lambda module, memo, prefix, duplicates: [(prefix, module)]),
        (nn.Linear, "_parameters", {}),
    ],
)
def test_a_class_that_changes(
    reads: Reads, monkeypatch: pytest.MonkeyPatch, kind: type, method: str, replacement: Any
) -> None:
    reads.settle()
    monkeypatch.setattr(kind, method, replacement, raising=False)
    for _ in range(3):
        reads.read()


def test_a_module_with_a_way_of_its_own(mode: str) -> None:
    model = Sharded()
    reads = Reads(model, mode)
    for _ in range(4):
        other_values(model)
        reads.read()
    replaced(model)
    reads.read()


def test_inside_torch_compile(mode: str) -> None:
    wrapper = torch.compile(Model(), backend="eager")
    reads = Reads(wrapper, mode)
    for _ in range(4):
        reads.read()
    replaced(wrapper._orig_mod)
    reads.read()
    wrapper._orig_mod = Model()
    for _ in range(4):
        reads.read()


def test_sources_that_are_no_modules(mode: str) -> None:
    model = Model()
    for source in (
        dict(model.state_dict()),
        TensorDict.from_module(model).data,
        lambda: model,
        lambda: dict(model.state_dict(keep_vars=True)),
    ):
        reads = Reads(source, mode)
        reads.settle()
        other_memory(model)
        reads.read()
        other_values(model)
        reads.read()


def test_an_ordered_dict_whose_entries_are_moved(reads: Reads) -> None:
    """Exchange two tensors so that the order of the keys, and that of the values in memory, stay the same."""
    left = first(reads.source).left
    held = OrderedDict(left._parameters)
    left._parameters = held
    reads.settle()
    a, b = held.pop("a"), held["b"]
    held["b"], held["a"] = a, b
    held.move_to_end("b")
    reads.read()


class Wrapped(torch.Tensor):
    """A kind of tensor that may not mean what is in its memory."""


@pytest.mark.usefixtures("comparisons")
def test_a_tensor_of_another_kind() -> None:
    tensors: dict[str, torch.Tensor] = dict(Model().state_dict())
    reads = Reads(tensors, "tensordict")
    reads.settle()
    name = "head.weight"
    tensors[name] = tensors[name].as_subclass(Wrapped)
    assert reads.read().fixed is None


@pytest.mark.usefixtures("comparisons")
@pytest.mark.parametrize(
    "other", [torch.ones(4).to_sparse(), torch.ones(4, device="meta")], ids=["sparse", "meta"]
)
def test_a_tensor_without_memory(other: torch.Tensor) -> None:
    tensors = {str(i): torch.ones(4) for i in range(MANY)}
    fixed = FixedTensors.of(tensors)
    assert fixed is not None
    assert fixed.unchanged(tensors)
    assert not fixed.unchanged({**tensors, "7": other})


@pytest.mark.usefixtures("comparisons")
def test_a_buffer_called_like_extra_state() -> None:
    model = Model()
    model.head.register_buffer("_extra_state", torch.ones(1))
    reads = Reads(model, "state_dict")
    for _ in range(4):
        assert "head._extra_state" in reads.read().extra


@pytest.mark.usefixtures("comparisons")
def test_the_source_changes_from_call_to_call() -> None:
    models = [Model(), Model()]
    reads = Reads(lambda: models[0], "tensordict")
    reads.settle()
    for _ in range(4):
        models.reverse()
        reads.read()


def test_the_choice_of_names_changes(reads: Reads) -> None:
    reads.settle()
    names = list(reads.strategy.named(reads.source).tensors)
    for chosen in (frozenset(names[:300]), frozenset(names[1:301]), None):
        for _ in range(3):
            found = reads.repeated.outgoing(reads.source, chosen)
            assert list(found.tensors) == [name for name in names if chosen is None or name in chosen]


@pytest.mark.usefixtures("comparisons")
def test_no_model_is_kept_alive_that_is_read_once() -> None:
    repeated = RepeatedRead(WeightStrategy())
    ended = [False]

    class Ending(Model):
        def __del__(self) -> None:
            ended[0] = True

    model = Ending()
    repeated.outgoing(model, None)
    del model
    assert ended[0]


@pytest.mark.usefixtures("comparisons")
def test_large_tensors_are_not_kept_alive() -> None:
    model = nn.ParameterList(nn.Parameter(torch.zeros(2048)) for _ in range(300))
    repeated = RepeatedRead(WeightStrategy())
    for _ in range(4):
        assert repeated.outgoing(model, None).fixed is None


@pytest.mark.usefixtures("comparisons")
def test_large_tensors_are_not_looked_at_in_vain(monkeypatch: pytest.MonkeyPatch) -> None:
    looks: list[torch.Tensor] = []
    structures: list[list[nn.Module]] = []

    def looked_at(tensor: torch.Tensor) -> bool:
        looks.append(tensor)
        return True

    class Parts(unchanged.ModuleParts):
        def __init__(self, parts: list[nn.Module], *, as_state_dict: bool) -> None:
            structures.append(parts)
            super().__init__(parts, as_state_dict=as_state_dict)

    monkeypatch.setattr(fixed, "is_plain", looked_at)
    monkeypatch.setattr(repeated, "ModuleParts", Parts)
    model = nn.ParameterList([*(torch.zeros(4) for _ in range(300)), torch.zeros(1 << 20)])
    reads = Reads(model, "tensordict")
    for _ in range(6):
        reads.read()
    assert (looks, structures) == ([], [])


def test_workers_get_what_changed(mode: str) -> None:
    model = Model()
    scheme = MemoryWeightSyncScheme(strategy=mode, timeout=20.0, connect_timeout=30.0)
    with start_workers(scheme, [Model()], "thread", model=model) as workers:

        def update(seed: int) -> None:
            scramble(model, seed)
            scheme.send()
            expected = fingerprint(copy.deepcopy(model).float(), scheme.strategy)
            assert workers.workers[0].call("fingerprint") == expected

        for seed in range(4):
            update(seed)
        for change in (
            replaced,
            other_memory,
            transposed,
            loaded,
            extra_state,
            replaced_dict,
            Model.bfloat16,
        ):
            change(model)
            for seed in range(3):
                update(seed)
        removed_parameter(model)
        with pytest.raises(SchemaMismatchError, match=r"layers\.0\.up\.bias"):
            scheme.send()


@pytest.mark.usefixtures("comparisons")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64, torch.int16, torch.bool])
def test_all_bits_arrive(dtype: torch.dtype) -> None:
    """Sizes with and without whole words, more than one call takes, ties, empty tensors and scalars."""
    shapes = [(64,), (8, 8), (4,), (5,), (0,), (), (3, 4), (12,)] * 60 + [(5, 8)] * 400
    tensors = {str(i): torch.randn(shape).mul(100).to(dtype) for i, shape in enumerate(shapes)}
    tensors["7"] = tensors["tied"] = tensors["0"]
    reads = Reads(tensors, "tensordict")
    assert isinstance(reads.schema, WeightSchema)
    for _ in range(3):
        reads.settle()
        for value in tensors.values():
            value.copy_(torch.randn(value.shape).mul(100))
