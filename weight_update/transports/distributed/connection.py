"""One connection between a sender and a worker, on one host or on two."""

from __future__ import annotations

import contextlib
import json
import logging
import struct
import threading
import time
from collections.abc import Mapping
from typing import Any

import torch

from weight_update.errors import (
    FormatError,
    JoinRefusedError,
    LinkClosedError,
    NotEnoughMemoryError,
    SyncTimeoutError,
)
from weight_update.transports.buffer import Allocate
from weight_update.transports.distributed.join_requests import JOIN_QUEUE, join_request
from weight_update.transports.distributed.local_rendezvous import LocalListener
from weight_update.transports.distributed.relay.client import RelayClient
from weight_update.transports.distributed.relay.host_relay import HostRelay
from weight_update.transports.distributed.relay.router import Router
from weight_update.transports.distributed.signed_queue import SignedQueue, UnsignedError
from weight_update.transports.distributed.store import Store
from weight_update.transports.distributed.store_client import DroppedError
from weight_update.transports.rate_limit import RateLimitedLog
from weight_update.transports.shared_memory.slots import SlotTable, open_slot
from weight_update.transports.shared_memory.transport import SlotStream
from weight_update.transports.shared_memory.unix_stream import deadline_of, seconds_left
from weight_update.wire.frames import PRELUDE_BYTES, Kind, Prelude, WeightChunk
from weight_update.wire.memory import byte_view

_log = RateLimitedLog(logging.getLogger(__name__))
_CUT, _FRAME = 0, 1  # the end of the connection; a frame
_OPEN_GROUP = 2  # the worker is on another host and makes a point-to-point group
_USE_STORE, _USE_SOCKET = 3, 4  # answers to a join request: frames go through the store, or the Unix socket
_ASK, _TELL = 5, 6  # a request for a sign of life, and its answer; a gap in their numbers shows a loss
_FRONT = struct.Struct("<BII")  # kind of message, bytes of the frame's head and of the payload's location
USE_SOCKET = _FRONT.pack(_USE_SOCKET, 0, 0)
"""Answer to a join request: frames go through the Unix socket where the worker listens."""

INLINE_BYTES = 64 << 10
"""Largest payload that travels with its signal; another message would cost more than such a payload."""

_VERIFY_SECONDS = 1.0
"""Seconds to wait for a signed answer after an unsigned one, which strangers can write."""

_ASK_SECONDS, _LONGEST_PAUSE = 2.0, 60.0
"""Seconds without a message after which the sender asks for one; doubled each time."""

_SIGNAL_SECONDS = 0.5
"""Least number of seconds that a frame may take, however long its payload took."""

_LAST_WORDS = 0.5
"""Seconds that the last message through the store may take longer than the end of the group."""


