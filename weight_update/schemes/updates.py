"""A scheme in use: sending updates, receiving them, and what is known of them."""

from __future__ import annotations

import functools
import os
import weakref
from abc import ABC
from collections.abc import Callable
from typing import Any, TypeVar, cast

import torch

from weight_update.arguments import require_seconds, whole_number
from weight_update.errors import LifecycleError
from weight_update.receiver.gate import Hold
from weight_update.receiver.receiver import Receiver
from weight_update.report import Observer, SyncReport
from weight_update.schemes.collector import ContextObserver
from weight_update.schemes.process_state import ProcessState
from weight_update.schemes.sender_side import AnySender, SenderSide
from weight_update.schemes.sources import ModelOf
from weight_update.sender.handle import SendHandle
from weight_update.sender.joining import WorkerAlive, require_workers
from weight_update.strategy.strategy import WeightStrategy

_F = TypeVar("_F", bound=Callable[..., Any])
_S = TypeVar("_S", bound="SchemeUpdates")


def uncompiled(method: _F) -> _F:
    """Return ``method``, changed so that PyTorch does not compile it as a part of a compiled caller."""
    apart = torch.compiler.disable(method)  # type: ignore[no-untyped-call]  # it slows every call

    @functools.wraps(method)
    def call(*args: Any, **options: Any) -> Any:
        return (apart if torch.compiler.is_compiling() else method)(*args, **options)

    return cast(_F, call)


