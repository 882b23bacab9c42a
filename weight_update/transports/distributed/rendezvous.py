"""Rendezvous: a worker asks at a port that it knows where the sender listens.

Any process that reaches the port may ask. Therefore the announcement is signed with the token, and its key is
derived from the token. Nobody who has joined needs the port.
"""

from __future__ import annotations

import contextlib
import hmac
import json
import logging
import struct
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass

from weight_update.errors import JoinRefusedError, LinkClosedError, SyncTimeoutError
from weight_update.text import format_seconds
from weight_update.transports.handshake import PROOF_BYTES, proof, received
from weight_update.transports.listener import Listener
from weight_update.transports.signed_stream import dial, listen
from weight_update.transports.socket_stream import SocketStream

_log = logging.getLogger(__name__)

REPLY_SECONDS = 10.0
"""Seconds that a sender may take to answer where the caller sets no limit."""

_CONTEXT = "rendezvous"
_RETRY_SECONDS = 0.1
_LARGEST = 1 << 20  # bytes; no announcement is larger

# the part of the protocol of torch.distributed.TCPStore that is used here
_VALIDATE, _GET, _PING = 0, 3, 13
_MAGIC = struct.pack("<BI", _VALIDATE, 0x3C85F7CE)
_NUMBER = struct.Struct("<Q")


@dataclass(frozen=True)
class Announcement:
    """Where a sender listens.

    Attributes:
        host: name of its host.
        local: name of its abstract Unix socket, for workers on that host.
        port: TCP port for workers on other hosts, at the address of the store.
        name: random name of the sender, for the context of handshakes.
    """

    host: str
    local: str
    port: int
    name: str


class SenderStore(Listener):
    """The sender's end of the rendezvous: it answers any process that asks for the announcement.

    Nobody can write into it. It answers as a TCPStore that holds the announcement only, and ends a connection
    over which something else arrives.

    Raises:
        OSError: as :func:`listen`.
    """

    def __init__(self, address: str, port: int) -> None:
        sock = listen(address, port)
        self.address: str = address
        self.port: int = sock.getsockname()[1]
        super().__init__(sock, "", _CONTEXT, lambda *_: None, "weight_update-announce", _log)

    def announce(self, where: Announcement, token: str) -> None:
        """Answer with the announcement from now on, until :meth:`close`; called once."""
        self._request, self._value = _request(token), _signed(json.dumps(asdict(where)).encode(), token)
        self.start()

    def _handshake(self, stream: SocketStream) -> Iterator[None]:
        now = time.monotonic()  # messages this small always fit into the socket's buffer
        ping = yield from received(stream, len(_MAGIC) + 5, _MAGIC + bytes([_PING]))
        stream.send(ping[-4:], now)
        while True:
            request = yield from received(stream, len(self._request), self._request[:1])
            value = self._value if request == self._request else b""
            stream.send(_NUMBER.pack(len(value)) + value, now)

    def _end(self, stream: SocketStream, error: Exception) -> None:
        stream.close()  # as a worker does that has its answer, so this is nothing to report


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
    stream.send(_request(token), deadline)
    (size,) = _NUMBER.unpack(length := stream.recv(_NUMBER.size, deadline))
    if size > _LARGEST:
        raise LinkClosedError(f"what answers there is not a sender: it sent {pong + length!r}")
    signed = stream.recv(size, deadline)
    body = signed[PROOF_BYTES:]
    if not hmac.compare_digest(signed, _signed(body, token)):
        raise JoinRefusedError(
            f"the sender at {address}:{port} has another token, or its init_on_sender() failed: pass the "
            "scheme to the worker after init_on_sender(), or give both ends the same token= (or "
            "WEIGHT_UPDATE_TOKEN)"
        )
    return Announcement(**json.loads(body))


def _request(token: str) -> bytes:
    """Return the bytes that ask for the announcement of a sender with ``token``."""
    key = f"/weight_update/{proof(token, b'A', b'', _CONTEXT).hex()}".encode()  # as TCPStore writes it
    return bytes([_GET]) + _NUMBER.pack(len(key)) + key


def _signed(body: bytes, token: str) -> bytes:
    return proof(token, b"A", b"", f"{_CONTEXT} {body.decode(errors='replace')}") + body
