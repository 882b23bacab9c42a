"""Links through Ray alone: signals through an actor of ours, payloads through Ray's object store."""

from __future__ import annotations

import logging
import struct
import threading
import time
import uuid
from collections import deque
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from typing import Any
from weakref import WeakKeyDictionary

import numpy as np
import torch

from weight_update.chunks import PRELUDE_BYTES, Kind, Prelude, WeightChunk, byte_view
from weight_update.errors import (
    FormatError,
    JoinRefusedError,
    LifecycleError,
    LinkClosedError,
    NotEnoughMemoryError,
)
from weight_update.transports.base import Allocate, TransportBackend
from weight_update.transports.ray_board import ask, require_ray, running_ray
from weight_update.transports.stream import deadline_of

__all__ = ["RayListener", "RayTransport", "Shelf"]

_log = logging.getLogger(__name__)
_FRAME, _LOST = 1, 2
_FRONT = struct.Struct("<BI")  # kind of message, bytes of the frame's head
_INLINE = 64 << 10
"""Bytes of a payload that travels with the signal: an object of its own would cost more than it."""
_POLL_SECONDS = 20.0
"""A call that waits in the actor is made anew after so long."""
_FETCH_SECONDS = 60.0
"""A payload that takes longer to come through the store counts as lost."""


class Shelf:
    """Payloads of one sender in Ray's object store: each is put there once, whatever the number of links.

    An object is let go when nobody holds its chunk any more.
    """

    def __init__(self) -> None:
        self._refs: WeakKeyDictionary[WeightChunk, Any] = WeakKeyDictionary()
        self._heads: WeakKeyDictionary[WeightChunk, bytes] = WeakKeyDictionary()
        self._lock = threading.Lock()

    def put(self, chunk: WeightChunk) -> Any:
        """Reference to the payload of ``chunk``; copies it into the store the first time.

        Raises:
            NotEnoughMemoryError: the store has no room.
        """
        ray = running_ray()
        assert chunk.payload is not None
        with self._lock:
            ref = self._refs.get(chunk)
            if ref is None:
                try:
                    ref = self._refs[chunk] = ray.put(chunk.payload.numpy())
                except (ray.exceptions.ObjectStoreFullError, ray.exceptions.OutOfDiskError) as error:
                    reason = str(error).partition("\n")[0]
                    raise NotEnoughMemoryError(
                        f"Ray's object store has no room for {chunk.payload_bytes / 1e6:.1f} MB; give "
                        f"ray.init more object_store_memory, or send less at once ({reason})"
                    ) from None
            return ref

    def head(self, chunk: WeightChunk, *, checksum: bool) -> bytes:
        """Everything of the frame but its payload; the checksum is computed once."""
        if not checksum:
            return chunk.encode_head(checksum=False)
        with self._lock:
            if chunk not in self._heads:
                self._heads[chunk] = chunk.encode_head()
            return self._heads[chunk]

    def forget(self) -> None:
        """Put everything anew from now on: Ray lost an object."""
        with self._lock:
            self._refs.clear()


