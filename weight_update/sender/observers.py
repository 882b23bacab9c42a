"""The functions that are told of updates and of changes of workers, and the thread that tells them."""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import replace
from typing import NamedTuple

from weight_update.errors import LifecycleError, SyncTimeoutError
from weight_update.report import Event, Observer, SyncReport, WorkerEvent
from weight_update.transports.rate_limit import RateLimitedLog

_log = RateLimitedLog(logging.getLogger(__name__))
_END_SECONDS = 5.0

Wait = Callable[[SyncReport, Sequence[int], float | None], dict[int, Exception]]
"""``Outcomes.wait_for_observers``: waits for an update, enters times of workers and returns their errors."""


class _Update(NamedTuple):
    """An update that is on its way."""

    wait: Wait
    report: SyncReport
    workers: Sequence[int]
    sent: float  # time, by time.perf_counter


class Observers:
    """Functions that are told of each update and event, in order, in a thread of their own.

    The thread starts with the first function. As long as there is none, nothing is kept or computed.

    Args:
        sources: ``add_observer`` of each scheme whose updates and events the functions are told of, too.

    Attributes:
        functions: the functions.
    """

    def __init__(self, *sources: Callable[[Observer], Callable[[], None]]) -> None:
        self.functions: tuple[Observer, ...] = ()
        self._sources, self._removes = sources, ExitStack()
        self._items: queue.SimpleQueue[_Update | Event | None] = queue.SimpleQueue()
        self._starting = threading.Lock()
        self._thread: threading.Thread | None = None
        self._closed = False

    def add(self, function: Observer) -> Callable[[], None]:
        """Tell ``function`` of all later updates and events; return a function that ends this.

        Raises:
            LifecycleError: this object, or a source, is closed.
            TypeError: ``function`` cannot be called.
        """
        if not callable(function):
            raise TypeError(f"an observer is a function of an event, not {type(function).__name__}")
        with self._starting:
            if self._closed:
                raise LifecycleError("it was shut down, so no observer can be added")
            if not self.functions:
                self._observe_sources()
            self.functions = (*self.functions, function)
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name="weight_update-observers", daemon=True)
                self._thread.start()

        def remove() -> None:
            with self._starting:
                self.functions = tuple(one for one in self.functions if one is not function)
                if not self.functions:
                    self._removes.close()

        return remove

    def _observe_sources(self) -> None:
        with ExitStack() as stack:  # if one of them raises, none is observed
            for source in self._sources:
                stack.callback(source(self.tell))
            self._removes = stack.pop_all()

    def tell(self, event: Event) -> None:
        """Tell all functions of an event, or of an update whose report is complete."""
        if self.functions:
            self._items.put(event)

    def follow(self, wait: Wait, report: SyncReport, workers: Sequence[int]) -> None:
        """Tell all functions of an update as soon as all workers have applied it, failed or left.

        Args:
            wait: waits for the update, as ``Outcomes.wait_for_observers``.
            report: the report as far as it is known; it is not changed.
            workers: indices of the workers that are sent the update.
        """
        if self.functions:
            self._items.put(_Update(wait, report, workers, time.perf_counter()))

    def close(self) -> None:
        """Tell the functions what is left to tell, and end the thread."""
        with self._starting:
            self._closed = True
            self._removes.close()
        self._items.put(None)
        if self._thread is not None and self._thread is not threading.current_thread():
            self._thread.join(_END_SECONDS)
            self.functions = ()

    def _run(self) -> None:
        while (item := self._items.get()) is not None:
            if isinstance(item, _Update):
                self._settle(item)
            else:
                self._call(item)
            del item  # it keeps the sender alive
        self.functions = ()

    def _settle(self, update: _Update) -> None:
        report = replace(
            update.report, seconds=dict(update.report.seconds), apply_seconds={}, stall_seconds={}
        )
        failures = update.wait(report, update.workers, None)
        report.seconds["ack"] = time.perf_counter() - update.sent
        report.failures = {idx: str(error) for idx, error in failures.items()}
        self._call(report)
        for idx, error in failures.items():
            if isinstance(error, SyncTimeoutError):
                self._call(WorkerEvent("late", idx, report.version, str(error)))

    def _call(self, event: Event) -> None:
        for function in self.functions:
            try:
                function(event)
            except Exception:  # noqa: BLE001 - observers never break updates
                _log.warning("an observer raised an error", exc_info=True)
