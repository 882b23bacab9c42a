"""A source that is read again and again: whatever changes in it is seen at the next read."""

from __future__ import annotations

import copy
import types
from collections import OrderedDict
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from tensordict import TensorDict
from torch import nn
from torch.nn.utils import parametrizations, parametrize

from weight_update import DenseEncoding, MemoryWeightSyncScheme, SchemaMismatchError, WeightStrategy
from weight_update.strategy.named_weights import NamedWeights
from weight_update.strategy.repeated import RepeatedRead
from weight_update.testing import WorkerProcesses, fingerprint, scramble
from weight_update.wire.schema import WeightSchema

LAYERS = 40
MODES = ("tensordict", "state_dict")


class Layer(nn.Module):
    """Weights and biases in turns, with a buffer of each kind, sizes that leave gaps, and extra state."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down, self.norm = nn.Linear(4, 4), nn.Linear(4, 6), nn.LayerNorm(5)
        self.drop, self.left, self.right = nn.Dropout(), nn.Module(), nn.Module()
        for part, name in ((self.left, "a"), (self.left, "b"), (self.right, "c")):
            part.register_parameter(name, nn.Parameter(torch.randn(2)))
        self.register_buffer("steps", torch.zeros((), dtype=torch.int64))
        self.register_buffer("scratch", torch.zeros(3), persistent=False)
        self.register_parameter("none", None)


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Layer() for _ in range(LAYERS))
        self.head = nn.Linear(4, 4, bias=False)
        self.calls = 0

    def get_extra_state(self) -> int:
        return self.calls

    def set_extra_state(self, state: int) -> None:
        self.calls = state


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


@pytest.fixture(params=MODES)
def reads(request: pytest.FixtureRequest) -> Reads:
    return Reads(Model(), request.param)


def first(model: Model) -> Layer:
    return model.layers[0]  # type: ignore[return-value]


def replaced(model: Model) -> None:
    first(model).up.weight = nn.Parameter(torch.randn(4, 4))


def replaced_in_dict(model: Model) -> None:
    first(model).up._parameters["weight"] = nn.Parameter(first(model).up.weight.detach().clone())


def replaced_dict(model: Model) -> None:
    up = first(model).up
    up._parameters = dict(up._parameters)
    up.weight = nn.Parameter(torch.randn(4, 4))


def replaced_dict_of_buffers(model: Model) -> None:
    layer = first(model)
    layer._buffers = dict(layer._buffers)
    layer._buffers["steps"] = torch.tensor(5)


def replaced_dict_of_modules(model: Model) -> None:
    layer = first(model)
    layer._modules = dict(layer._modules)
    layer._modules["up"] = nn.Linear(4, 4)


def replaced_buffer(model: Model) -> None:
    first(model).steps = torch.tensor(3)


def removed_parameter(model: Model) -> None:
    first(model).up.bias = None


def renamed_parameter(model: Model) -> None:
    held = first(model).up._parameters
    held["other"] = held.pop("bias")


def moved_to_the_next_dict(model: Model) -> None:
    """Give the last parameter of one module to the next one: all keys and values stay in order."""
    left, right = first(model).left._parameters, first(model).right._parameters
    kept = dict(right)
    right.clear()
    right.update(b=left.pop("b"), **kept)


def became_persistent(model: Model) -> None:
    layer = first(model)
    layer._non_persistent_buffers_set.discard("scratch")


def renamed_module(model: Model) -> None:
    held = first(model)._modules
    held["renamed"] = held.pop("norm")


def reordered(model: Model) -> None:
    held = first(model)._modules
    held["up"] = held.pop("up")


def added_module(model: Model) -> None:
    first(model).drop.add_module("inner", nn.Linear(2, 2))


def other_values(model: Model) -> None:
    with torch.no_grad():
        for value in model.parameters():
            value.add_(1.0)


def other_memory(model: Model) -> None:
    weight = first(model).up.weight
    weight.data = torch.randn(4, 4)


def transposed(model: Model) -> None:
    weight = first(model).up.weight
    weight.data = weight.data.t()


def negated(model: Model) -> None:
    weight = first(model).up.weight
    weight.data = torch._neg_view(weight.data)


def other_dtype_in_place(model: Model) -> None:
    steps = first(model).steps
    steps.data = steps.data.view(torch.float64)


def part_of_its_memory(model: Model) -> None:
    bias = first(model).up.bias
    bias.data = bias.data[:2]


def other_part_of_its_memory(model: Model) -> None:
    bias = first(model).up.bias
    bias.data = torch.randn(8)[4:]
    bias.data = bias.data.as_strided((4,), (1,), 0)


def resized(model: Model) -> None:
    first(model).steps.resize_(1)


def set_to(model: Model) -> None:
    with torch.no_grad():
        first(model).up.bias.set_(torch.randn(4))


def storage_resized(model: Model) -> None:
    bias = first(model).up.bias.detach()
    bias.untyped_storage().resize_(1 << 16)
    bias.fill_(3.0)


def swapped(model: Model) -> None:
    torch.utils.swap_tensors(first(model).up.weight, nn.Parameter(torch.randn(4, 4)))


def loaded(model: Model) -> None:
    model.load_state_dict(copy.deepcopy(model.state_dict()), assign=True)


def tied(model: Model) -> None:
    model.head.weight = first(model).up.weight


def tied_memory(model: Model) -> None:
    model.head.weight.data = first(model).up.weight.data


class Halved(nn.Module):
    def forward(self, weight: torch.Tensor) -> torch.Tensor:
        return weight / 2


def parametrized(model: Model) -> None:
    parametrize.register_parametrization(first(model).up, "weight", Halved())


def normed(model: Model) -> None:
    parametrizations.weight_norm(first(model).up)


def without_the_bias(module: nn.Module, state: dict[str, Any], prefix: str, metadata: Any) -> None:
    del state[prefix + "bias"]


def hooked(model: Model) -> None:
    first(model).up.register_state_dict_post_hook(without_the_bias)


def privately_hooked(model: Model) -> None:
    first(model).up._register_state_dict_hook(lambda *arguments: without_the_bias(*arguments))


def replace_weight(module: nn.Module, prefix: str, keep_vars: bool) -> None:
    module.weight = nn.Parameter(torch.ones(4, 4))


def hooked_before(model: Model) -> None:
    first(model).up.register_state_dict_pre_hook(replace_weight)


def own_state_dict(model: nn.Module, **options: Any) -> dict[str, torch.Tensor]:
    return {"own": torch.ones(3)}


def given_a_state_dict(model: Model) -> None:
    model.state_dict = types.MethodType(own_state_dict, model)


def part_given_a_whole_state_dict(model: Model) -> None:
    def own(destination: dict[str, Any], prefix: str, keep_vars: bool) -> None:
        destination[f"{prefix}own"] = torch.ones(1)

    first(model).up.state_dict = own


def part_given_a_state_dict(model: Model) -> None:
    first(model).up._save_to_state_dict = lambda destination, prefix, keep_vars: None


def given_names(model: Model) -> None:
    model.named_parameters = nn.Linear(2, 2).named_parameters


def part_given_modules(model: Model) -> None:
    inner, shown = first(model).up, nn.Linear(1, 1)
    inner.named_modules = lambda memo, prefix, duplicates: [(prefix, inner), (prefix + ".x", shown)]


class Sharded(Model):
    """A module that finds its weights itself, as FSDP's does."""

    def state_dict(self, **options: Any) -> dict[str, torch.Tensor]:
        return {f"whole.{name}": value + 1 for name, value in super().state_dict(**options).items()}

    def named_parameters(self, *args: Any, **options: Any) -> Iterator[tuple[str, nn.Parameter]]:
        for name, value in super().named_parameters(*args, **options):
            yield f"whole.{name}", value