class SchemeUpdates(ABC):
    """The part of a scheme that is used once it is initialized: updates, what is known, and the end."""

    strategy: WeightStrategy
    sync: bool
    timeout: float
    model_id: str | None
    last_report: SyncReport | None
    worker_idx: int | None
    _process: ProcessState = ProcessState(owner=0)  # until __init__ has run: it belongs to no process
    late_updates_wait: bool = True
    """Whether a receiver applies an update at the end of a hold that takes longer than ``timeout``.

    Otherwise, it keeps its version until the next update.
    """

    def _require_sender(self, connected: bool = True) -> SenderSide:
        process, side = self._process, self._process.sender
        if side is None or process.owner != os.getpid():
            if process.end == "receiver":
                raise LifecycleError("this is a receiver; send() and send_async() are for the sender")
            raise LifecycleError("this is not a sender in this process; call init_on_sender() first")
        # connect() may have failed for some workers only
        if process.finalizer is None or not process.finalizer.alive or not side.sender.serving:
            process.require_open()
            if connected:
                raise LifecycleError(f"the sender is not connected{side.failure}; call connect() first")
        return side

    def _require_receiver(self) -> Receiver:
        if (receiver := self._receiver) is None:
            if self.initialized_on_sender:
                raise LifecycleError("this is the sender; receive(), hold() and guarded() are for workers")
            if self._process.here:  # else it is the state of the process that this was forked from
                self._process.require_open()
            raise LifecycleError(
                "this is not a connected receiver; call init_on_receiver() and connect() first"
            )
        return receiver

    @property
    def _sender(self) -> AnySender | None:
        return None if self._process.sender is None else self._process.sender.sender

    @property
    def _receiver(self) -> Receiver | None:
        return None if self._process.receiver is None else self._process.receiver.receiver

    # -- updates, on the sender --------------------------------------------------------------------

    @uncompiled
    def send(self, weights: Any = None, worker_ids: Any = None) -> SyncReport:
        """Send weights to workers and, if ``sync``, wait until they have applied them.

        ::

            scheme.send()                          # the model given to init_on_sender, to all workers
            scheme.send(weights)                   # other weights
            scheme.send(worker_ids=[0, 2])         # to some workers
            scheme.send({0: weights, 1: others})   # weights of its own for each worker

        Args:
            weights: module, TensorDict, dict, callable or name of a model in the context; or a dict from
                worker indices to the weights of each worker. None reads the source given to
                ``init_on_sender``.
            worker_ids: index, device, or a list of them; None sends to all workers.

        Returns:
            the report of this update. With ``sync=False``, its figures for workers are still empty.

        Raises:
            LifecycleError: this is not a connected sender, or this thread is inside :meth:`send` already.
            NothingToSendError: no weights were given and the sender has no source.
            UnknownWorkerError: ``worker_ids`` names a worker that does not exist.
            SchemaMismatchError: the weights are not those of ``init_on_sender()``; nothing was sent.
            SyncFailedError: workers failed, died or were late. The error names them; all other workers have
                the update.
        """
        if self.sync:
            sender = self._require_sender().sender
            return sender.attend(lambda: self.send_async(weights, worker_ids).wait())
        handle = self.send_async(weights, worker_ids)
        self._require_sender().raise_earlier_error(handle)
        return handle.report

    @uncompiled
    def send_async(self, weights: Any = None, worker_ids: Any = None) -> SendHandle:
        """Send weights as :meth:`send` does, without waiting for workers.

        The caller may change the weights as soon as this returns. A worker that is still busy with an earlier
        version gets the newest one when it is done; versions in between are dropped.

        ::

            handle = scheme.send_async()
            train(policy)
            report = handle.wait(timeout=10.0)

        Returns:
            a handle with ``version``, ``done()`` and ``wait(timeout) -> SyncReport``.
        """
        handle = self._publish(weights, worker_ids)
        self.tell_observers(handle)
        return handle

    def stage(self, weights: Any, worker_ids: Any, step: str) -> SendHandle:
        """Send weights that workers keep until they are told to apply them.

        This is the first half of :func:`~weight_update.send_together`.
        """
        return self._publish(weights, worker_ids, step)

    def _publish(self, weights: Any, worker_ids: Any, group_commit: str | None = None) -> SendHandle:
        side = self._require_sender()
        handle = side.publish(weights, worker_ids, self._process.context, group_commit)
        self.last_report = handle.report
        return handle

    def tell_observers(self, handle: SendHandle) -> None:
        """Tell the observers of an update once it is settled, on the rank that serves workers."""
        if self._process.observers.functions and (sender := self._sender) is not None:
            sender.tell_observers(handle.report, handle.workers)

    def continue_from(self, version: int) -> None:
        """Number versions from ``version`` on, as after a restart from a checkpoint.

        Before the first :meth:`connect`, this is the version of the weights that workers get when they
        connect. Later, the next update gets a number above it.

        Raises:
            LifecycleError: this is not a sender, or was shut down.
            ValueError: ``version`` is not an integer of at least 0.
        """
        version = whole_number(version, "version", least=0)
        self._require_sender(connected=False).sender.continue_from(version)

    def prepare_weights(self, weights: Any = None) -> Any:
        """Return the weights that ``send(weights)`` would send, in the format of the strategy.

        If the model is sharded, every rank calls this, and ranks that do not lead get None.
        """
        named = self._require_sender().read(weights, self._process.context)
        return None if named is None else self.strategy.export(named)

    # -- updates, on a receiver --------------------------------------------------------------------

    @uncompiled
    def receive(self, timeout: float | None = None) -> Any | None:
        """Wait for the next update to be applied, and return the weights.

        Updates are applied without this call. Use it to wait for an update, or if the receiver has no model::

            while (weights := scheme.receive(timeout=1.0)) is None:
                print("still version", scheme.version)

        After a long :meth:`hold`, a newer update may follow at once: call this until it returns None.

        Args:
            timeout: seconds; None waits as long as the sender lives, 0 does not wait.

        Returns:
            the weights in force, in the format of the strategy, or None when no new version came in time.
            They are the live tensors of the model; copies if the receiver has no model; and empty if it has
            an engine.

        Raises:
            LifecycleError: this is not a connected receiver in this process, or it was shut down.
            TransportError: the sender is gone.
        """
        receiver = self._require_receiver()
        self._process.require_open()
        if not self._process.here:
            raise LifecycleError(
                "this process was forked from the receiver and gets no updates; call init_on_receiver() and "
                "connect() here, with an index of its own, or receive() in the process that connected"
            )
        if timeout is not None:
            timeout = require_seconds("timeout", timeout, zero=True)
        return receiver.receive(timeout)

    def apply_weights(self, weights: Any, inplace: bool = True) -> None:
        """Write weights into the receiver's model, between forward passes. No version is counted.

        Args:
            weights: module, TensorDict or dict.
            inplace: as for :meth:`WeightStrategy.apply_weights`.

        Raises:
            LifecycleError: this is not a receiver, or it has no model.
            UnsupportedSourceError: it has an engine, which takes weights only from the sender.
            SchemaMismatchError: the weights do not fit; nothing was written.
        """
        if (side := self._process.receiver) is None:
            raise LifecycleError("apply_weights() is for receivers; call init_on_receiver() first")
        if side.model is None:
            raise LifecycleError("this receiver has no model")
        write = functools.partial(self.strategy.apply_weights, side.model, weights, inplace)
        if side.receiver is None:
            write()
        else:
            side.receiver.gate.run(write, self.timeout)

    def hold(self) -> Hold:
        """Return a context manager inside which no update is applied; updates that arrive wait for its end.

        Every forward pass of the model holds by itself. Use ``hold()`` around several forward passes that
        must see one version, around a forward pass and its backward pass, and around direct calls of
        ``model.forward`` or of parts of the model::

            with scheme.hold():
                rollout = [step(policy) for _ in range(100)]    # all with one version

        In coroutines write ``async with scheme.hold():``. A hold may end in another thread or coroutine than
        the one it began in. After ``shutdown()`` there are no updates to keep out.

        Raises:
            LifecycleError: this is no receiver, or ``connect()`` was not called; or a ``with`` (not
                ``async with``) in a coroutine finds another coroutine of this thread inside ``hold()``.
        """
        return self._require_receiver().gate.hold()

    def guarded(self, function: _F) -> _F:
        """Return ``function``, changed to hold during each call, for models whose hooks cannot run.

        This removes the hooks that hold during forward passes from the model. Compile or capture the model
        afterwards::

            policy = scheme.guarded(torch.compile(model))

        A coroutine function holds until its await ends. A generator function or asynchronous generator
        function holds from its first item until it ends or is closed.

        Raises:
            LifecycleError: this is not a connected receiver.
            TypeError: ``function`` cannot be called. Also from a call that returned a coroutine, a generator
                or a future without being a coroutine function or generator function, so that its end cannot
                be known.
        """
        receiver = self._require_receiver()
        held = receiver.gate.guarded(function)
        receiver.staging.guard_outside()
        return held

    # -- the model ---------------------------------------------------------------------------------

    @property
    def model(self) -> Any | None:
        """On a receiver, the model kept current. On a sender, the model or weights that ``send()`` reads.

        Assign another model on a connected receiver, and it gets the weights and extra state in force. The
        model before keeps its version. After an error, the receiver keeps the model before.
        """
        if (side := self._process.sender) is None:
            return None if self._process.receiver is None else self._process.receiver.model
        first = next(iter(side.sources.by_worker.values()))
        return first() if isinstance(first, ModelOf) else first

    @model.setter
    def model(self, model: Any) -> None:
        if self._process.receiver is not None:
            self._process.receiver.bind(model)

    @property
    def weights(self) -> Any | None:
        """On a receiver, the weights in force. On a sender, the weights of its source as they are now."""
        if (receiver := self._receiver) is not None:
            return self.strategy.export(receiver.staging.weights())
        return None if self._process.sender is None else self.prepare_weights()

    # -- what is known -----------------------------------------------------------------------------

    def __repr__(self) -> str:
        name = type(self).__name__
        if "_process" not in vars(self):  # __init__ or __setstate__ has not run to its end
            return f"<{name}: not initialized>"
        role: str = self._process.end if self._process.end and self._process.here else "new"
        role += "" if self.worker_idx is None else f" {self.worker_idx}"
        model_id = getattr(self, "model_id", None)
        of = "" if model_id is None else f" of {model_id!r}"
        version = "" if self.version is None else f", version {self.version}"
        ended = ", shut down" if self._process.ended else ""
        return f"<{name}: {role}{of}{version}{ended}>"

    @property
    def initialized_on_sender(self) -> bool:
        """Whether this object was initialized as a sender, in this process."""
        return self._process.end == "sender" and self._process.here

    @property
    def initialized_on_receiver(self) -> bool:
        """Whether this object was initialized as a receiver, in this process."""
        return self._process.end == "receiver" and self._process.here

    @property
    def synchronized_on_sender(self) -> bool:
        """Whether ``connect()`` succeeded on the sender."""
        return self.initialized_on_sender and self._process.connected

    @property
    def synchronized_on_receiver(self) -> bool:
        """Whether ``connect()`` succeeded on the receiver."""
        return self.initialized_on_receiver and self._process.connected

    @property
    def context(self) -> Any | None:
        """The context given at initialization, while it exists; only a weak reference is kept."""
        return None if self._process.context is None else self._process.context()

    @context.setter
    def context(self, context: Any) -> None:
        self._process.context = None if context is None else weakref.ref(context)
        if (side := self._process.receiver) is not None and side.options is not None:
            side.options.observer = self._observer()

    def _observer(self) -> ContextObserver | None:
        """Return the observer that tells the context, if there is one, of a receiver's updates."""
        context, export = self.context, self.strategy.export
        if context is None:
            return None
        return ContextObserver(context, self._model_name, export, self._process.connected)

    @property
    def _model_name(self) -> str:
        return self.model_id or "policy"

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
        self._process.require_open()
        if self.initialized_on_receiver:
            raise LifecycleError("add_observer() is for senders")
        return self._process.observers.add(observer)

    @property
    def worker_alive(self) -> WorkerAlive | None:
        """Processes of the workers, as a list in the order of their indices or as a dict by index.

        It may also be a function that takes a worker's index and returns whether its process is alive. If it
        is set on the sender before ``connect()``, that does not wait for a worker that died, and errors of
        ``send()`` tell a worker whose process has ended from a slow one.

        Raises:
            TypeError: it is set to something else.
        """
        return self._process.worker_alive

    @worker_alive.setter
    def worker_alive(self, workers: WorkerAlive | None) -> None:
        self._process.worker_alive = require_workers(workers)

    # -- the end -----------------------------------------------------------------------------------

    def shutdown(self) -> None:
        """End all threads and free all memory. Models keep their weights.

        Calling it twice is fine. If KeyboardInterrupt ended the first call, the second one does the rest. A
        scheme is shut down automatically at the end of its ``with`` block, when it is garbage-collected, and
        when the process exits. The model of a connected receiver, unless it is a plain dict, is updated until
        it is garbage-collected as well.
        """
        self._process.shut_down()

    def __enter__(self: _S) -> _S:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.shutdown()
