"""Links on one machine whose receivers map the sender's slots instead of copying payloads.

A frame with a payload is followed by a record of 33 bytes instead of the payload: the slot's key and the kind
of the record. The handle of a slot on a GPU follows its first record.
"""

from __future__ import annotations

import errno
import logging
import os
import select
import socket
import struct
import threading
import uuid
import weakref
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import ClassVar

import torch

from weight_update.errors import (
    FormatError,
    LinkClosedError,
    NotEnoughMemoryError,
    SyncTimeoutError,
    undo_on_error,
)
from weight_update.transports.base import Allocate, Arrivals, Buffer, Capabilities
from weight_update.transports.handshake import prove_token
from weight_update.transports.join_listener import answering_refusals, link_for
from weight_update.transports.listener import Listener
from weight_update.transports.reconnecting import LinkConnection, ReconnectingLink
from weight_update.transports.shared_memory.cuda_slots import CudaBuffer, CudaSlotMapping
from weight_update.transports.shared_memory.slot_files import LIMITS
from weight_update.transports.shared_memory.slots import (
    HostSlotMapping,
    SharedBuffer,
    SharedSlot,
    SlotMapping,
    SlotTable,
    slot_of,
)
from weight_update.transports.socket_stream import (
    SHORTAGES,
    SocketStream,
    deadline_of,
    seconds_left,
)
from weight_update.wire.frames import PRELUDE_BYTES, Kind, Prelude, WeightChunk

_log = logging.getLogger(__name__)
_BACKLOG = 128
_RETRY_SECONDS = 0.02
_NO_ANSWER = "the sender did not answer in time; has it called connect()?"
_RECORD = struct.Struct("<32sB")  # key of the slot, kind of the record
_KNOWN, _FILE, _HANDLE = 0, 1, 2  # a known slot; with a descriptor; with a descriptor and a handle
_SIZE = struct.Struct("<I")
_MAX_HANDLE = 1 << 16
_READ_BYTES, _MOST_BYTES = 1 << 12, 1 << 18  # more than most frames have; of one call
_ANSWER_BYTES = 1 << 12  # more than an APPLIED has