def other_class(model: Model) -> None:
    model.__class__ = Sharded


class Stateful(nn.Linear):
    def get_extra_state(self) -> str:
        return "state"


def part_of_other_class(model: Model) -> None:
    first(model).up.__class__ = Stateful


def extra_state(model: Model) -> None:
    model.calls += 1


def cleared(model: Model) -> None:
    del first(model).up.__dict__["_parameters"]
    first(model).up._parameters = {}


CHANGES: list[Callable[[Model], Any]] = [
    *(part_given_a_whole_state_dict, replaced_dict_of_buffers, replaced_dict_of_modules),
    *(replaced, replaced_in_dict, replaced_dict, replaced_buffer, removed_parameter, renamed_parameter),
    *(moved_to_the_next_dict, became_persistent, renamed_module, reordered, added_module, other_values),
    *(other_memory, transposed, negated, other_dtype_in_place, part_of_its_memory, other_part_of_its_memory),
    *(resized, set_to, storage_resized, swapped, loaded, tied, tied_memory, parametrized, normed, hooked),
    *(privately_hooked, hooked_before, given_a_state_dict, part_given_a_state_dict, given_names),
    *(part_given_modules, other_class, part_of_other_class, extra_state, cleared),
]
CALLS: dict[str, Callable[[Model], Any]] = {
    "half": lambda model: model.half(),
    "double": lambda model: model.double(),
    "one layer to bfloat16": lambda model: first(model).to(torch.bfloat16),
    "to meta": lambda model: first(model).drop.to("meta"),
    "share_memory": lambda model: model.share_memory(),
    "add a parameter": lambda model: first(model).up.register_parameter("more", nn.Parameter(torch.ones(2))),
    "fill a place": lambda model: first(model).register_parameter("none", nn.Parameter(torch.ones(2))),
    "add a buffer": lambda model: first(model).drop.register_buffer("more", torch.ones(2)),
    "remove a buffer": lambda model: delattr(first(model), "steps"),
    "replace a module": lambda model: setattr(first(model), "up", nn.Linear(4, 4)),
    "remove a module": lambda model: delattr(first(model), "norm"),
    "add a layer": lambda model: model.layers.append(Layer()),
    "remove a layer": lambda model: model.layers.pop(3),
    "exchange layers": lambda model: model.layers.insert(0, model.layers.pop(1)),
    "share a layer": lambda model: setattr(model.layers, "1", first(model)),
    "ordered dict": lambda model: setattr(
        first(model).up, "_parameters", OrderedDict(first(model).up._parameters)
    ),
}


