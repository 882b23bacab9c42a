"""The receiving end of a scheme: joins the sender, and applies its updates in a background thread."""

from __future__ import annotations

import contextlib
import logging
import os
import threading
import time
import weakref
from typing import Any

import torch

from weight_update.errors import (
    FormatError,
    JoinRefusedError,
    LinkClosedError,
    NotEnoughMemoryError,
    SchemaMismatchError,
    SyncTimeoutError,
    TransportError,
    kept_error,
    undo_on_error,
    without_frames,
)
from weight_update.receiver.keeping import keep_alive, let_go
from weight_update.receiver.staging import ReceiverOptions
from weight_update.receiver.updates import UpdateHandler, as_memory_error, kept, summary_of
from weight_update.threads import start_thread
from weight_update.transports.base import TransportBackend
from weight_update.transports.socket_stream import SHORTAGES, seconds_left
from weight_update.wire.frames import Kind, WeightChunk, require_chunk
from weight_update.wire.schema import WeightSchema

_log = logging.getLogger(__name__)
_REJOIN_SECONDS = 180.0
"""Seconds after which a receiver no longer tries to join again; a link may be down for less.

A receiver whose ``connect()`` was given longer tries for as long as that.
"""
_ATTEMPT_SECONDS = 10.0
"""Seconds that an attempt to join again may take; doubled each time that the weights do not arrive."""
_RETRY_SECONDS = 0.2
_GOODBYE_SECONDS = 1.0
_IDLE_SECONDS = 0.01
_LONGEST = 64 << 10  # characters of an error that a HELLO carries


