"""Listeners that take join requests from a queue and give each worker's connection to its link."""

from __future__ import annotations

import logging
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from typing import Any, Generic, TypeVar

from weight_update.errors import FormatError, JoinRefusedError, TransportError
from weight_update.transports.base import TransportBackend
from weight_update.transports.rate_limit import RateLimitedLog, Refusals
from weight_update.wire.frames import Kind, WeightChunk

__all__ = ["BACK_OFF_SECONDS", "JoinListener", "refusal_of"]

BACK_OFF_SECONDS = 1.0
"""Pause after an unexpected error, which may repeat at once."""

_L = TypeVar("_L", bound=TransportBackend)


class JoinListener(ABC, Generic[_L]):
    """A thread that admits workers until it is closed. No error stops it; errors are noted as refusals.

    Args:
        links: the sender's end for each worker index.
        late_joiners: returns the link for a worker index without one, or raises
            :class:`~weight_update.JoinRefusedError`.
        log: logger of refused join requests.

    Attributes:
        refusals: reasons of the last refused join requests.
    """

    def __init__(
        self, links: Mapping[int, _L], late_joiners: Callable[[int], _L], log: logging.Logger
    ) -> None:
        self._links, self._late_joiners = links, late_joiners
        self._closed = threading.Event()
        self._log, self.refusals = RateLimitedLog(log), Refusals(log)
        self._thread = threading.Thread(target=self._run, name="weight_update-listener", daemon=True)

    @abstractmethod
    def _next(self) -> Any | None:
        """Wait for the next join request and return it; None if the caller should try again."""

    @abstractmethod
    def _admit(self, request: Any) -> None:
        """Give the connection of an admitted worker to its link, or answer why it is refused, and raise."""

    @abstractmethod
    def _wake(self) -> None:
        """Make :meth:`_next` return, because this listener was closed."""

    def start(self) -> None:
        """Start to admit workers; calling it twice is fine."""
        if not self._thread.is_alive():
            self._thread.start()

    def close(self) -> None:
        """Admit no more workers."""
        self._closed.set()
        self._wake()
        if self._thread.is_alive() and self._thread is not threading.current_thread():
            self._thread.join(5.0)

    def _run(self) -> None:
        while not self._closed.is_set():
            try:
                request = self._next()
                if request is not None and not self._closed.is_set():
                    self._admit(request)
            except Exception as error:  # noqa: BLE001 - without this thread no worker could join
                self.refusals.note(error)
                if not isinstance(error, TransportError | FormatError | TimeoutError):
                    self._closed.wait(BACK_OFF_SECONDS)

    def _link_for(self, worker: int) -> _L:
        return self._links.get(worker) or self._late_joiners(worker)


def refusal_of(error: JoinRefusedError) -> WeightChunk:
    """Return the chunk that tells a worker why it is refused."""
    return WeightChunk(Kind.REFUSED, {"reason": str(error), "problems": list(error.problems)})
