"""One connection between a sender and a worker on its own host."""

from __future__ import annotations

import threading

from weight_update.errors import SyncTimeoutError
from weight_update.transports.buffer import Allocate
from weight_update.transports.distributed.connection import USE_SOCKET
from weight_update.transports.distributed.local_rendezvous import LocalCall
from weight_update.transports.distributed.signed_queue import SignedQueue
from weight_update.transports.distributed.store import Store
from weight_update.transports.shared_memory.slots import SlotTable
from weight_update.transports.shared_memory.transport import SlotStream
from weight_update.transports.shared_memory.unix_stream import deadline_of, seconds_left
from weight_update.wire.frames import WeightChunk


class LocalConnection:
    """The sender's end to a worker on its own host: a Unix socket that carries slots.

    The ``store`` tells the worker of the connection; nothing is sent before the worker has answered.
    """

    def __init__(self, call: LocalCall, store: Store, name: str, token: str) -> None:
        self._stream = SlotStream(call.stream, SlotTable(), token)
        self._call: LocalCall | None = call  # until it is answered
        self._answering = threading.Lock()
        try:
            SignedQueue(store, f"{name}/down", token).put(USE_SOCKET, last=True)
        except BaseException:
            self.close()
            raise

    def send(self, chunk: WeightChunk, timeout: float | None) -> None:
        """Send a chunk; raise as :meth:`TransportBackend.send_chunk`."""
        deadline = deadline_of(timeout)
        if self._call is not None:
            self._await_answer(deadline)
        self._stream.send(chunk, seconds_left(deadline))

    def recv(self, timeout: float | None, allocate: Allocate | None) -> WeightChunk | None:
        """Return the next chunk or None; raise as :meth:`TransportBackend.recv_chunk`."""
        deadline = deadline_of(timeout)
        if self._call is not None:
            try:
                self._await_answer(deadline)
            except SyncTimeoutError:
                return None
        return self._stream.recv(seconds_left(deadline), allocate)

    def _await_answer(self, deadline: float | None) -> None:
        left = seconds_left(deadline)
        if not self._answering.acquire(timeout=-1 if left is None else left):  # another thread waits as well
            raise SyncTimeoutError("the worker did not answer in time")
        try:
            if self._call is not None:
                self._call.await_answer(deadline)
                self._call = None
        finally:
            self._answering.release()

    def close(self) -> None:
        """End the connection; the other end notices after it has read the earlier messages."""
        self._stream.close()
