"""Links through torch.distributed: a TCPStore carries signals, a process group of two the payloads."""

from __future__ import annotations

import contextlib
import json
import logging
import os
import struct
import threading
import time
import uuid
from collections.abc import Callable, Mapping

import torch

from weight_update.chunks import PRELUDE_BYTES, Kind, Prelude, WeightChunk, byte_view
from weight_update.errors import FormatError, JoinRefusedError, LinkClosedError
from weight_update.transports.base import Allocate, Buffer, TransportBackend
from weight_update.transports.c10d import Store
from weight_update.transports.mailbox import Mailbox, UnsignedError
from weight_update.transports.pair import Pair, address_towards
from weight_update.transports.process_watch import ProcessWatch
from weight_update.transports.slots import SharedBuffer, SlotTable, open_slot, slot_of
from weight_update.transports.stream import deadline_of

__all__ = ["DistributedListener", "DistributedTransport", "this_host"]

_log = logging.getLogger(__name__)
_DOOR = "door"
_CUT, _FRAME = 0, 1
_FRONT = struct.Struct("<BII")  # kind of message, bytes of the frame's head, and of where its payload lies
_INLINE = 64 << 10
"""Bytes of a payload that travels with the signal: a further message would cost more than it."""


def this_host() -> str:
    """Equal in two processes exactly when they can share memory by ``/proc``."""
    parts = [_text("/proc/sys/kernel/random/boot_id"), os.readlink("/proc/self/ns/pid"), str(os.getuid())]
    return "/".join(parts)


class DistributedTransport(TransportBackend):
    """One end of a link through torch.distributed (gloo).

    Frames go through queues of the store, signed with the token. A payload follows through a process group
    of two, which belongs to this link alone; to a worker on the sender's host no payload is sent at
    all: it maps the sender's slot.

    Args:
        find_store: gives a client of the store; called when the link is first used. None makes a sender's
            end, which is given its connection by :class:`DistributedListener`.
        token: what both ends know.
        address: of this machine's interface for payloads; None finds the one that leads to the store.
        host: name of this host, if not :func:`this_host`; two ends with one name share memory.
        directory: see :class:`~weight_update.transports.slots.SharedBuffer`.
    """

    shares_memory = True
    rejoins = True

    def __init__(
        self,
        find_store: Callable[[], Store] | None = None,
        *,
        token: str = "",
        address: str | None = None,
        host: str | None = None,
        directory: str | None = None,
    ) -> None:
        self._find_store, self._token, self._address = find_store, token, address
        self._host, self._directory = host or this_host(), directory
        self._changed = threading.Condition()
        self._line: _Line | None = None
        self._first: WeightChunk | None = None
        self._closed = False
        self._fresh = False  # nothing was sent on this line yet
        self._store: Store | None = None
        self._slots = SlotTable()

    def allocate(self, nbytes: int) -> Buffer:
        """A shared slot; see :meth:`TransportBackend.allocate`."""
        return SharedBuffer(nbytes, self._directory)

    def restart(self) -> None:
        """See :meth:`TransportBackend.restart`: a new line, unless there is one that works."""
        if self._find_store is None or self._closed:
            raise LinkClosedError("this end was closed")
        if self._line is not None:
            return
        if self._store is None:
            self._store = self._find_store()
        address = self._address or address_towards(self._store.host, self._store.port)
        with self._changed:
            self._line = _Line(self._store, uuid.uuid4().hex, self._token, 1, address)
            self._fresh = True

    @property
    def quick(self) -> bool:
        """See :attr:`TransportBackend.quick`: true where the worker is on this host."""
        line = self._line
        return line is not None and line.local

    def send_chunk(self, chunk: WeightChunk, timeout: float | None = None) -> None:
        """See :meth:`TransportBackend.send_chunk`."""
        line = self._line
        if line is None:
            raise LinkClosedError("the other end is not connected")
        try:
            if self._fresh and line.rank == 1:
                self._fresh = False
                line.knock(chunk, self._host, self._token)
            else:
                line.send(chunk, timeout)
        except (LinkClosedError, TimeoutError):
            self._drop(line)
            raise

    def recv_chunk(
        self, timeout: float | None = None, allocate: Allocate | None = None
    ) -> WeightChunk | None:
        """See :meth:`TransportBackend.recv_chunk`."""
        deadline = deadline_of(timeout)
        line = self._await_line(deadline)
        if line is None:
            return None
        if self._first is not None:
            first, self._first = self._first, None
            return first
        left = None if deadline is None else max(deadline - time.monotonic(), 0.0)
        try:
            return line.recv(left, allocate, self._map)
        except (LinkClosedError, FormatError, TimeoutError):
            self._drop(line)
            raise

    def attach(self, store: Store, link: str, host: str, hello: WeightChunk) -> None:
        """Sender's end: take over a worker that knocked."""
        with self._changed:
            if self._closed:
                return
            old, self._first = self._line, hello
            address = self._address or store.host
            self._line = _Line(store, link, self._token, 0, address, hello.header["pid"], host == self._host)
            self._changed.notify_all()
        if old is not None:
            old.close()

    def release(self, payload: torch.Tensor) -> None:
        """See :meth:`TransportBackend.release`."""
        self._slots.release(payload)

    def disconnect(self) -> None:
        """See :meth:`TransportBackend.disconnect`; the worker hears of it after what was sent before."""
        self._drop(self._line)

    def close(self) -> None:
        """See :meth:`TransportBackend.close`."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()
        self._drop(self._line)
        self._slots.clear()
        if self._store is not None:
            self._store.close()

    def _map(self, pid: int, fd: int, key: str, nbytes: int) -> torch.Tensor:
        """The sender's slot."""
        return self._slots.payload(key, nbytes, lambda: open_slot(pid, fd, key, self._directory))

    def _drop(self, line: _Line | None = None) -> None:
        with self._changed:
            line = line or self._line
            if line is not None and line is self._line:
                self._line = None
        if line is not None:
            line.close()

    def _await_line(self, deadline: float | None) -> _Line | None:
        with self._changed:
            while self._line is None:
                if self._closed or self._find_store is not None:
                    raise LinkClosedError("not connected to the sender")
                left = None if deadline is None else deadline - time.monotonic()
                if left is not None and left <= 0:
                    return None
                self._changed.wait(left)
            return self._line


