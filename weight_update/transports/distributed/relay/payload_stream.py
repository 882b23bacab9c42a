"""Connections that carry payloads: signed JSON messages, and payloads in pieces between them."""

from __future__ import annotations

import contextlib
import socket
import struct
from collections.abc import Sequence
from concurrent import futures
from typing import ClassVar

import torch

from weight_update.errors import LinkClosedError, SyncTimeoutError, TransportError
from weight_update.progress import advance
from weight_update.transports.distributed.checksum import Checksum
from weight_update.transports.distributed.transfer import transfer_piece
from weight_update.transports.signed_stream import SignedStream
from weight_update.transports.socket_stream import deadline_of
from weight_update.wire.memory import byte_view

STALLED = 60.0
"""Seconds without progress of the other end after which it counts as gone."""

PIECE = 1 << 20
"""Bytes that are received before they are forwarded; the send buffer to the next host holds as many."""

SEND_BUFFER = 512 << 10
"""Bytes of the send buffer to a near machine. Linux doubles it, which a second-level cache still holds."""

_NEAR = 50  # microseconds; the buffer then allows 160 Gbit/s
_MIN_RTT = struct.Struct("148xI")  # of struct tcp_info in linux/tcp.h


class PayloadStream:
    """One end of a connection for payloads.

    One thread uses it at a time; any thread may call :meth:`close`. Methods raise LinkClosedError when the
    other end is gone, and SyncTimeoutError when it makes no progress; the connection is then of no more use.

    Args:
        signed: the connection, which sends and receives the messages between payloads.
    """

    sent_piece: ClassVar[int] = 2 * PIECE
    """Bytes of a piece in :meth:`send_payload`: more than the send buffer holds, see ``transfer.c``."""

    def __init__(self, signed: SignedStream) -> None:
        self.signed: SignedStream = signed
        with contextlib.suppress(OSError):  # it was closed meanwhile, or is not TCP
            _limit_send_buffer(signed.stream.sock)

    def send_payload(self, payload: torch.Tensor, patience: float) -> str:
        """Send a payload in pieces, each within ``patience`` seconds; return its checksum."""
        total = Checksum()
        for piece in pieces_of(payload, self.sent_piece):
            self.push(piece, patience, total)
            advance(piece.numel())
        return total.hex()

    def recv_payload(self, pieces: Sequence[torch.Tensor], patience: float, forwarder: Forwarder) -> str:
        """Receive a payload in pieces, and forward each piece at once; return its checksum."""
        total = Checksum()
        for piece in pieces:
            self.pull(piece, patience, total)
            forwarder.add(piece)
            advance(piece.numel())
        return total.hex()

    def push(self, piece: torch.Tensor, patience: float, total: Checksum | None = None) -> None:
        """Send a piece, a contiguous CPU tensor, and add it to ``total``."""
        deadline = deadline_of(patience)
        if total is None:
            self.signed.stream.send(byte_view(piece), deadline)
        else:
            transfer_piece(self.signed.stream, piece, deadline, total, sends=True)

    def pull(self, into: torch.Tensor, patience: float, total: Checksum) -> None:
        """Receive a piece sent by :meth:`push`, and add it to ``total``."""
        transfer_piece(self.signed.stream, into, deadline_of(patience), total, sends=False)

    def push_now(self, piece: torch.Tensor) -> int:
        """Send the part of a piece that can be sent without a wait; return its number of bytes."""
        return self.signed.stream.send_now(byte_view(piece))

    def close(self) -> None:
        """Close the connection; the other end notices."""
        self.signed.close()


class AwaitedStream:
    """A payload stream that another process opens, sooner or later. Any thread may call any method."""

    def __init__(self) -> None:
        self._opened: futures.Future[PayloadStream] = futures.Future()

    def set(self, stream: PayloadStream) -> None:
        """Take ``stream``, the first one; close any other, and one that comes after :meth:`close`."""
        try:
            self._opened.set_result(stream)
        except futures.InvalidStateError:
            stream.close()

    def get(self, seconds: float) -> PayloadStream:
        """Return the stream; SyncTimeoutError if none comes in time, LinkClosedError after :meth:`close`."""
        try:
            return self._opened.result(seconds)
        except futures.TimeoutError:
            raise SyncTimeoutError("it made no connection for payloads") from None
        except futures.CancelledError:
            raise LinkClosedError("this end was closed") from None

    def close(self) -> None:
        """Close the stream, or take none any more."""
        if not self._opened.cancel():
            self._opened.result().close()


class Forwarder:
    """Forwarder of received pieces to another host, if any; a failure there does not affect the receiver."""

    def __init__(self, onward: PayloadStream | None) -> None:
        self._onward = onward
        self._unsent: list[torch.Tensor] = []

    def add(self, piece: torch.Tensor) -> None:
        """Forward what can be sent without a wait; a piece must not change until :meth:`finish`."""
        if self._onward is None:
            return
        self._unsent.append(piece)
        try:
            while self._unsent:
                sent = self._onward.push_now(self._unsent[0])
                if sent < self._unsent[0].numel():
                    self._unsent[0] = self._unsent[0][sent:]
                    return
                del self._unsent[0]
        except TransportError:
            self._onward = None

    def finish(self, patience: float) -> bool:
        """Send the rest, ``patience`` seconds for each piece; return whether all was sent."""
        try:
            for piece in self._unsent:
                if self._onward is not None:
                    self._onward.push(piece, patience)
        except (TransportError, TimeoutError):
            self._onward = None
        return self._onward is not None


def _limit_send_buffer(sock: socket.socket) -> None:
    """Give a connection to a near machine, such as another container of this one, a small send buffer.

    The buffer otherwise grows to several megabytes, which the caches do not hold, so every byte is read from
    memory again. A distant machine needs the large buffer. ``python -m benchmarks hosts`` compares both.
    """
    (round_trip,) = _MIN_RTT.unpack(sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _MIN_RTT.size))
    if round_trip <= _NEAR:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, SEND_BUFFER)


def pieces_of(payload: torch.Tensor, nbytes: int = PIECE) -> list[torch.Tensor]:
    """Return the pieces of so many bytes in which a payload is handled; they share its memory."""
    return [payload[start : start + nbytes] for start in range(0, payload.numel(), nbytes)]


def discarded_pieces(nbytes: int) -> list[torch.Tensor]:
    """Return pieces for a payload that is received and dropped; all of them share one scratch memory."""
    scratch = torch.empty(min(nbytes, PIECE), dtype=torch.uint8, device="cpu")
    return [scratch[: nbytes - start] for start in range(0, nbytes, PIECE)]
