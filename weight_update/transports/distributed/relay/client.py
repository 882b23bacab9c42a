"""Sender's part of the relay: hands payloads to one worker of each host, or along a chain of hosts."""

from __future__ import annotations

import itertools
import json
import time
import uuid
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeVar

import torch

from weight_update.errors import FormatError, TransportError, without_frames
from weight_update.transports.distributed.relay.nccl import payload_stream
from weight_update.transports.distributed.relay.payload_stream import AwaitedStream
from weight_update.transports.distributed.transfer import CHECKSUM
from weight_update.transports.shared_memory.slots import slot_of
from weight_update.transports.signed_stream import SignedStream

_OPENING = 20.0  # seconds in which a worker has to connect for payloads, if updates may not take longer
_LEAST_PATIENCE = 1.0  # seconds for a host that is sent to directly, unless its limit is less
_LINK_SHARE = 2
"""A relay may take this share of the sender's patience to connect to the next host.

The sender waits twice its patience for the answer. A relay must not be given up because its next host does
not answer, even if it was out of reach itself for a moment.
"""
_LOOK = 0.5
_numbers = itertools.count()
_T = TypeVar("_T")


class NotDeliveredError(Exception):
    """A host did not get a payload, although its connection to the sender may be intact."""


class RelayClient:
    """Sender's end of the connections to the host relay of one worker; ``backend`` carries the payloads.

    One thread uses it at a time; the router chooses which. Methods that need the connections wait until the
    worker, whose process id on its host is ``pid``, has made all of them.
    """

    def __init__(self, pid: int, backend: str, connections: int = 1) -> None:
        self.incoming_link: str | None = None  # name of the link from the host before it in the chain
        self.outgoing_link: str | None = None  # name of the link to the host after it in the chain
        self._pid, self._backend, self._connections = pid, backend, connections
        self._replicated: dict[str, weakref.ref[Any]] = {}
        self._stream = AwaitedStream()

    def open(self, signed: SignedStream, number: int = 0) -> None:
        """Take over a connection of the worker; LinkClosedError if the backend cannot make its own."""
        if number == 0:
            signed.send_json({"backend": self._backend, "connections": self._connections}, _OPENING)
        self._stream.add(payload_stream(signed, self._backend, 0), number, self._connections)

    def close(self) -> None:
        """Close the connections; the worker notices."""
        self._stream.close()

    def send_command(self, command: dict[str, Any], patience: float) -> None:
        """Send a command to the host relay."""
        self._stream.get(max(patience, _OPENING)).signed.send_json(command, patience)

    def receive_answer(self, patience: float) -> dict[str, Any]:
        """Return the host relay's answer to a command."""
        return self._stream.get(max(patience, _OPENING)).signed.receive_json(patience)

    def send_payload(self, payload: torch.Tensor, patience: float) -> str:
        """Send a payload in pieces; return its checksum."""
        return self._stream.get(max(patience, _OPENING)).send_payload(payload, patience)

    def take_command_for(self, payload: torch.Tensor) -> dict[str, Any]:
        """Return the part of a ``take`` command that describes the payload's slot."""
        slot = slot_of(payload)
        gone = [key for key, ref in self._replicated.items() if (old := ref()) is None or old.fd < 0]
        for key in gone:
            del self._replicated[key]
        self._replicated[slot.key] = weakref.ref(slot)
        return {"slot": slot.key, "size": slot.tensor.numel(), "nbytes": payload.numel(), "gone": gone}

    def receive_location(self, patience: float) -> bytes:
        """Return where workers of that host find the payload; NotDeliveredError if it did not arrive."""
        answer = self.receive_answer(patience)
        if "error" in answer:
            raise NotDeliveredError(answer["error"])
        return json.dumps([self._pid, answer["fd"], answer["key"]]).encode()


class _Hop:
    """One host of a chain, with its first error."""

    def __init__(self, client: RelayClient) -> None:
        self.client = client
        self.error: Exception | None = None

    def do(self, action: Callable[..., _T], *args: Any) -> _T | None:
        """Call ``action`` unless an earlier one failed; keep the error if this one fails."""
        if self.error is None:
            try:
                return action(*args)
            except (TransportError, TimeoutError, FormatError, NotDeliveredError) as error:
                self.error = without_frames(error)
        return None


def send_along_chain(
    clients: Sequence[RelayClient], payload: torch.Tensor, patience: float, limit: float
) -> Iterator[tuple[int, bytes | Exception]]:
    """Send a payload to the first host relay, which forwards each piece to the second on arrival, and so on.

    An end is given up after ``patience`` seconds without progress, and if a host relay does not answer within
    ``limit`` seconds after the whole payload was sent.

    Yields:
        for each host, as soon as it is known, its place in ``clients`` and where its workers find the
        payload, or an error: :class:`NotDeliveredError` if the chain was broken before the host, another
        error if the host itself is lost.
    """
    hops = [_Hop(client) for client in clients]
    chain = _chain(hops, patience, limit)
    for place, hop in enumerate(hops[len(chain) :], len(chain)):
        yield place, hop.error or NotDeliveredError("the chain is broken before it")
    number = next(_numbers)
    for hop in chain:
        command = {"do": "take", "number": number, "checksum": CHECKSUM, "patience": patience}
        link = None if hop is chain[0] else hop.client.incoming_link
        command |= {"link": link, "onward": hop is not chain[-1]}
        command |= hop.client.take_command_for(payload)
        hop.do(hop.client.send_command, command, patience)
    first = chain[0]
    total = first.do(first.client.send_payload, payload, max(patience, min(limit, _LEAST_PATIENCE)))
    for hop in chain:
        hop.do(hop.client.send_command, {"do": "sum", "number": number, "sum": total}, patience)
    deadline = time.monotonic() + limit
    for place, hop in enumerate(chain):
        result = hop.do(hop.client.receive_location, _time_left(deadline)) or b""
        if hop.error is not None:
            hop.client.incoming_link = None
        yield place, hop.error or result


def _chain(hops: list[_Hop], patience: float, limit: float) -> list[_Hop]:
    """Return the first hops, which forward to each other; the next hop has an error."""
    for position in range(1, len(hops)):
        _join(hops[position - 1], hops[position], patience, limit)
        if hops[position].error is not None:
            return hops[:position]
    return hops


def _join(before: _Hop, after: _Hop, patience: float, limit: float) -> None:
    """Link two host relays, unless they are linked already."""
    if before.client.outgoing_link is not None and before.client.outgoing_link == after.client.incoming_link:
        return
    name = uuid.uuid4().hex
    before.client.outgoing_link = after.client.incoming_link = None
    after.do(after.client.send_command, {"do": "listen", "name": name}, patience)
    deadline = time.monotonic() + limit
    where = after.do(after.client.receive_answer, _time_left(deadline)) or {}
    if "port" in where:
        command = {"do": "link", "name": name, "patience": patience / _LINK_SHARE, **where}
        before.do(before.client.send_command, command, patience)
        if before.do(before.client.receive_answer, _time_left(deadline)) == {}:
            before.client.outgoing_link = after.client.incoming_link = name
            return
    after.error = after.error or NotDeliveredError("the host before it in the chain cannot reach it")


def _time_left(deadline: float) -> float:
    """Return the seconds left, at least enough to check whether the answer is here already."""
    return max(deadline - time.monotonic(), _LOOK)
