"""Links on one machine whose receivers map the sender's slots instead of copying payloads."""

from __future__ import annotations

import logging
import socket
import threading
import uuid
from collections.abc import Callable, Mapping
from dataclasses import replace

import torch

from weight_update.errors import (
    FormatError,
    JoinRefusedError,
    LinkClosedError,
    SyncTimeoutError,
    TransportError,
)
from weight_update.transports.base import Allocate, Buffer, Capabilities, TransportBackend
from weight_update.transports.handshake import prove_token
from weight_update.transports.listener import Listener
from weight_update.transports.shared_memory.cuda_slots import CudaBuffer
from weight_update.transports.shared_memory.slot_frames import SlotStream
from weight_update.transports.shared_memory.slots import SharedBuffer, SlotTable
from weight_update.transports.shared_memory.unix_stream import (
    SocketStream,
    close_in_children,
    deadline_of,
    seconds_left,
)
from weight_update.wire.frames import Kind, WeightChunk

__all__ = ["SharedMemListener", "SharedMemTransport"]

_log = logging.getLogger(__name__)
_BACKLOG = 128
_RETRY_SECONDS = 0.02
_NO_ANSWER = "the sender did not answer in time; has it called connect()?"


class SharedMemTransport(TransportBackend):
    """One end of a link over a Unix socket; payloads stay in shared slots, see :class:`SlotStream`.

    Args:
        address: receiver's end: address of the sender's listener. None makes a sender's end, whose connection
            comes from :class:`SharedMemListener`.
        token: receiver's end: token of the listener.
        directory: see :class:`~weight_update.transports.shared_memory.slots.SharedBuffer`.
        device: sender's end: CUDA device for slots; None keeps them in host memory.
    """

    capabilities = Capabilities(shares_memory=True, send_never_blocks=True, allows_rejoin=True)

    def __init__(
        self,
        address: str | None = None,
        *,
        token: str = "",
        directory: str | None = None,
        device: torch.device | None = None,
    ) -> None:
        self._address, self._token = address, token
        self._directory, self._device = directory, device
        if device is not None:
            self.capabilities = replace(self.capabilities, payloads_die_with_sender=True)
        self._changed = threading.Condition()
        self._joining: SocketStream | None = None  # a connection in the middle of the handshake
        self._stream: SlotStream | None = None
        self._first: WeightChunk | None = None
        self._closed = False
        self._slots = SlotTable()

    def allocate(self, nbytes: int) -> Buffer:
        """Return a shared slot."""
        if self._device is not None:
            return CudaBuffer(nbytes, self._device)
        return SharedBuffer(nbytes, self._directory)

    def send_chunk(self, chunk: WeightChunk, timeout: float | None = None) -> None:
        deadline = deadline_of(timeout)
        stream = self._stream or self._connect(chunk, deadline)
        try:
            stream.send(chunk, deadline)
        except (LinkClosedError, TimeoutError) as error:
            if self._address is not None or isinstance(error, TimeoutError):
                self._drop(stream)  # a sender's end may still have a last chunk to read
            raise

    def recv_chunk(
        self, timeout: float | None = None, allocate: Allocate | None = None
    ) -> WeightChunk | None:
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
            if stream.received_handle and not self.capabilities.payloads_die_with_sender:
                self.capabilities = replace(self.capabilities, payloads_die_with_sender=True)

    def release(self, payload: torch.Tensor) -> None:
        self._slots.release(payload)

    def attach(self, stream: SocketStream, first: WeightChunk) -> None:
        """Sender's end: take over an authenticated connection whose HELLO, with the token, is ``first``."""
        with self._changed:
            if self._closed:
                stream.close()  # the worker notices at once
                return
            if self._stream is not None:
                self._stream.close()
            if stream.peer_pid != first.header["pid"]:  # in another pid namespace, or an impostor
                self.capabilities = replace(self.capabilities, pid_is_visible=False)
            token = first.header["token"]
            self._stream, self._first = SlotStream(stream, self._slots, token), first
            self._changed.notify_all()

    def disconnect(self) -> None:
        self._drop()

    def _drop(self, stream: SlotStream | None = None) -> None:
        """End the connection, but only if it is still ``stream`` where that is given."""
        with self._changed:
            if self._stream is not None and stream in (None, self._stream):
                self._stream.close()
                self._stream = None

    def close(self) -> None:
        with self._changed:
            self._closed = True
            if self._joining is not None:
                self._joining.close()
            self._changed.notify_all()
        self._drop()
        self._slots.clear()

    def _connect(self, first: WeightChunk, deadline: float | None) -> SlotStream:
        """Connect to the listener; retry while it is too busy to admit this worker."""
        if self._address is None or first.kind is not Kind.HELLO:
            raise LinkClosedError("the other end is not connected")
        while True:
            try:
                return self._join(self._address, deadline)
            except BlockingIOError:
                with self._changed:
                    self._changed.wait_for(lambda: self._closed, _RETRY_SECONDS)
            except SyncTimeoutError:
                raise SyncTimeoutError(_NO_ANSWER) from None
            if seconds_left(deadline) == 0:
                raise SyncTimeoutError(_NO_ANSWER)

    def _join(self, address: str, deadline: float | None) -> SlotStream:
        """Connect and prove knowledge of the token; raise BlockingIOError if the caller should retry."""
        stream = self._open_stream(address)
        try:
            prove_token(stream, self._token, _context(address), deadline)
            with self._changed:
                self._joining = None
                if self._closed:
                    raise LinkClosedError("this end was closed")
                self._stream = SlotStream(stream, self._slots, self._token)
                return self._stream
        except LinkClosedError:
            stream.close()
            raise BlockingIOError("the listener is too busy, or this end was closed") from None
        except BaseException:
            stream.close()
            raise

    def _open_stream(self, address: str) -> SocketStream:
        stream = SocketStream(socket.socket(socket.AF_UNIX, socket.SOCK_STREAM))
        close_in_children(stream.sock)
        with self._changed:
            if self._closed:
                stream.close()
                raise LinkClosedError("this end was closed")
            self._joining = stream
        try:
            stream.sock.connect(address)
        except BlockingIOError:  # its backlog is full
            stream.close()
            raise
        except OSError as error:
            stream.close()
            raise LinkClosedError(f"the sender cannot be reached ({error})") from None
        return stream

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


