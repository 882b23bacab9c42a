"""A Unix socket between two processes of one host that share a token.

The worker listens at a name that is used once. The sender reads the name from a signed message, so the name
also serves as a nonce. The sender connects and writes a second nonce and its proof of the token; the worker
answers with its own proof. Both proofs cover the nonce and the name, see
:mod:`~weight_update.transports.handshake`. The worker never waits; the sender waits only before its first
message.
"""

from __future__ import annotations

import contextlib
import hmac
import os
import socket

from weight_update.errors import JoinRefusedError, LinkClosedError, SyncTimeoutError
from weight_update.transports.handshake import PROOF_BYTES, proof, require_same_user
from weight_update.transports.shared_memory.unix_stream import SocketStream, close_in_children, seconds_left

_BACKLOG = 16


class LocalListener:
    """Worker's end: a listener on an abstract Unix address, which vanishes with the process.

    The ``name`` that the sender connects to is used once.
    """

    def __init__(self, name: str, token: str) -> None:
        self._name, self._token = name, token
        self._sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        close_in_children(self._sock)
        self._sock.setblocking(False)
        self._sock.bind(_address(name))
        self._sock.listen(_BACKLOG)

    def answer(self) -> SocketStream:
        """Accept the sender's connection without waiting.

        Raises:
            LinkClosedError: no process that knows the token has connected.
        """
        while True:
            try:
                sock, _ = self._sock.accept()
            except BlockingIOError:
                raise LinkClosedError("the sender is gone") from None
            close_in_children(sock)
            with contextlib.suppress(OSError):
                if self._knows_token(sock):
                    return SocketStream(sock)
            sock.close()

    def _knows_token(self, sock: socket.socket) -> bool:
        """Return whether the caller's proof holds; if so, answer with the proof of this end."""
        require_same_user(sock)
        request = sock.recv(2 * PROOF_BYTES, socket.MSG_DONTWAIT)
        theirs, shown = request[:PROOF_BYTES], request[PROOF_BYTES:]
        if not hmac.compare_digest(shown, _proof(self._token, b"C", theirs, self._name)):
            return False
        sock.send(_proof(self._token, b"L", theirs, self._name))
        return True

    def close(self) -> None:
        """Stop listening."""
        self._sock.close()


class LocalCall:
    """Sender's end: a connection to a :class:`LocalListener` that still owes the proof ``answer``."""

    def __init__(self, stream: SocketStream, answer: bytes) -> None:
        self.stream: SocketStream = stream
        self._answer = answer

    def await_answer(self, deadline: float | None) -> None:
        """Wait until the other end has proved that it knows the token.

        Raises:
            LinkClosedError: the other end is gone, or does not know the token.
            SyncTimeoutError: the other end did not answer in time.
        """
        if not self.stream.wait_readable(seconds_left(deadline)):
            raise SyncTimeoutError("the worker did not answer in time")
        if not hmac.compare_digest(self.stream.recv(PROOF_BYTES, deadline), self._answer):
            self.stream.close()
            raise LinkClosedError("the process that listens for the worker does not know the token")


def call_local(name: str, token: str) -> LocalCall | None:
    """Connect to the :class:`LocalListener` of that name; do not wait for its answer.

    Returns:
        the connection; None if the listener's backlog is full.

    Raises:
        JoinRefusedError: this user has no such listener in this network namespace.
    """
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    close_in_children(sock)
    sock.setblocking(False)
    try:
        sock.connect(_address(name))
        require_same_user(sock)
        mine = os.urandom(PROOF_BYTES)
        sock.send(mine + _proof(token, b"C", mine, name))
    except BlockingIOError:
        sock.close()
        return None
    except OSError as error:
        sock.close()
        raise JoinRefusedError(
            f"a worker that says it is on this host is not there any more ({error}); if it runs in another "
            "network namespace or as another user, give it and the sender different host="
        ) from None
    return LocalCall(SocketStream(sock), _proof(token, b"L", mine, name))


def _address(name: str) -> str:
    return f"\0weight_update-{name}"


def _proof(token: str, role: bytes, nonces: bytes, name: str) -> bytes:
    return proof(token, role, nonces, f"meet {name}")
