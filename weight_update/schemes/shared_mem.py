"""Shared memory: one copy an update, however many workers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from weight_update.schemes.base import End, WeightSyncScheme
from weight_update.strategy import WeightStrategy
from weight_update.transports.base import TransportBackend
from weight_update.transports.shared_mem import SharedMemListener, SharedMemTransport

__all__ = ["SharedMemWeightSyncScheme"]


class SharedMemWeightSyncScheme(WeightSyncScheme):
    """Workers on one machine point their parameters at shared memory that the sender fills.

    Two slots alternate: the sender copies the weights into the one that no worker reads, then names it to
    the workers over a Unix socket; each switches to it between two forward passes. The trainer's own
    parameters are never shared, and what a worker writes into its weights is seen by nobody else.

    Args:
        strategy: see :class:`WeightSyncScheme`.
        sync: see :class:`WeightSyncScheme`.
        per_worker_weights: accepted for programs written for TorchRL; workers may always have weights
            of their own here.
        directory: None keeps the slots in anonymous memory, which no mount limits; a path such as
            ``"/dev/shm"`` keeps them in a nameless file there, within the limit of that mount.
        address: for a worker that makes a scheme of its own: what :attr:`address` says on the sender.
        token: with ``address``, the same secret on both sides; None makes one.
        options: the other options of :class:`WeightSyncScheme`.
    """

    def __init__(
        self,
        strategy: str | WeightStrategy = "tensordict",
        sync: bool = True,
        per_worker_weights: bool = False,
        *,
        directory: str | None = None,
        address: str | None = None,
        token: str | None = None,
        **options: Any,
    ) -> None:
        super().__init__(strategy, sync, **options)
        self._token = token or self._token
        self.per_worker_weights = per_worker_weights
        self.directory = directory
        self._address: str | None = address

    @property
    def address(self) -> str | None:
        """Where the sender listens, an abstract Unix address; None before ``init_on_sender``."""
        return self._address

    def open_sender(self, workers: Sequence[int], ctx: Any) -> dict[int, TransportBackend]:
        """See :meth:`WeightSyncScheme.open_sender`."""
        links = {idx: SharedMemTransport(directory=self.directory) for idx in workers}
        door = SharedMemListener(self._token, links, self.newcomers())
        self._door, self._address = door, door.address
        return dict(links)

    def create_transport(self, *, worker_idx: int, end: End) -> TransportBackend:
        """See :meth:`WeightSyncScheme.create_transport`."""
        return SharedMemTransport(self._address if end == "receiver" else None, directory=self.directory)
