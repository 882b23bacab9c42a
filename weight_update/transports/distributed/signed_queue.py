"""Queues of signed messages in a TCPStore."""

from __future__ import annotations

import contextlib
import hashlib
import hmac
import queue
import socket
import struct
import threading
import time
from typing import NamedTuple

from weight_update.errors import (
    FormatError,
    LinkClosedError,
    SyncTimeoutError,
    TransportError,
    kept_error,
    without_frames,
)
from weight_update.transports.distributed.store import REPLY_SECONDS, Store, TCPStore
from weight_update.transports.distributed.store_client import (
    LARGEST_VALUE,
    DroppedError,
    StoreClient,
    keep_alive,
)
from weight_update.transports.inherited_sockets import InheritedSockets, packed_address
from weight_update.transports.shared_memory.unix_stream import deadline_of, seconds_left

_FRONT = struct.Struct("<Q16s?")  # number of the message, its signature, whether it is the last message
_BACKLOG = 512
_LARGEST = LARGEST_VALUE - _FRONT.size
_RETRY_SECONDS = 0.1
_PORT_END = 4  # family and port come first in a packed address
_AHEAD = 4  # messages that are read before they are taken: strangers can write any number of them
_ATTEMPTS = 5
"""Connections that fail one after the other, each after a longer pause, before the store counts as gone."""


