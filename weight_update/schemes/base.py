"""The lifecycle, once for all schemes."""

from __future__ import annotations

import numbers
import os
import secrets
import threading
import time
import weakref
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext
from multiprocessing.util import Finalize
from typing import Any, Literal, Protocol, TypeVar, get_args

import torch

from weight_update.errors import FormatError, JoinRefusedError, LifecycleError, TransportError
from weight_update.receiver.forked_threads import warn_if_forked
from weight_update.receiver.gate import Hold, shared_gate
from weight_update.receiver.receiver import Receiver
from weight_update.report import SyncReport
from weight_update.schemes.collector import (
    cascade,
    count_update,
    register_with_torchrl,
    resolve_model,
    resolve_path,
)
from weight_update.schemes.liveness import WorkerAlive, liveness
from weight_update.schemes.sources import DeviceMap, ModelOf, Sources
from weight_update.sender.handle import SendHandle, failed
from weight_update.sender.sender import Sender
from weight_update.sharded import Follower, Gathering, Leader, Ranks
from weight_update.strategy.gather import GatherShards
from weight_update.strategy.named_weights import NamedWeights
from weight_update.strategy.strategy import WeightStrategy, resolve_strategy
from weight_update.transports.base import TransportBackend
from weight_update.transports.rate_limit import Refusals
from weight_update.wire.schema import WeightSchema

__all__ = ["WeightSyncBackend", "WeightSyncScheme"]

WeightSyncBackend = Literal[
    "none", "direct", "shared", "thread", "process", "multiprocessing", "distributed", "rpc", "ray"
]
"""The names that :meth:`WeightSyncScheme.from_backend` takes, which are TorchRL's."""

_ALIASES = {"direct": "none", "thread": "shared", "multiprocessing": "process"}

End = Literal["sender", "receiver"]
Admit = Callable[[int], Any]
"""Returns the link for a worker that joins late, by its index; see ``WeightSyncScheme.newcomers``."""
_F = TypeVar("_F", bound=Callable[..., Any])
_T = TypeVar("_T")
_REMEMBERED = 64
"""How many updates of ``sync=False`` that nobody waits for are looked after for errors."""


class SenderListener(Protocol):
    """A listener of a scheme, which admits workers while the sender lives.

    Attributes:
        refusals: why the last join requests were refused.
    """

    refusals: Refusals

    def start(self) -> None:
        """Begin to listen."""

    def close(self) -> None:
        """Stop, and free everything."""


