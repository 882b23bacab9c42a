"""Both ends of one signed connection, in this process."""

from __future__ import annotations

import socket

from weight_update.transports.signed_stream import SignedStream, dial, listen
from weight_update.transports.socket_stream import SocketStream, deadline_of


def signed_pair(*, tcp: bool = False, key: bytes = bytes(32)) -> tuple[SignedStream, SignedStream]:
    """Return the caller's and the listener's end of a connection, over a pair of Unix sockets or over TCP."""
    if tcp:
        with listen("127.0.0.1") as sock:
            here = dial("127.0.0.1", sock.getsockname()[1], deadline_of(20.0))
            there = SocketStream(sock.accept()[0])
    else:
        here, there = map(SocketStream, socket.socketpair())
    return SignedStream(here, key, listener=False), SignedStream(there, key, listener=True)
