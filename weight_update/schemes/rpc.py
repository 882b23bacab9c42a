"""Scheme for torch.distributed.rpc: workers of one RPC world, called after each update."""

from __future__ import annotations

import contextlib
import logging
import queue
import threading
import time
import uuid
from collections.abc import Mapping, Sequence
from concurrent import futures
from typing import Any

from torch.distributed import rpc
from typing_extensions import Unpack

from weight_update.arguments import require_seconds
from weight_update.errors import LifecycleError, LinkClosedError, SyncTimeoutError
from weight_update.receiver.receiver import Receiver
from weight_update.schemes.base import End
from weight_update.schemes.collector import rrefs_of
from weight_update.schemes.options import RemoteOptions, SenderOptions, takes_options_of
from weight_update.schemes.remote import RemoteWeightSyncScheme, Whereabouts
from weight_update.strategy.strategy import WeightStrategy
from weight_update.text import brief, format_seconds
from weight_update.threads import call_in_thread
from weight_update.transports.base import TransportBackend
from weight_update.transports.rpc import RPCTransport, called_for
from weight_update.transports.socket_stream import deadline_of, seconds_left

_log = logging.getLogger(__name__)
_LEAVE_SECONDS = 5.0
_LEAST_SECONDS = 0.001  # RPC waits for ever with 0

_lock = threading.Lock()
_posted: dict[str, Whereabouts] = {}
_askers: dict[str, list[tuple[str, str]]] = {}
"""Workers that asked for a missing announcement: name of the worker and of its question."""
_questions: dict[str, queue.SimpleQueue[Whereabouts | None]] = {}


