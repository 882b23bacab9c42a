"""One connection between a sender and a worker, of one host or of two."""

from __future__ import annotations

import contextlib
import json
import logging
import re
import struct
import threading
import time
from collections.abc import Callable, Mapping
from typing import Any

import torch

from weight_update.errors import (
    FormatError,
    JoinRefusedError,
    LinkClosedError,
    SyncTimeoutError,
)
from weight_update.transports.base import Allocate
from weight_update.transports.distributed.local_rendezvous import Call, Ear
from weight_update.transports.distributed.relay.client import Carrier
from weight_update.transports.distributed.relay.host_relay import Keeper
from weight_update.transports.distributed.relay.router import Route
from weight_update.transports.distributed.signed_queue import Mailbox, UnsignedError
from weight_update.transports.distributed.store import Store
from weight_update.transports.distributed.store_client import DroppedError
from weight_update.transports.rate_limit import RateLimitedLog
from weight_update.transports.shared_memory.slot_frames import SlotStream
from weight_update.transports.shared_memory.slots import SlotTable
from weight_update.transports.shared_memory.unix_stream import deadline_of, seconds_left
from weight_update.wire.frames import PRELUDE_BYTES, Kind, Prelude, WeightChunk
from weight_update.wire.memory import byte_view

__all__ = ["DOOR", "INLINE", "Line", "LocalLine", "MapSlot", "RemoteLine", "WorkerLine", "read_knock"]

_log = RateLimitedLog(logging.getLogger(__name__))
DOOR = "door"
"""Name of the queue that workers knock at."""

_CUT, _FRAME = 0, 1  # the end; a frame
_PAIR = 2  # the worker is on another host and makes a pair
_STAY, _MEET = 3, 4  # to a knock: frames come here; the worker was called where it listens, they come there
_ASK, _TELL = 5, 6  # whether the worker has all messages; an answer, from which the sender learns it as well
_FRONT = struct.Struct("<BII")  # kind of message, bytes of the frame's head, and of where its payload lies
_LINK = re.compile("[0-9a-f]{32}")
_LARGEST_INFO = 4096  # bytes of what a join request says beside its HELLO
INLINE = 64 << 10
"""Bytes of a payload that travels with the signal: a further message would cost more than it."""

_DOUBT_SECONDS = 1.0
"""Seconds that an answer with our token may come later than one without it, which strangers can write."""

_ASK_SECONDS, _LONGEST_PAUSE = 2.0, 60.0
"""Seconds without an answer after which the sender asks for one; doubled each time."""

_SIGNAL_SECONDS = 0.5
"""Seconds that a frame may take at least, however long its payload took."""

_LAST_WORDS = 0.5
"""Seconds that a farewell through the store may be slower than the end of the pair."""

MapSlot = Callable[[int, int, str, int], torch.Tensor]
"""Maps the slot that a process has open: its id, the file descriptor, the key, bytes of the payload."""


