"""Signed JSON over a stream socket.

A connection begins with the handshake of :mod:`weight_update.transports.handshake`, which gives it a key.
Then come messages, each::

    offset  size  field
    0       4     length N of the body, little endian, at most 1 MiB
    4       32    HMAC-SHA256 of sender (b"C" or b"S"), number of the message (8 bytes) and body
    36      N     one JSON object in UTF-8

Nothing is read from a message before its signature holds. Nothing is encrypted: no weights travel here, but
the tickets that let explorers join the senders of weights do; use a network that you trust.
"""

from __future__ import annotations

import hashlib
import hmac
import json
import socket
import struct
import time
from typing import Any

from weight_update.errors import FormatError, JoinRefusedError, LinkClosedError, SyncTimeoutError
from weight_update.transports.handshake import prove_token
from weight_update.transports.shared_memory.unix_stream import SocketStream, close_in_children, deadline_of

__all__ = ["CONTEXT", "Wire", "connect"]

CONTEXT = "synchronizer"
"""Of handshakes with a synchronizer's server."""
_FRONT = struct.Struct("<I32s")
_MAX_BODY = 1 << 20
_SEND_SECONDS = 30.0


class Wire:
    """One end of a connection. One thread uses it at a time, but :meth:`close` may come from any.

    Args:
        stream: connected, and both ends know that they have the same token.
        key: of this connection.
        server: whether this is the end that answers.
    """

    def __init__(self, stream: SocketStream, key: bytes, *, server: bool) -> None:
        self._stream, self._key = stream, key
        self._mine, self._theirs = (b"S", b"C") if server else (b"C", b"S")
        self._sent = self._received = 0

    def send(self, message: dict[str, Any], timeout: float | None = _SEND_SECONDS) -> None:
        """Send a JSON object; where that raises, the connection is of no more use.

        Raises:
            LinkClosedError: the other end is gone.
            SyncTimeoutError: it did not read in time.
        """
        body = json.dumps(message, allow_nan=False).encode()
        tag = self._sign(self._mine, self._sent, body)
        self._sent += 1
        self._stream.send(_FRONT.pack(len(body), tag) + body, deadline_of(timeout))

    def wait_readable(self, timeout: float) -> bool:
        """Return whether a message begins, or the connection ends, within ``timeout`` seconds."""
        return self._stream.wait_readable(timeout)

    def receive(self, timeout: float | None) -> dict[str, Any]:
        """Return the next message; where that raises, the connection is of no more use.

        Args:
            timeout: seconds for all of the message; None waits for its first byte without a limit.

        Raises:
            LinkClosedError: the other end is gone.
            SyncTimeoutError: none came in time, or not all of it.
            FormatError: it is not signed with our token, or not a JSON object.
        """
        deadline = deadline_of(timeout)
        if not self._stream.wait_readable(timeout):
            raise SyncTimeoutError(f"the other end said nothing for {timeout:g} s")
        front = bytearray(_FRONT.size)
        self._stream.recv_into(memoryview(front), deadline)
        length, tag = _FRONT.unpack(front)
        if length > _MAX_BODY:
            raise FormatError(f"a message of {length} bytes; the other end speaks something else")
        body = bytearray(length)
        self._stream.recv_into(memoryview(body), deadline)
        if not hmac.compare_digest(tag, self._sign(self._theirs, self._received, bytes(body))):
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
        """Of this end."""
        return str(self._stream.sock.getsockname()[0])

    def close(self) -> None:
        """End the connection; whoever waits here is woken."""
        self._stream.close()

    def _sign(self, who: bytes, number: int, body: bytes) -> bytes:
        return hmac.new(self._key, who + struct.pack("<Q", number) + body, hashlib.sha256).digest()


def connect(address: str, port: int, token: str, timeout: float) -> Wire:
    """Return a connection to a server, made within ``timeout`` seconds.

    Raises:
        LinkClosedError: nobody listens there.
        SyncTimeoutError: it was reached and said nothing.
        JoinRefusedError: it has another token.
    """
    deadline = time.monotonic() + timeout
    try:
        sock = _dial(address, port, deadline)
    except OSError as error:
        raise LinkClosedError(f"no synchronizer at {address}:{port} ({error})") from None
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    stream = SocketStream(sock)
    try:
        return Wire(stream, prove_token(stream, token, CONTEXT, deadline), server=False)
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
