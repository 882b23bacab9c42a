"""Links over two multiprocessing queues; a message is one item, however many tensors it carries."""

from __future__ import annotations

import contextlib
import fcntl
import functools
import os
import queue
import socket
import threading
import time
import uuid
import weakref
from collections import deque
from dataclasses import replace
from functools import partial
from multiprocessing.util import Finalize
from typing import Any, Literal

import torch

from weight_update.errors import (
    FormatError,
    JoinRefusedError,
    LinkClosedError,
    NotEnoughMemoryError,
    SyncTimeoutError,
    TransportError,
    undo_on_error,
)
from weight_update.threads import call_in_thread
from weight_update.transports.base import Allocate, Buffer, Capabilities, TransportBackend
from weight_update.transports.queue_reader import QueueReader
from weight_update.transports.shared_memory.slots import (
    SharedBuffer,
    SlotTable,
    open_slot,
    slot_of,
)
from weight_update.transports.socket_stream import (
    close_in_children,
    deadline_of,
    peer_credentials,
    seconds_left,
)
from weight_update.transports.watched_process import WatchedProcess
from weight_update.wire.frames import PRELUDE_BYTES, Kind, Prelude, WeightChunk

_Item = tuple[bytes, tuple[int, int, str] | None]
_CHECK_SECONDS = 0.2
"""Seconds between checks of a waiting end that the other process lives; messages do not wait for it."""
_BACKLOG = 128
_PICKLED_BYTES = 1 << 12  # more than pickling adds to a message
_READ_BYTES = 1 << 16
_TRIES, _RETRY_SECONDS = 10, 0.02
_FLUSH_SECONDS = 5.0


class _ReaderLock:
    """The right to read a queue, which one process holds until it closes the lock or ends.

    A process of another user that holds the random name does not read the queue, and is ignored.

    Raises:
        JoinRefusedError: another process holds the lock.
    """

    def __init__(self, name: str) -> None:
        address = f"\0weight_update-claim-{name}"
        for _ in range(_TRIES):
            self._sock = _unix_socket()
            try:
                self._sock.bind(address)
                self._sock.listen(_BACKLOG)
                return
            except OSError:
                self._sock.close()
            if (owner := _owner_of(address)) is not None:
                break
            time.sleep(_RETRY_SECONDS)  # the owner has ended, or does not listen yet
        pid, user = owner or ("unknown", os.geteuid())
        if pid == os.getpid():
            raise JoinRefusedError(
                "another receiver in this process uses the queues of this worker: give each receiver an "
                "index of its own"
            )
        if user in (os.geteuid(), 0):
            raise JoinRefusedError(
                f"process {pid} uses the queues of this worker: end it before another takes its place, or "
                "give each worker an index of its own"
            )

    def close(self) -> None:
        """Release the lock for another process."""
        self._sock.close()


def _unix_socket() -> socket.socket:
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    close_in_children(sock)
    sock.setblocking(False)
    return sock


def _owner_of(address: str) -> tuple[int, int] | None:
    """Return process and user that listen on a Unix address, or None without a listener."""
    with _unix_socket() as sock:
        try:
            sock.connect(address)
        except OSError:
            return None
        return peer_credentials(sock)


