"""Frames over a Unix socket whose payloads stay in shared slots.

A frame with a payload is followed by a record of 33 bytes instead of the payload: the slot's key and a flag.
"""

from __future__ import annotations

import os
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any
from weakref import WeakSet

from weight_update.errors import FormatError
from weight_update.transports.buffer import Allocate
from weight_update.transports.shared_memory.cuda_slots import CudaSlotMapping
from weight_update.transports.shared_memory.slots import (
    HostSlotMapping,
    SharedSlot,
    SlotMapping,
    SlotTable,
    slot_of,
)
from weight_update.transports.shared_memory.unix_stream import SocketStream, deadline_of
from weight_update.wire.frames import Kind, WeightChunk

__all__ = ["SlotRecord", "SlotStream", "slot_record"]

_RECORD = struct.Struct("<32sB")  # key of the slot, kind of the record
_KNOWN, _FILE, _HANDLE = 0, 1, 2  # a known slot; with a descriptor; with a descriptor and a handle
_SIZE = struct.Struct("<I")
_MAX_HANDLE = 1 << 16


class SlotStream:
    """One connection between two processes of a machine.

    The first record of a slot comes with the slot's file descriptor, and with its handle if it is on a GPU.
    After a FAILED frame the next record of each slot is like the first, because the receiver may not have
    opened it.

    A HELLO that waits for its answer is not sent again: the answer may be under way and larger than a
    socket's buffer, and then both ends would wait for the other to read.

    Args:
        stream: connected Unix sockets, whose two ends have verified that they share a token.
        slots: table of the slots opened here; slots of an earlier connection are dropped.
        token: token that is put into received HELLOs, because it does not travel.
        asked: header of a HELLO that was already sent in another way.

    Attributes:
        received_handle: whether a slot arrived whose memory ends with the sender's process.
    """

    def __init__(
        self, stream: SocketStream, slots: SlotTable, token: str, asked: Mapping[str, Any] | None = None
    ) -> None:
        self.received_handle = False
        self._asked = asked
        self._stream, self._slots, self._token = stream, slots, token
        self._slots.clear()
        self._handed_over: WeakSet[SharedSlot] = WeakSet()

    def send(self, chunk: WeightChunk, timeout: float | None) -> None:
        """Send a frame; raise as :meth:`SocketStream.send`, after which the connection is not usable."""
        deadline = deadline_of(timeout)
        if chunk.kind is Kind.HELLO:
            if chunk.header == self._asked:
                return
            self._asked = chunk.header if chunk.header["error"] is None else None  # an error needs no answer
            chunk = chunk.with_token("")
        head = chunk.encode_head(checksum=False)
        if chunk.payload is None or chunk.payload_bytes == 0:
            self._stream.send(head, deadline)
            return
        slot = slot_of(chunk.payload)
        handed_over = self._handed_over
        fresh = slot not in handed_over
        record = slot_record(slot, fresh=fresh)
        if fresh:
            self._stream.send(head, deadline)
            self._stream.send_with_fd(record, slot.fd, deadline)
            handed_over.add(slot)
        else:
            self._stream.send(head + record, deadline)  # in one call: waking the reader twice would cost most

    def recv(self, timeout: float | None, allocate: Allocate | None = None) -> WeightChunk | None:
        """Return the next frame, or None when none arrived within ``timeout`` seconds.

        Args:
            timeout: seconds; None waits for ever.
            allocate: not used; payloads stay where they are.

        Raises:
            LinkClosedError: the connection ended.
            FormatError: the received bytes are no frame.
            UnreachableMemoryError: this process may not open the payload.
            NotEnoughMemoryError: this process has no memory to map the payload.
        """
        del allocate
        if not self._stream.wait_readable(timeout):
            return None
        prelude, header = self._stream.recv_head()
        self._asked = None
        payload = None
        if prelude.kind is Kind.FAILED:
            self._handed_over = WeakSet()
        if prelude.payload_bytes:
            slot = SlotRecord.receive(self._stream)
            self.received_handle |= slot.handle is not None
            try:
                with prelude.naming_version(header):
                    payload = self._slots.payload(slot.key, prelude.payload_bytes, slot.copy_fd, slot.open)
            finally:
                if slot.fd is not None:
                    os.close(slot.fd)
        chunk = prelude.assemble(header, payload)
        return chunk.with_token(self._token) if chunk.kind is Kind.HELLO else chunk

    def close(self) -> None:
        """End the connection and wake threads that wait on it."""
        self._stream.close()


def slot_record(slot: SharedSlot, *, fresh: bool) -> bytes:
    """Return the record of ``slot``; a ``fresh`` one is sent together with the slot's file descriptor."""
    key = slot.key.encode()
    if not fresh:
        return _RECORD.pack(key, _KNOWN)
    if not slot.handle:
        return _RECORD.pack(key, _FILE)
    return _RECORD.pack(key, _HANDLE) + _SIZE.pack(len(slot.handle)) + slot.handle


@dataclass(frozen=True)
class SlotRecord:
    """A received record.

    Attributes:
        key: key of the slot.
        fd: file descriptor of the slot, to be closed by the caller; None for a known slot.
        handle: handle of a slot on a GPU; None otherwise.
    """

    key: str
    fd: int | None
    handle: bytes | None

    @classmethod
    def receive(cls, stream: SocketStream) -> SlotRecord:
        """Receive a record.

        Raises:
            LinkClosedError: the connection ended.
            FormatError: the received bytes are no record.
        """
        raw, fd = stream.recv_with_fd(_RECORD.size)
        try:
            key, along = _RECORD.unpack(raw)
            handle = _receive_handle(stream) if along == _HANDLE else None
        except BaseException:
            if fd is not None:
                os.close(fd)
            raise
        return cls(key.decode("ascii", "replace"), fd, handle)

    def copy_fd(self) -> int:
        """Return a file descriptor of the slot, to be closed by the caller.

        Raises:
            FormatError: the record came without a file descriptor.
        """
        if self.fd is None:
            raise FormatError("a slot was named before its file descriptor was sent")
        return os.dup(self.fd)

    def open(self, fd: int) -> SlotMapping:
        """Map the slot of ``fd``; raise as :class:`CudaSlotMapping`."""
        return HostSlotMapping(fd) if self.handle is None else CudaSlotMapping(self.key, self.handle, fd)


def _receive_handle(stream: SocketStream) -> bytes:
    size = bytearray(_SIZE.size)
    stream.recv_into(memoryview(size))
    (length,) = _SIZE.unpack(size)
    if length > _MAX_HANDLE:
        raise FormatError(f"the handle of a slot has {length} bytes")
    handle = bytearray(length)
    stream.recv_into(memoryview(handle))
    return bytes(handle)
