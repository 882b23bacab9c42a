"""Links to workers on this host and on others, which find the sender through a TCPStore."""

from __future__ import annotations

import functools
import logging
import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import ClassVar

import torch
from typing_extensions import Never

from weight_update.arguments import refuse_arguments
from weight_update.errors import FormatError, LinkClosedError, SyncTimeoutError, undo_on_error
from weight_update.transports.base import Capabilities, TransportBackend
from weight_update.transports.distributed.connection import Connection, WorkerConnection
from weight_update.transports.distributed.relay.client import RelayClient
from weight_update.transports.distributed.relay.router import RemoteConnection, Router
from weight_update.transports.distributed.rendezvous import Announcement, SenderStore, find_sender
from weight_update.transports.host_name import shares_sockets, this_host
from weight_update.transports.join_listener import answering_refusals, link_for
from weight_update.transports.listener import Listener
from weight_update.transports.reconnecting import LinkConnection
from weight_update.transports.shared_memory.transport import SharedMemListener, SharedMemTransport
from weight_update.transports.signed_stream import SignedStream, call, dial, listen
from weight_update.transports.socket_stream import SHORTAGES, SocketStream, seconds_left
from weight_update.wire.frames import Kind, WeightChunk

_log = logging.getLogger(__name__)
_NO_GROUP = (
    "it needs no process group, store or buffer. Give a receiver's end the address, port and token of its "
    "sender, and give buffers to receive_weights(weights=...); or let a scheme create both ends"
)
_PAYLOADS_SECONDS, _RETRY_SECONDS = 20.0, 0.1  # to connect for payloads


class DistributedTransport(SharedMemTransport):
    """One end of a link to a worker on this host or on another.

    A worker learns from the store at ``address`` where the sender listens. On the sender's host it connects
    as a :class:`SharedMemTransport` does. To other hosts, frames go over a TCP connection, signed with a key
    of this connection. A payload is sent once to each host, over another connection of one worker there; the
    other workers map that worker's copy. A small payload to the only worker of a host follows its frame.

    Args:
        address: receiver's end: address of the sender's store. None makes a sender's end, whose connection
            comes from ``DistributedListener``.
        port: port of that store.
        token: secret of both ends.
        host: name of this host; the default is ``this_host()``; two ends with one name share memory.
        directory: see :class:`~weight_update.SharedMemWeightSyncScheme`.
        backend: backend that carries payloads to other hosts: ``"gloo"`` (TCP) or ``"nccl"``; the sender's
            end decides.
        connections: number of TCP connections that carry payloads to another host; the sender's end decides.
    """

    capabilities: Capabilities = Capabilities(shares_memory=True, allows_rejoin=True)
    _advice: ClassVar[str] = ": then give it and this worker different host="

    def __init__(
        self,
        address: str | None = None,
        port: int = 0,
        *,
        token: str = "",
        host: str | None = None,
        directory: str | None = None,
        backend: str = "gloo",
        connections: int = 1,
        **unknown: Never,
    ) -> None:
        refuse_arguments(self, unknown, _NO_GROUP)
        super().__init__(address, token=token, directory=directory)
        self.host: str = host or this_host()
        self._port, self._backend, self._connections = port, backend, connections
        self._joined = False  # at least once
        self._last: SocketStream | None = None  # to another host

    def join(self, address: str, deadline: float | None) -> LinkConnection:
        if self._last is not None and self._last.vanished:
            raise LinkClosedError("the machine of the sender has vanished")
        left = seconds_left(deadline)
        sender = find_sender(
            address, self._port, self._token, left, again=self._joined, require_open=self._require_open
        )
        self._joined = True
        if shares_sockets(sender.host, self.host):
            return super().join(f"\0{sender.local}", deadline)
        name = uuid.uuid4().hex
        self._last = stream = self._dial(address, sender.port, deadline)
        stream.connect_until = deadline
        key = self.authenticate(stream, _context(sender), deadline)
        signed = SignedStream(stream, key, listener=False)
        with undo_on_error(stream.close):
            signed.send_json({"do": "join", "name": name, "host": self.host}, seconds_left(deadline))
        return WorkerConnection(
            signed,
            self._token,
            connect=functools.partial(_connect_for_payloads, address, sender, self._token, name),
            directory=self._directory,
            slots=self._slots,
        )

    def _dial(self, address: str, port: int, deadline: float | None) -> SocketStream:
        try:
            return dial(address, port, deadline)
        except OSError as error:
            if isinstance(error, BlockingIOError) or error.errno in SHORTAGES:
                raise
            kind = SyncTimeoutError if isinstance(error, TimeoutError) else LinkClosedError
            raise kind(
                f"the sender answered at {address}:{self._port}, and cannot be reached at its port {port} "
                f"({error}): it has just ended, or a firewall blocks that port; open the ports of "
                "net.ipv4.ip_local_port_range on the sender's machine"
            ) from None

    def expect(self, payload: torch.Tensor, links: Sequence[TransportBackend]) -> None:
        connections = [link._connection for link in links if isinstance(link, DistributedTransport)]
        remotes = [one for one in connections if isinstance(one, RemoteConnection)]
        relayed = [remote for remote in remotes if remote.needs_relay(payload.numel())]
        if relayed:
            relayed[0].router.expect(payload, relayed)

    def attach(self, stream: SocketStream, hello: WeightChunk) -> None:
        self.capabilities = replace(self.capabilities, send_never_blocks=True)
        super().attach(stream, hello)

    def attach_remote(
        self, stream: SignedStream, hello: WeightChunk, name: str, host: str, router: Router
    ) -> None:
        """Sender's end: take over the connection of a worker on another host."""
        self.capabilities = replace(self.capabilities, send_never_blocks=False, pid_is_visible=False)
        client = RelayClient(hello.header["pid"], self._backend, self._connections)
        remote = RemoteConnection(stream, self._token, name=name, host=host, client=client, router=router)
        self.take_over(remote, hello)


