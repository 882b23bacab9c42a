"""What goes over a pair: signed notes, and payloads in pieces."""

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

from weight_update.errors import FormatError, LinkClosedError, TransportError
from weight_update.transports.distributed.checksum import BLOCK, Checksum
from weight_update.transports.distributed.relay.gloo import Pair, Pending
from weight_update.transports.distributed.store import leave_in_order
from weight_update.wire.memory import byte_view

__all__ = ["NOTE_BYTES", "Notes", "Onward", "discarded_pieces", "pieces_of", "recv_pieces", "send_pieces"]

NOTE_BYTES = 4096
_SIGNATURE = 32
_UNHEARD = 4  # notes
_WINDOW = 4  # pieces under way: the next ones travel while one is summed up


class Notes:
    """Small messages over a pair, both ways. They are JSON, signed with the token, and of one size.

    Args:
        pair: what they go over.
        name: of the pair.
        token: what both ends know.
        rank: 0 on one end, 1 on the other.
    """

    def __init__(self, pair: Pair, name: str, token: str, rank: int) -> None:
        self.pair = pair
        self._name, self._key, self._rank = name, token.encode(), rank
        self._said = self._heard = 0
        self._under_way: deque[Pending] = deque()

    def say(self, note: dict[str, Any], timeout: float | None) -> None:
        """Begin to send one; waits, and raises as :meth:`Pair.finish`, if earlier ones were not heard yet.

        Not waiting lets both ends say something at the same time.
        """
        text = json.dumps(note).encode()
        if len(text) > NOTE_BYTES - _SIGNATURE:
            raise ValueError(f"a note of {len(text)} bytes")
        body = text.ljust(NOTE_BYTES - _SIGNATURE)
        signed = self._sign(self._rank, self._said, body) + body
        self._said += 1
        if len(self._under_way) >= _UNHEARD:
            self.pair.finish(self._under_way.popleft(), timeout)
        self._under_way.append(self.pair.begin_send(torch.frombuffer(bytearray(signed), dtype=torch.uint8)))

    def hear(self, timeout: float | None) -> dict[str, Any]:
        """The next one; raises as :meth:`Pair.finish`.

        Raises:
            FormatError: it was not written by a holder of our token, or not for this place.
        """
        raw = torch.empty(NOTE_BYTES, dtype=torch.uint8)
        self.pair.recv(raw, timeout)
        signed = bytes(byte_view(raw))
        signature, body = signed[:_SIGNATURE], signed[_SIGNATURE:]
        if not hmac.compare_digest(signature, self._sign(1 - self._rank, self._heard, body)):
            raise FormatError("a note beside the payloads was not signed with our token")
        self._heard += 1
        note = json.loads(body)
        if not isinstance(note, dict):
            raise FormatError("a note is a JSON object")
        return note

    def _sign(self, rank: int, number: int, body: bytes) -> bytes:
        place = b"%s %d %d " % (self._name.encode(), rank, number)
        return hmac.new(self._key, place + body, hashlib.sha256).digest()


class Onward:
    """Passes on, to another pair, the pieces that arrive; a failure there is not one here.

    Args:
        pair: None passes on nothing.
    """

    def __init__(self, pair: Pair | None) -> None:
        self._pair = pair
        self._under_way: deque[Pending] = deque()

    def send(self, piece: torch.Tensor) -> None:
        """Begin to pass on a piece, which then stays as it is until :meth:`finish`."""
        if self._pair is not None:
            try:
                self._under_way.append(self._pair.begin_push(piece))
            except TransportError:
                self._pair = None

    def finish(self, patience: float) -> bool:
        """Wait for the rest, ``patience`` seconds for each piece; whether all went."""
        while self._pair is not None and self._under_way:
            try:
                self._pair.finish(self._under_way.popleft(), patience)
            except (TransportError, TimeoutError):
                self._pair = None
        return self._pair is not None


def send_pieces(pair: Pair, payload: torch.Tensor, patience: float | None) -> str:
    """Send a payload, which may wait ``patience`` seconds for each piece; gives its checksum.

    Raises as :meth:`Pair.finish`.
    """
    total = Checksum()
    under_way: deque[Pending] = deque()
    for piece in pieces_of(payload):
        under_way.append(pair.begin_push(piece))
        total.add(piece)  # while it travels
        if len(under_way) >= _WINDOW:
            pair.finish(under_way.popleft(), patience)
    for work in under_way:
        pair.finish(work, patience)
    return total.hex()


def recv_pieces(pair: Pair, pieces: Sequence[torch.Tensor], patience: float | None, onward: Onward) -> str:
    """Receive what :func:`send_pieces` sends; pass each piece on as soon as it is here.

    Returns:
        the checksum of the payload.
    """
    total = Checksum()
    arrivals = _Arrivals(pair, patience)
    with pair.listening(arrivals.end):
        for piece in pieces[:_WINDOW]:
            arrivals.begin(piece)
        for number, piece in enumerate(pieces):
            arrivals.wait()
            if number + _WINDOW < len(pieces):
                arrivals.begin(pieces[number + _WINDOW])
            onward.send(piece)
            total.add(piece)
    arrivals.end()
    return total.hex()


class _Arrivals:
    """Pieces to come, waited for in a thread.

    Gloo does not tell a receive that is half done of the other end's death. The pair's watch learns of
    it, and ends the wait here; that of the thread lasts as long as ``patience``.
    """

    def __init__(self, pair: Pair, patience: float | None) -> None:
        self._pair, self._patience = pair, patience
        self._begun: queue.SimpleQueue[Pending | None] = queue.SimpleQueue()
        self._outcomes: queue.SimpleQueue[Exception | None] = queue.SimpleQueue()
        thread = threading.Thread(target=self._run, name="weight_update-arrivals", daemon=True)
        leave_in_order(thread)
        thread.start()

    def begin(self, piece: torch.Tensor) -> None:
        """Receive into ``piece`` after those before."""
        self._begun.put(self._pair.begin_pull(piece))

    def wait(self) -> None:
        """Wait for the next piece; raises as :meth:`Pair.finish`."""
        outcome = self._outcomes.get()
        if outcome is not None:
            raise outcome

    def end(self) -> None:
        """No more pieces come."""
        self._outcomes.put(LinkClosedError("the other end is gone"))
        self._begun.put(None)

    def _run(self) -> None:
        while (pending := self._begun.get()) is not None:
            try:
                self._pair.finish(pending, self._patience)
            except (TransportError, TimeoutError) as error:
                self._outcomes.put(error.with_traceback(None))
                return
            self._outcomes.put(None)


def pieces_of(payload: torch.Tensor) -> list[torch.Tensor]:
    """Return the pieces that a payload travels in."""
    return [payload[start : start + BLOCK] for start in range(0, payload.numel(), BLOCK)]


def discarded_pieces(nbytes: int) -> list[torch.Tensor]:
    """Return pieces to receive a payload into that nobody reads: all of them are the same memory."""
    scratch = torch.empty(min(nbytes, BLOCK), dtype=torch.uint8)
    return [scratch[: nbytes - start] for start in range(0, nbytes, BLOCK)]