class WeightSyncScheme(ABC):
    """Keeps one model of many workers equal to one model of a trainer.

    Call sequence, on the sender (trainer) and on each receiver (worker):

    1. ``init_on_sender(...)``: local; nothing is communicated.
    2. The scheme is pickled to each worker, which calls ``init_on_receiver(...)``: local too.
    3. ``connect()`` on both sides: blocks until both are there; the worker then has the sender's weights.
    4. ``send()`` on the sender, as often as wanted; receivers apply it in the background, between
       forward passes. ``receive()`` on a receiver waits for the next update.
    5. ``shutdown()`` on both, or use the scheme as a context manager.

    A subclass writes :meth:`create_transport`; see ``examples/custom_scheme.py``.

    Args:
        strategy: ``"tensordict"``, ``"state_dict"`` or a :class:`~weight_update.WeightStrategy`.
        sync: whether ``send()`` waits until all workers have applied the update. If False it returns at
            once, the newest version wins, and an error of an earlier update is raised by a later call.
        timeout: seconds that ``send()`` waits for workers, and a worker for its forward pass to end.
        connect_timeout: seconds that ``connect()`` waits for the other side.
        stable_addresses: receivers copy into their tensors instead of pointing them at received memory;
            needed where addresses were captured, as by CUDA graphs.

    Attributes:
        last_report: the :class:`~weight_update.SyncReport` of the last update sent; None before.
        worker_alive: set it to the workers' processes, in the order of their indices or by index, or to a
            function that tells whether the process of a worker index lives. ``connect()`` then does not wait
            for a worker that died.
        group: name shared by schemes whose models one worker holds and that are updated together by
            :func:`~weight_update.send_together`; set by :func:`~weight_update.group_schemes`.
    """

    def __init__(
        self,
        strategy: str | WeightStrategy = "tensordict",
        sync: bool = True,
        *,
        timeout: float = 60.0,
        connect_timeout: float = 120.0,
        stable_addresses: bool = False,
    ) -> None:
        self.strategy = resolve_strategy(strategy)
        self.sync = sync
        self.timeout = _require_seconds("timeout", timeout)
        self.connect_timeout = _require_seconds("connect_timeout", connect_timeout)
        self.stable_addresses = stable_addresses
        self.model_id: str | None = None
        self.group: str | None = None
        self._token = secrets.token_hex(16)
        self._reset()

    @classmethod
    def from_backend(cls, backend: WeightSyncBackend, **options: Any) -> WeightSyncScheme:
        """Make the scheme for a backend.

        Args:
            backend: ``"none"``, ``"shared"``, ``"process"``, ``"distributed"``, ``"rpc"`` or ``"ray"``.
                TorchRL's other names of the first three work too: ``"direct"``, ``"thread"`` and
                ``"multiprocessing"``.
            options: arguments of the scheme.

        Raises:
            ValueError: an unknown backend; the message lists the known ones.
        """
        found = _BACKENDS.get(_ALIASES.get(backend, backend))
        if found is None:
            known = ", ".join(map(repr, get_args(WeightSyncBackend)))
            raise ValueError(f"Unsupported weight-sync backend {backend!r}; give one of {known}")
        return found(**options)

    def __init_subclass__(cls, *, backend: str | None = None, **kwargs: Any) -> None:
        """Register a scheme under the name of its backend, if it has one."""
        super().__init_subclass__(**kwargs)
        if backend is not None:
            _BACKENDS[backend] = cls

    def _forget_parent(self) -> None:
        """In a forked child: give up the parent's side, which came along without being asked."""
        if self._owner != os.getpid():
            if self._finalizer is not None:
                self._finalizer.detach()
            self._reset()

    def _reset(self) -> None:
        """All that one process knows and another must not inherit."""
        self.last_report: SyncReport | None = None
        self.worker_alive: WorkerAlive | None = None
        self._sources: Sources | None = None
        self._sender: Sender | Follower | None = None
        self._ranks: Ranks | None = None
        self._receiver: Receiver | None = None
        self._worker_idx: int | None = None
        self._model: Any = None
        self._context: weakref.ref[Any] | None = None
        self._receiving = False
        self._connected = False
        self._link: TransportBackend | None = None
        self._unchecked: list[SendHandle] = []
        self._listener: SenderListener | None = None
        self._owner = os.getpid()
        self._instance = secrets.token_hex(8)
        self._finalizer: weakref.finalize[Any, Any] | None = None
        self._sending = threading.Lock()

    def _close_at_end(self, close: Callable[..., None], *parts: Any) -> None:
        """Have ``close(*parts)`` called by :meth:`shutdown`, or when the scheme or the process ends.

        Processes that multiprocessing started run its own exit functions only: without them a worker that
        ends right after an update would never say that it has it.
        """
        self._finalizer = weakref.finalize(self, close, *parts)
        Finalize(self, self._finalizer, exitpriority=1)

    # -- for subclasses ----------------------------------------------------------------------------

    @abstractmethod
    def create_transport(self, *, worker_idx: int, end: End) -> TransportBackend:
        """One end of the link to a worker. Called at initialization; must not communicate.

        Args:
            worker_idx: which worker.
            end: ``"sender"`` in the trainer, ``"receiver"`` in the worker.
        """

    def open_sender(self, workers: Sequence[int], ctx: Any) -> dict[int, TransportBackend]:
        """The sender's end of all links; the default creates one transport for each worker.

        Put the addresses that workers need to find the sender into attributes of self, and a listener into
        ``self._listener``; :meth:`connect` starts it and :meth:`shutdown` closes it. A listener that can
        admit late joiners calls the function that :meth:`newcomers` returns.

        Args:
            workers: indices.
            ctx: a multiprocessing context, or None.
        """
        del ctx
        return {idx: self.create_transport(worker_idx=idx, end="sender") for idx in workers}

    def newcomers(self) -> Admit:
        """Return a function that admits late joiners, for listeners.

        The function takes a worker's index and returns its link, or raises
        :class:`~weight_update.JoinRefusedError` if that worker cannot be admitted. It keeps no reference to
        the scheme. Before a listener gives a connection to a link, it calls :meth:`TransportBackend.screen`
        of that link.
        """
        myself = weakref.ref(self)

        def admit(worker_idx: int) -> TransportBackend:
            me = myself()
            if me is None or not isinstance(me._sender, Sender) or me._sources is None:
                raise JoinRefusedError("the scheme was shut down")
            if not me._sources.common or worker_idx < 0:
                known = ", ".join(map(str, sorted(me._sources.by_worker)))
                raise JoinRefusedError(
                    f"unknown worker index {worker_idx} (known: {known}); workers can be added where all "
                    "have the same weights"
                )
            make = me.create_transport
            return me._sender.admit(worker_idx, lambda: make(worker_idx=worker_idx, end="sender"))

        return admit

    # -- phase 1: local ----------------------------------------------------------------------------

    def init_on_sender(
        self,
        *,
        model_id: str | None = None,
        context: Any = None,
        model: Any = None,
        weights: Any = None,
        params_map: Mapping[int, Any] | None = None,
        devices: Sequence[torch.device | str | None] | None = None,
        device_map_fn: DeviceMap | None = None,
        num_workers: int | None = None,
        ctx: Any = None,
    ) -> None:
        """Set up the sender. Nothing is communicated.

        Give exactly one source of weights: ``context`` (with ``model_id``), ``model``, ``weights`` or
        ``params_map``; and for ``model`` and ``weights`` the number of workers, by ``devices`` or
        ``num_workers``.

        Args:
            model_id: name of the model, e.g. ``"policy"``.
            context: a collector; it knows the model and its workers. Only a weak reference is kept.
            model: module whose weights ``send()`` reads.
            weights: TensorDict, dict or callable that ``send()`` reads.
            params_map: weights for each worker index.
            devices: device of each worker.
            device_map_fn: called as ``device_map_fn(worker_idx, weights)`` for each worker and update; what
                it returns is sent to that worker.
            num_workers: number of workers.
            ctx: multiprocessing context that the workers are started with.

        Raises:
            ValueError: the arguments contradict each other, are too few, or the scheme was initialized.
            TypeError: the model of the context has no weights.
            NotEnoughMemoryError: shared memory for the model does not fit on this machine.
        """
        self._forget_parent()
        if self.initialized_on_sender or self.initialized_on_receiver:
            raise LifecycleError("this scheme is initialized already; use one scheme for each model")
        register_with_torchrl(WeightSyncScheme)
        sources = Sources.of(
            context=context,
            model_id=model_id,
            model=model,
            weights=weights,
            params_map=params_map,
            devices=devices,
            device_map_fn=device_map_fn,
            num_workers=num_workers,
        )
        self.model_id = model_id
        self._ranks = ranks = self._meet_ranks(sources)
        try:
            patience = self.connect_timeout + self._patience
            with self._in_step(
                "init_on_sender", lambda _: sources.survey(self.strategy), patience
            ) as surveyed:
                self._sender = self._open_side(ranks, surveyed, ctx)
        except BaseException:
            if ranks is not None:
                ranks.close()
            raise
        self.context, self._sources = context, sources
        self._close_at_end(_close_all, self._sender, self._listener, ranks)

    def _meet_ranks(self, sources: Sources) -> Ranks | None:
        """Return the connection to the other ranks; None if the trainer is not sharded."""
        gather = self.strategy.gather
        if gather is None and not sources.sharded(self.strategy):
            return None
        gather = gather or GatherShards()
        ranks = Ranks(gather.members(), self.timeout, self.connect_timeout)
        sources.gathering = Gathering(ranks, gather)
        return ranks

    def _in_step(
        self, call: str, read: Callable[[Sequence[int] | None], _T], patience: float
    ) -> AbstractContextManager[_T]:
        """Return a context with the result of ``read``; all ranks of a sharded trainer enter it together."""
        return nullcontext(read(None)) if self._ranks is None else self._ranks.step(call, read, patience)

    def _open_side(
        self, ranks: Ranks | None, surveyed: Mapping[int, tuple[NamedWeights, NamedWeights | None]], ctx: Any
    ) -> Sender | Follower:
        if ranks is not None and not ranks.leads:
            ranks.follow()
            return Follower(ranks, self.timeout)
        known: dict[int, WeightSchema] = {}
        for named in (one for pair in surveyed.values() for one in pair if one is not None):
            if id(named) not in known:
                known[id(named)] = named.schema()
        schemas = {idx: known[id(named)] for idx, (named, _) in surveyed.items()}
        tracked = {
            idx: None if part is None else frozenset(known[id(part)].names)
            for idx, (_, part) in surveyed.items()
        }
        links = self.open_sender(sorted(schemas), ctx)
        arguments = links, schemas, tracked, self.strategy, self._token, self.timeout
        try:
            return Sender(*arguments) if ranks is None else Leader(ranks, *arguments)
        except BaseException:
            _close_all(*links.values(), self._listener)
            raise

    def init_on_receiver(
        self,
        *,
        model_id: str | None = None,
        context: Any = None,
        model: Any = None,
        worker_idx: int | None = None,
    ) -> None:
        """Set up a receiver. Nothing is communicated.

        Args:
            model_id: name of the model in the context.
            context: a collector that has the model, and its index as ``worker_idx``.
            model: module, TensorDict, dict or :class:`~weight_update.InferenceEngine` to keep current; None
                keeps weights for :meth:`receive` only.
            worker_idx: index of this worker; may also be given to :meth:`connect`.

        Raises:
            LifecycleError: this very object is the sender, or is initialized already.
        """
        self._forget_parent()
        if self.initialized_on_sender or self.initialized_on_receiver:
            raise LifecycleError(
                "this scheme is initialized already; give each receiver its own copy (a scheme that is "
                "pickled, as by passing it to a process, arrives fresh)"
            )
        warn_if_forked()
        if context is not None and model is None:
            if model_id is None:
                raise ValueError("init_on_receiver(context=...) needs model_id as well")
            model = resolve_model(context, model_id)
        if worker_idx is None:
            worker_idx = getattr(context, "worker_idx", None)
        self.model_id, self.context = model_id, context
        self._model, self._worker_idx = model, worker_idx
        self._receiving = True

    # -- phase 2: rendezvous -----------------------------------------------------------------------

    def connect(
        self,
        *,
        worker_idx: int | None = None,
        weights: Any = None,
        timeout: float | None = None,
    ) -> None:
        """Wait for the other side; returns when the workers have the first weights.

        Args:
            worker_idx: receiver: its index, if ``init_on_receiver`` was not told.
            weights: sender: first weights, if not those of its source.
            timeout: seconds, above 0; None takes the scheme's ``connect_timeout``.

        Raises:
            LifecycleError: called before initialization, or connected already.
            TypeError: ``timeout`` is not a number.
            ValueError: it is not above 0, or longer than the system can wait.
            SchemaMismatchError: the two models differ; raised on both sides, which may then try again.
            SyncTimeoutError: the other side did not come in time; the message says who.
            SyncFailedError: sender: workers died or failed; it names them.
            TransportError: receiver: the sender is gone or refuses this worker.
        """
        limit = self._connect_limit(timeout)
        if self._connected:
            raise LifecycleError("this scheme is connected already")
        if isinstance(self._sender, Sender):
            self._connect_sender(self._sender, worker_idx, weights, limit)
        elif self._sender is not None:
            self._give_first(self._sender, weights, limit)
        elif self._receiving:
            self._connect_receiver(worker_idx, weights, limit)
        else:
            raise LifecycleError("call init_on_sender() or init_on_receiver() before connect()")
        self._connected = True

    def _connect_limit(self, timeout: float | None) -> float:
        return self.connect_timeout if timeout is None else _require_seconds("timeout", timeout)

    def _connect_sender(self, sender: Sender, worker_idx: int | None, weights: Any, limit: float) -> None:
        if worker_idx is not None:
            raise LifecycleError("connect(worker_idx=...) is for receivers")
        if self._listener is not None:
            self._listener.refusals.clear()  # of an earlier call
            sender.refusals = self._listener.refusals
            self._listener.start()
        self._give_first(sender, weights, limit)

    def _give_first(self, sender: Sender | Follower, weights: Any, limit: float) -> None:
        def read(workers: Sequence[int] | None) -> dict[int, NamedWeights]:
            chosen = sender.workers if workers is None else workers
            return self._sources_for(chosen).read(self.strategy, weights, chosen, first=True)

        with self._in_step("connect", read, limit + self._patience) as named:
            self.last_report = sender.connect(named, limit, liveness(self.worker_alive))

    def _connect_receiver(self, worker_idx: int | None, weights: Any, limit: float) -> None:
        if weights is not None:
            raise LifecycleError("connect(weights=...) is for the sender")
        idx = self._worker_idx if worker_idx is None else worker_idx
        if idx is None:
            raise ValueError("a receiver needs worker_idx, in init_on_receiver() or connect()")
        self._worker_idx = idx
        deadline = time.monotonic() + limit
        self._find_sender(limit)
        myself = weakref.ref(self)
        link, self._link = self._link or self.create_transport(worker_idx=idx, end="receiver"), None
        receiver = Receiver(
            link=link,
            strategy=self.strategy,
            gate=shared_gate(self.group),
            model=self._model,
            worker=idx,
            token=self._token,
            instance=self._instance,
            stable_addresses=self.stable_addresses,
            timeout=self.timeout,
            on_switched=lambda version: _on_switched(myself),
            on_applied=lambda version, weights: _on_applied(myself, weights),
        )
        try:
            receiver.connect(max(deadline - time.monotonic(), 0.0))
        except (TransportError, FormatError):
            receiver.close()
            raise
        except BaseException:
            receiver.abandon()  # the link is fine: it is for the next attempt
            self._link = link
            self._close_at_end(link.close)
            raise
        receiver.mark_returned()
        receiver.start()
        self._receiver = receiver
        self._close_at_end(receiver.close)

    def _find_sender(self, timeout: float) -> None:
        """Receiver: find out where the sender is, if that takes communication."""
        del timeout

    # -- phase 3: updates --------------------------------------------------------------------------

    def send(self, weights: Any = None, worker_ids: Any = None) -> SyncReport:
        """Send weights to workers and, if ``sync``, wait until they have applied them.

        Args:
            weights: module, TensorDict, dict, callable or name of a model in the context; a dict of worker
                indices for different weights each; None reads the source given to ``init_on_sender``.
            worker_ids: index, device, or a list of them; None sends to all.

        Returns:
            the report of this update; with ``sync=False``, what is known of it so far.

        Raises:
            LifecycleError: not a connected sender.
            NothingToSendError: no weights were given and the sender has no source.
            UnknownWorkerError: ``worker_ids`` names a worker that does not exist.
            SchemaMismatchError: the weights are not those agreed on in ``connect``; nothing was sent.
            SyncFailedError: workers failed, died or were late; it names them, and all others have it.
        """
        if self.sync:
            return self.send_async(weights, worker_ids).wait()
        handle = self.send_async(weights, worker_ids)
        earlier, self._unchecked = self._unchecked[-_REMEMBERED:], [handle]
        if earlier:
            self._raise_first(earlier)
        return handle.report

    def _raise_first(self, earlier: list[SendHandle]) -> None:
        """Raise the first error of updates that nobody waited for; go on looking after the others."""
        found = self._require_sender().outcomes([(one.version, one.workers) for one in earlier])
        outcomes = list(zip(earlier, found, strict=True))
        bad = next((one for one, (_, failures) in outcomes if failures), None)
        still = [one for one, (settled, failures) in outcomes if failures or not settled]
        self._unchecked = [*(one for one in still if one is not bad), *self._unchecked]
        if bad is not None:
            raise failed(bad.version, dict(outcomes)[bad][1], bad.report)

    def send_async(self, weights: Any = None, worker_ids: Any = None) -> SendHandle:
        """As :meth:`send`, but returns at once; the weights may be changed when it returns.

        A worker that is still busy with an earlier version gets the newest one when it is done; those in
        between are dropped.

        Returns:
            a handle with ``version``, ``done()`` and ``wait(timeout) -> SyncReport``.
        """
        return self._publish(weights, worker_ids)

    def stage(self, weights: Any, worker_ids: Any, step: str) -> SendHandle:
        """First half of :func:`~weight_update.send_together`: workers keep it until told to apply it."""
        return self._publish(weights, worker_ids, commit=False, group_commit=step)

    def _publish(self, weights: Any, worker_ids: Any, **how: Any) -> SendHandle:
        sender = self._require_sender()
        with self._sending:
            start = time.perf_counter()
            with self._in_step("send", self._reader(weights, worker_ids), self._patience) as named:
                extract = time.perf_counter() - start
                handle = SendHandle(sender, sender.publish(named, **how), tuple(named))
            handle.report.seconds = {"extract": extract, **handle.report.seconds}
            self.last_report = handle.report
        return handle

    def continue_from(self, version: int) -> None:
        """Give the next update a number above ``version``, as after a restart from a checkpoint.

        Raises:
            LifecycleError: this is not a connected sender.
        """
        sender = self._require_sender()
        if isinstance(sender, Sender):  # the leader of a sharded trainer numbers for the other ranks
            sender.continue_from(version)

    def prepare_weights(self, weights: Any = None) -> Any:
        """The weights that ``send(weights)`` would send, in the format of the strategy.

        Of a sharded model, every rank calls this; those that do not lead get None.
        """
        sender = self._require_sender()
        with self._in_step("prepare_weights", self._reader(weights, None), self._patience) as named:
            whole = sender.whole_weights(named)
        return None if whole is None else self.strategy.export(whole)

    def receive(self, timeout: float | None = None) -> Any | None:
        """Wait for the next update to be applied.

        Args:
            timeout: seconds; None waits as long as the sender lives, 0 only looks.

        Returns:
            the weights now in force, in the format of the strategy (live tensors of the model, or copies
            where the receiver has none; empty where it has an engine), or None when no new version came in
            time.

        Raises:
            LifecycleError: not a connected receiver.
            TransportError: the sender is gone.
        """
        return self._require_receiver().receive(timeout)

    def apply_weights(self, weights: Any, inplace: bool = True) -> None:
        """Write weights into the receiver's model, between forward passes; no version is counted.

        Raises:
            LifecycleError: not a receiver, or it has no model.
            SchemaMismatchError: they do not fit; nothing was written.
        """
        if not self._receiving:
            raise LifecycleError("apply_weights() is for receivers; call init_on_receiver() first")
        if self._model is None:
            raise LifecycleError("this receiver has no model")
        if self._receiver is None:
            self.strategy.apply_weights(self._model, weights, inplace)
        else:
            self._receiver.gate.run(
                lambda: self.strategy.apply_weights(self._model, weights, inplace), self.timeout
            )

    def hold(self) -> Hold:
        """Keep updates out of a ``with`` block of a receiver; updates that come wait for its end.

        Forward passes of the model hold by themselves. Use this around several of them, where parts of the
        model or ``model.forward`` are called directly, and from a forward pass until its backward pass. In
        coroutines write ``async with scheme.hold():``. A hold may end in another thread or coroutine than
        the one it began in.

        Raises:
            LifecycleError: not a connected receiver; or, from ``with`` in a coroutine, another coroutine of
                this thread holds as well.
        """
        return self._require_receiver().gate.hold()

    def guarded(self, function: _F) -> _F:
        """Return ``function`` so that it holds during each call; for policies whose own hooks cannot run.

        The hooks that hold during forward passes of the model are taken off: compile or capture the model
        after this. A coroutine function holds until its await ends. A generator or asynchronous generator
        holds from its first item until it ends or is closed.

        Raises:
            LifecycleError: not a connected receiver.
            TypeError: from a call that returned a coroutine, a generator or a future without being a
                coroutine function or generator function, so that its end cannot be known.
        """
        receiver = self._require_receiver()
        receiver.guard_outside()
        return receiver.gate.guarded(function)

    # -- state -------------------------------------------------------------------------------------

    @property
    def version(self) -> int | None:
        """Sender: the last version that a worker applied. Receiver: the one in force. None before."""
        side = self._sender or self._receiver
        return None if side is None else side.version

    @property
    def worker_versions(self) -> dict[int, int | None]:
        """Sender: the version each worker has applied; None for a worker that is not connected.

        On ranks of a sharded trainer that do not lead: as of the end of the last call that all ranks made.
        """
        return {} if self._sender is None else dict(self._sender.worker_versions)

    @property
    def initialized_on_sender(self) -> bool:
        """Whether this object was initialized as a sender, in this process."""
        return self._sender is not None and self._owner == os.getpid()

    @property
    def initialized_on_receiver(self) -> bool:
        """Whether this object was initialized as a receiver, in this process."""
        return self._receiving and self._owner == os.getpid()

    @property
    def synchronized_on_sender(self) -> bool:
        """Whether ``connect()`` succeeded on the sender."""
        return self.initialized_on_sender and self._connected

    @property
    def synchronized_on_receiver(self) -> bool:
        """Whether ``connect()`` succeeded on the receiver."""
        return self.initialized_on_receiver and self._connected

    @property
    def strategy_str(self) -> str:
        """The format of the strategy: ``"tensordict"`` or ``"state_dict"``."""
        return self.strategy.extract_as

    @property
    def context(self) -> Any | None:
        """The context, if it still exists."""
        return None if self._context is None else self._context()

    @context.setter
    def context(self, context: Any) -> None:
        self._context = None if context is None else weakref.ref(context)

    @property
    def worker_idx(self) -> int | None:
        """Index of this receiver; None on a sender."""
        return self._worker_idx

    @property
    def model(self) -> Any | None:
        """Receiver: the model kept current. Sender: the model that ``send()`` reads, if it is one."""
        if self._sources is not None:
            first = next(iter(self._sources.by_worker.values()))
            return first() if isinstance(first, ModelOf) else first
        return self._model

    @model.setter
    def model(self, model: Any) -> None:
        self._model = model
        if self._receiver is not None:
            self._receiver.bind(model)

    @property
    def weights(self) -> Any | None:
        """The weights now: those in force on a receiver, those of the source on a sender."""
        if self._receiver is not None:
            return self.strategy.export(self._receiver.weights())
        return None if self._sources is None else self.prepare_weights()

    # -- end ---------------------------------------------------------------------------------------

    def shutdown(self) -> None:
        """End all threads and free all memory; calling it twice is fine. Models keep their weights."""
        self._connected = False
        if self._owner == os.getpid() and self._finalizer is not None:
            self._finalizer()

    def __enter__(self) -> WeightSyncScheme:
        """The scheme itself; ``shutdown()`` is called at the end."""
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.shutdown()

    def __getstate__(self) -> dict[str, Any]:
        """What a worker needs: options, token and addresses; no models, links or threads."""
        fresh = object.__new__(type(self))
        fresh._reset()
        state = {name: value for name, value in self.__dict__.items() if name not in fresh.__dict__}
        if self.initialized_on_sender:
            state["strategy"] = self.strategy.for_receiver()
        return state

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Inverse of :meth:`__getstate__`."""
        self.__dict__.update(state)
        self._reset()

    # -- insides -----------------------------------------------------------------------------------

    def _reader(
        self, weights: Any, worker_ids: Any
    ) -> Callable[[Sequence[int] | None], dict[int, NamedWeights]]:
        """Reads weights for the workers that ``worker_ids`` means, or that another rank says it means."""

        def read(workers: Sequence[int] | None) -> dict[int, NamedWeights]:
            found = weights
            if isinstance(weights, str):
                if self.context is None:
                    raise ValueError(
                        f"weights={weights!r} names a model, but there is no context to find it in"
                    )
                found = resolve_path(self.context, weights)
            sources = self._sources_for(sender.workers if workers is None else workers)
            chosen = sources.select(worker_ids, found) if workers is None else workers
            return sources.read(self.strategy, found, chosen)

        sender = self._require_sender()
        return read

    def _sources_for(self, workers: Sequence[int]) -> Sources:
        assert self._sources is not None
        return self._sources.with_late_joiners(workers)

    @property
    def _patience(self) -> float:
        """Seconds between two words of the leader to the other ranks, at most: it waits for workers."""
        return 4 * self.timeout

    def _require_sender(self) -> Sender | Follower:
        if self._sender is None:
            raise LifecycleError("this is not a sender; call init_on_sender() first")
        if not self._sender.serving:  # connect() may have failed for some workers: the others are there
            ended = self._finalizer is not None and not self._finalizer.alive
            cure = "was shut down; make a new scheme" if ended else "is not connected; call connect() first"
            raise LifecycleError(f"the sender {cure}")
        return self._sender

    def _require_receiver(self) -> Receiver:
        if self._receiver is None:
            raise LifecycleError(
                "this is not a connected receiver; call init_on_receiver() and connect() first"
            )
        return self._receiver


_BACKENDS: dict[str, type[WeightSyncScheme]] = {}
"""Schemes by the name of their backend; each class registers itself."""


def _require_seconds(option: str, given: Any) -> float:
    """Return ``given``; raise TypeError or ValueError unless it is a time that the system can wait."""
    if isinstance(given, bool) or not issubclass(type(given), numbers.Real):
        raise TypeError(f"{option} is a number of seconds, got {given!r}; give a large number to wait long")
    if not 0 < given <= threading.TIMEOUT_MAX:
        raise ValueError(
            f"{option} is a positive number of seconds, at most {threading.TIMEOUT_MAX:.0f}, got {given!r}"
        )
    return float(given)  # locks and sockets take no other kind of number


def _close_all(*parts: Sender | Follower | TransportBackend | SenderListener | Ranks | None) -> None:
    with ExitStack() as rest:  # whatever one of them raises, all are closed
        for part in reversed(parts):
            if part is not None:
                rest.callback(part.close)


def _on_switched(scheme: weakref.ref[WeightSyncScheme]) -> None:
    me = scheme()
    context = None if me is None else me.context
    if context is not None:
        count_update(context)


def _on_applied(scheme: weakref.ref[WeightSyncScheme], weights: Callable[[], NamedWeights]) -> None:
    me = scheme()
    context = None if me is None else me.context
    if me is not None and context is not None:
        cascade(context, me.model_id or "policy", lambda: me.strategy.export(weights()))
