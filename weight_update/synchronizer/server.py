"""A synchronizer for several processes: a socket, and a thread for each connection."""

from __future__ import annotations

import contextlib
import logging
import os
import secrets
import socket
import threading

from weight_update.errors import FormatError, TransportError
from weight_update.synchronizer.coordinator import Coordinator
from weight_update.synchronizer.wire import Wire
from weight_update.transports.stream import close_in_children

__all__ = ["TOKEN", "Server"]

TOKEN = "WEIGHT_UPDATE_TOKEN"
_log = logging.getLogger(__name__)
_GREETING_SECONDS = 30.0
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
        self._wires: set[Wire] = set()
        family = socket.AF_INET6 if ":" in address else socket.AF_INET
        self._sock = socket.create_server((address, port), family=family, backlog=_BACKLOG)
        self.address = f"{address}:{self._sock.getsockname()[1]}"
        close_in_children(self._sock)
        threading.Thread(target=self._run, name="weight_update-synchronizer", daemon=True).start()

    def close(self) -> None:
        """Stop listening and end all connections; the coordinator lives on."""
        self._closed = True
        with contextlib.suppress(OSError):
            self._sock.shutdown(socket.SHUT_RDWR)
        self._sock.close()
        for wire in list(self._wires):
            wire.close()

    def _run(self) -> None:
        while True:
            try:
                sock, peer = self._sock.accept()
            except OSError:
                return
            close_in_children(sock)
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            name = f"weight_update-client-{peer[1]}"
            threading.Thread(target=self._serve, args=(sock,), name=name, daemon=True).start()

    def _serve(self, sock: socket.socket) -> None:
        """Thread of a connection."""
        session: str | None = None
        wire = None
        try:
            wire = Wire(sock, self.token, server=True, timeout=_GREETING_SECONDS)
            self._wires.add(wire)
            request = wire.receive(_GREETING_SECONDS)
            while not self._closed:
                session = _session_of(request)
                wire.send(self._coordinator.call(*_call_of(request)))
                if request["call"] == "bye":
                    session = None
                request = wire.receive(None)
        except (FormatError, TimeoutError) as error:
            _log.warning("a connection to the synchronizer was ended: %s", error)
        except TransportError:
            pass  # it has ended
        finally:
            if wire is not None:
                self._wires.discard(wire)
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
