"""Handshake in which both ends prove that they know a token; the token itself is never sent.

``docs/wire_format.rst`` defines its three messages. A proof covers the nonces of both ends, the role of the
proving end, and a context: a text that names the purpose of the connection. Therefore a proof from another
connection, or from the other end of this one, is worthless. The caller proves first: a process without the
token learns nothing from a listener that would help to guess the token.
"""

from __future__ import annotations

import hashlib
import hmac
import os
import socket
import struct
import time
from collections.abc import Generator

from weight_update.errors import FormatError, JoinRefusedError, LinkClosedError
from weight_update.transports.socket_stream import SocketStream, peer_credentials

_MAGIC = b"WUH1"
PROOF_BYTES = 32
"""Length in bytes of a proof, and of a nonce."""
_REPLY = struct.Struct(f"<4sB{PROOF_BYTES}s")
_REQUEST = struct.Struct(f"<4s{PROOF_BYTES}s{PROOF_BYTES}s")
_WELCOME, _WRONG_TOKEN, _OTHER_USER = 0, 1, 2
_GONE = (
    "the other end closed its connection before it joined: it has ended, or its connect() has timed out, or "
    "it is no worker"
)
_REASONS = {
    _WRONG_TOKEN: "wrong token: both ends need the same one",
    _OTHER_USER: "the two processes belong to different users; run both as one user",
}


def proof(token: str, role: bytes, nonces: bytes, context: str) -> bytes:
    """Return a proof, which only a process that knows ``token`` can compute.

    Args:
        token: secret of both ends.
        role: ``b"C"`` for the caller, ``b"L"`` for the listener, ``b"K"`` for the key of the connection.
        nonces: nonce of the listener, and nonce of the caller.
        context: text that names the purpose of the connection.
    """
    message = b"weight_update handshake" + role + nonces + context.encode()
    return hmac.new(token.encode(), message, hashlib.sha256).digest()


def require_same_user(sock: socket.socket) -> None:
    """Raise JoinRefusedError if the other end of a Unix socket belongs to another user than ours and root."""
    if sock.family is not socket.AF_UNIX:
        return
    _, user = peer_credentials(sock)
    if user not in (os.geteuid(), 0):
        raise JoinRefusedError(
            f"the other end belongs to user {user}, this process to user {os.geteuid()}; run both as one user"
        )


def prove_token(stream: SocketStream, token: str, context: str, deadline: float | None) -> bytes:
    """Prove to a listener that this end knows the token, and verify the listener's proof.

    Returns:
        a key for this connection, known only to its two ends.

    Raises:
        JoinRefusedError: the listener refused, or does not know the token.
        LinkClosedError: the listener is gone.
        SyncTimeoutError: the listener did not answer in time.
    """
    require_same_user(stream.sock)
    theirs, mine = _next_reply(stream, deadline), os.urandom(PROOF_BYTES)
    nonces = theirs + mine
    stream.send(_REQUEST.pack(_MAGIC, mine, proof(token, b"C", nonces, context)), deadline)
    if not hmac.compare_digest(_next_reply(stream, deadline), proof(token, b"L", nonces, context)):
        raise JoinRefusedError(
            "the process that listens there does not know the token, so it is not the sender"
        )
    return proof(token, b"K", nonces, context)


def _next_reply(stream: SocketStream, deadline: float | None) -> bytes:
    magic, status, value = _REPLY.unpack(stream.recv(_REPLY.size, deadline))
    if magic != _MAGIC or status not in (_WELCOME, *_REASONS):
        raise JoinRefusedError("the process that listens there is not a listener of this library and version")
    if status != _WELCOME:
        raise JoinRefusedError(_REASONS[status])
    return bytes(value)


def answer_caller(
    stream: SocketStream, token: str, context: str
) -> Generator[tuple[bytes, bytes] | None, None, None]:
    """Perform a handshake up to the listener's last message; yield None wherever bytes are awaited.

    Yields:
        in the end, the last message, and the key that :func:`prove_token` returns at the other end.

    Raises:
        FormatError: the caller sends something else.
        JoinRefusedError: the caller belongs to another user, or does not know the token, and was told so.
        LinkClosedError: the caller is gone.
    """
    nonce, nothing = os.urandom(PROOF_BYTES), bytes(PROOF_BYTES)
    now = time.monotonic()  # messages this small always fit into the socket's buffer
    try:
        require_same_user(stream.sock)
    except JoinRefusedError:
        stream.send(_REPLY.pack(_MAGIC, _OTHER_USER, nothing), now)
        raise
    try:
        stream.send(_REPLY.pack(_MAGIC, _WELCOME, nonce), now)
        request = yield from received(stream, _REQUEST.size, _MAGIC)
    except OSError:
        raise LinkClosedError(_GONE) from None
    _, theirs, shown = _REQUEST.unpack(request)
    nonces = nonce + theirs
    if not hmac.compare_digest(shown, proof(token, b"C", nonces, context)):
        stream.send(_REPLY.pack(_MAGIC, _WRONG_TOKEN, nothing), now)
        raise JoinRefusedError(_REASONS[_WRONG_TOKEN])
    mine = proof(token, b"L", nonces, context)
    yield _REPLY.pack(_MAGIC, _WELCOME, mine), proof(token, b"K", nonces, context)


def received(stream: SocketStream, size: int, begin: bytes) -> Generator[None, None, bytes]:
    """Return the next ``size`` bytes, which begin with ``begin``; yield wherever they are awaited.

    Raises:
        FormatError: the bytes begin in another way, as soon as that is known.
        OSError: the other end is gone.
    """
    data = b""
    while len(data) < size:
        yield
        try:
            more = stream.sock.recv(size - len(data))
        except BlockingIOError:
            continue
        if not more:
            raise LinkClosedError(_GONE)
        data += more
        if data[: len(begin)] != begin[: len(data)]:
            raise FormatError("the other end did not send a join request")
    return data
