"""Router of payloads to other hosts: once to each host, along a chain where several hosts need one."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterable
from weakref import WeakKeyDictionary

import torch

from weight_update.errors import LinkClosedError, SyncTimeoutError, kept_error
from weight_update.transports.distributed.connection import FOLLOWS, INLINE_BYTES, Connection
from weight_update.transports.distributed.relay.client import NotDeliveredError, RelayClient, send_along_chain
from weight_update.transports.distributed.relay.payload_stream import PIECE, STALLED
from weight_update.transports.shared_memory.slots import SharedSlot, slot_of
from weight_update.transports.signed_stream import SignedStream
from weight_update.wire.frames import Kind, WeightChunk

DIRECT_BYTES = PIECE
"""Largest payload that follows its frame to a worker that is alone on its host.

The relay of that host would only pass it on, in two more messages. Larger payloads are forwarded from host to
host in pieces, so that all hosts send at the same time.
"""

_LEAST_SHARE = 0.25  # seconds; also the least that a payload waits for the usual chain of hosts
_GOODBYE_SECONDS = 1.0
_SHARE = 4  # a worker that does not answer is given up after this share of the timeout


class _Payload:
    """One use of a slot: the contents from one write to the next."""

    def __init__(self, use: int) -> None:
        self.use = use
        self.expecting: list[str] = []  # hosts that are about to need the payload
        # By host that has it: the worker whose relay keeps it, and where workers find it.
        self.delivered: dict[str, tuple[RemoteConnection, bytes]] = {}


class Router:
    """The connections of one sender to workers on other hosts, and the payloads that each host has.

    A payload is sent to one worker of a host, whose host relay keeps it; the other workers there map that
    copy. The same worker is chosen as long as it is connected and not busy with another payload.
    """

    def __init__(self) -> None:
        self.sent: int = 0  # bytes of payloads that this process sent to other hosts
        self._changed = threading.Condition()
        self._piece_seconds: float = 0.0  # of a piece of the last payload, to the first host of its chain
        self._remotes: list[RemoteConnection] = []
        self._busy: dict[RemoteConnection, _Payload] = {}  # payload on its way
        self._payloads: WeakKeyDictionary[SharedSlot, _Payload] = WeakKeyDictionary()  # the last of each slot

    def add(self, remote: RemoteConnection) -> None:
        """Add a worker that joined."""
        with self._changed:
            self._remotes.append(remote)

    def remove(self, remote: RemoteConnection) -> None:
        """Remove a worker that left, and the payloads that its host relay kept."""
        with self._changed:
            if remote in self._remotes:
                self._remotes.remove(remote)
            for payload in self._payloads.values():
                if remote.host in payload.delivered and payload.delivered[remote.host][0] is remote:
                    del payload.delivered[remote.host]
            self._changed.notify_all()

    def named(self, name: str) -> RemoteConnection | None:
        """Return the connection of that name, if it is there."""
        with self._changed:
            return next((one for one in self._remotes if one.name == name), None)

    def is_alone(self, remote: RemoteConnection) -> bool:
        """Return whether no other worker of its host is connected."""
        with self._changed:
            return [one for one in self._remotes if one.host == remote.host] == [remote]

    def count_sent(self, nbytes: int) -> None:
        """Add bytes of a payload that does not go through a host relay to ``sent``."""
        with self._changed:
            self.sent += nbytes

    def expect(self, payload: torch.Tensor, remotes: Iterable[RemoteConnection]) -> None:
        """Announce that ``payload`` is about to be sent to workers on several hosts."""
        with self._changed:
            self._present(payload).expecting = list(dict.fromkeys(remote.host for remote in remotes))

    def _present(self, payload: torch.Tensor) -> _Payload:
        """Return the present use of the slot of a payload."""
        slot = slot_of(payload)
        found = self._payloads.get(slot)
        if found is None or found.use != slot.use:
            found = self._payloads[slot] = _Payload(slot.use)
        return found

    def deliver(self, payload: torch.Tensor, remote: RemoteConnection, timeout: float | None) -> bytes:
        """Return where ``remote`` finds ``payload`` on its host; send it there if no other thread does.

        Raises:
            LinkClosedError: the worker is gone.
            SyncTimeoutError: it took longer than ``timeout`` seconds, or the worker does not answer.
        """
        deadline = time.monotonic() + (STALLED if timeout is None else timeout)
        while True:
            with self._changed:
                present = self._present(payload)
                remotes = self._await_turn(present, remote, deadline)
                if isinstance(remotes, bytes):
                    return remotes
                self.sent += payload.numel()  # to the first of them, which forwards it
            self._send(payload, present, remotes, timeout, deadline)

    def _await_turn(
        self, payload: _Payload, remote: RemoteConnection, deadline: float
    ) -> bytes | list[RemoteConnection]:
        """Return where the payload is as soon as its host has it, or the connections to send it through."""
        lag = 2 * len(payload.expecting) * self._piece_seconds  # of the last host of a chain, with a margin
        gather_until = min(time.monotonic() + max(lag, _LEAST_SHARE), deadline)
        while True:
            if remote.lost is not None:
                raise kept_error(remote.lost)
            if remote.host in payload.delivered:
                return payload.delivered[remote.host][1]
            now, first = time.monotonic(), self._idle_without(remote.host, payload)
            if first is not None and (now >= gather_until or self._usual_chain_is_idle(payload, remote.host)):
                return self._reserve(payload, first)
            if now >= deadline:
                raise SyncTimeoutError("the other workers of its host are busy with other payloads")
            self._changed.wait((deadline if first is None else gather_until) - now)

    def _usual_chain_is_idle(self, payload: _Payload, host: str) -> bool:
        """Return whether the first worker of each host that needs ``payload`` is idle; they are linked."""
        hosts = {host, *payload.expecting}
        able = [one for one in reversed(self._remotes) if one.lost is None and one.host in hosts]
        usual = {one.host: one for one in able}
        return self._busy.keys().isdisjoint(usual.values())

    def _reserve(self, payload: _Payload, first: RemoteConnection) -> list[RemoteConnection]:
        """Reserve ``first`` and one idle worker of each other host that needs ``payload``."""
        hosts = [host for host in payload.expecting if host != first.host]
        others = [self._idle_without(host, payload) for host in hosts]
        chosen = [first, *(one for one in others if one is not None)]
        chosen.sort(key=self._remotes.index)  # always the same neighbours in the chain
        self._busy |= dict.fromkeys(chosen, payload)
        payload.expecting = []
        return chosen

    def _idle_without(self, host: str, payload: _Payload) -> RemoteConnection | None:
        """Return an idle worker of a host that neither has a payload nor is being sent it, if any."""
        on_its_way = any(one.host == host for one, sent in self._busy.items() if sent is payload)
        if on_its_way or host in payload.delivered:
            return None
        able = (one for one in self._remotes if one.host == host and one.lost is None)
        return next((one for one in able if one not in self._busy), None)

    def _patience(
        self, chosen: list[RemoteConnection], timeout: float | None, deadline: float
    ) -> tuple[float, float]:
        """Return the seconds to wait without progress, and for the answer after the whole payload was sent.

        Both are all the time that is left if no other worker can take over. Otherwise they are a share of
        the timeout, so that enough is left for the other workers.
        """
        share = max((STALLED if timeout is None else timeout) / _SHARE, _LEAST_SHARE)
        if len(chosen) == 1 and self.is_alone(chosen[0]):
            left = max(deadline - time.monotonic(), share)
            return left, left
        return share, 2 * share

    def _send(
        self,
        payload: torch.Tensor,
        present: _Payload,
        chosen: list[RemoteConnection],
        timeout: float | None,
        deadline: float,
    ) -> None:
        pending = dict(enumerate(chosen))
        try:
            patience, limit = self._patience(chosen, timeout, deadline)
            clients = [one.relay_client for one in chosen]
            ended: dict[int, Exception] = {}
            began = time.monotonic()
            for place, result in send_along_chain(clients, payload, patience, limit):
                if isinstance(result, LinkClosedError):
                    ended[place] = result
                else:
                    if place == 0:
                        self._piece_seconds = (time.monotonic() - began) / max(payload.numel() / PIECE, 1)
                    self._note(pending.pop(place), present, result, first=place == 0)
            with self._changed:  # if a worker left, its goodbye is read first, on its other connection
                gone = [pending[place] for place in ended]
                limit = min(patience, _GOODBYE_SECONDS)
                self._changed.wait_for(lambda: all(one.lost is not None for one in gone), limit)
            for place, error in ended.items():
                self._note(pending.pop(place), present, error, first=place == 0)
        finally:
            for place, one in pending.items():  # an unread answer must not be taken for the next one
                self._note(one, present, LinkClosedError("it was not sent"), first=place == 0)

    def _note(
        self, one: RemoteConnection, payload: _Payload, result: bytes | Exception, *, first: bool
    ) -> None:
        """Note the result of a payload for one host, whose workers do not wait for the other hosts."""
        if isinstance(result, NotDeliveredError):
            if first:  # no other host was involved
                one.lose(LinkClosedError(str(result)))
        elif isinstance(result, Exception):
            one.lose(result)
        with self._changed:
            self._busy.pop(one, None)
            if isinstance(result, bytes) and one in self._remotes:
                payload.delivered[one.host] = one, result
            self._changed.notify_all()


class RemoteConnection(Connection):
    """The sender's end to a worker on another host, which maps the replica that one worker there keeps.

    The worker's connection for payloads is found by the random ``name``.
    """

    def __init__(
        self, stream: SignedStream, token: str, *, name: str, host: str, client: RelayClient, router: Router
    ) -> None:
        super().__init__(stream, token)
        self.name, self.host = name, host
        self.relay_client: RelayClient = client
        self.router: Router = router
        self._admitted = False

    def send(self, chunk: WeightChunk, timeout: float | None) -> None:
        if not self._admitted and chunk.kind is Kind.UPDATE:
            # It is for the worker before. Its payload would wait for this one, which needs WELCOME first.
            return
        if not self._admitted and chunk.kind is not Kind.REFUSED:
            self._admitted = True
            self.router.add(self)  # before the worker knows: it then connects for payloads
            if self.lost is not None:  # lose() may have come before
                self.router.remove(self)
        super().send(chunk, timeout)

    def needs_relay(self, nbytes: int) -> bool:
        """Return whether a payload of this size goes to this worker through a host relay."""
        return nbytes > INLINE_BYTES and (nbytes > DIRECT_BYTES or not self.router.is_alone(self))

    def place(self, chunk: WeightChunk, timeout: float | None) -> bytes:
        if chunk.payload is not None and self.needs_relay(chunk.payload_bytes):
            return self.router.deliver(chunk.payload, self, timeout)
        self.router.count_sent(chunk.payload_bytes)
        return b"" if chunk.payload_bytes <= INLINE_BYTES else FOLLOWS

    def lose(self, error: Exception) -> None:
        super().lose(error)
        self.router.remove(self)
        self.relay_client.close()
