"""Links through torch.distributed; their way of transfer depends on the hosts of the two ends."""

from __future__ import annotations

import contextlib
import os
import uuid
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from weight_update.errors import FormatError, JoinRefusedError, LinkClosedError, TransportError
from weight_update.transports.base import Capabilities, TransportBackend
from weight_update.transports.buffer import Buffer
from weight_update.transports.distributed.connection import (
    INLINE_BYTES,
    Connection,
    RemoteConnection,
    WorkerConnection,
)
from weight_update.transports.distributed.join_requests import JOIN_QUEUE, read_join_request
from weight_update.transports.distributed.local_connection import LocalConnection
from weight_update.transports.distributed.local_rendezvous import LocalCall, call_local
from weight_update.transports.distributed.relay.gloo import address_towards
from weight_update.transports.distributed.relay.router import Router
from weight_update.transports.distributed.signed_queue import SignedQueue, UnsignedError
from weight_update.transports.distributed.store import REPLY_SECONDS, Store
from weight_update.transports.join_listener import BACK_OFF_SECONDS, JoinListener, refusal_of
from weight_update.transports.reconnecting import ReconnectingLink
from weight_update.transports.shared_memory.slots import SharedBuffer, SlotTable
from weight_update.wire.frames import WeightChunk

_CLOSE_SECONDS = 0.5
_ALONE = "/process "
_REMEMBERED = 10_000
"""Number of remembered joins; a recorded join request that a stranger repeats is refused."""


def this_host() -> str:
    """Return a name shared exactly by processes that see each other's Unix sockets and open files.

    Where the kernel hides the files of this process from others of its user, as after setuid(), the part from
    :data:`_ALONE` on belongs to this process alone; its sockets are visible all the same.
    """
    spaces = [os.readlink(f"/proc/self/ns/{kind}") for kind in ("pid", "net")]
    hidden = os.stat("/proc/self/fd").st_uid != os.geteuid()
    alone = f"{_ALONE}{os.getpid()}" if hidden else ""
    boot = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
    return "/".join([boot, *spaces, str(os.geteuid())]) + alone


class DistributedTransport(ReconnectingLink[Connection | LocalConnection]):
    """One end of a link through torch.distributed.

    A worker joins through the store. On the sender's host the two ends continue over a Unix socket that
    carries slots. To other hosts frames go through queues of the store, signed with the token. A payload is
    sent once to each host, through a process group of two with one worker there; the other workers map that
    worker's copy.

    Args:
        find_store: returns a client of the store within the given seconds; called when the link is first
            used. None makes a sender's end, whose connection comes from ``DistributedListener``.
        token: secret of both ends.
        address: address of this machine's interface for payloads; None finds the one that leads to the store.
        host: name of this host; the default is ``this_host()``; two ends with one name share memory.
        directory: see :class:`~weight_update.SharedMemWeightSyncScheme`.
        backend: backend that carries payloads to other hosts; the sender's end decides.
    """

    capabilities: Capabilities = Capabilities(shares_memory=True, allows_rejoin=True)

    def __init__(
        self,
        find_store: Callable[[float | None], Store] | None = None,
        *,
        token: str = "",
        address: str | None = None,
        host: str | None = None,
        directory: str | None = None,
        backend: str = "gloo",
    ) -> None:
        super().__init__(joins=find_store is not None)
        self._backend = backend
        self._find_store, self._token, self._address = find_store, token, address
        self._host, self._directory = host or this_host(), directory
        self._store: Store | None = None
        self._slots = SlotTable()

    def allocate(self, nbytes: int) -> Buffer:
        return SharedBuffer(nbytes, self._directory)

    def connect(self, timeout: float | None) -> WorkerConnection:
        assert self._find_store is not None, "a receiver's end"
        if self._store is None:
            self._store = self._find_store(timeout)
        return WorkerConnection(
            self._store,
            uuid.uuid4().hex,
            self._token,
            host=self._host,
            address=self._address or address_towards(self._store.host, self._store.port),
            directory=self._directory,
            slots=self._slots,
        )

    def expect(self, payload: torch.Tensor, links: Sequence[TransportBackend]) -> None:
        connections = [link._connection for link in links if isinstance(link, DistributedTransport)]
        remotes = [connection for connection in connections if isinstance(connection, RemoteConnection)]
        if remotes and payload.numel() > INLINE_BYTES:
            remotes[0].router.expect(payload, remotes)

    def reach(self, link: str, host: str) -> LocalCall | None:
        """Sender's end: connect to a worker that claims to be on this host; return None if it is on another.

        Raises:
            JoinRefusedError: the worker claims to be on this host, and cannot be reached there.
        """
        same = host.partition(_ALONE)[0] == self._host.partition(_ALONE)[0]
        return call_local(link, self._token) if same else None

    def attach(
        self, store: Store, router: Router, link: str, host: str, hello: WeightChunk, called: LocalCall | None
    ) -> None:
        """Sender's end: take over a worker's connection; ``called`` is the result of :meth:`reach` for it."""
        pid, before = hello.header["pid"], self.capabilities
        visible = before.pid_is_visible and called is not None and called.stream.peer_pid == pid
        self.capabilities = replace(before, send_never_blocks=called is not None, pid_is_visible=visible)
        if called is not None:
            self.take_over(LocalConnection(called, store, link, self._token), hello)
        else:
            address = self._address or store.host
            remote = RemoteConnection(store, link, self._token, pid, host, address, self._backend, router)
            self.take_over(remote, hello)

    def release(self, payload: torch.Tensor) -> None:
        self._slots.release(payload)

    def close(self) -> None:
        super().close()
        self._slots.clear()
        if self._store is not None:
            self._store.close()


