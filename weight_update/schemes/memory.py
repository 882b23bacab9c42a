"""Receivers in the sender's own process, for threads, tests and single-process programs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from weight_update.errors import LifecycleError
from weight_update.schemes.base import End, Newcomers, WeightSyncScheme
from weight_update.transports.base import TransportBackend
from weight_update.transports.memory import MemoryTransport

__all__ = ["MemoryWeightSyncScheme"]

_waiting: dict[tuple[str, int], MemoryTransport] = {}
_doors: dict[str, Newcomers] = {}


class MemoryWeightSyncScheme(WeightSyncScheme):
    """Sender and receivers are threads of one process.

    Give each receiver a copy of the scheme (``copy.copy(scheme)``) after ``init_on_sender()``.
    """

    def open_sender(self, workers: Sequence[int], ctx: Any) -> dict[int, TransportBackend]:
        """See :meth:`WeightSyncScheme.open_sender`."""
        _doors[self._token] = self.newcomers()
        return super().open_sender(workers, ctx)

    def create_transport(self, *, worker_idx: int, end: End) -> TransportBackend:
        """See :meth:`WeightSyncScheme.create_transport`."""
        key = (self._token, worker_idx)
        if end == "sender":
            mine, _waiting[key] = MemoryTransport.pair()
            return mine
        if self._token not in _doors:
            raise LifecycleError(
                f"no link for worker {worker_idx}: the sender is not in this process, or not initialized"
            )
        if key not in _waiting:
            _doors[self._token](worker_idx)
        return _waiting[key]
