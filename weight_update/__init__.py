"""Synchronize the weights of a policy from its trainer to its rollout workers."""

from weight_update.chunks import TensorMeta, WeightChunk, WeightSchema
from weight_update.compression import Compression, register_compression
from weight_update.encodings import (
    BucketEncoding,
    DeltaEncoding,
    DenseEncoding,
    Encoding,
    PatchEncoding,
    WholeEncoding,
    register_encoding,
)
from weight_update.errors import (
    FormatError,
    JoinRefusedError,
    LifecycleError,
    LinkClosedError,
    NotEnoughMemoryError,
    NothingToSendError,
    SchemaMismatchError,
    SyncFailedError,
    SyncTimeoutError,
    TransportError,
    UnknownWorkerError,
    UnsupportedSourceError,
    WeightSyncError,
    WorkerError,
)
from weight_update.gate import Gate
from weight_update.handle import SendHandle
from weight_update.report import SyncReport
from weight_update.schemes import (
    DistributedWeightSyncScheme,
    MemoryWeightSyncScheme,
    MultiProcessWeightSyncScheme,
    NoWeightSyncScheme,
    RayWeightSyncScheme,
    RemoteWeightSyncScheme,
    SharedMemWeightSyncScheme,
    WeightSyncScheme,
    Whereabouts,
    group_schemes,
    send_together,
)
from weight_update.strategy import WeightStrategy
from weight_update.transports import (
    Buffer,
    DistributedTransport,
    MemoryTransport,
    MPTransport,
    RayTransport,
    SharedMemTransport,
    TransportBackend,
)

__version__ = "0.1.0"

__all__ = [
    "BucketEncoding",
    "Buffer",
    "Compression",
    "DeltaEncoding",
    "DenseEncoding",
    "DistributedTransport",
    "DistributedWeightSyncScheme",
    "Encoding",
    "FormatError",
    "Gate",
    "JoinRefusedError",
    "LifecycleError",
    "LinkClosedError",
    "MPTransport",
    "MemoryTransport",
    "MemoryWeightSyncScheme",
    "MultiProcessWeightSyncScheme",
    "NoWeightSyncScheme",
    "NotEnoughMemoryError",
    "NothingToSendError",
    "PatchEncoding",
    "RayTransport",
    "RayWeightSyncScheme",
    "RemoteWeightSyncScheme",
    "SchemaMismatchError",
    "SendHandle",
    "SharedMemTransport",
    "SharedMemWeightSyncScheme",
    "SyncFailedError",
    "SyncReport",
    "SyncTimeoutError",
    "TensorMeta",
    "TransportBackend",
    "TransportError",
    "UnknownWorkerError",
    "UnsupportedSourceError",
    "WeightChunk",
    "WeightSchema",
    "WeightStrategy",
    "WeightSyncError",
    "WeightSyncScheme",
    "Whereabouts",
    "WholeEncoding",
    "WorkerError",
    "group_schemes",
    "register_compression",
    "register_encoding",
    "send_together",
]
