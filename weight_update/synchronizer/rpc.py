"""Calls to a synchronizer: in this process, or over sockets as signed JSON.

A connection begins with the handshake of :mod:`weight_update.transports.handshake`, which gives it a key.
Messages follow::

    offset  size  field
    0       4     length N of the body, little endian, at most 1 MiB
    4       32    HMAC-SHA256 of sender (b"C" or b"S"), number of the message (8 bytes) and body
    36      N     one JSON object in UTF-8

Nothing is read from a message before its signature is checked. Nothing is encrypted: no weights travel here,
but the endpoints do, with which explorers join the publishers of weights. Use a network that you trust.
"""

from __future__ import annotations

import hashlib
import hmac
import json
import logging
import os
import secrets
import socket
import struct
import threading
import time
from abc import ABC, abstractmethod
from typing import Any, ClassVar

from weight_update.errors import (
    FormatError,
    JoinRefusedError,
    LinkClosedError,
    SyncTimeoutError,
    TransportError,
)
from weight_update.schemes.sources import port_number
from weight_update.synchronizer.service import Service
from weight_update.synchronizer.sessions import Reply
from weight_update.transports.handshake import prove_token
from weight_update.transports.listener import Listener
from weight_update.transports.rate_limit import RateLimitedLog
from weight_update.transports.shared_memory.unix_stream import (
    SocketStream,
    close_in_children,
    deadline_of,
    seconds_left,
)

_log = logging.getLogger(__name__)
CONTEXT = "synchronizer"
"""Context of handshakes with a synchronizer's server."""
_FRONT = struct.Struct("<I32s")
_MAX_BODY = 1 << 20
_SEND_SECONDS = 30.0
TOKEN = "WEIGHT_UPDATE_TOKEN"
"""Environment variable with the token of the server."""
_BACKLOG = 128


class RpcConnection:
    """One end of a connection whose two ends have proved that they have the same token.

    One thread uses it at a time, but any thread may call :meth:`close`. Messages are signed with ``key``;
    ``server`` tells the end that answers.
    """

    def __init__(self, stream: SocketStream, key: bytes, *, server: bool) -> None:
        self._stream, self._key = stream, key
        self._mine, self._theirs = (b"S", b"C") if server else (b"C", b"S")
        self._sent = self._received = 0

    def send(self, message: dict[str, Any], timeout: float | None = _SEND_SECONDS) -> None:
        """Send a JSON object. After an error the connection is of no more use."""
        body = json.dumps(message, allow_nan=False).encode()
        tag = self._sign(self._mine, self._sent, body)
        self._sent += 1
        self._stream.send(_FRONT.pack(len(body), tag) + body, deadline_of(timeout))

    def wait_readable(self, timeout: float) -> bool:
        """Return whether a message begins, or the connection ends, within ``timeout`` seconds."""
        return self._stream.wait_readable(timeout)

    def receive(self, timeout: float | None) -> dict[str, Any]:
        """Return the next message. After an error the connection is of no more use.

        ``timeout`` is the number of seconds for all of the message; None waits for its first byte without a
        limit.

        Raises:
            LinkClosedError: the other end is gone.
            SyncTimeoutError: no message came in time, or not all of it.
            FormatError: the message is not signed with our token, or not a JSON object.
        """
        deadline = deadline_of(timeout)
        if not self._stream.wait_readable(timeout):
            raise SyncTimeoutError(f"the other end said nothing for {timeout:g} s")
        length, tag = _FRONT.unpack(self._stream.recv(_FRONT.size, deadline))
        if length > _MAX_BODY:
            raise FormatError(f"a message of {length} bytes; the other end speaks another protocol")
        body = self._stream.recv(length, deadline)
        if not hmac.compare_digest(tag, self._sign(self._theirs, self._received, body)):
            raise FormatError("wrong token: a message was not signed with ours")
        self._received += 1
        try:
            message = json.loads(body)
        except (ValueError, RecursionError) as error:
            raise FormatError(f"a message is not JSON: {error}") from None
        if not isinstance(message, dict):
            raise FormatError("a message is not a JSON object")
        return message

    @property
    def local_address(self) -> str:
        """Address of this end."""
        return str(self._stream.sock.getsockname()[0])

    def close(self) -> None:
        """Close the connection, and wake the thread that waits here."""
        self._stream.close()

    def _sign(self, sender: bytes, number: int, body: bytes) -> bytes:
        return hmac.new(self._key, sender + struct.pack("<Q", number) + body, hashlib.sha256).digest()


