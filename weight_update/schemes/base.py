"""The scheme: the public API of weight synchronization, the same for every way to connect."""

from __future__ import annotations

import functools
import secrets
import time
import weakref
from abc import abstractmethod
from collections.abc import Callable, Mapping, Sequence
from multiprocessing.context import get_spawning_popen
from typing import Any, Literal, get_args

import torch
from typing_extensions import Never

from weight_update.arguments import require_bool, require_seconds, whole_number
from weight_update.errors import JoinRefusedError, LifecycleError, close_all, undo_on_error
from weight_update.receiver.forked_threads import warn_if_forked
from weight_update.receiver.gate import shared_gate
from weight_update.receiver.staging import ReceiverOptions
from weight_update.schemes.collector import register_with_torchrl, resolve_model
from weight_update.schemes.options import refuse_options, takes_options_of
from weight_update.schemes.process_state import ProcessState, require_picklable
from weight_update.schemes.receiver_side import ReceiverSide, close_receiver
from weight_update.schemes.sender_side import SenderListener, SenderSide, require_links
from weight_update.schemes.sources import DeviceMap, Sources
from weight_update.schemes.updates import SchemeUpdates
from weight_update.sender.workers import NOBODY
from weight_update.strategy.strategy import WeightStrategy, resolve_strategy
from weight_update.transports.base import TransportBackend

WeightSyncBackend = Literal[
    "none", "direct", "shared", "thread", "process", "multiprocessing", "distributed", "rpc", "ray"
]
"""The names that :meth:`WeightSyncScheme.from_backend` takes, which are TorchRL's."""

_ALIASES = {"direct": "none", "thread": "shared", "multiprocessing": "process"}
End = Literal["sender", "receiver"]
Admit = Callable[[int], Any]
"""Function of an index that returns a late joiner's link; see ``WeightSyncScheme.late_joiner_links``."""


