"""Sockets of C++ libraries, which forked children have to close.

An open copy in a child hides the death of this process from the other end.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import socket
import stat
import struct
from collections.abc import Iterator
from typing import Any

_SO_ATTACH_FILTER = 26  # of Linux; the socket module has no name for it
_RETURN_0 = struct.pack("HBBI", 6, 0, 0, 0)
"""A filter of one instruction: keep 0 bytes of each packet."""


class InheritedSockets:
    """Sockets of this process, identified by address, that its forked children close.

    Attributes:
        local: local addresses, as returned by :func:`packed_address`; a shorter one matches every address
            that begins with it.
        remote: remote addresses.
    """

    def __init__(self, *local: bytes) -> None:
        self.local: list[bytes] = list(local)
        self.remote: list[bytes] = []
        _watched.append(self)

    def forget(self) -> None:
        """Stop watching these sockets, because they are closed here."""
        _watched[:] = [one for one in _watched if one is not self]

    def keep_from_programs(self) -> None:
        """Close these sockets also in programs that this process starts."""
        for fd, sock in _sockets():
            if self._matches(sock):
                with contextlib.suppress(OSError):  # another thread closed it
                    os.set_inheritable(fd, False)

    def refuse_more(self) -> None:
        """Admit no further connections: those that the listening sockets were opened for exist.

        The kernel drops further attempts to connect. A library that accepts connections of strangers may keep
        them open.
        """
        for _, sock in _sockets():
            if self._matches(sock) and _listens(sock):
                _drop_all(sock)

    def shut_down(self) -> None:
        """End the connections of these sockets; both ends notice."""
        for _, sock in _sockets():
            if self._matches(sock) and not _listens(sock):
                with contextlib.suppress(OSError):  # it ended by itself
                    sock.shutdown(socket.SHUT_RDWR)

    def listening_addresses(self) -> list[tuple[Any, ...]]:
        """Return the addresses, as of :meth:`socket.socket.getsockname`, that these sockets listen on."""
        return [sock.getsockname() for _, sock in _sockets() if self._matches(sock) and _listens(sock)]

    def _matches(self, sock: socket.socket) -> bool:
        if any(packed_address(sock.getsockname()).startswith(one) for one in self.local):
            return True
        try:
            return bool(self.remote) and packed_address(sock.getpeername()) in self.remote
        except OSError:  # it is not connected
            return False


def packed_address(address: tuple[str, int] | tuple[str, int, int, int]) -> bytes:
    """Return the beginning of a TCP address in the kernel's layout."""
    family = socket.AF_INET6 if ":" in address[0] else socket.AF_INET
    flow = bytes(4) if family == socket.AF_INET6 else b""
    host = address[0].partition("%")[0]
    return struct.pack("=H", family) + struct.pack("!H", address[1]) + flow + socket.inet_pton(family, host)


def listening_sockets() -> list[bytes]:
    """Return the addresses that this process listens on."""
    return [packed_address(sock.getsockname()) for _, sock in _sockets() if _listens(sock)]


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


def _listens(sock: socket.socket) -> bool:
    return bool(sock.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN))


def _drop_all(sock: socket.socket) -> None:
    """Have the kernel drop every packet to a listening socket; accepted connections stay open."""
    drop = ctypes.create_string_buffer(_RETURN_0)
    program = struct.pack("HP", 1, ctypes.addressof(drop))
    with contextlib.suppress(OSError):  # no filters in this kernel
        sock.setsockopt(socket.SOL_SOCKET, _SO_ATTACH_FILTER, program)


def _close_inherited() -> None:
    """Close the sockets in a child; keep their descriptors in use, because C++ objects refer to them."""
    if not _watched:
        return
    nothing = os.open(os.devnull, os.O_RDWR | os.O_CLOEXEC)
    for fd, sock in _sockets():
        if any(one._matches(sock) for one in _watched):
            os.dup2(nothing, fd, inheritable=False)
    os.close(nothing)
    _watched.clear()


os.register_at_fork(after_in_child=_close_inherited)
