"""Synchronization of a trainer and its explorers: when it happens, and by which method."""

from weight_update.checkpoints.manifest import Manifest
from weight_update.checkpoints.store import CheckpointStore
from weight_update.synchronizer.asyncio_clients import ExplorerClient, TrainerClient
from weight_update.synchronizer.blocking_clients import BlockingExplorer, BlockingTrainer, Metrics
from weight_update.synchronizer.plan import RunningStatus, SyncMethod, SyncPlan, SyncStyle
from weight_update.synchronizer.ray_actor import RayHost
from weight_update.synchronizer.rpc import Server
from weight_update.synchronizer.state_machine import StateMachine
from weight_update.synchronizer.synchronizer import Synchronizer

__all__ = [
    "BlockingExplorer",
    "BlockingTrainer",
    "CheckpointStore",
    "ExplorerClient",
    "Manifest",
    "Metrics",
    "RayHost",
    "RunningStatus",
    "Server",
    "StateMachine",
    "SyncMethod",
    "SyncPlan",
    "SyncStyle",
    "Synchronizer",
    "TrainerClient",
]
