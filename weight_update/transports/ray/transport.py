"""Links through Ray alone: messages through a rendezvous actor, payloads through Ray's object store."""

from __future__ import annotations

import uuid
from collections.abc import Callable
from typing import Any

from weight_update.transports.base import Capabilities
from weight_update.transports.ray.connection import RayConnection
from weight_update.transports.ray.object_store import ObjectStore
from weight_update.transports.reconnecting import ReconnectingLink
from weight_update.wire.frames import WeightChunk


class RayTransport(ReconnectingLink[RayConnection]):
    """One end of a link through Ray, for clusters whose actors cannot open ports to each other.

    The sender copies each payload once into Ray's object store, whatever the number of workers, and each node
    fetches it once. A worker copies it out of the store once, because memory mapped by Ray is read-only.

    Args:
        find_actor: returns the handle of the rendezvous actor within the given seconds; called when the link
            is first used. None makes a sender's end, whose connection comes from ``RayListener``.
        object_store: store that payloads are put into, shared by the sender's ends.
    """

    capabilities: Capabilities = Capabilities(send_never_blocks=True, allows_rejoin=True)

    def __init__(
        self, find_actor: Callable[[float | None], Any] | None = None, object_store: ObjectStore | None = None
    ) -> None:
        super().__init__(joins=find_actor is not None)
        self._find_actor = find_actor
        self.object_store: ObjectStore = object_store or ObjectStore()
        self._actor: Any = None

    def connect(self, timeout: float | None) -> RayConnection:
        assert self._find_actor is not None, "a receiver's end"
        self._actor = self._actor or self._find_actor(timeout)
        return RayConnection(self._actor, uuid.uuid4().hex, 1)

    def take_over(self, connection: RayConnection, hello: WeightChunk | None = None) -> None:
        connection.object_store = self.object_store
        super().take_over(connection, hello)
