"""The calls of a connected scheme: sending updates, and receiving them."""

from __future__ import annotations

import functools
import os
from collections.abc import Callable
from typing import Any, TypeVar

from weight_update.arguments import require_seconds, whole_number
from weight_update.errors import LifecycleError
from weight_update.receiver.gate import Hold
from weight_update.receiver.receiver import Receiver
from weight_update.report import SyncReport
from weight_update.schemes.lifecycle import SchemeLifecycle
from weight_update.schemes.sender_side import SenderSide
from weight_update.schemes.sources import ModelOf
from weight_update.sender.handle import SendHandle
from weight_update.sender.sender import Sender

_F = TypeVar("_F", bound=Callable[..., Any])


class SchemeUpdates(SchemeLifecycle):
    """The part of a scheme that is used between ``connect()`` and ``shutdown()``."""

    sync: bool
    timeout: float

    def _require_sender(self, connected: bool = True) -> SenderSide:
        side = self._sender_side
        if side is None or self._owner != os.getpid():
            if self._end == "receiver":
                raise LifecycleError("this is a receiver; send() and send_async() are for the sender")
            raise LifecycleError("this is not a sender in this process; call init_on_sender() first")
        ended = self._finalizer is not None and not self._finalizer.alive
        if ended or not side.sender.serving:  # connect() may have failed for some workers only
            self._require_open()
            if connected:
                raise LifecycleError(f"the sender is not connected{side.failure}; call connect() first")
        return side

    def _require_receiver(self) -> Receiver:
        if self._receiver is None:
            if self.initialized_on_sender:
                raise LifecycleError("this is the sender; receive(), hold() and guarded() are for workers")
            if self._owner == os.getpid():  # else it is the state of the process that this was forked from
                self._require_open()
            raise LifecycleError(
                "this is not a connected receiver; call init_on_receiver() and connect() first"
            )
        return self._receiver

    # -- updates, on the sender --------------------------------------------------------------------

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
            LifecycleError: this is not a connected sender.
            NothingToSendError: no weights were given and the sender has no source.
            UnknownWorkerError: ``worker_ids`` names a worker that does not exist.
            SchemaMismatchError: the weights are not those of ``init_on_sender()``; nothing was sent.
            SyncFailedError: workers failed, died or were late. The error names them; all other workers have
                the update.
        """
        if self.sync:
            return self._require_sender().attend(lambda: self.send_async(weights, worker_ids).wait())
        handle = self.send_async(weights, worker_ids)
        self._require_sender().raise_earlier_error(handle)
        return handle.report

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
        handle = self._require_sender().publish(weights, worker_ids, self._context, group_commit)
        self.last_report: SyncReport | None = handle.report
        return handle

    def tell_observers(self, handle: SendHandle) -> None:
        """Tell the observers of an update once it is settled, on the rank that serves workers."""
        if self._observers.functions and isinstance(sender := self._sender, Sender):
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
        sender = self._require_sender(connected=False).sender
        if isinstance(sender, Sender):  # the leader of a sharded trainer numbers for the other ranks
            sender.continue_from(version)

    def prepare_weights(self, weights: Any = None) -> Any:
        """Return the weights that ``send(weights)`` would send, in the format of the strategy.

        If the model is sharded, every rank calls this, and ranks that do not lead get None.
        """
        named = self._require_sender().read(weights, self._context)
        return None if named is None else self.strategy.export(named)

    # -- updates, on a receiver --------------------------------------------------------------------

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
        self._require_open()
        if self._owner != os.getpid():
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
        if self._end != "receiver":
            raise LifecycleError("apply_weights() is for receivers; call init_on_receiver() first")
        if self._model is None:
            raise LifecycleError("this receiver has no model")
        apply = functools.partial(self.strategy.apply_weights, self._model, weights, inplace)
        if self._receiver is None:
            apply()
        else:
            self._receiver.gate.run(apply, self.timeout)

    def hold(self) -> Hold:
        """Return a context manager inside which no update is applied.

        An update that arrives waits for the end of the hold. After ``timeout`` seconds, the worker refuses
        it, and keeps its version until the next one is sent.

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
        if self._sender_side is None:
            return self._model
        first = next(iter(self._sender_side.sources.by_worker.values()))
        return first() if isinstance(first, ModelOf) else first

    @model.setter
    def model(self, model: Any) -> None:
        if self._receiver is not None:
            self._receiver.bind(model)
        self._model = model

    @property
    def weights(self) -> Any | None:
        """On a receiver, the weights in force. On a sender, the weights of its source as they are now."""
        if self._receiver is not None:
            return self.strategy.export(self._receiver.staging.weights())
        return None if self._sender_side is None else self.prepare_weights()