class RPCWeightSyncScheme(RemoteWeightSyncScheme, backend="rpc"):
    """Scheme whose workers find the sender through torch.distributed.rpc, and are called by it.

    Weights travel as in :class:`RemoteWeightSyncScheme`, and a background thread of the worker applies them.
    If the sender knows an ``RRef`` of an object in the worker (a collector), it then calls
    ``_receive_weights_scheme()`` of that object; ``send()`` waits for the call, and raises its exception. In
    such a call ``receive()`` returns at once.

    A worker that does not know the sender's address asks the RPC worker ``sender``. A receiver with a
    ``context`` connects in the background, because collectors create their receivers before there is a
    sender. Its ``connect()`` returns at once, and ``hold()``, ``receive()`` or a second ``connect()`` wait
    for the first weights.

    A process that cannot be in the RPC world, such as one that replaces a killed worker, joins with the
    ``address``, ``port`` and ``token`` that were given to the sender.

    All other arguments are those of :class:`RemoteWeightSyncScheme`.

    Args:
        sender: name of the sender in the RPC world. A scheme that the sender has passed to the worker knows
            its sender; with None, any other scheme asks rank 0.
    """

    @takes_options_of(RemoteWeightSyncScheme.__init__)
    def __init__(
        self,
        strategy: str | WeightStrategy = "tensordict",
        backend: str = "gloo",
        sync: bool = True,
        *,
        sender: str | None = None,
        **options: Unpack[RemoteOptions],
    ) -> None:
        super().__init__(strategy, backend, sync, **options)
        self.sender = sender

    def _reset(self) -> None:
        super()._reset()
        self._rrefs: dict[int, Any] = {}
        self._awaited: _Question | TransportBackend | None = None  # by the thread that joins
        self._joining: futures.Future[None] | None = None
        self._leaving = False

    # -- sender ------------------------------------------------------------------------------------

    @takes_options_of(RemoteWeightSyncScheme.init_on_sender)
    def init_on_sender(
        self,
        *,
        worker_rrefs: Mapping[int, Any] | Sequence[Any] | None = None,
        **options: Unpack[SenderOptions],
    ) -> None:
        """Prepare the sender, as :meth:`WeightSyncScheme.init_on_sender` does, with one more argument.

        ``worker_rrefs`` is the ``torch.distributed.rpc.RRef`` of an object in each worker, by index, that has
        a method ``_receive_weights_scheme()``; workers without an RRef are not called. None takes the
        ``collector_rrefs`` of the context, if it has any.

        Raises:
            ValueError: an RRef belongs to a worker that does not exist, or see :class:`WeightSyncScheme`.
        """
        rrefs = rrefs_of(options.get("context")) if worker_rrefs is None else worker_rrefs
        given = dict(rrefs if isinstance(rrefs, Mapping) else enumerate(rrefs))
        if not self.initialized_on_sender:
            self._rrefs = given
        super().init_on_sender(**options)

    def open_sender(self, workers: Sequence[int], ctx: Any) -> dict[int, TransportBackend]:
        unknown = sorted(self._rrefs.keys() - set(workers))
        if unknown:
            raise ValueError(
                f"there are RRefs for workers {unknown} (in worker_rrefs=, or else in collector_rrefs of the "
                f"context), but the workers are {list(workers)}"
            )
        return super().open_sender(workers, ctx)

    def announce(self, where: Whereabouts) -> None:
        """Announce the sender to the workers of the RPC world that ask."""
        _post(self._model_name, where)
        self._process.announced.callback(_withdraw, self._model_name, where)

    # -- receiver ----------------------------------------------------------------------------------

    def look_up(self, timeout: float) -> Whereabouts:
        """Ask the RPC worker ``sender`` for its announcement."""
        if _own_name() is None:
            raise LifecycleError(
                "this scheme does not know where its sender is: call torch.distributed.rpc.init_rpc() first, "
                "or pass the scheme to the worker after init_on_sender(), or give both sides address, port "
                "and token"
            )
        self._awaited = question = _Question(self._model_name)
        return question.ask(0 if self.sender is None else self.sender, timeout)

    def connect(
        self, *, worker_idx: int | None = None, weights: Any = None, timeout: float | None = None
    ) -> None:
        """Connect to the other side; the first call on a receiver with a context does not wait."""
        limit = self.connect_timeout if timeout is None else require_seconds("timeout", timeout)
        process = self._process
        idx = self.worker_idx if worker_idx is None else worker_idx
        if self._joining is not None and not process.connected:
            if not self._await_join(limit):
                raise SyncTimeoutError(f"the first weights did not come within {limit:g} s")
        elif process.receiver and not process.connected and self.context is not None and idx is not None:
            self.worker_idx = idx
            self._joining = call_in_thread("weight_update-join", self._join, weights, limit)
        else:
            super().connect(worker_idx=worker_idx, weights=weights, timeout=timeout)

    def receive(self, timeout: float | None = None) -> Any | None:
        """Wait for the next update to be applied, but return at once while the sender calls this worker.

        In such a call it returns the model if it has a new version, and None otherwise.
        """
        called = called_for.get()
        if called is not None:
            receiver = self._receiver if called == self._model_name else None
            return self.model if receiver is not None and receiver.await_next(0.0) else None
        deadline = deadline_of(timeout)
        if not self._await_join(timeout):
            return None
        return super().receive(seconds_left(deadline))

    def create_transport(self, *, worker_idx: int, end: End) -> TransportBackend:
        if end == "sender":
            return RPCTransport(
                self._rrefs.get(worker_idx),
                model_id=self._model_name,
                timeout=self.timeout,
                **self.sender_options(),
            )
        self._awaited = link = super().create_transport(worker_idx=worker_idx, end=end)
        return link

    def _join(self, weights: Any, timeout: float) -> None:
        try:
            super().connect(weights=weights, timeout=timeout)
        except Exception as error:
            if not self._leaving:
                _log.warning("worker %s could not connect: %s", self.worker_idx, error)
            raise

    def _await_join(self, timeout: float | None) -> bool:
        """Return whether the background thread connected within ``timeout`` seconds; raise its error once."""
        joining = self._joining
        if joining is None:
            return True
        if not futures.wait([joining], timeout).done:
            return False
        if joining.exception() is not None:
            self._joining = None
        joining.result()
        return True

    def _require_receiver(self) -> Receiver:
        if self._receiver is None:
            self._await_join(self.connect_timeout)
        return super()._require_receiver()

    # -- both --------------------------------------------------------------------------------------

    def shutdown(self) -> None:
        self._leaving = True
        with contextlib.ExitStack() as rest:  # all steps are taken, whatever one raises; the last comes first
            rest.callback(super().shutdown)
            joining, awaited = self._joining, self._awaited
            if joining is not None and not joining.done():
                rest.callback(futures.wait, [joining], _LEAVE_SECONDS)
                if awaited is not None:
                    rest.callback(awaited.close)
            elif isinstance(awaited, _Question):  # of a connect() in another thread, if it still waits
                rest.callback(awaited.close)

    def __getstate__(self) -> dict[str, Any]:
        """Return the state to pickle, with the name of this process in the RPC world."""
        state = super().__getstate__()
        state["sender"] = self.sender or _own_name()
        return state


