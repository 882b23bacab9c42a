"""A process group of two, for the payloads of one link."""

from __future__ import annotations

import contextlib
import socket
import threading
from collections.abc import Callable
from datetime import timedelta

import torch
import torch.distributed as dist

from weight_update.errors import LinkClosedError, SyncTimeoutError
from weight_update.transports.c10d import PrefixStore, ProcessGroupGloo, Store, disown, own

__all__ = ["FOREVER", "Pair", "address_towards"]

STALLED = 60.0
"""Seconds without the other end's answer after which it counts as gone."""

FOREVER = 86400.0 * 3650
"""Seconds; the other end is waited for as long as it lives."""

_DATA, _WATCH = 0, 1  # tags


class Pair:
    """Two ends that send bytes to each other through torch.distributed.

    It is a group of its own: the default process group of the program is neither used nor needed. Making one
    waits for the other end. What was begun on one end arrives in that order on the other.

    Args:
        store: where the two ends find each other.
        name: a name that is used once.
        rank: 0 on one end, 1 on the other.
        address: of the interface that this end listens on.
        timeout: seconds to wait for the other end.

    Raises:
        LinkClosedError: the other end did not come.
    """

    def __init__(
        self, store: Store, name: str, rank: int, address: str, timeout: float | None = None
    ) -> None:
        options = ProcessGroupGloo._Options()
        options._devices = [ProcessGroupGloo.create_device(hostname=address)]
        options._timeout = timedelta(seconds=STALLED if timeout is None else timeout)
        self._other = 1 - rank
        self._byte = torch.zeros(1, dtype=torch.uint8)
        self._farewell: dist.Work | None = None
        try:
            meeting = PrefixStore(name, store.clone())
            self._group = own(ProcessGroupGloo(meeting, rank, 2, options))
        except RuntimeError as error:
            raise LinkClosedError(f"no connection for payloads ({_brief(error)})") from None

    def begin_send(self, payload: torch.Tensor) -> dist.Work:
        """Send a contiguous CPU tensor, which stays as it is until :meth:`finish`.

        Raises:
            LinkClosedError: the other end is gone.
        """
        return self._begin(lambda group: group.send([payload], self._other, _DATA))

    def begin_recv(self, into: torch.Tensor) -> dist.Work:
        """Fill ``into`` with what the other end sends, which has as many bytes; raises as above."""
        return self._begin(lambda group: group.recv([into], self._other, _DATA))

    def finish(self, work: dist.Work, timeout: float | None) -> None:
        """Wait until it is done.

        Raises:
            LinkClosedError: the other end is gone.
            SyncTimeoutError: it took no part; the pair is of no more use.
        """
        limit = STALLED if timeout is None else timeout
        try:
            work.wait(timedelta(seconds=limit))
        except RuntimeError as error:
            if "imed out" in str(error):
                raise SyncTimeoutError(f"the other end did not take part for {limit:g} s") from None
            raise _gone(error) from None

    def send(self, payload: torch.Tensor, timeout: float | None) -> None:
        """:meth:`begin_send` and :meth:`finish`."""
        self.finish(self.begin_send(payload), timeout)

    def recv(self, into: torch.Tensor, timeout: float | None) -> None:
        """:meth:`begin_recv` and :meth:`finish`."""
        self.finish(self.begin_recv(into), timeout)

    def close(self) -> None:
        """Give up the connection; the other end hears of it at once."""
        group = self._group
        if group is not None:
            with contextlib.suppress(RuntimeError):
                self._farewell = group.send([self._byte], self._other, _WATCH)

    def on_loss(self, call: Callable[[], None]) -> None:
        """Call ``call``, from a thread, as soon as the other end is gone or has given up."""
        threading.Thread(target=self.watch, args=(call,), name="weight_update-watch", daemon=True).start()

    def watch(self, call: Callable[[], None]) -> None:
        """What that thread does; every pair needs one who does, else it is never freed."""
        never = torch.empty(1, dtype=torch.uint8)
        with contextlib.suppress(RuntimeError):
            self._group.recv([never], self._other, _WATCH).wait(timedelta(seconds=FOREVER))
        call()
        self.close()  # which ends the other end's watch, if that is what began it
        disown(self._group)
        self._group = self._farewell = None

    def _begin(self, operation: Callable[[ProcessGroupGloo], dist.Work]) -> dist.Work:
        group = self._group
        if group is None:
            raise LinkClosedError("the other end is gone")
        try:
            return operation(group)
        except RuntimeError as error:
            raise _gone(error) from None


def address_towards(host: str, port: int) -> str:
    """The address of this machine's interface from which ``host`` is reached."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family, socket.SOCK_DGRAM) as sock:
        sock.connect((host, port))
        return str(sock.getsockname()[0])


def _gone(error: Exception) -> LinkClosedError:
    return LinkClosedError(f"the other end is gone ({_brief(error)})")


def _brief(error: Exception) -> str:
    return str(error).partition("\n")[0]
