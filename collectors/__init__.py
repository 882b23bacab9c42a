"""TorchRL's collectors with the schemes of ``weight_update`` inside."""

from collectors import extra  # noqa: F401  # first: it names the extra to install
from collectors.distributed import DistributedCollector, DistributedSyncCollector
from collectors.legacy import MultiProcessedWeightUpdater, VanillaWeightUpdater, WeightUpdaterBase
from collectors.multi import MultiAsyncCollector, MultiCollector, MultiSyncCollector
from collectors.ray import RayCollector
from collectors.rpc import RPCCollector
from collectors.single import Collector

__all__ = [
    "Collector",
    "DistributedCollector",
    "DistributedSyncCollector",
    "MultiAsyncCollector",
    "MultiCollector",
    "MultiProcessedWeightUpdater",
    "MultiSyncCollector",
    "RPCCollector",
    "RayCollector",
    "VanillaWeightUpdater",
    "WeightUpdaterBase",
]