def _own_name() -> str | None:
    """Return the name of this process in its RPC world; None outside of one."""
    try:
        return str(rpc.get_worker_info().name)
    except RuntimeError:
        return None


def _post(key: str, where: Whereabouts) -> None:
    """Announce ``where`` under ``key`` to all workers that asked or will ask; does not wait."""
    with _lock:
        _posted[key] = where
        askers = _askers.pop(key, [])
    for name, question in askers:
        with contextlib.suppress(RuntimeError):  # a worker that has left needs no answer
            rpc.rpc_async(name, _take_answer, args=(question, where))


def _withdraw(key: str, where: Whereabouts) -> None:
    """Withdraw an announcement, unless another one has replaced it."""
    with _lock:
        if _posted.get(key) == where:
            del _posted[key]


class _Question:
    """A request for the announcement of an RPC worker. No thread of RPC waits, on either side."""

    def __init__(self, key: str) -> None:
        self._key, self._name = key, uuid.uuid4().hex
        self._answers: queue.SimpleQueue[Whereabouts | None] = queue.SimpleQueue()

    def ask(self, sender: str | int, timeout: float) -> Whereabouts:
        """Wait for the answer of the worker with the name or rank ``sender``.

        Raises:
            LinkClosedError: that worker cannot be asked, or :meth:`close` was called.
            SyncTimeoutError: that worker announced nothing in time.
        """
        _questions[self._name] = self._answers
        deadline = time.monotonic() + timeout
        try:
            limit = max(timeout, _LEAST_SECONDS)
            where = rpc.rpc_sync(sender, _answer, args=(self._key, _own_name(), self._name), timeout=limit)
            found = where or self._answers.get(timeout=max(deadline - time.monotonic(), 0.0))
        except RuntimeError as error:
            raise LinkClosedError(f"RPC worker {sender!r} cannot be asked ({brief(error)})") from None
        except queue.Empty:
            raise SyncTimeoutError(
                f"RPC worker {sender!r} announced no sender of {self._key!r} within "
                f"{format_seconds(timeout)}; if the sender is another worker, give its name: sender=..."
            ) from None
        finally:
            _questions.pop(self._name, None)
        if found is None:
            raise LinkClosedError("this end was closed")
        return found

    def close(self) -> None:
        """Make :meth:`ask` raise."""
        self._answers.put(None)


def _answer(key: str, asker: str, question: str) -> Whereabouts | None:
    """Return the announcement, in the sender; without one return None and remember the asker."""
    with _lock:
        if key not in _posted:
            _askers.setdefault(key, []).append((asker, question))
        return _posted.get(key)


def _take_answer(question: str, where: Whereabouts) -> None:
    """Take the answer to a question, in the worker that asked."""
    waiting = _questions.get(question)
    if waiting is not None:
        waiting.put(where)
