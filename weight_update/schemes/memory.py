"""The scheme for receivers in the sender's own process: threads, tests and single-process programs."""

from __future__ import annotations

import logging
import threading
from collections.abc import Sequence
from typing import Any
from weakref import WeakValueDictionary

from weight_update.errors import JoinRefusedError, LifecycleError
from weight_update.schemes.base import Admit, End, WeightSyncScheme
from weight_update.transports.base import TransportBackend
from weight_update.transports.memory import MemoryTransport
from weight_update.transports.rate_limit import Refusals

_log = logging.getLogger(__name__)


class _Listener:
    """Holds the receivers' ends of one sender's links, until the sender is shut down."""

    def __init__(self, workers: Sequence[int], admit: Admit) -> None:
        self.links: dict[int, MemoryTransport] = {}
        self._initial = frozenset(workers)
        self._taken: set[int] = set()
        self._admit = admit
        self.refusals = Refusals(_log)  # none: the receiver's own thread gets the error
        self._closed, self._lock = False, threading.Lock()

    def link(self, worker_idx: int) -> MemoryTransport:
        """Return the receiver's end of a worker's link, a closed one after the sender was shut down.

        Raise JoinRefusedError if the worker cannot be admitted, or another receiver has or had its link.
        """
        with self._lock:  # several receivers may ask at once
            link = self.links.get(worker_idx)
            if not self._closed and (link is None or (link.closed and worker_idx not in self._initial)):
                self._admit(worker_idx)
                self._taken.discard(worker_idx)
                link = self.links.get(worker_idx)
            if self._closed or link is None:
                mine, theirs = MemoryTransport.pair()
                mine.close()
                return theirs
            if link.closed:
                raise JoinRefusedError(
                    f"worker {worker_idx} has left or was lost, and workers of MemoryWeightSyncScheme cannot "
                    "join again: create the scheme and its receivers anew"
                )
            if worker_idx in self._taken:
                late = worker_idx not in self._initial  # only then the index is free after shutdown()
                raise JoinRefusedError(
                    f"another receiver is worker {worker_idx}: give each receiver an index of its own"
                    + (", or shut down the other one first" if late else "")
                )
            self._taken.add(worker_idx)
            return link

    def start(self) -> None:
        """Do nothing: links exist from the beginning."""

    def close(self) -> None:
        """Forget all links, and what is queued in them."""
        self._closed = True
        self.links.clear()


_listeners: WeakValueDictionary[str, _Listener] = WeakValueDictionary()


class MemoryWeightSyncScheme(WeightSyncScheme):
    """Scheme whose sender and receivers are threads of one process.

    Give each receiver a copy of the scheme, ``copy.copy(scheme)``, after ``init_on_sender()``.
    """

    def open_sender(self, workers: Sequence[int], ctx: Any) -> dict[int, TransportBackend]:
        self.listener = _listeners[self.token] = _Listener(workers, self.late_joiner_links())
        return super().open_sender(workers, ctx)

    def create_transport(self, *, worker_idx: int, end: End) -> TransportBackend:
        listener = _listeners.get(self.token)
        if listener is None:
            raise LifecycleError(
                f"no link for worker {worker_idx}: the sender is not in this process, not initialized or gone"
                "; workers in other processes need another scheme, such as SharedMemWeightSyncScheme"
            )
        if end == "receiver":
            return listener.link(worker_idx)
        mine, listener.links[worker_idx] = MemoryTransport.pair()
        return mine
