"""Connections over TCP that carry signed messages, between two ends that know one token.

A connection begins with the handshake of :mod:`weight_update.transports.handshake`, which gives it a key.
Messages follow, as ``docs/wire_format.rst`` defines them. A body is one JSON object in UTF-8, or bytes. It is
not used before its signature is checked. Nothing is encrypted.
"""

from __future__ import annotations

import errno
import hashlib
import hmac
import json
import socket
import struct
import time
from typing import Any

from weight_update.errors import FormatError, SyncTimeoutError, undo_on_error
from weight_update.text import format_seconds
from weight_update.transports.handshake import prove_token
from weight_update.transports.socket_stream import (
    SocketStream,
    close_in_children,
    deadline_of,
    seconds_left,
)

_FRONT = struct.Struct("<I32s")
MAX_JSON_BYTES = 1 << 20
"""Largest JSON object in a message."""

_VANISHED_SECONDS = 180
"""Seconds of silence after which a machine counts as gone; a link may be down for less."""
_PROBES = 9
_LOOKUP_SECONDS = 10.0
"""Seconds without an answer after which a name is looked up again: its machine may have been replaced."""
_BACKLOG = 512


class SignedStream:
    """One end of a connection whose two ends have proved that they know the same token.

    One thread sends and one receives, at the same time if need be; any thread may call :meth:`close`. After
    an error the connection is of no more use.

    Args:
        stream: connection, after the handshake.
        key: key of the connection, from the handshake.
        listener: whether this is the end that listened.

    Attributes:
        stream: the connection, for bytes that are not signed.
    """

    def __init__(self, stream: SocketStream, key: bytes, *, listener: bool) -> None:
        self.stream: SocketStream = stream
        self._key = key
        self._mine, self._theirs = (b"L", b"C") if listener else (b"C", b"L")
        self._sent = self._received = 0

    def send(self, body: bytes, deadline: float | None) -> None:
        """Send a message; SyncTimeoutError after the deadline, LinkClosedError if the other end is gone."""
        tag = self._sign(self._mine, self._sent, body)
        self._sent += 1
        self.stream.send(_FRONT.pack(len(body), tag) + body, deadline)

    def receive(self, deadline: float | None, largest: int) -> bytes:
        """Return the next message; without a deadline, wait as long as the other end lives.

        Raises:
            LinkClosedError: the other end is gone.
            SyncTimeoutError: no message came in time, or not all of it.
            FormatError: the message is not signed with our token, or has more than ``largest`` bytes.
        """
        if not self.stream.wait_readable(seconds_left(deadline)):
            raise SyncTimeoutError("the other end said nothing in time")
        length, tag = _FRONT.unpack(self.stream.recv(_FRONT.size, deadline))
        if length > largest:
            raise FormatError(f"a message of {length} bytes; the other end speaks another protocol")
        body = self.stream.recv(length, deadline)
        if not hmac.compare_digest(tag, self._sign(self._theirs, self._received, body)):
            raise FormatError("wrong token: a message was not signed with ours")
        self._received += 1
        return body

    def send_json(self, message: dict[str, Any], timeout: float | None) -> None:
        """Send a JSON object; raise as :meth:`send`."""
        self.send(json.dumps(message, allow_nan=False).encode(), deadline_of(timeout))

    def receive_json(self, timeout: float | None) -> dict[str, Any]:
        """Return the next message, a JSON object, within ``timeout`` seconds; raise as :meth:`receive`."""
        try:
            message = json.loads(self.receive(deadline_of(timeout), MAX_JSON_BYTES))
        except SyncTimeoutError:
            raise SyncTimeoutError(
                f"the other end said nothing for {format_seconds(timeout or 0.0)}"
            ) from None
        except (ValueError, RecursionError) as error:
            raise FormatError(f"a message is not JSON: {error}") from None
        if not isinstance(message, dict):
            raise FormatError("a message is not a JSON object")
        return message

    def wait_readable(self, timeout: float | None) -> bool:
        """Return whether a message begins, or the connection ends, within ``timeout`` seconds."""
        return self.stream.wait_readable(timeout)

    @property
    def local_address(self) -> str:
        """Address of this end; LinkClosedError after :meth:`close`."""
        with self.stream.in_use:
            return str(self.stream.sock.getsockname()[0])

    def close(self) -> None:
        """Close the connection, and wake threads that wait here."""
        self.stream.close()

    def _sign(self, writer: bytes, number: int, body: bytes) -> bytes:
        tag = hmac.new(self._key, writer + struct.pack("<Q", number), hashlib.sha256)
        tag.update(body)
        return tag.digest()


def call(address: str, port: int, token: str, context: str, deadline: float | None) -> SignedStream:
    """Connect to a listener, and prove the token to it; ``context`` names the purpose of the connection.

    Raises:
        OSError: no process listens there, or no way leads there.
        LinkClosedError: the listener ended the connection, because it is too busy or closes.
        SyncTimeoutError: the listener was reached, and did not answer in time.
        JoinRefusedError: the listener has another token.
    """
    stream = dial(address, port, deadline)
    with undo_on_error(stream.close):
        return SignedStream(stream, prove_token(stream, token, context, deadline), listener=False)


def dial(address: str, port: int, deadline: float | None) -> SocketStream:
    """Connect to the first address of a name that answers. OSError if none does in time.

    All addresses share the time. If none answers for ten seconds, the name is looked up again.
    """
    while True:
        found = socket.getaddrinfo(address, port, type=socket.SOCK_STREAM)  # may take long itself
        until = None if deadline is None else min(deadline, time.monotonic() + _LOOKUP_SECONDS)
        try:
            return _dial_one_of(found, until)
        except TimeoutError:
            if deadline is None or time.monotonic() >= deadline:
                raise


def _dial_one_of(found: list[tuple[Any, ...]], deadline: float | None) -> SocketStream:
    for tried, (family, kind, protocol, _, where) in enumerate(found):
        sock = socket.socket(family, kind, protocol)
        close_in_children(sock)
        try:
            left = seconds_left(deadline)
            sock.settimeout(None if left is None else left / (len(found) - tried))
            sock.connect(where)
            _set_tcp_options(sock)
        except OSError:
            sock.close()
            if tried + 1 == len(found):
                raise
        else:
            return SocketStream(sock)
    raise OSError("the name has no address")


def _set_tcp_options(sock: socket.socket) -> None:
    """Send small messages at once, and end the connection when the other machine vanishes."""
    pause = max(_VANISHED_SECONDS // _PROBES, 1)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, pause)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, pause)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, 1000 * _VANISHED_SECONDS)


def listen(address: str, port: int = 0) -> socket.socket:
    """Return a socket that listens on one address; port 0 takes a free one.

    A name stands for one of its addresses, an IPv4 address if it has one.

    Raises:
        OSError: the address does not belong to this machine, the port is taken, or the process has too many
            open files; the message names the fix.
    """
    try:
        found = socket.getaddrinfo(address, port, type=socket.SOCK_STREAM)
        family, *_, where = min(found, key=lambda one: one[0] != socket.AF_INET)
        sock = socket.create_server(where, family=family, backlog=_BACKLOG)
    except OSError as error:
        reason = str(error.strerror).partition(" (")[0]  # create_server() adds the address
        remedy = (
            "raise the process's limit of open files (ulimit -n)"
            if error.errno == errno.EMFILE
            else "give address= of a network interface of this machine, and a free port=, or 0 for any"
        )
        raise OSError(error.errno, f"cannot listen on {address}:{port} ({reason}); {remedy}") from None
    _set_tcp_options(sock)  # and all that it accepts
    return sock
