"""Schemes: the lifecycle of weight synchronization, one small class for each way to connect."""

from weight_update.schemes.base import WeightSyncBackend, WeightSyncScheme
from weight_update.schemes.distributed import DistributedWeightSyncScheme
from weight_update.schemes.group import group_schemes, send_together
from weight_update.schemes.memory import MemoryWeightSyncScheme
from weight_update.schemes.multiprocess import MultiProcessWeightSyncScheme
from weight_update.schemes.no_sync import NoWeightSyncScheme
from weight_update.schemes.object_store import ObjectStoreWeightSyncScheme
from weight_update.schemes.ray import RayWeightSyncScheme
from weight_update.schemes.ray_transform import RayModuleTransformScheme
from weight_update.schemes.remote import RemoteWeightSyncScheme, Whereabouts
from weight_update.schemes.rpc import RPCWeightSyncScheme
from weight_update.schemes.shared_mem import SharedMemWeightSyncScheme

__all__ = [
    "DistributedWeightSyncScheme",
    "MemoryWeightSyncScheme",
    "MultiProcessWeightSyncScheme",
    "NoWeightSyncScheme",
    "ObjectStoreWeightSyncScheme",
    "RPCWeightSyncScheme",
    "RayModuleTransformScheme",
    "RayWeightSyncScheme",
    "RemoteWeightSyncScheme",
    "SharedMemWeightSyncScheme",
    "WeightSyncBackend",
    "WeightSyncScheme",
    "Whereabouts",
    "group_schemes",
    "send_together",
]
