"""The receiving end of a scheme: joins, stages updates, and makes each visible at one moment."""

from __future__ import annotations

import contextlib
import errno
import functools
import logging
import os
import threading
import time
import traceback
from collections.abc import Callable, Mapping
from typing import Any

import torch

from weight_update.errors import (
    FormatError,
    JoinRefusedError,
    LifecycleError,
    LinkClosedError,
    NotEnoughMemoryError,
    SchemaMismatchError,
    SyncTimeoutError,
    TransportError,
    UnreachableMemoryError,
    without_frames,
)
from weight_update.receiver.flat_buffers import Behind
from weight_update.receiver.gate import Gate
from weight_update.receiver.group_commit import run_jointly
from weight_update.receiver.targets import Destination, Staged
from weight_update.strategy.named_weights import NamedWeights
from weight_update.strategy.strategy import WeightStrategy
from weight_update.transports.base import TransportBackend
from weight_update.transports.shared_memory.unix_stream import seconds_left
from weight_update.wire.frames import Kind, WeightChunk
from weight_update.wire.schema import WeightSchema

__all__ = ["Receiver"]

_log = logging.getLogger(__name__)
_REJOIN_SECONDS = 180.0
"""Seconds after which a receiver no longer tries to join again; a link may be down for less."""
_ATTEMPT_SECONDS = 10.0
"""Seconds that one attempt to join again may take."""
_RETRY_SECONDS = 0.2
_GOODBYE_SECONDS = 1.0
_IDLE_SECONDS = 0.05
_PARTING_SECONDS = 3.0
_NO_MEMORY = "no memory to receive"
_SHORTAGES = ("can't allocate memory", "can't start new thread", _NO_MEMORY)  # texts of errors
_LONGEST = 64 << 10  # characters of an error that a HELLO tells


