"""TCPStore and other names of torch.distributed, whose compiled half has no complete type stubs."""

from __future__ import annotations

import contextlib
import threading
import time
import weakref
from collections.abc import Callable
from datetime import timedelta
from typing import Any, TypeVar

import torch.distributed as dist

from weight_update.errors import LinkClosedError, SyncTimeoutError, TransportError
from weight_update.transports.distributed.store_client import DroppedError, StoreClient
from weight_update.transports.inherited_sockets import InheritedSockets

_DRAIN_SECONDS, _LOOK_SECONDS = 0.5, 0.005
_AWAITED = 63
"""Largest number of queues that :meth:`Store.close` waits for; a killed reader never reads its queue."""
_FAREWELL_SECONDS = 2.0
REPLY_SECONDS = 10.0
"""Seconds that the server of a store may take to answer where the caller sets no limit."""

_T = TypeVar("_T")

_dist: Any = dist
HashStore: Any = _dist.HashStore
PrefixStore: Any = _dist.PrefixStore
StoreBase: Any = _dist.Store
ProcessGroupGloo: Any = _dist.ProcessGroupGloo
TCPStore: Any = _dist.TCPStore


class Store:
    """A TCPStore: the server in this process, or a connection to one in another.

    A failed connection is opened once more, because the server may have dropped it and still run.

    Args:
        timeout: seconds to reach the server.
        server: listening ``torch.distributed.TCPStore``, if it is in this process.
        sockets: sockets of that server.

    Raises:
        LinkClosedError: no process listens there.
        SyncTimeoutError: the server did not answer in time.
    """

    def __init__(
        self,
        host: str,
        port: int,
        timeout: float = REPLY_SECONDS,
        *,
        server: Any = None,
        sockets: InheritedSockets | None = None,
    ) -> None:
        self.host: str = host
        self.port: int = port
        self._server = server if server is None else own(server)
        self._sockets = sockets
        self._using = threading.Lock()
        self._closed = False
        self._lost: str | None = None
        self._unread: list[str] = []
        try:
            self._client: StoreClient | None = StoreClient(host, port, timeout)
        except BaseException:
            disown(server)
            self._server = server = None  # it listens as long as an object refers to it
            if sockets is not None:
                sockets.forget()
            raise

    def connect(self) -> StoreClient:
        """Open another connection, for use in a single thread; raise as the constructor."""
        if self._closed:
            raise LinkClosedError("this store was closed")
        return StoreClient(self.host, self.port, REPLY_SECONDS)

    def give_up(self, error: LinkClosedError) -> None:
        """Make no further attempt to reach a server in another process, after ``error``."""
        if self._server is None:
            self._lost = str(error)

    def c10d(self) -> Any:
        """Return a client for process groups of torch; raise as the constructor."""
        self.connect().release()  # torch's client would wait minutes for a stopped server
        limit = timedelta(seconds=REPLY_SECONDS)
        return TCPStore(self.host, self.port, is_master=False, wait_for_workers=False, timeout=limit)

    def queue_push(self, name: str, item: bytes, timeout: float | None = None) -> None:
        """Add ``item`` to a queue; do not wait until the server has it.

        Without a timeout, it may take :data:`REPLY_SECONDS`.

        Raises:
            LinkClosedError: the store is gone.
            SyncTimeoutError: the server does not read.
        """
        self._use(lambda client, left: client.push(name, item, left), timeout)

    def queue_len(self, name: str, timeout: float | None = None) -> int:
        """Return the length of a queue after all earlier pushes; raise as :meth:`queue_push`."""
        return self._use(lambda client, left: client.length(name, left), timeout)

    def await_reader(self, name: str) -> None:
        """Make :meth:`close` of a server wait until a finished queue was read."""
        if self._server is not None:
            unread = [one for one in self._unread if one != name and self.queue_len(one)]
            self._unread = [*unread[-_AWAITED:], name]

    def close(self) -> None:
        """Close the store; a server first waits, for a limited time, until the last items have been read."""
        deadline = time.monotonic() + _DRAIN_SECONDS
        with contextlib.suppress(TransportError, TimeoutError):
            while self._server is not None and not self._closed and any(map(self.queue_len, self._unread)):
                if time.monotonic() > deadline:
                    break
                time.sleep(_LOOK_SECONDS)
        self._closed = True
        client = self._client
        if client is not None:
            client.close()  # wakes the thread that uses it
        with self._using:
            self._drop()
        server, self._server = self._server, None
        disown(server)
        if self._sockets is not None:
            self._sockets.forget()

    def _use(self, action: Callable[[StoreClient, float], _T], timeout: float | None) -> _T:
        deadline = time.monotonic() + (REPLY_SECONDS if timeout is None else timeout)
        if not self._using.acquire(timeout=max(deadline - time.monotonic(), 0.0)):
            raise SyncTimeoutError("other threads are still writing to the store")
        try:
            if self._client is not None:
                try:
                    return self._try(action, self._client, deadline)
                except DroppedError:  # another connection may work
                    pass
                except LinkClosedError as error:
                    self.give_up(error)
                    raise
            if self._lost is not None or self._closed:
                raise LinkClosedError(self._lost or "this store was closed")
            self._client = StoreClient(self.host, self.port, deadline - time.monotonic())
            return self._try(action, self._client, deadline)
        finally:
            self._using.release()

    def _try(self, action: Callable[[StoreClient, float], _T], client: StoreClient, deadline: float) -> _T:
        """Call ``action``; drop the connection where half of a request may have been sent."""
        try:
            return action(client, deadline - time.monotonic())
        except (LinkClosedError, SyncTimeoutError):
            self._drop()
            raise

    def _drop(self) -> None:
        client, self._client = self._client, None
        if client is not None:
            client.release()


_owned: list[Any] = []


def own(thing: Any) -> Any:
    """Keep ``thing`` alive until :meth:`disown`; return it.

    Objects with threads must not be destroyed in a forked child, where those threads do not exist. A child
    inherits this list, and never empties it.
    """
    _owned.append(thing)
    return thing


def disown(thing: Any) -> None:
    """Release ``thing``, in the process that called :meth:`own`; calling it twice is fine."""
    _owned[:] = [one for one in _owned if one is not thing]


_threads: weakref.WeakSet[threading.Thread] = weakref.WeakSet()


def leave_in_order(thread: threading.Thread) -> None:
    """Make the interpreter's exit wait briefly for ``thread``, which may return from C++ at that moment.

    Otherwise the process would abort.
    """
    _threads.add(thread)


def _await_threads() -> None:
    deadline = time.monotonic() + _FAREWELL_SECONDS
    for thread in [one for one in _threads if one.is_alive()]:
        thread.join(max(deadline - time.monotonic(), 0.0))


# At exit, finalizers run from the newest to the oldest: schemes are shut down first, which ends the threads.
weakref.finalize(leave_in_order, _await_threads)
