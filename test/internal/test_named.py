"""A module's weights have the names that torch gives them."""

from __future__ import annotations

import contextlib
import gc
import re
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from pairs import connect_pair
from tensordict import TensorDict
from tensordict.nn import TensorDictParams
from torch import nn
from torch.utils._pytree import tree_map

from weight_update import MemoryWeightSyncScheme, UnsupportedSourceError, WeightStrategy, WeightSyncError
from weight_update.strategy.named_weights import from_module


class Renamed(nn.Module):
    """A module that names its parameters itself, as wrappers of modules do."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.BatchNorm1d(3)

    def named_parameters(self, *args: Any, **kwargs: Any) -> Iterator[tuple[str, nn.Parameter]]:
        for name, value in super().named_parameters(*args, **kwargs):
            yield name.replace("inner.", "outer."), value


class Flat(nn.Module):
    """A module that shows none of its submodules."""

    def __init__(self) -> None:
        super().__init__()
        self.hidden, self.own = nn.Linear(2, 2), nn.Parameter(torch.ones(1))

    def named_modules(
        self, memo: Any = None, prefix: str = "", remove_duplicate: bool = True
    ) -> Iterator[tuple[str, nn.Module]]:
        yield prefix, self


class ByPosition(nn.Module):
    """A module whose ``named_modules`` takes its arguments in torch's order."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(1, 1)

    def named_modules(self, memo: Any, prefix: str, duplicates: bool) -> Iterator[tuple[str, nn.Module]]:
        yield prefix, self
        yield f"{prefix}.other" if prefix else "other", self.inner


def patched() -> nn.Module:
    module = nn.Sequential(nn.Linear(1, 1), nn.Linear(1, 1))
    module.named_parameters = nn.Linear(3, 3).named_parameters
    return module


def awkward() -> dict[str, nn.Module]:
    shared, linear = nn.Linear(2, 2), nn.Linear(2, 2, bias=False)
    twice = nn.Sequential(shared, nn.Sequential(shared, linear), nn.BatchNorm1d(2))
    twice.register_parameter("none", None)
    twice.register_buffer("no_buffer", None)
    twice.register_module("no_module", None)
    twice[1][1].weight = shared.weight
    params = TensorDictParams(TensorDict({"a": torch.ones(2), "b": {"c": torch.ones(1)}}))
    return {
        "twice": twice,
        "tensordict": params,
        "with a tensordict": nn.ModuleDict({"one": params, "two": nn.Linear(1, 1)}),
        "renamed": Renamed(),
        "renamed below": nn.Sequential(Renamed()),
        "by position": nn.Sequential(ByPosition()),
        "patched": patched(),
        "flat": Flat(),
        "flat below": nn.Sequential(nn.Linear(1, 1), Flat()),
    }


@pytest.mark.parametrize("kind", awkward())
def test_a_module_has_the_names_that_torch_gives(kind: str) -> None:
    module = awkward()[kind]
    expected = dict(module.named_parameters(remove_duplicate=False))
    expected.update(module.named_buffers(remove_duplicate=False))
    found = from_module(module).tensors
    assert list(found) == list(expected)
    assert all(found[name] is expected[name] for name in found)


@pytest.mark.parametrize("key", ["a", "__extra_state__"])
def test_each_tensor_that_is_read_from_a_dict_has_a_place(key: str) -> None:
    plain = {"m": {key: torch.ones(2)}, "n": torch.ones(1)}
    for target in (plain, TensorDict(plain)):
        binding = WeightStrategy("tensordict").bind(target)
        assert binding.schema().names == tuple(binding.read().tensors)


@pytest.mark.parametrize("select", [5, [1], re.compile("head"), b"head", "head"])
def test_a_selection_of_another_type_is_refused(select: Any) -> None:
    with pytest.raises(ValueError, match=r"unknown selection .* a list of prefixes, a function"):
        WeightStrategy(select=select)


@pytest.mark.parametrize("names", [("w", "w.scale"), ("w.scale", "w"), ("a.b.c", "a.b"), ("a", "a.b.c")])
def test_a_weight_inside_another_is_no_tensordict(names: tuple[str, str]) -> None:
    weights = {name: torch.ones(2) for name in names}
    with pytest.raises(UnsupportedSourceError, match="no weight can be inside another"):
        WeightStrategy("tensordict").extract_weights(weights)
    assert WeightStrategy("state_dict").extract_weights(weights) == weights


@pytest.mark.parametrize("inplace", [True, False])
def test_weights_without_values_change_nothing(inplace: bool) -> None:
    destination = {"a": torch.zeros(2), "b": torch.zeros(2)}
    with pytest.raises(UnsupportedSourceError, match="on the meta device, without values to send: b;"):
        WeightStrategy().apply_weights(
            destination, {"a": torch.ones(2), "b": torch.ones(2, device="meta")}, inplace=inplace
        )
    assert not destination["a"].any()