class Receiver:
    """Keeps one model at the version its sender last sent.

    Call sequence: :meth:`connect` joins the sender and applies the first weights; :meth:`start` then runs
    a background thread that applies updates as they come; :meth:`close` ends it.

    Args:
        link: this end of the link.
        strategy: how weights enter the model.
        gate: when they may.
        model: module, TensorDict, dict or :class:`~weight_update.InferenceEngine` to keep current; None only
            keeps the weights for :meth:`receive`.
        worker: index of this receiver.
        token: what lets it in.
        instance: random; tells this receiver from others that join as ``worker``.
        stable_addresses: copy into the model's tensors instead of pointing them at received memory.
        timeout: seconds that an update waits for the running forward pass to end.
        on_switched: called with the version at the moment it becomes visible, inside the gate.
        on_applied: called with version and what gives the weights, after that and outside the gate, before
            the sender hears of it.

    Attributes:
        error: why nothing more comes.
    """

    def __init__(
        self,
        *,
        link: TransportBackend,
        strategy: WeightStrategy,
        gate: Gate,
        model: Any,
        worker: int,
        token: str,
        instance: str,
        stable_addresses: bool,
        timeout: float,
        on_switched: Callable[[int], None],
        on_applied: Callable[[int, Callable[[], NamedWeights]], None],
    ) -> None:
        self.link, self.gate, self.worker = link, gate, worker
        self.error: Exception | None = None
        self._strategy, self._token, self._timeout = strategy, token, timeout
        self._instance = instance
        self._on_switched, self._on_applied = on_switched, on_applied
        self._to = Destination(strategy, gate, stable_addresses=stable_addresses, release=link.release)
        self._unwanted: int | None = None  # a version that failed: the rest of it is not read
        self._left: list[torch.Tensor] = []  # payloads switched away from, not yet released
        self._applied = 0
        self._greeted = False  # whether the last attempt to join reached the sender
        self._welcomed = False  # whether the last attempt to join was successful
        self._pid = os.getpid()
        self._returned: int | None = None
        self._news = threading.Condition()
        self._thread: threading.Thread | None = None
        self._closing = False
        self._busy = threading.RLock()  # held while a frame is handled and answered
        self._model = model  # until it is bound

    # -- joining -----------------------------------------------------------------------------------

    def bind(self, model: Any) -> None:
        """Keep ``model`` current from now on, beginning with the version that is in force.

        Raises:
            LifecycleError, UnsupportedSourceError, SchemaMismatchError: see :meth:`Destination.bind`.
        """
        self._model = None
        self._to.bind(model, self._timeout)

    def guard_outside(self) -> None:
        """The caller holds the gate around every forward pass itself; drop the hooks of the model."""
        self._to.guard_outside()

    def connect(self, timeout: float, *, again: bool = False) -> None:
        """Join the sender and apply the weights it has now.

        Args:
            timeout: seconds.
            again: this receiver has weights, and keeps them if the sender has none to give now.

        Raises:
            UnsupportedSourceError: the model has weights that cannot be synchronized.
            SchemaMismatchError: the model's weights are not the sender's; both sides stay usable.
            JoinRefusedError: the sender does not let this worker in.
            SyncTimeoutError: it did not answer within ``timeout`` seconds.
            TransportError: it cannot be reached.
        """
        try:
            with torch.inference_mode(False):  # what is allocated here is written to by the thread, too
                self._join(timeout, again)
        except BaseException:
            self._to.forget()
            raise

    def _join(self, timeout: float, again: bool) -> None:
        deadline = time.monotonic() + timeout
        self._greeted = self._welcomed = False
        try:
            if self._model is not None:
                self.bind(self._model)
            wanted = self._to.wanted()
        except Exception as reason:
            with contextlib.suppress(TransportError, TimeoutError):
                self._greet(deadline, None, reason, again)
            raise
        self._greet(deadline, wanted, None, again)
        self._greeted = True
        reply = self._expect(deadline)
        while reply.kind in (Kind.UPDATE, Kind.COMMIT, Kind.ABORT):  # meant for the worker before this one
            reply = self._expect(deadline)
        if reply.kind is Kind.REFUSED:
            raise _refusal(reply)
        if reply.kind is not Kind.WELCOME:
            raise FormatError(f"expected WELCOME, got {reply.kind.name}")
        applied = self._applied
        error = self._handle(reply)
        self._welcomed = error is None
        if error is None and again and reply.header["version"] is None:
            return  # nothing will come before the next send()
        while error is None and self._applied == applied:
            error = self._handle(self._expect(deadline))
        if error is not None and again and self._welcomed:
            _log.warning("worker %d keeps version %s: %s", self.worker, self.version, error)
        elif error is not None:
            raise error

    def _greet(
        self, deadline: float, wanted: WeightSchema | None, error: Exception | None, again: bool
    ) -> None:
        """Say hello: with what the model wants, or why it cannot join."""
        hello = {
            "token": self._token,
            "worker": self.worker,
            "pid": os.getpid(),
            "version": self.version,
            "schema": None if wanted is None else wanted.to_header(),
            "error": None if error is None else "\n\n".join(_told(error))[:_LONGEST],
            "instance": self._instance,
            "again": again,
        }
        self.link.restart(seconds_left(deadline))
        self.link.send_chunk(WeightChunk(Kind.HELLO, hello), seconds_left(deadline))

    def start(self) -> None:
        """Apply updates in a background thread from now on."""
        self._thread = threading.Thread(
            target=self._run, name=f"weight_update-receiver-{self.worker}", daemon=True
        )
        self._thread.start()

    def abandon(self) -> None:
        """Give up after a failed :meth:`connect`, leaving the link open."""
        self._to.unguard()

    def close(self) -> None:
        """Leave; the model keeps the version it has."""
        if os.getpid() != self._pid:
            return  # a forked child does not speak for its parent
        self._closing = True
        self.gate.look_again()  # shutdown() inside hold() does not wait for its end
        with contextlib.ExitStack() as rest:  # all steps are taken whatever one raises, in reverse order
            rest.callback(self._wake_waiting)
            rest.callback(self._to.close)
            rest.callback(self._end_thread)
            rest.callback(self.link.close)
            # The sender hears what was applied, then goodbye.
            if self._busy.acquire(timeout=_GOODBYE_SECONDS):
                rest.callback(self._busy.release)
                rest.callback(self._to.forget)
                rest.callback(self._say_goodbye)
                self._move_out()

    def _say_goodbye(self) -> None:
        with contextlib.suppress(TransportError, TimeoutError):  # the sender may have left first
            self.link.send_chunk(WeightChunk(Kind.GOODBYE, {}), _GOODBYE_SECONDS)

    def _end_thread(self) -> None:
        if self._thread is not None and self._thread is not threading.current_thread():
            self._thread.join(5.0)
        self._left = []

    def _wake_waiting(self) -> None:
        with self._news:
            self._news.notify_all()

    # -- updates -----------------------------------------------------------------------------------

    def receive(self, timeout: float | None) -> Any | None:
        """The weights of the next version that was not returned yet, or None on timeout.

        Raises:
            LinkClosedError: the sender is gone and nothing new is left.
        """
        return self._strategy.export(self.weights()) if self.await_next(timeout) else None

    def await_next(self, timeout: float | None) -> bool:
        """As :meth:`receive`, without making anything of the weights: whether there is a next version."""
        with self._news:
            self._news.wait_for(lambda: self._has_news or self.error or self._closing, timeout)
            if not self._has_news:
                if self.error is not None:
                    raise self.error
                return False
            self._returned = self.version
            return True

    @property
    def version(self) -> int | None:
        """The one in force; None before the first, and after an engine failed to load one."""
        return self._to.version

    @property
    def _has_news(self) -> bool:
        return self.version is not None and self.version != self._returned

    def mark_returned(self) -> None:
        """Let :meth:`receive` wait for versions after the one in force."""
        self._returned = self.version

    def weights(self) -> NamedWeights:
        """See :meth:`Destination.weights`."""
        return self._to.weights()

    def _run(self) -> None:
        while not self._closing:
            try:
                chunk = self._next(_IDLE_SECONDS if self._left else None)
                if chunk is None:
                    self._tidy()
                elif chunk.kind is Kind.GOODBYE:
                    self._end(LinkClosedError("the sender was shut down"))
                    return
                with self._busy:
                    refused = None if chunk is None or self._closing else self._handle(chunk)
                if refused is not None:
                    without_frames(refused)
            except NotEnoughMemoryError as error:  # the sender was told; there may be enough for the next
                _log.warning("worker %d keeps version %s: %s", self.worker, self.version, error)
            except (TransportError, FormatError, TimeoutError) as error:
                if isinstance(error, FormatError):
                    _log.warning("worker %d joins again, because of what came: %s", self.worker, error)
                reason = error if self._closing else self._rejoin(error)
                if reason is not None:
                    self._end(reason)
                    return
            except Exception as error:  # noqa: BLE001 - the thread ends in order, whatever it is
                _log.exception("worker %d: receiving updates ended", self.worker)
                try:
                    self.link.disconnect()  # the sender learns of it, if it lives
                finally:
                    self._end(error)
                return
        with self._busy:
            self._to.forget()

    def _next(self, timeout: float | None) -> WeightChunk | None:
        """Return the next frame; the sender hears of one whose payload cannot be reached here."""
        try:
            return self.link.recv_chunk(timeout, self._allocate)
        except (UnreachableMemoryError, MemoryError) as error:
            version = getattr(error, "version", None)
            if version is None:  # a part of a frame is lost, and nobody knows of which
                self.link.disconnect()
                raise LinkClosedError(f"{_NO_MEMORY} ({error})") from None
            with self._busy:
                if version != self._unwanted:
                    self._refuse(version, error)
            raise

    def _allocate(self, nbytes: int) -> torch.Tensor:
        """See :meth:`Destination.allocate`."""
        try:
            return self._to.allocate(nbytes)
        except (RuntimeError, MemoryError) as error:
            raise _named(error) from None

    def _end(self, error: Exception) -> None:
        with self._news:
            self.error = without_frames(error)
            self._news.notify_all()
        with self._busy, contextlib.ExitStack() as rest:
            if self.link.lends:
                rest.callback(self.link.close)  # the sender waits for that
                rest.callback(self._move_out)
            self._to.forget()

    def _move_out(self) -> None:
        """Take the weights out of memory that ends with the sender, and refer to none of it any more."""
        if not self.link.lends:
            return
        self._to.drop_views()
        self._to.forget()
        self._left = []
        if not self._to.lies_in_payloads:
            return
        ending = threading.current_thread() is self._thread
        try:
            try:
                self.gate.run(self._to.own, _PARTING_SECONDS, lambda: ending and self._closing)
            except LifecycleError:  # shutdown() inside hold(): this thread computes nothing now
                self._to.own()
        except LinkClosedError:
            _log.debug("worker %d: left to shutdown(), which has begun", self.worker)
        except (SyncTimeoutError, torch.OutOfMemoryError) as error:
            _log.warning(
                "worker %d: the weights stay in the sender's memory, and are gone when its process ends: %s",
                self.worker,
                error,
            )

    def _rejoin(self, lost: Exception) -> Exception | None:
        """Join again after ``lost``; return the error that ends this receiver, or None."""
        deadline = time.monotonic() + _REJOIN_SECONDS
        while True:
            try:
                with self._busy:
                    self.connect(_ATTEMPT_SECONDS, again=True)
                return None
            except (JoinRefusedError, SchemaMismatchError) as refusal:
                self.link.disconnect()
                return refusal
            except Exception as error:  # noqa: BLE001 - the thread ends in order, whatever it is
                if self._welcomed and isinstance(error, NotEnoughMemoryError):  # the sender was told
                    _log.warning("worker %d keeps version %s: %s", self.worker, self.version, error)
                    return None
                self.link.disconnect()  # the sender learns of it, if it lives
                if not self._tries_again_after(error, deadline):
                    return lost

    def _tries_again_after(self, error: Exception, deadline: float) -> bool:
        """Return whether to join again after an attempt failed; wait a moment first.

        A sender that answered, or did not answer in time, may still live: a link that fails during an attempt
        ends only that attempt. A sender that cannot be reached at all is gone.
        """
        if not isinstance(_named(error), NotEnoughMemoryError):
            if not isinstance(error, TransportError | FormatError | TimeoutError):
                _log.warning("worker %d could not join again", self.worker, exc_info=error)
                return False
            if not self._greeted and not isinstance(error, TimeoutError):
                return False
        time.sleep(_RETRY_SECONDS)
        return time.monotonic() < deadline and not self._closing

    def _expect(self, deadline: float) -> WeightChunk:
        left = deadline - time.monotonic()
        chunk = self._next(left) if left > 0 else None
        if chunk is None:
            raise SyncTimeoutError(
                f"worker {self.worker}: the sender did not answer in time; has it called connect()?"
            )
        return chunk

    def _handle(self, chunk: WeightChunk) -> Exception | None:
        """Act on one frame; an error goes to the sender and is returned."""
        version = chunk.header.get("version") or 0  # a WELCOME has None where there is no version yet
        try:
            if chunk.kind is Kind.UPDATE:
                try:
                    self._update(chunk)
                except Behind as reason:
                    _log.warning("worker %d asks for all weights: %s", self.worker, reason)
                    self._to.forget()
                    self.link.send_chunk(WeightChunk(Kind.BEHIND, {"version": version}), self._timeout)
            elif chunk.kind is Kind.COMMIT:
                self._commit(version)
            elif chunk.kind is Kind.ABORT:
                if self._to.forget(version):  # an engine had taken a part of it
                    self.link.send_chunk(WeightChunk(Kind.BEHIND, {"version": version}), self._timeout)
            elif chunk.kind is Kind.WELCOME:  # the answer to an earlier attempt came late; this one follows
                self._to.begin_with(chunk.header)
            else:
                raise FormatError(f"unexpected {chunk.kind.name} frame")
        except (TransportError, FormatError):
            raise
        except Exception as reason:  # noqa: BLE001 - whatever it is, the sender must hear of it
            error = _named(reason)
            self._refuse(version, error)
            return error
        return None

    def _refuse(self, version: int, error: Exception) -> None:
        """Keep the version in force, and tell the sender why ``version`` cannot be applied."""
        self._to.forget()
        self._unwanted = version
        summary, text = _told(error)
        failed = {
            "version": version,
            "error": summary,
            "traceback": text,
            "kept": self.version is not None,
        }
        self.link.send_chunk(WeightChunk(Kind.FAILED, failed), self._timeout)

    def _update(self, chunk: WeightChunk) -> None:
        header = chunk.header
        if header["index"] == 0:
            self._unwanted = None
        if header["version"] == self._unwanted:
            if chunk.payload is not None:
                self.link.release(chunk.payload)
            return
        self._tidy()
        before = self._to.current
        whole = self._to.take(chunk)
        if whole is None:
            self._say_taken(header)
        elif whole is self._to.current:  # an engine took it as it came
            self._in_force(whole)
            self._after(whole, whole.seconds, before)
        elif header["commit"]:
            self._commit(header["version"])
        else:
            staged = WeightChunk(Kind.STAGED, {"version": header["version"]})
            self.link.send_chunk(staged, self._timeout)

    def _say_taken(self, header: Mapping[str, Any]) -> None:
        taken = {"version": header["version"], "index": header["index"]}
        self.link.send_chunk(WeightChunk(Kind.TAKEN, taken), self._timeout)

    def _tidy(self) -> None:
        """Let go of the memory that the last update left; not at once, while others still wait for a core."""
        for payload in self._left:
            self.link.release(payload)
        self._left = []

    def _commit(self, version: int) -> None:
        staged, self._to.staged = self._to.staged, None
        if staged is None or staged.version != version:
            raise LinkClosedError(f"version {version} is to be applied but was not received")
        before = self._to.current
        if staged.group is None:
            stall = self._through_gate([(self, staged)])
        else:
            key, size = f"{staged.group}:{self.worker}", int(staged.group.rpartition("/")[2])
            stall = run_jointly(key, size, (self, staged), self._through_gate, 2 * self._timeout)
        self._after(staged, stall, before)

    def _through_gate(self, members: list[tuple[Receiver, Staged]]) -> float:
        return self.gate.run(lambda: self._apply_all(members), self._timeout, lambda: self._closing)

    @staticmethod
    def _apply_all(members: list[tuple[Receiver, Staged]]) -> None:
        """Inside the gate: all members switch, or none."""
        begun: list[Staged] = []
        try:
            for receiver, staged in members:
                receiver._to.begin(staged)
                begun.append(staged)
        except BaseException:
            for staged in begun:
                staged.undo()
            raise
        for receiver, staged in sorted(members, key=lambda one: not one[0]._to.fails_late):
            receiver._to.switch(staged)
            receiver._in_force(staged)

    def _in_force(self, staged: Staged) -> None:
        self._applied += 1
        self._on_switched(staged.version)

    def _after(self, staged: Staged, stall: float, before: Staged | None) -> None:
        with self._news:
            self._news.notify_all()
        self._on_applied(staged.version, functools.partial(self._to.named, staged))
        applied = {
            "version": staged.version,
            "apply_seconds": time.perf_counter() - staged.arrived,
            "stall_seconds": stall,
        }
        self.link.send_chunk(WeightChunk(Kind.APPLIED, applied), self._timeout)
        self._left = [*staged.used_up, *(before.payloads if before is not None else ())]
        self._left = [memory for memory in self._left if all(memory is not one for one in staged.payloads)]


def _told(error: Exception) -> tuple[str, str]:
    """What the sender hears of an error: in short, and where it came from."""
    return f"{type(error).__name__}: {error}", "".join(traceback.format_exception(error))


def _named(error: Exception) -> Exception:
    """Return ``error``, or a NotEnoughMemoryError where it says that there is no memory."""
    if isinstance(error, NotEnoughMemoryError):
        return error
    short = isinstance(error, MemoryError | torch.OutOfMemoryError) or any(
        text in str(error) for text in _SHORTAGES
    )
    if not short and getattr(error, "errno", None) != errno.ENOMEM:
        return error
    named = NotEnoughMemoryError(f"no memory for this update: {type(error).__name__}: {error}")
    named.__cause__ = error
    return named


def _refusal(reply: WeightChunk) -> Exception:
    problems = tuple(str(line) for line in reply.header["problems"])
    if problems:
        return SchemaMismatchError(reply.header["reason"], problems)
    return JoinRefusedError(f"the sender refused this worker: {reply.header['reason']}")
