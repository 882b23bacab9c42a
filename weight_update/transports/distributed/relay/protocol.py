"""Protocol of the relay over a point-to-point group: signed control messages, and payloads in pieces."""

from __future__ import annotations

import hashlib
import hmac
import json
import queue
import threading
from collections import deque
from collections.abc import Sequence
from typing import Any

import torch

from weight_update.errors import FormatError, LinkClosedError, TransportError, kept_error
from weight_update.progress import advance
from weight_update.transports.distributed.checksum import BLOCK, Checksum
from weight_update.transports.distributed.relay.gloo import Pending, PointToPointGroup
from weight_update.transports.distributed.store import leave_in_order
from weight_update.wire.memory import byte_view

MESSAGE_BYTES = 4096
_SIGNATURE = 32
_MAX_UNREAD = 4  # messages
_WINDOW = 4  # pieces under way: some travel while one is summed up


class ControlChannel:
    """Small signed JSON messages of fixed size, in both directions of a group.

    The ``rank`` is 0 on one end, and 1 on the other.
    """

    def __init__(self, group: PointToPointGroup, name: str, token: str, rank: int) -> None:
        self.group = group
        self._name, self._key, self._rank = name, token.encode(), rank
        self._sent = self._received = 0
        self._under_way: deque[Pending] = deque()

    def send(self, message: dict[str, Any], timeout: float | None) -> None:
        """Begin to send a message; wait, as :meth:`PointToPointGroup.finish`, while too many are unread.

        A message does not wait for its reader, so both ends may send at the same time.
        """
        text = json.dumps(message).encode()
        if len(text) > MESSAGE_BYTES - _SIGNATURE:
            raise ValueError(f"a control message of {len(text)} bytes")
        body = text.ljust(MESSAGE_BYTES - _SIGNATURE)
        signed = self._sign(self._rank, self._sent, body) + body
        self._sent += 1
        if len(self._under_way) >= _MAX_UNREAD:
            self.group.finish(self._under_way.popleft(), timeout)
        self._under_way.append(self.group.begin_send(torch.frombuffer(bytearray(signed), dtype=torch.uint8)))

    def receive(self, timeout: float | None) -> dict[str, Any]:
        """Return the next message; raise as :meth:`PointToPointGroup.finish`.

        Raises:
            FormatError: the message was not signed with this end's token, or was sent at another position.
        """
        raw = torch.empty(MESSAGE_BYTES, dtype=torch.uint8)
        self.group.recv(raw, timeout)
        signed = bytes(byte_view(raw))
        signature, body = signed[:_SIGNATURE], signed[_SIGNATURE:]
        if not hmac.compare_digest(signature, self._sign(1 - self._rank, self._received, body)):
            raise FormatError("a control message was not signed with the token of this end")
        self._received += 1
        message = json.loads(body)
        if not isinstance(message, dict):
            raise FormatError("a control message must be a JSON object")
        return message

    def _sign(self, rank: int, number: int, body: bytes) -> bytes:
        place = b"%s %d %d " % (self._name.encode(), rank, number)
        return hmac.new(self._key, place + body, hashlib.sha256).digest()


class Forwarder:
    """Forwarder of received pieces to another group, if any; a failure there does not affect the receiver."""

    def __init__(self, group: PointToPointGroup | None) -> None:
        self._group = group
        self._under_way: deque[Pending] = deque()

    def send(self, piece: torch.Tensor) -> None:
        """Begin to forward a piece, which must not change until :meth:`finish`."""
        if self._group is not None:
            try:
                self._under_way.append(self._group.begin_push(piece))
            except TransportError:
                self._group = None

    def finish(self, patience: float) -> bool:
        """Wait for the remaining pieces, ``patience`` seconds each; return whether all were sent."""
        while self._group is not None and self._under_way:
            try:
                self._group.finish(self._under_way.popleft(), patience)
            except (TransportError, TimeoutError):
                self._group = None
        return self._group is not None


def send_pieces(group: PointToPointGroup, payload: torch.Tensor, patience: float | None) -> str:
    """Send a payload in pieces; return its checksum.

    Each piece may take ``patience`` seconds; raise as :meth:`PointToPointGroup.finish`.
    """
    total = Checksum()
    under_way: deque[Pending] = deque()
    for piece in pieces_of(payload):
        under_way.append(group.begin_push(piece))
        total.add(piece)  # while it travels
        if len(under_way) >= _WINDOW:
            group.finish(under_way.popleft(), patience)
        advance(piece.numel())
    for work in under_way:
        group.finish(work, patience)
    return total.hex()


def recv_pieces(
    group: PointToPointGroup, pieces: Sequence[torch.Tensor], patience: float | None, forwarder: Forwarder
) -> str:
    """Receive a payload sent by :func:`send_pieces`, and forward each piece at once; return its checksum."""
    total = Checksum()
    receiver = _PieceReceiver(group, patience)
    with group.listening(receiver.end):
        for piece in pieces[:_WINDOW]:
            receiver.begin(piece)
        for number, piece in enumerate(pieces):
            receiver.wait()
            if number + _WINDOW < len(pieces):
                receiver.begin(pieces[number + _WINDOW])
            forwarder.send(piece)
            total.add(piece)
            advance(piece.numel())
    receiver.end()
    return total.hex()


class _PieceReceiver:
    """Receives pieces and waits for them in a thread of its own.

    Gloo does not report the other end's death to a receive that is half done. The watch of the group notices
    the death and ends :meth:`wait`; the thread's own wait lasts up to ``patience``.
    """

    def __init__(self, group: PointToPointGroup, patience: float | None) -> None:
        self._group, self._patience = group, patience
        self._started: queue.SimpleQueue[Pending | None] = queue.SimpleQueue()
        self._outcomes: queue.SimpleQueue[Exception | None] = queue.SimpleQueue()
        thread = threading.Thread(target=self._run, name="weight_update-pieces", daemon=True)
        leave_in_order(thread)
        thread.start()

    def begin(self, piece: torch.Tensor) -> None:
        """Begin to receive into ``piece``, after the earlier pieces."""
        self._started.put(self._group.begin_pull(piece))

    def wait(self) -> None:
        """Wait for the next piece; raise as :meth:`PointToPointGroup.finish`."""
        outcome = self._outcomes.get()
        if outcome is not None:
            raise kept_error(outcome)

    def end(self) -> None:
        """Stop: no more pieces come."""
        self._outcomes.put(LinkClosedError("the other end is gone"))
        self._started.put(None)

    def _run(self) -> None:
        while (pending := self._started.get()) is not None:
            try:
                self._group.finish(pending, self._patience)
            except (TransportError, TimeoutError) as error:
                self._outcomes.put(error.with_traceback(None))
                return
            self._outcomes.put(None)


def pieces_of(payload: torch.Tensor) -> list[torch.Tensor]:
    """Return the pieces in which a payload travels."""
    return [payload[start : start + BLOCK] for start in range(0, payload.numel(), BLOCK)]


def discarded_pieces(nbytes: int) -> list[torch.Tensor]:
    """Return pieces for a payload that is received and dropped; all of them share one scratch memory."""
    scratch = torch.empty(min(nbytes, BLOCK), dtype=torch.uint8)
    return [scratch[: nbytes - start] for start in range(0, nbytes, BLOCK)]
