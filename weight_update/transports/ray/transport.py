"""Links through Ray alone: signals through an actor of ours, payloads through Ray's object store."""

from __future__ import annotations

import threading
import uuid
from collections.abc import Callable
from typing import Any

from weight_update.errors import FormatError, LinkClosedError
from weight_update.transports.base import Allocate, Capabilities, TransportBackend
from weight_update.transports.ray.connection import Line
from weight_update.transports.ray.object_store import Shelf
from weight_update.transports.shared_memory.unix_stream import deadline_of, seconds_left
from weight_update.wire.frames import WeightChunk

__all__ = ["RayTransport"]


class RayTransport(TransportBackend):
    """One end of a link through Ray, for clusters whose actors cannot open ports to each other.

    The sender copies each payload once into Ray's object store, whatever the number of workers, and each
    node fetches it once. A worker copies it once out of there, for what Ray maps is read-only.

    Args:
        find_board: gives the handle of the actor where both ends meet, within so many seconds; called when
            the link is first used. None makes a sender's end, which ``RayListener`` gives its connection.
        shelf: shared by the sender's ends.
    """

    capabilities = Capabilities(send_never_blocks=True, allows_rejoin=True)

    def __init__(
        self, find_board: Callable[[float | None], Any] | None = None, shelf: Shelf | None = None
    ) -> None:
        self._find_board, self._shelf = find_board, shelf or Shelf()
        self._board: Any = None
        self._changed = threading.Condition()
        self._line: Line | None = None
        self._first: WeightChunk | None = None
        self._fresh = False  # nothing was sent on this line yet
        self._closed = False

    def restart(self, timeout: float | None = None) -> None:
        """See :meth:`TransportBackend.restart`: a new line, unless there is one that works."""
        if self._find_board is None or self._closed:
            raise LinkClosedError("this end was closed")
        if self._line is None:
            self._board = self._board or self._find_board(timeout)
            self._line = Line(self._board, uuid.uuid4().hex, 1, self._shelf)
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
            if self._find_board is None:
                line.close()  # recv_chunk() finds that out
            else:
                self._drop(line)
            raise

    def recv_chunk(
        self, timeout: float | None = None, allocate: Allocate | None = None
    ) -> WeightChunk | None:
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

    def attach(self, line: Line, hello: WeightChunk) -> None:
        """Sender's end: take over a worker that knocked."""
        with self._changed:
            old = line if self._closed else self._line  # on a closed link the worker hears of it at once
            if not self._closed:
                self._line, self._first = line, hello
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
        with self._changed:
            self._closed = True
            self._changed.notify_all()
        self._drop(self._line)

    def _drop(self, line: Line | None) -> None:
        with self._changed:
            if line is not None and line is self._line:
                self._line = None
        if line is not None:
            line.close()

    def _await_line(self, deadline: float | None) -> Line | None:
        with self._changed:
            while self._line is None:
                if self._closed or self._find_board is not None:
                    raise LinkClosedError("not connected to the sender")
                left = seconds_left(deadline)
                if left == 0:
                    return None
                self._changed.wait(left)
            return self._line
