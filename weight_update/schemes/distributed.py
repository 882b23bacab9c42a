"""torch.distributed: workers on this machine or on others, started by anything."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from typing import Any

import torch.distributed as dist

from weight_update.errors import LifecycleError, LinkClosedError
from weight_update.schemes.base import End, WeightSyncScheme
from weight_update.strategy import WeightStrategy
from weight_update.transports.base import TransportBackend
from weight_update.transports.c10d import Store, TCPStore
from weight_update.transports.distributed import DistributedListener, DistributedTransport
from weight_update.transports.mailbox import open_store

__all__ = ["DistributedWeightSyncScheme"]

_TOKEN = "WEIGHT_UPDATE_TOKEN"
_HOST = "WEIGHT_UPDATE_HOST"


class DistributedWeightSyncScheme(WeightSyncScheme):
    """A TCPStore carries signals, gloo process groups of two the weights; the default group is left alone.

    Workers on the sender's host map its memory, and no weights cross a socket to them.

    Workers find the sender by what the scheme carries when it is pickled to them after ``init_on_sender``. A
    program whose processes each make their own scheme (as under torchrun) gives all of them the same
    ``address``, ``port`` and ``token``; or it initializes torch.distributed first, whose store then tells
    the workers.

    Args:
        backend: ``"gloo"``.
        sync: see :class:`WeightSyncScheme`.
        strategy: see :class:`WeightSyncScheme`.
        address: of the interface that the sender listens on, and where workers find it. The default,
            loopback, reaches workers on this machine only.
        port: that it listens on; 0 takes a free one.
        token: workers must show it; None takes the environment's ``WEIGHT_UPDATE_TOKEN``, or makes one.
        host: name of the host that this process runs on, if processes of one machine are not to share
            memory; None takes the environment's ``WEIGHT_UPDATE_HOST``, or finds out.
        directory: where buffers lie, as in :class:`SharedMemWeightSyncScheme`.
        options: the other options of :class:`WeightSyncScheme`.

    Raises:
        ValueError: an unknown backend.
    """

    def __init__(
        self,
        backend: str = "gloo",
        sync: bool = True,
        strategy: str | WeightStrategy = "tensordict",
        *,
        address: str = "127.0.0.1",
        port: int = 0,
        token: str | None = None,
        host: str | None = None,
        directory: str | None = None,
        **options: Any,
    ) -> None:
        if backend != "gloo":
            raise ValueError(f"unknown backend {backend!r} (known: 'gloo')")
        super().__init__(strategy, sync, **options)
        self.backend, self.address, self.port, self.host = backend, address, port, host
        self.directory = directory
        self._token = token or os.environ.get(_TOKEN) or self._token

    def _reset(self) -> None:
        super()._reset()
        self._store: Store | None = None

    def open_sender(self, workers: Sequence[int], ctx: Any) -> dict[int, TransportBackend]:
        """See :meth:`WeightSyncScheme.open_sender`."""
        del ctx
        self._store = open_store(self.address, self.port)
        self.port = self._store.port
        links = {idx: self._sender_end() for idx in workers}
        self._door = DistributedListener(self._store, self._token, links)
        if dist.is_initialized():
            told = json.dumps([self.address, self.port, self._token])
            dist.distributed_c10d._get_default_store().set(self._notice, told)
        return dict(links)

    def create_transport(self, *, worker_idx: int, end: End) -> TransportBackend:
        """See :meth:`WeightSyncScheme.create_transport`."""
        del worker_idx
        if end == "sender":
            return self._sender_end()
        if self.port == 0 and dist.is_initialized():
            told = dist.distributed_c10d._get_default_store().get(self._notice)  # waits for the sender
            self.address, self.port, self._token = json.loads(told)
        if self.port == 0:
            raise LifecycleError(
                "this scheme does not know where its sender is: pass it to the worker after "
                "init_on_sender(), or give both sides address, port and token, or initialize "
                "torch.distributed"
            )
        return DistributedTransport(
            self._find_store, token=self._token, host=self._host_name(), directory=self.directory
        )

    @property
    def _notice(self) -> str:
        return f"weight_update/{self.model_id or 'policy'}"

    def _sender_end(self) -> DistributedTransport:
        return DistributedTransport(
            token=self._token, address=self.address, host=self._host_name(), directory=self.directory
        )

    def _host_name(self) -> str | None:
        return self.host or os.environ.get(_HOST)

    def _find_store(self) -> Store:
        try:
            return Store(TCPStore(self.address, self.port, is_master=False, wait_for_workers=False))
        except dist.DistError as error:
            reason = str(error).partition("\n")[0]
            raise LinkClosedError(f"no sender at {self.address}:{self.port} ({reason})") from None
