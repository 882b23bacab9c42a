"""One connection through Ray: messages through the rendezvous actor, payloads through the object store."""

from __future__ import annotations

import struct
import threading
from collections import deque
from concurrent.futures import Future
from typing import Any

import numpy as np
import torch

from weight_update.errors import FormatError, LinkClosedError
from weight_update.threads import start_thread
from weight_update.transports.base import Allocate
from weight_update.transports.ray.object_store import RayObjectStore
from weight_update.transports.ray.rendezvous import (
    POLL_SECONDS,
    ask,
    call,
    is_done,
    node_id,
    one_line,
    result_of,
    running_ray,
    tell,
)
from weight_update.transports.reconnecting import LinkConnection
from weight_update.transports.socket_stream import deadline_of, seconds_left
from weight_update.wire.frames import PRELUDE_BYTES, Prelude, WeightChunk, fresh_bytes
from weight_update.wire.memory import byte_view

_FRAME, _LOST = 1, 2
_PREFIX = struct.Struct("<BI")  # kind of message, bytes of the frame's head
_INLINE_BYTES = 64 << 10
"""Largest payload that travels in its message; an object of its own would cost more than the payload."""
_ANSWER_SECONDS = 60.0
"""Seconds that the rendezvous actor may take to answer, and the store to begin with a payload."""
_LEAST_RATE = 1e6
"""Bytes per second; a payload that comes through the store more slowly counts as lost."""


class RayConnection(LinkConnection):
    """One connection of a link: from a worker's join request until either end leaves.

    Args:
        actor: handle of the rendezvous actor, for which ``name`` is used once.
        end: 0 on the sender's side, 1 on the worker's.
        local: whether both ends are on one node, so that no payload crosses a network.
        liveness: sender's end: reference that Ray declares lost when the worker's process is gone.
    """

    def __init__(self, actor: Any, name: str, end: int, local: bool = True, liveness: Any = None) -> None:
        self.object_store: RayObjectStore = RayObjectStore()  # for payloads; the link sets its own
        self._actor, self._name, self._end, self._local = actor, name, end, local
        self._messages: deque[tuple[bytes, list[Any]]] = deque()
        self._call: Any = None  # a call that waits in the actor for the next messages
        self._taken = self._put = 0
        self._closed = self._lost = False
        self._sending = threading.RLock()  # a signal handler may call close() while it is held
        self._joined = end == 0
        self._liveness: Any = call(actor.watch, name) if end == 1 else liveness
        if liveness is not None:
            liveness.future().add_done_callback(self._end_if_lost)

    def _end_if_lost(self, liveness: Future[None]) -> None:
        if not self._closed and liveness.exception() is not None:
            self._lost = True
            # In Ray's client, this thread reads all answers; a call made here would wait for its own.
            finish = self._actor.finish, self._name, 1, 0
            start_thread("weight_update-lost", tell, *finish)

    def send(self, chunk: WeightChunk, timeout: float | None = None) -> None:
        """Send a chunk to the other end; the first one of a worker is its join request. Does not wait."""
        if not self._joined:
            self._joined = True
            hello = (node_id(), chunk.encode())
            ask(call(self._actor.request_join, self._name, hello, [self._liveness]), _ANSWER_SECONDS)
            return
        head = chunk.encode_head(checksum=not self._local)
        message, refs = _PREFIX.pack(_FRAME, len(head)) + head, []
        if chunk.payload_bytes > _INLINE_BYTES:
            refs = [self.object_store.put(chunk)]
        elif chunk.payload is not None:
            message += bytes(byte_view(chunk.payload))
        self._send_message(message, refs)

    def _send_message(self, message: bytes, refs: list[Any]) -> None:
        with self._sending:
            if self._closed:
                raise LinkClosedError("this end was closed")
            call(self._actor.put, self._name, 1 - self._end, self._put, message, refs)
            self._put += 1

    def recv(self, timeout: float | None, allocate: Allocate | None) -> WeightChunk | None:
        found = self._next(deadline_of(timeout))
        if found is None:
            return None
        message, refs = found
        kind, size = _PREFIX.unpack(message[: _PREFIX.size])
        if kind == _LOST:
            self.object_store.forget()
            raise LinkClosedError("Ray's object store lost an update on its way to this worker")
        frame = memoryview(message)[_PREFIX.size :]
        if not refs:
            return WeightChunk.decode(frame, allocate)
        prelude, header = Prelude.decode(frame[:PRELUDE_BYTES]), bytes(frame[PRELUDE_BYTES:size])
        data = self._fetch(refs[0], prelude.payload_bytes)
        if data.nbytes != prelude.payload_bytes:
            raise FormatError(f"{data.nbytes} bytes came with a frame of {prelude.payload_bytes}")

        def copied(nbytes: int) -> torch.Tensor:  # all processes of a node share the object's memory
            payload = (allocate or fresh_bytes)(nbytes)
            np.copyto(payload.numpy(), data)
            return payload

        return prelude.complete(header, copied)

    def _fetch(self, ref: Any, nbytes: int) -> Any:
        errors = running_ray().exceptions
        try:
            return result_of(ref, _ANSWER_SECONDS + nbytes / _LEAST_RATE)
        except errors.RayError as error:  # the object is lost or damaged, or does not come in time
            self._send_message(_PREFIX.pack(_LOST, 0), [])
            raise LinkClosedError(f"Ray's object store lost an update ({one_line(error)})") from None

    def _next(self, deadline: float | None) -> tuple[bytes, list[Any]] | None:
        while not self._messages:
            if self._closed:
                raise LinkClosedError("this end was closed")
            if self._call is None:
                self._call = call(self._actor.take, self._name, self._end, self._taken, POLL_SECONDS)
            if not is_done(self._call, seconds_left(deadline)):
                return None
            ended, self._call = self._call, None
            messages, over = ask(ended, None)
            if over:
                raise LinkClosedError("its process died" if self._lost else "the other end has left")
            self._taken += len(messages)
            self._messages.extend(messages)
        return self._messages.popleft()

    def close(self) -> None:
        with self._sending:
            if self._closed:
                return
            self._closed = True
        tell(self._actor.finish, self._name, self._end, self._put)
