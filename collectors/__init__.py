"""TorchRL's collectors with the schemes of ``weight_update`` inside.

Every public name of ``torchrl.collectors`` is here; unchanged ones are TorchRL's own.
"""

from collectors import extra, torchrl_names  # noqa: F401  # first: their errors name the cure
from collectors.distributed import DistributedCollector, DistributedSyncCollector
from collectors.multi import AsyncCollector, MultiAsyncCollector, MultiCollector, MultiSyncCollector
from collectors.ray import RayCollector
from collectors.rpc import RPCCollector
from collectors.single import Collector
from collectors.unchanged import (
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
    "AsyncCollector",
    "BaseCollector",
    "Collector",
    "DistributedCollector",
    "DistributedSyncCollector",
    "Evaluator",
    "MultiAsyncCollector",
    "MultiCollector",
    "MultiProcessedWeightUpdater",
    "MultiSyncCollector",
    "ProfileConfig",
    "RPCCollector",
    "RandomPolicy",
    "RayCollector",
    "RayWeightUpdater",
    "RemoteModuleWeightUpdater",
    "VanillaWeightUpdater",
    "WeightUpdaterBase",
]
