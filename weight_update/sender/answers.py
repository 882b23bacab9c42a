"""The threads that read what workers send, and act on it."""

from __future__ import annotations

import logging
import threading
import time

from weight_update.errors import (
    FormatError,
    LinkClosedError,
    NotEnoughMemoryError,
    TransportError,
    WorkerError,
)
from weight_update.sender.buffers import MIXED
from weight_update.sender.delivery import Delivery
from weight_update.sender.groups.assignment import GroupAssignment
from weight_update.sender.joining import Admission
from weight_update.sender.workers import WorkerState, WorkerTable
from weight_update.wire.frames import Kind, WeightChunk

__all__ = ["AnswerThreads"]

_log = logging.getLogger(__name__)
_ABSENT_SECONDS = 60.0
"""Seconds that a late joiner which was refused, or lost, has to come back on its connection."""
_END_SECONDS = 5.0


class AnswerThreads:
    """One thread for each worker, which reads everything that comes from it.

    Args:
        table: the workers.
        groups: assignment of workers to send groups.
        delivery: writes frames to workers.
        admission: answers join requests.
        publishing: lock of the thread that uses ``groups``.
        copies: whether receivers copy updates into memory of their own.
    """

    def __init__(
        self,
        table: WorkerTable,
        groups: GroupAssignment,
        delivery: Delivery,
        admission: Admission,
        publishing: threading.Lock,
        *,
        copies: bool,
    ) -> None:
        self._table, self._groups, self._delivery = table, groups, delivery
        self._admission, self._publishing, self._copies = admission, publishing, copies

    def start(self, worker: WorkerState) -> None:
        """Start the thread of a worker, unless it runs."""
        with self._table.changed:
            if worker.thread is None:
                name = f"weight_update-worker-{worker.idx}"
                worker.thread = threading.Thread(target=self._run, args=(worker,), name=name, daemon=True)
                try:
                    worker.thread.start()
                except BaseException:
                    worker.thread = None  # the worker's next attempt to join tries it again
                    raise

    def join(self) -> None:
        """Wait until all threads have ended. Their links are closed."""
        for worker in self._table:
            if worker.thread is not None and worker.thread is not threading.current_thread():
                worker.thread.join(_END_SECONDS)

    def _run(self, worker: WorkerState) -> None:
        ended = False
        while not self._table.closed and not ended:
            connection: int | None = worker.connections
            try:
                chunk = worker.link.recv_chunk(_ABSENT_SECONDS if worker.late else None)
                connection = None
                if chunk is not None:
                    self._handle(worker, chunk)
                    continue
            except (TransportError, FormatError, TimeoutError, NotEnoughMemoryError) as error:
                self._delivery.lose(worker, error, connection)
                ended = not worker.link.capabilities.allows_rejoin
            except Exception as error:  # noqa: BLE001 - any error must reach the callers that wait
                _log.exception("the link to worker %d ended", worker.idx)
                self._delivery.lose(worker, error)
                ended = True
            ended = self._forget(worker) or ended

    def _forget(self, worker: WorkerState) -> bool:
        """Forget a late joiner, unless it is connected or about to be; return whether it is forgotten."""
        if worker.joined or not worker.late or self._table.closed:
            return False
        with self._publishing, self._table.changed:
            if worker.joined or time.monotonic() < worker.admitted_until:
                return False
            self._groups.leave(worker)
            self._table.remove(worker)
            worker.thread = None
            worker.close_outbox()
            link = worker.link
        link.close()
        return True

    def _handle(self, worker: WorkerState, chunk: WeightChunk) -> None:
        header = chunk.header
        if chunk.kind is Kind.HELLO:
            self._admission.welcome(worker, chunk)
        elif chunk.kind is Kind.STAGED:
            with self._table.changed:
                worker.staged = header["version"]
                _leave_window(worker, header["version"])
                self._table.changed.notify_all()
        elif chunk.kind is Kind.TAKEN:
            with self._table.changed:
                if worker.window is not None and worker.window.version == header["version"]:
                    worker.window.taken(worker.idx, header["index"])
        elif chunk.kind in (Kind.APPLIED, Kind.FAILED):
            self._record_result(worker, chunk)
            self._delivery.update(worker)
        elif chunk.kind is Kind.BEHIND:
            with self._table.changed:
                worker.has = None  # it is then sent all weights
                if worker.inflight is not None and worker.inflight.version == header["version"]:
                    worker.set_update("inflight", None)
            self._delivery.update(worker)
        elif chunk.kind is Kind.GOODBYE:
            worker.left = True
            self._delivery.lose(worker, LinkClosedError("it left"))
        else:
            raise FormatError(f"unexpected {chunk.kind.name} frame")

    def _record_result(self, worker: WorkerState, chunk: WeightChunk) -> None:
        """Note that a worker has applied the update in flight, or failed to."""
        header, version = chunk.header, chunk.header["version"]
        with self._table.changed:
            _leave_window(worker, version)
            update = worker.inflight
            if update is None or update.version != version:
                return
            if chunk.kind is Kind.APPLIED:
                worker.has, worker.reached = update.version_id, version
                worker.apply_seconds = float(header["apply_seconds"])
                worker.stall_seconds = float(header["stall_seconds"])
                worker.set_update("applied", None if self._copies else update)
                self._table.version = max(version, -1 if self._table.version is None else self._table.version)
            else:
                for slot in update.slots if worker.link.capabilities.shares_memory else ():
                    slot.abandoned = True  # it may have failed after the switch, and read this memory now
                text = header["traceback"] or header["error"]
                if not header["kept"] and worker.has is not None:
                    worker.has = MIXED
                worker.failures[version] = WorkerError(f"{header['error']}\n\n{text}")
            worker.set_update("inflight", None)
            self._table.changed.notify_all()


def _leave_window(worker: WorkerState, version: int) -> None:
    """Note that a worker has read all chunks of a version, or will read no more of them."""
    if worker.window is not None and worker.window.version == version:
        worker.leave_window(reading=False)
