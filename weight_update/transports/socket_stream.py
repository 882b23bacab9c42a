"""Stream sockets with deadlines, for one reading and one writing thread at once."""

from __future__ import annotations

import contextlib
import errno
import os
import select
import socket
import struct
import time
import weakref
from collections.abc import Callable
from typing import Any, TypeVar

from weight_update.errors import LinkClosedError, SyncTimeoutError

SHORTAGES = (errno.EMFILE, errno.ENFILE, errno.ENOMEM, errno.ENOBUFS)
"""Errors of the operating system that pass when other programs free descriptors or memory."""
_CREDENTIALS = struct.Struct("iII")  # process, user and group, as Linux writes them
_GONE = "the other end is gone: its process has ended, or the connection was cut"
_STALLED = 60.0
"""Seconds without progress in the middle of a frame after which the other end counts as gone."""
_LEAST_STALLED = 1.0
"""The least of these seconds while a call connects, which shortens them to what it has left."""
_LONGEST_POLL = 1e6
"""Most seconds of one wait, however long the timeout is; ``poll()`` takes no more than 24 days."""
_CROWDED_SECONDS = 0.005

_T = TypeVar("_T")


def shortage(error: OSError) -> OSError:
    """Return ``error``, with the limit to raise in its message if there is one."""
    if error.errno != errno.EMFILE:
        return error
    return OSError(error.errno, f"{error.strerror}; raise the process's limit of open files (ulimit -n)")


def deadline_of(timeout: float | None) -> float | None:
    """Return the moment, on the monotonic clock, that is ``timeout`` seconds away; None for no timeout."""
    return None if timeout is None else time.monotonic() + timeout


def seconds_left(deadline: float | None) -> float | None:
    """Return the seconds until ``deadline``, at least 0; None for no deadline."""
    return None if deadline is None else max(deadline - time.monotonic(), 0.0)


def close_in_children(sock: socket.socket) -> None:
    """Close ``sock`` in forked children, where an open copy would hide the end of this process."""
    _ours.add(sock)


def peer_credentials(sock: socket.socket) -> tuple[int, int]:
    """Return process and user of the other end of a connected Unix socket.

    The kernel records them when the connection is made, and translates them to this process's namespaces: the
    process is 0 if it is not visible here.
    """
    raw = sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    pid, user, _ = _CREDENTIALS.unpack(raw)
    return pid, user


_ours: weakref.WeakSet[socket.socket] = weakref.WeakSet()


def _close_inherited() -> None:
    for sock in list(_ours):
        sock.close()
    _ours.clear()


os.register_at_fork(after_in_child=_close_inherited)


