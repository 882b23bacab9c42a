"""The contract of every way to read and write weights."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from tensordict import TensorDict, TensorDictParams, lazy_stack
from torch import nn

from weight_update.errors import SchemaMismatchError, UnsupportedSourceError
from weight_update.strategy.strategy import WeightStrategy
from weight_update.testing.models import Zoo, fingerprint, mlp

SHAPES = ["module", "tensordict", "nested dict", "dotted dict"]


def as_shape(strategy: WeightStrategy, model: nn.Module, shape: str) -> Any:
    """Return the weights of ``model`` as another type; tensors are copies, tied like the originals."""
    if shape == "module":
        return model
    named = strategy.named(model)
    copies: dict[int, torch.Tensor] = {}
    for value in named.tensors.values():
        copies.setdefault(value.data_ptr() or id(value), value.detach().clone())
    flat: dict[str, Any] = {n: copies[v.data_ptr() or id(v)] for n, v in named.tensors.items()}
    if shape == "tensordict":
        return WeightStrategy("tensordict").extract_weights({**flat, **named.extra})
    flat.update(named.extra)
    if shape == "dotted dict":
        return flat
    nested: dict[str, Any] = {}
    for name, value in flat.items():
        *path, leaf = name.split(".")
        node = nested
        for part in path:
            node = node.setdefault(part, {})
        node[leaf] = value
    return nested


class Functional(nn.Module):
    """A network that keeps its weights in a TensorDictParams, as TorchRL's multi-agent networks do."""

    def __init__(self, net: nn.Module) -> None:
        super().__init__()
        self.weights = TensorDictParams(TensorDict.from_module(net))
        self.__dict__["net"] = net  # not registered

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        net = self.__dict__["net"]
        with self.weights.to_module(net, preserve_module_state=False):
            output: torch.Tensor = net(x)
        return output