def _context(address: str) -> str:
    """Return the context of connections to ``address``, which makes a proof worthless at another address."""
    return f"shared memory {address}"


class SharedMemListener:
    """Admits workers at any time and gives each connection to its link.

    Args:
        token: secret that workers must know.
        links: the sender's end for each worker index.
        late_joiners: returns the link for a worker index without one, or raises
            :class:`~weight_update.JoinRefusedError`.

    Attributes:
        address: abstract Unix address, which vanishes with the process.
        refusals: reasons of the last refused join requests.
    """

    def __init__(
        self,
        token: str,
        links: Mapping[int, SharedMemTransport],
        late_joiners: Callable[[int], SharedMemTransport],
    ) -> None:
        if not hasattr(socket, "AF_UNIX") or not hasattr(socket, "send_fds"):
            raise TransportError("shared memory schemes need Unix sockets; use another scheme here")
        self.address = f"\0weight_update-{uuid.uuid4().hex}"
        self._token, self._links, self._late_joiners = token, links, late_joiners
        sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        sock.bind(self.address)
        sock.listen(_BACKLOG)
        self._listener = Listener(
            sock, token, _context(self.address), self._admit, "weight_update-listener", _log
        )
        self.refusals = self._listener.refusals

    def start(self) -> None:
        """Start to accept connections."""
        self._listener.start()

    def close(self) -> None:
        """Stop accepting, and disconnect workers that have not sent their HELLO yet."""
        self._listener.close()

    def _admit(self, stream: SocketStream, key: bytes, deadline: float) -> None:
        """Read the HELLO of a worker that knows the token, and give the connection to its link."""
        del key  # no third process can write to a connected Unix socket
        prelude, raw = stream.recv_head(deadline)
        if prelude.kind is not Kind.HELLO or prelude.payload_bytes:
            raise FormatError("the first frame is not a HELLO")
        hello = prelude.assemble(raw, None).with_token(self._token)
        worker: int = hello.header["worker"]
        try:
            link = self._links.get(worker) or self._late_joiners(worker)
            link.screen(hello)
        except JoinRefusedError as error:
            header = {"reason": str(error), "problems": list(error.problems)}
            refused = WeightChunk(Kind.REFUSED, header)
            stream.send(refused.encode(), deadline)
            raise
        link.attach(stream, hello)
