"""Delivery of frames to workers. A worker that cannot be reached is marked as lost."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterable
from functools import partial

import torch

from weight_update.errors import LinkClosedError, NotEnoughMemoryError, TransportError, without_frames
from weight_update.sender.buffers import EncodedUpdate
from weight_update.sender.outbox import Outbox
from weight_update.sender.workers import WorkerState
from weight_update.transports.base import TransportBackend
from weight_update.wire.frames import WeightChunk

__all__ = ["Delivery"]

_log = logging.getLogger(__name__)
_GOODBYE_SECONDS = 1.0


class Delivery:
    """Writes frames to workers, and the updates that their send groups have for them.

    The caller's thread writes to links whose ``send_chunk`` never blocks. Each other worker has an
    :class:`Outbox`, which writes to it.

    Args:
        changed: the sender's lock.
        timeout: seconds that a link may take for one frame.
    """

    def __init__(self, changed: threading.Condition, timeout: float) -> None:
        self.timeout = timeout
        self._changed = changed
        self._closed = False

    def update(self, worker: WorkerState) -> EncodedUpdate | None:
        """Send a worker the update it lacks, unless it is busy; call this whenever that may have changed.

        Returns:
            the update; None if there was none to send, or the worker was lost.
        """
        with self._changed:
            if not worker.joined or worker.inflight is not None or worker.lacks is None:
                return None
        with worker.sending:
            update = self._load_or_lose(worker)
            sent = update is None or self.send(worker, update.chunks)
            return update if sent else None

    def update_all(self, states: list[WorkerState]) -> list[EncodedUpdate]:
        """Send each worker the update it lacks, without waiting for slow links.

        Returns:
            the updates that were sent, or are being sent.
        """
        slow = [
            (worker, self._load_or_lose(worker))
            for worker in states
            if not worker.link.capabilities.send_never_blocks
        ]
        loads = [(worker, update) for worker, update in slow if update is not None]
        _announce(loads)
        for worker, update in loads:
            self.post(worker, partial(self._transmit, worker, update))
        sent = [self.update(worker) for worker in states if worker.link.capabilities.send_never_blocks]
        return [one for one in (*sent, *(update for _, update in loads)) if one is not None]

    def post(self, worker: WorkerState, write: Callable[[], None]) -> None:
        """Have the outbox of a worker whose link may block call ``write``; an error loses the worker."""
        try:
            with self._changed:
                if not worker.joined:
                    return
                if self._closed:
                    raise RuntimeError("the sender was shut down")
                if worker.outbox is None:
                    worker.outbox = Outbox(worker.idx, self._changed)
                worker.outbox.put(partial(self._run, worker, write))
        except RuntimeError as error:
            self.lose(worker, LinkClosedError(f"no thread writes to it: {error}"))

    def _run(self, worker: WorkerState, write: Callable[[], None]) -> None:
        try:
            write()
        except Exception as error:  # noqa: BLE001 - any error must reach the callers that wait
            _log.exception("sending to worker %d ended", worker.idx)
            self.lose(worker, error)

    def send(self, worker: WorkerState, chunks: Iterable[WeightChunk]) -> bool:
        """Write frames and return whether that succeeded; otherwise the worker has left, is lost, or will be.

        The caller holds ``worker.sending``.
        """
        connection = worker.connections
        try:
            for chunk in chunks:
                worker.link.send_chunk(chunk, self.timeout)
        except (TransportError, TimeoutError, NotEnoughMemoryError) as error:
            self._lose_unless_it_left(worker, error, connection)
            return False
        return True

    def say(self, worker: WorkerState, chunk: WeightChunk) -> None:
        """Write one frame, between the frames of updates.

        Raises:
            TransportError, SyncTimeoutError: as ``TransportBackend.send_chunk``; the worker is not lost.
        """
        with worker.sending:
            worker.link.send_chunk(chunk, self.timeout)

    def tell(self, states: Iterable[WorkerState], chunk: WeightChunk) -> None:
        """Write one frame to each worker that is connected; a worker for which that fails is lost."""
        for worker in states:
            if not worker.joined:
                continue
            connection = worker.connections
            try:
                self.say(worker, chunk)
            except (TransportError, TimeoutError) as error:
                self._lose_unless_it_left(worker, error, connection)

    def lose(self, worker: WorkerState, error: Exception, connection: int | None = None) -> None:
        """Mark a worker as lost, and cut its link unless that failed by itself.

        Args:
            worker: the worker.
            error: the reason.
            connection: ``worker.connections`` before the call that failed; None for the present one. A worker
                that has joined again since is not lost: the connection that failed is not its present one.
        """
        with self._changed:
            if connection not in (None, worker.connections):
                return
            departed = worker.joined and not worker.replaced and not self._closed
            pid, fate = worker.pid, "left" if worker.left else f"was lost: {error}"
            if worker.joined or worker.lost is None:
                worker.lost = without_frames(error)
            worker.mark_disconnected()
            self._changed.notify_all()
        if departed:
            _log.info("worker %d (process %d) %s", worker.idx, pid, fate)
        if not isinstance(error, TransportError):
            worker.link.disconnect()

    def _lose_unless_it_left(self, worker: WorkerState, error: Exception, connection: int) -> None:
        """Mark a worker as lost, unless its GOODBYE, which is read in a moment, tells that it left."""
        if isinstance(error, LinkClosedError):
            if threading.current_thread() is worker.thread:
                return  # this thread reads on, and finds the end
            with self._changed:
                self._changed.wait_for(
                    lambda: not worker.joined or worker.connections != connection, _GOODBYE_SECONDS
                )
        self.lose(worker, error, connection)

    def close(self) -> None:
        """Note that workers which leave from now on do so because the sender was shut down."""
        self._closed = True

    def _load_or_lose(self, worker: WorkerState) -> EncodedUpdate | None:
        """Load the next update; a worker that there is no memory for is lost."""
        try:
            return self._load(worker)
        except NotEnoughMemoryError as error:
            self.lose(worker, error)
            return None

    def _load(self, worker: WorkerState) -> EncodedUpdate | None:
        """Make the update that ``worker`` lacks the one in flight to it."""
        while True:
            with self._changed:
                group = worker.group
                if not worker.joined or worker.inflight is not None or group is None or worker.lacks is None:
                    return None
                update = group.update_for(worker.has)
                if update is not None:
                    worker.set_update("inflight", update)
                    worker.sent_at = time.monotonic()
                    return update
            group.prepare()

    def _transmit(self, worker: WorkerState, update: EncodedUpdate) -> None:
        """Write the update in flight, unless the worker was lost or the sender shut down meanwhile."""
        with worker.sending:
            if worker.inflight is update and not self._closed:
                self.send(worker, update.chunks)


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
