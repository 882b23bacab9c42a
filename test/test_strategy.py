"""The strategies keep their contract."""

from weight_update import WeightStrategy
from weight_update.testing import StrategyContract


class TestTensorDict(StrategyContract):
    def make_strategy(self) -> WeightStrategy:
        return WeightStrategy("tensordict")


class TestStateDict(StrategyContract):
    def make_strategy(self) -> WeightStrategy:
        return WeightStrategy("state_dict")