class _Line:
    """One connection of a link: from a worker's knock until either end drops it.

    Args:
        store: client of the store.
        name: of this connection; used once.
        token: what both ends know.
        rank: 0 for the sender's end, 1 for the worker's.
        address: of this machine's interface for payloads.
        pid: of the worker, on the sender's end.
        local: whether both ends are on one host.
    """

    def __init__(
        self,
        store: Store,
        name: str,
        token: str,
        rank: int,
        address: str,
        pid: int = 0,
        local: bool = False,
    ) -> None:
        self.name, self.rank, self.local = name, rank, local
        self._store, self._address = store, address
        out, back = ("down", "up") if rank == 0 else ("up", "down")
        self._outbox = Mailbox(store, f"{name}/{out}", token)
        self._inbox = Mailbox(store, f"{name}/{back}", token)
        self._pair: Pair | None = None
        self._pairing = threading.Lock()
        self._closed = False
        self._watch = ProcessWatch(pid, self._inbox.end) if local else None
        self._greeted = False

    def knock(self, hello: WeightChunk, host: str, token: str) -> None:
        """Ask to be let in."""
        info = json.dumps({"link": self.name, "host": host}).encode()
        message = struct.pack("<I", len(info)) + info + hello.encode()
        Mailbox(self._store, _DOOR, token, ordered=False).put(message)

    def send(self, chunk: WeightChunk, timeout: float | None) -> None:
        if self._inbox.ended:
            raise LinkClosedError("the other end has ended this connection")
        head = chunk.encode_head(checksum=not self.local)
        where = b""
        if self.local and chunk.payload is not None and chunk.payload_bytes:
            slot = slot_of(chunk.payload)
            where = json.dumps([os.getpid(), slot.fd, slot.key]).encode()
        inline = b""
        if chunk.payload is not None and not where and chunk.payload_bytes <= _INLINE:
            inline = bytes(byte_view(chunk.payload))
        self._outbox.put(_FRONT.pack(_FRAME, len(head), len(where)) + head + where + inline)
        if chunk.payload is not None and chunk.payload_bytes > _INLINE and not where:
            self._the_pair().send(chunk.payload, timeout)

    def recv(
        self,
        timeout: float | None,
        allocate: Allocate | None,
        map_slot: Callable[[int, int, str, int], torch.Tensor],
    ) -> WeightChunk | None:
        message = self._take(timeout)
        if message is None:
            return None
        kind, size, where_size = _FRONT.unpack(message[: _FRONT.size])
        if kind == _CUT:
            raise LinkClosedError("the other end has ended this connection")
        message = message[_FRONT.size :]
        head, where, inline = message[:size], message[size : size + where_size], message[size + where_size :]
        prelude = Prelude.decode(head[:PRELUDE_BYTES])
        payload = None
        if where:
            pid, fd, key = json.loads(where)
            payload = map_slot(pid, fd, key, prelude.payload_bytes)
        elif prelude.payload_bytes:
            make = allocate or _fresh
            payload = make(prelude.payload_bytes)
            if prelude.payload_bytes > _INLINE:
                self._the_pair().recv(payload, None)
            elif len(inline) != prelude.payload_bytes:
                raise FormatError(f"{len(inline)} bytes came with a frame of {prelude.payload_bytes}")
            else:
                byte_view(payload)[:] = inline
        return prelude.assemble(head[PRELUDE_BYTES:], payload)

    def _take(self, timeout: float | None) -> bytes | None:
        deadline = deadline_of(timeout)
        while True:
            left = None if deadline is None else max(deadline - time.monotonic(), 0.0)
            try:
                message = self._inbox.take(left)
            except UnsignedError as error:
                if not self._greeted:
                    raise JoinRefusedError("the tokens of the two ends differ") from None
                _log.warning("%s: %s", self.name, error)
                continue
            self._greeted = self._greeted or message is not None
            return message

    def close(self) -> None:
        """End it; the other end hears of that after what was sent before."""
        if self._closed:
            return
        self._closed = True
        if not self._inbox.ended:
            with contextlib.suppress(LinkClosedError):
                self._outbox.put(_FRONT.pack(_CUT, 0, 0), last=True)
        self._inbox.close()
        if self._watch is not None:
            self._watch.close()
        with self._pairing:
            if self._pair is not None:
                self._pair.close()

    def _the_pair(self) -> Pair:
        with self._pairing:
            if self._closed:
                raise LinkClosedError("this end was closed")
            if self._pair is None:
                self._pair = Pair(self._store, f"{self.name}/pair", self.rank, self._address)
                self._pair.on_loss(self._inbox.end)
            return self._pair


