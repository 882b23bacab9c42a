"""Signed messages through the queues of a TCPStore."""

from __future__ import annotations

import contextlib
import hashlib
import hmac
import os
import queue
import socket
import stat
import struct
import threading
import time
from datetime import timedelta

from weight_update.errors import FormatError, LinkClosedError, TransportError
from weight_update.transports.c10d import DistError, Store, TCPStore, disown, keep_alive, leave_in_order, own
from weight_update.transports.stream import deadline_of, seconds_left

__all__ = ["Mailbox", "UnsignedError", "find_store", "open_store"]

_FRONT = struct.Struct("<Q16s?")  # number of the message, its signature, and whether it is the last
_FOREVER = timedelta(days=3650)
_BACKLOG = 512
_LARGEST = (8 << 20) - _FRONT.size  # a TCPStore cuts off who sends more
_PATIENCE = timedelta(seconds=10)
_RETRY_SECONDS = 0.1


def open_store(address: str, port: int = 0) -> Store:
    """A TCPStore that listens on ``address`` only, in this process.

    Args:
        address: of the interface to listen on.
        port: 0 takes a free one; ``store.port`` tells which.

    Raises:
        OSError: the address is not of this machine, or the port is taken.
    """
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    with socket.socket(family, socket.SOCK_STREAM) as sock:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        keep_alive(sock)  # and all that it accepts
        try:
            sock.bind((address, port))
        except OSError as error:
            raise OSError(
                error.errno,
                f"cannot listen on {address}:{port} ({error.strerror}); address= is that of an interface of "
                "this machine, port= a free one, or 0 for any",
            ) from None
        sock.listen(_BACKLOG)
        port = sock.getsockname()[1]
        _listening[sock.fileno()] = port
        raw = TCPStore(address, port, is_master=True, wait_for_workers=False, master_listen_fd=sock.detach())
        return Store(raw, server=True)


def find_store(address: str, port: int, timeout: float | None) -> Store:
    """A client of the store at ``address``; waits until somebody listens there.

    Raises:
        LinkClosedError: it could not be reached within ``timeout`` seconds (None: some).
    """
    limit = _PATIENCE.total_seconds() if timeout is None else timeout
    _await_listener(address, port, limit)
    try:
        raw = TCPStore(
            address, port, is_master=False, wait_for_workers=False, timeout=timedelta(seconds=limit)
        )
    except DistError as error:
        raise LinkClosedError(f"no sender at {address}:{port} ({_brief(error)})") from None
    raw.set_timeout(_PATIENCE)
    return Store(raw)


def _await_listener(address: str, port: int, limit: float) -> None:
    """Wait here: a store that cannot connect complains at length in the C++ log."""
    deadline = time.monotonic() + limit
    while True:
        try:
            left = max(deadline - time.monotonic(), _RETRY_SECONDS)
            return socket.create_connection((address, port), left).close()
        except OSError as error:
            if time.monotonic() + _RETRY_SECONDS > deadline:
                raise LinkClosedError(
                    f"no sender at {address}:{port} within {limit:g} s ({error}); if it is on another "
                    "machine, give it address= of a network interface that this one can reach"
                ) from None
        time.sleep(_RETRY_SECONDS)


_listening: dict[int, int] = {}
"""Ports by the descriptor of the socket that listens there, or did."""


def _close_inherited() -> None:
    """In a forked child: nobody may knock there when the sender is gone."""
    for fd, port in _listening.items():
        with contextlib.suppress(OSError):
            if not stat.S_ISSOCK(os.fstat(fd).st_mode):
                continue  # that store is gone, and its number was given to something else
            with socket.socket(fileno=os.dup(fd)) as sock:
                listens = sock.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN)
                if listens and sock.getsockname()[1] == port:
                    os.close(fd)
    _listening.clear()


os.register_at_fork(after_in_child=_close_inherited)