def _connect_for_payloads(
    address: str, sender: Announcement, token: str, name: str, number: int
) -> SignedStream:
    """Make connection ``number`` to a sender for the payloads of the worker that joined as ``name``."""
    until = time.monotonic() + _PAYLOADS_SECONDS
    while True:
        try:
            signed = call(address, sender.port, token, _context(sender), until)
            with undo_on_error(signed.close):
                request = {"do": "take payloads", "name": name, "connection": number}
                signed.send_json(request, seconds_left(until))
            return signed
        except LinkClosedError:  # the listener is too busy, or the sender has ended
            if time.monotonic() > until:
                raise
            time.sleep(_RETRY_SECONDS)


class DistributedListener(Listener):
    """The listener for links to this host and to others, with the arguments of :class:`JoinListener`.

    Workers find it in ``store``.

    Attributes:
        router: router of payloads to workers on other hosts.
    """

    def __init__(
        self,
        store: SenderStore,
        host: str,
        token: str,
        links: Mapping[int, DistributedTransport],
        late_joiners: Callable[[int], DistributedTransport],
    ) -> None:
        self._store, self._links, self._late_joiners = store, links, late_joiners
        self.router: Router = Router()
        self._local = SharedMemListener(token, links, late_joiners)
        with undo_on_error(self._local.close):
            sock = listen(store.address)
            where = Announcement(host, self._local.address[1:], sock.getsockname()[1], uuid.uuid4().hex)
            super().__init__(sock, token, _context(where), self._admit, "weight_update-listener", _log)
            self._local.refusals = self.refusals
            with undo_on_error(super().close):
                store.announce(where, token)  # workers wait for start(), rather than be told of another token

    def start(self) -> None:
        self._local.start()
        super().start()

    def close(self) -> None:
        self._store.close()
        self._local.close()
        super().close()

    def _admit(self, stream: SocketStream, key: bytes, deadline: float) -> None:
        """Take the first request of a process on another host that knows the token."""
        signed = SignedStream(stream, key, listener=True)
        request = signed.receive_json(seconds_left(deadline))
        name, host = request.get("name"), request.get("host")
        if request.get("do") == "take payloads":
            remote = self.router.named(str(name))
            if remote is None:
                raise LinkClosedError("a worker that is not connected wants payloads")
            remote.relay_client.open(signed, request["connection"])
        elif isinstance(name, str) and isinstance(host, str):
            self._join(signed, name, host, deadline)
        else:
            raise FormatError("not a join request")

    def _join(self, signed: SignedStream, name: str, host: str, deadline: float) -> None:
        connection = Connection(signed, self._token)
        hello = connection.recv(seconds_left(deadline), None)
        if hello is None or hello.kind is not Kind.HELLO:
            raise FormatError("the first frame is not a HELLO, or did not come in time")
        with answering_refusals(lambda answer: connection.send(answer, seconds_left(deadline))):
            link = link_for(hello, self._links, self._late_joiners)
        link.attach_remote(signed, hello, name, host, self.router)


def _context(where: Announcement) -> str:
    """Return the context of connections to a sender, which makes a proof worthless at another one."""
    return f"sender {where.name}"