class SlotStream(LinkConnection, Arrivals):
    """One connection between two processes of a machine.

    The first record of a slot comes with the slot's file descriptor, and with its handle if it is on a GPU.
    After a FAILED frame the next record of each slot is like the first, because the receiver may not have
    opened it.

    Args:
        stream: connected Unix sockets, whose two ends have verified that they share a token.
        slots: table of the slots opened here; slots of an earlier connection are dropped.
        token: token that is put into received HELLOs, because it does not travel.
        on_handle: called when a slot arrives whose memory ends with the sender's process.
    """

    def __init__(
        self, stream: SocketStream, slots: SlotTable, token: str, on_handle: Callable[[], None]
    ) -> None:
        self._stream, self._slots, self._token, self._on_handle = stream, slots, token, on_handle
        self._slots.clear()
        self._handed_over: weakref.WeakSet[SharedSlot] = weakref.WeakSet()
        self._received = bytearray()  # bytes that were received together with an earlier frame
        self._descriptors: list[int] = []
        weakref.finalize(self, _close_all, self._descriptors).atexit = False
        self._arrivals: select.epoll | None = None

    def send(self, chunk: WeightChunk, timeout: float | None) -> None:
        deadline = deadline_of(timeout)
        if chunk.kind is Kind.HELLO:
            chunk = chunk.with_token("")
        head = chunk.encode_head(checksum=False)
        if chunk.payload is None or chunk.payload_bytes == 0:
            self._stream.send(head, deadline)
            return
        slot, handed_over = slot_of(chunk.payload), self._handed_over
        key, handle = slot.key.encode(), slot.handle
        if slot in handed_over:  # in one call: waking the reader twice would cost most
            self._stream.send(head + _RECORD.pack(key, _KNOWN), deadline)
        else:
            self._stream.send(head, deadline)
            more = _SIZE.pack(len(handle)) + handle if handle else b""
            record = _RECORD.pack(key, _HANDLE if handle else _FILE)
            self._stream.send_with_fd(record + more, slot.fd, deadline)
            handed_over.add(slot)

    def recv(self, timeout: float | None, allocate: Allocate | None = None) -> WeightChunk | None:
        del allocate  # payloads stay where they are
        if not self._received and not self._stream.wait_readable(timeout):
            return None
        prelude = Prelude.decode(self._read(PRELUDE_BYTES))
        header = self._read(prelude.header_bytes)
        if prelude.kind is Kind.FAILED:
            self._handed_over = weakref.WeakSet()
        chunk = prelude.complete(header, self._receive_payload)
        return chunk.with_token(self._token) if chunk.kind is Kind.HELLO else chunk

    def close(self) -> None:
        self._stream.close()

    def _read(self, size: int) -> bytes:
        """Return the next ``size`` bytes; one call to the system receives several short frames."""
        while (lacking := size - len(self._received)) > 0:
            limit = min(max(lacking, _READ_BYTES), _MOST_BYTES)
            self._received += self._stream.recv_available(limit, self._descriptors)
        data = bytes(self._received[:size])
        del self._received[:size]
        return data

    def _receive_payload(self, nbytes: int) -> torch.Tensor:
        name, kind = _RECORD.unpack(self._read(_RECORD.size))
        fd = self._descriptors.pop(0) if kind != _KNOWN and self._descriptors else None
        try:
            key, handle = name.decode("ascii", "replace"), None
            if kind == _HANDLE:
                (length,) = _SIZE.unpack(self._read(_SIZE.size))
                if length > _MAX_HANDLE:
                    raise FormatError(f"the handle of a slot has {length} bytes")
                handle = self._read(length)
                self._on_handle()
            return self._slots.payload(key, nbytes, lambda: _map_slot(key, kind, fd, handle))
        finally:
            if fd is not None:
                os.close(fd)

    # -- the sender's end --------------------------------------------------------------------------

    def wait(self, timeout: float | None) -> bool:
        if self._received:
            return True
        try:
            with self._stream.in_use:
                if self._arrivals is None:
                    arrivals = select.epoll()
                    arrivals.register(self._stream.sock, select.EPOLLIN)
                    self._arrivals = arrivals
                arrived = bool(self._arrivals.poll(timeout))
            with self._stream.in_use:  # raises if this end was closed meanwhile
                return arrived
        except OSError as error:
            if error.errno not in SHORTAGES:
                raise
            return self._stream.wait_readable(timeout)

    def pause(self) -> int | None:
        if self._received or self._arrivals is None or not self._stream.in_use.begin(threading.get_ident()):
            return None
        self._arrivals.modify(self._stream.sock, 0)
        return self._stream.sock.fileno()

    def resume(self) -> None:
        me = threading.get_ident()
        if self._arrivals is not None and self._stream.in_use.begin(me):
            self._arrivals.modify(self._stream.sock, select.EPOLLIN)
        self._stream.in_use.end(me)

    def peek(self) -> tuple[WeightChunk, int] | None:
        data = self._stream.peek(_ANSWER_BYTES)
        if len(data) < PRELUDE_BYTES:
            return None
        prelude = Prelude.decode(data[:PRELUDE_BYTES])
        size = PRELUDE_BYTES + prelude.header_bytes
        if prelude.payload_bytes or size > len(data):
            return None
        return prelude.assemble(data[PRELUDE_BYTES:size], None), size

    def skip(self, nbytes: int) -> None:
        self._stream.sock.recv(nbytes)


def _close_all(descriptors: list[int]) -> None:
    while descriptors:
        os.close(descriptors.pop())


def _map_slot(key: str, kind: int, fd: int | None, handle: bytes | None) -> SlotMapping:
    if kind == _KNOWN:
        raise LinkClosedError(
            "the sender has released the memory of this update: it was shut down, or gave it up"
        )
    if fd is None:  # the process had no number left for it
        raise NotEnoughMemoryError("a file descriptor for a slot is needed; raise " + LIMITS[errno.EMFILE])
    return HostSlotMapping(key, fd) if handle is None else CudaSlotMapping(key, handle, fd)


