"""Calls to a synchronizer: in this process, or over sockets as signed JSON.

The messages of a connection are those of :mod:`weight_update.transports.signed_stream`. No weights travel
here, but the endpoints do, with which explorers join the publishers of weights. Use a network that you trust.
"""

from __future__ import annotations

import logging
import secrets
import threading
import time
from abc import ABC, abstractmethod
from typing import Any, ClassVar

from weight_update.arguments import given_token, port_number
from weight_update.errors import (
    FormatError,
    JoinRefusedError,
    LinkClosedError,
    SyncTimeoutError,
    TransportError,
    undo_on_error,
)
from weight_update.synchronizer.service import Service
from weight_update.synchronizer.sessions import Reply
from weight_update.text import format_seconds
from weight_update.transports import signed_stream
from weight_update.transports.handshake import prove_token
from weight_update.transports.listener import Listener
from weight_update.transports.rate_limit import RateLimitedLog
from weight_update.transports.signed_stream import SignedStream
from weight_update.transports.socket_stream import SocketStream, seconds_left

_log = logging.getLogger(__name__)
CONTEXT = "synchronizer"
"""Context of handshakes with a synchronizer's server."""
_SEND_SECONDS = 30.0
"""Seconds that a client may take to read an answer."""


class Server:
    """A listener by which clients of other processes call a service, with a thread for each connection.

    A client may have several connections. When one ends without a goodbye, the client counts as gone. The
    arguments and errors are those of :meth:`~weight_update.Synchronizer.serve`.

    Attributes:
        address: ``host:port``, for clients.
        token: the secret, for clients.
    """

    def __init__(self, service: Service, address: str, port: int, token: str | None) -> None:
        self.token: str = given_token(token) or secrets.token_hex(16)
        self._service, self._closed = service, False
        self._log = RateLimitedLog(_log)
        sock = signed_stream.listen(address, port_number(port))
        self.address: str = f"{address}:{sock.getsockname()[1]}"
        self._listener = Listener(sock, self.token, CONTEXT, self._serve, "weight_update-synchronizer", _log)
        self._listener.start()

    def __repr__(self) -> str:
        state = vars(self)  # without an address while __init__ runs
        return f"<Server at {state.get('address')}{', closed' if state.get('_closed') else ''}>"

    def close(self) -> None:
        """Stop listening and close all connections; the service lives on."""
        self._closed = True
        self._listener.close()

    def _serve(self, stream: SocketStream, key: bytes, deadline: float) -> None:
        """Answer the calls of a connection, as a thread, until it ends."""
        connection = SignedStream(stream, key, listener=True)
        session: str | None = None
        try:
            request = connection.receive_json(seconds_left(deadline))
            while not self._closed:
                name, args = request.get("call"), request.get("args")
                if not isinstance(name, str) or not isinstance(args, dict):
                    raise FormatError("the message is not a call")
                if isinstance(args.get("session"), str):  # else the call does not depend on who calls
                    session = args["session"]
                connection.send_json(self._service.call(name, args), _SEND_SECONDS)
                if name == "bye":
                    session = None
                request = connection.receive_json(None)
        except (FormatError, TimeoutError) as error:
            self._log.warning("a connection to the synchronizer was ended: %s", error)
        except TransportError:
            pass  # the client closed it
        finally:
            connection.close()
            if session is not None and not self._closed:
                self._service.gone(session)


class Channel(ABC):
    """A way to call a synchronizer. Any thread may call at any time.

    Attributes:
        restarts: whether another synchronizer may take the place of one that was closed.
        address: address of the interface that leads to the synchronizer; None if that is in this process, or
            was not called yet.
    """

    restarts: ClassVar[bool] = True
    address: str | None = None

    @abstractmethod
    def call(self, name: str, args: dict[str, Any], timeout: float, longer: float = 0.0) -> Reply:
        """Call the synchronizer and return its answer; see :meth:`Service.call`.

        The synchronizer may give no sign of life for ``timeout`` seconds. It may work on the call for
        ``longer`` seconds beyond that while it is seen to live.

        Raises:
            LinkClosedError: the synchronizer is not there, or did not answer in time; it may have done what
                was asked.
            JoinRefusedError: it has another token.
        """

    def close(self) -> None:  # noqa: B027 - only connections have something to close
        """Close all connections, and make no more."""


class LocalChannel(Channel):
    """A channel to a synchronizer in this process."""

    restarts = False

    def __init__(self, service: Service) -> None:
        self._service = service

    def call(self, name: str, args: dict[str, Any], timeout: float, longer: float = 0.0) -> Reply:
        del timeout, longer  # a call that waits has a timeout of its own
        return self._service.call(name, args)


