"""TorchRL's collectors with the schemes of ``weight_update`` inside.

Every public name of ``torchrl.collectors`` is here; unchanged ones are TorchRL's own, and so are those that a
later TorchRL adds.
"""

from collectors import torchrl_names  # noqa: F401  # first: its errors name the cure

# isort: split
import torchrl.collectors as _torchrl
from torchrl.collectors import (
    AsyncBatchedCollector,
    BaseCollector,
    Evaluator,
    ProfileConfig,
    RandomPolicy,
)

from collectors.distributed import DistributedCollector, DistributedSyncCollector
from collectors.llm import LLMCollector
from collectors.multi import AsyncCollector, MultiAsyncCollector, MultiCollector, MultiSyncCollector
from collectors.ray import RayCollector
from collectors.rpc import RPCCollector
from collectors.single import Collector
from collectors.weight_update import (
    DistributedWeightUpdater,
    MultiProcessedWeightUpdater,
    RayWeightUpdater,
    RemoteModuleWeightUpdater,
    RPCWeightUpdater,
    VanillaWeightUpdater,
    WeightUpdaterBase,
)

_RENAMED = {
    "DataCollectorBase": "BaseCollector",
    "MultiSyncDataCollector": "MultiSyncCollector",
    "MultiaSyncDataCollector": "MultiAsyncCollector",
    "SyncDataCollector": "Collector",
    "aSyncDataCollector": "AsyncCollector",
}


def __getattr__(name: str) -> object:
    if name in _RENAMED:  # an AttributeError's message would be lost in "from collectors import ..."
        raise ImportError(
            f"TorchRL renamed {name}: from collectors import {_RENAMED[name]}", name="collectors"
        )
    if name in _torchrl.__all__:
        found: object = getattr(_torchrl, name)
        return found
    raise AttributeError(f"module 'collectors' has no attribute {name!r}")


__all__ = [
    "AsyncBatchedCollector",
    "AsyncCollector",
    "BaseCollector",
    "Collector",
    "DistributedCollector",
    "DistributedSyncCollector",
    "DistributedWeightUpdater",
    "Evaluator",
    "LLMCollector",
    "MultiAsyncCollector",
    "MultiCollector",
    "MultiProcessedWeightUpdater",
    "MultiSyncCollector",
    "ProfileConfig",
    "RPCCollector",
    "RPCWeightUpdater",
    "RandomPolicy",
    "RayCollector",
    "RayWeightUpdater",
    "RemoteModuleWeightUpdater",
    "VanillaWeightUpdater",
    "WeightUpdaterBase",
]
