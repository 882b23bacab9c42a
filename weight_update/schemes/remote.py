"""Common base of the schemes whose workers may be on other machines."""

from __future__ import annotations

import os
from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from typing_extensions import Unpack

from weight_update.arguments import given_token, port_number, require_host, require_reachable, whole_number
from weight_update.errors import undo_on_error
from weight_update.schemes.base import End, WeightSyncScheme
from weight_update.schemes.options import SchemeOptions, takes_options_of
from weight_update.strategy.strategy import WeightStrategy
from weight_update.transports.base import TransportBackend
from weight_update.transports.distributed.relay.nccl import require_backend
from weight_update.transports.distributed.rendezvous import SenderStore
from weight_update.transports.distributed.transport import DistributedListener, DistributedTransport
from weight_update.transports.host_name import this_host

_HOST = "WEIGHT_UPDATE_HOST"
_MOST_CONNECTIONS = 64


@dataclass(frozen=True)
class Whereabouts:
    """Address and token that a worker needs to join a sender.

    Attributes:
        address: address of the sender's interface.
        port: port of its rendezvous.
        token: secret of the scheme.
    """

    address: str
    port: int
    token: str


class RemoteWeightSyncScheme(WeightSyncScheme):
    """Base of schemes whose workers may be on other hosts; it needs no process group.

    Workers on the sender's host map its memory, so no weights cross a socket to them. Workers on other hosts
    connect over TCP, and each host gets the weights once.

    A worker finds the sender through the scheme that is pickled to it after ``init_on_sender``, or by the
    same ``address``, ``port`` and ``token`` on both sides. Otherwise it asks: a subclass implements
    :meth:`announce` and :meth:`look_up`.

    All other arguments are those of :class:`WeightSyncScheme`.

    Args:
        backend: how weights reach other hosts: ``"gloo"`` (TCP, from host memory) or ``"nccl"``. NCCL
            uses the first CUDA device that each process uses already, which must differ between the
            processes, and adds a copy to the device and a copy from it. A worker that uses CUDA cannot be
            started by ``fork``.
        address: address of the network interface on which the sender listens, the same on both sides. The
            default, loopback, can only be reached from this machine.
        port: port at which workers learn where the sender listens; 0 takes a free one.
        token: secret that workers must know; None takes the environment's ``WEIGHT_UPDATE_TOKEN``, or makes
            one.
        host: host name of this process; processes with the same name share memory. None takes the
            environment's ``WEIGHT_UPDATE_HOST``, or determines the name.
        directory: directory of buffers, as in :class:`SharedMemWeightSyncScheme`.
        connections: number of TCP connections that carry the weights to another host, at most 64; the
            sender's scheme decides. Several help where the network limits each connection, as many clouds do,
            or where one processor core cannot fill the link. Each uses a thread at both ends.

    Raises:
        ValueError: the backend is unknown, or is NCCL without CUDA or with several connections; or the port
            is not valid; or the address stands for all interfaces, as 0.0.0.0 does.
    """

    @takes_options_of(WeightSyncScheme.__init__)
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
        connections: int = 1,
        **options: Unpack[SchemeOptions],
    ) -> None:
        require_backend(backend)
        self.connections: int = whole_number(connections, "connections", least=1, most=_MOST_CONNECTIONS)
        if backend == "nccl" and self.connections > 1:
            raise ValueError("connections= is for backend='gloo'; omit it, as NCCL makes its own connections")
        super().__init__(strategy, sync, **options)
        self.backend: str = backend
        self.address: str = require_reachable(address)
        self.port: int = port_number(port)
        self.host: str | None = require_host(host)
        self.directory = directory
        self.token = given_token(token) or self.token

    @abstractmethod
    def announce(self, where: Whereabouts) -> None:
        """Make ``where`` known to workers that ask; called once on the sender, by ``init_on_sender``."""

    @abstractmethod
    def look_up(self, timeout: float) -> Whereabouts:
        """Return the whereabouts that the sender announced; called on a receiver.

        Args:
            timeout: seconds to wait for the announcement.

        Raises:
            LifecycleError: this scheme has nowhere to ask; the message says what to do.
            SyncTimeoutError: the sender did not announce itself in time.
        """

    def open_sender(self, workers: Sequence[int], ctx: Any) -> dict[int, TransportBackend]:
        links: dict[int, Any] = super().open_sender(workers, ctx)
        store = SenderStore(self.address, self.port)
        self.port = store.port
        host = self.host_name() or this_host()
        with undo_on_error(store.close):
            listener = DistributedListener(store, host, self.token, links, self.late_joiner_links())
        with undo_on_error(listener.close):
            self.announce(Whereabouts(self.address, self.port, self.token))
        self.listener = listener
        return links

    def create_transport(self, *, worker_idx: int, end: End) -> TransportBackend:
        where = () if end == "sender" else (self.address, self.port)
        return DistributedTransport(*where, **self.sender_options())  # a receiver's end ignores the backend

    def _find_sender(self, timeout: float) -> None:
        if self.port == 0:
            where = self.look_up(timeout)
            self.address, self.port, self.token = where.address, where.port, where.token

    @property
    def network_bytes(self) -> int:
        """Bytes of payloads sent to other hosts so far."""
        return self.listener.router.sent if isinstance(self.listener, DistributedListener) else 0

    def sender_options(self) -> dict[str, Any]:
        """Return the arguments of both ends of a link."""
        return {
            "token": self.token,
            "host": self.host_name(),
            "directory": self.directory,
            "backend": self.backend,
            "connections": self.connections,
        }

    def host_name(self) -> str | None:
        """Return the name of this host; processes with one name share memory. None determines it."""
        return self.host or os.environ.get(_HOST)