class Connection:
    """One connection of a link: from a worker's join request until either end closes it.

    Frames go through queues of the store. The ``name`` is used once. The ``rank`` is 0 for the sender's end,
    and 1 for the worker's.
    """

    def __init__(self, store: Store, name: str, token: str, rank: int = 0) -> None:
        self.name: str = name
        self.store: Store = store
        self.token: str = token
        out, back = ("down", "up") if rank == 0 else ("up", "down")
        self.outbox: SignedQueue = SignedQueue(store, f"{name}/{out}", token)
        self.inbox: SignedQueue = SignedQueue(store, f"{name}/{back}", token)
        self._closing = threading.Lock()
        self._closed = False
        self._verified = rank == 0  # whether the other end has proved that it knows the token
        self._verify_until: float | None = None  # end of the wait for a signed answer after an unsigned one
        if rank == 0:
            self.outbox.put(_FRONT.pack(_USE_STORE, 0, 0))

    def place(self, chunk: WeightChunk, timeout: float | None) -> bytes:
        """Make the payload available to the other end; return its location, or nothing if it goes inline."""
        del chunk, timeout
        return b""

    def send(self, chunk: WeightChunk, timeout: float | None) -> None:
        """Send a chunk; raise as :meth:`TransportBackend.send_chunk`."""
        if self.inbox.ended:
            raise LinkClosedError("the other end has ended this connection")
        if chunk.kind is Kind.HELLO:
            chunk = chunk.with_token("")  # the signature shows that this end knows it
        deadline = deadline_of(timeout)
        where = self.place(chunk, timeout) if chunk.payload_bytes else b""
        head = chunk.encode_head(checksum=not where)
        inline = bytes(byte_view(chunk.payload)) if chunk.payload is not None and not where else b""
        front = _FRONT.pack(_FRAME, len(head), len(where))
        left = seconds_left(deadline)
        if left is not None:  # the payload has arrived: its frame is worth a moment more
            left = max(left, _SIGNAL_SECONDS)
        self.outbox.put(front + head + where + inline, timeout=left)

    def recv(self, timeout: float | None, allocate: Allocate | None) -> WeightChunk | None:
        """Return the next chunk or None; raise as :meth:`TransportBackend.recv_chunk`."""
        message = self._next_frame(deadline_of(timeout))
        if message is None:
            return None
        _, size, where_size = _front_of(message)
        frame = memoryview(message)[_FRONT.size :]
        if where_size:
            prelude, header = Prelude.decode(frame[:PRELUDE_BYTES]), bytes(frame[PRELUDE_BYTES:size])
            pid, fd, key = json.loads(bytes(frame[size : size + where_size]))
            with prelude.naming_version(header):
                payload = self.map_slot(pid, fd, key, prelude.payload_bytes)
            chunk = prelude.assemble(header, payload)
        else:
            chunk = WeightChunk.decode(frame, allocate)
        return chunk.with_token(self.token) if chunk.kind is Kind.HELLO else chunk

    def _next_frame(self, deadline: float | None) -> bytes | None:
        """Handle messages up to the next one that holds a frame; return that one, or None on timeout."""
        while True:
            message = self._take(deadline)
            if message is None:
                return None
            kind, _, _ = _front_of(message)
            if kind == _FRAME:
                return message
            if kind == _CUT:
                raise LinkClosedError("the other end has ended this connection")
            if kind == _ASK:
                self.outbox.put(_FRONT.pack(_TELL, 0, 0))
            elif kind == _OPEN_GROUP:
                self.open_group(message[_FRONT.size :].decode())

    def map_slot(self, pid: int, fd: int, key: str, nbytes: int) -> torch.Tensor:
        """Map the slot of a payload, which process ``pid`` has open as ``fd``."""
        raise FormatError("only a sender names slots")

    def open_group(self, backend: str) -> None:
        """Make the point-to-point group that the sender asks for."""
        del backend
        raise FormatError("only a sender asks for a point-to-point group")

    def close(self) -> None:
        """End the connection; the other end notices after it has read the earlier messages."""
        with self._closing:
            if self._closed:
                return
            self._closed = True
        if not self.inbox.ended:
            with contextlib.suppress(LinkClosedError, SyncTimeoutError):
                self.outbox.put(_FRONT.pack(_CUT, 0, 0), last=True, timeout=_LAST_WORDS)
        self.inbox.close()
        self.release()

    def release(self) -> None:
        """Release the resources of this connection; called once."""

    def _take(self, deadline: float | None) -> bytes | None:
        """Return the next message signed with this end's token, or None if none came in time."""
        while True:
            until = deadline
            if self._verify_until is not None and not self._verified:
                until = self._verify_until if deadline is None else min(self._verify_until, deadline)
            left = seconds_left(until)
            try:
                message = self.inbox.take(left)
            except UnsignedError as error:
                if self._verified:
                    _log.warning("ignored a message to a connection: %s", error)
                elif self._verify_until is None:
                    self._verify_until = time.monotonic() + _VERIFY_SECONDS
                if left != 0:
                    continue
                message = None
            self._verified = self._verified or message is not None
            if message is None and self._verify_until is not None and not self._verified:
                raise JoinRefusedError(
                    "the tokens of the two ends differ: pass the scheme to the worker after "
                    "init_on_sender(), or give both ends the same token= (or WEIGHT_UPDATE_TOKEN)"
                )
            return message