class MPTransport(TransportBackend):
    """One end of a link over two ``multiprocessing`` queues.

    An item of a queue is ``(head, slot)``: the frame's prelude and header as bytes, and the location of its
    payload or None. Payloads are slots of shared memory that the receiver opens once and maps.

    Args:
        weight_queue: queue that carries chunks to the receiver.
        ack_queue: queue that carries chunks back. An end without it cannot join a scheme, but can use
            :meth:`~weight_update.TransportBackend.send_weights` and
            :meth:`~weight_update.TransportBackend.receive_weights`.
        timeout: seconds for waits without a timeout of their own; None waits as long as the other end lives.
        end: end of the link that this object is. None is a receiver's end if
            :meth:`~weight_update.TransportBackend.receive_weights` is called before anything was sent or
            received, else a sender's.
        directory: see :class:`~weight_update.SharedMemWeightSyncScheme`.
        name: random name of the two queues; with it, a receiver's end makes sure that it is their only
            reader.
    """

    capabilities: Capabilities = Capabilities(shares_memory=True, send_never_blocks=True, allows_rejoin=True)

    def __init__(
        self,
        weight_queue: Any,
        ack_queue: Any = None,
        timeout: float | None = None,
        *,
        end: Literal["sender", "receiver"] | None = None,
        directory: str | None = None,
        name: str | None = None,
    ) -> None:
        self._end, self._name = end, name
        self._reader_lock: _ReaderLock | None = None
        self._took_over = False
        self._outbox, self._inbox = weight_queue, ack_queue
        if end == "receiver":
            self._outbox, self._inbox = ack_queue, weight_queue
        self._reader = QueueReader(self._inbox)
        self._timeout = timeout
        self._directory = directory
        self._slots = SlotTable()
        self._other: WatchedProcess | None = None  # at the other end
        self._feeder: threading.Thread | None = None  # writes what the queue was given to its pipe
        self._unread = deque[_Item]()
        self._closed = False
        for side in (weight_queue, ack_queue):
            if side is not None:
                side.cancel_join_thread()  # it would wait for a dead reader for ever; see _flush_at_exit

    @property
    def _refused(self) -> bool:
        """Whether this end of a receiver has no right to use the queues."""
        return self._end == "receiver" and self._name is not None and self._reader_lock is None

    def watch(self, pid: int) -> None:
        """Watch the process at the other end, to notice its death."""
        other = WatchedProcess(pid)
        in_another_namespace = other.missing and self._end == "receiver"
        self._other = None if in_another_namespace else other

    def allocate(self, nbytes: int) -> Buffer:
        return SharedBuffer(nbytes, self._directory)

    def send_chunk(self, chunk: WeightChunk, timeout: float | None = None) -> None:
        """Send one chunk; waits only where the queue was created with a maximum size."""
        self._end = self._end or "sender"
        if self._closed or self._other_is_dead():
            raise LinkClosedError("the other process is gone")
        if self._refused:
            raise LinkClosedError("another receiver uses the queues of this worker")
        if self._outbox is None:
            raise TransportError("this end has no queue to send on")
        head, where = chunk.encode_head(checksum=False), None
        if chunk.kind is Kind.HELLO:
            where = (os.getpid(), -1, _pid_namespace())
            self._make_room(len(head))
        if chunk.payload is not None and chunk.payload_bytes:
            slot = slot_of(chunk.payload)
            where = (os.getpid(), slot.fd, slot.key)
        self._put((head, where), self._timeout if timeout is None else timeout)

    def recv_chunk(
        self, timeout: float | None = None, allocate: Allocate | None = None
    ) -> WeightChunk | None:
        self._end = self._end or "sender"
        deadline = deadline_of(self._timeout if timeout is None else timeout)
        while True:
            ended = self._closed or self._other_is_dead()  # first: it may have sent chunks before it died
            left = 0.0 if ended else seconds_left(deadline)
            item = self._get(_CHECK_SECONDS if left is None else min(left, _CHECK_SECONDS))
            if item is not None:
                return self._read_or_goodbye(item)
            if ended:
                if self._end == "sender":
                    self._other = None  # another worker may come
                raise LinkClosedError("the other process is gone")
            if left is not None and left <= _CHECK_SECONDS:
                return None

    def receive_weights(self, timeout: float | None = None, **options: Any) -> Any | None:
        if self._end is None:
            self._end, self._outbox, self._inbox = "receiver", self._inbox, self._outbox
            self._reader = QueueReader(self._inbox)
        return super().receive_weights(timeout, **options)

    def release(self, payload: torch.Tensor) -> None:
        self._slots.release(payload)

    def pinned(self, payload: torch.Tensor) -> torch.Tensor:
        return self._slots.pinned(payload)

    def disconnect(self) -> None:
        self._other = None
        with contextlib.suppress(LinkClosedError, SyncTimeoutError, NotEnoughMemoryError):
            self._put(None, _CHECK_SECONDS)

    def restart(self, timeout: float | None = None) -> None:
        """Start again, even where an earlier worker left the queues in use.

        A worker that was killed while it waited never released the queue's lock. Each queue has one reader
        and one writer, which is this process from now on, so a lock that is still held belongs to a dead
        worker.

        Raises:
            JoinRefusedError: another process uses these queues.
            LinkClosedError: the sender has said goodbye, or this end was closed.
        """
        if not self._took_over:  # later, a thread of this process may hold a lock
            if self._name is not None and self._reader_lock is None:  # else a signal handler interrupted this
                self._reader_lock = _ReaderLock(self._name)
            self._take_over_queues()
            self._took_over = True
        if self._closed:
            self.close()  # it may not have seen the lock
            raise LinkClosedError("this end was closed")
        if self._find_goodbye(0.0)[0] is not None:
            raise LinkClosedError("the sender was shut down")

    def _take_over_queues(self) -> None:
        """Release the locks that a dead worker held, and drop its unread messages."""
        for lock in (getattr(self._inbox, "_rlock", None), getattr(self._outbox, "_wlock", None)):
            if lock is not None:
                lock.acquire(timeout=_CHECK_SECONDS)
                lock.release()
        with contextlib.suppress(AttributeError, OSError):
            reader, lock = self._outbox._reader, self._outbox._rlock
            if reader.poll() and lock.acquire(timeout=_CHECK_SECONDS):
                try:
                    while reader.poll():
                        os.read(reader.fileno(), _READ_BYTES)
                finally:
                    lock.release()

    def _make_room(self, nbytes: int) -> None:
        """Enlarge the pipe so that a message fits into it, as far as the kernel allows.

        A worker that is killed while its message waits for room leaves a part of the message in the pipe. The
        sender would then take the next worker's message for the rest.
        """
        with contextlib.suppress(OSError):
            pipe = self._outbox._writer
            if fcntl.fcntl(pipe, fcntl.F_GETPIPE_SZ) < nbytes + _PICKLED_BYTES:
                fcntl.fcntl(pipe, fcntl.F_SETPIPE_SZ, nbytes + _PICKLED_BYTES)

    def close(self) -> None:
        self._closed = True
        for side in (self._outbox, self._inbox):
            if side is not None and not self._refused:  # else another receiver here may use it
                side.close()
        self._other = None
        self._slots.clear()
        if self._reader_lock is not None:
            self._reader_lock.close()

    def _put(self, item: _Item | None, timeout: float | None) -> None:
        try:
            _start_writer(self._outbox)
        except RuntimeError as error:
            raise NotEnoughMemoryError(f"no thread writes to the queue of the other end: {error}") from None
        try:
            self._outbox.put(item, timeout=timeout)
        except queue.Full:
            raise SyncTimeoutError("the other end does not read") from None
        except (OSError, ValueError):
            raise LinkClosedError("the queue was closed") from None
        except BaseException:
            self._finish_put()
            raise
        self._flush_at_exit()

    def _flush_at_exit(self) -> None:
        """Have this process wait at its end until the queue's thread has written all items to the pipe.

        A worker that ends right after an update has then confirmed it. Without a reader, the wait is short.
        """
        thread = self._outbox._thread
        if thread is not self._feeder:
            self._feeder = thread
            Finalize(thread, _join, [weakref.ref(thread)], exitpriority=-5)  # after the queue told it to end

    def _finish_put(self) -> None:
        """Finish a ``put()`` that a signal handler interrupted.

        It may still hold the lock of the queue's thread, or have left a waiter behind that would take the
        next notification; the item after it would then stay in this process.
        """
        condition = self._outbox._notempty
        condition.acquire(timeout=_CHECK_SECONDS)
        try:
            condition.notify_all()
        finally:
            condition.release()

    def _get(self, timeout: float) -> _Item | None:
        if self._inbox is None:
            raise TransportError("this end has no queue to receive on")
        if self._unread:
            return self._unread.popleft()
        try:
            item: _Item | None = self._reader.get(timeout)
        except queue.Empty:
            return None
        except (OSError, ValueError, EOFError):
            raise LinkClosedError("the queue was closed") from None
        if item is None:
            if self._end == "sender":
                raise LinkClosedError("the worker disconnected")
            raise LinkClosedError("the sender disconnected this worker; it has to join again")
        return item

    def _read_or_goodbye(self, item: _Item) -> WeightChunk:
        """Return the chunk; if its payload is gone because the sender has left, return its goodbye."""
        try:
            return self._read(item)
        except LinkClosedError:  # the worker would join again
            goodbye, self._unread = self._find_goodbye(_CHECK_SECONDS)
            if goodbye is None:
                raise
            return goodbye

    def _find_goodbye(self, timeout: float) -> tuple[WeightChunk | None, deque[_Item]]:
        """Return the sender's goodbye, if it is in the queue, and the messages before it."""
        found = deque[_Item]()
        with contextlib.suppress(LinkClosedError, FormatError):
            while (item := self._get(timeout)) is not None:
                if Prelude.decode(item[0][:PRELUDE_BYTES]).kind is Kind.GOODBYE:
                    return self._read(item), found
                found.append(item)
        return None, found

    def _read(self, item: _Item) -> WeightChunk:
        head, where = item
        pid, fd, key = where or (0, -1, "")

        def mapped(nbytes: int) -> torch.Tensor:
            return self._slots.payload(key, nbytes, lambda: open_slot(pid, fd, key))

        chunk = Prelude.decode(head[:PRELUDE_BYTES]).complete(head[PRELUDE_BYTES:], mapped)
        if chunk.kind is Kind.HELLO:
            if where is not None and key != _pid_namespace():
                self.capabilities = replace(self.capabilities, pid_is_visible=False)
            if self.capabilities.pid_is_visible:
                self.watch(chunk.header["pid"])
        return chunk

    def _other_is_dead(self) -> bool:
        other = self._other
        return other is not None and other.ended


def _start_writer(outbox: Any) -> None:
    """Start the thread of a queue that writes items to the pipe, as the first ``put()`` would.

    A signal handler could interrupt that, and then the queue would never write. No handler runs in the thread
    that does it here.

    Raises:
        RuntimeError: there can be no thread; the next call tries it again.
    """
    if outbox._thread is None and not outbox._closed:
        call_in_thread("weight_update-queue", _start_thread_of, outbox).result()


def _start_thread_of(outbox: Any) -> None:
    with outbox._notempty:
        if outbox._thread is None:
            with undo_on_error(partial(setattr, outbox, "_thread", None)):
                outbox._start_thread()


def _join(feeder: weakref.ref[threading.Thread]) -> None:
    thread = feeder()
    if thread is not None:
        thread.join(max(_flushed_by() - time.monotonic(), 0.0))


@functools.cache
def _flushed_by() -> float:
    """Return when this process, which ends, waits no longer for its queues, however many there are."""
    return time.monotonic() + _FLUSH_SECONDS


def _pid_namespace() -> str:
    """Return a name shared exactly by processes of one pid namespace; random if unknown."""
    try:
        return os.readlink("/proc/self/ns/pid")
    except OSError:
        return uuid.uuid4().hex
