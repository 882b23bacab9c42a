"""Frames to workers and from them. A worker that cannot be reached is marked as lost."""

from __future__ import annotations

import logging
import threading
import time
import weakref
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Literal

import torch

from weight_update.errors import (
    FormatError,
    LinkClosedError,
    NotEnoughMemoryError,
    SyncTimeoutError,
    TransportError,
    WorkerError,
    without_frames,
)
from weight_update.progress import Progress
from weight_update.report import SyncReport, WorkerEvent
from weight_update.sender.buffers import MIXED, ChunkedUpdate, EncodedUpdate, are_short
from weight_update.sender.workers import NOBODY, GroupAssignment, Outbox, WorkerState, WorkerTable
from weight_update.text import format_seconds
from weight_update.threads import start_thread
from weight_update.transports.base import TransportBackend
from weight_update.transports.rate_limit import RateLimitedLog
from weight_update.wire.frames import Kind, WeightChunk, require_chunk

_log = logging.getLogger(__name__)
_GOODBYE_SECONDS = 1.0
_ABSENT_SECONDS = 60.0
"""Seconds that a late joiner which was refused, or lost, has to come back on its connection."""
_END_SECONDS = 5.0
_SHUT_DOWN = "the sender was shut down"
_PAUSE_SECONDS = 1.0  # after an error that is none of a link


