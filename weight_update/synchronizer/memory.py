"""MEMORY: the synchronizer's copy of the newest weights."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

from weight_update.errors import LifecycleError, LinkClosedError
from weight_update.strategy.strategy import WeightStrategy
from weight_update.synchronizer.transfer import Inlet, Outlet, Shipment, Ticket

__all__ = ["Kept", "Memory"]

_HOLDER = 0


@dataclass(frozen=True)
class Kept:
    """Weights of one version."""

    version: int
    step: int
    weights: Any


class Memory:
    """Takes weights from the trainer once, keeps them, and hands them to explorers.

    The trainer may be gone when an explorer fetches. Only the newest version is kept.

    Args:
        address: of the interface that explorers reach; None for processes of this machine only.
        strategy: see :class:`~weight_update.WeightSyncScheme`.
        timeout: seconds a transfer may take.

    Attributes:
        kept: None before the first weights.
    """

    def __init__(self, address: str | None, strategy: str | WeightStrategy, timeout: float) -> None:
        self._address, self._strategy, self._timeout = address, strategy, timeout
        self.kept: Kept | None = None
        self._inlet: Inlet | None = None
        self._outlet: Outlet | None = None
        self._taking = threading.Lock()

    def listen_on(self, address: str) -> None:
        """Before the first weights: explorers come from other machines, too.

        Raises:
            LifecycleError: explorers of this machine were let in already.
        """
        if self._outlet is not None and self._address != address:
            raise LifecycleError("weights are handed out on another interface already; call serve() first")
        self._address = address

    @property
    def ticket(self) -> Ticket | None:
        """Where explorers join; None before the first weights."""
        return None if self._outlet is None else self._outlet.ticket

    def take_from(self, ticket: Ticket) -> None:
        """Join the trainer's outlet.

        Raises:
            LinkClosedError: it cannot be reached.
        """
        with self._taking:
            if self._inlet is not None:
                self._inlet.close()
            self._inlet = Inlet(ticket, _HOLDER, None, self._strategy, self._timeout)
            if (reason := self._inlet.join(self._timeout)) is not None:
                raise LinkClosedError(f"the synchronizer does not reach the trainer: {reason}")

    def keep(self, version: int, step: int) -> None:
        """Copy what the trainer has just sent. With the first weights explorers may join.

        Raises:
            LinkClosedError: there is no link to the trainer.
        """
        with self._taking:
            if self._inlet is None:
                raise LinkClosedError("the synchronizer has no link to the trainer")
            self.kept = Kept(version, step, self._inlet.scheme.weights)
            if self._outlet is None:
                self._outlet = Outlet(self._newest, self._address, self._strategy, self._timeout)

    def send(self, ids: Iterable[int]) -> tuple[Kept, Shipment]:
        """Send what is kept to explorers; does not wait for them."""
        return self._hand_out(lambda outlet, weights: outlet.send(ids, weights))

    def spread(self) -> tuple[Kept, Shipment]:
        """Send what is kept to all explorers that joined."""
        return self._hand_out(Outlet.spread)

    def close(self) -> None:
        """End all links and let go of the weights."""
        with contextlib.ExitStack() as stack:  # both, also where one raises
            for end in (self._inlet, self._outlet):
                if end is not None:
                    stack.callback(end.close)
            self.kept = None

    def _hand_out(self, send: Callable[[Outlet, Any], Shipment]) -> tuple[Kept, Shipment]:
        kept, outlet = self.kept, self._outlet
        if kept is None or outlet is None:
            raise LinkClosedError("the synchronizer holds no weights")
        return kept, send(outlet, kept.weights)

    def _newest(self) -> Any:
        assert self.kept is not None
        return self.kept.weights
