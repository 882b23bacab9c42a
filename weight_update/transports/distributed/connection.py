"""One connection between a sender and a worker on another host."""

from __future__ import annotations

import functools
import json
import struct
from collections.abc import Callable, Sequence
from typing import Any

import torch

from weight_update.errors import FormatError, LinkClosedError, NotEnoughMemoryError, kept_error
from weight_update.transports.base import Allocate
from weight_update.transports.distributed.relay.host_relay import HostRelay
from weight_update.transports.distributed.relay.payload_stream import (
    STALLED,
    Forwarder,
    PayloadStream,
    discarded_pieces,
    pieces_of,
)
from weight_update.transports.reconnecting import LinkConnection
from weight_update.transports.shared_memory.slots import SlotTable, open_slot
from weight_update.transports.signed_stream import SignedStream
from weight_update.transports.socket_stream import deadline_of, seconds_left
from weight_update.wire.frames import (
    MAX_HEADER_BYTES,
    PRELUDE_BYTES,
    Kind,
    Prelude,
    WeightChunk,
    fresh_bytes,
)
from weight_update.wire.memory import byte_view

_FRONT = struct.Struct("<II")  # bytes of the frame's head and of the payload's location

INLINE_BYTES = 64 << 10
"""Largest payload that travels in the message of its frame; a message of its own would cost more."""

FOLLOWS = b"null"
"""Location of a payload that follows its frame on the same connection."""

_LARGEST = MAX_HEADER_BYTES + INLINE_BYTES + (1 << 16)

_FRAME_SECONDS = 0.5
"""Least number of seconds that a frame may take, however long its payload took."""


class Connection(LinkConnection):
    """One end of a connection that carries frames, and small payloads.

    Args:
        stream: connection to the other end.
        token: token that is put into received HELLOs, because it does not travel.
    """

    def __init__(self, stream: SignedStream, token: str) -> None:
        self.stream: SignedStream = stream
        self.lost: Exception | None = None  # error that ended the connection on this end
        self._token = token

    def place(self, chunk: WeightChunk, timeout: float | None) -> bytes:
        """Make the payload available to the other end; return its location.

        The location is :data:`FOLLOWS` if the payload follows the frame, and empty if it goes inline.
        """
        return b""

    def send(self, chunk: WeightChunk, timeout: float | None) -> None:
        if chunk.kind is Kind.HELLO:
            chunk = chunk.with_token("")  # the connection shows that this end knows it
        deadline = deadline_of(timeout)
        where = self.place(chunk, timeout) if chunk.payload_bytes else b""
        head = chunk.encode_head(checksum=not where)
        inline = bytes(byte_view(chunk.payload)) if chunk.payload is not None and not where else b""
        left = seconds_left(deadline)
        if left is not None:  # the payload has arrived: its frame is worth a moment more
            deadline = deadline_of(max(left, _FRAME_SECONDS))
        self.stream.send(_FRONT.pack(len(head), len(where)) + head + where + inline, deadline)
        if where == FOLLOWS and chunk.payload is not None:
            left = seconds_left(deadline)
            total = self._payloads.send_payload(chunk.payload, STALLED if left is None else left)
            self.stream.send(total.encode(), deadline)

    def recv(self, timeout: float | None, allocate: Allocate | None) -> WeightChunk | None:
        try:
            if not self.stream.wait_readable(timeout):
                return None
            message = memoryview(self.stream.receive(None, _LARGEST))
        except LinkClosedError:
            if self.lost is None:
                raise
            raise kept_error(self.lost) from None
        if len(message) < _FRONT.size:
            raise FormatError(f"a message of {len(message)} bytes is too short")
        size, where_size = _FRONT.unpack(message[: _FRONT.size])
        frame = message[_FRONT.size :]
        if where_size:
            prelude, header = Prelude.decode(frame[:PRELUDE_BYTES]), bytes(frame[PRELUDE_BYTES:size])
            where = json.loads(bytes(frame[size : size + where_size]))
            if not prelude.payload_bytes:
                raise FormatError("the frame has no payload, but the location of one")
            chunk = prelude.complete(
                header, lambda nbytes: self.payload_at(where, nbytes, allocate or fresh_bytes)
            )
        else:
            chunk = WeightChunk.decode(frame, allocate)
        return chunk.with_token(self._token) if chunk.kind is Kind.HELLO else chunk

    @functools.cached_property
    def _payloads(self) -> PayloadStream:
        return PayloadStream(self.stream)

    def payload_at(self, where: Any, nbytes: int, allocate: Allocate) -> torch.Tensor:
        """Return the payload at the location ``where``, in memory of ``allocate`` if it is received."""
        raise FormatError("only a sender puts payloads elsewhere than into their messages")

    def lose(self, error: Exception) -> None:
        """End the connection; its users get ``error``, unless an earlier error was set."""
        self.lost = self.lost or error
        self.stream.close()

    def close(self) -> None:
        self.lose(LinkClosedError("this end was closed"))


class WorkerConnection(Connection):
    """The worker's end of a connection; ``slots`` of an earlier connection are dropped.

    ``connect`` connects to the sender for payloads, with the number of the connection as argument. Replicas
    of the sender's slots are in ``directory``.
    """

    def __init__(
        self,
        stream: SignedStream,
        token: str,
        *,
        connect: Callable[[int], SignedStream],
        directory: str | None,
        slots: SlotTable,
    ) -> None:
        super().__init__(stream, token)
        self._connect, self._directory, self._slots = connect, directory, slots
        self._slots.clear()
        self._relay: HostRelay | None = None

    def recv(self, timeout: float | None, allocate: Allocate | None) -> WeightChunk | None:
        chunk = super().recv(timeout, allocate)
        if chunk is not None and chunk.kind is not Kind.REFUSED and self._relay is None:
            self._relay = HostRelay(self._connect, self._token, self._directory, self.lose)
            if self.lost is not None:  # close() may not have seen it
                self._relay.close()
        return chunk

    def payload_at(self, where: Any, nbytes: int, allocate: Allocate) -> torch.Tensor:
        """Receive the payload, or map the replica that a worker of this host keeps.

        Raises:
            NotEnoughMemoryError: there is no memory for it here, or that worker had none.
        """
        if where is None:
            return self._receive(nbytes, allocate)
        pid, fd, key = where
        if fd < 0:
            raise NotEnoughMemoryError(key)
        return self._slots.payload(key, nbytes, lambda: open_slot(pid, fd, key), owner=pid)

    def _receive(self, nbytes: int, allocate: Allocate) -> torch.Tensor:
        """Receive a payload that follows its frame; if there is no memory for it, drop it and raise."""
        try:
            payload = allocate(nbytes)
        except Exception:
            self._fill(discarded_pieces(nbytes))
            raise
        self._fill(pieces_of(payload))
        return payload

    def _fill(self, pieces: Sequence[torch.Tensor]) -> None:
        patience = self.stream.stream.patience
        total = self._payloads.recv_payload(pieces, patience, Forwarder(None)).encode()
        if self.stream.receive(deadline_of(patience), len(total)) != total:
            raise FormatError("the payload's checksum is wrong")

    def close(self) -> None:
        super().close()
        if self._relay is not None:
            self._relay.close()