class Line:
    """One connection of a link: from a worker's knock until either end drops it.

    Frames go through queues of the store.

    Args:
        store: client of the store.
        name: of this connection; used once.
        token: what both ends know.
        rank: 0 for the sender's end, 1 for the worker's.
    """

    local = True

    def __init__(self, store: Store, name: str, token: str, rank: int = 0) -> None:
        self.name, self.store, self.token = name, store, token
        out, back = ("down", "up") if rank == 0 else ("up", "down")
        self.outbox = Mailbox(store, f"{name}/{out}", token)
        self.inbox = Mailbox(store, f"{name}/{back}", token)
        self._closing = threading.Lock()
        self._closed = False
        self._greeted = rank == 0  # a worker has shown that it knows the token
        self._doubted: float | None = None  # until when a signed answer may still follow one that is not
        if rank == 0:
            self.outbox.put(_FRONT.pack(_STAY, 0, 0))

    def place(self, chunk: WeightChunk, timeout: float | None) -> bytes:
        """Make the payload available to the other end and say where; nothing if it goes with the frame."""
        del chunk, timeout
        return b""

    def send(self, chunk: WeightChunk, timeout: float | None) -> None:
        """See :meth:`TransportBackend.send_chunk`."""
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
        if left is not None:  # what is placed is worth a moment more
            left = max(left, _SIGNAL_SECONDS)
        self.outbox.put(front + head + where + inline, timeout=left)

    def recv(self, timeout: float | None, allocate: Allocate | None, map_slot: MapSlot) -> WeightChunk | None:
        """See :meth:`TransportBackend.recv_chunk`."""
        message = self._next_frame(deadline_of(timeout))
        if message is None:
            return None
        _, size, where_size = _front_of(message)
        message = message[_FRONT.size :]
        head, where, inline = message[:size], message[size : size + where_size], message[size + where_size :]
        prelude = Prelude.decode(head[:PRELUDE_BYTES])
        payload = None
        with prelude.naming_version(head[PRELUDE_BYTES:]):
            if where:
                pid, fd, key = json.loads(where)
                payload = map_slot(pid, fd, key, prelude.payload_bytes)
            elif prelude.payload_bytes:
                if len(inline) != prelude.payload_bytes:
                    raise FormatError(f"{len(inline)} bytes came with a frame of {prelude.payload_bytes}")
                payload = (allocate or _fresh)(prelude.payload_bytes)
                byte_view(payload)[:] = inline
        chunk = prelude.assemble(head[PRELUDE_BYTES:], payload)
        return chunk.with_token(self.token) if chunk.kind is Kind.HELLO else chunk

    def _next_frame(self, deadline: float | None) -> bytes | None:
        """Act on messages up to the next that holds a frame; return that one, or None if none came."""
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
            elif kind == _PAIR:
                self.on_pair(message[_FRONT.size :].decode())

    def on_pair(self, backend: str) -> None:
        """The other end wants a pair for payloads."""
        del backend
        raise FormatError("only a sender asks for a pair")

    def close(self) -> None:
        """End it; the other end hears of that after what was sent before."""
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
        """Let go of what belongs to this line, once."""

    def _take(self, deadline: float | None) -> bytes | None:
        """Return the next message that is signed with our token, or None if none came in time."""
        while True:
            until = deadline
            if self._doubted is not None and not self._greeted:
                until = self._doubted if deadline is None else min(self._doubted, deadline)
            left = seconds_left(until)
            try:
                message = self.inbox.take(left)
            except UnsignedError as error:
                if self._greeted:
                    _log.warning("a message to a connection was ignored: %s", error)
                elif self._doubted is None:
                    self._doubted = time.monotonic() + _DOUBT_SECONDS
                if left != 0:
                    continue
                message = None
            self._greeted = self._greeted or message is not None
            if message is None and self._doubted is not None and not self._greeted:
                raise JoinRefusedError(
                    "the tokens of the two ends differ: pass the scheme to the worker after "
                    "init_on_sender(), or give both ends the same token= (or WEIGHT_UPDATE_TOKEN)"
                )
            return message


class LocalLine:
    """The sender's end to a worker on its own host: a Unix socket, by which slots are handed over.

    Args:
        call: the connection; nothing is sent before the worker has answered there.
        store: tells the worker that it was called.
        name: see :class:`Line`.
        token: see :class:`Line`.
    """

    local = True

    def __init__(self, call: Call, store: Store, name: str, token: str) -> None:
        self._stream = SlotStream(call.stream, SlotTable(), token)
        self._call: Call | None = call  # until it is answered
        self._answering = threading.Lock()
        try:
            Mailbox(store, f"{name}/down", token).put(_FRONT.pack(_MEET, 0, 0), last=True)
        except BaseException:
            self.close()
            raise

    def send(self, chunk: WeightChunk, timeout: float | None) -> None:
        """See :meth:`TransportBackend.send_chunk`."""
        deadline = deadline_of(timeout)
        if self._call is not None:
            self._await_answer(deadline)
        self._stream.send(chunk, deadline)

    def recv(self, timeout: float | None, allocate: Allocate | None, map_slot: MapSlot) -> WeightChunk | None:
        """See :meth:`TransportBackend.recv_chunk`."""
        del allocate, map_slot
        deadline = deadline_of(timeout)
        if self._call is not None:
            try:
                self._await_answer(deadline)
            except SyncTimeoutError:
                return None
        return self._stream.recv(seconds_left(deadline))

    def _await_answer(self, deadline: float | None) -> None:
        left = seconds_left(deadline)
        if not self._answering.acquire(timeout=-1 if left is None else left):  # another thread waits as well
            raise SyncTimeoutError("the worker did not answer in time")
        try:
            if self._call is not None:
                self._call.await_answer(deadline)
                self._call = None
        finally:
            self._answering.release()

    def close(self) -> None:
        """End it; the other end hears of that after what was sent before."""
        self._stream.close()


