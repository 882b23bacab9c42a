"""A synchronizer for several processes: a listener, and a thread for each connection of a client."""

from __future__ import annotations

import logging
import os
import secrets
import socket

from weight_update.errors import FormatError, TransportError
from weight_update.synchronizer.service import Coordinator
from weight_update.synchronizer.wire import CONTEXT, Wire
from weight_update.transports.listener import Listener
from weight_update.transports.rate_limit import RateLimitedLog
from weight_update.transports.shared_memory.unix_stream import SocketStream, seconds_left

__all__ = ["TOKEN", "Server"]

TOKEN = "WEIGHT_UPDATE_TOKEN"
_log = logging.getLogger(__name__)
_BACKLOG = 128


class Server:
    """Lets clients of other processes call a coordinator.

    A client may have several connections. When one ends without a goodbye, the client counts as gone.

    Args:
        coordinator: who answers.
        address: of the interface to listen on; the default of all callers is loopback.
        port: 0 takes a free one.
        token: what clients must show; None takes the environment's ``WEIGHT_UPDATE_TOKEN``, or makes one.

    Attributes:
        address: as ``host:port``, for clients.
        token: for clients.

    Raises:
        OSError: the address is not of this machine, or the port is taken.
    """

    def __init__(
        self, coordinator: Coordinator, address: str = "127.0.0.1", port: int = 0, token: str | None = None
    ) -> None:
        self.token = token or os.environ.get(TOKEN) or secrets.token_hex(16)
        self._coordinator, self._closed = coordinator, False
        self._log = RateLimitedLog(_log)
        family = socket.AF_INET6 if ":" in address else socket.AF_INET
        sock = socket.create_server((address, port), family=family, backlog=_BACKLOG)
        self.address = f"{address}:{sock.getsockname()[1]}"
        self._listener = Listener(sock, self.token, CONTEXT, self._serve, "weight_update-synchronizer", _log)
        self._listener.start()

    def close(self) -> None:
        """Stop listening and end all connections; the coordinator lives on."""
        self._closed = True
        self._listener.close()

    def _serve(self, stream: SocketStream, key: bytes, deadline: float) -> None:
        """Thread of a connection."""
        stream.sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        wire = Wire(stream, key, server=True)
        session: str | None = None
        try:
            request = wire.receive(seconds_left(deadline))
            while not self._closed:
                session = _session_of(request)
                wire.send(self._coordinator.call(*_call_of(request)))
                if request["call"] == "bye":
                    session = None
                request = wire.receive(None)
        except (FormatError, TimeoutError) as error:
            self._log.warning("a connection to the synchronizer was ended: %s", error)
        except TransportError:
            pass  # it has ended
        finally:
            wire.close()
            if session is not None and not self._closed:
                self._coordinator.gone(session)


def _call_of(request: dict[str, object]) -> tuple[str, dict[str, object]]:
    name, args = request.get("call"), request.get("args")
    if not isinstance(name, str) or not isinstance(args, dict):
        raise FormatError("not a call")
    return name, args


def _session_of(request: dict[str, object]) -> str | None:
    _, args = _call_of(request)
    session = args.get("session")
    return session if isinstance(session, str) else None
