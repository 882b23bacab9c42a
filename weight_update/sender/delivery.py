"""What workers lack, put onto their links; those that cannot be reached are lost."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor

import torch

from weight_update.errors import LinkClosedError, NotEnoughMemoryError, TransportError, without_frames
from weight_update.sender.buffers import Shipment
from weight_update.sender.peer import Peer
from weight_update.transports.base import TransportBackend
from weight_update.wire.frames import WeightChunk

__all__ = ["Delivery"]

_log = logging.getLogger(__name__)
_LAST_WORD_SECONDS = 1.0
_WRITERS = 256  # threads that may wait for workers of other hosts at once


class Delivery:
    """Sends workers frames, and what their lanes have for them.

    The caller's thread writes to a worker whose link is quick, a thread of this class to any other.

    Args:
        moved: the sender's lock.
        timeout: seconds that a link may take for one frame.
    """

    def __init__(self, moved: threading.Condition, timeout: float) -> None:
        self.timeout = timeout
        self._moved = moved
        self._closed = False
        self._writers = ThreadPoolExecutor(_WRITERS, "weight_update-send")

    def bring_up(self, peer: Peer) -> Shipment | None:
        """Send a worker what it lacks, unless it is busy; called whenever that may have changed.

        Returns:
            what was sent; None if nothing was, or the worker was lost.
        """
        with self._moved:
            if not peer.joined or peer.inflight is not None or peer.lacks is None:
                return None
        with peer.sending:
            shipment = self._load_or_lose(peer)
            sent = shipment is None or self.send(peer, shipment.chunks)
            return shipment if sent else None

    def bring_up_all(self, peers: list[Peer]) -> list[Shipment]:
        """As :meth:`bring_up`, but where a link waits for its worker a thread does, and not the caller.

        Returns:
            what was sent, or is being sent.
        """
        slow = [(peer, self._load_or_lose(peer)) for peer in peers if not peer.link.quick]
        loads = [(peer, shipment) for peer, shipment in slow if shipment is not None]
        _announce(loads)
        for peer, shipment in loads:
            with self._moved:
                peer.writing = True
            try:
                self._writers.submit(self._transmit, peer, shipment)
            except RuntimeError:  # close() came in between
                with self._moved:
                    peer.writing = False
                self.lose(peer, LinkClosedError("the sender was shut down"))
        sent = [self.bring_up(peer) for peer in peers if peer.link.quick]
        return [one for one in (*sent, *(shipment for _, shipment in loads)) if one is not None]

    def send(self, peer: Peer, chunks: Iterable[WeightChunk]) -> bool:
        """Send frames; where that fails this is false, and the worker has left, is lost, or soon will be.

        The caller holds ``peer.sending``.
        """
        arrivals = peer.arrivals
        try:
            for chunk in chunks:
                peer.link.send_chunk(chunk, self.timeout)
        except (TransportError, TimeoutError, NotEnoughMemoryError) as error:
            self._lose_unless_it_left(peer, error, arrivals)
            return False
        return True

    def say(self, peer: Peer, chunk: WeightChunk) -> None:
        """Send a frame between others.

        Raises:
            TransportError, SyncTimeoutError: see ``TransportBackend.send_chunk``; the worker is not lost.
        """
        with peer.sending:
            peer.link.send_chunk(chunk, self.timeout)

    def tell(self, peers: Iterable[Peer], chunk: WeightChunk) -> None:
        """Send a frame to those who are here; where that fails the worker is lost."""
        for peer in peers:
            if not peer.joined:
                continue
            arrivals = peer.arrivals
            try:
                self.say(peer, chunk)
            except (TransportError, TimeoutError) as error:
                self._lose_unless_it_left(peer, error, arrivals)

    def lose(self, peer: Peer, error: Exception, arrivals: int | None = None) -> None:
        """Stop counting on a worker, and cut it off unless its link failed by itself.

        Args:
            peer: the worker.
            error: why.
            arrivals: ``peer.arrivals`` as it was before the call that failed. A worker that came back since
                is not lost: the connection that failed is not its present one. None for the present one.
        """
        with self._moved:
            if arrivals not in (None, peer.arrivals):
                return
            departed = peer.joined and not peer.replaced and not self._closed
            pid, what = peer.pid, "left" if peer.left else f"was lost: {error}"
            if peer.joined or peer.lost is None:
                peer.lost = without_frames(error)
            peer.let_go()
            self._moved.notify_all()
        if departed:
            _log.info("worker %d (process %d) %s", peer.idx, pid, what)
        if not isinstance(error, TransportError):
            peer.link.disconnect()

    def _lose_unless_it_left(self, peer: Peer, error: Exception, arrivals: int) -> None:
        """A worker that left before it was sent something has said so, and that will be read in a moment."""
        if isinstance(error, LinkClosedError):
            if threading.current_thread() is peer.thread:
                return  # it reads on, and finds the end
            with self._moved:
                self._moved.wait_for(lambda: not peer.joined or peer.arrivals != arrivals, _LAST_WORD_SECONDS)
        self.lose(peer, error, arrivals)

    def close(self) -> None:
        """Begin nothing more; does not wait for what is being sent."""
        self._closed = True
        self._writers.shutdown(wait=False, cancel_futures=True)

    def _load_or_lose(self, peer: Peer) -> Shipment | None:
        """As :meth:`_load`; a worker that there is no memory for is lost."""
        try:
            return self._load(peer)
        except NotEnoughMemoryError as error:
            self.lose(peer, error)
            return None

    def _load(self, peer: Peer) -> Shipment | None:
        """Make what ``peer`` lacks the shipment in flight to it."""
        while True:
            with self._moved:
                lane = peer.lane
                if not peer.joined or peer.inflight is not None or lane is None or peer.lacks is None:
                    return None
                shipment = lane.ready(peer.has)
                if shipment is not None:
                    peer.hold("inflight", shipment)
                    peer.since = time.monotonic()
                    return shipment
            lane.prepare()

    def _transmit(self, peer: Peer, shipment: Shipment) -> None:
        """In a thread of its own: send what is in flight, unless the worker was lost meanwhile."""
        try:
            with peer.sending:
                if peer.inflight is shipment:
                    self.send(peer, shipment.chunks)
        except Exception as error:  # noqa: BLE001 - whatever it is, whoever waits must hear of it
            _log.exception("sending to worker %d ended", peer.idx)
            self.lose(peer, error)
        finally:
            with self._moved:
                peer.writing = False
                self._moved.notify_all()


def _announce(loads: list[tuple[Peer, Shipment]]) -> None:
    """Tell the links which payloads several of them are about to be sent."""
    wanted: dict[int, tuple[torch.Tensor, list[TransportBackend]]] = {}
    for peer, shipment in loads:
        for chunk in shipment.chunks:
            if chunk.payload is not None:
                wanted.setdefault(id(chunk.payload), (chunk.payload, []))[1].append(peer.link)
    for payload, links in wanted.values():
        if len(links) > 1:
            links[0].expect(payload, links)