class Delivery:
    """Writes frames to workers, and the updates that their send groups have for them.

    The caller's thread writes short frames to links whose ``send_chunk`` never blocks. All else is written by
    an :class:`Outbox`, which a worker gets when it is needed.
    """

    def __init__(self, table: WorkerTable, timeout: float) -> None:
        self.timeout = timeout
        self._table, self.lock, self.changed = table, table.lock, table.changed
        self._closed = False
        # By version: the report, and the payloads that workers share and that are counted.
        self._reports: dict[int, tuple[weakref.ref[SyncReport], set[int]]] = {}

    def count_in(self, report: SyncReport) -> None:
        """Count the bytes that workers are sent of a version in its report, as long as that is in use."""
        with self._table.lock:
            self._reports = {key: one for key, one in self._reports.items() if one[0]() is not None}
            self._reports[report.version] = weakref.ref(report), set()

    def update(self, *workers: WorkerState) -> None:
        """Send workers the updates they lack, unless they are busy, without waiting for slow links.

        Call this whenever that may have changed.
        """
        unwritten: dict[WorkerState, int] = {}  # workers whose update is not written, and their connections
        try:
            slow: list[tuple[WorkerState, EncodedUpdate]] = []
            for worker in workers:
                if (update := self._load(worker, unwritten)) is None:
                    continue
                if worker.link.capabilities.send_never_blocks:
                    self._deliver(worker, update, unwritten)
                else:
                    slow.append((worker, update))
            if len(slow) > 1:
                _announce(slow)
            for worker, update in slow:
                self._deliver(worker, update, unwritten)
        except BaseException as error:
            for worker, connection in unwritten.items():
                self.lose(worker, _as_exception(error), connection)
            raise

    def post(self, worker: WorkerState, write: Callable[[], None], chunks: Sequence[WeightChunk]) -> None:
        """Call ``write``, which writes ``chunks``, if that cannot block; else have the outbox call it.

        An error in the outbox loses the worker.
        """
        if worker.link.capabilities.send_never_blocks and not worker.writing and are_short(chunks):
            write()
        else:
            self._put(worker, write)

    def _put(self, worker: WorkerState, write: Callable[[], None]) -> None:
        """Have the outbox of a worker call ``write``."""
        try:
            with self._table.lock:
                if not worker.joined:
                    return
                outbox = worker.outbox
                if outbox is None:
                    outbox = worker.outbox = Outbox(worker.idx, self.changed)
                if self._closed:  # the sender's close() may not have seen the outbox
                    outbox.close()
                    worker.outbox = None
                    raise RuntimeError(_SHUT_DOWN)
                outbox.put(partial(self._run, worker, write))
        except RuntimeError as error:
            self.lose(worker, LinkClosedError(f"no thread writes to it: {error}"))

    def _run(self, worker: WorkerState, write: Callable[[], None]) -> None:
        update = worker.inflight
        total = 0 if update is None else sum(chunk.payload_bytes for chunk in update.chunks)
        try:
            with Progress(f"sending weights to worker {worker.idx}", total):
                write()
        except Exception as error:  # noqa: BLE001 - any error must reach the callers that wait
            _log.exception("sending to worker %d ended", worker.idx)
            self.lose(worker, error)

    def send(self, worker: WorkerState, chunks: Iterable[WeightChunk]) -> None:
        """Write frames; if that fails, the worker has left, is lost, or will be.

        The caller holds ``worker.sending``.
        """
        connection = worker.connections
        try:
            for chunk in chunks:
                worker.link.send_chunk(chunk, self.timeout)
        except (TransportError, TimeoutError, NotEnoughMemoryError) as error:
            self._lose_unless_it_left(worker, error, connection)
        except BaseException as error:  # of a signal handler, perhaps in the middle of a frame
            self.lose(worker, _as_exception(error), connection)
            raise

    def broadcast(self, states: Iterable[WorkerState], chunk: WeightChunk) -> None:
        """Write one frame to each worker that is connected; a worker for which that fails is lost."""
        for worker in states:
            if worker.joined:
                with worker.sending:
                    self.send(worker, [chunk])

    def lose(self, worker: WorkerState, error: Exception, connection: int | None = None) -> None:
        """Mark a worker as lost, and cut its link unless that failed by itself.

        ``connection`` is ``worker.connections`` before the call that failed; None is the present one. A
        worker that has joined again since is not lost: the connection that failed is not its present one.
        """
        with self._table.lock:
            if connection not in (None, worker.connections):
                return
            # Observers hear of a replaced worker only if its successor ends before it is welcomed.
            departed = worker.joined is not worker.replaced and not self._closed
            worker.replaced &= worker.joined
            pid, version, left = worker.pid, worker.version, worker.left
            if worker.leaving:  # an earlier connect() has raised the error; this one waits for the worker
                worker.lost = None
            elif worker.joined or worker.lost is None:
                shut_down = self._table.closed  # the worker is not to blame
                worker.lost = LinkClosedError(_SHUT_DOWN) if shut_down else without_frames(error)
            worker.mark_disconnected()
            self.changed.notify_all()
        if departed:
            _log.info("worker %d (process %d) %s", worker.idx, pid, "left" if left else f"was lost: {error}")
            reason = "" if left else str(error)
            kind: Literal["left", "lost"] = "left" if left else "lost"
            self._table.tell(WorkerEvent(kind, worker.idx, version, reason, late_joiner=worker.late))
        if not isinstance(error, TransportError):
            worker.link.disconnect()

    def _lose_unless_it_left(self, worker: WorkerState, error: Exception, connection: int) -> None:
        """Mark a worker as lost, unless its GOODBYE, which is read in a moment, tells that it left."""
        if isinstance(error, LinkClosedError):
            if threading.current_thread() is worker.thread:
                return  # this thread reads on, and finds the end
            with self._table.lock:
                self.changed.wait_for(
                    lambda: not worker.joined or worker.connections != connection, _GOODBYE_SECONDS
                )
        self.lose(worker, error, connection)

    def close(self) -> None:
        """Send no more updates, once all workers were told goodbye; workers leave because of that."""
        self._closed = True

    def _load(self, worker: WorkerState, unwritten: dict[WorkerState, int]) -> EncodedUpdate | None:
        """Make the update that ``worker`` lacks the one in flight to it; without memory for it, lose it.

        ``unwritten`` has the worker until the update is written, or left to its outbox.
        """
        while True:
            with self._table.lock:
                group = worker.group
                if not worker.joined or worker.inflight is not None or group is None or worker.lacks is None:
                    return None
                update = group.update_for(worker.has, together=worker.together)
                if update is not None:
                    if worker.has is not None and group.sends_changes and update in group.kept:
                        reason = "it lacks the version that changes refer to"
                        if worker.has is MIXED:
                            reason = "changes cannot be applied to the weights that it has"
                        self._table.tell(WorkerEvent("full_update", worker.idx, update.version, reason))
                    unwritten[worker] = worker.connections
                    worker.inflight = update
                    worker.sent_at = time.monotonic()
                    self._count(update, worker.link.capabilities.shares_memory)
                    return update
            try:
                group.prepare()
            except NotEnoughMemoryError as error:
                self.lose(worker, error)
                return None

    def _deliver(self, worker: WorkerState, update: EncodedUpdate, unwritten: dict[WorkerState, int]) -> None:
        """Write the update in flight, or have the outbox of the worker do that."""
        self.post(worker, partial(self._transmit, worker, update), update.chunks)
        unwritten.pop(worker, None)

    def _count(self, update: EncodedUpdate, shared: bool) -> None:
        """Count the bytes of an update in the report of its version. The caller holds the sender's lock."""
        found, counted = self._reports.get(update.version, (lambda: None, set[int]()))
        report = found()
        if report is None:
            return
        for chunk in update.chunks:
            key = id(chunk.payload)
            if key not in counted:
                report.wire_bytes += chunk.payload_bytes
            if shared:
                counted.add(key)

    def _transmit(self, worker: WorkerState, update: EncodedUpdate) -> None:
        """Write the update in flight, unless the worker was lost or the sender shut down meanwhile."""
        with worker.sending:
            if worker.inflight is update and not self._closed:
                self.send(worker, update.chunks)


