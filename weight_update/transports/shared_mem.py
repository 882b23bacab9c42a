"""Links on one machine whose payloads are never copied to the receiver: it maps the sender's slot."""

from __future__ import annotations

import contextlib
import logging
import os
import socket
import threading
import time
import uuid
import weakref
from collections import OrderedDict
from collections.abc import Callable, Mapping

import torch

from weight_update.chunks import Kind, WeightChunk
from weight_update.errors import (
    FormatError,
    JoinRefusedError,
    LinkClosedError,
    TransportError,
    UnreachableMemoryError,
)
from weight_update.transports.base import Allocate, Buffer, TransportBackend
from weight_update.transports.cuda_slots import CudaBuffer
from weight_update.transports.slot_records import SlotRecord, slot_record
from weight_update.transports.slots import SLOTS_REMEMBERED, SharedBuffer, SlotTable, slot_of
from weight_update.transports.stream import Stream, deadline_of

__all__ = ["SharedMemListener", "SharedMemTransport"]

_log = logging.getLogger(__name__)
_JOIN_SECONDS = 30.0
_RETRY_SECONDS = 0.02


_open_in_this_process: weakref.WeakSet[SharedMemTransport | SharedMemListener] = weakref.WeakSet()


class SharedMemTransport(TransportBackend):
    """A Unix socket for signals; payloads stay in shared slots.

    A frame with a payload is followed by 33 bytes, the slot's key and a flag, instead of the payload;
    the first time a slot is named its file descriptor travels along, and if it is on a GPU its handle.

    Args:
        address: where the sender listens (receiver's end); None makes a sender's end, which is given its
            connection by :class:`SharedMemListener`.
        directory: see :class:`~weight_update.transports.slots.SharedBuffer`.
        device: sender's end: a CUDA device to keep slots on; None keeps them in host memory.
    """

    shares_memory = True
    rejoins = True

    def __init__(
        self,
        address: str | None = None,
        *,
        directory: str | None = None,
        device: torch.device | None = None,
    ) -> None:
        self._address = address
        self._directory, self._device = directory, device
        self._lends = device is not None
        self._changed = threading.Condition()
        self._stream: Stream | None = None
        self._first: WeightChunk | None = None
        self._closed = False
        self._known: OrderedDict[str, None] = OrderedDict()  # slots handed over on this connection
        self._slots = SlotTable()
        _open_in_this_process.add(self)

    @property
    def lends(self) -> bool:
        """See :attr:`TransportBackend.lends`: true with slots on a GPU."""
        return self._lends

    def allocate(self, nbytes: int) -> Buffer:
        """A shared slot; see :meth:`TransportBackend.allocate`."""
        if self._device is not None:
            return CudaBuffer(nbytes, self._device)
        return SharedBuffer(nbytes, self._directory)

    def send_chunk(self, chunk: WeightChunk, timeout: float | None = None) -> None:
        """See :meth:`TransportBackend.send_chunk`."""
        deadline = deadline_of(timeout)
        with self._changed:
            stream, known = self._stream, self._known
        if stream is None:
            stream = self._connect(deadline)
        try:
            self._write(stream, known, chunk, deadline)
        except (LinkClosedError, TimeoutError):
            self._drop(stream)
            raise

    def _write(
        self, stream: Stream, known: OrderedDict[str, None], chunk: WeightChunk, deadline: float | None
    ) -> None:
        head = chunk.encode_head(checksum=False)
        if chunk.payload is None or chunk.payload_bytes == 0:
            stream.send(head, deadline)
            return
        slot = slot_of(chunk.payload)
        fresh = slot.key not in known
        known[slot.key] = None
        known.move_to_end(slot.key)
        if len(known) > SLOTS_REMEMBERED:
            known.popitem(last=False)
        record = slot_record(slot, fresh=fresh)
        if fresh:
            stream.send(head, deadline)
            stream.send_with_fd(record, slot.fd, deadline)
        else:
            stream.send(head + record, deadline)  # at once: a wake-up costs more than all else here

    def recv_chunk(
        self, timeout: float | None = None, allocate: Allocate | None = None
    ) -> WeightChunk | None:
        """See :meth:`TransportBackend.recv_chunk`."""
        deadline = deadline_of(timeout)
        stream = self._await_stream(deadline)
        if stream is None:
            return None
        if self._first is not None:
            first, self._first = self._first, None
            return first
        try:
            left = None if deadline is None else max(0.0, deadline - time.monotonic())
            if not stream.wait_readable(left):
                return None
            return self._read(stream)
        except (LinkClosedError, FormatError):
            self._drop(stream)
            raise

    def release(self, payload: torch.Tensor) -> None:
        """See :meth:`TransportBackend.release`."""
        self._slots.release(payload)

    def attach(self, stream: Stream, first: WeightChunk) -> None:
        """Sender's end: take over a connection whose first chunk was read already."""
        with self._changed:
            if self._stream is not None:
                self._stream.close()
            self._stream, self._first = stream, first
            self._known = OrderedDict()
            self._changed.notify_all()

    def disconnect(self) -> None:
        """See :meth:`TransportBackend.disconnect`."""
        self._drop()

    def _drop(self, stream: Stream | None = None) -> None:
        """End the connection, only if it is still ``stream`` when that is given."""
        with self._changed:
            if self._stream is not None and stream in (None, self._stream):
                self._stream.close()
                self._stream = None

    def close(self) -> None:
        """See :meth:`TransportBackend.close`."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()
        self._drop()
        self._slots.clear()

    def abandon(self) -> None:
        """In a forked child: close what was inherited, so that the parent's end is noticed as its end."""
        if self._stream is not None:
            self._stream.sock.close()

    def _connect(self, deadline: float | None) -> Stream:
        if self._closed:
            raise LinkClosedError("this end was closed")
        if self._address is None:
            raise LinkClosedError("the worker is not connected")
        while True:
            sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
            try:
                sock.connect(self._address)
                break
            except OSError as error:
                sock.close()
                gone = isinstance(error, ConnectionRefusedError | FileNotFoundError)
                late = deadline is not None and time.monotonic() > deadline
                if gone or late or self._closed:
                    raise LinkClosedError(f"the sender cannot be reached ({error})") from None
                time.sleep(_RETRY_SECONDS)  # its backlog is full
        with self._changed:
            self._stream = Stream(sock)
            return self._stream

    def _await_stream(self, deadline: float | None) -> Stream | None:
        with self._changed:
            if self._address is not None and self._stream is None:
                raise LinkClosedError("not connected to the sender")
            while self._stream is None:
                if self._closed:
                    raise LinkClosedError("this end was closed")
                left = None if deadline is None else deadline - time.monotonic()
                if left is not None and left <= 0:
                    return None
                self._changed.wait(left)
            return self._stream

    def _read(self, stream: Stream) -> WeightChunk:
        prelude, header = stream.recv_head()
        payload = None
        if prelude.payload_bytes:
            slot = SlotRecord.receive(stream)
            self._lends |= slot.handle is not None
            try:
                payload = self._slots.payload(slot.key, prelude.payload_bytes, slot.copy_fd, slot.open)
            except UnreachableMemoryError as error:
                error.version = prelude.assemble(header, None).header["version"]
                raise
            finally:
                if slot.fd is not None:
                    os.close(slot.fd)
        return prelude.assemble(header, payload)