class Wrapper(torch.Tensor):
    """A tensor that has its values in another tensor, as DTensor and the tensors of torchao have them."""

    @staticmethod
    def __new__(cls, inner: torch.Tensor) -> Wrapper:
        return torch.Tensor._make_wrapper_subclass(cls, inner.shape, dtype=inner.dtype)  # type: ignore[attr-defined]

    def __init__(self, inner: torch.Tensor) -> None:
        self.inner = inner

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        inner = tree_map(lambda one: one.inner if isinstance(one, Wrapper) else one, args)
        made = func(*inner, **(kwargs or {}))
        return tree_map(lambda one: cls(one) if isinstance(one, torch.Tensor) else one, made)


def wrapped() -> nn.Module:
    module = nn.Linear(2, 2)
    module.weight = nn.Parameter(Wrapper(torch.zeros(2, 2)))
    return module


@pytest.mark.parametrize("sides", [(wrapped, nn.Linear), (nn.Linear, wrapped), (wrapped, wrapped)])
def test_a_tensor_without_memory_of_its_own_is_refused(sides: Any) -> None:
    source, target = (make() if make is wrapped else make(2, 2) for make in sides)
    refused = pytest.raises(WeightSyncError, match="'weight' is of type Wrapper, without memory of its own")
    with MemoryWeightSyncScheme("state_dict", timeout=10.0) as scheme, refused:
        connect_pair(scheme, source, target)


class Packed(nn.Module):
    """A layer that saves a tensor under a name of its own, as quantized layers do."""

    def __init__(self) -> None:
        super().__init__()
        self.scale, self.inner = torch.ones(2), nn.Linear(2, 2)

    def _save_to_state_dict(self, destination: dict[str, Any], prefix: str, keep_vars: bool) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)
        destination[f"{prefix}packed_scale"] = self.scale
        destination[f"{prefix}same"] = self.inner.weight


@pytest.mark.parametrize("extract_as", ["tensordict", "state_dict"])
def test_a_weight_that_is_neither_a_parameter_nor_a_buffer_is_refused(extract_as: Any) -> None:
    source, target = nn.Sequential(Packed()), nn.Sequential(Packed())
    refused = pytest.raises(WeightSyncError, match=r"'0\.packed_scale' of .* make it a buffer, or .*select=")
    with MemoryWeightSyncScheme(extract_as, timeout=10.0) as scheme, refused:
        connect_pair(scheme, source, target)


def test_a_weight_that_is_neither_a_parameter_nor_a_buffer_may_be_left_out() -> None:
    source, target = nn.Sequential(Packed()), nn.Sequential(Packed())
    with MemoryWeightSyncScheme(WeightStrategy(select=["0.inner"]), timeout=10.0) as scheme:
        connect_pair(scheme, source, target).shutdown()
    assert torch.equal(target[0].inner.weight, source[0].inner.weight)


class Fused(nn.Module):
    """A layer that saves the parts of its parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv = nn.Parameter(torch.rand(6, 2))

    def _save_to_state_dict(self, destination: dict[str, Any], prefix: str, keep_vars: bool) -> None:
        destination |= dict(zip((f"{prefix}q", f"{prefix}k", f"{prefix}v"), self.qkv.chunk(3), strict=True))


def test_a_weight_that_is_saved_in_parts_is_sent() -> None:
    source, target = Fused(), Fused()
    with MemoryWeightSyncScheme(timeout=10.0) as scheme:
        connect_pair(scheme, source, target).shutdown()
    assert torch.equal(target.qkv, source.qkv)


class Transposing(nn.Module):
    """A layer that saves its weight transposed, and transposes it again when it is loaded."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.rand(2, 2))

    def _save_to_state_dict(self, destination: dict[str, Any], prefix: str, keep_vars: bool) -> None:
        destination[f"{prefix}weight"] = self.weight.t()

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *others: Any) -> None:
        self.weight.data.copy_(state_dict[f"{prefix}weight"].t())


def test_a_model_that_saves_other_values_than_it_has_gets_none() -> None:
    source, target = Transposing(), Transposing()
    before = target.weight.detach().clone()
    refused = pytest.raises(
        WeightSyncError, match="'weight' in the state dict of Transposing is not its param"
    )
    with MemoryWeightSyncScheme("state_dict", timeout=10.0) as scheme, refused:
        connect_pair(scheme, source, target)
    assert torch.equal(target.weight, before)


def test_values_that_only_the_sender_saves_otherwise_are_sent() -> None:
    source, target = Transposing(), nn.Linear(2, 2, bias=False)
    with MemoryWeightSyncScheme("state_dict", timeout=10.0) as scheme:
        connect_pair(scheme, source, target).shutdown()
    assert torch.equal(target.weight, source.weight.t())