class RemoteConnection(Connection):
    """The sender's end to a worker on another host, which maps the replica that one worker there keeps.

    Args:
        pid: process id of the worker.
        host: name of its host.
        address: address of this machine's interface for payloads.
        backend: backend that carries payloads.
        router: router of the sender's payloads to all hosts.
    """

    def __init__(
        self,
        store: Store,
        name: str,
        token: str,
        pid: int,
        host: str,
        address: str,
        backend: str,
        router: Router,
    ) -> None:
        super().__init__(store, name, token)
        self.host = host
        self.lost: Exception | None = None
        self.relay_client: RelayClient = RelayClient(store, name, token, address, pid, backend, self._gone)
        self.router: Router = router
        self._backend = backend
        self._opened = False
        self._count_when_heard = self.outbox.count  # messages sent before the last one arrived
        self._pause = _ASK_SECONDS

    def _take(self, deadline: float | None) -> bytes | None:
        """Return the next signed message, or None if none came in time.

        Strangers can take messages out of the store. The next message then shows a gap and ends the
        connection, and the worker joins again. Where a message gets no answer, another message is sent to
        reveal the gap.
        """
        while True:
            ask_at = time.monotonic() + self._pause
            message = super()._take(ask_at if deadline is None else min(ask_at, deadline))
            if message is not None:
                self._count_when_heard, self._pause = self.outbox.count, _ASK_SECONDS
                return message
            if deadline is not None and time.monotonic() >= deadline:
                return None
            if self.outbox.count > self._count_when_heard:
                self.outbox.put(_FRONT.pack(_ASK, 0, 0))
                self._pause = min(2 * self._pause, _LONGEST_PAUSE)

    def send(self, chunk: WeightChunk, timeout: float | None) -> None:
        """Send a chunk; the first one opens a point-to-point group, which notices the end of the worker."""
        if not self._opened and chunk.kind is not Kind.REFUSED:
            self._opened = True
            self.outbox.put(_FRONT.pack(_OPEN_GROUP, 0, 0) + self._backend.encode())
            self.relay_client.open()
            self.router.add(self)
        super().send(chunk, timeout)

    def place(self, chunk: WeightChunk, timeout: float | None) -> bytes:
        if chunk.payload is None or chunk.payload_bytes <= INLINE_BYTES:
            return b""
        return self.router.deliver(chunk.payload, self, timeout)

    def lose(self, error: Exception) -> None:
        """Close this end for good; its users get ``error``, unless an earlier error was set."""
        self.lost = self.lost or error
        self.inbox.end(self.lost)
        self.release()

    def release(self) -> None:
        self.lost = self.lost or LinkClosedError("this end was closed")
        self.router.remove(self)
        self.relay_client.close()

    def _gone(self, reason: str) -> None:
        self.inbox.await_last(_LAST_WORDS)
        self.lose(LinkClosedError(reason))


