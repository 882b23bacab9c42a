"""What a Unix socket carries in place of a payload: the slot that it lies in, and at first how to open it."""

from __future__ import annotations

import os
import struct
from dataclasses import dataclass

from weight_update.errors import FormatError
from weight_update.transports.shared_memory.cuda_slots import CudaMapping
from weight_update.transports.shared_memory.slots import HostMapping, Mapping, SharedSlot
from weight_update.transports.shared_memory.unix_stream import Stream

__all__ = ["SlotRecord", "slot_record"]

_RECORD = struct.Struct("<32sB")  # key of the slot, and what comes along
_NOTHING, _FILE, _HANDLE = 0, 1, 2  # nothing: it is known; its file descriptor; that and a handle
_SIZE = struct.Struct("<I")
_MAX_HANDLE = 1 << 16


def slot_record(slot: SharedSlot, *, fresh: bool) -> bytes:
    """The record that names ``slot``; a ``fresh`` one is sent with the slot's file descriptor."""
    key = slot.key.encode()
    if not fresh:
        return _RECORD.pack(key, _NOTHING)
    if not slot.handle:
        return _RECORD.pack(key, _FILE)
    return _RECORD.pack(key, _HANDLE) + _SIZE.pack(len(slot.handle)) + slot.handle


@dataclass(frozen=True)
class SlotRecord:
    """A record that was received.

    Attributes:
        key: of the slot.
        fd: the file descriptor that came along, to be closed by the caller; None for a slot that is known.
        handle: of a slot on a GPU, if it came along.
    """

    key: str
    fd: int | None
    handle: bytes | None

    @classmethod
    def receive(cls, stream: Stream) -> SlotRecord:
        """Read one.

        Raises:
            LinkClosedError: the connection ends.
            FormatError: it is none.
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
        """A file descriptor of the slot, to be closed by the caller.

        Raises:
            FormatError: none came along.
        """
        if self.fd is None:
            raise FormatError("a slot was named before it was handed over")
        return os.dup(self.fd)

    def open(self, fd: int) -> Mapping:
        """Open the slot that ``fd`` is of; see :class:`CudaMapping` for the errors."""
        return HostMapping(fd) if self.handle is None else CudaMapping(self.key, self.handle, fd)


def _receive_handle(stream: Stream) -> bytes:
    size = bytearray(_SIZE.size)
    stream.recv_into(memoryview(size))
    (length,) = _SIZE.unpack(size)
    if length > _MAX_HANDLE:
        raise FormatError(f"the handle of a slot has {length} bytes")
    handle = bytearray(length)
    stream.recv_into(memoryview(handle))
    return bytes(handle)
