"""Process groups of two, which carry the payloads of one link."""

from __future__ import annotations

import contextlib
import socket
import struct
import threading
from collections.abc import Callable, Iterator
from datetime import timedelta
from typing import Any, Literal

import torch
import torch.distributed as dist

from weight_update.errors import FormatError, LinkClosedError, SyncTimeoutError, TransportError
from weight_update.text import brief
from weight_update.transports.distributed.store import ProcessGroupGloo, Store, disown, leave_in_order, own
from weight_update.transports.inherited_sockets import InheritedSockets
from weight_update.transports.rendezvous import SignedRendezvous

STALLED = 60.0
"""Seconds without progress of the other end after which it counts as gone."""

FOREVER = 86400.0 * 3650
"""Seconds; long enough to wait for the other end as long as it lives."""

_DATA, _WATCH = 0, 1  # tags
_CONNECT_STEPS = 5
"""Multiple of its timeout after which gloo gives up a connection."""
_KNOCK_SECONDS = 1.0
_NUMBER = struct.Struct("=q")  # of an end of a group, which gloo sends first


class Pending:
    """One operation that was begun on a group.

    An exception that outlives the group may refer to it; the operation itself must not live so long, see
    :func:`own`.
    """

    def __init__(self, work: dist.Work, then: Callable[[], object] | None = None) -> None:
        self.work: dist.Work | None = work
        self.then = then  # completes it, for example by a copy


