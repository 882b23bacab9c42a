"""One connection through Ray: messages by way of the board, payloads by way of the object store."""

from __future__ import annotations

import struct
import threading
from collections import deque
from concurrent.futures import Future
from typing import Any

import numpy as np
import torch

from weight_update.errors import FormatError, LinkClosedError
from weight_update.transports.base import Allocate
from weight_update.transports.ray.object_store import Shelf
from weight_update.transports.ray.rendezvous import POLL_SECONDS, ask, running_ray, with_ray
from weight_update.transports.shared_memory.unix_stream import seconds_left
from weight_update.wire.frames import PRELUDE_BYTES, Prelude, WeightChunk
from weight_update.wire.memory import byte_view

__all__ = ["Line"]

_FRAME, _LOST = 1, 2
_FRONT = struct.Struct("<BI")  # kind of message, bytes of the frame's head
_INLINE = 64 << 10
"""Bytes of a payload that travels with the signal: an object of its own would cost more than it."""
_FETCH_SECONDS = 60.0
"""A payload that takes longer to come through the store counts as lost."""


class Line:
    """One connection of a link: from a worker's knock until either end leaves.

    Args:
        board: handle of the actor.
        name: of this connection; used once.
        end: 0 on the sender's side, 1 on the worker's.
        shelf: where payloads are put.
        local: whether both ends are on one node, so that nothing crosses a network.
    """

    def __init__(self, board: Any, name: str, end: int, shelf: Shelf, local: bool = True) -> None:
        self.name = name
        self._board, self._end, self._shelf, self._local = board, end, shelf, local
        self._ready: deque[tuple[bytes, list[Any]]] = deque()
        self._call: Any = None  # one call that waits in the actor for what comes next
        self._taken = self._put = 0
        self._closed = self._lost = False
        self._sending = threading.Lock()
        self._life: Any = board.watch.remote(name) if end == 1 else None

    def knock(self, hello: WeightChunk) -> None:
        """Ask to join."""
        node = running_ray().get_runtime_context().get_node_id()
        refs = [self._life]
        ask(self._board.knock.remote(self.name, (node, hello.encode()), refs), _FETCH_SECONDS)

    def follow(self, life: Any) -> None:
        """Sender's end: end this connection when the worker's process is gone."""
        self._life = life
        life.future().add_done_callback(self._end_if_lost)

    def _end_if_lost(self, life: Future[None]) -> None:
        if not self._closed and life.exception() is not None:
            self._lost = True
            with_ray(lambda: self._board.finish.remote(self.name, 1, 0))

    def send(self, chunk: WeightChunk) -> None:
        """Leave a chunk for the other end.

        Raises:
            LinkClosedError: this end was closed, or Ray was shut down.
            NotEnoughMemoryError: Ray's store has no room for the payload.
        """
        head = self._shelf.head(chunk, checksum=not self._local)
        message, refs = _FRONT.pack(_FRAME, len(head)) + head, []
        if chunk.payload_bytes > _INLINE:
            refs = [self._shelf.put(chunk)]
        elif chunk.payload is not None:
            message += bytes(byte_view(chunk.payload))
        self._say(message, refs)

    def _say(self, message: bytes, refs: list[Any]) -> None:
        running_ray()
        with self._sending:
            if self._closed:
                raise LinkClosedError("this end was closed")
            self._board.put.remote(self.name, 1 - self._end, self._put, message, refs)
            self._put += 1

    def recv(self, deadline: float | None, allocate: Allocate | None) -> WeightChunk | None:
        """The next chunk, or None if none came before ``deadline`` (of ``time.monotonic``).

        Raises:
            LinkClosedError: the other end has left, or Ray lost the payload.
            FormatError: what came is not a chunk.
        """
        found = self._next(deadline)
        if found is None:
            return None
        message, refs = found
        kind, size = _FRONT.unpack(message[: _FRONT.size])
        if kind == _LOST:
            self._shelf.forget()
            raise LinkClosedError("Ray's object store lost an update on its way to this worker")
        head, inline = message[_FRONT.size : _FRONT.size + size], message[_FRONT.size + size :]
        prelude = Prelude.decode(head[:PRELUDE_BYTES])
        payload = None
        if prelude.payload_bytes:
            data = self._fetch(refs[0]) if refs else np.frombuffer(inline, np.uint8)
            if data.nbytes != prelude.payload_bytes:
                raise FormatError(f"{data.nbytes} bytes came with a frame of {prelude.payload_bytes}")
            with prelude.naming_version(head[PRELUDE_BYTES:]):
                payload = (allocate or _fresh)(prelude.payload_bytes)
            np.copyto(payload.numpy(), data)  # what Ray maps is read-only, and the store's to drop
        return prelude.assemble(head[PRELUDE_BYTES:], payload)

    def _fetch(self, ref: Any) -> Any:
        ray = running_ray()
        try:
            return ray.get(ref, timeout=_FETCH_SECONDS)
        except (ray.exceptions.ObjectLostError, ray.exceptions.GetTimeoutError) as error:
            self._say(_FRONT.pack(_LOST, 0), [])
            reason = " ".join(str(error).split())[:300]
            raise LinkClosedError(f"Ray's object store lost an update ({reason})") from None

    def _next(self, deadline: float | None) -> tuple[bytes, list[Any]] | None:
        ray = running_ray()
        while not self._ready:
            if self._closed:
                raise LinkClosedError("this end was closed")
            if self._call is None:
                self._call = self._board.take.remote(self.name, self._end, self._taken, POLL_SECONDS)
            left = seconds_left(deadline)
            done, _ = ray.wait([self._call], timeout=left)
            if not done:
                return None
            call, self._call = self._call, None
            messages, over = ask(call, None)
            if over:
                raise LinkClosedError("its process died" if self._lost else "the other end has left")
            self._taken += len(messages)
            self._ready.extend(messages)
        return self._ready.popleft()

    def close(self) -> None:
        """End it; the other end hears of that after what was sent before."""
        with self._sending:
            if self._closed:
                return
            self._closed = True
        with_ray(lambda: self._board.finish.remote(self.name, self._end, self._put))


def _fresh(nbytes: int) -> torch.Tensor:
    return torch.empty(nbytes, dtype=torch.uint8)
