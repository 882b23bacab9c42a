"""Links that hold one connection at a time, which a worker may replace by a new one."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from typing import Any, Generic, Protocol, TypeVar

from weight_update.errors import (
    FormatError,
    JoinRefusedError,
    LifecycleError,
    LinkClosedError,
    SyncTimeoutError,
    UnreachableMemoryError,
    WeightSyncError,
)
from weight_update.transports.base import Allocate, Capabilities, TransportBackend
from weight_update.transports.socket_stream import SHORTAGES, deadline_of, seconds_left, shortage
from weight_update.wire.frames import Kind, WeightChunk


class LinkConnection(Protocol):
    """One connection of a :class:`ReconnectingLink`: from a worker's arrival until either end leaves.

    An OSError or EOFError that a method raises is a LinkClosedError for the users of the link; a TimeoutError
    or BlockingIOError is a SyncTimeoutError. A connection that raised any of them, or FormatError, is closed.
    Two errors of ``recv`` keep it open: JoinRefusedError and UnreachableMemoryError. The rules for threads
    are those of :class:`~weight_update.TransportBackend`.
    """

    def send(self, chunk: WeightChunk, timeout: float | None) -> None:
        """Send one chunk within ``timeout`` seconds."""

    def recv(self, timeout: float | None, allocate: Allocate | None) -> WeightChunk | None:
        """Return the next chunk, or None when none arrived within ``timeout`` seconds."""

    def close(self) -> None:
        """End the connection and wake threads that wait on it; calling it twice is fine."""


_PAUSE_SECONDS = 0.5
_C = TypeVar("_C", bound=LinkConnection)


class ReconnectingLink(TransportBackend, Generic[_C]):
    """Base of links whose worker may leave and join again.

    The receiver's end opens a connection by :meth:`connect`. The sender's end is given each connection by a
    :class:`~weight_update.JoinListener`, or finds it by :meth:`accept`. A connection that fails is dropped.
    The sender's end then waits for the next one, while the receiver's end raises until ``restart``. One
    exception: an end whose ``send_chunk`` found the other end gone keeps the connection, because the last
    chunks of that end may still be there to be read.

    A HELLO that waits for its answer is not sent again: the answer may be under way and larger than a
    socket's buffer, and then each end would wait for the other to read.

    Args:
        joins: whether this is the receiver's end.
    """

    capabilities: Capabilities = Capabilities(allows_rejoin=True)

    explain: Callable[[Exception], Exception] | None = None
    """Function that takes an error of the link and returns the one to raise; set it at a sender's end."""

    def __init__(self, *, joins: bool) -> None:
        self._joins = joins
        self._changed = threading.Condition()
        self._connection: _C | None = None
        self._hello: WeightChunk | None = None  # first chunk of the connection, until it is received
        self._asked: Mapping[str, Any] | None = None  # header of the HELLO that waits for its answer
        self._is_over = False  # whether restart() needs another connection than the present one
        self._closed = False

    @property
    def closed(self) -> bool:
        """Whether this end was closed."""
        return self._closed

    def connect(self, timeout: float | None) -> _C:
        """Return a new connection to the sender; called at the receiver's end.

        ``close`` does not wait for this method; a connection that comes later is closed. A loop in it
        ends when this end was :attr:`closed`.

        Args:
            timeout: seconds; None waits as long as the sender may come.

        Raises:
            LinkClosedError: the sender is gone; any other OSError or EOFError means the same, except a lack
                of memory or descriptors.
            SyncTimeoutError: the sender did not answer in time.
        """
        raise NotImplementedError(f"{type(self).__name__} cannot connect")

    def accept(self, timeout: float | None) -> _C | None:
        """Return the worker's next connection, or None if none came in time; called at the sender's end.

        The default waits for :meth:`take_over`, and returns None. Override this method if there is no
        listener, and return soon after this end was :attr:`closed`.
        """
        with self._changed:
            self._changed.wait_for(lambda: self._connection is not None or self._closed, timeout)
        return None

    def take_over(self, connection: _C, hello: WeightChunk | None = None) -> None:
        """Use ``connection`` from now on, and close the one before.

        Args:
            connection: connection of a worker that a listener has admitted.
            hello: its first chunk, if that was received already.
        """
        with self._changed:
            ended = connection if self._closed else self._connection  # the worker notices at once
            if not self._closed:
                self._hello, self._asked = hello, None  # first: recv_chunk does not take the lock
                self._is_over = False
                self._connection = connection
                self._changed.notify_all()
        if ended is not None:
            ended.close()

    def restart(self, timeout: float | None = None) -> None:
        """Open a new connection, unless there is one that works."""
        self._require_open()
        self._require_receiver("restart")
        if self._is_over:
            self._drop(self._connection)
        if self._connection is None:
            try:
                connection = self.connect(timeout)
            except (OSError, EOFError) as error:
                if isinstance(error, OSError) and error.errno in SHORTAGES:
                    raise shortage(error) from None  # the sender may live
                raise self._error_of(error) from error.__cause__
            self.take_over(connection)
            if self.closed:
                self.close()  # it may not have seen what connect() opened
                raise LinkClosedError("this end was closed")

    def send_chunk(self, chunk: WeightChunk, timeout: float | None = None) -> None:
        connection = self._connection
        if connection is None:
            raise self._error_of(LinkClosedError("the other end is not connected"))
        if chunk.kind is Kind.HELLO:
            if chunk.header == self._asked:
                return
            self._asked = chunk.header if chunk.header["error"] is None else None  # an error needs no answer
        try:
            connection.send(chunk, timeout)
        except (OSError, EOFError) as error:
            if isinstance(error, TimeoutError | BlockingIOError):
                self._drop(connection)
            self._is_over = True
            raise self._error_of(error) from error.__cause__
        except BaseException:
            self._is_over = True  # a signal handler, for example, may have left a part of the chunk unsent
            raise

    def recv_chunk(
        self, timeout: float | None = None, allocate: Allocate | None = None
    ) -> WeightChunk | None:
        connection = self._connection
        if connection is None:
            deadline = deadline_of(timeout)
            connection = self._await_connection(deadline)
            if connection is None:
                return None
            timeout = seconds_left(deadline)
        if self._hello is not None:
            hello, self._hello = self._hello, None
            return hello
        try:
            chunk = connection.recv(timeout, allocate)
        except (JoinRefusedError, UnreachableMemoryError):
            raise
        except (OSError, EOFError, FormatError) as error:
            self._drop(connection)
            raise self._error_of(error) from error.__cause__
        if chunk is not None:
            self._asked = None
            self._is_over |= chunk.kind is Kind.REFUSED  # a listener that refuses a worker closes its end
        return chunk

    def receive_weights(self, timeout: float | None = None, **options: Any) -> Any | None:
        """Receive one set of weights; see :meth:`TransportBackend.receive_weights`.

        Raises:
            LifecycleError: this is a sender's end that nobody is connected to.
        """
        if self._connection is None:
            self._require_receiver("receive_weights")
        return super().receive_weights(timeout, **options)

    def _require_open(self) -> None:
        """Raise LinkClosedError if this end was closed."""
        if self._closed:
            raise LinkClosedError("this end was closed")

    def _require_receiver(self, call: str) -> None:
        if not self._joins:
            raise LifecycleError(
                f"{call}() is for a receiver's end; this {type(self).__name__} is a sender's end, because it "
                "was not told where its sender is. Tell it when you create it, as "
                "SharedMemTransport(address, token=...) does, or let a scheme create both ends"
            )

    def disconnect(self) -> None:
        self._drop(self._connection)

    def close(self) -> None:
        with self._changed:
            self._closed = True
            self._changed.notify_all()
        self._drop(self._connection)

    def _drop(self, connection: _C | None) -> None:
        """Close ``connection``, and forget it unless another one has replaced it."""
        if connection is None:
            return
        connection.close()  # first: if a signal handler raises here, disconnect() can be called again
        with self._changed:
            if connection is self._connection:
                self._connection = None

    def _await_connection(self, deadline: float | None) -> _C | None:
        if self._joins:
            raise LinkClosedError("not connected to the sender")
        while True:
            left = seconds_left(deadline)
            try:
                found = self.accept(left)
            except (OSError, EOFError) as error:
                with self._changed:  # it may fail again at once
                    left = seconds_left(deadline)
                    pause = _PAUSE_SECONDS if left is None else min(left, _PAUSE_SECONDS)
                    self._changed.wait_for(lambda: self._closed, pause)
                raise self._error_of(error) from error.__cause__
            if found is not None:
                self.take_over(found)
            self._require_open()
            connection = self._connection
            if connection is not None or left == 0:
                return connection

    def _error_of(self, error: OSError | EOFError | FormatError) -> Exception:
        found: Exception = error
        if isinstance(error, TimeoutError | BlockingIOError) and not isinstance(error, WeightSyncError):
            found = SyncTimeoutError(str(error) or "the other end took too long")
        elif not isinstance(error, WeightSyncError):
            found = LinkClosedError(f"the other end is gone ({error or type(error).__name__})")
        return found if self._closed or self.explain is None else self.explain(found)