def open_store(address: str, port: int = 0) -> Store:
    """Start a TCPStore in this process that listens on ``address`` only; port 0 takes a free one.

    Raises:
        OSError: the address does not belong to this machine, or the port is taken.
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
                f"cannot listen on {address}:{port} ({error.strerror}); give address= of a network interface "
                "of this machine, and a free port=, or 0 for any",
            ) from None
        sock.listen(_BACKLOG)
        host, port = sock.getsockname()[:2]
        packed = packed_address((host, port))  # of all sockets accepted there
        sockets = InheritedSockets(packed[:_PORT_END] if host in ("0.0.0.0", "::") else packed)
        return Store(
            address,
            port,
            server=TCPStore(
                address, port, is_master=True, wait_for_workers=False, master_listen_fd=sock.detach()
            ),
            sockets=sockets,
        )


def find_store(address: str, port: int, timeout: float | None) -> Store:
    """Connect to the store at ``address``; wait until a process listens there.

    Without a timeout, it may take :data:`REPLY_SECONDS`.

    Raises:
        LinkClosedError: the store could not be reached in time.
        SyncTimeoutError: a process listens there, and did not answer in time.
    """
    limit = REPLY_SECONDS if timeout is None else timeout
    deadline = time.monotonic() + limit
    while True:
        try:
            return Store(address, port, max(deadline - time.monotonic(), _RETRY_SECONDS))
        except LinkClosedError as error:
            if time.monotonic() + _RETRY_SECONDS > deadline:
                refused = isinstance(error.__context__, ConnectionRefusedError)
                hint = "it may not have started, or may have shut down or died; " if refused else ""
                raise LinkClosedError(
                    f"no sender at {address}:{port} within {round(limit, 1):g} s ({error}); {hint}if it is "
                    "on another machine, give it address= of a network interface that this one can reach"
                ) from None
        except SyncTimeoutError:
            raise SyncTimeoutError(
                f"the sender at {address}:{port} did not answer within {round(limit, 1):g} s: it is stopped, "
                "something else listens there, or a network between the two drops what is sent"
            ) from None
        time.sleep(_RETRY_SECONDS)


class SignedQueue:
    """Messages in one direction, in order. Any thread puts and one thread takes, at the same time if need be.

    A store has no access control: any process that reaches its port may write into its queues. Therefore
    each message is numbered and signed with the token, and the reader continues after unsigned messages.

    Args:
        store: connection for :meth:`put`; :meth:`take` opens another one.
        ordered: whether a single end puts messages, so that their numbers must be consecutive.

    Attributes:
        count: number of messages that were put here.
        ended: whether the last message has arrived; the other end may be gone by then.
    """

    def __init__(self, store: Store, name: str, token: str, *, ordered: bool = True) -> None:
        self.name: str = name
        self._store, self._key, self._ordered = store, token.encode(), ordered
        self._arrived: queue.SimpleQueue[_Item | Exception] = queue.SimpleQueue()
        self._room = threading.Semaphore(_AHEAD)
        self._reader: threading.Thread | None = None
        self._client: StoreClient | None = None
        self._putting, self._beginning = threading.Lock(), threading.Lock()
        self.ended: bool = False
        self.count: int = 0
        self._taken = 0
        self._closed = threading.Event()

    def put(self, message: bytes, *, last: bool = False, timeout: float | None = None) -> None:
        """Add a message, as :meth:`Store.queue_push`. The reader stops after the ``last`` message.

        Raises:
            TransportError: the message is larger than a store accepts.
        """
        if len(message) > _LARGEST:
            raise TransportError(
                f"{len(message) / 1e6:.1f} MB of names and extra state do not fit into one message through "
                f"a TCPStore ({_LARGEST / 1e6:.1f} MB): fewer tensors, or less extra state"
            )
        deadline = time.monotonic() + (REPLY_SECONDS if timeout is None else timeout)
        if not self._putting.acquire(timeout=max(deadline - time.monotonic(), 0.0)):
            raise SyncTimeoutError("another thread is still writing to the store")
        try:
            front = _FRONT.pack(self.count, self._sign(self.count, message, last), last)
            self.count += 1
            self._store.queue_push(self.name, front + message, seconds_left(deadline))
        finally:
            self._putting.release()
        if last:
            self._store.await_reader(self.name)

    def flush(self, timeout: float | None = None) -> None:
        """Wait until the store has all messages that were put; raise as :meth:`put`."""
        self._store.queue_len(self.name, timeout)

    def take(self, timeout: float | None) -> bytes | None:
        """Return the next message, or None when none arrived within ``timeout`` seconds.

        Raises:
            LinkClosedError: the store is gone, or :meth:`close` was called.
            UnsignedError: a message arrived that was not signed with this end's token.
            FormatError: a message is missing.
        """
        self._begin()
        deadline = deadline_of(timeout)
        while True:
            try:
                left = seconds_left(deadline)
                item = self._arrived.get(timeout=left)
            except queue.Empty:
                return None
            if isinstance(item, Exception):
                self._arrived.put(item)  # for the next call
                raise kept_error(item)
            self._room.release()
            message = self._checked(item)
            if message is not None or left == 0:
                return message

    def _begin(self) -> None:
        """Start the thread that reads the queue, unless it was started or the queue was closed."""
        with self._beginning:
            if self._reader is not None or self._closed.is_set():
                return
            reader = threading.Thread(target=self._read, name=f"weight_update-{self.name}", daemon=True)
            try:
                reader.start()
            except RuntimeError as error:
                raise LinkClosedError(f"no thread could be started to read the store ({error})") from None
            self._reader = reader

    def _checked(self, item: _Item) -> bytes | None:
        """Return the message of ``item``, or None if it is a duplicate."""
        if not item.genuine:
            raise UnsignedError(item.message)
        if self._ordered and item.number > self._taken:
            raise FormatError(f"got message {item.number}, expected {self._taken}")
        if self._ordered and item.number < self._taken:
            return None  # another client put it back
        self._taken += 1
        return item.message

    def _open(self, raw: bytes | bytearray) -> _Item:
        number, signature, last = _FRONT.unpack(raw[: _FRONT.size].ljust(_FRONT.size, b"\0"))
        message = bytes(memoryview(raw)[_FRONT.size :])
        genuine = hmac.compare_digest(signature, self._sign(number, message, last))
        return _Item(number, last and genuine, genuine, message)

    def _read(self) -> None:
        """Read the queue, in a thread that has a connection of its own."""
        try:
            last = False
            while not self._closed.is_set() and not last:
                self._room.acquire()
                item = self._open(self._pop())
                last = self.ended = item.last
                if not self._closed.is_set():
                    self._arrived.put(item)
        except (TransportError, TimeoutError) as error:
            closed = isinstance(error, LinkClosedError)
            self._arrived.put(without_frames(error) if closed else LinkClosedError(str(error)))
        except Exception as error:  # noqa: BLE001 - take() raises it
            self._arrived.put(without_frames(error))
        finally:
            if self._client is not None:
                self._client.release()

    def _pop(self) -> bytes | bytearray:
        """Return the next item of the queue; reconnect where the connection was dropped."""
        for attempt in range(_ATTEMPTS):
            try:
                if self._client is None:
                    self._client = self._store.connect()
                    if self._closed.is_set():  # and close() did not see it
                        break
                return self._client.pop(self.name)
            except DroppedError:
                client, self._client = self._client, None
                if client is not None:
                    client.release()
                if attempt + 1 == _ATTEMPTS:
                    raise
                self._closed.wait(attempt * _RETRY_SECONDS)
                if self._closed.is_set():
                    break
            except LinkClosedError as error:
                if not self._closed.is_set():
                    self._store.give_up(error)
                raise
        raise LinkClosedError("this end was closed")

    def end(self, error: Exception) -> None:
        """Make :meth:`take` raise ``error`` after the messages that arrived: the other end is gone."""
        self._arrived.put(error)

    def await_last(self, seconds: float) -> None:
        """Wait up to ``seconds`` for the last message of an end that is gone; it may still be under way."""
        with contextlib.suppress(LinkClosedError):
            self._begin()
        if self._reader is not None:
            self._reader.join(seconds)

    def close(self) -> None:
        """Wake the thread in :meth:`take`, and take no more messages."""
        if self._closed.is_set():
            return
        self._closed.set()
        self._arrived.put(LinkClosedError("this end was closed"))
        self._room.release()
        client = self._client
        if client is not None:
            client.close()

    def _sign(self, number: int, message: bytes, last: bool) -> bytes:
        signed = b"%s %d %d %d " % (self.name.encode(), number, last, len(message))
        digest = hmac.new(self._key, signed, hashlib.sha256)
        digest.update(message)
        return digest.digest()[:16]


class _Item(NamedTuple):
    """A message as it was in the queue; ``genuine`` says whether it was signed with this end's token."""

    number: int
    last: bool
    genuine: bool
    message: bytes


class UnsignedError(Exception):
    """A message was not written by a process that knows the token.

    Attributes:
        message: content of the message, not to be trusted.
    """

    def __init__(self, message: bytes) -> None:
        self.message = message
        super().__init__("wrong token: a message was not signed with the token of this end")
