"""Threads that admit workers; unauthenticated connections can neither exhaust nor stop them."""

from __future__ import annotations

import contextlib
import logging
import select
import socket
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from typing import NamedTuple

from weight_update.errors import LinkClosedError, SyncTimeoutError
from weight_update.threads import start, start_thread
from weight_update.transports.handshake import answer_caller
from weight_update.transports.rate_limit import EXPECTED, Refusals
from weight_update.transports.socket_stream import (
    SHORTAGES,
    SocketStream,
    close_in_children,
    seconds_left,
    shortage,
)

_JOIN_SECONDS = 30.0
"""Seconds from the connection to the end of the first request."""
MAX_PENDING = 128
"""Connections that may be in the middle of the handshake at once."""
_MAX_ACCEPTED = 16
"""Connections accepted between two checks of the pending ones."""
Serve = Callable[[SocketStream, bytes, float], None]
"""Called with a connection, its key, and the deadline for the first request."""


class ListenerThread(ABC):
    """A thread that takes one connection after the other until it is closed; each error is a refusal.

    Attributes:
        back_off: seconds of the pause after an unexpected error, which may repeat at once.
        refusals: reasons of the last refused connections.
    """

    back_off: float = 1.0

    def __init__(self, log: logging.Logger, name: str = "weight_update-listener") -> None:
        self._closed = threading.Event()
        self.refusals: Refusals = Refusals(log)
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)

    def start(self) -> None:
        """Start to take connections; calling it twice is fine."""
        if not self._thread.is_alive():
            start(self._thread)

    def close(self) -> None:
        """Take no more connections."""
        self._closed.set()
        self.wake()
        if self._thread.is_alive() and self._thread is not threading.current_thread():
            self._thread.join(5.0)

    @abstractmethod
    def wake(self) -> None:
        """Make :meth:`_step` return, because this listener was closed."""

    @abstractmethod
    def _step(self) -> None:
        """Wait for something to do, and do it."""

    def _run(self) -> None:
        while not self._closed.is_set():
            try:
                self._step()
            except Exception as error:  # noqa: BLE001 - without this thread no worker could join
                if self._closed.is_set():
                    return
                self.refusals.note(error)
                if not isinstance(error, EXPECTED):
                    self._closed.wait(self.back_off)


class Listener(ListenerThread):
    """A thread that accepts connections and serves those whose other end knows the token.

    The thread performs all handshakes. An unauthenticated connection costs a descriptor and a few hundred
    bytes, for a bounded time; if there are too many of them, or descriptors are short, the oldest is closed.
    An authenticated connection gets a thread of its own. No error stops the listener before :meth:`close`: it
    logs errors, at a limited rate, and continues.

    Args:
        sock: bound and listening socket; the listener closes it.
        context: see :func:`~weight_update.transports.handshake.proof`.
        serve: called in a thread for each connection; the connection is closed if it raises.
    """

    back_off: float = 0.1

    def __init__(
        self, sock: socket.socket, token: str, context: str, serve: Serve, name: str, log: logging.Logger
    ) -> None:
        super().__init__(log, name)
        close_in_children(sock)
        sock.setblocking(False)
        self._sock, self._token, self._context, self._serve = sock, token, context, serve
        self._pending: dict[int, _Pending] = {}  # by descriptor, oldest first
        self._poller = select.poll()
        self._descriptor = sock.fileno()
        self._poller.register(self._descriptor, select.POLLIN)
        self._serving: set[SocketStream] = set()

    def close(self) -> None:
        """Stop accepting, and end all connections that are not yet authenticated or still served."""
        super().close()
        for pending in list(self._pending.values()):
            self._remove(pending)
            pending.stream.close()
        self._sock.close()

    def wake(self) -> None:
        for stream in list(self._serving):
            stream.close()
        with contextlib.suppress(OSError):  # it is closed already if this is the second call
            self._sock.shutdown(socket.SHUT_RDWR)

    # -- the thread of all handshakes ------------------------------------------------------------------

    def _step(self) -> None:
        deadline = next((pending.deadline for pending in self._pending.values()), None)
        left = seconds_left(deadline)
        ready = {fd for fd, _ in self._poller.poll(None if left is None else left * 1e3)}
        for pending in [self._pending[fd] for fd in ready if fd in self._pending]:
            self._advance(pending)
        for pending in list(self._pending.values()):
            if seconds_left(pending.deadline):
                break
            self._refuse(
                pending, SyncTimeoutError("the other end did not prove in time that it knows the token")
            )
        if self._descriptor in ready:
            self._accept()

    def _accept(self) -> None:
        for _ in range(_MAX_ACCEPTED):
            try:
                sock, _ = self._sock.accept()
            except BlockingIOError:
                return
            except ConnectionAbortedError:
                continue
            except OSError as error:
                if error.errno not in SHORTAGES or not self._pending:
                    raise shortage(error) from None
                refusal = LinkClosedError(str(shortage(error).strerror))
                self._refuse(next(iter(self._pending.values())), refusal)
                continue
            if len(self._pending) == MAX_PENDING:
                oldest = next(iter(self._pending.values()))
                self._refuse(oldest, LinkClosedError("too many connections at once"))
            stream = SocketStream(sock)
            handshake = answer_caller(stream, self._token, self._context)
            newest = _Pending(stream, sock.fileno(), time.monotonic() + _JOIN_SECONDS, handshake)
            self._pending[newest.fd] = newest
            self._poller.register(newest.fd, select.POLLIN)
            self._advance(newest)

    def _advance(self, pending: _Pending) -> None:
        """Go on with a handshake as far as the other end's message has arrived."""
        try:
            verified = next(pending.handshake)
            if verified is not None:
                self._remove(pending)
                served = (pending.stream, *verified, pending.deadline)
                # It raises if there are too many: the other end gets no answer and may retry.
                start_thread("weight_update-join", self._serve_one, *served)
        except Exception as error:  # noqa: BLE001 - it ends this connection only
            self._refuse(pending, error)

    def _refuse(self, pending: _Pending, error: Exception) -> None:
        self._remove(pending)
        self._end(pending.stream, error)

    def _remove(self, pending: _Pending) -> None:
        if self._pending.get(pending.fd) is pending:
            del self._pending[pending.fd]
            self._poller.unregister(pending.fd)

    # -- threads of authenticated connections --------------------------------------------------------

    def _serve_one(self, stream: SocketStream, answer: bytes, key: bytes, deadline: float) -> None:
        """Send ``answer``, the last message of the handshake, and serve the connection."""
        self._serving.add(stream)
        try:
            if self._closed.is_set():  # close() may not have seen the stream
                raise LinkClosedError("the listener was closed")
            stream.send(answer, deadline)
            self._serve(stream, key, deadline)
        except Exception as error:  # noqa: BLE001 - it ends this connection only
            self._end(stream, error)
        finally:
            self._serving.discard(stream)

    def _end(self, stream: SocketStream, error: Exception) -> None:
        stream.close()
        if not self._closed.is_set():
            self.refusals.note(error)


class _Pending(NamedTuple):
    """A connection that is not yet authenticated, and the rest of its handshake."""

    stream: SocketStream
    fd: int
    deadline: float
    handshake: Iterator[tuple[bytes, bytes] | None]
