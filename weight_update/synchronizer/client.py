"""The common part of a synchronizer's clients."""

from __future__ import annotations

import contextlib
import os
import secrets
import threading
import time
import weakref
from collections.abc import Iterator
from typing import Any, ClassVar

from weight_update.arguments import require_seconds, whole_number
from weight_update.errors import LifecycleError, LinkClosedError, TransportError, undo_on_error
from weight_update.strategy.strategy import WeightStrategy, resolve_strategy
from weight_update.synchronizer.plan import RunningStatus, SyncPlan
from weight_update.synchronizer.rpc import Channel
from weight_update.synchronizer.sessions import Reply
from weight_update.synchronizer.transfer import Endpoint
from weight_update.threads import start_thread

RETRY_SECONDS = 0.1
"""Seconds between two tries to reach the synchronizer, or a publisher of weights."""
_GRACE_SECONDS = 5.0
"""Least seconds for a call, unless ``timeout`` is less: a call may begin just before the time is over."""


class ClientBase:
    """A trainer's or explorer's end of its connection to the synchronizer.

    Calls are repeated, after another hello, until the synchronizer is back or the time is over. Arguments and
    methods for users are those of :class:`~weight_update.TrainerClient` and
    :class:`~weight_update.ExplorerClient`.

    Attributes:
        version: explorer: version in force; trainer: newest version that it published. None before the first.
        id: id of the explorer; None for a trainer.
        session: name by which the synchronizer knows this client.
        closed: event that is set when the client is closed.
    """

    role: ClassVar[str]

    def __init__(
        self,
        channel: Channel,
        strategy: str | WeightStrategy = "tensordict",
        timeout: float = 60.0,
        transfer_timeout: float = 60.0,
        step: int = 0,
    ) -> None:
        self.strategy: WeightStrategy = resolve_strategy(strategy)
        self.timeout: float = require_seconds("timeout", timeout)
        self.transfer_timeout: float = require_seconds("transfer_timeout", transfer_timeout)
        self.step = step
        self.version: int | None = None
        self.id: int | None = None
        self.plan: SyncPlan
        self.channel = channel
        self.closed: threading.Event = threading.Event()
        self._method: Any = None  # the part that depends on the method
        self._endpoint: Endpoint | None = None  # of the trainer's publisher, with NCCL
        self.session: str = secrets.token_hex(8)
        self._synced_at: int | None = None
        self._syncing = threading.Lock()
        self._given_up: threading.Event | None = None  # of the sync_weight() that runs
        self._stopped = False
        self._caller = threading.current_thread()
        self._pid = os.getpid()

    # -- for users ---------------------------------------------------------------------------------

    @property
    def step(self) -> int:
        """Number of steps done so far."""
        return self._step

    @step.setter
    def step(self, step: int) -> None:
        self._step = whole_number(step, "step", least=0)

    def notify(self, status: RunningStatus | str) -> None:
        """Tell the synchronizer what this side is doing."""
        self.ask("notify", step=self.step, status=RunningStatus(status).value)

    def give_up(self) -> None:
        """End the wait of ``sync_weight()``, if another thread is inside it; the version does not change."""
        if (given_up := self._given_up) is not None:
            given_up.set()
        told = {"session": self.session, "step": self.step, "status": RunningStatus.RUNNING.value}
        with contextlib.suppress(LinkClosedError):  # sync_weight() does not try to reach it again
            self._retry("notify", told, time.monotonic())

    def latest_version(self) -> int | None:
        """Return the newest published version; None before the first."""
        version: int | None = self.status()["version"]
        return version

    def status(self) -> dict[str, Any]:
        """Return the state of the trainer and of all explorers."""
        reply = self._retry("status", {}, time.monotonic() + self.timeout)
        return {
            **reply,
            "trainer": RunningStatus(reply["trainer"]),
            "explorers": {int(id): RunningStatus(value) for id, value in reply["explorers"].items()},
            "versions": {int(id): version for id, version in reply["versions"].items()},
        }

    def close(self) -> None:
        """Leave, and wake all clients that wait for this one. The model keeps its weights.

        An explorer with CHECKPOINT waits up to ``transfer_timeout`` seconds for the end of a read.
        """
        with contextlib.ExitStack() as stack:  # all of it, also where a step raises
            if self._method is not None:
                stack.callback(self._method.close)
            if not self.closed.is_set() and self._pid == os.getpid():
                self.closed.set()
                stack.callback(self.channel.close)
                with contextlib.suppress(TransportError):  # the synchronizer may be gone itself
                    self.channel.call("bye", {"session": self.session}, self.grace)

    # -- for subclasses and methods ----------------------------------------------------------------

    @contextlib.contextmanager
    def synchronizing(self) -> Iterator[None]:
        """Return a context manager around ``sync_weight()``, which one thread enters at a time."""
        with self._syncing:
            self._given_up = threading.Event()  # not a flag: the end of one call must not touch the next
            try:
                yield
            except BaseException:  # such as Ctrl-C: the synchronizer would go on waiting for this side
                with contextlib.suppress(TransportError, LifecycleError):
                    self.give_up()
                raise
            finally:
                self._given_up = None

    @property
    def gives_up(self) -> bool:
        """Whether the ``sync_weight()`` that runs was given up: it ends, and retries nothing."""
        given_up = self._given_up
        return given_up is not None and given_up.is_set()

    @property
    def grace(self) -> float:
        """Seconds that a call may take even when the time is over."""
        return min(self.timeout, _GRACE_SECONDS)

    def advance_to(self, version: int | None) -> None:
        """Note the version in force, unless a newer one is."""
        if version is not None and (self.version is None or version > self.version):
            self.version = version

    def ask(self, name: str, deadline: float | None = None, wait: bool = False, **args: Any) -> Reply:
        """Call the synchronizer, and call again while it is away.

        ``deadline`` is a moment on the monotonic clock; None is ``timeout`` seconds from now. With ``wait``,
        the call itself waits, up to the deadline.

        Raises:
            LinkClosedError: the synchronizer is not there, or was closed.
            LifecycleError: the synchronizer refused the call, or this side is closed.
            TransportError: the call failed in the synchronizer.
        """
        self._caller = threading.current_thread()
        self._stopped = args.get("status") == RunningStatus.STOPPED
        limit = time.monotonic() + self.timeout if deadline is None else deadline
        return self._retry(name, {"session": self.session, **args}, limit, wait)

    def _introduce(self) -> Reply:
        """Say hello for the first time, and begin to send signs of life."""
        with undo_on_error(self.channel.close):
            reply = self.ask("hello", **self._hello())
            self.plan = SyncPlan(**reply["plan"])
            self.id = reply["id"]
            start_thread("weight_update-beat", _send_beats, weakref.ref(self), self.closed, reply["lease"])
        return reply

    def _hello(self) -> dict[str, Any]:
        """Return the arguments of the call ``hello``, by which the synchronizer learns of this client."""
        return {
            "session": self.session,
            "role": self.role,
            "id": self.id,
            "step": self.step,
            "synced_at": self._synced_at,
            "version": self.version,
            "ticket": self._endpoint,
        }

    def _retry(self, name: str, args: dict[str, Any], limit: float, wait: bool = False) -> Reply:
        while True:
            if self.closed.is_set():
                raise LifecycleError(f"this {self.role} is closed; create a new one")
            left = max(limit - time.monotonic(), 0.0)
            if wait:
                args["timeout"] = left
            try:
                reply = self._call(name, args, left)
            except LinkClosedError:
                if time.monotonic() >= limit or not self.channel.restarts or self.gives_up:
                    raise
            else:
                if reply is not None:
                    return reply
                if "held" in args:  # its link was closed, if it has another id now
                    args["held"] = self._method.held(self.version)
                if time.monotonic() >= limit:
                    raise LinkClosedError("the synchronizer forgets this client after each hello")
            self.closed.wait(RETRY_SECONDS)

    def _call(self, name: str, args: dict[str, Any], left: float) -> Reply | None:
        """Call once; return None if the synchronizer had to be told first who calls. Raise as :meth:`ask`."""
        patience = max(left, self.grace)
        reply = self.channel.call(name, args, patience, 2 * self.transfer_timeout)
        known = reply.get("refused") != "unknown"
        if not known:
            reply = self._come_back(patience)
        if "closed" in reply:
            raise LinkClosedError(reply["closed"])
        if "refused" in reply:
            raise LifecycleError(reply["refused"])
        if "error" in reply:
            raise TransportError(f"{name} failed in the synchronizer: {reply['error']}")
        return reply if known else None

    def _come_back(self, timeout: float) -> Reply:
        """Say hello again to a synchronizer that has forgotten this client, or was restarted."""
        had = self.version
        reply = self.channel.call("hello", {**self._hello(), "back": True}, timeout)
        self._forget_version(had, reply)
        if (id := reply.get("id", self.id)) != self.id:  # another explorer took it meanwhile
            self.id = id
            self._method.unlink()
        return reply

    def _forget_version(self, had: int | None, reply: Reply) -> None:
        """Forget the version ``had`` if the synchronizer knows no version as new as that.

        Without a directory, it then counts from 0 again, or the trainer is still to come back to it.
        """
        if had is None or reply.get("directory") is not None or "version" not in reply:
            return
        newest = reply["version"]
        if (newest is None or newest < had) and self.version == had:
            self.version = None


def _send_beats(ref: weakref.ref[ClientBase], closed: threading.Event, lease: float) -> None:
    """Tell the synchronizer that a client lives, as a thread, until it is closed or dropped.

    It is not told so while the thread that used the client last has ended.
    """
    while not closed.is_set():
        client = ref()
        if client is None:
            return
        if client._caller.is_alive() and not client._stopped:
            with contextlib.suppress(TransportError):  # the next call raises it
                reply = client.channel.call("beat", {"session": client.session}, lease)
                if reply.get("refused") == "unknown" and not client._stopped:
                    client._come_back(lease)
        del client
        closed.wait(lease / 4)