class RayTransport(TransportBackend):
    """One end of a link through Ray, for clusters whose actors cannot open ports to each other.

    The sender copies each payload once into Ray's object store, whatever the number of workers, and each
    node fetches it once. A worker copies it once out of there, for what Ray maps is read-only.

    Args:
        find_board: gives the handle of the actor where both ends meet; called when the link is first used.
            None makes a sender's end, which is given its connection by :class:`RayListener`.
        shelf: shared by the sender's ends.
    """

    rejoins = True

    def __init__(self, find_board: Callable[[], Any] | None = None, shelf: Shelf | None = None) -> None:
        self._find_board, self._shelf = find_board, shelf or Shelf()
        self._board: Any = None
        self._changed = threading.Condition()
        self._line: _Line | None = None
        self._first: WeightChunk | None = None
        self._fresh = False  # nothing was sent on this line yet
        self._closed = False

    @property
    def quick(self) -> bool:
        """See :attr:`TransportBackend.quick`."""
        return True

    def restart(self) -> None:
        """See :meth:`TransportBackend.restart`: a new line, unless there is one that works."""
        if self._find_board is None or self._closed:
            raise LinkClosedError("this end was closed")
        if self._line is None:
            self._board = self._board or self._find_board()
            self._line = _Line(self._board, uuid.uuid4().hex, 1, self._shelf)
            self._fresh = True

    def send_chunk(self, chunk: WeightChunk, timeout: float | None = None) -> None:
        """See :meth:`TransportBackend.send_chunk`; never waits for the other end."""
        line = self._line
        if line is None:
            raise LinkClosedError("the other end is not connected")
        try:
            if self._fresh:
                self._fresh = False
                line.knock(chunk)
            else:
                line.send(chunk)
        except LinkClosedError:
            self._drop(line)
            raise

    def recv_chunk(
        self, timeout: float | None = None, allocate: Allocate | None = None
    ) -> WeightChunk | None:
        """See :meth:`TransportBackend.recv_chunk`."""
        deadline = deadline_of(timeout)
        line = self._await_line(deadline)
        if line is None:
            return None
        if self._first is not None:
            first, self._first = self._first, None
            return first
        try:
            return line.recv(deadline, allocate)
        except (LinkClosedError, FormatError):
            self._drop(line)
            raise

    def attach(self, line: _Line, hello: WeightChunk) -> None:
        """Sender's end: take over a worker that knocked."""
        with self._changed:
            if self._closed:
                return
            old, self._first = self._line, hello
            self._line = line
            self._changed.notify_all()
        if old is not None:
            old.close()

    @property
    def shelf(self) -> Shelf:
        """Where payloads are put."""
        return self._shelf

    def disconnect(self) -> None:
        """See :meth:`TransportBackend.disconnect`; the worker hears of it after what was sent before."""
        self._drop(self._line)

    def close(self) -> None:
        """See :meth:`TransportBackend.close`."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()
        self._drop(self._line)

    def _drop(self, line: _Line | None) -> None:
        with self._changed:
            if line is not None and line is self._line:
                self._line = None
        if line is not None:
            line.close()

    def _await_line(self, deadline: float | None) -> _Line | None:
        with self._changed:
            while self._line is None:
                if self._closed or self._find_board is not None:
                    raise LinkClosedError("not connected to the sender")
                left = None if deadline is None else deadline - time.monotonic()
                if left is not None and left <= 0:
                    return None
                self._changed.wait(left)
            return self._line


class _Line:
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
        """Ask to be let in."""
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
                self._call = self._board.take.remote(self.name, self._end, self._taken, _POLL_SECONDS)
            left = None if deadline is None else max(deadline - time.monotonic(), 0.0)
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


class RayListener:
    """The sender's door: takes those who knock and gives each connection to its link.

    Args:
        board: handle of the actor.
        token: workers must show it.
        links: the sender's end for each worker index.
        newcomers: gives the link of a worker that has none, or raises
            :class:`~weight_update.JoinRefusedError`.
    """

    def __init__(
        self,
        board: Any,
        token: str,
        links: Mapping[int, RayTransport],
        newcomers: Callable[[int], RayTransport],
    ) -> None:
        self._board, self._token, self._links, self._newcomers = board, token, links, newcomers
        self._closed = False
        self._thread = threading.Thread(target=self._run, name="weight_update-door", daemon=True)

    def start(self) -> None:
        """Begin to let workers in."""
        if not self._thread.is_alive():
            self._thread.start()

    def close(self) -> None:
        """Let nobody in any more."""
        self._closed = True
        with_ray(lambda: self._board.knock.remote("", (b"", b""), []))  # wakes the thread
        if self._thread.is_alive() and self._thread is not threading.current_thread():
            self._thread.join(5.0)

    def _run(self) -> None:
        while not self._closed:
            try:
                knock = ask(self._board.door.remote(_POLL_SECONDS), None)
                if knock is not None and not self._closed:
                    self._admit(*knock)
            except LinkClosedError:
                return
            except (JoinRefusedError, FormatError, ValueError, TypeError) as error:
                _log.warning("refused a connection: %s", error)

    def _admit(self, name: str, message: tuple[str, bytes], refs: list[Any]) -> None:
        node, raw = message
        hello = WeightChunk.decode(raw)
        if hello.kind is not Kind.HELLO:
            raise FormatError("did not say hello")
        local = node == running_ray().get_runtime_context().get_node_id()
        try:
            link = self._link_of(hello)
        except JoinRefusedError as error:
            refused = _Line(self._board, name, 0, Shelf(), local)
            refused.send(WeightChunk(Kind.REFUSED, {"reason": str(error), "problems": []}))
            refused.close()
            raise
        line = _Line(self._board, name, 0, link.shelf, local)
        line.follow(refs[0])
        link.attach(line, hello)

    def _link_of(self, hello: WeightChunk) -> RayTransport:
        if not hello.shows(self._token):
            raise JoinRefusedError("wrong token: the scheme was not made by this sender")
        worker: int = hello.header["worker"]
        return self._links.get(worker) or self._newcomers(worker)


def with_ray(call: Callable[[], object]) -> None:
    """Do something with Ray, unless it has ended."""
    try:
        require_ray()
    except LifecycleError:
        return
    call()


def _fresh(nbytes: int) -> torch.Tensor:
    return torch.empty(nbytes, dtype=torch.uint8)
