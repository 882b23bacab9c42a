"""The strategies keep their contract."""

from collections.abc import Iterator
from typing import Any

import pytest
from torch import nn

from weight_update import GatherShards, WeightStrategy
from weight_update.convert import gather_tensor_parallel
from weight_update.strategy.named_weights import NamedWeights
from weight_update.testing import StrategyContract


class TestTensorDict(StrategyContract):
    def make_strategy(self) -> WeightStrategy:
        return WeightStrategy("tensordict")


class TestStateDict(StrategyContract):
    def make_strategy(self) -> WeightStrategy:
        return WeightStrategy("state_dict")


class WithoutIntegers(WeightStrategy):
    def named(self, source: Any) -> NamedWeights:
        named = super().named(source)
        kept = {name: value for name, value in named.tensors.items() if value.is_floating_point()}
        return NamedWeights(kept, named.extra)


def test_the_contract_notices_weights_that_are_left_out() -> None:
    contract = StrategyContract()
    contract.make_strategy = WithoutIntegers  # type: ignore[method-assign]
    with pytest.raises(AssertionError, match=r"leaves out weights of the module: .*'of_int32'.*'steps'"):
        contract.test_every_weight_is_read()


class OfOneName(nn.Linear):
    """A module whose override of a method lacks an argument, as in TorchRL's ``LossModule``."""

    def named_parameters(self, prefix: str = "", recurse: bool = True) -> Iterator[tuple[str, nn.Parameter]]:  # type: ignore[override]
        return super().named_parameters(prefix, recurse)


def test_a_module_whose_override_of_named_parameters_lacks_an_argument_is_read() -> None:
    assert set(WeightStrategy("tensordict").named(OfOneName(2, 2)).tensors) == {"weight", "bias"}


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"group": gather_tensor_parallel()}, "group= takes a process group .* not partial"),
        ({"group": "tp"}, "group= takes a process group .* not str"),
        ({"gather": 5}, "gather= takes a function of an iterator, not int"),
        ({"batch_bytes": 0}, "batch_bytes is a positive number"),
    ],
)
def test_wrong_options_for_shards_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        GatherShards(**options).members()
