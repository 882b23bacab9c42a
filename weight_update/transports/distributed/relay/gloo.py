"""Process groups of two, which carry the payloads of one link."""

from __future__ import annotations

import contextlib
import socket
import threading
from collections.abc import Callable, Iterator
from datetime import timedelta
from typing import Any, Literal

import torch
import torch.distributed as dist

from weight_update.errors import FormatError, LinkClosedError, SyncTimeoutError, TransportError
from weight_update.transports.distributed.store import ProcessGroupGloo, Store, disown, leave_in_order, own
from weight_update.transports.inherited_sockets import InheritedSockets
from weight_update.transports.rendezvous import SignedRendezvous

__all__ = ["FOREVER", "STALLED", "Pending", "PointToPointGroup", "address_towards", "brief"]

STALLED = 60.0
"""Seconds without progress of the other end after which it counts as gone."""

FOREVER = 86400.0 * 3650
"""Seconds; long enough to wait for the other end as long as it lives."""

_DATA, _WATCH = 0, 1  # tags
_CONNECT_STEPS = 5
"""Multiple of its timeout after which gloo gives up a connection."""


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

    It is a process group of its own: the program's default process group is neither used nor needed. The
    constructor waits for the other end. Operations of one end reach the other in the order they were begun.

    Args:
        store: rendezvous of the two ends.
        name: name of the group; used once.
        token: secret of both ends.
        rank: 0 on one end, 1 on the other.
        address: address of the interface that this end listens on.
        timeout: seconds to wait for the other end; connecting to it then takes at most half as long.

    Raises:
        LinkClosedError: the other end did not come.
    """

    def __init__(
        self, store: Store, name: str, token: str, rank: int, address: str, timeout: float | None = None
    ) -> None:
        self._other = 1 - rank
        self._pending: set[Pending] = set()
        self._beginning = threading.Lock()
        self._listeners: list[Callable[[], None]] = []
        limit = STALLED if timeout is None else timeout
        self._group, self._sockets, problem = _make_process_group(store, name, token, rank, address, limit)
        if self._group is None:
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

    def send(self, payload: torch.Tensor, timeout: float | None) -> None:
        """Send a tensor; raise as :meth:`finish`."""
        self.finish(self.begin_send(payload), timeout)

    def recv(self, into: torch.Tensor, timeout: float | None) -> None:
        """Receive a tensor; raise as :meth:`finish`."""
        self.finish(self.begin_recv(into), timeout)

    def close(self) -> None:
        """Close the connection; the other end notices at once."""
        with contextlib.suppress(LinkClosedError):
            self._begin("send", torch.zeros(1, dtype=torch.uint8), _WATCH)

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
        self.close()  # ends the watch of the other end
        self.release()

    def release(self) -> None:
        """Drop everything that has threads; no further operation can begin."""
        with self._beginning:
            group, self._group = self._group, None
            for pending in self._pending:
                pending.work = None
            self._pending.clear()
            listeners = list(self._listeners)
        disown(group)
        self._sockets.forget()
        for call in listeners:
            call()

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


def _make_process_group(
    store: Store, name: str, token: str, rank: int, address: str, timeout: float
) -> tuple[Any, InheritedSockets, str]:
    """Make the process group of two; return it or None, its sockets, and why there is no group."""
    sockets = InheritedSockets()
    rendezvous = SignedRendezvous(store, name, token, rank, sockets, timeout)
    try:
        group = own(ProcessGroupGloo(rendezvous, rank, 2, _options(address, timeout / 2 / _CONNECT_STEPS)))
        sockets.keep_from_programs()
        sockets.refuse_more()
        return group, sockets, ""
    except (RuntimeError, TransportError, TimeoutError, FormatError) as error:
        sockets.forget()
        return None, sockets, brief(error)
    finally:
        rendezvous.close()


def _options(address: str, timeout: float) -> Any:
    options = ProcessGroupGloo._Options()
    options._devices = [ProcessGroupGloo.create_device(hostname=address)]
    options._timeout = timedelta(seconds=timeout)
    return options


def brief(error: object) -> str:
    """Return the first line of an error's message."""
    return str(error).partition("\n")[0]
