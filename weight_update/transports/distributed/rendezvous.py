"""Rendezvous: a worker reads from a TCPStore in the sender's process where the sender listens.

The store has no access control: any process that reaches its port may read, write and delete. Therefore the
announcement is signed with the token, its key is derived from the token, and the sender writes it again and
again. Nothing else is kept in the store, so nobody who has joined needs it.
"""

from __future__ import annotations

import contextlib
import hmac
import json
import logging
import os
import socket
import struct
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from datetime import timedelta

from weight_update.errors import JoinRefusedError, LinkClosedError, SyncTimeoutError, TransportError
from weight_update.text import brief, format_seconds
from weight_update.threads import start_thread
from weight_update.transports.distributed.store import TCPStore, disown, own
from weight_update.transports.handshake import PROOF_BYTES, proof
from weight_update.transports.signed_stream import dial, listen
from weight_update.transports.socket_stream import SocketStream

_log = logging.getLogger(__name__)

REPLY_SECONDS = 10.0
"""Seconds that a store may take to answer where the caller sets no limit."""

_CONTEXT = "rendezvous"
_REPEAT_SECONDS = 0.05
"""Seconds after which the sender writes its announcement again."""
_MISSING_SECONDS = 50 * _REPEAT_SECONDS
"""Seconds after which a store without an announcement for our token counts as the store of someone else."""
_RETRY_SECONDS = 0.1
_DESCRIPTORS = 16  # more than a store needs with its thread and a few workers
_LARGEST = 8 << 20  # a TCPStore takes no larger value, though strangers may append to one

# the protocol of torch.distributed.TCPStore
_VALIDATE, _GET, _PING = 0, 3, 13
_MAGIC = struct.pack("<BI", _VALIDATE, 0x3C85F7CE)
_NUMBER = struct.Struct("<Q")


@dataclass(frozen=True)
class Announcement:
    """The addresses at which a sender listens."""

    host: str  # name of its host
    local: str  # name of its abstract Unix socket, for workers on that host
    port: int  # TCP port for workers on other hosts, at the address of the store
    name: str  # random name of the sender, for the context of handshakes


class SenderStore:
    """A TCPStore in this process that keeps the sender's announcement.

    Raises:
        OSError: as :func:`listen`.
        TransportError: the store does not work, for example because the process has too many open files, or
            PyTorch was built without libuv.
    """

    def __init__(self, address: str, port: int) -> None:
        sock = listen(address, port)
        self.address: str = address
        self.port: int = sock.getsockname()[1]
        self._descriptor = sock.detach()
        _listening.add(self._descriptor)
        self._closed = threading.Event()
        self._thread: threading.Thread | None = None
        identity = os.fstat(self._descriptor).st_ino
        try:
            _require_descriptors(self._descriptor)
            with _limit(self._descriptor, REPLY_SECONDS):
                store = TCPStore(
                    address,
                    self.port,
                    is_master=True,
                    timeout=timedelta(seconds=REPLY_SECONDS),
                    wait_for_workers=False,
                    master_listen_fd=self._descriptor,
                )
            self._server = own(store)
        except BaseException as error:
            _listening.discard(self._descriptor)
            with contextlib.suppress(OSError):
                if os.fstat(self._descriptor).st_ino == identity:  # else the store has closed it
                    os.close(self._descriptor)
            if not isinstance(error, RuntimeError | OSError):
                raise
            where = f"{address}:{self.port}"
            raise TransportError(f"the sender cannot open its store at {where} {_why_not(error)}") from None

    def announce(self, where: Announcement, token: str) -> None:
        """Write the announcement, and keep writing it until :meth:`close`; called once."""
        key, signed = _key(token), _signed(json.dumps(asdict(where)).encode(), token)
        self._server.set(key, signed)
        self._thread = start_thread("weight_update-announce", self._repeat, key, signed, in_order=True)

    def close(self) -> None:
        """Close the store; calling it twice is fine."""
        self._closed.set()
        if self._thread is not None:
            self._thread.join(REPLY_SECONDS)
        _listening.discard(self._descriptor)
        disown(self._server)
        self._server = None  # which listens until nothing refers to it

    def _repeat(self, key: str, signed: bytes) -> None:
        try:
            while not self._closed.wait(_REPEAT_SECONDS):
                self._server.set(key, signed)
        except RuntimeError as error:  # a firewall, for example, has cut this process's own connection
            if self._closed.is_set():
                return
            _log.warning(
                "the sender at %s:%d does not write its announcement again: %s; workers can join unless "
                "another process overwrites the announcement; if they cannot, start the sender again",
                *(self.address, self.port, brief(error)),
            )


def _why_not(error: Exception) -> str:
    """Return the reason why a store could not be opened, and the remedy."""
    reason = str(error).partition("\n")[0]
    if "without libuv" in reason:  # PyTorch advises USE_LIBUV=0: a store that one stranger can block
        return "(this PyTorch was built without libuv); install PyTorch's own build: pip install torch"
    return f"({reason}); if it has too many open files, raise the process's limit (ulimit -n)"


def _require_descriptors(one: int) -> None:
    """Raise OSError unless this process may open some more; PyTorch's store aborts a process that may not."""
    with contextlib.ExitStack() as copies:
        for _ in range(_DESCRIPTORS):
            copies.callback(os.close, os.dup(one))


