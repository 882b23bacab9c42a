"""What the clients of a synchronizer have in common."""

from __future__ import annotations

import contextlib
import os
import secrets
import threading
import time
import weakref
from typing import Any, ClassVar

from weight_update.errors import LifecycleError, LinkClosedError, TransportError
from weight_update.strategy.strategy import WeightStrategy, resolve_strategy
from weight_update.synchronizer.metrics import Metrics
from weight_update.synchronizer.plan import RunningStatus, SyncPlan
from weight_update.synchronizer.rpc import Channel
from weight_update.synchronizer.sessions import Reply
from weight_update.synchronizer.transfer import Endpoint

__all__ = ["ClientBase", "Metrics"]

_RETRY_SECONDS = 0.1
_GRACE_SECONDS = 5.0
"""The least that a call may take, unless ``timeout`` is less: it may begin just before the time is over."""


class ClientBase:
    """A trainer or an explorer that introduces itself, lives, and asks.

    Calls are repeated, after another hello, until the synchronizer is back or the time is over.

    Args:
        channel: to the synchronizer.
        strategy: how weights leave and enter the model.
        timeout: seconds that ``sync_weight`` waits, and every call for a synchronizer that is away.
        transfer_timeout: seconds that a transfer may take.
        step: steps done already.
    """

    role: ClassVar[str]

    def __init__(
        self,
        channel: Channel,
        strategy: str | WeightStrategy,
        timeout: float,
        transfer_timeout: float,
        step: int,
    ) -> None:
        for name, seconds in (("timeout", timeout), ("transfer_timeout", transfer_timeout)):
            if not seconds > 0:
                raise ValueError(f"{name} is a positive number of seconds, got {seconds!r}")
        self.strategy = resolve_strategy(strategy)
        self.timeout, self.transfer_timeout = float(timeout), float(transfer_timeout)
        self.step = step
        self.version: int | None = None
        self.id: int | None = None
        self._channel = channel
        self._session = secrets.token_hex(8)
        self._synced_at: int | None = None
        self._syncing = threading.Lock()
        self._closed = threading.Event()
        self._stopped = False
        self._caller = threading.current_thread()
        self._pid = os.getpid()

    # -- for users ---------------------------------------------------------------------------------

    def notify(self, status: RunningStatus | str) -> None:
        """Tell the synchronizer what this side is doing.

        REQUIRE_SYNC announces that it wants to synchronize, without waiting; RUNNING takes that back; STOPPED
        wakes whoever waits for it, and the next ``need_sync`` or ``sync_weight`` lets it come back.
        """
        self._ask("notify", step=self.step, status=RunningStatus(status).value)

    def latest_version(self) -> int | None:
        """The newest published version; None before the first."""
        version = self._ask_anybody("status")["version"]
        return None if version is None else int(version)

    def status(self) -> dict[str, Any]:
        """Who does what.

        Returns:
            ``"trainer"``: a :class:`RunningStatus`; ``"explorers"``: one for each id; ``"versions"``: what is
            in force there; ``"version"`` and ``"step"``: the newest published version and the trainer step it
            was made at.
        """
        reply = self._ask_anybody("status")
        return {
            "trainer": RunningStatus(reply["trainer"]),
            "explorers": {int(id): RunningStatus(value) for id, value in reply["explorers"].items()},
            "versions": {int(id): version for id, version in reply["versions"].items()},
            "version": reply["version"],
            "step": reply["step"],
        }

    def close(self) -> None:
        """Leave; whoever waits for this side is woken. The model keeps its weights."""
        if self._closed.is_set() or self._pid != os.getpid():
            return
        self._closed.set()
        try:
            with contextlib.suppress(TransportError):  # it may be gone itself
                self._channel.call("bye", {"session": self._session}, self._grace)
        finally:
            self._channel.close()

    # -- insides -----------------------------------------------------------------------------------

    def _introduce(self) -> Reply:
        """Say hello for the first time, and begin to be heard of."""
        reply = self._ask("hello", **self._hello())
        self.plan = SyncPlan(**reply["plan"])
        self.id = reply["id"]
        if reply["lease"] is not None:
            args = weakref.ref(self), self._closed, float(reply["lease"])
            threading.Thread(target=_live, args=args, name="weight_update-beat", daemon=True).start()
        return reply

    def _hello(self) -> dict[str, Any]:
        return {
            "role": self.role,
            "id": self.id,
            "step": self.step,
            "synced_at": self._synced_at,
            "version": self.version,
            "ticket": self._own_endpoint(),
            "leased": True,
        }

    def _say_hello(self, timeout: float) -> Reply:
        """Again: the synchronizer is another, or has missed this side."""
        return self._channel.call("hello", {"session": self._session, **self._hello()}, timeout)

    @property
    def _grace(self) -> float:
        return min(self.timeout, _GRACE_SECONDS)

    def _own_endpoint(self) -> Endpoint | None:
        return None

    def _beat(self, lease: float) -> None:
        """Tell the synchronizer that this client lives, unless the thread that used it last has ended."""
        if self._stopped or not self._caller.is_alive():
            return
        with contextlib.suppress(TransportError):  # the next call says so
            reply = self._channel.call("beat", {"session": self._session}, lease)
            if reply.get("refused") == "unknown" and not self._stopped:
                self._say_hello(lease)

    def _ask_anybody(self, name: str) -> Reply:
        return self._retry(name, {}, time.monotonic() + self.timeout, wait=False)

    def _ask(self, name: str, deadline: float | None = None, wait: bool = False, **args: Any) -> Reply:
        """Call, and call again while the synchronizer is away.

        Args:
            name: of the call.
            deadline: on the monotonic clock; None: ``timeout`` seconds from now.
            wait: whether the call is to wait itself, up to the deadline.
            args: of the call.

        Raises:
            LinkClosedError: the synchronizer is not there, or was closed.
            LifecycleError: it refused the call, or this side is closed.
            TransportError: it failed there.
        """
        self._caller = threading.current_thread()
        self._stopped = args.get("status") == RunningStatus.STOPPED.value
        limit = time.monotonic() + self.timeout if deadline is None else deadline
        return self._retry(name, {"session": self._session, **args}, limit, wait)

    def _retry(self, name: str, args: dict[str, Any], limit: float, wait: bool) -> Reply:
        while True:
            if self._closed.is_set():
                raise LifecycleError(f"this {self.role} is closed; make a new one")
            left = max(limit - time.monotonic(), 0.0)
            if wait:
                args["timeout"] = left
            try:
                reply = self._call(name, args, left)
            except LinkClosedError:
                if time.monotonic() >= limit or not self._channel.restarts:
                    raise
            else:
                if reply is not None:
                    return reply
                if time.monotonic() >= limit:
                    raise LinkClosedError("the synchronizer forgets this client at once")
            self._closed.wait(_RETRY_SECONDS)

    def _call(self, name: str, args: dict[str, Any], left: float) -> Reply | None:
        """Call once; None if the synchronizer had to be told first who calls.

        Args:
            name: of the call.
            args: of the call.
            left: seconds until the deadline.

        Raises: see :meth:`_ask`.
        """
        patience = max(left, self._grace)
        reply = self._channel.call(name, args, patience, 2 * self.transfer_timeout)
        known = reply.get("refused") != "unknown"
        if not known:
            reply = self._say_hello(patience)
        if "closed" in reply:
            raise LinkClosedError(reply["closed"])
        if "refused" in reply:
            raise LifecycleError(f"{name}: {reply['refused']}")
        if "error" in reply:
            raise TransportError(f"{name} failed in the synchronizer: {reply['error']}")
        return reply if known else None


def _live(member: weakref.ref[ClientBase], closed: threading.Event, lease: float) -> None:
    """Tell the synchronizer that a client lives, as a thread, until it is closed or dropped."""
    while not closed.wait(lease / 4):
        client = member()
        if client is None:
            return
        client._beat(lease)
        del client
