"""The state of a scheme in one process: which end it is, how far it got, and what ends it."""

from __future__ import annotations

import os
import pickle
import weakref
from abc import ABC
from collections.abc import Callable
from contextlib import ExitStack
from multiprocessing.context import get_spawning_popen
from multiprocessing.reduction import ForkingPickler
from multiprocessing.util import Finalize
from typing import Any, Literal, TypeVar

from weight_update.errors import LifecycleError
from weight_update.receiver.receiver import Receiver
from weight_update.receiver.staging import ReceiverOptions
from weight_update.report import Observer, SyncReport
from weight_update.schemes.sender_side import SHUT_DOWN, SenderListener, SenderSide
from weight_update.sender.joining import WorkerAlive, require_workers
from weight_update.sender.observers import Observers
from weight_update.sender.sender import Sender
from weight_update.sharded.follower import Follower
from weight_update.strategy.conversion import Convert
from weight_update.strategy.strategy import WeightStrategy
from weight_update.transports.base import TransportBackend

_S = TypeVar("_S", bound="SchemeLifecycle")


class SchemeLifecycle(ABC):
    """The part of a scheme that belongs to one process, and that no other process inherits.

    A scheme is options, which travel when it is pickled, and this state, which does not: the copy in another
    process is not initialized. A forked child drops the state of its parent when it initializes its own.

    Attributes:
        worker_idx: index of this receiver; None on a sender, and until ``connect()`` is given it.
    """

    strategy: WeightStrategy
    token: str
    _owner: int = 0  # the process; 0 until __init__ has run
    _end: Literal["sender", "receiver"] | None = None  # until it is initialized

    def _reset(self) -> None:
        """Set every attribute that one process knows and another must not inherit."""
        self.last_report: SyncReport | None = None
        self._worker_alive: WorkerAlive | None = None
        self.listener: SenderListener | None = None
        self.worker_idx: int | None = None
        self._end = None
        self._sender_side: SenderSide | None = None
        self._undo = ExitStack()  # of what open_sender() made besides links and listener
        self._receiver: Receiver | None = None  # until it is connected
        self._receiver_options: ReceiverOptions | None = None  # of a receiver that connects or is connected
        self._link: TransportBackend | None = None  # of a receiver that could not connect, for the next call
        self._instance = ""  # name that tells a receiver from others with its index
        self._model: Any = None
        self._context: weakref.ref[Any] | None = None
        self._connected = False
        self._observers = Observers()
        self._owner = os.getpid()
        self._finalizer: weakref.finalize[Any, Any] | None = None
        self._unfinished: weakref.finalize[Any, Any] | None = None  # after Ctrl-C in shutdown()
        self.__dict__.update(self.process_state())

    def process_state(self) -> dict[str, Any]:
        """Return the attributes of a subclass that no other process inherits, with their first values.

        Override it for sockets, handles, caches and the like. They are set to these values when a scheme is
        created, when it arrives in a worker, and when a forked child initializes it; all other attributes are
        options, which are pickled. Other attributes may not be set yet when this is called::

            class MyScheme(WeightSyncScheme):
                def process_state(self):
                    return {**super().process_state(), "socket": None}
        """
        return {}

    def _begin(self, cure: str) -> None:
        """Get ready for initialization; in a forked child, drop the state of the parent first.

        Raise LifecycleError, with ``cure``, if this object is initialized already.
        """
        self._drop_parent()
        self._require_open()
        if self.initialized_on_sender or self.initialized_on_receiver:
            raise LifecycleError(f"this scheme is initialized already; {cure}")

    def _drop_parent(self) -> None:
        """In a forked child, drop the state of the parent.

        Raise LifecycleError if the ``__init__`` of a subclass did not call the one of its base.
        """
        if not self._owner:
            raise LifecycleError(f"{type(self).__name__}.__init__() has to call super().__init__()")
        if self._owner != os.getpid():
            if self._finalizer is not None:
                self._finalizer.detach()
            self._reset()

    def _close_at_end(self, owner: Any, close: Callable[..., None], *parts: Any) -> None:
        """Have :meth:`shutdown` call ``close(*parts)``, or the end of ``owner`` or of the process.

        Processes that multiprocessing started run its own exit functions only. Without them, a worker that
        ends right after an update would never tell the sender that it applied it.

        This takes the place of an earlier call. If :meth:`shutdown` was called since, call ``close(*parts)``
        and raise LifecycleError.
        """
        before, self._finalizer = self._finalizer, _finalizer_of(owner, close, *parts)
        if before is not None and before.detach() is None:
            self._finalizer()
        self._require_open()

    def _require_open(self) -> None:
        """Raise LifecycleError if this scheme was shut down."""
        if self._finalizer is not None and not self._finalizer.alive:
            raise LifecycleError(SHUT_DOWN)

    def __repr__(self) -> str:
        name = type(self).__name__
        if "_finalizer" not in vars(self):  # __init__ or __setstate__ has not run to its end
            return f"<{name}: not initialized>"
        here = self.initialized_on_sender or self.initialized_on_receiver
        role = str(self._end) if here else "new"
        role += "" if self.worker_idx is None else f" {self.worker_idx}"
        model_id = getattr(self, "model_id", None)
        of = "" if model_id is None else f" of {model_id!r}"
        version = "" if self.version is None else f", version {self.version}"
        ended = "" if self._finalizer is None or self._finalizer.alive else ", shut down"
        return f"<{name}: {role}{of}{version}{ended}>"

    @property
    def worker_alive(self) -> WorkerAlive | None:
        """Processes of the workers, as a list in the order of their indices or as a dict by index.

        It may also be a function that takes a worker's index and returns whether its process is alive. If it
        is set on the sender before ``connect()``, that does not wait for a worker that died, and errors of
        ``send()`` tell a worker whose process has ended from a slow one.

        Raises:
            TypeError: it is set to something else.
        """
        return self._worker_alive

    @worker_alive.setter
    def worker_alive(self, workers: WorkerAlive | None) -> None:
        self._worker_alive = require_workers(workers)

    # -- the end that this process is --------------------------------------------------------------

    @property
    def _sender(self) -> Sender | Follower | None:
        return None if self._sender_side is None else self._sender_side.sender

    @property
    def initialized_on_sender(self) -> bool:
        """Whether this object was initialized as a sender, in this process."""
        return self._end == "sender" and self._owner == os.getpid()

    @property
    def initialized_on_receiver(self) -> bool:
        """Whether this object was initialized as a receiver, in this process."""
        return self._end == "receiver" and self._owner == os.getpid()

    @property
    def synchronized_on_sender(self) -> bool:
        """Whether ``connect()`` succeeded on the sender."""
        return self.initialized_on_sender and self._connected

    @property
    def synchronized_on_receiver(self) -> bool:
        """Whether ``connect()`` succeeded on the receiver."""
        return self.initialized_on_receiver and self._connected

    # -- what is known -----------------------------------------------------------------------------

    @property
    def version(self) -> int | None:
        """Version of the weights; None before the first.

        On a sender, the newest version that a worker has applied. On a receiver, the version in force.
        """
        side = self._sender or self._receiver
        return None if side is None else side.version

    @property
    def worker_versions(self) -> dict[int, int | None]:
        """On a sender, the version that each worker has applied, by index.

        A worker that is not connected has None.

        On ranks of a sharded trainer that do not lead: as of the end of the last call that all ranks made.
        """
        return {} if self._sender is None else dict(self._sender.worker_versions)

    @property
    def strategy_str(self) -> str:
        """Format of the strategy: ``"tensordict"`` or ``"state_dict"``."""
        return self.strategy.extract_as

    def add_observer(self, observer: Observer) -> Callable[[], None]:
        """Call a function for every later update and every later change of a worker.

        A separate thread calls it. It gets a :class:`SyncReport` for each update once all workers have
        applied it, failed or left, and a :class:`WorkerEvent` for each worker that joins, leaves, is lost, is
        late, or gets all weights instead of changes. An error that it raises is logged.
        :mod:`weight_update.observers` has observers that write logs, tables and traces.

        On a sharded trainer, add observers on the leader.

        Returns:
            a function that removes the observer.

        Raises:
            LifecycleError: this is a receiver, or it was shut down.
        """
        self._require_open()
        if self.initialized_on_receiver:
            raise LifecycleError("add_observer() is for senders")
        return self._observers.add(observer)

    # -- the end -----------------------------------------------------------------------------------

    def shutdown(self) -> None:
        """End all threads and free all memory. Models keep their weights.

        Calling it twice is fine. If KeyboardInterrupt ended the first call, the second one does the rest. A
        scheme is shut down automatically at the end of its ``with`` block, when it is garbage-collected, and
        when the process exits. The model of a connected receiver, unless it is a plain dict, is updated until
        it is garbage-collected as well.
        """
        self._connected = False
        if self._owner == os.getpid():
            while self._finalizer is not None and self._finalizer.alive:
                self._end_by(self._finalizer)  # connect() in another thread may have replaced it
            if self._unfinished is not None:
                self._end_by(self._unfinished)
            if self._finalizer is None:
                self._observers.close()

    def _end_by(self, finalizer: weakref.finalize[Any, Any]) -> None:
        """Call a finalizer; if Ctrl-C ends that, note that it is to be called again."""
        call = finalizer.peek()
        try:
            finalizer()
        except (KeyboardInterrupt, SystemExit):  # any other error leaves nothing to do
            if call is not None:
                self._unfinished = _finalizer_of(call[0], call[1], *call[2])
            raise

    def __enter__(self: _S) -> _S:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.shutdown()

    def __getstate__(self) -> dict[str, Any]:
        """Return what a worker needs: options, token and addresses; no models, links or threads.

        Raises:
            LifecycleError: a process is being started, its worker would need the sender's converter, and that
                cannot be pickled.
        """
        fresh = object.__new__(type(self))
        fresh._reset()
        state = {name: value for name, value in self.__dict__.items() if name not in fresh.__dict__}
        if self._end == "sender":  # here, or in the process that this one was forked from
            state["strategy"] = self.strategy.for_receiver()
        elif get_spawning_popen() is not None:
            _require_picklable(self.strategy.convert)
        return state

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._reset()


def _finalizer_of(owner: Any, close: Callable[..., None], *parts: Any) -> weakref.finalize[Any, Any]:
    """Return a finalizer that the end of ``owner`` or of the process calls, unless it was called before."""
    finalizer = weakref.finalize(owner, close, *parts)
    Finalize(owner, finalizer, exitpriority=11)  # queues end at 10
    return finalizer


def _require_picklable(convert: Convert | None) -> None:
    """Raise LifecycleError if a converter cannot be pickled with a scheme that is not initialized yet."""
    try:
        ForkingPickler.dumps(convert)
    except (pickle.PicklingError, AttributeError, TypeError) as error:
        raise LifecycleError(
            f"the converter of this scheme cannot be pickled ({error}): call init_on_sender() before the "
            "workers start, which then get the scheme without it, or give convert= a function of a module"
        ) from error
