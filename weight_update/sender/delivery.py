"""What workers lack, put onto their links; those that cannot be reached are lost."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor

import torch

from weight_update.errors import LinkClosedError, NotEnoughMemoryError, TransportError, without_frames
from weight_update.sender.buffers import EncodedUpdate
from weight_update.sender.workers import WorkerState
from weight_update.transports.base import TransportBackend
from weight_update.wire.frames import WeightChunk

__all__ = ["Delivery"]

_log = logging.getLogger(__name__)
_LAST_WORD_SECONDS = 1.0
_WRITERS = 256  # threads that may wait for workers of other hosts at once


class Delivery:
    """Sends workers frames, and what their groups have for them.

    The caller's thread writes to a worker whose link is quick, a thread of this class to any other.

    Args:
        changed: the sender's lock.
        timeout: seconds that a link may take for one frame.
    """

    def __init__(self, changed: threading.Condition, timeout: float) -> None:
        self.timeout = timeout
        self._changed = changed
        self._closed = False
        self._writers = ThreadPoolExecutor(_WRITERS, "weight_update-send")

    def bring_up(self, worker: WorkerState) -> EncodedUpdate | None:
        """Send a worker what it lacks, unless it is busy; called whenever that may have changed.

        Returns:
            what was sent; None if nothing was, or the worker was lost.
        """
        with self._changed:
            if not worker.joined or worker.inflight is not None or worker.lacks is None:
                return None
        with worker.sending:
            update = self._load_or_lose(worker)
            sent = update is None or self.send(worker, update.chunks)
            return update if sent else None

    def bring_up_all(self, states: list[WorkerState]) -> list[EncodedUpdate]:
        """As :meth:`bring_up`, but where a link waits for its worker a thread does, and not the caller.

        Returns:
            what was sent, or is being sent.
        """
        slow = [(worker, self._load_or_lose(worker)) for worker in states if not worker.link.quick]
        loads = [(worker, update) for worker, update in slow if update is not None]
        _announce(loads)
        for worker, update in loads:
            with self._changed:
                worker.writing = True
            try:
                self._writers.submit(self._transmit, worker, update)
            except RuntimeError:  # close() came in between
                with self._changed:
                    worker.writing = False
                self.lose(worker, LinkClosedError("the sender was shut down"))
        sent = [self.bring_up(worker) for worker in states if worker.link.quick]
        return [one for one in (*sent, *(update for _, update in loads)) if one is not None]

    def send(self, worker: WorkerState, chunks: Iterable[WeightChunk]) -> bool:
        """Send frames; where that fails this is false, and the worker has left, is lost, or soon will be.

        The caller holds ``worker.sending``.
        """
        try:
            for chunk in chunks:
                worker.link.send_chunk(chunk, self.timeout)
        except (TransportError, TimeoutError, NotEnoughMemoryError) as error:
            self._lose_unless_it_left(worker, error)
            return False
        return True

    def say(self, worker: WorkerState, chunk: WeightChunk) -> None:
        """Send a frame between others.

        Raises:
            TransportError, SyncTimeoutError: see ``TransportBackend.send_chunk``; the worker is not lost.
        """
        with worker.sending:
            worker.link.send_chunk(chunk, self.timeout)

    def tell(self, states: Iterable[WorkerState], chunk: WeightChunk) -> None:
        """Send a frame to those who are here; where that fails the worker is lost."""
        for worker in states:
            if not worker.joined:
                continue
            try:
                self.say(worker, chunk)
            except (TransportError, TimeoutError) as error:
                self._lose_unless_it_left(worker, error)

    def lose(self, worker: WorkerState, error: Exception) -> None:
        """Stop counting on a worker, and cut it off unless its link failed by itself."""
        with self._changed:
            departed = worker.joined and not worker.replaced and not self._closed
            pid, what = worker.pid, "left" if worker.left else f"was lost: {error}"
            if worker.joined or worker.lost is None:
                worker.lost = without_frames(error)
            worker.let_go()
            self._changed.notify_all()
        if departed:
            _log.info("worker %d (process %d) %s", worker.idx, pid, what)
        if not isinstance(error, TransportError):
            worker.link.disconnect()

    def _lose_unless_it_left(self, worker: WorkerState, error: Exception) -> None:
        """A worker that left before it was sent something has said so, and that will be read in a moment."""
        if isinstance(error, LinkClosedError):
            if threading.current_thread() is worker.thread:
                return  # it reads on, and finds the end
            with self._changed:
                self._changed.wait_for(lambda: not worker.joined, _LAST_WORD_SECONDS)
        self.lose(worker, error)

    def close(self) -> None:
        """Begin nothing more; does not wait for what is being sent."""
        self._closed = True
        self._writers.shutdown(wait=False, cancel_futures=True)

    def _load_or_lose(self, worker: WorkerState) -> EncodedUpdate | None:
        """As :meth:`_load`; a worker that there is no memory for is lost."""
        try:
            return self._load(worker)
        except NotEnoughMemoryError as error:
            self.lose(worker, error)
            return None

    def _load(self, worker: WorkerState) -> EncodedUpdate | None:
        """Make what ``worker`` lacks the update in flight to it."""
        while True:
            with self._changed:
                group = worker.group
                if not worker.joined or worker.inflight is not None or group is None or worker.lacks is None:
                    return None
                update = group.ready(worker.has)
                if update is not None:
                    worker.hold("inflight", update)
                    worker.since = time.monotonic()
                    return update
            group.prepare()

    def _transmit(self, worker: WorkerState, update: EncodedUpdate) -> None:
        """In a thread of its own: send what is in flight, unless the worker was lost meanwhile."""
        try:
            with worker.sending:
                if worker.inflight is update:
                    self.send(worker, update.chunks)
        except Exception as error:  # noqa: BLE001 - whatever it is, whoever waits must hear of it
            _log.exception("sending to worker %d ended", worker.idx)
            self.lose(worker, error)
        finally:
            with self._changed:
                worker.writing = False
                self._changed.notify_all()


def _announce(loads: list[tuple[WorkerState, EncodedUpdate]]) -> None:
    """Tell the links which payloads several of them are about to be sent."""
    wanted: dict[int, tuple[torch.Tensor, list[TransportBackend]]] = {}
    for worker, update in loads:
        for chunk in update.chunks:
            if chunk.payload is not None:
                wanted.setdefault(id(chunk.payload), (chunk.payload, []))[1].append(worker.link)
    for payload, links in wanted.values():
        if len(links) > 1:
            links[0].expect(payload, links)
