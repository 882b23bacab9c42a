"""A process group of two, for the payloads of one link."""

from __future__ import annotations

import atexit
import contextlib
import queue
import socket
import threading
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any, Literal

import torch
import torch.distributed as dist

from weight_update.errors import LinkClosedError, SyncTimeoutError
from weight_update.transports.c10d import PrefixStore, ProcessGroupGloo, Store, disown, own

__all__ = ["Pair", "address_towards"]

_STALLED = 60.0
"""Seconds without the other end's answer after which it counts as gone."""

_GRACE = 0.2
"""Seconds within which a transfer that was complete before a farewell came is reported as such."""

_FAREWELL_SECONDS = 2.0
_DATA, _WATCH = 0, 1  # tags


class Pair:
    """Two ends that send bytes to each other through torch.distributed.

    It is a group of its own: the default process group of the program is neither used nor needed. Making one
    waits for the other end.

    Args:
        store: where the two ends find each other.
        name: a name that is used once.
        rank: 0 on one end, 1 on the other.
        address: of the interface that this end listens on.

    Raises:
        LinkClosedError: the other end did not come.
    """

    def __init__(self, store: Store, name: str, rank: int, address: str) -> None:
        options = ProcessGroupGloo._Options()
        options._devices = [ProcessGroupGloo.create_device(hostname=address)]
        options._timeout = timedelta(seconds=_STALLED)
        self._other = 1 - rank
        self._byte = torch.zeros(1, dtype=torch.uint8)
        self._farewell: dist.Work | None = None
        self._losses: queue.SimpleQueue[Exception | None] = queue.SimpleQueue()
        try:
            meeting = PrefixStore(name, store.clone())
            self._group: Any = own(ProcessGroupGloo(meeting, rank, 2, options))
        except RuntimeError as error:
            raise LinkClosedError(f"no connection for payloads ({error})") from None

    def send(self, payload: torch.Tensor, timeout: float | None) -> None:
        """Send a contiguous CPU tensor; returns when its memory may be used again.

        Raises:
            LinkClosedError: the other end is gone.
            SyncTimeoutError: it does not read; the pair is of no more use.
        """
        self._finish(lambda: self._begin("send", payload), timeout)

    def recv(self, into: torch.Tensor, timeout: float | None) -> None:
        """Fill ``into`` with what the other end sends; raises as :meth:`send`.

        Gloo does not tell a receive that is half done of the other end's death. It is therefore waited for
        in a thread of its own, and whoever learns first, that thread or the watch, ends the wait here.
        """
        outcomes: queue.SimpleQueue[Exception | None] = queue.SimpleQueue()

        def wait() -> None:
            try:
                self._finish(lambda: self._begin("recv", into), timeout)
            except (LinkClosedError, SyncTimeoutError) as error:
                outcomes.put(error)
            else:
                outcomes.put(None)

        self._losses = outcomes
        if self._group is None:
            outcomes.put(LinkClosedError("the other end is gone"))
        threading.Thread(target=wait, name="weight_update-recv", daemon=True).start()
        outcome = outcomes.get()
        if outcome is not None:
            with contextlib.suppress(queue.Empty):  # it said farewell: all that it sent before is here
                outcome = outcomes.get(timeout=_GRACE)
        if outcome is not None:
            raise outcome

    def close(self) -> None:
        """Give up the connection; the other end hears of it at once."""
        group = self._group
        if group is not None:
            with contextlib.suppress(RuntimeError):
                self._farewell = group.send([self._byte], self._other, _WATCH)

    def on_loss(self, call: Callable[[], None]) -> None:
        """Call ``call``, from a thread, as soon as the other end is gone or has given up."""
        never = torch.empty(1, dtype=torch.uint8)

        def watch() -> None:
            with contextlib.suppress(RuntimeError):
                self._group.recv([never], self._other, _WATCH).wait(timedelta(days=3650))
            self._losses.put(LinkClosedError("the other end is gone"))
            call()
            self.close()  # which ends the other end's watch, if that is what began it
            disown(self._group)
            self._group = self._farewell = None
            _watches.discard(threading.current_thread())

        thread = threading.Thread(target=watch, name="weight_update-watch", daemon=True)
        _watches.add(thread)
        thread.start()

    def _begin(self, what: Literal["send", "recv"], tensor: torch.Tensor) -> dist.Work:
        group = self._group  # the watch takes it away when the other end is gone
        if group is None:
            raise LinkClosedError("the other end is gone")
        try:
            if what == "send":
                work: dist.Work = group.send([tensor], self._other, _DATA)
            else:
                work = group.recv([tensor], self._other, _DATA)
            return work
        finally:
            del group  # an error may be kept, and must not keep what has threads: see own()

    @staticmethod
    def _finish(begin: Callable[[], dist.Work], timeout: float | None) -> None:
        limit = _STALLED if timeout is None else timeout
        try:
            begin().wait(timedelta(seconds=limit))
        except RuntimeError as error:
            if "imed out" in str(error):
                raise SyncTimeoutError(f"the other end did not take part for {limit:g} s") from None
            raise LinkClosedError(f"the other end is gone ({str(error).partition(chr(10))[0]})") from None


_watches: set[threading.Thread] = set()


@atexit.register
def _await_watches() -> None:
    """An interpreter that ends while threads come back to it from C++ aborts the process."""
    deadline = time.monotonic() + _FAREWELL_SECONDS
    for thread in list(_watches):
        thread.join(max(deadline - time.monotonic(), 0.0))


def address_towards(host: str, port: int) -> str:
    """The address of this machine's interface from which ``host`` is reached."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family, socket.SOCK_DGRAM) as sock:
        sock.connect((host, port))
        return str(sock.getsockname()[0])