class SharedMemListener:
    """The sender's door: accepts workers at any time and gives each connection to its link.

    Args:
        token: workers must show it.
        links: the sender's end for each worker index.
        newcomers: gives the link of a worker that has none, or raises
            :class:`~weight_update.JoinRefusedError`.

    Attributes:
        address: an abstract Unix address; it vanishes with the process.
    """

    def __init__(
        self,
        token: str,
        links: Mapping[int, SharedMemTransport],
        newcomers: Callable[[int], SharedMemTransport],
    ) -> None:
        if not hasattr(socket, "AF_UNIX") or not hasattr(socket, "send_fds"):
            raise TransportError("shared memory schemes need Unix sockets; use another scheme here")
        self.address = f"\0weight_update-{uuid.uuid4().hex}"
        self._token, self._links, self._newcomers = token, links, newcomers
        self._sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._sock.bind(self.address)
        self._sock.listen(128)
        self._thread = threading.Thread(target=self._run, name="weight_update-door", daemon=True)
        self._knocking: set[Stream] = set()
        self._closed = False
        _open_in_this_process.add(self)

    def start(self) -> None:
        """Begin to accept."""
        if not self._thread.is_alive():
            self._thread.start()

    def close(self) -> None:
        """Stop accepting, and send away who has not said hello yet."""
        self._closed = True
        for stream in list(self._knocking):
            stream.close()
        with contextlib.suppress(OSError):  # it may never have been started
            self._sock.shutdown(socket.SHUT_RDWR)
        if self._thread.is_alive() and self._thread is not threading.current_thread():
            self._thread.join(5.0)
        self._sock.close()

    def abandon(self) -> None:
        """In a forked child: close what was inherited, without ending it for the parent."""
        self._sock.close()

    def _run(self) -> None:
        while True:
            try:
                sock, _ = self._sock.accept()
            except OSError:
                return
            threading.Thread(
                target=self._admit, args=(Stream(sock),), name="weight_update-join", daemon=True
            ).start()

    def _admit(self, stream: Stream) -> None:
        self._knocking.add(stream)
        try:
            if self._closed:
                raise LinkClosedError("the scheme was shut down")
            if not stream.wait_readable(_JOIN_SECONDS):
                raise FormatError(f"said nothing for {_JOIN_SECONDS:.0f} s")
            prelude, raw = stream.recv_head()
            if prelude.kind is not Kind.HELLO or prelude.payload_bytes:
                raise FormatError("did not say hello")
            hello = prelude.assemble(raw, None)
            try:
                link = self._link_of(hello)
            except JoinRefusedError as error:
                refused = WeightChunk(Kind.REFUSED, {"reason": str(error), "problems": []})
                stream.send(refused.encode(), deadline_of(_JOIN_SECONDS))
                raise
            link.attach(stream, hello)
        except (FormatError, TransportError, TimeoutError) as error:
            if not self._closed:
                _log.warning("refused a connection: %s", error)
            stream.close()
        finally:
            self._knocking.discard(stream)

    def _link_of(self, hello: WeightChunk) -> SharedMemTransport:
        if not hello.shows(self._token):
            raise JoinRefusedError("wrong token: the scheme was not made by this sender")
        worker: int = hello.header["worker"]
        return self._links.get(worker) or self._newcomers(worker)


def _abandon_all() -> None:
    for opened in list(_open_in_this_process):
        opened.abandon()
    _open_in_this_process.clear()


os.register_at_fork(after_in_child=_abandon_all)
