"""Frames over a Unix socket; their payloads stay in shared slots."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any
from weakref import WeakSet

from weight_update.transports.shared_memory.slot_records import SlotRecord, slot_record
from weight_update.transports.shared_memory.slots import SharedSlot, SlotTable, slot_of
from weight_update.transports.shared_memory.unix_stream import Stream
from weight_update.wire.frames import Kind, WeightChunk

__all__ = ["SlotStream"]


class SlotStream:
    """One connection between two processes of a machine.

    A frame with a payload is followed by 33 bytes, the slot's key and a flag, instead of the payload;
    the first time a slot is named its file descriptor travels along, and if it is on a GPU its handle. After
    a FAILED that is so again, since the receiver may not have opened the slot.

    A HELLO that waits for its answer is not sent again: the answer may be on its way, and longer than what
    fits into a socket, so that both ends would wait for the other to read.

    Args:
        stream: connected Unix sockets, whose two ends know that they have the same token.
        slots: filled with those that are opened here; what an earlier connection opened is forgotten.
        token: for HELLOs, in which it does not travel.
        asked: header of a HELLO that was sent in another way.

    Attributes:
        lends: whether a slot came that ends with the sender's process.
    """

    def __init__(
        self, stream: Stream, slots: SlotTable, token: str, asked: Mapping[str, Any] | None = None
    ) -> None:
        self.lends = False
        self._asked = asked
        self._stream, self._slots, self._token = stream, slots, token
        self._slots.clear()
        self._handed_over: WeakSet[SharedSlot] = WeakSet()

    def send(self, chunk: WeightChunk, deadline: float | None) -> None:
        """Send a frame; raises as :meth:`Stream.send`, and the connection is then of no more use."""
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
            self._stream.send(head + record, deadline)  # at once: a wake-up costs more than all else here

    def recv(self, timeout: float | None) -> WeightChunk | None:
        """The next frame, or None when none came within ``timeout`` seconds (None: wait for ever).

        Raises:
            LinkClosedError: the connection ends.
            FormatError: what came is no frame.
            UnreachableMemoryError: its payload cannot be opened here.
            NotEnoughMemoryError: this process has no memory to open it.
        """
        if not self._stream.wait_readable(timeout):
            return None
        prelude, header = self._stream.recv_head()
        self._asked = None
        payload = None
        if prelude.kind is Kind.FAILED:
            self._handed_over = WeakSet()
        if prelude.payload_bytes:
            slot = SlotRecord.receive(self._stream)
            self.lends |= slot.handle is not None
            try:
                with prelude.naming_version(header):
                    payload = self._slots.payload(slot.key, prelude.payload_bytes, slot.copy_fd, slot.open)
            finally:
                if slot.fd is not None:
                    os.close(slot.fd)
        chunk = prelude.assemble(header, payload)
        return chunk.with_token(self._token) if chunk.kind is Kind.HELLO else chunk

    def close(self) -> None:
        """End the connection and wake whoever waits on it."""
        self._stream.close()
