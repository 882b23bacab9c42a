"""MEMORY: the synchronizer's copy of the newest weights."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

from weight_update.errors import LifecycleError, LinkClosedError
from weight_update.strategy.strategy import WeightStrategy
from weight_update.synchronizer.transfer import Endpoint, Publisher, Subscriber, Transfer

__all__ = ["CachedVersion", "WeightCache"]

_HOLDER = 0


@dataclass(frozen=True)
class CachedVersion:
    """Weights of one version."""

    version: int
    step: int
    weights: Any


class WeightCache:
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
        self.kept: CachedVersion | None = None
        self._subscriber: Subscriber | None = None
        self._publisher: Publisher | None = None
        self._taking = threading.Lock()

    def listen_on(self, address: str) -> None:
        """Before the first weights: explorers come from other machines, too.

        Raises:
            LifecycleError: explorers of this machine were let in already.
        """
        if self._publisher is not None and self._address != address:
            raise LifecycleError("weights are handed out on another interface already; call serve() first")
        self._address = address

    @property
    def endpoint(self) -> Endpoint | None:
        """Where explorers join; None before the first weights."""
        return None if self._publisher is None else self._publisher.endpoint

    def take_from(self, endpoint: Endpoint) -> None:
        """Join the trainer's publisher.

        Raises:
            LinkClosedError: it cannot be reached.
        """
        with self._taking:
            if self._subscriber is not None:
                self._subscriber.close()
            self._subscriber = Subscriber(endpoint, _HOLDER, None, self._strategy, self._timeout)
            if (reason := self._subscriber.join(self._timeout)) is not None:
                raise LinkClosedError(f"the synchronizer does not reach the trainer: {reason}")

    def keep(self, version: int, step: int) -> None:
        """Copy what the trainer has just sent. With the first weights explorers may join.

        Raises:
            LinkClosedError: there is no link to the trainer.
        """
        with self._taking:
            if self._subscriber is None:
                raise LinkClosedError("the synchronizer has no link to the trainer")
            self.kept = CachedVersion(version, step, self._subscriber.scheme.weights)
            if self._publisher is None:
                self._publisher = Publisher(self._newest, self._address, self._strategy, self._timeout)

    def send(self, ids: Iterable[int]) -> tuple[CachedVersion, Transfer]:
        """Send what is kept to explorers; does not wait for them."""
        return self._hand_out(lambda publisher, weights: publisher.send(ids, weights))

    def spread(self) -> tuple[CachedVersion, Transfer]:
        """Send what is kept to all explorers that joined."""
        return self._hand_out(Publisher.spread)

    def close(self) -> None:
        """End all links and let go of the weights."""
        with contextlib.ExitStack() as stack:  # both, also where one raises
            for end in (self._subscriber, self._publisher):
                if end is not None:
                    stack.callback(end.close)
            self.kept = None

    def _hand_out(self, send: Callable[[Publisher, Any], Transfer]) -> tuple[CachedVersion, Transfer]:
        kept, publisher = self.kept, self._publisher
        if kept is None or publisher is None:
            raise LinkClosedError("the synchronizer holds no weights")
        return kept, send(publisher, kept.weights)

    def _newest(self) -> Any:
        assert self.kept is not None
        return self.kept.weights
