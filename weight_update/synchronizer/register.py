"""The clients of a synchronizer by session, and the leases of those that must be heard of."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field

from weight_update.synchronizer.state import Explorer, Trainer

__all__ = ["Client", "Closed", "Refused", "Register"]

_log = logging.getLogger(__name__)


class Refused(Exception):
    """A call makes no sense; ``"unknown"`` tells the client to say hello (again)."""


class Closed(Refused):
    """The synchronizer was closed."""


@dataclass
class Client:
    """One that said hello.

    Attributes:
        party: it, in the machine.
        leased: whether it counts as gone when it is not heard of.
        linked: key of the outlet that it is connected to.
        seen: when it was last heard of, on the monotonic clock.
    """

    party: Trainer | Explorer
    leased: bool = False
    linked: str | None = None
    seen: float = field(default_factory=time.monotonic)


class Register:
    """Its methods are called with the lock held.

    Args:
        moved: the lock; notified when somebody came or left.
        lease: seconds after which a leased client that is not heard of is missed; None: never.
        missed: called for such a client with its session and the reason.
    """

    def __init__(
        self, moved: threading.Condition, lease: float | None, missed: Callable[[str, str], None]
    ) -> None:
        self.lease, self.closed = lease, False
        self._moved, self._missed = moved, missed
        self._clients: dict[str, Client] = {}
        self._replaced: set[str] = set()
        self._watching = False

    def __contains__(self, session: str) -> bool:
        return session in self._clients

    def add(self, session: str, party: Trainer | Explorer, leased: bool) -> None:
        """A client has come."""
        self._clients[session] = Client(party, leased=leased and self.lease is not None)
        if self._leased() and not self._watching and self.lease is not None:
            self._watching = True
            args = (self.lease,)
            threading.Thread(target=self._watch, args=args, name="weight_update-lease", daemon=True).start()
        self._moved.notify_all()

    def of(self, session: str) -> Client:
        """The client of that session, which is heard of by this.

        Raises:
            Refused: nobody has said hello under this name, or another has taken its place.
        """
        self.require_not_replaced(session)
        if session not in self._clients:
            raise Refused("unknown")
        client = self._clients[session]
        client.seen = time.monotonic()
        return client

    def require_not_replaced(self, session: str) -> None:
        """Raise Refused if another has taken this client's place, and Closed after the synchronizer's end."""
        if self.closed:
            raise Closed("the synchronizer was closed")
        if session in self._replaced:
            raise Refused(
                "another client has taken this one's place: of several trainers, or explorers of one id, "
                "the newest counts"
            )

    def remove(self, session: str) -> Client | None:
        """A client has left; None if it was not here."""
        self._moved.notify_all()
        return self._clients.pop(session, None)

    def replace(self, party: Trainer | Explorer | None) -> None:
        """Somebody comes who says that he is ``party``: that one is not heard any more."""
        for session, client in list(self._clients.items()):
            if client.party is party:
                del self._clients[session]
                self._replaced.add(session)
                _log.warning("a client was replaced by another that says it is the same")

    def linked(self, key: str) -> list[Explorer]:
        """Explorers that are connected to an outlet."""
        parties = [client.party for client in self._clients.values() if client.linked == key]
        return [party for party in parties if isinstance(party, Explorer)]

    def sessions(self) -> list[str]:
        """Of all who are here."""
        return list(self._clients)

    def _leased(self) -> dict[str, Client]:
        return {session: client for session, client in self._clients.items() if client.leased}

    def _watch(self, lease: float) -> None:
        """Thread, while somebody is leased: sleep until the first lease would end."""
        with self._moved:
            while not self.closed and (clients := self._leased()):
                now = time.monotonic()
                for session, client in clients.items():
                    if now - client.seen >= lease:
                        _log.warning("a client was not heard of for %g s", lease)
                        self._missed(session, f"it was not heard of for {lease:g} s")
                first = min(client.seen for client in clients.values())
                pause = max(first + lease - now, 0.01)
                self._moved.wait(pause)
                if time.monotonic() > now + pause + lease / 2:  # stopped, this process could hear nobody
                    for client in self._leased().values():
                        client.seen = time.monotonic()
            self._watching = False