@pytest.mark.parametrize("change", [*CHANGES, *CALLS.values()], ids=[*(c.__name__ for c in CHANGES), *CALLS])
def test_a_change_is_seen(reads: Reads, change: Callable[[Model], Any]) -> None:
    reads.settle()
    change(reads.source)
    for _ in range(4):
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


@pytest.mark.parametrize("mode", MODES)
def test_a_module_with_a_way_of_its_own(mode: str) -> None:
    model = Sharded()
    reads = Reads(model, mode)
    for _ in range(4):
        other_values(model)
        reads.read()
    replaced(model)
    reads.read()


@pytest.mark.parametrize("mode", MODES)
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


@pytest.mark.parametrize("mode", MODES)
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


class Wrapped(torch.Tensor):
    """A kind of tensor that may not mean what is in its memory."""


def test_a_tensor_of_another_kind() -> None:
    tensors: dict[str, torch.Tensor] = dict(Model().state_dict())
    reads = Reads(tensors, "tensordict")
    reads.settle()
    name = "head.weight"
    tensors[name] = tensors[name].as_subclass(Wrapped)
    assert reads.read().fixed is None


def test_a_buffer_called_like_extra_state() -> None:
    model = Model()
    model.head.register_buffer("_extra_state", torch.ones(1))
    reads = Reads(model, "state_dict")
    for _ in range(4):
        assert "head._extra_state" in reads.read().extra


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


def test_large_tensors_are_not_kept_alive() -> None:
    model = nn.ParameterList(nn.Parameter(torch.zeros(2048)) for _ in range(300))
    repeated = RepeatedRead(WeightStrategy())
    for _ in range(4):
        assert repeated.outgoing(model, None).fixed is None


@pytest.mark.parametrize("mode", MODES)
def test_workers_get_what_changed(mode: str) -> None:
    model = Model()
    scheme = MemoryWeightSyncScheme(strategy=mode, timeout=20.0, connect_timeout=30.0)
    scheme.init_on_sender(model=model, num_workers=1)
    with WorkerProcesses(scheme, "thread") as workers:
        workers.hire(0, Model())
        workers.connect()

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