def connect(address: str, port: int, token: str, timeout: float) -> RpcConnection:
    """Connect to a server within ``timeout`` seconds.

    Raises:
        LinkClosedError: no server listens there.
        SyncTimeoutError: the server was reached and said nothing.
        JoinRefusedError: the server has another token.
    """
    deadline = time.monotonic() + timeout
    try:
        sock = _dial(address, port, deadline)
    except OSError as error:
        raise LinkClosedError(f"no synchronizer at {address}:{port} ({error})") from None
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    stream = SocketStream(sock)
    try:
        return RpcConnection(stream, prove_token(stream, token, CONTEXT, deadline), server=False)
    except BaseException as error:
        stream.close()
        if isinstance(error, JoinRefusedError):
            raise JoinRefusedError(f"the synchronizer at {address}:{port}: {error}") from None
        raise


def _dial(address: str, port: int, deadline: float) -> socket.socket:
    """Connect to the first address of a name that answers; all of them share the time."""
    found = socket.getaddrinfo(address, port, type=socket.SOCK_STREAM)
    for tried, (family, kind, protocol, _, where) in enumerate(found):
        sock = socket.socket(family, kind, protocol)
        close_in_children(sock)
        try:
            sock.settimeout(max(deadline - time.monotonic(), 0.0) / (len(found) - tried))
            sock.connect(where)
        except OSError:
            sock.close()
            if tried + 1 == len(found):
                raise
        else:
            return sock
    raise OSError("the name has no address")


class Server:
    """A listener by which clients of other processes call a service, with a thread for each connection.

    A client may have several connections. When one ends without a goodbye, the client counts as gone. The
    arguments and errors are those of :meth:`~weight_update.Synchronizer.serve`.

    Attributes:
        address: ``host:port``, for clients.
        token: the secret, for clients.
    """

    def __init__(
        self, service: Service, address: str = "127.0.0.1", port: int = 0, token: str | None = None
    ) -> None:
        self.token: str = token or os.environ.get(TOKEN) or secrets.token_hex(16)
        self._service, self._closed = service, False
        self._log = RateLimitedLog(_log)
        family = socket.AF_INET6 if ":" in address else socket.AF_INET
        sock = socket.create_server((address, port_number(port)), family=family, backlog=_BACKLOG)
        self.address: str = f"{address}:{sock.getsockname()[1]}"
        self._listener = Listener(sock, self.token, CONTEXT, self._serve, "weight_update-synchronizer", _log)
        self._listener.start()

    def close(self) -> None:
        """Stop listening and close all connections; the service lives on."""
        self._closed = True
        self._listener.close()

    def _serve(self, stream: SocketStream, key: bytes, deadline: float) -> None:
        """Answer the calls of a connection, as a thread, until it ends."""
        stream.sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        connection = RpcConnection(stream, key, server=True)
        session: str | None = None
        try:
            request = connection.receive(seconds_left(deadline))
            while not self._closed:
                name, args = request.get("call"), request.get("args")
                if not isinstance(name, str) or not isinstance(args, dict):
                    raise FormatError("the message is not a call")
                session = args["session"] if isinstance(args.get("session"), str) else None
                connection.send(self._service.call(name, args))
                if name == "bye":
                    session = None
                request = connection.receive(None)
        except (FormatError, TimeoutError) as error:
            self._log.warning("a connection to the synchronizer was ended: %s", error)
        except TransportError:
            pass  # the client closed it
        finally:
            connection.close()
            if session is not None and not self._closed:
                self._service.gone(session)