class SocketStream:
    """A connected, non-blocking stream socket, which forked children close.

    Every method raises LinkClosedError when the connection ends.
    """

    def __init__(self, sock: socket.socket) -> None:
        close_in_children(sock)
        sock.setblocking(False)
        self.sock = sock
        self.vanished: bool = False  # whether it ended because the other machine gave no sign of life
        self.in_use = _InUse(sock)  # context for a thread that uses `sock` by its number
        # Deadline of the call that connects, which a frame that stops must not delay.
        self.connect_until: float | None = None

    @property
    def patience(self) -> float:
        """Seconds that the other end may stop in the middle of a frame."""
        left = 0.0 if self.connect_until is None else self.connect_until - time.monotonic()
        return _STALLED if left <= 0 else min(max(left, _LEAST_STALLED), _STALLED)

    @property
    def peer_pid(self) -> int:
        """Process id of the other end in this pid namespace, from the kernel; 0 if it has none here."""
        try:
            return peer_credentials(self.sock)[0]
        except OSError:  # it was closed meanwhile
            return 0

    def wait_readable(self, timeout: float | None) -> bool:
        """Return whether bytes, or the end, can be read within ``timeout`` seconds."""
        with self.in_use:
            return self._poll(select.POLLIN, timeout)

    def send(self, data: bytes | memoryview, deadline: float | None) -> None:
        """Send all of ``data``; SyncTimeoutError if the deadline passed before all was sent."""
        view = memoryview(data).cast("B")
        while view:
            view = view[self.retry(self.await_room, deadline, self.sock.send, view) :]

    def send_now(self, data: bytes | memoryview) -> int:
        """Send the part of ``data`` that the socket takes without a wait; return its number of bytes."""
        try:
            return self.retry(self.await_room, 0.0, self.sock.send, data)
        except SyncTimeoutError:
            return 0

    def recv(self, size: int, deadline: float | None = None) -> bytes:
        """Receive exactly ``size`` bytes; without a deadline, wait as long as bytes keep coming.

        Raises:
            SyncTimeoutError: the deadline passed before all of them arrived.
        """
        received = bytearray(size)
        self.recv_into(memoryview(received), deadline)
        return bytes(received)

    def recv_into(self, view: memoryview, deadline: float | None) -> None:
        """Receive exactly as many bytes as ``view`` has; raise as :meth:`recv`."""
        while view:
            count = self.retry(self.await_more, deadline, self.sock.recv_into, view)
            if count == 0:
                raise LinkClosedError(_GONE)
            view = view[count:]

    def send_with_fd(self, data: bytes, fd: int, deadline: float | None) -> None:
        """Send a short record together with a file descriptor (Unix sockets only)."""
        sent = self.retry(self.await_room, deadline, socket.send_fds, self.sock, [data], [fd])
        self.send(data[sent:], deadline)

    def recv_available(self, limit: int, descriptors: list[int]) -> bytes:
        """Receive at least one byte and at most ``limit``; append file descriptors that come with them.

        No byte that was sent after a descriptor is received together with it (Unix sockets only).
        """
        data, fds, _, _ = self.retry(self.await_more, None, socket.recv_fds, self.sock, limit, 1)
        descriptors += fds
        if not data:
            raise LinkClosedError(_GONE)
        return data

    def peek(self, limit: int) -> bytes:
        """Return up to ``limit`` bytes that can be received now, and leave them there."""
        try:
            return self.sock.recv(limit, socket.MSG_PEEK)
        except OSError:
            return b""

    def close(self) -> None:
        """End the connection and wake threads that wait on it."""
        with contextlib.suppress(OSError):  # it may not be connected any more
            self.sock.shutdown(socket.SHUT_RDWR)
        self.in_use.close()

    def retry(
        self,
        wait: Callable[[float | None], None],
        deadline: float | None,
        action: Callable[..., _T],
        *args: Any,
    ) -> _T:
        """Return ``action(*args)``; where it raises BlockingIOError, call ``wait(deadline)`` and try again.

        ``wait`` is :meth:`await_room` or :meth:`await_more`.
        """
        with self.in_use:
            while True:
                try:
                    return action(*args)
                except BlockingIOError:
                    wait(deadline)
                except OSError as error:
                    if error.errno == errno.ETOOMANYREFS:
                        _await_readers(deadline)
                        continue
                    self.vanished = self.vanished or not isinstance(error, ConnectionError)
                    raise LinkClosedError(f"the other end is gone ({error})") from None

    def await_room(self, deadline: float | None) -> None:
        """Wait until bytes can be sent; SyncTimeoutError if they cannot before the deadline."""
        if not self._poll(select.POLLOUT, seconds_left(deadline)):
            raise SyncTimeoutError("the other end does not read")

    def await_more(self, deadline: float | None) -> None:
        """Wait until bytes, or the end, can be received; SyncTimeoutError if none can before the deadline."""
        limit = self.patience if deadline is None else seconds_left(deadline)
        if self._poll(select.POLLIN, limit):
            return
        if deadline is not None:
            raise SyncTimeoutError("the other end did not send the whole message in time")
        raise LinkClosedError(f"the other end stopped in the middle of a frame for {limit:.0f} s")

    def _poll(self, event: int, seconds: float | None) -> bool:
        poller = select.poll()
        poller.register(self.sock, event)
        return bool(poller.poll(None if seconds is None else min(max(seconds, 0.0), _LONGEST_POLL) * 1e3))


def _await_readers(deadline: float | None) -> None:
    """Wait a moment for readers to take descriptors off their sockets; SyncTimeoutError after the deadline.

    As many as a process may have open may be on their way, of all processes of one user.
    """
    if seconds_left(deadline) == 0:
        raise SyncTimeoutError(
            "too many descriptors wait for other ends to take them; raise the limit of open files (ulimit -n)"
        )
    time.sleep(_CROWDED_SECONDS)


class _InUse:
    """A context in which a thread uses a socket; a socket that is closed meanwhile is closed after it.

    The kernel gives the number of a closed socket to the next one at once, and a thread that is about to wait
    would wait for that one. No lock is used, because a forked child could find it held.
    """

    def __init__(self, sock: socket.socket) -> None:
        self._sock, self._closed = sock, False
        self._users: list[object] = []

    def __enter__(self) -> None:
        self._users.append(None)  # before the look at _closed: see close()
        if self._closed:
            self.__exit__()
            raise LinkClosedError("this end was closed")

    def __exit__(self, *exc_info: object) -> None:
        self.end(None)

    def begin(self, user: object) -> bool:
        """Begin a use that lasts until :meth:`end`, unless it has begun; return False after close()."""
        if user not in self._users:
            self._users.append(user)
        if self._closed:
            self.end(user)
        return not self._closed

    def end(self, user: object) -> None:
        """End a use, unless it has ended."""
        if user in self._users:
            self._users.remove(user)
        if self._closed and not self._users:
            self._sock.close()

    def close(self) -> None:
        """Close the socket as soon as no thread uses it."""
        self._closed = True  # before the look at _users: a thread that enters sees it, or is seen
        if not self._users:
            self._sock.close()
