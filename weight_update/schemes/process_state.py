"""The state of a scheme in one process: which end it is, how far it got, and what ends it."""

from __future__ import annotations

import os
import pickle
import weakref
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, field
from multiprocessing.reduction import ForkingPickler
from multiprocessing.util import Finalize
from typing import Any, Literal

from weight_update.errors import LifecycleError
from weight_update.schemes.receiver_side import ReceiverSide
from weight_update.schemes.sender_side import SHUT_DOWN, SenderSide
from weight_update.sender.joining import WorkerAlive
from weight_update.sender.observers import Observers
from weight_update.strategy.conversion import Convert


@dataclass(eq=False)
class ProcessState:
    """The part of a scheme that one process knows, and that no other process inherits."""

    owner: int = field(default_factory=os.getpid)  # a forked child has the state of its parent at first
    end: Literal["sender", "receiver"] | None = None  # until it is initialized
    sender: SenderSide | None = None
    receiver: ReceiverSide | None = None
    connected: bool = False
    context: weakref.ref[Any] | None = None
    worker_alive: WorkerAlive | None = None
    observers: Observers = field(default_factory=Observers)
    announced: ExitStack = field(default_factory=ExitStack)  # withdrawn first: workers ask for a new sender
    undo: ExitStack = field(default_factory=ExitStack)  # of what open_sender() made besides links, listener
    finalizer: weakref.finalize[Any, Any] | None = None  # once there is something to end
    _unfinished: weakref.finalize[Any, Any] | None = None  # after Ctrl-C in shut_down()

    @property
    def here(self) -> bool:
        """Whether the calling process is the owner."""
        return self.owner == os.getpid()

    @property
    def ended(self) -> bool:
        """Whether :meth:`shut_down` was called after initialization."""
        return self.finalizer is not None and not self.finalizer.alive

    def require_open(self) -> None:
        """Raise LifecycleError if the scheme was shut down."""
        if self.ended:
            raise LifecycleError(SHUT_DOWN)

    def require_new(self, cure: str) -> None:
        """Raise LifecycleError if the scheme is initialized already, with ``cure``, or was shut down."""
        self.require_open()
        if self.end is not None:
            raise LifecycleError(f"this scheme is initialized already; {cure}")

    def close_at_end(self, owner: Any, close: Callable[..., None], *parts: Any) -> None:
        """Have :meth:`shut_down` call ``close(*parts)``, or the end of ``owner`` or of the process.

        Processes that multiprocessing started run its own exit functions only. Without them, a worker that
        ends right after an update would never tell the sender that it applied it.

        This takes the place of an earlier call. If :meth:`shut_down` was called since, call ``close(*parts)``
        and raise LifecycleError.
        """
        before, self.finalizer = self.finalizer, _finalizer_of(owner, close, *parts)
        if before is not None and before.detach() is None:
            self.finalizer()
        self.require_open()

    def shut_down(self) -> None:
        """End everything; a second call does the rest if Ctrl-C ended the first one."""
        self.connected = False
        if not self.here:
            return
        while self.finalizer is not None and self.finalizer.alive:
            self._end_by(self.finalizer)  # connect() in another thread may have replaced it
        if self._unfinished is not None:
            self._end_by(self._unfinished)
        if self.finalizer is None:
            self.observers.close()

    def _end_by(self, finalizer: weakref.finalize[Any, Any]) -> None:
        """Call a finalizer; if Ctrl-C ends that, note that it is to be called again."""
        call = finalizer.peek()
        try:
            finalizer()
        except (KeyboardInterrupt, SystemExit):  # any other error leaves nothing to do
            if call is not None:
                self._unfinished = _finalizer_of(call[0], call[1], *call[2])
            raise


def _finalizer_of(owner: Any, close: Callable[..., None], *parts: Any) -> weakref.finalize[Any, Any]:
    """Return a finalizer that the end of ``owner`` or of the process calls, unless it was called before."""
    finalizer = weakref.finalize(owner, close, *parts)
    Finalize(owner, finalizer, exitpriority=11)  # queues end at 10
    return finalizer


def require_picklable(convert: Convert | None) -> None:
    """Raise LifecycleError if a converter cannot be pickled with a scheme that is not initialized yet."""
    try:
        ForkingPickler.dumps(convert)
    except (pickle.PicklingError, AttributeError, TypeError) as error:
        raise LifecycleError(
            f"the converter of this scheme cannot be pickled ({error}): call init_on_sender() before the "
            "workers start, which then get the scheme without it, or give convert= a function of a module"
        ) from error
