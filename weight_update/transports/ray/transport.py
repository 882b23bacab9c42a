"""Links through Ray alone: messages through a rendezvous actor, payloads through Ray's object store."""

from __future__ import annotations

import threading
import uuid
from collections.abc import Callable
from typing import Any

from weight_update.errors import FormatError, LinkClosedError
from weight_update.transports.base import Allocate, Capabilities, TransportBackend
from weight_update.transports.ray.connection import RayConnection
from weight_update.transports.ray.object_store import ObjectStore
from weight_update.transports.shared_memory.unix_stream import deadline_of, seconds_left
from weight_update.wire.frames import WeightChunk

__all__ = ["RayTransport"]


class RayTransport(TransportBackend):
    """One end of a link through Ray, for clusters whose actors cannot open ports to each other.

    The sender copies each payload once into Ray's object store, whatever the number of workers, and each node
    fetches it once. A worker copies it out of the store once, because memory mapped by Ray is read-only.

    Args:
        find_actor: returns the handle of the rendezvous actor within the given seconds; called when the link
            is first used. None makes a sender's end, whose connection comes from ``RayListener``.
        object_store: store shared by the sender's ends.
    """

    capabilities = Capabilities(send_never_blocks=True, allows_rejoin=True)

    def __init__(
        self, find_actor: Callable[[float | None], Any] | None = None, object_store: ObjectStore | None = None
    ) -> None:
        self._find_actor, self._object_store = find_actor, object_store or ObjectStore()
        self._actor: Any = None
        self._changed = threading.Condition()
        self._connection: RayConnection | None = None
        self._first: WeightChunk | None = None
        self._fresh = False  # no chunk was sent on this connection yet
        self._closed = False

    def restart(self, timeout: float | None = None) -> None:
        """Open a new connection, unless there is one that works."""
        if self._find_actor is None or self._closed:
            raise LinkClosedError("this end was closed")
        if self._connection is None:
            self._actor = self._actor or self._find_actor(timeout)
            self._connection = RayConnection(self._actor, uuid.uuid4().hex, 1, self._object_store)
            self._fresh = True

    def send_chunk(self, chunk: WeightChunk, timeout: float | None = None) -> None:
        """Send one chunk; never wait for the other end."""
        connection = self._connection
        if connection is None:
            raise LinkClosedError("the other end is not connected")
        try:
            if self._fresh:
                self._fresh = False
                connection.request_join(chunk)
            else:
                connection.send(chunk)
        except LinkClosedError:
            if self._find_actor is None:
                connection.close()  # recv_chunk() notices
            else:
                self._drop(connection)
            raise

    def recv_chunk(
        self, timeout: float | None = None, allocate: Allocate | None = None
    ) -> WeightChunk | None:
        deadline = deadline_of(timeout)
        connection = self._await_connection(deadline)
        if connection is None:
            return None
        if self._first is not None:
            first, self._first = self._first, None
            return first
        try:
            return connection.recv(deadline, allocate)
        except (LinkClosedError, FormatError):
            self._drop(connection)
            raise

    def attach(self, connection: RayConnection, hello: WeightChunk) -> None:
        """Sender's end: take over the connection of a worker that asked to join."""
        with self._changed:
            old = (
                connection if self._closed else self._connection
            )  # on a closed link the worker notices at once
            if not self._closed:
                self._connection, self._first = connection, hello
                self._changed.notify_all()
        if old is not None:
            old.close()

    @property
    def object_store(self) -> ObjectStore:
        """Store that payloads are put into."""
        return self._object_store

    def disconnect(self) -> None:
        """Cut the worker off; it notices after it has read the earlier messages."""
        self._drop(self._connection)

    def close(self) -> None:
        with self._changed:
            self._closed = True
            self._changed.notify_all()
        self._drop(self._connection)

    def _drop(self, connection: RayConnection | None) -> None:
        with self._changed:
            if connection is not None and connection is self._connection:
                self._connection = None
        if connection is not None:
            connection.close()

    def _await_connection(self, deadline: float | None) -> RayConnection | None:
        with self._changed:
            while self._connection is None:
                if self._closed or self._find_actor is not None:
                    raise LinkClosedError("not connected to the sender")
                left = seconds_left(deadline)
                if left == 0:
                    return None
                self._changed.wait(left)
            return self._connection