class Mailbox:
    """One direction of messages, in order. One thread puts, one thread takes, at the same time if need be.

    A store has no access control: whoever reaches its port may write into its queues. Each message is
    therefore numbered and signed with the token.

    Args:
        store: a client connection; for taking, another one like it is opened.
        name: of the queue.
        token: what both ends know.
        ordered: whether one end alone puts, so that the numbers must follow each other.

    Attributes:
        ended: whether the last message is here; the other end of the store may be gone by now.
    """

    def __init__(self, store: Store, name: str, token: str, *, ordered: bool = True) -> None:
        self._store, self.name, self._key, self._ordered = store, name, token.encode(), ordered
        self._arrived: queue.SimpleQueue[bytes | Exception] = queue.SimpleQueue()
        self._reader: threading.Thread | None = None
        self._reading = False
        self._read_all = threading.Event()
        self.ended = False
        self._put = self._taken = 0
        self._closed = False

    def put(self, message: bytes, *, last: bool = False) -> None:
        """Add a message; does not wait. After the ``last`` one nobody reads on.

        Raises:
            LinkClosedError: the store is gone.
            TransportError: it is larger than a store takes.
        """
        if len(message) > _LARGEST:
            raise TransportError(
                f"{len(message) / 1e6:.1f} MB of names and extra state do not fit into one message through "
                f"a TCPStore ({_LARGEST / 1e6:.1f} MB): fewer tensors, or less extra state"
            )
        front = _FRONT.pack(self._put, self._sign(self._put, message, last), last)
        self._put += 1
        self._push(front + message)
        if last:
            self._store.await_reader(self.name)

    def flush(self) -> None:
        """Wait until the store has what was put; raises as :meth:`put`."""
        try:
            self._store.reach()
        except DistError as error:
            raise LinkClosedError(f"the store is gone ({_brief(error)})") from None

    def take(self, timeout: float | None) -> bytes | None:
        """The next message, or None when none came within ``timeout`` seconds (None: wait for ever).

        Raises:
            LinkClosedError: the store is gone, or :meth:`close` was called.
            UnsignedError: what came was not signed with our token.
            FormatError: a message is missing.
        """
        if self._reader is None and not self._closed:
            self._reader = threading.Thread(target=self._read, name=f"weight_update-{self.name}", daemon=True)
            leave_in_order(self._reader)
            self._reading = True
            self._reader.start()
        deadline = deadline_of(timeout)
        while True:
            try:
                left = seconds_left(deadline)
                raw = self._arrived.get(timeout=left)
            except queue.Empty:
                return None
            if isinstance(raw, Exception):
                self._arrived.put(raw)  # for the next who asks
                raise raw
            message = self._checked(raw)
            if message is not None:
                return message

    def _checked(self, raw: bytes) -> bytes | None:
        """The message, or None if it came before."""
        number, _, message, genuine = self._open(raw)
        if not genuine:
            raise UnsignedError(message)
        if self._ordered and number > self._taken:
            raise FormatError(f"message {number} came, {self._taken} was next")
        if self._ordered and number < self._taken:
            return None  # somebody put it back
        self._taken += 1
        return message

    def _is_last(self, raw: bytes) -> bool:
        _, last, _, genuine = self._open(raw)
        return last and genuine

    def _open(self, raw: bytes) -> tuple[int, bool, bytes, bool]:
        """Number, whether it is the last, message, and whether it was signed with our token."""
        number, signature, last = _FRONT.unpack(raw[: _FRONT.size].ljust(_FRONT.size, b"\0"))
        message = raw[_FRONT.size :]
        return number, last, message, hmac.compare_digest(signature, self._sign(number, message, last))

    def _read(self) -> None:
        """Thread: wait on the store; it alone uses this client, which serves nobody else while it waits."""
        store = None
        try:
            store = own(self._store.clone())
            store.set_timeout(_FOREVER)
            last = False
            while not self._closed and not last:
                raw = bytes(store.queue_pop(self.name))
                last = self.ended = self._is_last(raw)
                if not self._closed:
                    self._arrived.put(raw)
        except DistError as error:
            self._arrived.put(LinkClosedError(f"the store is gone ({_brief(error)})"))
        finally:
            self._reading = False
            self._read_all.set()
            disown(store)

    def end(self, error: Exception | None = None) -> None:
        """The other end is gone: whoever takes gets what came before, then ``error``."""
        self._arrived.put(error or LinkClosedError("the other end is gone"))

    def await_last(self, seconds: float) -> None:
        """Wait so long for the last message of who is gone; it may still be on its way."""
        if self._reading:
            self._read_all.wait(seconds)

    def close(self) -> None:
        """Wake whoever takes; no more messages are taken."""
        if self._closed:
            return
        self._closed = True
        self._arrived.put(LinkClosedError("this end was closed"))
        if self._reading:
            with contextlib.suppress(LinkClosedError):
                self._push(b"")  # the reader is waiting for something
                self._store.await_reader(self.name)

    def _sign(self, number: int, message: bytes, last: bool) -> bytes:
        signed = b"%s %d %d %d " % (self.name.encode(), number, last, len(message))
        return hmac.new(self._key, signed + message, hashlib.sha256).digest()[:16]

    def _push(self, raw: bytes) -> None:
        try:
            self._store.queue_push(self.name, raw)
        except DistError as error:
            raise LinkClosedError(f"the store is gone ({_brief(error)})") from None


class UnsignedError(Exception):
    """A message was not written by a holder of our token.

    Attributes:
        message: it, not to be trusted.
    """

    def __init__(self, message: bytes) -> None:
        self.message = message
        super().__init__("wrong token: a message was not signed with ours")


def _brief(error: Exception) -> str:
    return str(error).partition("\n")[0][:120]