def test_a_worker_without_a_model_may_load_what_was_saved() -> None:
    source, target = Transposing(), Transposing()
    with MemoryWeightSyncScheme("state_dict", timeout=10.0) as scheme:
        receiver = connect_pair(scheme, source, None)
        scheme.send_async()
        target.load_state_dict(receiver.receive(timeout=10.0))
        receiver.shutdown()
    assert torch.equal(target.weight, source.weight)


class Counter(nn.Module):
    """A module whose only state is extra state."""

    def __init__(self, count: int = 0) -> None:
        super().__init__()
        self.count = count

    def get_extra_state(self) -> int:
        return self.count

    def set_extra_state(self, state: int) -> None:
        self.count = state


def actor_critic(count: int) -> nn.ModuleDict:
    """Return a model of which all parts have extra state."""
    actor = nn.Sequential(nn.Linear(2, 2), Counter(count))
    critic = nn.ModuleDict({"counter": Counter(count), "value": nn.Linear(2, 1)})
    return nn.ModuleDict({"actor": actor, "critic": critic, "all": Counter(count)})


@pytest.mark.parametrize("extract_as", ["tensordict", "state_dict"])
@pytest.mark.parametrize("select", [["actor"], lambda name, tensor: name.startswith("actor")])
def test_extra_state_is_sent_with_the_selected_weights(extract_as: Any, select: Any) -> None:
    source, target = actor_critic(1), actor_critic(0)
    with MemoryWeightSyncScheme(WeightStrategy(extract_as, select=select), timeout=10.0) as scheme:
        connect_pair(scheme, source, target).shutdown()
    counts = target["actor"][1].count, target["all"].count, target["critic"]["counter"].count
    assert counts == (1, 1, 0)


def test_a_worker_without_the_modules_that_are_not_selected_joins() -> None:
    source, target = actor_critic(1), actor_critic(0)
    del target["critic"]
    with MemoryWeightSyncScheme(WeightStrategy(select=["actor"]), timeout=10.0) as scheme:
        connect_pair(scheme, source, target).shutdown()
    assert torch.equal(target["actor"][0].weight, source["actor"][0].weight)


class Agent:
    """An object that computes when it is called, and holds a module."""

    def __init__(self) -> None:
        self.policy = nn.Linear(2, 2)

    def __call__(self, observation: torch.Tensor) -> torch.Tensor:
        return self.policy(observation)


class AgentStrategy(WeightStrategy):
    def named(self, source: Any) -> Any:
        return super().named(source.policy if isinstance(source, Agent) else source)


def test_a_strategy_may_read_an_object_that_can_be_called() -> None:
    source, target = Agent(), nn.Linear(2, 2)
    with MemoryWeightSyncScheme(AgentStrategy(), timeout=10.0) as scheme:
        connect_pair(scheme, source, target).shutdown()
    assert torch.equal(target.weight, source.policy.weight)


def test_a_weight_that_is_saved_twice_is_sent() -> None:
    source, target = Packed(), Packed()
    source.register_buffer("packed_scale", source.scale)
    target.register_buffer("packed_scale", target.scale)
    with MemoryWeightSyncScheme(timeout=10.0) as scheme:
        connect_pair(scheme, source, target).shutdown()


@contextlib.contextmanager
def collections_counted() -> Iterator[list[int]]:
    """Yield a list to which each garbage collection appends its generation."""
    found: list[int] = []

    def note(phase: str, info: dict[str, int]) -> None:
        if phase == "start":
            found.append(info["generation"])

    thresholds = gc.get_threshold()
    gc.collect()
    gc.set_threshold(700, 10, 10)
    gc.callbacks.append(note)
    try:
        yield found
    finally:
        gc.callbacks.remove(note)
        gc.set_threshold(*thresholds)


def test_pointing_thousands_of_tensors_collects_no_garbage() -> None:
    """Forward passes wait meanwhile, and each collection looks at thousands of objects."""
    model = nn.ParameterList(nn.Parameter(torch.zeros(2, 4)) for _ in range(5000))
    strategy = WeightStrategy()
    schema, bound = strategy.named(model).schema(), strategy.bind(model)
    values = [torch.ones(2, 4) for _ in schema.names]
    bound.switch(schema.names, bound.prepare(schema, values))
    with collections_counted() as collections:
        ready = bound.prepare(schema, values)
        changed = bound.changed(schema.names)
        bound.switch(schema.names, ready)
    assert (changed, collections) == (False, [])


def test_copying_into_thousands_of_tensors_collects_little_garbage() -> None:
    model = nn.ParameterList(nn.Parameter(torch.zeros(20, 30)) for _ in range(5000))
    strategy = WeightStrategy()
    schema, bound = strategy.named(model).schema(), strategy.bind(model)
    values = [torch.ones(20, 30) for _ in schema.names]
    with collections_counted() as collections:
        bound.copy(schema.names, values)
    assert all(map(torch.equal, model, values))
    assert len(collections) <= 5000 // 700 + 1  # PyTorch makes one object for each tensor
