"""What the schemes whose workers may be on other machines have in common."""

from __future__ import annotations

import os
from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from weight_update.schemes.base import End, WeightSyncScheme
from weight_update.strategy.strategy import WeightStrategy
from weight_update.transports.base import TransportBackend
from weight_update.transports.distributed.relay.pairs import require_backend
from weight_update.transports.distributed.signed_queue import find_store, open_store
from weight_update.transports.distributed.store import Store
from weight_update.transports.distributed.transport import DistributedListener, DistributedTransport

__all__ = ["RemoteWeightSyncScheme", "Whereabouts"]

_TOKEN = "WEIGHT_UPDATE_TOKEN"
_HOST = "WEIGHT_UPDATE_HOST"


@dataclass(frozen=True)
class Whereabouts:
    """Where a sender listens, and what it lets workers in with.

    Attributes:
        address: of its interface.
        port: of its store.
        token: the secret.
    """

    address: str
    port: int
    token: str


class RemoteWeightSyncScheme(WeightSyncScheme):
    """Workers come to a TCPStore; process groups of two carry weights. No process group of yours is needed.

    Workers on the sender's host map its memory, and no weights cross a socket to them. To other hosts the
    store carries the signals.

    Workers find the sender by what the scheme carries when it is pickled to them after ``init_on_sender``,
    or by the same ``address``, ``port`` and ``token`` given on both sides. Where neither is so they ask:
    a subclass writes :meth:`announce` and :meth:`look_up`.

    Args:
        backend: what weights go through to other hosts, ``"gloo"`` or ``"nccl"``. NCCL goes over the CUDA
            device that is current in each process, which must be one of its own: a copy to the device and
            one from it are added. A worker that uses CUDA cannot be started by ``fork``.
        sync: see :class:`WeightSyncScheme`.
        strategy: see :class:`WeightSyncScheme`.
        address: of the interface that the sender listens on, and where workers find it. The default,
            loopback, reaches workers on this machine only.
        port: that it listens on; 0 takes a free one.
        token: workers must show it; None takes the environment's ``WEIGHT_UPDATE_TOKEN``, or makes one.
        host: name of the host that this process runs on, if processes of one machine are not to share
            memory; None takes the environment's ``WEIGHT_UPDATE_HOST``, or finds out.
        directory: where buffers lie, as in :class:`SharedMemWeightSyncScheme`.
        timeout: see :class:`WeightSyncScheme`.
        connect_timeout: see :class:`WeightSyncScheme`.
        stable_addresses: see :class:`WeightSyncScheme`.

    Raises:
        ValueError: an unknown backend, or NCCL without CUDA.
    """

    def __init__(
        self,
        strategy: str | WeightStrategy = "tensordict",
        backend: str = "gloo",
        sync: bool = True,
        *,
        address: str = "127.0.0.1",
        port: int = 0,
        token: str | None = None,
        host: str | None = None,
        directory: str | None = None,
        timeout: float = 60.0,
        connect_timeout: float = 120.0,
        stable_addresses: bool = False,
    ) -> None:
        require_backend(backend)
        super().__init__(
            strategy,
            sync,
            timeout=timeout,
            connect_timeout=connect_timeout,
            stable_addresses=stable_addresses,
        )
        self.backend, self.address, self.port, self.host = backend, address, port, host
        self.directory = directory
        self._token = token or os.environ.get(_TOKEN) or self._token

    def _reset(self) -> None:
        super()._reset()
        self._distributed_listener: DistributedListener | None = None

    @abstractmethod
    def announce(self, where: Whereabouts) -> None:
        """Sender: tell those who will ask. Called once, by ``init_on_sender``; does not wait."""

    @abstractmethod
    def look_up(self, timeout: float) -> Whereabouts:
        """Receiver: return what the sender announced.

        Args:
            timeout: seconds to wait for it.

        Raises:
            LifecycleError: this scheme cannot ask anybody here; the message says what to do.
            SyncTimeoutError: the sender did not announce itself in time.
        """

    def open_sender(self, workers: Sequence[int], ctx: Any) -> dict[int, TransportBackend]:
        del ctx
        store = open_store(self.address, self.port)
        self.port = store.port
        links = {idx: self.sender_end(idx) for idx in workers}
        self._listener = self._distributed_listener = DistributedListener(
            store, self._token, links, self.newcomers()
        )
        self.announce(Whereabouts(self.address, self.port, self._token))
        return dict(links)

    def create_transport(self, *, worker_idx: int, end: End) -> TransportBackend:
        if end == "sender":
            return self.sender_end(worker_idx)
        return DistributedTransport(
            self._find_store, token=self._token, host=self.host_name(), directory=self.directory
        )

    def _find_sender(self, timeout: float) -> None:
        if self.port == 0:
            where = self.look_up(timeout)
            self.address, self.port, self._token = where.address, where.port, where.token

    @property
    def network_bytes(self) -> int:
        """Bytes of payloads that this sender sent to other hosts so far; up to 64 KiB they do not count."""
        return 0 if self._distributed_listener is None else self._distributed_listener.network_bytes

    def sender_end(self, worker_idx: int) -> DistributedTransport:
        """The sender's end of the link to a worker."""
        del worker_idx
        return DistributedTransport(**self.sender_options())

    def sender_options(self) -> dict[str, Any]:
        """Arguments for the sender's end of any link."""
        return {
            "token": self._token,
            "address": self.address,
            "host": self.host_name(),
            "directory": self.directory,
            "backend": self.backend,
        }

    def host_name(self) -> str | None:
        """Processes that have one name share memory; None: find out."""
        return self.host or os.environ.get(_HOST)

    def _find_store(self, timeout: float | None) -> Store:
        return find_store(self.address, self.port, timeout)
