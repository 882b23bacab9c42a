"""Links on one machine whose payloads are never copied to the receiver: it maps the sender's slot."""

from __future__ import annotations

import contextlib
import logging
import socket
import threading
import time
import uuid
from collections.abc import Callable, Mapping

import torch

from weight_update.chunks import Kind, WeightChunk
from weight_update.errors import (
    FormatError,
    JoinRefusedError,
    LinkClosedError,
    TransportError,
)
from weight_update.transports.base import Allocate, Buffer, TransportBackend
from weight_update.transports.cuda_slots import CudaBuffer
from weight_update.transports.slot_stream import SlotStream
from weight_update.transports.slots import SharedBuffer, SlotTable
from weight_update.transports.stream import Stream, close_in_children, deadline_of, seconds_left

__all__ = ["SharedMemListener", "SharedMemTransport"]

_log = logging.getLogger(__name__)
_JOIN_SECONDS = 30.0
_RETRY_SECONDS = 0.02


class SharedMemTransport(TransportBackend):
    """A Unix socket for signals; payloads stay in shared slots. See :class:`SlotStream` for the format.

    Args:
        address: where the sender listens (receiver's end); None makes a sender's end, which is given its
            connection by :class:`SharedMemListener`.
        directory: see :class:`~weight_update.transports.slots.SharedBuffer`.
        device: sender's end: a CUDA device to keep slots on; None keeps them in host memory.
    """

    shares_memory = True
    rejoins = True

    def __init__(
        self,
        address: str | None = None,
        *,
        directory: str | None = None,
        device: torch.device | None = None,
    ) -> None:
        self._address = address
        self._directory, self._device = directory, device
        self._lends = device is not None
        self._changed = threading.Condition()
        self._stream: SlotStream | None = None
        self._first: WeightChunk | None = None
        self._closed = False
        self._near = True
        self._slots = SlotTable()

    @property
    def lends(self) -> bool:
        """See :attr:`TransportBackend.lends`: true with slots on a GPU."""
        return self._lends

    @property
    def near(self) -> bool:
        """See :attr:`TransportBackend.near`: false once a worker came that names itself by another number.

        It is in another pid namespace, or is not who it says.
        """
        return self._near

    def allocate(self, nbytes: int) -> Buffer:
        """A shared slot; see :meth:`TransportBackend.allocate`."""
        if self._device is not None:
            return CudaBuffer(nbytes, self._device)
        return SharedBuffer(nbytes, self._directory)

    def send_chunk(self, chunk: WeightChunk, timeout: float | None = None) -> None:
        """See :meth:`TransportBackend.send_chunk`."""
        deadline = deadline_of(timeout)
        stream = self._stream or self._connect(deadline)
        try:
            stream.send(chunk, deadline)
        except (LinkClosedError, TimeoutError) as error:
            if self._address is not None or isinstance(error, TimeoutError):
                self._drop(stream)  # else there may be a last word to be read
            raise

    def recv_chunk(
        self, timeout: float | None = None, allocate: Allocate | None = None
    ) -> WeightChunk | None:
        """See :meth:`TransportBackend.recv_chunk`."""
        deadline = deadline_of(timeout)
        stream = self._await_stream(deadline)
        if stream is None:
            return None
        if self._first is not None:
            first, self._first = self._first, None
            return first
        try:
            return stream.recv(seconds_left(deadline))
        except (LinkClosedError, FormatError):
            self._drop(stream)
            raise
        finally:
            self._lends = self._lends or stream.lends

    def release(self, payload: torch.Tensor) -> None:
        """See :meth:`TransportBackend.release`."""
        self._slots.release(payload)

    def attach(self, stream: Stream, first: WeightChunk) -> None:
        """Sender's end: take over a connection whose first chunk was read already."""
        with self._changed:
            if self._stream is not None:
                self._stream.close()
            self._near = self._near and stream.peer_pid == first.header["pid"]
            self._stream, self._first = SlotStream(stream, self._slots), first
            self._changed.notify_all()

    def disconnect(self) -> None:
        """See :meth:`TransportBackend.disconnect`."""
        self._drop()

    def _drop(self, stream: SlotStream | None = None) -> None:
        """End the connection, only if it is still ``stream`` when that is given."""
        with self._changed:
            if self._stream is not None and stream in (None, self._stream):
                self._stream.close()
                self._stream = None

    def close(self) -> None:
        """See :meth:`TransportBackend.close`."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()
        self._drop()
        self._slots.clear()

    def _connect(self, deadline: float | None) -> SlotStream:
        if self._closed:
            raise LinkClosedError("this end was closed")
        if self._address is None:
            raise LinkClosedError("the worker is not connected")
        while True:
            sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
            try:
                sock.connect(self._address)
                break
            except OSError as error:
                sock.close()
                gone = isinstance(error, ConnectionRefusedError | FileNotFoundError)
                late = deadline is not None and time.monotonic() > deadline
                if gone or late or self._closed:
                    raise LinkClosedError(f"the sender cannot be reached ({error})") from None
                time.sleep(_RETRY_SECONDS)  # its backlog is full
        close_in_children(sock)
        with self._changed:
            self._stream = SlotStream(Stream(sock), self._slots)
            return self._stream

    def _await_stream(self, deadline: float | None) -> SlotStream | None:
        with self._changed:
            if self._address is not None and self._stream is None:
                raise LinkClosedError("not connected to the sender")
            while self._stream is None:
                if self._closed:
                    raise LinkClosedError("this end was closed")
                left = seconds_left(deadline)
                if left == 0:
                    return None
                self._changed.wait(left)
            return self._stream


class SharedMemListener:
    """The sender's door: accepts workers at any time and gives each connection to its link.

    Args:
        token: workers must show it.
        links: the sender's end for each worker index.
        newcomers: gives the link of a worker that has none, or raises
            :class:`~weight_update.JoinRefusedError`.

    Attributes:
        address: an abstract Unix address; it vanishes with the process.
    """

    def __init__(
        self,
        token: str,
        links: Mapping[int, SharedMemTransport],
        newcomers: Callable[[int], SharedMemTransport],
    ) -> None:
        if not hasattr(socket, "AF_UNIX") or not hasattr(socket, "send_fds"):
            raise TransportError("shared memory schemes need Unix sockets; use another scheme here")
        self.address = f"\0weight_update-{uuid.uuid4().hex}"
        self._token, self._links, self._newcomers = token, links, newcomers
        self._sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        close_in_children(self._sock)
        self._sock.bind(self.address)
        self._sock.listen(128)
        self._thread = threading.Thread(target=self._run, name="weight_update-door", daemon=True)
        self._knocking: set[Stream] = set()
        self._closed = False

    def start(self) -> None:
        """Begin to accept."""
        if not self._thread.is_alive():
            self._thread.start()

    def close(self) -> None:
        """Stop accepting, and send away who has not said hello yet."""
        self._closed = True
        for stream in list(self._knocking):
            stream.close()
        with contextlib.suppress(OSError):  # it may never have been started
            self._sock.shutdown(socket.SHUT_RDWR)
        if self._thread.is_alive() and self._thread is not threading.current_thread():
            self._thread.join(5.0)
        self._sock.close()

    def _run(self) -> None:
        while True:
            try:
                sock, _ = self._sock.accept()
            except OSError:
                return
            close_in_children(sock)
            threading.Thread(
                target=self._admit, args=(Stream(sock),), name="weight_update-join", daemon=True
            ).start()

    def _admit(self, stream: Stream) -> None:
        self._knocking.add(stream)
        try:
            if self._closed:
                raise LinkClosedError("the scheme was shut down")
            if not stream.wait_readable(_JOIN_SECONDS):
                raise FormatError(f"said nothing for {_JOIN_SECONDS:.0f} s")
            prelude, raw = stream.recv_head()
            if prelude.kind is not Kind.HELLO or prelude.payload_bytes:
                raise FormatError("did not say hello")
            hello = prelude.assemble(raw, None)
            try:
                link = self._link_of(hello)
            except JoinRefusedError as error:
                refused = WeightChunk(Kind.REFUSED, {"reason": str(error), "problems": []})
                stream.send(refused.encode(), deadline_of(_JOIN_SECONDS))
                raise
            link.attach(stream, hello)
        except (FormatError, TransportError, TimeoutError) as error:
            if not self._closed:
                _log.warning("refused a connection: %s", error)
            stream.close()
        finally:
            self._knocking.discard(stream)

    def _link_of(self, hello: WeightChunk) -> SharedMemTransport:
        if not hello.shows(self._token):
            raise JoinRefusedError("wrong token: the scheme was not made by this sender")
        worker: int = hello.header["worker"]
        return self._links.get(worker) or self._newcomers(worker)