@contextlib.contextmanager
def _limit(descriptor: int, seconds: float) -> Iterator[None]:
    """End the making of a store that listens on ``descriptor`` after some seconds, by a RuntimeError.

    A store connects to its own server, and waits for an answer without limit. There is none as long as this
    process has no descriptor left: workers took them. The connection ends when nobody listens any more.
    """
    made, sock = threading.Event(), socket.socket(fileno=os.dup(descriptor))
    last = seconds + _RETRY_SECONDS  # later than the store's own limit, so that it does not retry

    def watch() -> None:
        if not made.wait(last):
            sock.shutdown(socket.SHUT_RDWR)

    with sock:
        _listening.add(sock.fileno())
        thread = start_thread("weight_update-rendezvous", watch)
        try:
            yield
        finally:
            made.set()
            thread.join()
            _listening.discard(sock.fileno())
        if not sock.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN):
            raise RuntimeError(f"it did not answer in {format_seconds(seconds)}")


def find_sender(
    address: str,
    port: int,
    token: str,
    timeout: float | None,
    *,
    again: bool = False,
    require_open: Callable[[], None] = lambda: None,
) -> Announcement:
    """Return the announcement in the store at ``address``; wait until a process listens there.

    ``timeout`` is in seconds; None takes :data:`REPLY_SECONDS`. With ``again``, the sender was found before.
    If nobody listens there, it is then gone, and none is waited for; if no way leads there, the link may come
    back. ``require_open`` raises if the caller was closed meanwhile.

    Raises:
        LinkClosedError: the store could not be reached in time, or the sender is gone.
        SyncTimeoutError: a process listens there, and did not answer in time; or see ``again``.
        JoinRefusedError: the store has no announcement that is signed with ``token``.
    """
    limit = REPLY_SECONDS if timeout is None else timeout
    deadline = time.monotonic() + limit
    while True:
        require_open()
        retry_at = time.monotonic() + _RETRY_SECONDS
        try:
            with contextlib.closing(dial(address, port, max(deadline, retry_at))) as stream:
                return _read_announcement(stream, address, port, token, deadline)
        except JoinRefusedError:
            raise
        except SyncTimeoutError:
            raise SyncTimeoutError(
                f"the sender at {address}:{port} did not answer within {format_seconds(limit)}: it is "
                "stopped, something else listens there, or a network between the two drops what is sent"
            ) from None
        except OSError as error:
            problem = error
        refused = isinstance(problem, ConnectionRefusedError)
        if refused and again:
            raise LinkClosedError(f"the sender at {address}:{port} is gone ({problem})")
        if time.monotonic() + _RETRY_SECONDS > deadline:
            if again:
                raise SyncTimeoutError(f"no way leads to the sender at {address}:{port} now ({problem})")
            hint = "it may not have started, or may have shut down or died; " if refused else ""
            raise LinkClosedError(
                f"no sender at {address}:{port} within {format_seconds(limit)} ({problem}); {hint}if it is "
                "on another machine, give it address= of a network interface that this one can reach"
            )
        time.sleep(_RETRY_SECONDS)


def _read_announcement(
    stream: SocketStream, address: str, port: int, token: str, deadline: float
) -> Announcement:
    """Read from a store; raise LinkClosedError if it is gone, and SyncTimeoutError if it is silent."""
    stream.send(_MAGIC + struct.pack("<BI", _PING, port), deadline)
    pong = stream.recv(4, deadline)
    give_up = time.monotonic() + _MISSING_SECONDS
    key = b"/" + _key(token).encode()  # as torch.distributed writes it
    while time.monotonic() < min(give_up, deadline):
        stream.send(bytes([_GET]) + _NUMBER.pack(len(key)) + key, deadline)
        (size,) = _NUMBER.unpack(length := stream.recv(_NUMBER.size, deadline))
        if size > _LARGEST:
            raise LinkClosedError(f"what answers there is not a sender: it sent {pong + length!r}")
        if size:  # a sender with our token writes this key, so a stranger hides what it wrote
            give_up = deadline
        signed = stream.recv(size, deadline)
        body = signed[PROOF_BYTES:]
        if hmac.compare_digest(signed, _signed(body, token)):
            return Announcement(**json.loads(body))
    if time.monotonic() >= deadline:
        raise SyncTimeoutError
    raise JoinRefusedError(
        f"the sender at {address}:{port} has another token, or its init_on_sender() failed: pass the scheme "
        "to the worker after init_on_sender(), or give both ends the same token= (or WEIGHT_UPDATE_TOKEN)"
    )


def _key(token: str) -> str:
    return f"weight_update/{proof(token, b'A', b'', _CONTEXT).hex()}"


def _signed(body: bytes, token: str) -> bytes:
    return proof(token, b"A", b"", f"{_CONTEXT} {body.decode(errors='replace')}") + body


_listening: set[int] = set()
"""Descriptors on which a TCPStore listens; an open copy in a child would hide the death of this process."""


def _close_inherited() -> None:
    """Close the sockets in a child; keep their descriptors in use, because C++ objects refer to them."""
    if _listening:
        nothing = os.open(os.devnull, os.O_RDWR | os.O_CLOEXEC)
        for descriptor in _listening:
            os.dup2(nothing, descriptor, inheritable=False)
        os.close(nothing)
        _listening.clear()


os.register_at_fork(after_in_child=_close_inherited)
