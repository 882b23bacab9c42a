"""Mutual proof, over a stream socket, that both ends know a token; the token itself never travels.

Three messages of fixed size are exchanged::

    listener to caller   <4sB32s     b"WUH1", status, nonce of the listener
    caller to listener   <4s32s32s   b"WUH1", nonce of the caller, proof of the caller
    listener to caller   <4sB32s     b"WUH1", status, proof of the listener

A proof is the HMAC-SHA256, with the token as key, of ``b"weight_update handshake"``, the role of the end that
proves (``b"C"`` or ``b"L"``), both nonces, and the context: a text that names what the connection is for. A
proof from another connection, or from the other end of this one, is therefore worth nothing. The caller
proves first: a stranger who connects to a listener is shown nothing that would help to guess the token.

A status other than 0 refuses the caller and ends the connection; the 32 bytes that follow are then zeros.
"""

from __future__ import annotations

import hashlib
import hmac
import os
import socket
import struct

from weight_update.errors import FormatError, JoinRefusedError
from weight_update.transports.shared_memory.unix_stream import SocketStream, peer_credentials

__all__ = ["PROOF_BYTES", "Challenge", "nonce", "proof", "prove_token", "require_same_user"]

_MAGIC = b"WUH1"
PROOF_BYTES = 32
"""Length of a proof, and of a nonce."""
_REPLY = struct.Struct(f"<4sB{PROOF_BYTES}s")
_REQUEST = struct.Struct(f"<4s{PROOF_BYTES}s{PROOF_BYTES}s")
_WELCOME, _WRONG_TOKEN, _OTHER_USER = 0, 1, 2
_REASONS = {
    _WRONG_TOKEN: "wrong token: the scheme was not made by this sender",
    _OTHER_USER: "it is not a process of the user that listens; run both as one user",
}


def nonce() -> bytes:
    """Return random bytes for one handshake."""
    return os.urandom(PROOF_BYTES)


def proof(token: str, role: bytes, nonces: bytes, context: str) -> bytes:
    """Return what only a holder of ``token`` can compute.

    Args:
        token: what both ends know.
        role: which end proves it, so that no proof can be sent back to the end it came from.
        nonces: of both ends.
        context: what the connection is for.
    """
    message = b"weight_update handshake" + role + nonces + context.encode()
    return hmac.new(token.encode(), message, hashlib.sha256).digest()


def require_same_user(sock: socket.socket) -> None:
    """Check that the other end of a Unix socket belongs to the user of this process, or to root.

    Raises:
        JoinRefusedError: it belongs to another user.
    """
    if sock.family is not socket.AF_UNIX:
        return
    _, user, _ = peer_credentials(sock)
    if user not in (os.geteuid(), 0):
        raise JoinRefusedError(
            f"the other end is a process of user {user}, and this of user {os.geteuid()}; both must be of one"
        )


def prove_token(stream: SocketStream, token: str, context: str, deadline: float | None) -> bytes:
    """Prove to a listener that this end knows the token, and let it prove the same.

    Args:
        stream: just connected.
        token: what both ends know.
        context: see :func:`proof`.
        deadline: on the monotonic clock, for all of it.

    Returns:
        a key for this connection, which both ends know and nobody else.

    Raises:
        JoinRefusedError: the listener refused, or does not know the token.
        LinkClosedError: the listener is gone.
        SyncTimeoutError: it did not answer in time.
    """
    require_same_user(stream.sock)
    theirs, mine = _next_reply(stream, deadline), nonce()
    nonces = theirs + mine
    stream.send(_REQUEST.pack(_MAGIC, mine, proof(token, b"C", nonces, context)), deadline)
    if not hmac.compare_digest(_next_reply(stream, deadline), proof(token, b"L", nonces, context)):
        raise JoinRefusedError("the process that listens there does not know the token; it is not our sender")
    return proof(token, b"K", nonces, context)


def _next_reply(stream: SocketStream, deadline: float | None) -> bytes:
    raw = bytearray(_REPLY.size)
    stream.recv_into(memoryview(raw), deadline)
    magic, status, value = _REPLY.unpack(raw)
    if magic != _MAGIC or status not in (_WELCOME, *_REASONS):
        raise JoinRefusedError("the process that listens there is not a listener of this library and version")
    if status != _WELCOME:
        raise JoinRefusedError(_REASONS[status])
    return bytes(value)


class Challenge:
    """The listener's end of one handshake; it reads and writes nothing itself.

    Args:
        token: what both ends know.
        context: see :func:`proof`.

    Attributes:
        greeting: the listener's first message.
        other_user: the listener's only message to a process of another user.
        wrong_token: the listener's last message to a caller that does not know the token.
    """

    other_user = _REPLY.pack(_MAGIC, _OTHER_USER, bytes(PROOF_BYTES))
    wrong_token = _REPLY.pack(_MAGIC, _WRONG_TOKEN, bytes(PROOF_BYTES))

    def __init__(self, token: str, context: str) -> None:
        self._token, self._context = token, context
        self._nonce = nonce()
        self._request = b""
        self.greeting = _REPLY.pack(_MAGIC, _WELCOME, self._nonce)

    @property
    def missing(self) -> int:
        """Bytes of the caller's message that have not come yet."""
        return _REQUEST.size - len(self._request)

    def add(self, data: bytes) -> None:
        """Take bytes of the caller's message, at most :attr:`missing`.

        Raises:
            FormatError: they belong to something else.
        """
        self._request += data
        if self._request[: len(_MAGIC)] != _MAGIC[: len(self._request)]:
            raise FormatError("the other end does not ask to join")

    def verify(self) -> tuple[bytes, bytes]:
        """Check the caller's proof, when nothing is missing.

        Returns:
            the listener's last message, and the key that :func:`prove_token` returns at the other end.

        Raises:
            JoinRefusedError: the caller does not know the token.
        """
        _, theirs, shown = _REQUEST.unpack(self._request)
        nonces = self._nonce + theirs
        if not hmac.compare_digest(shown, proof(self._token, b"C", nonces, self._context)):
            raise JoinRefusedError(_REASONS[_WRONG_TOKEN])
        mine = proof(self._token, b"L", nonces, self._context)
        return _REPLY.pack(_MAGIC, _WELCOME, mine), proof(self._token, b"K", nonces, self._context)