class SocketChannel(Channel):
    """A channel to a server at ``host:port``. A call has a connection of its own, which later calls reuse.

    Signs of life have another connection, which other calls do not use. Its end tells the server that this
    process has died, also while a call waits.
    """

    def __init__(self, address: str, token: str) -> None:
        host, _, port = address.rpartition(":")
        if not host or "/" in host or not port.isdigit():
            raise ValueError(f"a synchronizer's address is host:port, got {address!r}")
        self._host, self._port, self._token = host.strip("[]"), port_number(int(port)), token
        self._lock = threading.RLock()  # a signal handler may call close() while it is held
        self._idle: list[SignedStream] = []
        self._idle_beats: list[SignedStream] = []
        self._open: set[SignedStream] = set()  # those that are idle, and those of calls
        self._connecting: set[SocketStream] = set()
        self._closed = False

    def call(self, name: str, args: dict[str, Any], timeout: float, longer: float = 0.0) -> Reply:
        deadline = time.monotonic() + timeout
        idle = self._idle_beats if name == "beat" else self._idle
        connection = self._take(idle, deadline)
        try:
            connection.send_json({"call": name, "args": args}, seconds_left(deadline))
            reply = self._reply(connection, deadline, timeout, longer)
        except (LinkClosedError, FormatError, SyncTimeoutError) as error:
            self._drop()  # if one connection is gone, all are
            raise LinkClosedError(f"the synchronizer at {self._host}:{self._port}: {error}") from None
        with self._lock:
            if connection in self._open:  # else it was dropped meanwhile
                idle.append(connection)
        return reply

    def close(self) -> None:
        with self._lock:
            self._closed = True  # other threads may begin a call afterwards
            connecting = list(self._connecting)
        for stream in connecting:
            stream.close()
        self._drop()

    def _drop(self) -> None:
        with self._lock:
            connections, self._open = self._open, set()
            self._idle.clear()
            self._idle_beats.clear()
        for connection in connections:
            connection.close()

    def _reply(self, connection: SignedStream, deadline: float, timeout: float, longer: float) -> Reply:
        """Wait for the answer. While none comes, check that the synchronizer answers other calls."""
        last = deadline + longer
        while longer and not connection.wait_readable(max(deadline - time.monotonic(), 0.0) / 2):
            alive = time.monotonic() < last and self._is_alive(deadline)
            if time.monotonic() >= last:  # an earlier check was answered
                whole = format_seconds(timeout + longer)
                raise SyncTimeoutError(f"this call was not answered within {whole}, unlike others meanwhile")
            if not alive:
                raise SyncTimeoutError(f"the other end said nothing for {format_seconds(timeout)}")
            deadline = min(time.monotonic() + timeout, last)
        return connection.receive_json(seconds_left(deadline))

    def _is_alive(self, deadline: float) -> bool:
        try:
            self.call("status", {}, max(deadline - time.monotonic(), 0.0))
        except TransportError:
            return False
        return True

    def _take(self, idle: list[SignedStream], deadline: float) -> SignedStream:
        """Return a connection that no other call uses; make one if there is none."""
        with self._lock:
            self._require_open()
            if idle:
                return idle.pop()
        where = f"{self._host}:{self._port}"
        try:
            return self._connect(deadline)
        except JoinRefusedError as error:
            raise JoinRefusedError(f"the synchronizer at {where}: {error}") from None
        except SyncTimeoutError as error:
            raise LinkClosedError(f"the synchronizer at {where}: {error}") from None
        except OSError as error:
            self._require_open()
            raise LinkClosedError(f"no synchronizer at {where} ({error})") from None

    def _connect(self, deadline: float) -> SignedStream:
        """Make a connection; :meth:`close` ends its handshake."""
        stream = signed_stream.dial(self._host, self._port, deadline)
        try:
            with undo_on_error(stream.close):
                with self._lock:
                    self._connecting.add(stream)
                    self._require_open()  # last: a signal handler may call close() while the lock is held
                key = prove_token(stream, self._token, CONTEXT, deadline)
                connection = SignedStream(stream, key, listener=False)
                self.address = connection.local_address  # before others may close the connection
                with self._lock:
                    self._open.add(connection)
                    self._require_open()
                return connection
        finally:
            with self._lock:
                self._connecting.discard(stream)

    def _require_open(self) -> None:
        if self._closed:
            raise LinkClosedError("the channel was closed")
