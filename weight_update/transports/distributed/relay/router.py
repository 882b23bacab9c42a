"""How payloads get to other hosts: once to each, and down a chain where several are to have one."""

from __future__ import annotations

import threading
import time
import weakref
from collections.abc import Iterable
from typing import Protocol

import torch

from weight_update.errors import LinkClosedError, SyncTimeoutError
from weight_update.transports.distributed.relay.client import Carrier, NotHeldError, ship
from weight_update.transports.distributed.relay.gloo import STALLED
from weight_update.transports.distributed.store import Store
from weight_update.transports.shared_memory.slots import slot_of

__all__ = ["Remote", "Route"]

_Content = tuple[str, int]  # a slot, and which of the contents that it had one after the other
_LEAST_SHARE = 0.25
_SHARE = 4  # of the timeout: so often can one who does not answer be given up for another


class Remote(Protocol):
    """A connection to a worker on another host.

    Attributes:
        host: its name.
        carrier: leads to the keeper of the worker.
        lost: why it is of no more use, if so.
    """

    host: str
    carrier: Carrier
    lost: Exception | None

    def lose(self, error: Exception) -> None:
        """It is of no more use."""


class Route:
    """The connections of one sender to workers on other hosts, and what those hosts hold.

    A payload is sent to one worker of a host, its carrier; all others there map what that one keeps. The same
    worker is taken as long as it is there and not busy with another payload.
    """

    def __init__(self) -> None:
        self._moved = threading.Condition()
        self._remotes: list[Remote] = []
        self._busy: set[int] = set()  # ids of remotes that carry something
        self._under_way: set[tuple[str, _Content]] = set()  # what comes to which host
        self._held: dict[tuple[str, str], tuple[int, Remote, bytes]] = {}  # by host and slot
        self._expected: dict[_Content, list[str]] = {}  # the hosts that are to have it
        self._leaving: list[Carrier] = []
        self._gone = 0

    @classmethod
    def of(cls, store: Store) -> Route:
        """The one route of all links that meet at ``store``."""
        with _making:
            if store not in _routes:
                _routes[store] = cls()
            return _routes[store]

    @property
    def sent(self) -> int:
        """Bytes of payloads that left this process for other hosts."""
        with self._moved:
            return self._gone + sum(remote.carrier.sent for remote in self._remotes)

    def add(self, remote: Remote) -> None:
        """A worker joined."""
        with self._moved:
            self._remotes.append(remote)

    def remove(self, remote: Remote) -> None:
        """It has gone, and with it what it kept."""
        with self._moved:
            if remote in self._remotes:
                self._remotes.remove(remote)
                self._gone += remote.carrier.sent
                self._leaving = [*filter(Carrier.is_open, self._leaving), remote.carrier]
            for key in [key for key, held in self._held.items() if held[1] is remote]:
                del self._held[key]
            self._moved.notify_all()

    def wait_until_gone(self, seconds: float) -> None:
        """Wait until the connections of those that were removed are taken down."""
        deadline = time.monotonic() + seconds
        with self._moved:
            leaving, self._leaving = self._leaving, []
        for carrier in leaving:
            carrier.wait_until_gone(max(deadline - time.monotonic(), 0.0))

    def expect(self, payload: torch.Tensor, remotes: Iterable[Remote]) -> None:
        """Workers on several hosts are about to be sent ``payload``."""
        hosts = list(dict.fromkeys(remote.host for remote in remotes))
        with self._moved:
            older = [content for content in self._expected if content[0] == _content(payload)[0]]
            for content in older:
                del self._expected[content]
            self._expected[_content(payload)] = hosts

    def deliver(self, payload: torch.Tensor, remote: Remote, timeout: float | None) -> bytes:
        """Where ``remote`` finds ``payload`` on its host; sends it there if nobody else does.

        Raises:
            LinkClosedError: the worker is gone.
            SyncTimeoutError: it took longer than ``timeout`` seconds, or the worker does not answer.
        """
        content = _content(payload)
        deadline = time.monotonic() + (STALLED if timeout is None else timeout)
        while True:
            with self._moved:
                remotes = self._await_turn(content, remote, deadline)
                if isinstance(remotes, bytes):
                    return remotes
            self._carry(payload, remotes, timeout, deadline)

    def _await_turn(self, content: _Content, remote: Remote, deadline: float) -> bytes | list[Remote]:
        """Where the payload is, as soon as it is there; or those through whom this thread is to send it."""
        while True:
            if remote.lost is not None:
                raise remote.lost
            slot, use = content
            held = self._held.get((remote.host, slot))
            if held is not None and held[0] == use:
                return held[2]
            if (remote.host, content) not in self._under_way and (first := self._idle(remote.host)):
                return self._reserve(content, first)
            left = deadline - time.monotonic()
            if left <= 0 or not self._moved.wait(left):
                raise SyncTimeoutError("the other workers of its host are busy with other payloads")

    def _reserve(self, content: _Content, first: Remote) -> list[Remote]:
        """``first``, and one for each other host that is to have ``content``; they are busy from now on."""
        chosen = [first]
        for host in self._expected.pop(content, []):
            held = self._held.get((host, content[0]))
            if host == first.host or (host, content) in self._under_way or (held and held[0] == content[1]):
                continue
            other = self._idle(host)
            if other is not None:
                chosen.append(other)
        order = {id(remote): place for place, remote in enumerate(self._remotes)}
        chosen.sort(key=lambda one: order[id(one)])  # always the same neighbours
        for one in chosen:
            self._busy.add(id(one))
            self._under_way.add((one.host, content))
            self._held.pop((one.host, content[0]), None)
        return chosen

    def _idle(self, host: str) -> Remote | None:
        able = [one for one in self._remotes if one.host == host and one.lost is None]
        return next((one for one in able if id(one) not in self._busy), None)

    def _patience(self, chosen: list[Remote], timeout: float | None, deadline: float) -> tuple[float, float]:
        """Return how long to wait for one that makes no progress, and for one that was sent all.

        That is all the time that is left if there is nobody else, and otherwise such a share of the timeout
        that enough is left for the others.
        """
        share = max((STALLED if timeout is None else timeout) / _SHARE, _LEAST_SHARE)
        with self._moved:
            alone = sum(one.host == chosen[0].host for one in self._remotes) == 1
        if alone and len(chosen) == 1:
            left = max(deadline - time.monotonic(), share)
            return left, left
        return share, 2 * share

    def _carry(
        self, payload: torch.Tensor, chosen: list[Remote], timeout: float | None, deadline: float
    ) -> None:
        content = _content(payload)
        unknown = dict(enumerate(chosen))

        def settle(place: int, result: bytes | Exception) -> None:
            self._settle(unknown.pop(place), content, result, first=place == 0)

        try:
            patience, limit = self._patience(chosen, timeout, deadline)
            ship([one.carrier for one in chosen], payload, patience, limit, settle)
        finally:
            for place in list(unknown):
                settle(place, NotHeldError("it was not sent"))

    def _settle(self, one: Remote, content: _Content, result: bytes | Exception, *, first: bool) -> None:
        """Note what became of a payload on one host, whose workers do not wait for the other hosts."""
        if isinstance(result, NotHeldError) and first:  # nobody stood between us
            one.lose(LinkClosedError(str(result)))
        elif isinstance(result, Exception) and not isinstance(result, NotHeldError):
            one.lose(result)
        with self._moved:
            self._busy.discard(id(one))
            self._under_way.discard((one.host, content))
            if isinstance(result, bytes) and one in self._remotes:
                self._held[one.host, content[0]] = (content[1], one, result)
            self._moved.notify_all()


_routes: weakref.WeakKeyDictionary[Store, Route] = weakref.WeakKeyDictionary()
_making = threading.Lock()


def _content(payload: torch.Tensor) -> _Content:
    slot = slot_of(payload)
    return slot.key, slot.use
