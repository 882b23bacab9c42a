"""Observers of all collectors: they are told of updates, of workers, and of the policy lag of batches."""

from __future__ import annotations

import logging
import threading
import weakref
from collections.abc import Callable, Iterator
from contextlib import closing
from typing import Any

from tensordict import TensorDictBase

from collectors.closing import ENDED
from collectors.requests import real
from collectors.versions import policy_scheme, versions_of
from weight_update import LifecycleError, Observer, Observers, PolicyLag, SyncReport, WeightSyncScheme

_log = logging.getLogger(__name__)


class Observed:
    """A mixin for TorchRL's collectors, placed before them."""

    _weight_sync_schemes: dict[str, WeightSyncScheme] | None
    policy_version: Any
    _observers: Observers | None = None  # until one is added
    _ended_by: int | None = None
    """The thread that began the shutdown, if any did."""
    _ended_because: Exception | None = None
    """The error that ended an iteration, perhaps in the thread of ``start()``."""

    def __bool__(self) -> bool:
        """Return True.

        Ray calls ``bool()`` after an error in an actor. Without this method, that would call ``len()``, which
        raises for an endless collector.
        """
        return True

    @property
    def _has_ended(self) -> bool:
        """Whether the shutdown has begun."""
        return self._ended_by is not None

    def _mark_ended(self) -> None:
        """Note that this thread begins the shutdown, unless it has begun."""
        if self._ended_by is None:
            self._ended_by = threading.get_ident()

    def add_observer(self, observer: Observer) -> Callable[[], None]:
        """Have a function called for every update, every change of a worker and every batch, from now on.

        A separate thread calls the function. It gets the reports and events of each scheme of this collector
        (see :meth:`~weight_update.WeightSyncScheme.add_observer`), and a :class:`~weight_update.PolicyLag`
        for each batch that iterating over this collector yields. An error that the function raises is logged.

        Returns:
            a function that removes the observer.

        Raises:
            LifecycleError: this collector was shut down.
        """
        self._require_open()
        if self._observers is None:
            schemes = real(self._weight_sync_schemes or {})
            self._observers = Observers(*(scheme.add_observer for scheme in schemes.values()))
            weakref.finalize(self, self._observers.close)
        return self._observers.add(observer)

    def _require_open(self) -> None:
        """Raise LifecycleError if this collector was shut down."""
        if self._has_ended:
            raise LifecycleError(ENDED) from self._ended_because

    def _end_observers(self) -> None:
        """Tell observers what is left to tell; to be called after the schemes were shut down."""
        self._observers = self._observers or Observers()
        self._observers.close()

    def _tell_observers(self, report: SyncReport) -> None:
        """Tell observers of an update without a scheme."""
        if self._observers is not None:
            self._observers.tell(report)

    def __iter__(self) -> Iterator[TensorDictBase]:
        """Yield batches; an error ends the collector, as in TorchRL.

        Raises:
            LifecycleError: this collector was shut down, perhaps by another thread meanwhile.
        """
        collector: Any = self
        self._iteration_started = True
        whole = collector.trajs_per_batch is not None or _writes_trajectories(collector)
        ended = self._has_ended
        try:
            with closing(collector._iter_by_trajectories() if whole else collector.iterator()) as batches:
                for batch in batches:
                    self._tell_lag(batch)
                    yield batch
                    ended = self._has_ended
        except Exception as error:
            if ended or self._ended_by not in (None, threading.get_ident()):  # TorchRL's code may end it, too
                raise LifecycleError(ENDED) from error
            self._ended_because = error
            if not self._has_ended:
                collector.shutdown()
            raise

    def _tell_lag(self, batch: Any) -> None:
        """Tell observers of the policy lag of a batch, unless its frames have no versions."""
        if self._observers is None or not self._observers.functions:
            return
        try:
            versions = versions_of(batch)
            newest = None if versions is None else self._newest_version()
            if versions is not None and newest is not None:
                lags = newest - versions
                lag = PolicyLag(newest, lags.numel(), float(lags.double().mean()), int(lags.max()))
                self._observers.tell(lag)
        except Exception:  # noqa: BLE001 - observers never end collection
            _log.warning("the policy lag of a batch is unknown", exc_info=True)

    def _newest_version(self) -> int | None:
        """Return the newest version of the policy that was sent; None if the collector does not know it."""
        scheme = policy_scheme(self._weight_sync_schemes or {})
        if scheme is None:
            return None
        sent = 0 if scheme.last_report is None else scheme.last_report.version
        return max(sent, self.policy_version or 0)


def _writes_trajectories(collector: Any) -> bool:
    """Return whether this process writes whole trajectories: ``replay_write_mode`` of TorchRL after 0.14."""
    mode = getattr(collector, "replay_write_mode", None)
    return mode == "trajectory" and not getattr(collector, "_trajectory_writes_in_workers", False)
