"""Classes of ``torchrl.collectors`` that this package passes on as they are."""

from torchrl.collectors import AsyncBatchedCollector, BaseCollector, Evaluator, ProfileConfig, RandomPolicy

__all__ = ["AsyncBatchedCollector", "BaseCollector", "Evaluator", "ProfileConfig", "RandomPolicy"]
