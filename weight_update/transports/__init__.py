"""Transports: links that move chunks between a sender and one receiver each."""

from weight_update.transports.base import Arrivals, Buffer, Capabilities, TransportBackend
from weight_update.transports.distributed.transport import DistributedTransport
from weight_update.transports.join_listener import JoinListener
from weight_update.transports.memory import MemoryTransport
from weight_update.transports.multiprocess import MPTransport
from weight_update.transports.ray.transport import RayTransport
from weight_update.transports.reconnecting import LinkConnection, ReconnectingLink
from weight_update.transports.rpc import RPCTransport
from weight_update.transports.shared_memory.transport import SharedMemTransport

__all__ = [
    "Arrivals",
    "Buffer",
    "Capabilities",
    "DistributedTransport",
    "JoinListener",
    "LinkConnection",
    "MPTransport",
    "MemoryTransport",
    "RPCTransport",
    "RayTransport",
    "ReconnectingLink",
    "SharedMemTransport",
    "TransportBackend",
]
