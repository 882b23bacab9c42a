"""Acting on the frames of one sender: staging updates, applying them, and answering."""

from __future__ import annotations

import contextlib
import errno
import logging
import threading
import time
import traceback
from collections.abc import Callable, Mapping
from typing import Any

import torch

from weight_update.encodings.base import UnknownEncodingError
from weight_update.errors import (
    FormatError,
    LifecycleError,
    LinkClosedError,
    NotEnoughMemoryError,
    SyncTimeoutError,
    TransportError,
    UnreachableMemoryError,
    WorkerError,
    without_frames,
)
from weight_update.receiver.flat_buffers import MissingBaseError
from weight_update.receiver.group_commit import commit_group
from weight_update.receiver.staging import ReceiverOptions, Staging
from weight_update.receiver.targets import StagedUpdate
from weight_update.threads import InterruptibleCondition
from weight_update.wire.frames import Kind, WeightChunk, require_chunk

_log = logging.getLogger(__name__)
_PARTING_SECONDS = 3.0
_NO_MEMORY = "no memory to receive"
_MEMORY_ERRORS = ("can't allocate memory", "can't start new thread", _NO_MEMORY)  # texts of errors


class UpdateHandler:
    """Stages the updates of one sender, applies them inside the gate, and answers the sender."""

    def __init__(self, options: ReceiverOptions, closing: threading.Event) -> None:
        self.staging = Staging(options)
        self.applied = 0  # number of updates that were applied
        self.busy = threading.RLock()  # held while a frame is handled and answered
        self.answering = False  # whether an update is in force whose answer is not sent yet
        self.news = InterruptibleCondition()  # notified when an update was applied
        self._link, self._gate, self._worker = options.link, options.gate, options.worker
        self._timeout, self._closing, self._options = options.timeout, closing, options
        self._unwanted: int | None = None  # a version that failed: its other chunks are not read
        self._patient = False  # not while the receiver joins: that has a limit
        self.leftovers: list[torch.Tensor] = []  # memory of the last update that is still to be released

    # -- frames ------------------------------------------------------------------------------------

    def next_frame(self, timeout: float | None) -> WeightChunk | None:
        """Return the next frame; tell the sender if the frame's payload cannot be reached here."""
        try:
            return require_chunk(self._link.recv_chunk(timeout, self.allocate), self._link)
        except (UnreachableMemoryError, MemoryError) as error:
            self.refuse_unread(error)
            raise

    def refuse_unread(self, error: Exception) -> None:
        """Tell the sender if ``error`` is that the payload of the next frame cannot be reached here."""
        if not isinstance(error, UnreachableMemoryError | MemoryError):
            return
        version = getattr(error, "version", None)
        if version is None:  # a part of a frame is lost, and the version it belongs to is not known
            self._link.disconnect()
            raise LinkClosedError(f"{_NO_MEMORY} ({error})") from None
        with self.busy:
            if version != self._unwanted:
                self._refuse(version, error)

    def allocate(self, nbytes: int) -> torch.Tensor:
        """Return memory for the payload of a frame."""
        try:
            return self.staging.allocate(nbytes)
        except (RuntimeError, MemoryError) as error:
            raise as_memory_error(error) from None

    def act(self, chunk: WeightChunk | None) -> bool:
        """Act on the frame that came, or on the lack of one; return False if the sender was shut down.

        Raises:
            TransportError, FormatError: as :meth:`handle`.
        """
        if chunk is None:
            self._release_leftovers()
            return True
        if chunk.kind is Kind.GOODBYE:
            return False
        with self.busy:
            self._patient = self._options.late_updates_wait
            try:
                refused = None if self._closing.is_set() else self.handle(chunk)
            finally:
                self._patient = False
        if refused is not None:
            _log.warning("worker %d %s: %s", self._worker, kept(self.staging.version), refused)
            without_frames(refused)
        return True

    def handle(self, chunk: WeightChunk) -> Exception | None:
        """Act on one frame. An exception of the model or of its engine goes to the sender and is returned.

        Raises:
            TransportError: the connection is lost, or must be made anew.
            FormatError: the frame is not valid.
        """
        version = chunk.header.get("version") or 0  # a WELCOME has None where there is no version yet
        try:
            if chunk.kind is Kind.UPDATE:
                try:
                    self._update(chunk)
                except MissingBaseError as reason:
                    _log.warning("worker %d asks for all weights: %s", self._worker, reason)
                    self.staging.forget()
                    self._answer(Kind.BEHIND, {"version": version})
            elif chunk.kind is Kind.COMMIT:
                self._commit(version)
            elif chunk.kind is Kind.ABORT:
                if self.staging.forget(version):  # an engine had loaded a part of it
                    self._answer(Kind.BEHIND, {"version": version})
            elif chunk.kind is Kind.WELCOME:  # a late answer to an earlier attempt to join
                self.staging.begin_with(chunk.header)
            else:
                raise FormatError(f"unexpected {chunk.kind.name} frame")
        except BaseException as reason:
            if not _is_of_the_update(reason):
                raise
            return self._refuse(version, as_memory_error(_as_exception(reason)))
        finally:
            self.answering = False
        return None

    def _refuse(self, version: int, error: Exception) -> Exception:
        """Keep the version in force, and tell the sender that ``version`` failed; return ``error``."""
        self.staging.forget()
        self._unwanted = version
        summary, text = summary_of(error)
        # Weights that the worker wrote into are of no version; they may be another model's of the group. An
        # engine that loaded this version before another engine of the group failed does not go back.
        kept = self.staging.version not in (None, version) and not isinstance(error, MissingBaseError)
        self._answer(Kind.FAILED, {"version": version, "error": summary, "traceback": text, "kept": kept})
        return error

    def _answer(self, kind: Kind, header: Mapping[str, Any]) -> None:
        """Answer the sender. If that has left, the rest of what it sent is read first, and then the end."""
        with contextlib.suppress(LinkClosedError):
            self._link.send_chunk(WeightChunk(kind, header), self._timeout)

    # -- updates -----------------------------------------------------------------------------------

    def _update(self, chunk: WeightChunk) -> None:
        header = chunk.header
        if header["index"] == 0:
            self._unwanted = None
        if header["version"] == self._unwanted:
            if chunk.payload is not None:
                self._link.release(chunk.payload)
            return
        self._release_leftovers()
        update = self.staging.take(chunk)
        if update is None:
            self._answer(Kind.TAKEN, {"version": header["version"], "index": header["index"]})
        elif update is self.staging.current:  # an engine loaded it chunk by chunk
            self._in_force()
            self._finish(update)
        elif header["commit"]:
            self._commit(header["version"])
        else:
            self._answer(Kind.STAGED, {"version": header["version"]})

    def _commit(self, version: int) -> None:
        update, self.staging.staged = self.staging.staged, None
        if update is None and version in (self.staging.version, self._unwanted):
            return  # the sender was interrupted, and tells every worker again
        if update is None or update.version != version:
            raise LinkClosedError(f"version {version} is to be applied but was not received")
        if update.group is None:
            update.stall = self._through_gate([(self, update)])
        else:
            key, size = f"{update.group}:{self._worker}", int(update.group.rpartition("/")[2])
            update.stall = commit_group(key, size, (self, update), self._through_gate, 2 * self._timeout)
        self._finish(update)

    def _through_gate(self, members: list[tuple[UpdateHandler, StagedUpdate]]) -> float:
        """Apply the updates of all members at one moment; return the seconds that forward passes waited.

        The sender does not wait for a hold or a forward pass that takes longer than the timeout, but the
        updates do. Other forward passes, which may be needed to end it, begin after each timeout.
        """
        if {handler._gate for handler, _ in members} != {self._gate}:
            raise LifecycleError(
                "this worker's schemes of the models that are sent together are not in one group: call "
                "group_schemes([...]) on them before connect()"
            )
        begun: list[bool] = []

        def apply() -> None:
            begun.append(True)
            _apply(members)

        def given_up() -> bool:
            return any(handler._closing.is_set() for handler, _ in members)

        level = logging.WARNING  # once
        while True:
            try:
                return self._gate.run(apply, self._timeout, given_up)
            except SyncTimeoutError as error:
                if begun or not self._patient:  # if begun, it is an error of the model or of its engine
                    raise
                held = kept(self.staging.version)
                _log.log(level, "worker %d %s until it goes on: %s", self._worker, held, error)
                level = logging.DEBUG

    def _in_force(self) -> None:
        self.applied += 1
        self.answering = True
        if (observer := self._options.observer) is not None:  # any thread may set it to None
            observer.switched()

    def _finish(self, update: StagedUpdate) -> None:
        """Tell everyone concerned that an update is in force."""
        try:
            if (observer := self._options.observer) is not None:
                observer.applied(update.named)
            seconds = {"apply_seconds": time.perf_counter() - update.arrived, "stall_seconds": update.stall}
            self._answer(Kind.APPLIED, {"version": update.version, **seconds})
            self.answering = False
        finally:
            with self.news:  # last: a thread that wakes up takes the interpreter from the answer
                self.news.notify_all()
        update.storage.settle()

    # -- memory ------------------------------------------------------------------------------------

    def _release_leftovers(self) -> None:
        """Release the memory of the last update; not at once, while other workers still need a core."""
        for payload in self.leftovers:
            self._link.release(payload)
        self.leftovers = []

    def leave_payloads(self, given_up: Callable[[], bool]) -> None:
        """Take the weights out of memory that ends with the sender, and refer to none of it any more.

        The wait for running forward passes ends when ``given_up()`` is true.
        """
        if not self._link.capabilities.payloads_die_with_sender:
            return
        self.staging.forget()
        self.leftovers = []
        if not self.staging.lies_in_payloads:
            return
        try:
            try:
                self._gate.run(self.staging.leave_payloads, _PARTING_SECONDS, given_up)
            except LifecycleError:  # shutdown() inside hold(): this thread computes nothing now
                self.staging.leave_payloads()
        except LinkClosedError:
            _log.debug("worker %d: shutdown() has begun and leaves the payloads", self._worker)
        except (SyncTimeoutError, torch.OutOfMemoryError) as error:
            _log.warning(
                "worker %d: the weights stay in the sender's memory, and are gone when its process ends: %s",
                self._worker,
                error,
            )