class PointToPointGroup:
    """Two ends that send bytes to each other through gloo.

    It is a process group of its own: the program's default process group is neither used nor needed.
    Operations of one end reach the other in the order they were begun.

    Args:
        store: rendezvous of the two ends, under a ``name`` that is used once.
        rank: 0 on one end, 1 on the other.
        address: address of the interface that this end listens on.
        timeout: seconds to wait for the other end; connecting to it then takes at most half as long.
    """

    def __init__(
        self, store: Store, name: str, token: str, rank: int, address: str, timeout: float | None = None
    ) -> None:
        self._store, self._name, self._token, self._rank = store, name, token, rank
        self._other, self._address = 1 - rank, address
        self._timeout = STALLED if timeout is None else timeout
        self._pending: set[Pending] = set()
        self._beginning = threading.Lock()
        self._listeners: list[Callable[[], None]] = []
        self._group: Any = None
        self._sockets: InheritedSockets | None = None
        self._rendezvous: SignedRendezvous | None = None
        self._closed = False

    def connect(self) -> None:
        """Wait for the other end and connect to it.

        Raises:
            LinkClosedError: the other end did not come, or :meth:`close` was called.
        """
        with self._beginning:
            sockets = self._sockets = InheritedSockets()
            rendezvous = self._rendezvous = SignedRendezvous(
                self._store, self._name, self._token, self._rank, sockets, self._timeout
            )
            if self._closed:
                rendezvous.close()
        problem = ""
        try:
            group = own(ProcessGroupGloo(rendezvous, self._rank, 2, self._options()))
        except (RuntimeError, TransportError, TimeoutError, FormatError) as error:
            problem = brief(error)
        finally:
            rendezvous.close()
        if not problem:
            sockets.keep_from_programs()
            sockets.refuse_more()
            with self._beginning:
                self._group, group = group, None  # a frame must not hold it: see Pending
                problem = "it was closed" if self._closed else ""
        if problem:
            self.release()
            raise LinkClosedError(f"no connection for payloads ({problem})")

    def begin_send(self, payload: torch.Tensor) -> Pending:
        """Begin to send a contiguous CPU tensor, which must not change until :meth:`finish`.

        Raises:
            LinkClosedError: the other end is gone.
        """
        return self._begin("send", payload, _DATA)

    def begin_recv(self, into: torch.Tensor) -> Pending:
        """Begin to receive exactly as many bytes as ``into`` has; raise as :meth:`begin_send`."""
        return self._begin("recv", into, _DATA)

    def finish(self, pending: Pending, timeout: float | None) -> None:
        """Wait until an operation is complete.

        Raises:
            LinkClosedError: the other end is gone.
            SyncTimeoutError: the other end took no part; the group is not usable afterwards.
        """
        limit = STALLED if timeout is None else timeout
        work, pending.work = pending.work, None
        problem = "it was closed" if work is None else ""
        try:
            if work is not None:
                work.wait(timedelta(seconds=limit))
        except RuntimeError as error:
            problem = str(error)
        work = None
        with self._beginning:
            self._pending.discard(pending)
        if "imed out" in problem or "timing out" in problem:
            raise SyncTimeoutError(f"the other end did not take part for {limit:g} s")
        if problem:
            raise LinkClosedError(f"the other end is gone ({brief(problem)})")
        if pending.then is not None:
            pending.then()

    def begin_push(self, piece: torch.Tensor) -> Pending:
        """Begin to send a piece of a payload; raise as :meth:`begin_send`."""
        return self.begin_send(piece)

    def begin_pull(self, into: torch.Tensor) -> Pending:
        """Begin to receive a piece of a payload, sent by :meth:`begin_push`."""
        return self.begin_recv(into)

    def recv(self, into: torch.Tensor, timeout: float | None) -> None:
        """Receive a tensor; raise as :meth:`finish`."""
        self.finish(self.begin_recv(into), timeout)

    def close(self) -> None:
        """Close the connection, or stop connecting; the other end notices at once."""
        with self._beginning:
            self._closed = True
            if self._rendezvous is None or self._sockets is None:
                return
            self._rendezvous.close()
            self._sockets.shut_down()
            if self._group is None:
                for address in self._sockets.listening_addresses():
                    _stop_waiting_at(address)

    @contextlib.contextmanager
    def listening(self, call: Callable[[], None]) -> Iterator[None]:
        """Within the context, call ``call`` as soon as the other end is gone, even if it is gone already."""
        with self._beginning:
            lost = self._group is None
            self._listeners.append(call)
        if lost:
            call()
        try:
            yield
        finally:
            self._listeners.remove(call)

    def on_loss(self, call: Callable[[], None]) -> None:
        """Call ``call``, from a thread, as soon as the other end is gone or has closed the connection."""
        thread = threading.Thread(target=self.watch, args=(call,), name="weight_update-watch", daemon=True)
        leave_in_order(thread)
        thread.start()

    def watch(self, call: Callable[[], None]) -> None:
        """Wait until the other end is gone, then call ``call``; a group is freed only after such a watch."""
        with contextlib.suppress(LinkClosedError, SyncTimeoutError):
            self.finish(self._begin("recv", torch.empty(1, dtype=torch.uint8), _WATCH), FOREVER)
        call()
        self.release()

    def release(self) -> None:
        """Close the connection and drop everything that has threads; no further operation can begin."""
        self.close()
        with self._beginning:
            group, self._group = self._group, None
            sockets, self._sockets = self._sockets, None
            for pending in self._pending:
                pending.work = None
            self._pending.clear()
            listeners = list(self._listeners)
        disown(group)
        if sockets is not None:
            sockets.forget()
        for call in listeners:
            call()

    def _options(self) -> Any:
        """Return options of the group, which alone must refer to them.

        Where the group cannot be made, its device has to end with it. A device that lived on would call into
        the destroyed group when the other end connects late.
        """
        options = ProcessGroupGloo._Options()
        options._devices = [ProcessGroupGloo.create_device(hostname=self._address)]
        options._timeout = timedelta(seconds=self._timeout / 2 / _CONNECT_STEPS)
        return options

    def _begin(self, way: Literal["send", "recv"], what: torch.Tensor, tag: int) -> Pending:
        problem = "it was closed"
        with self._beginning:
            try:
                if self._group is not None:
                    to = [what], self._other, tag  # no local name may hold the group: see Pending
                    pending = Pending(self._group.send(*to) if way == "send" else self._group.recv(*to))
                    self._pending.add(pending)
                    return pending
            except RuntimeError as error:
                problem = brief(error)
        raise LinkClosedError(f"the other end is gone ({problem})")


def address_towards(host: str, port: int) -> str:
    """Return the address of this machine's interface from which ``host`` is reached."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family, socket.SOCK_DGRAM) as sock:
        sock.connect((host, port))
        return str(sock.getsockname()[0])


def _stop_waiting_at(address: tuple[Any, ...]) -> None:
    """Make gloo stop waiting for the other end's connection to ``address``, for which it has no call.

    Each of the two takes the first connection that begins with its number in the group, a 64-bit integer,
    for the other end, and fails as soon as that connection ends.
    """
    for number in range(2):
        with contextlib.suppress(OSError), socket.create_connection(address[:2], _KNOCK_SECONDS) as sock:
            sock.sendall(_NUMBER.pack(number))
