"""Links that hold one connection at a time, which a worker may replace by a new one."""

from __future__ import annotations

import threading
from abc import abstractmethod
from typing import Generic, Protocol, TypeVar

from weight_update.errors import FormatError, LinkClosedError
from weight_update.transports.base import Allocate, TransportBackend
from weight_update.transports.shared_memory.unix_stream import deadline_of, seconds_left
from weight_update.wire.frames import WeightChunk

__all__ = ["ReconnectingLink"]


class _Closable(Protocol):
    def close(self) -> None:
        """End the connection."""


_C = TypeVar("_C", bound=_Closable)


class ReconnectingLink(TransportBackend, Generic[_C]):
    """Base of links whose worker may leave and join again.

    The worker's end opens connections; a listener gives each new one to the sender's end, by
    :meth:`take_over`. A connection that fails is dropped. The sender's end then waits for the next one, while
    the worker's end raises until it joins again. One exception: a sender's end whose ``send_chunk`` found the
    worker gone keeps the connection, because the worker's last chunks may still be there to be read.

    Args:
        joins: whether this is the worker's end.
    """

    def __init__(self, *, joins: bool) -> None:
        self._joins = joins
        self._changed = threading.Condition()
        self._connection: _C | None = None
        self._hello: WeightChunk | None = None  # first chunk of the connection, until it is received
        self._closed = False

    @abstractmethod
    def _send(self, connection: _C, chunk: WeightChunk, deadline: float | None) -> None:
        """Send a chunk through ``connection``; raise as :meth:`send_chunk`."""

    @abstractmethod
    def _recv(self, connection: _C, deadline: float | None, allocate: Allocate | None) -> WeightChunk | None:
        """Return the next chunk from ``connection``, or None on timeout; raise as :meth:`recv_chunk`."""

    def _open(self, chunk: WeightChunk, deadline: float | None) -> _C:
        """Return a new connection for ``chunk``, where there is none and this end can open one."""
        del chunk, deadline
        raise LinkClosedError("the other end is not connected")

    def send_chunk(self, chunk: WeightChunk, timeout: float | None = None) -> None:
        deadline = deadline_of(timeout)
        connection = self._connection or self._open(chunk, deadline)
        try:
            self._send(connection, chunk, deadline)
        except (LinkClosedError, TimeoutError) as error:
            if self._joins or isinstance(error, TimeoutError):
                self._drop(connection)
            raise

    def recv_chunk(
        self, timeout: float | None = None, allocate: Allocate | None = None
    ) -> WeightChunk | None:
        deadline = deadline_of(timeout)
        connection = self._await_connection(deadline)
        if connection is None:
            return None
        if self._hello is not None:
            hello, self._hello = self._hello, None
            return hello
        try:
            return self._recv(connection, deadline, allocate)
        except (LinkClosedError, FormatError, TimeoutError):
            self._drop(connection)
            raise

    def take_over(self, connection: _C, hello: WeightChunk) -> None:
        """Sender's end: use the connection of a newly admitted worker, whose first chunk is ``hello``."""
        with self._changed:
            ended = connection if self._closed else self._connection  # the worker notices at once
            if not self._closed:
                self._connection, self._hello = connection, hello
                self._changed.notify_all()
        if ended is not None:
            ended.close()

    def disconnect(self) -> None:
        """Cut the worker off; it notices after it has read the earlier chunks."""
        self._drop(self._connection)

    def close(self) -> None:
        with self._changed:
            self._closed = True
            self._changed.notify_all()
        self._drop(self._connection)

    def _drop(self, connection: _C | None) -> None:
        """Close ``connection``, and forget it unless another one has replaced it."""
        with self._changed:
            if connection is not None and connection is self._connection:
                self._connection = None
        if connection is not None:
            connection.close()

    def _await_connection(self, deadline: float | None) -> _C | None:
        with self._changed:
            while self._connection is None:
                if self._joins:
                    raise LinkClosedError("not connected to the sender")
                if self._closed:
                    raise LinkClosedError("this end was closed")
                left = seconds_left(deadline)
                if left == 0:
                    return None
                self._changed.wait(left)
            return self._connection
