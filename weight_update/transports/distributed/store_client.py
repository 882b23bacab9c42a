"""Connections to the server of a TCPStore, with timeouts that are honoured."""

from __future__ import annotations

import contextlib
import socket
import struct
import threading
import time
import weakref

from weight_update.errors import LinkClosedError, SyncTimeoutError
from weight_update.transports.shared_memory.unix_stream import close_in_children

LARGEST_VALUE = 8 << 20
"""Largest size of a value in bytes; a TCPStore drops the connection of a client that sends more."""

_LARGEST_KEY = (8 << 10) - 1  # including the leading slash
_VALIDATE, _WAIT, _DELETE_KEY, _PING, _QUEUE_PUSH, _QUEUE_POP, _QUEUE_LEN = 0, 6, 8, 13, 14, 15, 16
_MAGIC = struct.pack("<BI", _VALIDATE, 0x3C85F7CE)
_NUMBER = struct.Struct("<Q")
_PART = 1 << 16
_LEAST_SECONDS = 0.001  # 0 would not wait at all
_FULL_SPEED_WAKES = 3  # wakes without a message; after so many the next one is delayed
_DELAY_SECONDS = 0.05

_VANISHED_SECONDS = 180
"""Seconds of silence after which a machine counts as gone; a link may be down for less."""
_PROBES = 9


class StoreClient:
    """A connection to the server of a TCPStore.

    It speaks the protocol of ``torch.distributed.TCPStore``. PyTorch's own client limits only some of its
    waits (its constructor waits minutes for a stopped server), and no other thread can wake it.

    One thread at a time uses it; any thread may :meth:`close` it.

    Raises:
        LinkClosedError: no process listens there, or it is not a TCPStore.
        DroppedError: no way leads there now, or this process is short of descriptors or memory.
        SyncTimeoutError: the server was reached, and did not answer in time.
    """

    def __init__(self, host: str, port: int, timeout: float) -> None:
        deadline = time.monotonic() + timeout
        self._where = f"{host}:{port}"
        self._closing = threading.Lock()
        self._closed = False
        self._ahead = bytearray()  # received beyond the last request
        try:
            self._sock = socket.create_connection((host, port), max(timeout, _LEAST_SECONDS))
        except OSError as error:
            kind = LinkClosedError if isinstance(error, ConnectionRefusedError) else DroppedError
            raise kind(f"no process answers at {self._where} ({error})") from None
        weakref.finalize(self, self._sock.close).atexit = False
        close_in_children(self._sock)
        try:
            self._sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            keep_alive(self._sock)
            self._ask(_MAGIC + struct.pack("<BI", _PING, port), 4, deadline - time.monotonic())
        except BaseException:
            self._sock.close()
            raise

    def push(self, queue: str, item: bytes, timeout: float) -> None:
        """Add ``item`` to a queue; do not wait until the server has it.

        Raises:
            LinkClosedError: the server is gone.
            SyncTimeoutError: the server does not read; the connection is not usable afterwards.
        """
        if len(item) > LARGEST_VALUE:
            raise ValueError(f"{len(item)} bytes do not fit into a TCPStore")
        self._send(_request(_QUEUE_PUSH, queue) + _NUMBER.pack(len(item)) + item, timeout)

    def length(self, queue: str, timeout: float) -> int:
        """Return the length of a queue after all earlier pushes of this connection; raise as :meth:`push`."""
        return self._number(_request(_QUEUE_LEN, queue), timeout)

    def pop(self, queue: str) -> bytearray:
        """Take the first item of a queue; wait for it until :meth:`close` is called.

        Raises:
            DroppedError: the server ended the connection.
            LinkClosedError: the server is gone, or this connection was closed.
        """
        empty = 0
        while True:
            self._ask(_request(_WAIT, queue, keys=1), 1, None)
            if self._number(_request(_QUEUE_POP, queue), None) > 0:
                (size,) = _NUMBER.unpack(self._recv(8))
                if size > LARGEST_VALUE:
                    raise self._gone(OSError(f"it sends {size} bytes"))
                return self._recv(size)
            # another client took the item, or set a key of that name, which ends every wait at once
            self._number(_request(_DELETE_KEY, queue), None)
            empty += 1
            if empty > _FULL_SPEED_WAKES:
                time.sleep(_DELAY_SECONDS)

    def close(self) -> None:
        """End the connection and wake the thread that waits on it."""
        with self._closing:
            self._closed = True
            with contextlib.suppress(OSError):  # it may not be connected any more
                self._sock.shutdown(socket.SHUT_RDWR)

    def release(self) -> None:
        """Free the descriptor, in the thread that uses the connection."""
        with self._closing:
            self._closed = True
            self._sock.close()

    def _number(self, request: bytes, timeout: float | None) -> int:
        return int(_NUMBER.unpack(self._ask(request, 8, timeout))[0])

    def _ask(self, request: bytes, size: int, timeout: float | None) -> bytearray:
        self._send(request, timeout)
        return self._recv(size)

    def _send(self, request: bytes, timeout: float | None) -> None:
        try:
            if self._sock.gettimeout() != timeout:
                self._sock.settimeout(None if timeout is None else max(timeout, _LEAST_SECONDS))
            self._sock.sendall(request)
        except OSError as error:
            raise self._failed(error, "does not read what it is sent: it is stopped") from None

    def _recv(self, size: int) -> bytearray:
        """Receive ``size`` bytes; keep surplus bytes for the next call."""
        while len(self._ahead) < size:
            try:
                data = self._sock.recv(_PART)
            except OSError as error:
                raise self._failed(error, "did not answer in time: it is stopped, or busy") from None
            if not data:
                raise self._gone(ConnectionResetError("it ended the connection"))
            self._ahead += data
        received = self._ahead[:size]
        del self._ahead[:size]
        return received

    def _failed(self, error: OSError, late: str) -> Exception:
        if isinstance(error, TimeoutError) and error.errno is None:  # else the other machine has vanished
            return SyncTimeoutError(f"{self._where} {late}")
        return self._gone(error)

    def _gone(self, error: OSError) -> LinkClosedError:
        if self._closed:
            return LinkClosedError("this end was closed")
        kind = DroppedError if isinstance(error, ConnectionError) else LinkClosedError
        return kind(f"the store is gone ({self._where}: {error})")


class DroppedError(LinkClosedError):
    """A connection to a store ended or could not be made; another connection to the store may work."""


def keep_alive(sock: socket.socket) -> None:
    """Make the kernel end this connection, or those accepted here, when the other machine vanishes."""
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, max(_VANISHED_SECONDS // _PROBES, 1))
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, max(_VANISHED_SECONDS // _PROBES, 1))
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, 1000 * _VANISHED_SECONDS)


def _request(command: int, key: str, keys: int | None = None) -> bytes:
    name = b"/" + key.encode()
    if len(name) > _LARGEST_KEY:
        raise ValueError(f"a key of {len(name)} bytes does not fit into a TCPStore")
    count = b"" if keys is None else _NUMBER.pack(keys)
    return bytes([command]) + count + _NUMBER.pack(len(name)) + name