class DistributedListener:
    """The sender's door: takes those who knock and gives each connection to its link.

    Args:
        store: the server's.
        token: workers must show it.
        links: the sender's end for each worker index.
        newcomers: gives the link of a worker that has none, or raises
            :class:`~weight_update.JoinRefusedError`.
    """

    def __init__(
        self,
        store: Store,
        token: str,
        links: Mapping[int, DistributedTransport],
        newcomers: Callable[[int], DistributedTransport],
    ) -> None:
        self._store, self._token, self._links, self._newcomers = store, token, links, newcomers
        self._door = Mailbox(store, _DOOR, token, ordered=False)
        self._known: set[str] = set()
        self._thread = threading.Thread(target=self._run, name="weight_update-door", daemon=True)

    def start(self) -> None:
        """Begin to let workers in."""
        if not self._thread.is_alive():
            self._thread.start()

    def close(self) -> None:
        """Let nobody in any more."""
        self._door.close()
        if self._thread.is_alive() and self._thread is not threading.current_thread():
            self._thread.join(5.0)
        self._store.close()

    def _run(self) -> None:
        while True:
            try:
                message = self._door.take(None)
                if message is not None:
                    self._admit(message)
            except LinkClosedError:
                return
            except UnsignedError as error:
                _log.warning("refused a connection: %s", error)
                self._answer_stranger(error.message)
            except (JoinRefusedError, FormatError, ValueError, KeyError, struct.error) as error:
                _log.warning("refused a connection: %s", error)

    def _answer_stranger(self, message: bytes) -> None:
        """Whoever has another token cannot read our answer, but learns from that."""
        with contextlib.suppress(ValueError, KeyError, TypeError, struct.error):
            link, _, _ = _read_knock(message)
            if link not in self._known:
                Mailbox(self._store, f"{link}/down", self._token).put(b"")

    def _admit(self, message: bytes) -> None:
        link, host, hello = _read_knock(message)
        if hello.kind is not Kind.HELLO or link in self._known:
            raise FormatError("did not say hello, or says it again")
        self._known.add(link)
        worker = hello.header["worker"]
        try:
            end = self._links.get(worker) or self._newcomers(worker)
        except JoinRefusedError as error:
            refused = _Line(self._store, link, self._token, 0, self._store.host)
            refused.send(WeightChunk(Kind.REFUSED, {"reason": str(error), "problems": []}), None)
            raise
        end.attach(self._store, link, host, hello)


def _read_knock(message: bytes) -> tuple[str, str, WeightChunk]:
    """Name of the connection, the worker's host, and its HELLO."""
    (size,) = struct.unpack("<I", message[:4])
    info = json.loads(message[4 : 4 + size])
    return str(info["link"]), str(info["host"]), WeightChunk.decode(message[4 + size :])


def _fresh(nbytes: int) -> torch.Tensor:
    return torch.empty(nbytes, dtype=torch.uint8)


def _text(path: str) -> str:
    with open(path, encoding="ascii") as file:
        return file.read().strip()
