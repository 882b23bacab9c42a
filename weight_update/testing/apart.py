"""Schemes that simulate several hosts on one machine."""

from __future__ import annotations

from typing import ClassVar

from weight_update import DistributedWeightSyncScheme
from weight_update.schemes.base import End
from weight_update.transports import TransportBackend


class Apart(DistributedWeightSyncScheme):
    """A scheme whose workers have host names of their own, so that weights cross sockets.

    Attributes:
        per_host: number of workers, by index, on one host.
    """

    per_host: ClassVar[int] = 1

    def create_transport(self, *, worker_idx: int, end: End) -> TransportBackend:
        if end == "receiver":
            self.host: str | None = f"host {worker_idx // self.per_host}"
        return super().create_transport(worker_idx=worker_idx, end=end)


class ApartInTwos(Apart):
    """Two workers on each host."""

    per_host = 2
