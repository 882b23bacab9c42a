"""Connections that carry payloads: signed JSON messages, and payloads in pieces between them."""

from __future__ import annotations

import contextlib
import socket
import struct
import threading
from collections.abc import Callable, Sequence
from concurrent import futures
from typing import ClassVar

import torch

from weight_update.errors import LinkClosedError, SyncTimeoutError, TransportError, undo_on_error
from weight_update.progress import advancer
from weight_update.threads import call_in_thread
from weight_update.transports.distributed.transfer import BLOCK, Checksum, joint_hex, transfer_piece
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
    """One end of a connection for payloads, or of several that share the bytes of each payload.

    One thread uses it at a time; any thread may call :meth:`close`. Methods raise LinkClosedError when the
    other end is gone, and SyncTimeoutError when it makes no progress; the stream is then of no more use.

    Args:
        signed: the connection, which sends and receives the messages between payloads.

    Attributes:
        streams: streams of one connection each, of which this one is the first. They transfer the blocks of a
            payload in turns, each in a thread of its own.
    """

    sent_piece: ClassVar[int] = 2 * PIECE
    """Bytes of a piece in :meth:`send_payload`: more than the send buffer holds, see ``transfer.c``."""

    def __init__(self, signed: SignedStream) -> None:
        self.signed: SignedStream = signed
        self.streams: Sequence[PayloadStream] = (self,)
        with contextlib.suppress(OSError):  # it was closed meanwhile, or is not TCP
            _limit_send_buffer(signed.stream.sock)

    def send_payload(self, payload: torch.Tensor, patience: float) -> str:
        """Send a payload in pieces, each within ``patience`` seconds; return its checksum."""

        def send(piece: torch.Tensor, number: int, total: Checksum) -> None:
            self.streams[number].push(piece, patience, total)

        return self._transfer(pieces_of(payload, self.sent_piece), send)

    def recv_payload(self, pieces: Sequence[torch.Tensor], patience: float, forwarder: Forwarder) -> str:
        """Receive a payload in pieces, and forward each piece at once; return its checksum."""

        def receive(piece: torch.Tensor, number: int, total: Checksum) -> None:
            self.streams[number].pull(piece, patience, total)
            forwarder.add(piece, number)

        return self._transfer(pieces, receive)

    def _transfer(
        self, pieces: Sequence[torch.Tensor], move: Callable[[torch.Tensor, int, Checksum], None]
    ) -> str:
        """Call ``move`` with each piece and the number of its stream; return the checksum of all pieces."""
        totals = [Checksum() for _ in self.streams]
        in_block = BLOCK // pieces[0].numel() if pieces else 1
        advance = advancer()

        def work(number: int) -> None:
            for start in range(number * in_block, len(pieces), len(self.streams) * in_block):
                for piece in pieces[start : start + in_block]:
                    move(piece, number, totals[number])
                    advance(piece.numel())

        self.at_once(work, min(len(self.streams), -(-len(pieces) // in_block)))
        return joint_hex(totals)

    def at_once(self, work: Callable[[int], None], count: int) -> None:
        """Call ``work`` with the numbers of the first ``count`` streams, at the same time.

        If one of several calls fails, all connections are closed.

        Raises:
            LinkClosedError: the other end is gone, or there can be no thread for each stream.
            SyncTimeoutError: the other end makes no progress.
        """
        if count < 2:
            for number in range(count):
                work(number)
            return
        calls: list[futures.Future[None]] = []
        try:
            with undo_on_error(self.close):  # which ends the other threads
                for number in range(count):
                    calls.append(call_for_connection(work, number))
                for done in futures.as_completed(calls):
                    done.result()
        finally:
            futures.wait(calls)  # the memory of the pieces is the caller's again

    def push(self, piece: torch.Tensor, patience: float, total: Checksum | None = None) -> None:
        """Send a piece, a contiguous CPU tensor, over the first connection, and add it to ``total``."""
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
        """Close all connections; the other end notices."""
        for stream in self.streams:
            stream.signed.close()


class AwaitedStream:
    """A payload stream that another process opens, sooner or later. Any thread may call any method."""

    def __init__(self) -> None:
        self._opened: futures.Future[PayloadStream] = futures.Future()
        self._streams: dict[int, PayloadStream] = {}  # by number
        self._changing = threading.RLock()

    def add(self, stream: PayloadStream, number: int = 0, count: int = 1) -> None:
        """Take connection ``number`` of ``count``; close it if there is one, or after :meth:`close`."""
        with self._changing:
            missing = number in range(count) and number not in self._streams and not self._opened.done()
            if not missing:
                stream.close()
                return
            self._streams[number] = stream
            if len(self._streams) == count:
                first = self._streams[0]
                first.streams = [self._streams[number] for number in range(count)]
                self._opened.set_result(first)

    def get(self, seconds: float) -> PayloadStream:
        """Return the stream; SyncTimeoutError if none comes in time, LinkClosedError after :meth:`close`."""
        try:
            return self._opened.result(seconds)
        except futures.TimeoutError:
            raise SyncTimeoutError("it did not make all connections for payloads") from None
        except futures.CancelledError:
            raise LinkClosedError("this end was closed") from None

    def close(self) -> None:
        """Close the stream, or take none any more."""
        with self._changing:
            self._opened.cancel()
            for stream in self._streams.values():
                stream.close()


class Forwarder:
    """Forwarder of received pieces to another host, if any; a failure there does not affect the receiver."""

    def __init__(self, onward: PayloadStream | None) -> None:
        self._onward = onward
        self._unsent: list[list[torch.Tensor]] = [[] for _ in (onward.streams if onward is not None else ())]

    def add(self, piece: torch.Tensor, number: int = 0) -> None:
        """Forward what stream ``number`` can send without a wait; one thread calls this for each stream.

        A piece must not change until :meth:`finish`.
        """
        onward = self._onward
        if onward is None:
            return
        unsent = self._unsent[number]
        unsent.append(piece)
        try:
            while unsent:
                sent = onward.streams[number].push_now(unsent[0])
                if sent < unsent[0].numel():
                    unsent[0] = unsent[0][sent:]
                    return
                del unsent[0]
        except (TransportError, TimeoutError):
            self._onward = None

    def finish(self, patience: float) -> bool:
        """Send the rest, ``patience`` seconds for each piece; return whether all was sent."""
        onward = self._onward
        if onward is None:
            return False

        def send(number: int) -> None:
            for piece in self._unsent[number]:
                onward.streams[number].push(piece, patience)

        try:
            onward.at_once(send, len(self._unsent) if any(self._unsent) else 0)
        except (TransportError, TimeoutError):
            self._onward = None
        return self._onward is not None


def call_for_connection(work: Callable[[int], None], number: int) -> futures.Future[None]:
    """Call ``work(number)`` in a thread; LinkClosedError if the process can start none."""
    try:
        return call_in_thread("weight_update-connection", work, number, in_order=True)
    except RuntimeError as error:
        raise LinkClosedError(f"there is no thread for connection {number} ({error})") from None


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
