"""A module of many small tensors, and functions that change it in every way that a trainer might."""

from __future__ import annotations

import copy
import types
from collections import OrderedDict
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn
from torch.nn.utils import parametrizations, parametrize

LAYERS = 26
"""Enough for more than 256 tensors in a state dict: the structure of a smaller model is not remembered."""


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


def first(model: Model) -> Layer:
    return model.layers[0]  # type: ignore[return-value]


def replaced(model: Model) -> None:
    first(model).up.weight = nn.Parameter(torch.randn(4, 4))


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


def renamed_module(model: Model) -> None:
    held = first(model)._modules
    held["renamed"] = held.pop("norm")


def reordered(model: Model) -> None:
    held = first(model)._modules
    held["up"] = held.pop("up")


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


def set_to(model: Model) -> None:
    with torch.no_grad():
        first(model).up.bias.set_(torch.randn(4))


def storage_resized(model: Model) -> None:
    bias = first(model).up.bias.detach()
    bias.untyped_storage().resize_(1 << 16)
    bias.fill_(3.0)


def loaded(model: Model) -> None:
    model.load_state_dict(copy.deepcopy(model.state_dict()), assign=True)


class Halved(nn.Module):
    def forward(self, weight: torch.Tensor) -> torch.Tensor:
        return weight / 2


def without_the_bias(module: nn.Module, state: dict[str, Any], prefix: str, metadata: Any) -> None:
    del state[prefix + "bias"]


def replace_weight(module: nn.Module, prefix: str, keep_vars: bool) -> None:
    module.weight = nn.Parameter(torch.ones(4, 4))


def own_state_dict(model: nn.Module, **options: Any) -> dict[str, torch.Tensor]:
    return {"own": torch.ones(3)}


def part_given_a_whole_state_dict(model: Model) -> None:
    def own(destination: dict[str, Any], prefix: str, keep_vars: bool) -> None:
        destination[f"{prefix}own"] = torch.ones(1)

    first(model).up.state_dict = own


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


class Stateful(nn.Linear):
    def get_extra_state(self) -> str:
        return "state"


def extra_state(model: Model) -> None:
    model.calls += 1


def cleared(model: Model) -> None:
    del first(model).up.__dict__["_parameters"]
    first(model).up._parameters = {}


_FUNCTIONS: list[Callable[[Model], Any]] = [
    *(part_given_a_whole_state_dict, replaced_dict_of_buffers, replaced_dict_of_modules, replaced),
    *(replaced_dict, removed_parameter, renamed_parameter, moved_to_the_next_dict, renamed_module, reordered),
    *(other_values, other_memory, transposed, negated, other_dtype_in_place, part_of_its_memory),
    *(other_part_of_its_memory, set_to, storage_resized, loaded, part_given_modules, extra_state, cleared),
]
CHANGES: dict[str, Callable[[Model], Any]] = {
    **{function.__name__: function for function in _FUNCTIONS},
    "replaced_in_dict": lambda model: first(model).up._parameters.__setitem__(
        "weight", nn.Parameter(first(model).up.weight.detach().clone())
    ),
    "replaced_buffer": lambda model: setattr(first(model), "steps", torch.tensor(3)),
    "became_persistent": lambda model: first(model)._non_persistent_buffers_set.discard("scratch"),
    "added_module": lambda model: first(model).drop.add_module("inner", nn.Linear(2, 2)),
    "resized": lambda model: first(model).steps.resize_(1),
    "swapped": lambda model: torch.utils.swap_tensors(
        first(model).up.weight, nn.Parameter(torch.randn(4, 4))
    ),
    "tied": lambda model: setattr(model.head, "weight", first(model).up.weight),
    "tied_memory": lambda model: setattr(model.head.weight, "data", first(model).up.weight.data),
    "parametrized": lambda model: parametrize.register_parametrization(first(model).up, "weight", Halved()),
    "normed": lambda model: parametrizations.weight_norm(first(model).up),
    "hooked": lambda model: first(model).up.register_state_dict_post_hook(without_the_bias),
    "privately_hooked": lambda model: first(model).up._register_state_dict_hook(
        lambda *arguments: without_the_bias(*arguments)
    ),
    "hooked_before": lambda model: first(model).up.register_state_dict_pre_hook(replace_weight),
    "given_a_state_dict": lambda model: setattr(model, "state_dict", types.MethodType(own_state_dict, model)),
    "part_given_a_state_dict": lambda model: setattr(
        first(model).up, "_save_to_state_dict", lambda destination, prefix, keep_vars: None
    ),
    "given_names": lambda model: setattr(model, "named_parameters", nn.Linear(2, 2).named_parameters),
    "other_class": lambda model: setattr(model, "__class__", Sharded),
    "part_of_other_class": lambda model: setattr(first(model).up, "__class__", Stateful),
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
