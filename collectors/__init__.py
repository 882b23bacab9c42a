"""TorchRL's collectors with the schemes of ``weight_update`` inside.

Every public name of ``torchrl.collectors`` is here; TorchRL's own where this package changes nothing.
"""

from collectors import extra, torchrl_names  # noqa: F401  # first: they name what to install
from collectors.distributed import DistributedCollector, DistributedSyncCollector
from collectors.legacy import (
    MultiProcessedWeightUpdater,
    RayWeightUpdater,
    RemoteModuleWeightUpdater,
    VanillaWeightUpdater,
    WeightUpdaterBase,
)
from collectors.multi import AsyncCollector, MultiAsyncCollector, MultiCollector, MultiSyncCollector
from collectors.ray import RayCollector
from collectors.rpc import RPCCollector
from collectors.single import Collector
from collectors.unchanged import AsyncBatchedCollector, BaseCollector, Evaluator, ProfileConfig, RandomPolicy

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