class RemoteLine(Line):
    """The sender's end to a worker on another host, which maps what one worker there keeps.

    Args:
        store: see :class:`Line`.
        name: see :class:`Line`.
        token: see :class:`Line`.
        pid: of the worker.
        host: name of its host.
        address: of this machine's interface for payloads.
        backend: what they go through.

    Attributes:
        carrier: leads to the keeper of the worker.
        lost: why the connection is of no more use, if so.
    """

    local = False

    def __init__(
        self, store: Store, name: str, token: str, pid: int, host: str, address: str, backend: str
    ) -> None:
        super().__init__(store, name, token)
        self.host, self.lost = host, None
        self.carrier = Carrier(store, name, token, address, pid, backend, self._gone)
        self._backend = backend
        self._route = Route.of(store)
        self._opened = False
        self._heard_after = self.outbox.count  # messages that were sent when the last one came
        self._pause = _ASK_SECONDS

    lost: Exception | None

    def _take(self, deadline: float | None) -> bytes | None:
        """See :meth:`Line._take`.

        Strangers can take messages out of the store. A later message shows the gap and ends the connection,
        and the worker joins again. Where there is no answer to a message, another one is sent for that.
        """
        while True:
            ask_at = time.monotonic() + self._pause
            message = super()._take(ask_at if deadline is None else min(ask_at, deadline))
            if message is not None:
                self._heard_after, self._pause = self.outbox.count, _ASK_SECONDS
                return message
            if deadline is not None and time.monotonic() >= deadline:
                return None
            if self.outbox.count > self._heard_after:
                self.outbox.put(_FRONT.pack(_ASK, 0, 0))
                self._pause = min(2 * self._pause, _LONGEST_PAUSE)

    def send(self, chunk: WeightChunk, timeout: float | None) -> None:
        """See :meth:`Line.send`; the first frame comes with a pair, by which its end is noticed."""
        if not self._opened and chunk.kind is not Kind.REFUSED:
            self._opened = True
            self.outbox.put(_FRONT.pack(_PAIR, 0, 0) + self._backend.encode())
            self.carrier.open()
            self._route.add(self)
        super().send(chunk, timeout)

    def place(self, chunk: WeightChunk, timeout: float | None) -> bytes:
        if chunk.payload is None or not self.carries(chunk.payload):
            return b""
        return self._route.deliver(chunk.payload, self, timeout)

    @staticmethod
    def carries(payload: torch.Tensor) -> bool:
        """Whether it is too large to go with the frame."""
        return payload.numel() > INLINE

    def lose(self, error: Exception) -> None:
        """Close this end for good; ``error`` is raised to its users, unless an earlier one is."""
        self.lost = self.lost or error
        self.inbox.end(self.lost)
        self.release()

    def release(self) -> None:
        self.lost = self.lost or LinkClosedError("this end was closed")
        self._route.remove(self)
        self.carrier.close()

    def _gone(self) -> None:
        self.inbox.await_last(_LAST_WORDS)
        self.lose(LinkClosedError("the other end is gone"))


