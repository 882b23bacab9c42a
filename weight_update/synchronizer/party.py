"""What the clients of a synchronizer have in common."""

from __future__ import annotations

import contextlib
import os
import secrets
import threading
import time
from typing import Any, ClassVar

from weight_update.errors import LifecycleError, LinkClosedError, TransportError
from weight_update.strategy import WeightStrategy, resolve_strategy
from weight_update.synchronizer.channels import Channel
from weight_update.synchronizer.desk import Reply
from weight_update.synchronizer.plan import RunningStatus, SyncPlan
from weight_update.synchronizer.roads import Ticket
from weight_update.transports.stream import deadline_of

__all__ = ["Metrics", "Party"]

Metrics = dict[str, Any]
_RETRY_SECONDS = 0.1
_ANSWER_SECONDS = 30.0
"""How long the answer to a call may take beyond what it was told to wait."""


class Party:
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
        self.timeout, self.transfer_timeout = timeout, transfer_timeout
        self.step = step
        self.version: int | None = None
        self.id: int | None = None
        self._channel = channel
        self._session = secrets.token_hex(8)
        self._synced_at: int | None = None
        self._syncing = threading.Lock()
        self._closed = threading.Event()
        self._stopped = False
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
        with contextlib.suppress(TransportError):  # it may be gone itself
            self._channel.call("bye", {"session": self._session}, _ANSWER_SECONDS)
        self._channel.close()

    # -- insides -----------------------------------------------------------------------------------

    def _introduce(self) -> Reply:
        """Say hello for the first time, and begin to be heard of."""
        reply = self._ask("hello", **self._hello())
        self.plan = SyncPlan(**reply["plan"])
        self.id = reply["id"]
        if reply["lease"] is not None:
            lease = float(reply["lease"])
            threading.Thread(target=self._beat, args=(lease,), name="weight_update-beat", daemon=True).start()
        return reply

    def _hello(self) -> dict[str, Any]:
        return {
            "role": self.role,
            "id": self.id,
            "step": self.step,
            "synced_at": self._synced_at,
            "version": self.version,
            "ticket": self._ticket(),
            "leased": self._channel.leased,
        }

    def _say_hello(self) -> Reply:
        """Again: the synchronizer is another, or has missed this side."""
        return self._channel.call("hello", {"session": self._session, **self._hello()}, _ANSWER_SECONDS)

    def _ticket(self) -> Ticket | None:
        return None

    def _beat(self, lease: float) -> None:
        """Thread: be heard of while the program computes."""
        while not self._closed.wait(lease / 4):
            if self._stopped:
                continue
            try:
                reply = self._channel.call("beat", {"session": self._session}, lease)
                if reply.get("refused") == "unknown" and not self._stopped:
                    self._say_hello()
            except TransportError:
                continue  # the next call says so

    def _ask_anybody(self, name: str) -> Reply:
        return self._retry(name, {}, deadline_of(self.timeout), None)

    def _ask(self, name: str, deadline: float | None = None, wait: bool = False, **args: Any) -> Reply:
        """Call, and call again while the synchronizer is away.

        Args:
            name: of the call.
            deadline: on the monotonic clock; None: ``timeout`` seconds from now.
            wait: whether the call is to wait itself, up to the deadline.
            args: of the call.

        Raises:
            LinkClosedError: the synchronizer is not there.
            LifecycleError: it refused the call, or this side is closed.
            TransportError: it failed there.
        """
        self._stopped = args.get("status") == RunningStatus.STOPPED.value
        limit = deadline_of(self.timeout) if deadline is None else deadline
        return self._retry(name, {"session": self._session, **args}, limit, wait)

    def _retry(self, name: str, args: dict[str, Any], deadline: float | None, wait: bool | None) -> Reply:
        while True:
            if self._closed.is_set():
                raise LifecycleError(f"this {self.role} is closed; make a new one")
            left = max((deadline or 0.0) - time.monotonic(), 0.0)
            if wait:
                args["timeout"] = left
            try:
                reply = self._channel.call(name, args, left + _ANSWER_SECONDS + 2 * self.transfer_timeout)
                if reply.get("refused") == "unknown":
                    reply = self._say_hello()
                    if "refused" not in reply:
                        continue
            except LinkClosedError:
                if left == 0.0:
                    raise
                self._closed.wait(_RETRY_SECONDS)
                continue
            if "refused" in reply:
                raise LifecycleError(f"{name}: {reply['refused']}")
            if "error" in reply:
                raise TransportError(f"{name} failed in the synchronizer: {reply['error']}")
            return reply
