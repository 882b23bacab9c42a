"""Router of payloads to other hosts: once to each host, along a chain where several hosts need one."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterable
from typing import Protocol

import torch

from weight_update.errors import LinkClosedError, SyncTimeoutError, kept_error
from weight_update.transports.distributed.relay.client import NotDeliveredError, RelayClient, send_along_chain
from weight_update.transports.distributed.relay.payload_stream import STALLED
from weight_update.transports.shared_memory.slots import slot_of

_SlotUse = tuple[str, int]  # key of a slot, and how often it was lent to be written
_LEAST_SHARE = 0.25  # seconds; also how long a payload waits for the usual chain of hosts
_SHARE = 4  # a worker that does not answer is given up after this share of the timeout


class RelayedConnection(Protocol):
    """A connection to a worker on another host.

    Attributes:
        name: random name of the connection.
        host: name of the host.
        relay_client: connection to the host relay of the worker.
        lost: error that ended the connection; None while it works.
    """

    name: str
    host: str
    relay_client: RelayClient
    lost: Exception | None

    def lose(self, error: Exception) -> None:
        """End the connection with ``error``."""


class Router:
    """The connections of one sender to workers on other hosts, and the payloads that each host has.

    A payload is sent to one worker of a host, whose host relay keeps it; the other workers there map that
    copy. The same worker is chosen as long as it is connected and not busy with another payload.
    """

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._remotes: list[RelayedConnection] = []
        self._busy: set[int] = set()  # ids of connections that send a payload
        self._under_way: set[tuple[str, _SlotUse]] = set()  # payloads on their way, by host
        self._delivered: dict[tuple[str, str], tuple[int, RelayedConnection, bytes]] = {}  # by host and slot
        self._expected: dict[_SlotUse, list[str]] = {}  # hosts that need it
        self._sent_by_removed = 0

    @property
    def sent(self) -> int:
        """Bytes of payloads that this process sent to other hosts."""
        with self._changed:
            return self._sent_by_removed + sum(remote.relay_client.sent for remote in self._remotes)

    def add(self, remote: RelayedConnection) -> None:
        """Add a worker that joined."""
        with self._changed:
            self._remotes.append(remote)

    def remove(self, remote: RelayedConnection) -> None:
        """Remove a worker that left, and the payloads that its host relay kept."""
        with self._changed:
            if remote in self._remotes:
                self._remotes.remove(remote)
                self._sent_by_removed += remote.relay_client.sent
            kept = {key: value for key, value in self._delivered.items() if value[1] is not remote}
            self._delivered = kept
            self._changed.notify_all()

    def named(self, name: str) -> RelayedConnection | None:
        """Return the connection of that name, if it is there."""
        with self._changed:
            return next((one for one in self._remotes if one.name == name), None)

    def expect(self, payload: torch.Tensor, remotes: Iterable[RelayedConnection]) -> None:
        """Announce that ``payload`` is about to be sent to workers on several hosts."""
        hosts = list(dict.fromkeys(remote.host for remote in remotes))
        slot, use = _slot_use_of(payload)
        with self._changed:
            self._expected = {other: value for other, value in self._expected.items() if other[0] != slot}
            self._expected[slot, use] = hosts

    def deliver(self, payload: torch.Tensor, remote: RelayedConnection, timeout: float | None) -> bytes:
        """Return where ``remote`` finds ``payload`` on its host; send it there if no other thread does.

        Raises:
            LinkClosedError: the worker is gone.
            SyncTimeoutError: it took longer than ``timeout`` seconds, or the worker does not answer.
        """
        slot_use = _slot_use_of(payload)
        deadline = time.monotonic() + (STALLED if timeout is None else timeout)
        while True:
            with self._changed:
                remotes = self._await_turn(slot_use, remote, deadline)
                if isinstance(remotes, bytes):
                    return remotes
            self._send(payload, remotes, timeout, deadline)

    def _await_turn(
        self, slot_use: _SlotUse, remote: RelayedConnection, deadline: float
    ) -> bytes | list[RelayedConnection]:
        """Return where the payload is as soon as its host has it, or the connections to send it through."""
        gather_until = min(time.monotonic() + _LEAST_SHARE, deadline)
        while True:
            if remote.lost is not None:
                raise kept_error(remote.lost)
            slot, use = slot_use
            delivered = self._delivered.get((remote.host, slot))
            if delivered is not None and delivered[0] == use:
                return delivered[2]
            now, first = time.monotonic(), None
            if (remote.host, slot_use) not in self._under_way:
                first = self._idle(remote.host)
            if first is not None and (
                now >= gather_until or self._usual_chain_is_idle(slot_use, remote.host)
            ):
                return self._reserve(slot_use, first)
            if now >= deadline:
                raise SyncTimeoutError("the other workers of its host are busy with other payloads")
            self._changed.wait((deadline if first is None else gather_until) - now)

    def _usual_chain_is_idle(self, slot_use: _SlotUse, host: str) -> bool:
        """Return whether the first worker of each host that needs ``slot_use`` is idle; they are linked."""
        hosts = {host, *self._expected.get(slot_use, ())}
        able = [one for one in reversed(self._remotes) if one.lost is None and one.host in hosts]
        usual = {one.host: one for one in able}
        return not any(id(one) in self._busy for one in usual.values())

    def _reserve(self, slot_use: _SlotUse, first: RelayedConnection) -> list[RelayedConnection]:
        """Reserve ``first`` and one idle worker of each other host that needs ``slot_use``."""
        chosen = [first]
        for host in self._expected.pop(slot_use, []):
            delivered = self._delivered.get((host, slot_use[0]))
            if (
                host == first.host
                or (host, slot_use) in self._under_way
                or (delivered and delivered[0] == slot_use[1])
            ):
                continue
            other = self._idle(host)
            if other is not None:
                chosen.append(other)
        order = {id(remote): place for place, remote in enumerate(self._remotes)}
        chosen.sort(key=lambda one: order[id(one)])  # always the same neighbours in the chain
        for one in chosen:
            self._busy.add(id(one))
            self._under_way.add((one.host, slot_use))
            self._delivered.pop((one.host, slot_use[0]), None)
        return chosen

    def _idle(self, host: str) -> RelayedConnection | None:
        able = [one for one in self._remotes if one.host == host and one.lost is None]
        return next((one for one in able if id(one) not in self._busy), None)

    def _patience(
        self, chosen: list[RelayedConnection], timeout: float | None, deadline: float
    ) -> tuple[float, float]:
        """Return the seconds to wait without progress, and for the answer after the whole payload was sent.

        Both are all the time that is left if no other worker can take over. Otherwise they are a share of
        the timeout, so that enough is left for the other workers.
        """
        share = max((STALLED if timeout is None else timeout) / _SHARE, _LEAST_SHARE)
        with self._changed:
            alone = sum(one.host == chosen[0].host for one in self._remotes) == 1
        if alone and len(chosen) == 1:
            left = max(deadline - time.monotonic(), share)
            return left, left
        return share, 2 * share

    def _send(
        self, payload: torch.Tensor, chosen: list[RelayedConnection], timeout: float | None, deadline: float
    ) -> None:
        slot_use = _slot_use_of(payload)
        unknown = dict(enumerate(chosen))

        def note(place: int, result: bytes | Exception) -> None:
            self._note(unknown.pop(place), slot_use, result, first=place == 0)

        try:
            patience, limit = self._patience(chosen, timeout, deadline)
            send_along_chain([one.relay_client for one in chosen], payload, patience, limit, note)
        finally:
            for place in list(unknown):
                note(place, NotDeliveredError("it was not sent"))

    def _note(
        self, one: RelayedConnection, slot_use: _SlotUse, result: bytes | Exception, *, first: bool
    ) -> None:
        """Note the result of a payload for one host, whose workers do not wait for the other hosts."""
        if isinstance(result, NotDeliveredError) and first:  # no other host was involved
            one.lose(LinkClosedError(str(result)))
        elif isinstance(result, Exception) and not isinstance(result, NotDeliveredError):
            one.lose(result)
        with self._changed:
            self._busy.discard(id(one))
            self._under_way.discard((one.host, slot_use))
            if isinstance(result, bytes) and one in self._remotes:
                self._delivered[one.host, slot_use[0]] = (slot_use[1], one, result)
            self._changed.notify_all()


def _slot_use_of(payload: torch.Tensor) -> _SlotUse:
    slot = slot_of(payload)
    return slot.key, slot.use
