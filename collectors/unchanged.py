"""Classes of ``torchrl.collectors`` that this package passes on unchanged.

The weight updaters are for programs that still pass ``weight_updater=`` to a collector.
"""

from torchrl.collectors import (
    AsyncBatchedCollector,
    BaseCollector,
    Evaluator,
    MultiProcessedWeightUpdater,
    ProfileConfig,
    RandomPolicy,
    RayWeightUpdater,
    RemoteModuleWeightUpdater,
    VanillaWeightUpdater,
    WeightUpdaterBase,
)

__all__ = [
    "AsyncBatchedCollector",
    "BaseCollector",
    "Evaluator",
    "MultiProcessedWeightUpdater",
    "ProfileConfig",
    "RandomPolicy",
    "RayWeightUpdater",
    "RemoteModuleWeightUpdater",
    "VanillaWeightUpdater",
    "WeightUpdaterBase",
]
