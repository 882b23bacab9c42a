"""How a client reaches its synchronizer: in this process, over a socket, or as a Ray actor."""

from __future__ import annotations

import threading
import time
from abc import ABC, abstractmethod
from typing import Any, ClassVar

from weight_update.errors import FormatError, LinkClosedError, SyncTimeoutError, TransportError
from weight_update.synchronizer.service import Coordinator
from weight_update.synchronizer.sessions import Reply
from weight_update.synchronizer.wire import Wire, connect
from weight_update.transports.shared_memory.unix_stream import seconds_left

__all__ = ["Channel", "LocalChannel", "SocketChannel"]


class Channel(ABC):
    """Carries calls. Any thread may call at any time."""

    @abstractmethod
    def call(self, name: str, args: dict[str, Any], timeout: float, longer: float = 0.0) -> Reply:
        """The answer of the synchronizer.

        Args:
            name: see :meth:`Coordinator.call`.
            args: see there.
            timeout: seconds that the synchronizer may give no sign of life.
            longer: seconds beyond that for which it may work on the call while it is seen to live.

        Raises:
            LinkClosedError: it is not there, or did not answer in time; it may have done what was asked.
            JoinRefusedError: it has another token.
        """

    restarts: ClassVar[bool] = True
    """Whether another synchronizer may take the place of one that was closed."""

    @property
    @abstractmethod
    def address(self) -> str | None:
        """Of the interface of this machine that leads to the synchronizer; None: it is in this process."""

    def close(self) -> None:  # noqa: B027 - only connections have something to close
        """End all connections."""


class LocalChannel(Channel):
    """To a synchronizer in this process."""

    restarts = False
    address = None

    def __init__(self, coordinator: Coordinator) -> None:
        self._coordinator = coordinator

    def call(self, name: str, args: dict[str, Any], timeout: float, longer: float = 0.0) -> Reply:
        del timeout, longer  # each call has its own
        return self._coordinator.call(name, args)


class SocketChannel(Channel):
    """To a server. Each call that is under way has a connection of its own; they are used again.

    Args:
        address: ``host:port``.
        token: see :class:`~weight_update.synchronizer.server.Server`.
    """

    def __init__(self, address: str, token: str) -> None:
        host, _, port = address.rpartition(":")
        if not host or not port.isdigit():
            raise ValueError(f"a synchronizer's address is host:port, got {address!r}")
        self._host, self._port, self._token = host.strip("[]"), int(port), token
        self._lock = threading.Lock()
        self._idle: list[Wire] = []
        self._busy: set[Wire] = set()
        self._address: str | None = None

    @property
    def address(self) -> str | None:
        return self._address

    def call(self, name: str, args: dict[str, Any], timeout: float, longer: float = 0.0) -> Reply:
        deadline = time.monotonic() + timeout
        wire = self._take(timeout)
        try:
            wire.send({"call": name, "args": args}, seconds_left(deadline))
            reply = self._reply(wire, deadline, timeout, longer)
        except (LinkClosedError, FormatError, SyncTimeoutError) as error:
            self.close()  # if one is gone all are
            raise LinkClosedError(f"the synchronizer at {self._host}:{self._port}: {error}") from None
        with self._lock:
            self._busy.discard(wire)
            self._idle.append(wire)
        return reply

    def close(self) -> None:
        with self._lock:
            wires, self._idle, self._busy = [*self._idle, *self._busy], [], set()
        for wire in wires:
            wire.close()

    def _reply(self, wire: Wire, deadline: float, timeout: float, longer: float) -> Reply:
        """Wait for the answer; while none comes, see whether the synchronizer answers others."""
        last = deadline + longer
        while longer and not wire.wait_readable(max(deadline - time.monotonic(), 0.0) / 2):
            silent = SyncTimeoutError(f"the other end said nothing for {timeout:g} s")
            if time.monotonic() >= last:
                raise silent
            try:
                self.call("status", {}, max(deadline - time.monotonic(), 0.0))
            except TransportError:
                raise silent from None
            deadline = min(time.monotonic() + timeout, last)
        return wire.receive(seconds_left(deadline))

    def _take(self, timeout: float) -> Wire:
        with self._lock:
            wire = self._idle.pop() if self._idle else None
        if wire is None:
            try:
                wire = connect(self._host, self._port, self._token, timeout)
            except SyncTimeoutError as error:
                raise LinkClosedError(str(error)) from None
            self._address = wire.local_address
        with self._lock:
            self._busy.add(wire)
        return wire
