"""The functions that are told of updates and of changes of workers, and the thread that tells them."""

from __future__ import annotations

import logging
import queue
import threading
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from functools import partial
from typing import Protocol

from weight_update.arguments import require_instance
from weight_update.errors import LifecycleError
from weight_update.report import Event, Observer, PolicyLag, SyncReport, WorkerEvent
from weight_update.threads import start_thread
from weight_update.transports.rate_limit import RateLimitedLog

_log = RateLimitedLog(logging.getLogger(__name__), burst=1)  # an observer may fail at each event
_END_SECONDS = 5.0
_MOST_WAITING = 10_000  # updates and events, while a function blocks


class PendingUpdate(Protocol):
    """An update on its way, of which there is something to tell later."""

    def settle(self, *, superseded: bool, stop: Callable[[], bool]) -> Sequence[Event] | None:
        """Wait until there is something to tell of the update, and return it; its report ends the calls.

        Args:
            superseded: whether it is not worth to wait long, because newer updates follow, or the end.
            stop: returns whether there is something else to tell; the result is then None.
        """

    def wake(self) -> None:
        """Have :meth:`settle`, if it waits in another thread, call ``stop`` now."""


class Observers:
    """Functions that one thread calls for each update and event.

    Updates come in their order, and events in theirs. An update that waits for workers does not delay events.
    The thread starts with the first function. Without functions, nothing is kept or computed. If a function
    blocks, updates and events are kept up to a limit; further ones are dropped with a warning.

    Args:
        sources: ``add_observer`` of each scheme whose updates and events are passed to the functions, too.

    Attributes:
        functions: a ``partial`` of each function, so that one function can be added twice.
    """

    def __init__(self, *sources: Callable[[Observer], Callable[[], None]]) -> None:
        self.functions: tuple[partial[None], ...] = ()
        self._sources, self._removes = sources, ExitStack()
        self._items: queue.SimpleQueue[Event | PendingUpdate | None] = queue.SimpleQueue()
        self._starting = threading.RLock()  # a signal handler may call close() while it is held
        self._waiting: deque[PendingUpdate] = deque()  # of the thread, in their order
        self._thread: threading.Thread | None = None
        self._closed = False

    def add(self, function: Observer) -> Callable[[], None]:
        """Call ``function`` for all later updates and events; return a function that ends this.

        Raises:
            LifecycleError: this object, or a source, is closed.
            TypeError: ``function`` cannot be called.
        """
        require_instance(function)
        if not callable(function):
            raise TypeError(f"an observer is a function of an event, not {type(function).__name__}")
        with self._starting:
            if self._closed:
                raise LifecycleError("it was shut down, so no observer can be added")
            if not self.functions:
                with ExitStack() as stack:  # if one of them raises, none is observed
                    for source in self._sources:
                        stack.callback(source(self.tell))
                    self._removes = stack.pop_all()
            added = partial(function)
            self.functions = (*self.functions, added)
            if self._thread is None:
                self._thread = start_thread("weight_update-observers", self._run)

        def remove() -> None:
            with self._starting:
                self.functions = tuple(one for one in self.functions if one is not added)
                if not self.functions:
                    self._removes.close()

        return remove

    def tell(self, event: Event | PendingUpdate) -> None:
        """Call all functions for an event, or for an update as soon as it is settled."""
        if not self.functions:
            return
        if self._items.qsize() < _MOST_WAITING:
            self._items.put(event)
        else:
            _log.warning(
                "an observer blocks or is too slow: %d updates and events wait for it, and one is dropped; "
                "remove the observer, or have it return sooner",
                _MOST_WAITING,
            )

    def close(self) -> None:
        """Deliver the remaining updates and events, and end the thread.

        Workers that are busy with an update are waited for no longer than if newer updates followed.
        """
        with self._starting:
            self._closed = True
            self._removes.close()
        self._items.put(None)
        for update in list(self._waiting):
            update.wake()
        if self._thread is not None and self._thread is not threading.current_thread():
            self._thread.join(_END_SECONDS)
            self.functions = ()

    def _run(self) -> None:
        closed = False
        while self._waiting or not closed:
            if self._waiting and self._settle():
                continue
            item = self._items.get()
            if item is None:
                closed = True
            elif isinstance(item, SyncReport | WorkerEvent | PolicyLag):
                self._call(item)
            else:
                self._waiting.append(item)
            del item  # it keeps the sender alive
        self.functions = ()

    def _settle(self) -> bool:
        """Tell the functions of the first update; return False if there is something else to tell."""
        superseded = self._closed or len(self._waiting) > 1
        events = self._waiting[0].settle(superseded=superseded, stop=lambda: not self._items.empty())
        if events is None:
            return False
        if any(isinstance(event, SyncReport) for event in events):
            del self._waiting[0]
        for event in events:
            self._call(event)
        return True

    def _call(self, event: Event) -> None:
        for function in self.functions:
            try:
                function(event)
            except BaseException:  # noqa: BLE001 - observers never break updates; sys.exit() would end the thread
                called = function.func
                name = getattr(called, "__qualname__", type(called).__qualname__)
                _log.warning(f"an observer raised an error: {name}", exc_info=True)