class WorkerConnection(Connection):
    """The worker's end of a connection.

    Args:
        host: name of this host.
        address: address of this machine's interface for payloads.
        directory: directory of replicas of the sender's slots, if the sender is on another host.
        slots: table of the slots opened here.
    """

    def __init__(
        self,
        store: Store,
        name: str,
        token: str,
        *,
        host: str,
        address: str,
        directory: str | None,
        slots: SlotTable,
    ) -> None:
        super().__init__(store, name, token, 1)
        self._host, self._address, self._directory, self._slots = host, address, directory, slots
        self._host_relay: HostRelay | None = None
        self._local_listener: LocalListener | None = LocalListener(name, token)
        self._stream: SlotStream | None = None
        self._answered = False
        self._asked: Mapping[str, Any] | None = None  # the HELLO of a join request without an answer

    def _request_join(self, hello: WeightChunk, timeout: float | None) -> None:
        """Send a join request; raise SyncTimeoutError also where the store cannot be reached now."""
        deadline = deadline_of(timeout)
        self._asked = hello.header
        message = join_request(self.name, self._host, hello)
        requests = SignedQueue(self.store, JOIN_QUEUE, self.token, ordered=False)
        try:
            requests.put(message, timeout=seconds_left(deadline))
            requests.flush(seconds_left(deadline))
        except DroppedError as error:  # the link may be down, and come back
            raise SyncTimeoutError(str(error)) from None

    def send(self, chunk: WeightChunk, timeout: float | None) -> None:
        """Send a chunk: the first as a join request, a HELLO other than the first after the sender's answer.

        Raises:
            SyncTimeoutError: the sender did not answer in time.
        """
        deadline = deadline_of(timeout)
        if not self._answered:
            if chunk.kind is Kind.HELLO and self._asked is None:
                self._request_join(chunk, timeout)
                return
            if chunk.kind is Kind.HELLO and chunk.header == self._asked:
                return
            if chunk.kind is not Kind.HELLO or chunk.header["error"] is not None:
                raise LinkClosedError("the sender has not answered yet")
        if not self._receive_answer(deadline):
            raise SyncTimeoutError("the sender did not answer in time; has it called connect()?")
        if self._stream is None:
            super().send(chunk, seconds_left(deadline))
        else:
            self._stream.send(chunk, seconds_left(deadline))

    def recv(self, timeout: float | None, allocate: Allocate | None) -> WeightChunk | None:
        deadline = deadline_of(timeout)
        if not self._receive_answer(deadline):
            return None
        if self._stream is None:
            return super().recv(seconds_left(deadline), allocate)
        return self._stream.recv(seconds_left(deadline))

    def map_slot(self, pid: int, fd: int, key: str, nbytes: int) -> torch.Tensor:
        """Map the replica of the sender's slot that a worker of this host keeps.

        Raises:
            NotEnoughMemoryError: that worker has no replica, or this one cannot map it.
        """
        if fd < 0:
            raise NotEnoughMemoryError(key)
        return self._slots.payload(key, nbytes, lambda: open_slot(pid, fd, key, self._directory), owner=pid)

    def _receive_answer(self, deadline: float | None) -> bool:
        """Return whether the join request was answered; the answer says which way frames go."""
        if self._answered:
            return True
        message = self._take(deadline)
        if message is None:
            return False
        kind, _, _ = _front_of(message)
        with self._closing:
            if self._local_listener is None:
                raise LinkClosedError("this end was closed")
            if kind == _USE_SOCKET:
                self._stream = SlotStream(self._local_listener.answer(), self._slots, self.token, self._asked)
            elif kind != _USE_STORE:
                raise FormatError(f"a join request is not answered with {kind}")
            self._answered, self._asked = True, None
            self._stop_listening()
        return True

    def open_group(self, backend: str) -> None:
        with self._closing:
            if self._host_relay is None and not self._closed:
                self._host_relay = HostRelay(
                    self.store, self.name, self.token, self._address, self._directory, backend, self._gone
                )

    def _gone(self, reason: str) -> None:
        self.inbox.await_last(_LAST_WORDS)
        self.inbox.end(LinkClosedError(reason))

    def release(self) -> None:
        with self._closing:
            self._stop_listening()
        for one in (self._host_relay, self._stream):
            if one is not None:
                one.close()

    def _stop_listening(self) -> None:
        if self._local_listener is not None:
            self._local_listener.close()
        self._local_listener = None


def _front_of(message: bytes) -> tuple[int, int, int]:
    if len(message) < _FRONT.size:
        raise FormatError(f"a message of {len(message)} bytes is too short")
    kind, size, where = _FRONT.unpack(message[: _FRONT.size])
    return kind, size, where