def _as_exception(error: BaseException) -> Exception:
    """Return the error for a worker that was not sent a frame, or not all of it, because of ``error``."""
    if isinstance(error, Exception) and str(error):
        return error
    return InterruptedError(f"a signal handler interrupted the call that sent to it ({error!r})")


def _announce(loads: list[tuple[WorkerState, EncodedUpdate]]) -> None:
    """Tell links about each payload that several of them are going to carry."""
    wanted: dict[int, tuple[torch.Tensor, list[TransportBackend]]] = {}
    for worker, update in loads:
        for chunk in update.chunks:
            if chunk.payload is not None:
                wanted.setdefault(id(chunk.payload), (chunk.payload, []))[1].append(worker.link)
    for payload, links in wanted.values():
        if len(links) > 1:
            links[0].expect(payload, links)


class AnswerThreads:
    """One thread for each worker, which reads everything that comes from it."""

    def __init__(
        self,
        table: WorkerTable,
        delivery: Delivery,
        groups: GroupAssignment,
        welcome: Callable[[WorkerState, WeightChunk], None],
    ) -> None:
        self._table, self._delivery, self._groups, self._welcome = table, delivery, groups, welcome
        self._copies = groups.encoding.receiver_copies
        self._log = RateLimitedLog(_log, burst=1)  # reading may fail forever

    def start(self, worker: WorkerState) -> None:
        """Start the thread of a worker, unless it runs."""
        with self._table.lock:
            if worker.thread is None and worker.idx != NOBODY:
                # If this raises, the worker's next attempt to join tries it again.
                worker.thread = start_thread(f"weight_update-worker-{worker.idx}", self._run, worker)

    def join(self) -> None:
        """Wait until all threads have ended. Their links are closed."""
        deadline = time.monotonic() + _END_SECONDS
        for worker in self._table:
            if worker.thread is not None and worker.thread is not threading.current_thread():
                worker.thread.join(max(deadline - time.monotonic(), 0.0))

    def _run(self, worker: WorkerState) -> None:
        ended = False
        while not ended and (worker.joined or not self._table.closed):  # so that a GOODBYE is read at the end
            connection: int | None = worker.connections
            try:
                timeout = _ABSENT_SECONDS if worker.late else None
                if (arrivals := worker.link.arrivals) is not None:
                    arrivals.wait(timeout)
                    timeout = 0.0
                with worker.reading:
                    chunk = require_chunk(worker.link.recv_chunk(timeout), worker.link)
                    connection = None
                    if chunk is not None:
                        self._handle(worker, chunk)
                        continue
            except (TransportError, FormatError, TimeoutError, NotEnoughMemoryError) as error:
                self._delivery.lose(worker, error, connection)
                ended = not worker.link.capabilities.allows_rejoin
            except Exception as error:  # noqa: BLE001 - any error must reach the callers that wait
                self._log.exception(f"the link to worker {worker.idx} ended ({type(error).__name__})")
                self._delivery.lose(worker, error)
                ended = not worker.link.capabilities.allows_rejoin
                if connection is not None:  # an error of recv_chunk itself may come again at once
                    with self._table.lock:
                        self._table.changed.wait_for(lambda: self._table.closed, _PAUSE_SECONDS)
            ended = self._forget(worker) or ended

    def _forget(self, worker: WorkerState) -> bool:
        """Forget a late joiner, unless it is connected or about to be; return whether it is forgotten."""
        if worker.joined or not worker.late or self._table.closed:
            return False
        with self._groups.lock, self._table.lock:
            awaited = worker.link.capabilities.allows_rejoin and time.monotonic() < worker.admitted_until
            if worker.joined or awaited:
                return False
            self._groups.move([worker], None)
            self._table.remove(worker)
            worker.thread = None
            worker.close_outbox()
            link = worker.link
        link.close()
        return True

    def _handle(self, worker: WorkerState, chunk: WeightChunk) -> None:
        header = chunk.header
        if chunk.kind is Kind.HELLO:
            self._welcome(worker, chunk)
        elif chunk.kind is Kind.STAGED:
            with self._table.lock:
                worker.staged = header["version"]
                if isinstance(update := worker.inflight, ChunkedUpdate) and update.version == worker.staged:
                    update.uses.clear()
                self._table.changed.notify_all()
        elif chunk.kind is Kind.TAKEN:
            with self._table.lock:
                update = worker.inflight
                if isinstance(update, ChunkedUpdate) and update.version == header["version"]:
                    update.note_read(header["index"])
                    self._table.changed.notify_all()
        elif chunk.kind in (Kind.APPLIED, Kind.FAILED):
            self.record_result(worker, chunk)
            self._delivery.update(worker)
        elif chunk.kind is Kind.BEHIND:
            with self._table.lock:
                worker.has = MIXED  # it is then sent all weights
                if worker.inflight is not None and worker.inflight.version == header["version"]:
                    worker.inflight = None
            self._delivery.update(worker)
        elif chunk.kind is Kind.GOODBYE:
            self._take_leave(worker)
        else:
            raise FormatError(f"unexpected {chunk.kind.name} frame")

    def _take_leave(self, worker: WorkerState) -> None:
        """Mark a worker that said goodbye as lost, because of its own error if it has one."""
        with self._table.lock:
            failed = worker.joining_error
            worker.left = failed is None
            if failed is not None:
                reason = f"it left after an error: {failed}"
            else:
                reason = "it left: its scheme was shut down or dropped"
                if worker.late or worker.link.capabilities.allows_rejoin:
                    reason += "; it may connect again"
            self._delivery.lose(worker, LinkClosedError(reason))

    def record_result(self, worker: WorkerState, chunk: WeightChunk) -> None:
        """Note that a worker has applied the update in flight, or failed to."""
        header, version = chunk.header, chunk.header["version"]
        with self._table.lock:
            update = worker.inflight
            if update is None or update.version != version:
                return
            if chunk.kind is Kind.APPLIED:
                worker.has, worker.reached = update.version_id, version
                worker.apply_seconds = float(header["apply_seconds"])
                worker.stall_seconds = float(header["stall_seconds"])
                worker.applied = None if self._copies else update
                self._table.version = max(version, -1 if self._table.version is None else self._table.version)
                joins, worker.arrived = not worker.arrived and self._table.told >= 0, True
                if joins or version <= self._table.told:  # a report may not contain this worker
                    worker.applied_told = version
                    self._table.tell(WorkerEvent("applied", worker.idx, version, late_joiner=worker.late))
            else:
                if worker.link.capabilities.shares_memory and not self._copies:
                    update.abandon()  # it may have failed after the switch, and read this memory now
                text = "\n\n".join(filter(None, (header["error"], header["traceback"])))
                if not header["kept"] and worker.has is not None:
                    worker.has = MIXED
                worker.fail(version, WorkerError(text))
            worker.inflight = update = None  # before the lock is released
            self._table.changed.notify_all()