class DistributedListener(JoinListener[DistributedTransport]):
    """The listener for links through torch.distributed, which takes join requests from ``store``.

    The other arguments are those of :class:`~weight_update.JoinListener`.
    """

    def __init__(
        self,
        store: Store,
        token: str,
        links: Mapping[int, DistributedTransport],
        late_joiners: Callable[[int], DistributedTransport],
    ) -> None:
        super().__init__(token, links, late_joiners)
        self._store = store
        self._join_requests = SignedQueue(store, JOIN_QUEUE, token, ordered=False)
        self._router = Router()
        self._seen: OrderedDict[str, None] = OrderedDict()

    @property
    def network_bytes(self) -> int:
        """Bytes of payloads sent to other hosts; payloads that travel with their signal do not count."""
        return self._router.sent

    def close(self) -> None:
        super().close()
        self._router.wait_until_gone(_CLOSE_SECONDS)
        self._store.close()

    def wake(self) -> None:
        self._join_requests.close()

    def accept(self) -> tuple[Any, WeightChunk] | None:
        """Wait for a join request; return the names of connection and host, and the HELLO."""
        try:
            message = self._join_requests.take(None)
        except UnsignedError as error:
            self.refusals.note(error, expected=True)
            self._answer_stranger(error.message)
            return None
        except LinkClosedError as error:
            self._reopen(error)
            return None
        if message is None:
            return None
        link, host, hello = read_join_request(message, self._token)
        if link in self._seen:
            raise FormatError("the join request is a repeated one")
        self._seen[link] = None
        if len(self._seen) > _REMEMBERED:
            self._seen.popitem(last=False)
        return (link, host), hello

    def _reopen(self, error: LinkClosedError) -> None:
        """Make the queue of join requests anew after ``error``, unless this listener was closed."""
        if not self._closed.is_set():
            self._log.warning("the queue of join requests is opened again: %s", error)
            self._join_requests.close()
            self._join_requests = SignedQueue(self._store, JOIN_QUEUE, self._token, ordered=False)
            self._closed.wait(BACK_OFF_SECONDS)
            if self._closed.is_set():
                self._join_requests.close()

    def _answer_stranger(self, message: bytes) -> None:
        """Send an unreadable answer to a worker with another token, which shows it that the tokens differ.

        It goes through a connection of its own, which the server may drop without harm.
        """
        try:
            link, _, _ = read_join_request(message, "")
        except FormatError:
            return
        if link in self._seen:
            return
        with contextlib.suppress(TransportError, TimeoutError):
            client = self._store.connect()
            try:
                client.push(f"{link}/down", b"", REPLY_SECONDS)
            finally:
                client.release()

    def _admit(self, request: tuple[str, str], hello: WeightChunk | None) -> None:
        assert hello is not None  # read_join_request() returns one
        link, host = request
        try:
            end = self._link_for(hello)
            called = end.reach(link, host)  # before the index belongs to this worker, as it can fail
            try:
                end.screen(hello)
            except BaseException:
                if called is not None:
                    called.stream.close()
                raise
            end.attach(self._store, self._router, link, host, hello, called)
        except JoinRefusedError as error:
            refused = Connection(self._store, link, self._token)
            refused.send(refusal_of(error), None)
            raise
