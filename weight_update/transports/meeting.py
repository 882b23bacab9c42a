"""How two processes of one host that know a secret come to share a Unix socket."""

from __future__ import annotations

import contextlib
import hashlib
import hmac
import os
import socket
import struct

from weight_update.errors import JoinRefusedError, LinkClosedError
from weight_update.transports.stream import Stream, close_in_children

__all__ = ["Ear", "call"]

_BACKLOG = 16
_CREDENTIALS = struct.Struct("3i")  # process, user and group, as Linux gives them
_PROOF = 32


class Ear:
    """Listens on an abstract Unix address, which vanishes with the process.

    Args:
        name: what the other end will call; used once.
        token: what both ends know.
    """

    def __init__(self, name: str, token: str) -> None:
        self._proof = _proof(name, token)
        self._sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        close_in_children(self._sock)
        self._sock.setblocking(False)
        self._sock.bind(_address(name))
        self._sock.listen(_BACKLOG)

    def answer(self) -> Stream:
        """The connection of who has called; does not wait.

        Raises:
            LinkClosedError: nobody who knows the token has.
        """
        while True:
            try:
                sock, _ = self._sock.accept()
            except BlockingIOError:
                raise LinkClosedError("the sender is gone") from None
            close_in_children(sock)
            with contextlib.suppress(OSError):
                if hmac.compare_digest(sock.recv(_PROOF, socket.MSG_DONTWAIT), self._proof):
                    return Stream(sock)
            sock.close()

    def close(self) -> None:
        """Listen no more."""
        self._sock.close()


def call(name: str, token: str) -> Stream | None:
    """Connect to the :class:`Ear` of that name; does not wait for it to answer.

    Returns:
        the connection; None if so many others called that there is no room.

    Raises:
        JoinRefusedError: there is no such ear of this user in this network namespace.
    """
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    close_in_children(sock)
    sock.setblocking(False)
    try:
        sock.connect(_address(name))
        raw = sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
        _, user, _ = _CREDENTIALS.unpack(raw)
        if user != os.geteuid():
            raise PermissionError(f"user {user} listens there")
        sock.send(_proof(name, token))
    except BlockingIOError:
        sock.close()
        return None
    except OSError as error:
        sock.close()
        raise JoinRefusedError(
            f"a worker that says it is on this host is not there any more ({error}); if it is, but in "
            "another network namespace or of another user, give it and the sender different host="
        ) from None
    return Stream(sock)


def _address(name: str) -> str:
    return f"\0weight_update-{name}"


def _proof(name: str, token: str) -> bytes:
    return hmac.new(token.encode(), b"meet " + name.encode(), hashlib.sha256).digest()
