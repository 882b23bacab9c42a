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

from weight_update.errors import JoinRefusedError
from weight_update.transports.socket_stream import SocketStream, peer_credentials

MAGIC = b"WUH1"
"""First bytes of each message."""
PROOF_BYTES = 32
"""Length in bytes of a proof, and of a nonce."""
_REPLY = struct.Struct(f"<4sB{PROOF_BYTES}s")
_REQUEST = struct.Struct(f"<4s{PROOF_BYTES}s{PROOF_BYTES}s")
REQUEST_BYTES = _REQUEST.size
"""Length in bytes of the caller's message."""
_WELCOME, _WRONG_TOKEN, _OTHER_USER = 0, 1, 2
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
    stream.send(_REQUEST.pack(MAGIC, mine, proof(token, b"C", nonces, context)), deadline)
    if not hmac.compare_digest(_next_reply(stream, deadline), proof(token, b"L", nonces, context)):
        raise JoinRefusedError(
            "the process that listens there does not know the token, so it is not the sender"
        )
    return proof(token, b"K", nonces, context)


def _next_reply(stream: SocketStream, deadline: float | None) -> bytes:
    magic, status, value = _REPLY.unpack(stream.recv(_REPLY.size, deadline))
    if magic != MAGIC or status not in (_WELCOME, *_REASONS):
        raise JoinRefusedError("the process that listens there is not a listener of this library and version")
    if status != _WELCOME:
        raise JoinRefusedError(_REASONS[status])
    return bytes(value)


class Challenge:
    """The listener's part of one handshake, without any input or output.

    Attributes:
        greeting: first message of the listener.
        other_user: only message of the listener to a process of another user.
        wrong_token: last message of the listener to a caller that does not know the token.
    """

    other_user = _REPLY.pack(MAGIC, _OTHER_USER, bytes(PROOF_BYTES))
    wrong_token = _REPLY.pack(MAGIC, _WRONG_TOKEN, bytes(PROOF_BYTES))

    def __init__(self, token: str, context: str) -> None:
        self._token, self._context = token, context
        self._nonce = os.urandom(PROOF_BYTES)
        self.greeting = _REPLY.pack(MAGIC, _WELCOME, self._nonce)

    def verify(self, request: bytes) -> tuple[bytes, bytes]:
        """Check the proof in the caller's message; JoinRefusedError if it does not hold.

        Return the listener's last message, and the key that :func:`prove_token` returns at the other end.
        """
        _, theirs, shown = _REQUEST.unpack(request)
        nonces = self._nonce + theirs
        if not hmac.compare_digest(shown, proof(self._token, b"C", nonces, self._context)):
            raise JoinRefusedError(_REASONS[_WRONG_TOKEN])
        mine = proof(self._token, b"L", nonces, self._context)
        return _REPLY.pack(MAGIC, _WELCOME, mine), proof(self._token, b"K", nonces, self._context)