class WorkerLine(Line):
    """The worker's end.

    Args:
        store: see :class:`Line`.
        name: see :class:`Line`.
        token: see :class:`Line`.
        address: of this machine's interface for payloads.
        directory: where mirrors of the sender's slots lie, if it is on another host.
        slots: those that were opened here.
    """

    def __init__(
        self, store: Store, name: str, token: str, address: str, directory: str | None, slots: SlotTable
    ) -> None:
        super().__init__(store, name, token, 1)
        self._address, self._directory, self._slots = address, directory, slots
        self._keeper: Keeper | None = None
        self._ear: Ear | None = Ear(name, token)
        self._stream: SlotStream | None = None
        self._answered = False
        self._asked: Mapping[str, Any] | None = None  # the HELLO of the knock, while it has no answer

    def knock(self, hello: WeightChunk, host: str, timeout: float | None) -> None:
        """Ask to join.

        Raises:
            LinkClosedError: the store is gone.
            SyncTimeoutError: the store does not answer in time, or cannot be reached now.
        """
        deadline = deadline_of(timeout)
        self._asked = hello.header
        hello = hello.with_token("")
        info = json.dumps({"link": self.name, "host": host}).encode()
        message = struct.pack("<I", len(info)) + info + hello.encode()
        door = Mailbox(self.store, DOOR, self.token, ordered=False)
        try:
            door.put(message, timeout=seconds_left(deadline))
            door.flush(seconds_left(deadline))
        except DroppedError as error:  # the link may be down, and come back
            raise SyncTimeoutError(str(error)) from None

    def send(self, chunk: WeightChunk, timeout: float | None) -> None:
        """See :meth:`Line.send`; a HELLO other than that of the knock waits until the knock is answered.

        Raises:
            SyncTimeoutError: it is not in time.
        """
        deadline = deadline_of(timeout)
        if not self._answered:
            if chunk.kind is Kind.HELLO and chunk.header == self._asked:
                return
            if chunk.kind is not Kind.HELLO or chunk.header["error"] is not None:
                raise LinkClosedError("the sender has not answered yet")
        if not self._hear_answer(deadline):
            raise SyncTimeoutError("the sender did not answer in time; has it called connect()?")
        if self._stream is None:
            super().send(chunk, seconds_left(deadline))
        else:
            self._stream.send(chunk, deadline)

    def recv(self, timeout: float | None, allocate: Allocate | None, map_slot: MapSlot) -> WeightChunk | None:
        deadline = deadline_of(timeout)
        if not self._hear_answer(deadline):
            return None
        if self._stream is None:
            return super().recv(seconds_left(deadline), allocate, map_slot)
        return self._stream.recv(seconds_left(deadline))

    def _hear_answer(self, deadline: float | None) -> bool:
        """Whether the knock is answered, by a message that tells which way frames go."""
        if self._answered:
            return True
        message = self._take(deadline)
        if message is None:
            return False
        kind, _, _ = _front_of(message)
        with self._closing:
            if self._ear is None:
                raise LinkClosedError("this end was closed")
            if kind == _MEET:
                self._stream = SlotStream(self._ear.answer(), self._slots, self.token, self._asked)
            elif kind != _STAY:
                raise FormatError(f"a knock is not answered with {kind}")
            self._answered, self._asked = True, None
            self._deafen()
        return True

    def on_pair(self, backend: str) -> None:
        with self._closing:
            if self._keeper is None and not self._closed:
                self._keeper = Keeper(
                    self.store, self.name, self.token, self._address, self._directory, backend, self._gone
                )

    def _gone(self) -> None:
        self.inbox.await_last(_LAST_WORDS)
        self.inbox.end()

    def release(self) -> None:
        with self._closing:
            self._deafen()
        for one in (self._keeper, self._stream):
            if one is not None:
                one.close()

    def _deafen(self) -> None:
        if self._ear is not None:
            self._ear.close()
        self._ear = None


def _front_of(message: bytes) -> tuple[int, int, int]:
    if len(message) < _FRONT.size:
        raise FormatError(f"a message of {len(message)} bytes")
    kind, size, where = _FRONT.unpack(message[: _FRONT.size])
    return kind, size, where


def read_knock(message: bytes, token: str) -> tuple[str, str, WeightChunk]:
    """Name of the connection, the worker's host, and its HELLO, with the token that signed the message.

    Raises:
        FormatError: it is something else.
    """
    (size,) = struct.unpack_from("<I", message) if len(message) >= 4 else (0,)
    if not 0 < size <= min(_LARGEST_INFO, len(message) - 4):
        raise FormatError(f"a join request does not begin with {size} bytes of {len(message)}")
    try:
        info = json.loads(message[4 : 4 + size])
        link, host = info["link"], info["host"]
        hello = WeightChunk.decode(message[4 + size :])
        worker, pid = hello.header["worker"], hello.header["pid"]
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise FormatError(f"not a join request ({type(error).__name__})") from None
    kinds = [(link, str), (host, str), (worker, int), (pid, int)]
    if hello.kind is not Kind.HELLO or not all(isinstance(value, kind) for value, kind in kinds):
        raise FormatError("not a join request")
    if not _LINK.fullmatch(link):
        raise FormatError("a join request names its connection by 32 hexadecimal digits")
    return link, host, hello.with_token(token)


def _fresh(nbytes: int) -> torch.Tensor:
    return torch.empty(nbytes, dtype=torch.uint8)
