"""The sender's part in "once a host": payloads handed to a keeper, or down a chain of them."""

from __future__ import annotations

import itertools
import json
import logging
import threading
import time
import uuid
import weakref
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import torch

from weight_update.errors import FormatError, LinkClosedError, SyncTimeoutError, TransportError
from weight_update.transports.distributed.checksum import CHECKSUM
from weight_update.transports.distributed.relay.gloo import Pair
from weight_update.transports.distributed.relay.pairs import pair_of
from weight_update.transports.distributed.relay.protocol import Notes, send_pieces
from weight_update.transports.distributed.store import Store, leave_in_order
from weight_update.transports.shared_memory.slots import slot_of

__all__ = ["Carrier", "NotHeldError", "ship"]

_log = logging.getLogger(__name__)
_GONE_AT_ONCE = 64  # names of slots in one note
_OPENING = 20.0  # seconds that a worker may take to make its pair, beside what updates may take
_LEAST_PATIENCE = 1.0  # with a host that is sent to directly, if its limit is not less
_LOOK = 0.5
_numbers = itertools.count()
_T = TypeVar("_T")


class NotHeldError(Exception):
    """A host did not get a payload, through no fault of its connection to the sender."""


class Carrier:
    """The sender's end of the connection to the host relay in one worker.

    One thread at a time uses it; the router chooses which.

    Args:
        store: where pairs find each other.
        name: of the connection.
        token: what both ends know.
        address: of this machine's interface for payloads.
        pid: of the worker, on its host.
        backend: what payloads go through.
        on_loss: called from a thread when the worker is gone.

    Attributes:
        sent: bytes of payloads that went through it.
    """

    def __init__(
        self,
        store: Store,
        name: str,
        token: str,
        address: str,
        pid: int,
        backend: str,
        on_loss: Callable[[], None],
    ) -> None:
        self.sent = 0
        self.inward: str | None = None  # names of its links with other keepers
        self.outward: str | None = None
        self._store, self._name, self._token, self._address, self._pid = store, name, token, address, pid
        self._on_loss, self._make_pair = on_loss, pair_of(backend)
        self._mirrored: dict[str, weakref.ref[Any]] = {}
        self._pair: Pair | None = None
        self._notes: Notes | None = None
        self._opened = threading.Event()
        self._closing = threading.Lock()
        self._closed = False
        self._thread = threading.Thread(target=self._run, name="weight_update-watch", daemon=True)

    def open(self) -> None:
        """Begin to make the pair; whoever needs it waits for it."""
        leave_in_order(self._thread)
        self._thread.start()

    def is_open(self) -> bool:
        """Whether the connection was not taken down yet."""
        return self._thread.is_alive()

    def wait_until_gone(self, seconds: float) -> None:
        """After :meth:`close`: wait until the connection was taken down."""
        if self.is_open():
            self._thread.join(seconds)

    def close(self) -> None:
        """Give up the connection; the worker hears of it."""
        with self._closing:
            self._closed = True
            self._opened.set()
            if self._pair is not None:
                self._pair.close()

    def say(self, note: dict[str, Any], patience: float) -> None:
        """Give the keeper an order."""
        self._talk(patience).say(note, patience)

    def answer(self, patience: float) -> dict[str, Any]:
        """What it says to that."""
        return self._talk(patience).hear(patience)

    def order_of(self, payload: torch.Tensor) -> dict[str, Any]:
        """What the keeper has to know of a payload's slot."""
        slot = slot_of(payload)
        given_up = [key for key, ref in self._mirrored.items() if (old := ref()) is None or old.fd < 0]
        gone = given_up[:_GONE_AT_ONCE]
        for key in gone:
            del self._mirrored[key]
        self._mirrored[slot.key] = weakref.ref(slot)
        return {"slot": slot.key, "size": slot.nbytes, "nbytes": payload.numel(), "gone": gone}

    def send(self, payload: torch.Tensor, patience: float) -> str:
        """Send a payload in pieces; its checksum."""
        pair = self._talk(patience).pair
        self.sent += payload.numel()
        return send_pieces(pair, payload, patience)

    def where(self, answer: dict[str, Any]) -> bytes:
        """Where a worker of that host finds what the keeper took."""
        return json.dumps([self._pid, answer["fd"], answer["key"]]).encode()

    def _run(self) -> None:
        try:
            pair = self._make_pair(self._store, f"{self._name}/pair", self._token, 0, self._address)
        except LinkClosedError as error:
            if not self._closed:
                _log.warning("%s: only small payloads can be sent: %s", self._name, error)
            self._opened.set()
            return
        with self._closing:
            self._pair, self._notes = pair, Notes(pair, self._name, self._token, 0)
            if self._closed:
                pair.close()
        self._opened.set()
        pair.watch(self._on_loss)

    def _talk(self, patience: float) -> Notes:
        if not self._opened.wait(max(patience, _OPENING)):
            raise SyncTimeoutError("it made no connection for payloads")
        if self._notes is None or self._closed:
            raise LinkClosedError("there is no connection for payloads")
        return self._notes