class Receiver:
    """Keeps one model at the version that its sender last sent.

    Call sequence: :meth:`connect` joins the sender and applies the first weights; :meth:`start` then runs
    a background thread that applies updates as they come; :meth:`close` ends it. The thread does not keep the
    receiver alive, but its model does: a receiver is closed when neither its model nor its scheme is referred
    to any more.

    Args:
        model: module, TensorDict, dict or :class:`~weight_update.InferenceEngine` to keep current; None only
            keeps the weights for :meth:`receive`.
    """

    def __init__(self, options: ReceiverOptions, model: Any) -> None:
        self._thread: threading.Thread | None = None
        self.link, self.gate, self.worker = options.link, options.gate, options.worker
        self.error: Exception | None = None  # why no more updates come; None while they do
        # Whether the sender answered that it does not admit this receiver; the link is usable then.
        self.refused = False
        self.options = options
        self._closing = threading.Event()
        self._updates = UpdateHandler(options, self._closing)
        self.staging = self._updates.staging
        self._greeted = False  # whether the last attempt to join reached the sender
        self._welcomed = False  # whether the sender welcomed the last attempt to join
        self._rejoin_seconds = _REJOIN_SECONDS
        self._pid = os.getpid()
        self._returned: int | None = None  # the version that receive() returned last
        self._model, self._bound = model, False

    # -- joining -----------------------------------------------------------------------------------

    def bind(self, model: Any) -> None:
        """Keep another model current from now on; see :meth:`Staging.bind`, whose errors it raises.

        Wait first for an update that is being applied, which is for the model before.

        Raises:
            LifecycleError: the calling thread is inside the gate.
            SyncTimeoutError: that update, or a forward pass, took too long.
        """
        self.gate.require_outside()  # the update may wait for this thread
        deadline = time.monotonic() + self.options.timeout
        if not self._updates.busy.acquire(timeout=self.options.timeout):
            raise SyncTimeoutError(
                f"an update took longer than {self.options.timeout:g} s; assign the model again, or raise "
                "timeout="
            )
        try:
            self.staging.bind(model, max(deadline - time.monotonic(), 0.0))
        finally:
            self._updates.busy.release()
        let_go(self._model, self)
        self._model = model
        if self.error is None:
            keep_alive(model, self)

    def connect(self, timeout: float) -> None:
        """Join the sender and apply the weights it has now.

        If the link fails after the sender has answered, this joins again, where links allow that: another
        worker of this host, whose copy of the weights was to be mapped, may have died.

        Raises:
            UnsupportedSourceError: the model has weights that cannot be synchronized.
            SchemaMismatchError: the model's weights are not the sender's; both sides stay usable.
            JoinRefusedError: the sender does not admit this worker.
            SyncTimeoutError: the sender did not answer within ``timeout`` seconds.
            TransportError: the sender cannot be reached.
        """
        self._rejoin_seconds = max(_REJOIN_SECONDS, timeout)
        deadline = time.monotonic() + timeout
        while True:
            try:
                self._attempt(max(deadline - time.monotonic(), 0.0))
                return
            except SyncTimeoutError:
                if self._welcomed:
                    self._say_goodbye()  # nothing is read any more: the sender must not wait for this worker
                raise
            except LinkClosedError as error:
                answered = self._welcomed and self.link.capabilities.allows_rejoin
                if not answered or not self._tries_again_after(error, deadline):
                    raise
                self.link.disconnect()

    @torch.inference_mode(False)  # the thread writes into the memory that is allocated here
    def _attempt(self, timeout: float) -> None:
        """Join the sender once. A receiver that joins again keeps its weights if the sender has none now."""
        with undo_on_error(self.staging.forget):
            self._join(timeout)

    def _join(self, timeout: float) -> None:
        deadline = time.monotonic() + timeout
        applied = self._updates.applied  # above 0 if this receiver joins again
        self._greeted = self._welcomed = False
        try:
            if self._model is not None and not self._bound:
                self.staging.bind(self._model, self.options.timeout)
                self._bound = True
            expected = self.staging.target.schema()
        except Exception as reason:
            with contextlib.suppress(TransportError, TimeoutError):
                self._greet(deadline, None, reason)
            raise
        self._greet(deadline, expected, None)
        self._greeted = True
        reply = self._await_frame(deadline)
        while reply.kind in (Kind.UPDATE, Kind.COMMIT, Kind.ABORT):  # meant for the worker before this one
            reply = self._await_frame(deadline)
        if reply.kind is not Kind.WELCOME:
            raise FormatError(f"expected WELCOME, got {reply.kind.name}")
        error = self._updates.handle(reply)
        self._welcomed = error is None
        if error is None and applied and reply.header["version"] is None:
            return  # nothing will come before the next send()
        while error is None and self._updates.applied == applied:
            error = self._updates.handle(self._await_frame(deadline))
        if error is not None and applied and self._welcomed:
            _log.warning("worker %d %s: %s", self.worker, kept(self.version), error)
        elif error is not None:
            self._welcomed = False
            self._say_goodbye()  # nothing is read any more: the sender must not wait for this worker
            try:
                raise error
            finally:
                del error  # its frames would refer to it

    def _greet(self, deadline: float, expected: WeightSchema | None, error: Exception | None) -> None:
        """Send a HELLO with the schema that the model expects, or with the reason why it cannot join."""
        hello = {
            "token": self.options.token,
            "worker": self.worker,
            "pid": os.getpid(),
            "version": self.version,
            "schema": None if expected is None else expected.to_header(),
            "error": None if error is None else "\n\n".join(summary_of(error))[:_LONGEST],
            "instance": self.options.instance,
            "again": self._updates.applied > 0,
        }
        self.link.restart(seconds_left(deadline))
        self.link.send_chunk(WeightChunk(Kind.HELLO, hello), seconds_left(deadline))

    def _await_frame(self, deadline: float) -> WeightChunk:
        left = deadline - time.monotonic()
        chunk = self._updates.next_frame(left) if left > 0 else None
        if chunk is None and self._welcomed:
            raise SyncTimeoutError(
                f"worker {self.worker} was admitted, but its first weights did not arrive in time; "
                "if they need longer, raise connect_timeout=, or timeout= of connect() if that was given; "
                "with max_in_flight=, after Ctrl-C in send(), or if all other workers have narrower dtypes "
                "than the trainer, they come with the next send()"
            )
        if chunk is None:
            raise SyncTimeoutError(
                f"worker {self.worker}: the sender did not answer in time; has it called connect()?"
            )
        if chunk.kind is Kind.GOODBYE:
            self._greeted = False  # there is no sender
            raise LinkClosedError("the sender was shut down")
        if chunk.kind is Kind.REFUSED:
            self.refused = True
            reason, problems = chunk.header["reason"], tuple(map(str, chunk.header["problems"]))
            if problems:
                raise SchemaMismatchError(reason, problems)
            raise JoinRefusedError(f"the sender refused this worker: {reason}")
        return chunk

    def start(self) -> None:
        """Apply updates in a background thread; :meth:`receive` waits for versions after the one in force."""
        self._returned = self.version
        keep_alive(self._model, self)
        me = weakref.ref(self)
        with undo_on_error(self.close):  # the sender must not wait for a worker without a thread
            self._thread = start_thread(
                f"weight_update-receiver-{self.worker}", _receive_updates, me, self.link, self._closing
            )

    # -- leaving -----------------------------------------------------------------------------------

    def close(self) -> None:
        """Leave the sender; the model keeps the version it has."""
        if os.getpid() != self._pid:
            return  # a forked child does not speak for its parent
        self._closing.set()
        self.gate.look_again()  # shutdown() inside hold() does not wait for its end
        in_thread = threading.current_thread() is self._thread  # it may collect the scheme
        with contextlib.ExitStack() as rest:  # all steps are taken whatever one raises, in reverse order
            rest.callback(self._wake_callers)
            rest.callback(let_go, self._model, self)
            rest.callback(self.staging.close)
            rest.callback(self._end_thread)
            rest.callback(self.link.close)
            # The sender is told what was applied, then goodbye.
            if self._acquire_busy():
                rest.callback(self._updates.busy.release)
                rest.callback(self.staging.forget)
                rest.callback(self._say_goodbye)
                self._updates.leave_payloads(given_up=lambda: in_thread)

    def _acquire_busy(self) -> bool:
        """Wait for the thread to answer; return False if it does something else that takes long."""
        busy = self._updates.busy
        if busy.acquire(timeout=_GOODBYE_SECONDS):
            return True
        return self._updates.answering and busy.acquire(timeout=self.options.timeout)

    def __del__(self) -> None:
        if self._thread is None or self._closing.is_set() or os.getpid() != self._pid:
            return
        if self.error is None:
            _log.warning(
                "worker %d receives no more updates, because neither its scheme nor its model is referred to "
                "any more; keep one of them (the scheme, if the model is a plain dict), or call shutdown()",
                self.worker,
            )
        self.close()

    def _say_goodbye(self) -> None:
        with contextlib.suppress(TransportError, TimeoutError):  # the sender may have left first
            self.link.send_chunk(WeightChunk(Kind.GOODBYE, {}), _GOODBYE_SECONDS)

    def _end_thread(self) -> None:
        if self._thread is not None and self._thread is not threading.current_thread():
            self._thread.join(5.0)
        self._updates.leftovers = []  # the link is closed: there is nothing to release it to

    def _wake_callers(self) -> None:
        with self._updates.news:
            self._updates.news.notify_all()

    # -- updates -----------------------------------------------------------------------------------

    def receive(self, timeout: float | None) -> Any | None:
        """Return the weights of the next version that was not returned yet, or None on timeout.

        Raises:
            LinkClosedError: the sender is gone and no new version is left.
        """
        return self.options.strategy.export(self.staging.weights()) if self.await_next(timeout) else None

    def await_next(self, timeout: float | None) -> bool:
        """Wait for the next version as :meth:`receive` does; return whether there is one."""
        news = self._updates.news
        with news:
            news.wait_for(lambda: self._has_news or self.error or self._closing.is_set(), timeout)
            if not self._has_news:
                if self.error is not None:
                    raise kept_error(self.error)
                return False
            self._returned = self.version
            return True

    @property
    def version(self) -> int | None:
        """Version in force; None before the first, and after an engine failed to load one."""
        return self.staging.version

    @property
    def _has_news(self) -> bool:
        version = self.staging.version
        return version is not None and version != self._returned

    def _recover(self, error: Exception) -> bool:
        """Act on an error of the thread; return whether it goes on."""
        try:
            self._updates.refuse_unread(error)
        except Exception as lost:  # noqa: BLE001 - without this thread no update would come, and no error
            error = lost
        if isinstance(error, NotEnoughMemoryError):  # the sender was told; there may be enough for the next
            _log.warning("worker %d %s: %s", self.worker, kept(self.version), error)
            return True
        if isinstance(error, TransportError | FormatError | TimeoutError):
            if isinstance(error, FormatError) and not self._closing.is_set():
                _log.warning(
                    "worker %d joins again, because it received an invalid frame: %s", self.worker, error
                )
            reason = error if self._closing.is_set() else self._rejoin(error)
            if reason is not None:
                self._end(reason)
            return reason is None
        _log.error("worker %d stopped receiving updates", self.worker, exc_info=error)
        try:
            self.link.disconnect()  # tells the sender, if it lives
        finally:
            self._end(error)
        return False

    def _end(self, error: Exception) -> None:
        with self._updates.news:
            self.error = without_frames(error)
            self._updates.news.notify_all()
        let_go(self._model, self)
        with self._updates.busy, contextlib.ExitStack() as rest:
            if self.link.capabilities.payloads_die_with_sender:
                rest.callback(self.link.close)  # the sender waits for that
                rest.callback(self._updates.leave_payloads, given_up=self._closing.is_set)
            self.staging.forget()

    def _rejoin(self, lost: Exception) -> Exception | None:
        """Join again after ``lost``; return the error that ends this receiver, or None."""
        deadline = time.monotonic() + self._rejoin_seconds
        seconds = _ATTEMPT_SECONDS
        while True:
            try:
                with self._updates.busy:
                    self._attempt(seconds)
                return None
            except (JoinRefusedError, SchemaMismatchError) as refusal:
                self.link.disconnect()
                return refusal
            except Exception as error:  # noqa: BLE001 - the thread ends in order, whatever it is
                if self._welcomed and isinstance(error, NotEnoughMemoryError):  # the sender was told
                    _log.warning("worker %d %s: %s", self.worker, kept(self.version), error)
                    return None
                self.link.disconnect()  # tells the sender, if it lives
                if not self._tries_again_after(error, deadline):
                    return lost
                too_short = self._welcomed and isinstance(error, TimeoutError)
                seconds = 2 * seconds if too_short else _ATTEMPT_SECONDS

    def _tries_again_after(self, error: Exception, deadline: float) -> bool:
        """Return whether to join again after an attempt failed; wait a moment first.

        A sender that answered, or did not answer in time, may still live: a link that fails during an attempt
        ends only that attempt. A sender that cannot be reached at all is gone.
        """
        short = isinstance(error, OSError) and error.errno in SHORTAGES
        if not short and not isinstance(as_memory_error(error), NotEnoughMemoryError):
            if not isinstance(error, TransportError | FormatError | TimeoutError):
                _log.warning("worker %d could not join again", self.worker, exc_info=error)
                return False
            if not self._greeted and not isinstance(error, TimeoutError):
                return False
        time.sleep(_RETRY_SECONDS)
        return time.monotonic() < deadline and not self._closing.is_set()


def _receive_updates(
    receiver: weakref.ref[Receiver], link: TransportBackend, closing: threading.Event
) -> None:
    """Apply updates until the receiver ends; do not refer to it while waiting for the next one."""

    def allocate(nbytes: int) -> torch.Tensor:
        if (owner := receiver()) is None:
            raise LinkClosedError("the receiver was dropped")
        return owner._updates.allocate(nbytes)

    seconds: float | None = None
    while not closing.is_set():
        chunk = None
        try:
            chunk = require_chunk(link.recv_chunk(seconds, allocate), link)
            if (owner := receiver()) is None:
                return
            if not owner._updates.act(chunk):
                owner._end(LinkClosedError("the sender was shut down"))
                return
        except Exception as error:  # noqa: BLE001 - the thread goes on, or ends in order
            if (owner := receiver()) is None or not owner._recover(error):
                return
        seconds = _IDLE_SECONDS if owner._updates.leftovers else None
        del owner, chunk
    if (owner := receiver()) is not None:
        with owner._updates.busy:
            owner.staging.forget()