class WeightSyncScheme(SchemeUpdates):
    """Base class of the schemes, which keep one model of many workers equal to one model of a trainer.

    The trainer is the *sender* and each worker is a *receiver*. Both sides go through the same steps:

    1. ``init_on_sender(...)`` in the trainer. Nothing is communicated.
    2. The scheme is pickled to each worker, which calls ``init_on_receiver(...)``. Nothing is communicated.
    3. ``connect()`` on both sides blocks until both are there. The worker then has the sender's weights.
    4. ``send()`` in the trainer, as often as needed. Workers apply the update in the background, between
       two forward passes. ``receive()`` in a worker waits for the next update.
    5. ``shutdown()`` on both sides, or use the scheme as a context manager.

    ::

        # trainer
        context = multiprocessing.get_context("spawn")
        scheme = SharedMemWeightSyncScheme()
        scheme.init_on_sender(model=policy, num_workers=2)
        for index in range(2):
            context.Process(target=work, args=(scheme, index)).start()
        scheme.connect()
        ...
        report = scheme.send()                  # all workers have the new weights


        # worker
        def work(scheme, index):
            policy = make_policy()
            scheme.init_on_receiver(model=policy, worker_idx=index)
            scheme.connect()
            while True:
                action = policy(observation)    # one version of all weights, the newest

    A subclass implements :meth:`create_transport`; see :doc:`transports`.

    Args:
        strategy: ``"tensordict"``, ``"state_dict"`` or a :class:`~weight_update.WeightStrategy`.
        sync: whether :meth:`send` waits until all workers have applied the update. If False, it returns at
            once. A busy worker then skips to the newest version, and a later call raises the error of an
            earlier update.
        timeout: seconds that :meth:`send` waits for workers.
        connect_timeout: seconds that :meth:`connect` waits for the other side.
        stable_addresses: whether receivers copy into their tensors instead of pointing them at received
            memory. CUDA graphs need this, because they capture addresses.

    Attributes:
        last_report: :class:`~weight_update.SyncReport` of the last update sent; None before.
        group: name that :func:`~weight_update.group_schemes` gives to schemes that
            :func:`~weight_update.send_together` updates as one step; None without a group.
        token: secret that workers must know to join; it is pickled with the scheme.
        worker_idx: index of this receiver; None on a sender, and until ``connect()`` is given it.
        listener: listener of a sender, which admits workers; :meth:`open_sender` may set it. ``connect()``
            starts it, and ``shutdown()`` closes it.
    """

    listener: SenderListener | None
    _first_worker: int = 0  # number by which the caller of a receiver names the first worker

    @takes_options_of(object.__init__)  # it has none: help() does not list **unknown
    def __init__(
        self,
        strategy: str | WeightStrategy = "tensordict",
        sync: bool = True,
        *,
        timeout: float = 60.0,
        connect_timeout: float = 120.0,
        stable_addresses: bool = False,
        **unknown: Never,
    ) -> None:
        refuse_options(self, unknown)
        self.strategy: WeightStrategy = resolve_strategy(strategy)
        self.sync: bool = require_bool("sync", sync)
        self.timeout: float = require_seconds("timeout", timeout)
        self.connect_timeout: float = require_seconds("connect_timeout", connect_timeout)
        self.stable_addresses: bool = require_bool("stable_addresses", stable_addresses)
        self.model_id: str | None = None
        self.group: str | None = None
        self.token: str = secrets.token_hex(16)
        self._reset()

    @classmethod
    def from_backend(cls, backend: WeightSyncBackend, **options: Any) -> WeightSyncScheme:
        """Return the scheme for a backend.

        Args:
            backend: ``"none"``, ``"shared"``, ``"process"``, ``"distributed"``, ``"rpc"`` or ``"ray"``.
                TorchRL's other names of the first three work too: ``"direct"``, ``"thread"`` and
                ``"multiprocessing"``.
            options: arguments of the scheme.

        Raises:
            ValueError: the backend is unknown; the message lists the known ones.
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

    # -- for subclasses ----------------------------------------------------------------------------

    @abstractmethod
    def create_transport(self, *, worker_idx: int, end: End) -> TransportBackend:
        """Return one end of the link to a worker. Called at initialization; must not communicate.

        Args:
            worker_idx: index of the worker; -1 for a sender without workers, which only allocates memory.
            end: ``"sender"`` in the trainer, ``"receiver"`` in the worker.
        """

    def open_sender(self, workers: Sequence[int], ctx: Any) -> dict[int, TransportBackend]:
        """Return the sender's end of the link to each worker. The default calls :meth:`create_transport`.

        Override it where links share something, such as a :class:`~weight_update.JoinListener`: assign the
        listener to :attr:`listener`. Give it the result of :meth:`late_joiner_links`, a function that returns
        the link for a worker that is not in ``workers``. Store the address that workers need to find the
        sender in an attribute of the scheme, which is pickled with it.

        Args:
            workers: indices of the workers.
            ctx: multiprocessing context that the workers are started with, or None.
        """
        return {idx: self._transport_of(idx, "sender") for idx in workers}

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

    def _open_links(
        self, ctx: Any, workers: Sequence[int]
    ) -> tuple[dict[int, TransportBackend], SenderListener | None]:
        """Return the links to ``workers``, which may be ``NOBODY`` alone, and the listener."""
        name, asked = type(self).__name__, [idx for idx in workers if idx != NOBODY]
        links = self.open_sender(asked, ctx)
        require_links(name, asked, links)
        if NOBODY in workers:
            if self.listener is None:
                raise ValueError(f"num_workers=0, but workers of {name} cannot join later; give their number")
            with undo_on_error(self.listener.close):
                links = {NOBODY: self._transport_of(NOBODY, "sender")}
        return links, self.listener

    def _transport_of(self, worker_idx: int, end: End) -> TransportBackend:
        """Return the result of :meth:`create_transport`; raise TypeError if it is no transport."""
        made: object = self.create_transport(worker_idx=worker_idx, end=end)
        if not isinstance(made, TransportBackend):
            raise TypeError(
                f"{type(self).__name__}.create_transport() returned {made!r:.60}; return a TransportBackend"
            )
        return made

    def late_joiner_links(self) -> Admit:
        """Return the function that a listener asks for the link of a worker that joins late.

        The function takes the worker's index, and raises :class:`~weight_update.JoinRefusedError` if that
        worker cannot be admitted. It keeps no reference to the scheme. Before a listener gives a
        connection to a link, it calls :meth:`TransportBackend.screen` of that link.
        """
        myself = weakref.ref(self)

        def admit(worker_idx: int) -> TransportBackend:
            if (scheme := myself()) is None or (side := scheme._process.sender) is None:
                raise JoinRefusedError("the scheme was shut down")
            return side.admit(worker_idx, functools.partial(scheme._transport_of, worker_idx, "sender"))

        return admit

    def _index_of(self, worker: int) -> int:
        """Return the index for the ``worker_idx`` that the caller of a receiver gave."""
        return whole_number(worker, "worker_idx", least=self._first_worker) - self._first_worker

    def _find_sender(self, timeout: float) -> None:
        """Find out where the sender is, for a receiver, if that takes communication."""

    # -- initialization ----------------------------------------------------------------------------

    def _reset(self) -> None:
        """Set the attributes that belong to one process, as they are before initialization."""
        register_with_torchrl(WeightSyncScheme)
        self._process = ProcessState()
        self.last_report = self.listener = self.worker_idx = None
        self.__dict__.update(self.process_state())

    def _begin(self) -> ProcessState:
        """Return the state for an initialization; in a forked child, drop the state of the parent first."""
        if not self._process.owner:
            raise LifecycleError(f"{type(self).__name__}.__init__() has to call super().__init__()")
        if not self._process.here:
            if self._process.finalizer is not None:
                self._process.finalizer.detach()
            self._reset()
        register_with_torchrl(WeightSyncScheme)
        return self._process

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
        """Initialize the scheme in the trainer. Nothing is communicated.

        Give exactly one source of weights: ``context`` (with ``model_id``), ``model``, ``weights`` or
        ``params_map``. With ``model`` or ``weights``, also give the number of workers, by ``num_workers`` or
        ``devices``::

            scheme.init_on_sender(model=policy, num_workers=4)
            scheme.init_on_sender(model_id="policy", context=collector)
            scheme.init_on_sender(params_map={0: weights_of_worker_0, 1: weights_of_worker_1})

        Args:
            model_id: name of the model, e.g. ``"policy"``.
            context: collector, which knows the model and its workers. Only a weak reference is kept.
            model: module whose weights ``send()`` reads.
            weights: TensorDict, dict or callable that ``send()`` reads.
            params_map: weights for each worker index.
            devices: device of each worker.
            device_map_fn: called as ``device_map_fn(worker_idx, weights)`` for each worker and update; its
                result is sent to that worker.
            num_workers: number of workers that :meth:`connect` waits for. With 0, it waits for none, and all
                workers are late joiners; the scheme must admit these.
            ctx: multiprocessing context that the workers are started with.

        Raises:
            ValueError: arguments contradict each other or are too few, or the encoding's device is missing.
            LifecycleError: this scheme is initialized already.
            TypeError: the model of the context has no weights.
            UnsupportedSourceError: weights are sparse, nested, quantized, or not initialized yet (lazy
                modules).
            NotEnoughMemoryError: shared memory for the model does not fit on this machine.
        """
        process = self._begin()
        process.require_new("use one scheme for each model")
        given = {"context": context, "model": model, "weights": weights, "params_map": params_map}
        sources = Sources.of(given, model_id, devices, device_map_fn, num_workers)
        self.model_id, self.context = model_id, context
        limits, open_links = (self.timeout, self.connect_timeout), functools.partial(self._open_links, ctx)
        with undo_on_error(functools.partial(close_all, process.announced, process.undo)):
            side = SenderSide(sources, self.strategy, self.token, *limits, process.observers, open_links)
        process.sender, process.end = side, "sender"
        parts = process.announced, process.observers, side.sender, side.listener, process.undo, side.ranks
        process.close_at_end(self, close_all, *parts)

    def init_on_receiver(
        self,
        *,
        model_id: str | None = None,
        context: Any = None,
        model: Any = None,
        worker_idx: int | None = None,
    ) -> None:
        """Initialize the scheme in a worker. Nothing is communicated.

        Args:
            model_id: name of the model in the context. Without a context it may be left out: only schemes
                that look up the sender by RPC or in torch's default store need the name that the sender has.
            context: collector that has the model, and its index as ``worker_idx``.
            model: module, TensorDict, dict or :class:`~weight_update.InferenceEngine` to update. None stores
                the weights for :meth:`receive` only.
            worker_idx: index of this worker; may be given to :meth:`connect` instead.

        Raises:
            LifecycleError: this object is the sender, or is initialized already.
            ValueError: ``context`` was given without ``model_id``.
            UnsupportedSourceError: ``model`` is of a type that cannot take weights.
        """
        process = self._begin()
        process.require_new(
            "give each receiver its own copy (a scheme that is pickled, as by passing it to a process, "
            "arrives fresh)"
        )
        warn_if_forked()
        if context is not None and model is None:
            if model_id is None:
                raise ValueError("init_on_receiver(context=...) needs model_id as well")
            model = resolve_model(context, model_id)
        side = ReceiverSide(model)
        if worker_idx is not None:
            self.worker_idx = self._index_of(worker_idx)
        elif (idx := getattr(context, "worker_idx", None)) is not None:
            self.worker_idx = whole_number(idx, "worker_idx", least=0)
        self.model_id, self.context = model_id, self.context if context is None else context
        process.receiver, process.end = side, "receiver"

    # -- connecting --------------------------------------------------------------------------------

    def connect(
        self, *, worker_idx: int | None = None, weights: Any = None, timeout: float | None = None
    ) -> None:
        """Wait for the other side. When this returns, the workers have the first weights, version 0.

        Call it on both sides, in any order. After an error both sides may call it again. A worker may have
        ended since it took the weights; the next :meth:`send` then names it.

        Args:
            worker_idx: on a receiver, its index, if ``init_on_receiver`` was not given one.
            weights: on the sender, first weights to send instead of the weights of its source; or a dict with
                those of each worker.
            timeout: seconds, above 0; None uses the scheme's ``connect_timeout``.

        Raises:
            LifecycleError: called before initialization or twice, or another thread shuts the scheme down.
            TypeError: ``timeout`` is not a number.
            ValueError: ``timeout`` is not above 0, or longer than the system can wait.
            UnknownWorkerError: ``weights`` are given for each worker, but lack one.
            SchemaMismatchError: the two models differ; raised on both sides, with a line for each weight.
            SyncTimeoutError: the other side did not come in time; the message says who.
            SyncFailedError: on the sender, workers died or failed; the message names them.
            TransportError: on a receiver, the sender is gone or refuses this worker.
        """
        limit = self.connect_timeout if timeout is None else require_seconds("timeout", timeout)
        process = self._process
        if process.end is None or not process.here:
            raise LifecycleError("call init_on_sender() or init_on_receiver() in this process first")
        if process.connected:
            raise LifecycleError(
                "this scheme was connected already, so call send() or receive(); give each model, collector "
                "and worker its own scheme, and create a new scheme to join again after LinkClosedError"
            )
        process.require_open()
        if process.receiver is not None:
            self._connect_receiver(process.receiver, worker_idx, weights, limit)
        elif worker_idx is not None:
            raise LifecycleError("connect(worker_idx=...) is for receivers")
        elif (side := process.sender) is not None and side.leads:
            self._connect_sender(side, weights, limit)
        elif side is not None:
            self.last_report = side.connect(weights, limit, self.worker_alive)
        process.connected = True

    def _connect_sender(self, side: SenderSide, weights: Any, limit: float) -> None:
        self.last_report = side.connect(weights, limit, self.worker_alive)
        self._process.observers.tell(self.last_report)

    def _connect_receiver(self, side: ReceiverSide, worker: int | None, weights: Any, limit: float) -> None:
        if weights is not None:
            raise LifecycleError("connect(weights=...) is for the sender")
        if worker is not None:
            self.worker_idx = self._index_of(worker)
        if (idx := self.worker_idx) is None:
            raise ValueError("a receiver needs worker_idx, in init_on_receiver() or connect()")
        deadline, process = time.monotonic() + limit, self._process
        process.close_at_end(self, close_all, side.link)  # from now on, shutdown() ends this call
        self._find_sender(limit)
        link = side.link = side.link or self._transport_of(idx, "receiver")
        process.close_at_end(self, link.close)
        options = ReceiverOptions(
            link=link,
            strategy=self.strategy,
            gate=shared_gate(self.group),
            worker=idx,
            token=self.token,
            instance=side.instance,
            stable_addresses=self.stable_addresses,
            timeout=self.timeout,
            late_updates_wait=self.late_updates_wait,
            observer=self._observer(),
        )
        receiver = side.connect(options, max(deadline - time.monotonic(), 0.0))
        # The model may keep the receiver alive longer than this object.
        process.close_at_end(receiver, close_receiver, weakref.ref(receiver))

    def __getstate__(self) -> dict[str, Any]:
        """Return what a worker needs: options, token and addresses; no models, links or threads.

        Raises:
            LifecycleError: a process is being started, its worker would need the sender's converter, and that
                cannot be pickled.
        """
        fresh = object.__new__(type(self))
        fresh._reset()
        state = {name: value for name, value in self.__dict__.items() if name not in fresh.__dict__}
        if self._process.end == "sender":  # here, or in the process that this one was forked from
            state["strategy"] = self.strategy.for_receiver()
        elif get_spawning_popen() is not None:
            require_picklable(self.strategy.convert)
        return state

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._reset()


_BACKENDS: dict[str, type[WeightSyncScheme]] = {}
"""Schemes by the name of their backend; each class registers itself."""