def reason_of(worker: WorkerState, version: int, timeout: float) -> Exception:
    """Return the reason why a worker does not have ``version`` after so many seconds."""
    if (error := worker.failure(version)) is not None:
        return error
    if not (worker.joined or worker.joining):
        return absence_of(worker)
    if not worker.awaited:
        return worker.joining_error or LinkClosedError(
            "it joined while this version was being sent; it gets weights with the next send()"
        )
    if timeout == 0:
        return SyncTimeoutError("has not applied it yet; wait() longer, or ask done(), which raises no error")
    if worker.has_ended:
        reason = (
            "its process has ended (scheme.worker_alive), and the transport did not report it; start it again"
        )
    else:
        reason = f"{delay_of(worker)}; the worker gets the newest version when it goes on (or raise timeout=)"
    return SyncTimeoutError(f"did not apply it within {format_seconds(timeout)}: {reason}")


def absence_of(worker: WorkerState) -> Exception:
    """Return why a worker is not connected."""
    return worker.lost or LinkClosedError("it is not connected; has it called connect()?")


def delay_of(worker: WorkerState) -> str:
    """Return why a worker has not applied the version that it is being sent, or was sent."""
    if worker.writing:
        return "it is still being sent, because the worker or the link is slow or stopped"
    stopped = "stopped" if worker.link.capabilities.pid_is_visible else "stopped or cannot be reached"
    return f"it is {stopped}, or in hold() or a long forward pass, or takes long to apply it"