class StrategyContract:
    """Tests of one strategy; subclass it and write :meth:`make_strategy`."""

    def make_strategy(self) -> WeightStrategy:
        """Return a new strategy."""
        raise NotImplementedError(
            f"write {type(self).__name__}.make_strategy(self): it returns a new strategy"
        )

    @pytest.mark.parametrize("source", SHAPES)
    @pytest.mark.parametrize("destination", SHAPES)
    @pytest.mark.parametrize("inplace", [True, False])
    def test_apply(self, source: str, destination: str, inplace: bool) -> None:
        """From every type of source to every type of destination, bit for bit."""
        strategy = self.make_strategy()
        given = as_shape(strategy, Zoo(1), source)
        target = as_shape(strategy, Zoo(2), destination)
        strategy.apply_weights(target, given, inplace=inplace)
        assert fingerprint(target, strategy) == fingerprint(Zoo(1), strategy)

    @pytest.mark.parametrize("destination", SHAPES)
    def test_inplace_keeps_addresses(self, destination: str) -> None:
        """``inplace=True`` copies into the tensors that are there."""
        strategy = self.make_strategy()
        target = as_shape(strategy, mlp(2), destination)
        before = addresses(strategy, target)
        strategy.apply_weights(target, mlp(1))
        assert addresses(strategy, target) == before

    @pytest.mark.parametrize("destination", SHAPES)
    def test_not_inplace_takes_the_given_memory(self, destination: str) -> None:
        """``inplace=False`` copies nothing."""
        strategy = self.make_strategy()
        source, target = mlp(1), as_shape(strategy, mlp(2), destination)
        strategy.apply_weights(target, source, inplace=False)
        assert addresses(strategy, target) == addresses(strategy, source)

    def test_every_weight_is_read(self) -> None:
        """Parameters and persistent buffers of every dtype are read, frozen ones and scalars too."""
        state = Zoo(1).state_dict()
        expected = {name: value for name, value in state.items() if not name.endswith("_extra_state")}
        found = self.make_strategy().named(Zoo(1)).tensors
        missing = sorted(expected.keys() - found.keys())
        assert not missing, f"named() leaves out weights of the module: {missing}"
        assert fingerprint({name: found[name] for name in expected}) == fingerprint(expected)

    def test_extract_copies_nothing(self) -> None:
        """Extracted weights are live."""
        strategy, model = self.make_strategy(), mlp(1)
        assert addresses(strategy, strategy.extract_weights(model)) == addresses(strategy, model)

    def test_extract_round_trip(self) -> None:
        """Extracted weights are a source themselves."""
        strategy, target = self.make_strategy(), Zoo(2)
        strategy.apply_weights(target, strategy.extract_weights(Zoo(1)))
        assert fingerprint(target, strategy) == fingerprint(Zoo(1), strategy)

    def test_callable_source(self) -> None:
        """A callable is called, at each reading."""
        strategy, target = self.make_strategy(), mlp(2)
        strategy.apply_weights(target, lambda: lambda: mlp(1))
        assert fingerprint(target, strategy) == fingerprint(mlp(1), strategy)

    def test_parameters_stay_parameters(self) -> None:
        """Identity, ``requires_grad``, ties and the training graph of the destination survive."""
        strategy, target = self.make_strategy(), Zoo(2)
        weight, flags = target.inner.weight, [p.requires_grad for p in target.parameters()]
        for inplace in (True, False):
            strategy.apply_weights(target, Zoo(1), inplace=inplace)
            assert target.inner.weight is weight
            assert target.output.weight is weight
            assert [p.requires_grad for p in target.parameters()] == flags
            target(torch.ones(1, 4)).sum().backward()
            assert weight.grad is not None

    @pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
    @pytest.mark.parametrize("inplace", [True, False])
    def test_other_floating_dtype(self, dtype: torch.dtype, inplace: bool) -> None:
        """The destination keeps its dtype and gets exactly ``.to(dtype)``."""
        strategy, target = self.make_strategy(), mlp(2).to(dtype)
        strategy.apply_weights(target, mlp(1), inplace=inplace)
        assert fingerprint(target, strategy) == fingerprint(mlp(1).to(dtype), strategy)

    @pytest.mark.parametrize("inplace", [True, False])
    def test_meta_destination(self, inplace: bool) -> None:
        """A module on the meta device can at least be pointed at weights; copying says why it cannot."""
        strategy = self.make_strategy()
        with torch.device("meta"):
            target = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2))
        strategy.apply_weights(target, mlp(1), inplace=inplace)
        assert fingerprint(target, strategy) == fingerprint(mlp(1), strategy)

    @pytest.mark.parametrize("inplace", [True, False])
    def test_tensordict_params_on_meta(self, inplace: bool) -> None:
        """A forward pass computes with the TensorDict of a TensorDictParams, so that is written, too."""
        source, target = mlp(1), Functional(mlp(2).to("meta"))
        self.make_strategy().apply_weights(target, Functional(source), inplace=inplace)
        assert fingerprint(target.weights) == fingerprint(source)
        assert torch.equal(target(torch.ones(4)), source(torch.ones(4)))
        assert target.weights["0", "weight"] is target.weights.get_parameter("0.weight")
        split = Functional(mlp(3))  # TensorDict.to_module replaces only the TensorDict
        split.weights.data.to("meta").to_module(split.weights, preserve_module_state=False)
        self.make_strategy().apply_weights(split, Functional(source), inplace=inplace)
        assert torch.equal(split(torch.ones(4)), source(torch.ones(4)))

    @pytest.mark.parametrize("destination", SHAPES)
    @pytest.mark.parametrize("inplace", [True, False])
    def test_all_or_nothing(self, destination: str, inplace: bool) -> None:
        """Missing, unexpected, mis-shaped and mistyped names: one error lists all, nothing is written."""
        strategy = self.make_strategy()
        wrong = {
            "0.weight": torch.zeros(8, 5),
            "0.bias": torch.zeros(8),
            "2.weight": torch.zeros(2, 8, dtype=torch.int64),
            "3.weight": torch.zeros(1),
        }
        target = as_shape(strategy, mlp(2), destination)
        before = fingerprint(target, strategy)
        with pytest.raises(SchemaMismatchError) as caught:
            strategy.apply_weights(target, wrong, inplace=inplace)
        assert sorted(line.partition(":")[0] for line in caught.value.problems) == [
            "0.weight",
            "2.bias",
            "2.weight",
            "3.weight",
        ]
        assert fingerprint(target, strategy) == before

    def test_size_one_is_not_broadcast(self) -> None:
        """A tensor of one element does not fill a larger one."""
        with pytest.raises(SchemaMismatchError):
            self.make_strategy().apply_weights({"a": torch.zeros(3)}, {"a": torch.ones(1)})

    @pytest.mark.parametrize("inplace", [True, False])
    def test_extra_state_that_fails(self, inplace: bool) -> None:
        """An exception of ``set_extra_state`` leaves tensors and all extra states as they were."""
        strategy, target = self.make_strategy(), Zoo(2)
        target.noted.set_extra_state = Fuse(target.noted.set_extra_state)  # type: ignore[method-assign]
        before = fingerprint(target, strategy)
        with pytest.raises(OSError, match="blown"):
            strategy.apply_weights(target, Zoo(1), inplace=inplace)
        assert fingerprint(target, strategy) == before

    def test_untied_source_for_tied_destination(self) -> None:
        """Two values for one memory are an error that names both."""
        strategy, target = self.make_strategy(), Zoo(2)
        untied = {name: value.clone() for name, value in strategy.named(Zoo(1)).tensors.items()}
        with pytest.raises(SchemaMismatchError, match=r"inner.weight and output.weight: tied"):
            strategy.apply_weights(target, untied)

    @pytest.mark.parametrize("thing", [3, None, [torch.ones(1)], "weights"])
    def test_unsupported_source(self, thing: Any) -> None:
        """The error names the type."""
        with pytest.raises(UnsupportedSourceError, match=type(thing).__name__):
            self.make_strategy().extract_weights(thing)

    @pytest.mark.parametrize("thing", [3, None, (torch.ones(1),)])
    def test_unsupported_destination(self, thing: Any) -> None:
        """The error names the type."""
        with pytest.raises(UnsupportedSourceError, match=type(thing).__name__):
            self.make_strategy().apply_weights(thing, {"a": torch.ones(1)})

    @pytest.mark.parametrize(
        ("source", "named"),
        [
            ({"a": 3}, "'a' is of type int"),
            ({3: torch.ones(1)}, "the key 3"),
            ({"a": {"b": None}}, "'a.b' is of type NoneType"),
            ({"a": torch.eye(2).to_sparse()}, "sparse"),
        ],
    )
    def test_unsupported_value(self, source: Any, named: str) -> None:
        """The error names the place and the type."""
        with pytest.raises(UnsupportedSourceError, match=named):
            self.make_strategy().apply_weights({"a": torch.eye(2)}, source)

    def test_ambiguous_names(self) -> None:
        """Two places of one dotted name are an error, not a choice."""
        with pytest.raises(UnsupportedSourceError, match=r"a\.b"):
            self.make_strategy().extract_weights({"a": {"b": torch.ones(1)}, "a.b": torch.zeros(1)})

    def test_lazy_destination(self) -> None:
        """Tensors that are made anew at each access cannot be written, which is said; reading is fine."""
        lazy = lazy_stack([TensorDict({"a": torch.zeros(2)}), TensorDict({"a": torch.zeros(2)})])
        with pytest.raises(UnsupportedSourceError, match="'a' of LazyStackedTensorDict"):
            self.make_strategy().apply_weights(lazy, {"a": torch.ones(2, 2)})
        target = {"a": torch.ones(2, 2)}
        self.make_strategy().apply_weights(target, lazy)
        assert not target["a"].any()

    def test_expanded_destination(self) -> None:
        """A tensor whose elements share memory cannot be copied into; the others are not written either."""
        target = {"a": torch.zeros(3), "b": torch.zeros(1).expand(3)}
        source = {"a": torch.ones(3), "b": torch.ones(3)}
        with pytest.raises(UnsupportedSourceError, match="'b' of the target"):
            self.make_strategy().apply_weights(target, source)
        assert not target["a"].any()
        self.make_strategy().apply_weights(target, source, inplace=False)
        assert target["b"].all()

    @pytest.mark.parametrize("inplace", [True, False])
    def test_tensordict_params(self, inplace: bool) -> None:
        """TensorDictParams, which is a module and a TensorDict, takes weights and stays trainable."""
        target = TensorDictParams(TensorDict.from_module(mlp(2)).detach().clone())
        self.make_strategy().apply_weights(target, mlp(1), inplace=inplace)
        assert fingerprint(target) == fingerprint(mlp(1))
        assert all(parameter.requires_grad for parameter in target.parameters())

    def test_tensor_called_like_extra_state(self) -> None:
        """Only the exact name is reserved."""
        named = {"my_extra_state": torch.ones(2)}
        target = {"my_extra_state": torch.zeros(2)}
        self.make_strategy().apply_weights(target, named)
        assert fingerprint(target) == fingerprint(named)

    def test_empty(self) -> None:
        """A model without weights is fine."""
        strategy = self.make_strategy()
        strategy.apply_weights(nn.ReLU(), nn.ReLU())
        strategy.apply_weights(TensorDict(), {})
        assert fingerprint(strategy.extract_weights(nn.ReLU())) == {}


class Fuse:
    """A ``set_extra_state`` that fails on the first call."""

    def __init__(self, real: Any) -> None:
        self.real, self.blown = real, False

    def __call__(self, state: Any) -> None:
        """Fail once, after having done its work."""
        self.real(state)
        if not self.blown:
            self.blown = True
            raise OSError("blown")


def addresses(strategy: WeightStrategy, weights: Any) -> dict[str, int]:
    """Return the address of each tensor."""
    return {name: tensor.data_ptr() for name, tensor in strategy.named(weights).tensors.items()}
