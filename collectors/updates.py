"""The schemes of a collector, its observers, and its end."""

from __future__ import annotations

import logging
import threading
import weakref
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from typing import Any

from collectors.requests import group_once, own, real, require_unused
from collectors.versions import versions_of
from weight_update import LifecycleError, Observer, Observers, PolicyLag, SyncReport, WeightSyncScheme

ENDED = "this collector was shut down; make a new collector"
"""Message of the error of a call after the shutdown."""

_log = logging.getLogger(__name__)


class Updates:
    """The schemes and the observers of a collector, until its shutdown.

    TorchRL's code may drop what is in ``_weight_sync_schemes``. The schemes here stay.

    Attributes:
        schemes: schemes that send, by model id.
        receivers: schemes that receive, by model id.
        ended_because: error that ended an iteration, perhaps in the thread of ``start()``.
    """

    def __init__(self) -> None:
        self.schemes: dict[str, WeightSyncScheme] = {}
        self.receivers: dict[str, WeightSyncScheme] = {}
        self.ended_because: Exception | None = None
        self._ended_by: int | None = None  # the thread that began the shutdown
        self._observers: Observers | None = None  # until one is added

    def adopt(self, schemes: Mapping[str, WeightSyncScheme]) -> None:
        """Check and group the schemes that send to the workers."""
        require_unused(schemes)
        own(schemes.values())
        group_once(schemes.values())
        self.schemes = dict(schemes)

    def connect(self) -> None:
        """Connect the schemes that send, unless they are connected."""
        for scheme in self.schemes.values():
            if not scheme.synchronized_on_sender:
                scheme.connect()

    def continue_from(self, version: int) -> None:
        """Have the next update get a number above ``version``."""
        for scheme in real(self.schemes).values():
            if scheme.initialized_on_sender:  # otherwise a learner sends
                scheme.continue_from(version)

    # -- end ---------------------------------------------------------------------------------------

    @property
    def ended(self) -> bool:
        """Whether the shutdown has begun."""
        return self._ended_by is not None

    @property
    def ended_elsewhere(self) -> bool:
        """Whether another thread has begun the shutdown."""
        return self._ended_by not in (None, threading.get_ident())

    def begin_end(self) -> None:
        """Note that this thread begins the shutdown, unless it has begun."""
        if self._ended_by is None:
            self._ended_by = threading.get_ident()

    def require_open(self) -> None:
        """Raise LifecycleError if the shutdown has begun."""
        if self.ended:
            raise LifecycleError(ENDED) from self.ended_because

    def close(self) -> None:
        """Shut down all schemes, then tell observers what is left to tell."""
        self.begin_end()
        schemes = (*self.receivers.values(), *self.schemes.values())
        self._observers = self._observers or Observers()
        close_all(*(scheme.shutdown for scheme in schemes), self._observers.close)

    # -- observers ---------------------------------------------------------------------------------

    def add_observer(self, observer: Observer) -> Callable[[], None]:
        """Add an observer of all schemes that send; return a function that removes it."""
        self.require_open()
        if self._observers is None:
            self._observers = Observers(*(one.add_observer for one in real(self.schemes).values()))
            weakref.finalize(self, self._observers.close)
        return self._observers.add(observer)

    def tell(self, report: SyncReport) -> None:
        """Tell observers of an update without a scheme."""
        if self._observers is not None:
            self._observers.tell(report)

    def tell_lag(self, batch: Any, find_newest: Callable[[], int | None]) -> None:
        """Tell observers of the policy lag of a batch, unless its frames have no versions.

        ``find_newest`` returns the newest version that was sent, or None if that is unknown.
        """
        if self._observers is None or not self._observers.functions:
            return
        try:
            versions = versions_of(batch)
            newest = None if versions is None else find_newest()
            if versions is not None and newest is not None:
                lags = newest - versions
                lag = PolicyLag(newest, lags.numel(), float(lags.double().mean()), int(lags.max()))
                self._observers.tell(lag)
        except Exception:  # noqa: BLE001 - observers never end collection
            _log.warning("the policy lag of a batch is unknown", exc_info=True)


def close_all(*closes: Callable[[], object]) -> None:
    """Call all functions in order, also after one has raised; then raise the last error."""
    with ExitStack() as stack:
        for close in reversed(closes):
            stack.callback(close)