class Channel(ABC):
    """A way to call a synchronizer. Any thread may call at any time."""

    @abstractmethod
    def call(self, name: str, args: dict[str, Any], timeout: float, longer: float = 0.0) -> Reply:
        """Call the synchronizer and return its answer; see :meth:`Service.call`.

        The synchronizer may give no sign of life for ``timeout`` seconds. It may work on the call for
        ``longer`` seconds beyond that while it is seen to live.

        Raises:
            LinkClosedError: the synchronizer is not there, or did not answer in time; it may have done what
                was asked.
            JoinRefusedError: it has another token.
        """

    restarts: ClassVar[bool] = True
    """Whether another synchronizer may take the place of one that was closed."""

    @property
    @abstractmethod
    def address(self) -> str | None:
        """Address of the interface that leads to the synchronizer; None if that is in this process."""

    def close(self) -> None:  # noqa: B027 - only connections have something to close
        """Close all connections."""


class LocalChannel(Channel):
    """A channel to a synchronizer in this process."""

    restarts = False
    address = None

    def __init__(self, service: Service) -> None:
        self._service = service

    def call(self, name: str, args: dict[str, Any], timeout: float, longer: float = 0.0) -> Reply:
        del timeout, longer  # a call that waits has a timeout of its own
        return self._service.call(name, args)


class SocketChannel(Channel):
    """A channel to a server at ``host:port``. A call has a connection of its own, which later calls reuse."""

    def __init__(self, address: str, token: str) -> None:
        host, _, port = address.rpartition(":")
        if not host or not port.isdigit():
            raise ValueError(f"a synchronizer's address is host:port, got {address!r}")
        self._host, self._port, self._token = host.strip("[]"), port_number(int(port)), token
        self._lock = threading.Lock()
        self._idle: list[RpcConnection] = []
        self._busy: set[RpcConnection] = set()
        self._closed = 0  # times
        self._address: str | None = None

    @property
    def address(self) -> str | None:
        return self._address

    def call(self, name: str, args: dict[str, Any], timeout: float, longer: float = 0.0) -> Reply:
        deadline, closed = time.monotonic() + timeout, self._closed
        connection = self._take(timeout)
        try:
            connection.send({"call": name, "args": args}, seconds_left(deadline))
            reply = self._reply(connection, deadline, timeout, longer)
        except (LinkClosedError, FormatError, SyncTimeoutError) as error:
            self.close()  # if one connection is gone, all are
            raise LinkClosedError(f"the synchronizer at {self._host}:{self._port}: {error}") from None
        with self._lock:
            self._busy.discard(connection)
            if closed == self._closed:
                self._idle.append(connection)
        if closed != self._closed:  # it was made meanwhile
            connection.close()
        return reply

    def close(self) -> None:
        with self._lock:
            self._closed += 1
            connections, self._idle, self._busy = [*self._idle, *self._busy], [], set()
        for connection in connections:
            connection.close()

    def _reply(self, connection: RpcConnection, deadline: float, timeout: float, longer: float) -> Reply:
        """Wait for the answer. While none comes, check that the synchronizer answers other calls."""
        last = deadline + longer
        while longer and not connection.wait_readable(max(deadline - time.monotonic(), 0.0) / 2):
            if time.monotonic() >= last or not self._is_alive(deadline):
                raise SyncTimeoutError(f"the other end said nothing for {timeout:g} s")
            deadline = min(time.monotonic() + timeout, last)
        return connection.receive(seconds_left(deadline))

    def _is_alive(self, deadline: float) -> bool:
        try:
            self.call("status", {}, max(deadline - time.monotonic(), 0.0))
        except TransportError:
            return False
        return True

    def _take(self, timeout: float) -> RpcConnection:
        with self._lock:
            connection = self._idle.pop() if self._idle else None
        if connection is None:
            try:
                connection = connect(self._host, self._port, self._token, timeout)
            except SyncTimeoutError as error:
                raise LinkClosedError(str(error)) from None
            self._address = connection.local_address
        with self._lock:
            self._busy.add(connection)
        return connection
