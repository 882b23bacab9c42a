"""Sockets of C++ libraries, which forked children must not keep open.

While a child has one open, the other end does not notice that this process has died.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import socket
import stat
import struct
from collections.abc import Iterator

__all__ = ["InheritedSockets", "listening_sockets", "packed_address"]

_SO_ATTACH_FILTER = 26  # of Linux; the socket module has no name for it
_RETURN_0 = struct.pack("HBBI", 6, 0, 0, 0)
"""A filter of one instruction: keep 0 bytes of each packet."""


class InheritedSockets:
    """Sockets of this process, told by their addresses, that its forked children close.

    Args:
        local: addresses of ends here, as :func:`packed_address` gives them; a shorter one stands for all that
            begin with it.

    Attributes:
        local: addresses of ends here.
        remote: addresses of other ends.
    """

    def __init__(self, *local: bytes) -> None:
        self.local, self.remote = list(local), list[bytes]()
        _watched.append(self)

    def forget(self) -> None:
        """Let children keep them, as they are closed here."""
        _watched[:] = [one for one in _watched if one is not self]

    def keep_from_programs(self) -> None:
        """Close them also in programs that this process starts."""
        for fd, sock in _sockets():
            if self._matches(sock):
                os.set_inheritable(fd, False)

    def refuse_more(self) -> None:
        """Let nobody else connect to those that listen: what they were opened for is connected.

        The kernel drops attempts to connect. A library that accepts connections of strangers may keep them.
        """
        for _, sock in _sockets():
            listens = sock.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN)
            if listens and self._matches(sock):
                _drop_all(sock)

    def _matches(self, sock: socket.socket) -> bool:
        if any(packed_address(sock.getsockname()).startswith(one) for one in self.local):
            return True
        try:
            return bool(self.remote) and packed_address(sock.getpeername()) in self.remote
        except OSError:  # it is not connected
            return False


def packed_address(address: tuple[str, int] | tuple[str, int, int, int]) -> bytes:
    """Return the beginning of an address of TCP as the kernel writes it."""
    family = socket.AF_INET6 if ":" in address[0] else socket.AF_INET
    flow = bytes(4) if family == socket.AF_INET6 else b""
    host = address[0].partition("%")[0]
    return struct.pack("=H", family) + struct.pack("!H", address[1]) + flow + socket.inet_pton(family, host)


def listening_sockets() -> list[bytes]:
    """Return the addresses that this process listens on."""
    return [
        packed_address(sock.getsockname())
        for _, sock in _sockets()
        if sock.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN)
    ]


_watched: list[InheritedSockets] = []


def _sockets() -> Iterator[tuple[int, socket.socket]]:
    """Yield the TCP sockets of this process, each with its descriptor."""
    for fd in map(int, os.listdir("/proc/self/fd")):
        with contextlib.suppress(OSError):  # it is closed by now
            if not stat.S_ISSOCK(os.fstat(fd).st_mode):
                continue
            with socket.socket(fileno=os.dup(fd)) as sock:
                inet = sock.family in (socket.AF_INET, socket.AF_INET6)
                if inet and sock.type == socket.SOCK_STREAM:
                    yield fd, sock


def _drop_all(sock: socket.socket) -> None:
    """Have the kernel drop every packet to a socket that listens; what it has accepted goes on."""
    drop = ctypes.create_string_buffer(_RETURN_0)
    program = struct.pack("HP", 1, ctypes.addressof(drop))
    with contextlib.suppress(OSError):  # no filters in this kernel
        sock.setsockopt(socket.SOL_SOCKET, _SO_ATTACH_FILTER, program)


def _close_inherited() -> None:
    """Close them in a child; their numbers stay in use, as objects of C++ that the child has hold them."""
    if not _watched:
        return
    nothing = os.open(os.devnull, os.O_RDWR | os.O_CLOEXEC)
    for fd, sock in _sockets():
        if any(one._matches(sock) for one in _watched):
            os.dup2(nothing, fd, inheritable=False)
    os.close(nothing)
    _watched.clear()


os.register_at_fork(after_in_child=_close_inherited)