def _apply(members: list[tuple[UpdateHandler, StagedUpdate]]) -> None:
    """Switch all members, or none. Called inside the gate."""
    begun: list[StagedUpdate] = []
    try:
        for handler, update in members:
            handler.staging.begin(update)
            begun.append(update)
        # An engine may still refuse, so engines come first.
        for handler, update in sorted(members, key=lambda one: not one[0].staging.target.takes_over):
            handler.staging.switch(update)
            update.undo = lambda: None
            handler.leftovers, update.used_up = handler.leftovers + update.used_up, []
            handler._in_force()  # an observer may raise
    except BaseException:
        for update in begun:
            update.undo()
        raise


def _is_of_the_update(reason: BaseException) -> bool:
    """Return whether one update failed, rather than the connection, or the program by a signal handler.

    Signal handlers run in the main thread. In another thread ``sys.exit()`` would end that thread in silence.
    """
    if isinstance(reason, TransportError | FormatError):
        return isinstance(reason, UnknownEncodingError)
    return isinstance(reason, Exception) or threading.current_thread() is not threading.main_thread()


def _as_exception(reason: BaseException) -> Exception:
    """Return ``reason``, or a WorkerError if it is no Exception or its message cannot be read."""
    try:
        text = f"applying the update ended with {reason!r}; a model must raise an Exception instead"
        str(reason)
    except Exception as failure:  # noqa: BLE001 - __str__ or __repr__ may raise anything
        text = f"{type(reason).__name__}, whose message cannot be read ({type(failure).__name__})"
    else:
        if isinstance(reason, Exception):
            return reason
    error = WorkerError(text)
    error.__cause__ = reason
    return error


def kept(version: int | None) -> str:
    """Return what a worker has, for the log, after an update that it did not apply."""
    return "has no complete version" if version is None else f"keeps version {version}"


def summary_of(error: Exception) -> tuple[str, str]:
    """Return what the sender is told of an error: one line, and the traceback."""
    return f"{type(error).__name__}: {error}", "".join(traceback.format_exception(error))


def as_memory_error(error: Exception) -> Exception:
    """Return ``error``, or a NotEnoughMemoryError if lack of memory is what it reports."""
    if isinstance(error, NotEnoughMemoryError):
        return error
    short = isinstance(error, MemoryError | torch.OutOfMemoryError) or any(
        text in str(error) for text in _MEMORY_ERRORS
    )
    if not short and getattr(error, "errno", None) != errno.ENOMEM:
        return error
    named = NotEnoughMemoryError(f"no memory for this update: {type(error).__name__}: {error}")
    named.__cause__ = error
    return named