class _Stop:
    """A host in a chain, and how it fares."""

    def __init__(self, carrier: Carrier) -> None:
        self.carrier = carrier
        self.error: Exception | None = None

    def do(self, action: Callable[..., _T], *args: Any) -> _T | None:
        """Call ``action``, unless something went wrong before; what goes wrong now is kept."""
        if self.error is None:
            try:
                return action(*args)
            except (TransportError, TimeoutError, FormatError, NotHeldError) as error:
                self.error = error
        return None


def ship(
    carriers: Sequence[Carrier],
    payload: torch.Tensor,
    patience: float,
    limit: float,
    tell: Callable[[int, bytes | Exception], None],
) -> None:
    """Send a payload to the first keeper, which passes it on to the second while it comes, and so on.

    Args:
        carriers: one for each host.
        payload: of a slot.
        patience: seconds without progress after which an end is given up.
        limit: seconds for a keeper's answer when all was sent.
        tell: called for each host with its place and, as soon as it is known, where its workers find the
            payload or why not: :class:`NotHeldError` if the chain was broken before it, another error if the
            host is lost itself.
    """
    stops = [_Stop(carrier) for carrier in carriers]
    chain = _chain(stops, patience, limit)
    for place, stop in enumerate(stops[len(chain) :], len(chain)):
        tell(place, stop.error or NotHeldError("the chain is broken before it"))
    number = next(_numbers)
    for stop in chain:
        order = {"do": "take", "number": number, "checksum": CHECKSUM, "patience": patience}
        order |= {"chained": stop is not chain[0], "onward": stop is not chain[-1]}
        order |= stop.carrier.order_of(payload)
        stop.do(stop.carrier.say, order, patience)
    first = chain[0]
    total = first.do(first.carrier.send, payload, max(patience, min(limit, _LEAST_PATIENCE)))
    for stop in chain:
        stop.do(stop.carrier.say, {"do": "sum", "number": number, "sum": total}, patience)
    deadline = time.monotonic() + limit
    for place, stop in enumerate(chain):
        result = stop.do(_result, stop.carrier, _until(deadline)) or b""
        if stop.error is not None:
            stop.carrier.inward = None
        tell(place, stop.error or result)


def _chain(stops: list[_Stop], patience: float, limit: float) -> list[_Stop]:
    """The stops, from the first one on, that pass on to each other; all others have an error."""
    for position in range(1, len(stops)):
        _join(stops[position - 1], stops[position], patience, limit)
        if stops[position].error is not None:
            for stop in stops[position + 1 :]:
                stop.error = NotHeldError("the chain is broken before it")
            return stops[:position]
    return stops


def _join(before: _Stop, after: _Stop, patience: float, limit: float) -> None:
    """Have two keepers make a pair, unless they have one."""
    if before.carrier.outward is not None and before.carrier.outward == after.carrier.inward:
        return
    name = f"link/{uuid.uuid4().hex}"
    before.carrier.outward = after.carrier.inward = None
    for stop, way in ((after, "in"), (before, "out")):
        order = {"do": "link", "way": way, "name": name, "patience": patience}
        stop.do(stop.carrier.say, order, patience)
    deadline = time.monotonic() + limit  # they take ``patience``, and half of it to connect
    answers = [stop.do(stop.carrier.answer, _until(deadline)) for stop in (before, after)]
    if all(answer == {} for answer in answers):
        before.carrier.outward = after.carrier.inward = name
    else:
        after.error = after.error or NotHeldError("the host before it in the chain cannot reach it")


def _until(deadline: float) -> float:
    """Seconds left, and time to look whether the answer is here already."""
    return max(deadline - time.monotonic(), _LOOK)


def _result(carrier: Carrier, patience: float) -> bytes:
    answer = carrier.answer(patience)
    if "error" in answer:
        raise NotHeldError(answer["error"])
    return carrier.where(answer)