class SharedMemTransport(ReconnectingLink[LinkConnection]):
    """One end of a link over a Unix socket; payloads stay in shared slots, see ``SlotStream``.

    Args:
        address: receiver's end: address of the sender's listener. None makes a sender's end, whose connection
            comes from ``SharedMemListener``.
        token: receiver's end: token of the listener.
        directory: see :class:`~weight_update.SharedMemWeightSyncScheme`.
        device: sender's end: CUDA device for slots; None keeps them in host memory.
    """

    capabilities: Capabilities = Capabilities(shares_memory=True, send_never_blocks=True, allows_rejoin=True)
    _advice: ClassVar[str] = ", as of a container, or address= is not the sender's scheme.address"
    """End of the error about a sender that is not there, after "it runs in another network namespace"."""

    def __init__(
        self,
        address: str | None = None,
        *,
        token: str = "",
        directory: str | None = None,
        device: torch.device | None = None,
    ) -> None:
        super().__init__(joins=address is not None)
        self._address, self._token = address, token
        self._directory, self._device = directory, device
        if device is not None:
            self._slots_are_on_gpu()
        self._joining: SocketStream | None = None  # a connection in the middle of the handshake
        self._slots = SlotTable()

    def allocate(self, nbytes: int) -> Buffer:
        if self._device is not None:
            return CudaBuffer(nbytes, self._device)
        return SharedBuffer(nbytes, self._directory)

    def _slots_are_on_gpu(self) -> None:
        self.capabilities = replace(self.capabilities, payloads_die_with_sender=True)

    def release(self, payload: torch.Tensor) -> None:
        self._slots.release(payload)

    def pinned(self, payload: torch.Tensor) -> torch.Tensor:
        return self._slots.pinned(payload)

    @property
    def arrivals(self) -> Arrivals | None:
        connection = self._connection
        return connection if isinstance(connection, SlotStream) and self._hello is None else None

    def attach(self, stream: SocketStream, hello: WeightChunk) -> None:
        """Sender's end: take over an authenticated connection whose HELLO, with the token, is ``hello``."""
        if stream.peer_pid != hello.header["pid"]:  # in another pid namespace, or an impostor
            self.capabilities = replace(self.capabilities, pid_is_visible=False)
        self.take_over(SlotStream(stream, self._slots, hello.header["token"], self._slots_are_on_gpu), hello)

    def close(self) -> None:
        super().close()
        joining = self._joining
        if joining is not None:
            joining.close()
        self._slots.clear()

    def connect(self, timeout: float | None) -> LinkConnection:
        """Connect to the listener and prove the token; retry while it is too busy to admit this worker."""
        assert self._address is not None, "a receiver's end"
        deadline = deadline_of(timeout)
        while not self._closed:
            try:
                return self.join(self._address, deadline)
            except BlockingIOError:
                with self._changed:
                    self._changed.wait_for(lambda: self._closed, _RETRY_SECONDS)
            if seconds_left(deadline) == 0:
                raise SyncTimeoutError(_NO_ANSWER)
        raise LinkClosedError("this end was closed")

    def join(self, address: str, deadline: float | None) -> LinkConnection:
        """Receiver's end: connect to the sender once; raise BlockingIOError if it should be tried again."""
        stream = SocketStream(socket.socket(socket.AF_UNIX, socket.SOCK_STREAM))
        with undo_on_error(stream.close):
            try:
                stream.sock.connect(address)
            except BlockingIOError:  # its backlog is full
                raise
            except OSError as error:
                shown = address.replace("\0", "@", 1)  # as ss and lsof show an abstract address
                raise LinkClosedError(
                    f"no sender at {shown!r} ({error}); it has shut down or died, perhaps because its "
                    f"connect_timeout has passed, or it runs in another network namespace{self._advice}"
                ) from None
        self.authenticate(stream, _context(address), deadline)
        return SlotStream(stream, self._slots, self._token, self._slots_are_on_gpu)

    def authenticate(self, stream: SocketStream, context: str, deadline: float | None) -> bytes:
        """Prove the token, and return the connection's key; BlockingIOError if the listener is too busy."""
        self._joining = stream
        try:
            with undo_on_error(stream.close):
                self._require_open()  # close() may not have seen the stream
                return prove_token(stream, self._token, context, deadline)
        except LinkClosedError:
            raise BlockingIOError("the listener is too busy, or this end was closed") from None
        except SyncTimeoutError:
            raise SyncTimeoutError(_NO_ANSWER) from None
        finally:
            self._joining = None


def _context(address: str) -> str:
    """Return the context of connections to ``address``, which makes a proof worthless at another address."""
    return f"shared memory {address}"


class SharedMemListener(Listener):
    """The listener for links over Unix sockets, with the arguments of :class:`~weight_update.JoinListener`.

    Attributes:
        address: abstract Unix address, which vanishes with the process.
    """

    def __init__(
        self,
        token: str,
        links: Mapping[int, SharedMemTransport],
        late_joiners: Callable[[int], SharedMemTransport],
    ) -> None:
        self.address: str = f"\0weight_update-{uuid.uuid4().hex}"
        self._links, self._late_joiners = links, late_joiners
        sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        sock.bind(self.address)
        sock.listen(_BACKLOG)
        super().__init__(sock, token, _context(self.address), self._admit, "weight_update-listener", _log)

    def _admit(self, stream: SocketStream, key: bytes, deadline: float) -> None:
        """Read the HELLO of a worker that knows the token, and give the connection to its link."""
        del key  # no third process can write to a connected Unix socket
        prelude = Prelude.decode(stream.recv(PRELUDE_BYTES, deadline))
        raw = stream.recv(prelude.header_bytes, deadline)
        if prelude.kind is not Kind.HELLO or prelude.payload_bytes:
            raise FormatError("the first frame is not a HELLO")
        hello = prelude.assemble(raw, None).with_token(self._token)
        with answering_refusals(lambda answer: stream.send(answer.encode(), deadline)):
            link = link_for(hello, self._links, self._late_joiners)
        link.attach(stream, hello)
