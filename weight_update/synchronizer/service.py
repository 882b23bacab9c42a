"""The calls that clients make to a synchronizer: plain values in and out, some of which wait."""

from __future__ import annotations

import contextlib
import logging
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable
from dataclasses import asdict
from typing import Any, ClassVar

from weight_update.errors import WeightSyncError
from weight_update.report import WorkerEvent, report_of
from weight_update.synchronizer.plan import RunningStatus, SyncPlan, SyncStyle
from weight_update.synchronizer.sessions import (
    CLOSED,
    Closed,
    Held,
    Refused,
    Reply,
    SessionManager,
)
from weight_update.synchronizer.state import ExplorerState, MemberState, TrainerState, remember
from weight_update.synchronizer.transfer import Endpoint, key_of
from weight_update.text import format_seconds
from weight_update.transports.socket_stream import deadline_of

_log = logging.getLogger(__name__)


class Service(SessionManager, ABC):
    """The synchronizer as clients see it. A subclass adds the calls of one method.

    Calls may come from any thread, and each ends within the time it is given. ``step`` is the number of steps
    that the client has done. ``timeout`` is the number of seconds that a transfer may take; the other
    arguments are those of :class:`SessionManager`.
    """

    calls: ClassVar[tuple[str, ...]] = (
        "hello",
        "bye",
        "beat",
        "notify",
        "status",
        "trainer_needs",
        "trainer_version",
        "trainer_failed",
        "explorer_needs",
        "explorer_syncs",
        "explorer_gives_up",
    )
    """Methods that clients may call, by name."""

    def __init__(self, plan: SyncPlan, *, timeout: float, **options: Any) -> None:
        super().__init__(plan, **options)
        self._timeout = timeout
        self._reserved = -1
        self._versions: dict[tuple[str, int], tuple[int, int]] = {}

    def call(self, name: str, args: dict[str, Any]) -> Reply:
        """Run a call of a client.

        Returns:
            the answer; ``{"refused": why}`` if the call makes no sense, ``{"error": text}`` if it failed,
            ``{"closed": text}`` if the synchronizer was closed.
        """
        try:
            if name not in self.calls:
                raise Refused(f"unknown call {name!r:.40}")
            reply: Reply = getattr(self, name)(**args)
            self.save_version()
            return reply
        except Closed as error:
            return {"closed": str(error)}
        except Refused as error:
            return {"refused": str(error)}
        except Exception as error:  # noqa: BLE001 - whatever it is, the caller must hear of it
            if self.closed:  # close() may have taken anything away
                return {"closed": CLOSED}
            if isinstance(error, WeightSyncError):
                return {"error": str(error)}
            _log.exception("a call failed: %s", name)
            return {"error": f"{type(error).__name__}: {error}"}

    def close(self) -> None:
        """Wake all that wait, and release the weights."""
        with contextlib.ExitStack() as stack:  # all of it, also where a step raises
            stack.callback(self._release)
            stack.callback(self.save_version)
            stack.callback(self.end_sessions)

    def _release(self) -> None:
        """Release the weights that the synchronizer holds."""

    def trainer_needs(self, session: str, step: int) -> Reply:
        """Return whether the trainer should synchronize."""
        with self.changed:
            self._trainer(session, step)
            return {"need": self.machine.trainer_needs_sync()}

    def trainer_version(self, session: str, step: int) -> Reply:
        """Return the number that the next version will have."""
        with self.changed:
            self._trainer(session, step)
            return {"version": self._next_version(), "observed": bool(self.observers.functions)}

    def trainer_failed(self, session: str, step: int, reason: str) -> Reply:
        """Note that the trainer could not publish."""
        with self.changed:
            self._trainer(session, step)
            self.machine.trainer_gave_up(reason)
            return {"version": self.machine.newest, "reason": reason}

    def _trainer(self, session: str, step: int) -> TrainerState:
        """Return the trainer that calls, and note its step."""
        trainer = self.member(session)
        assert isinstance(trainer, TrainerState)
        if trainer.step != step:
            self.machine.trainer_at(step)
        return trainer

    def explorer_needs(self, session: str, step: int, held: Held) -> Reply:
        """Return whether an explorer should synchronize, and the version in force there."""
        with self.changed:
            explorer = self._explorer(session, step, held)
            return {"need": self.machine.explorer_needs_sync(explorer.id), "version": explorer.version}

    @abstractmethod
    def explorer_syncs(self, session: str, step: int, held: Held, timeout: float, again: bool) -> Reply:
        """Wait for new weights, up to ``timeout`` seconds.

        ``again`` says that the explorer was told to join a publisher, and has done so.

        Returns:
            the ``version`` in force and perhaps a ``reason``; or, where the explorer has to act first, the
            endpoint of a publisher to ``join``, or a version to ``fetch``.
        """

    def explorer_gives_up(self, session: str, reason: str) -> Reply:
        """Note that an explorer does not wait any longer."""
        with self.changed:
            explorer = self.member(session)
            assert isinstance(explorer, ExplorerState)
            self.machine.gave_up(explorer.id, reason)
            return {"version": explorer.version, "reason": reason}

    # -- for subclasses, with the lock held --------------------------------------------------------

    def _explorer(self, session: str, step: int, held: Held) -> ExplorerState:
        """Return the explorer that calls; note its step and its update."""
        explorer = self.member(session)
        assert isinstance(explorer, ExplorerState)
        if explorer.step != step:
            self.machine.explorer_at(explorer.id, step)
        explorer.linked = None if held is None else held[0]
        if held is not None and held[1] is None:
            self.machine.has_none(explorer.id)
            return explorer
        known = None if held is None else self._version_of(*held)
        if known is not None:
            self.machine.published(*known)
            self._note_version(self.machine.has, explorer.id, known[0])
        return explorer

    def _version_of(self, key: str, number: int) -> tuple[int, int] | None:
        """Return version and trainer step of an update that an explorer has; None if it is unknown."""
        return self._versions.get((key, number))

    def _next_version(self) -> int:
        """Return a number above all numbers given so far."""
        return 1 + max(-1 if self.machine.newest is None else self.machine.newest, self._reserved)

    def _record(self, endpoint: Endpoint, number: int, version: int, step: int) -> None:
        """Note that the update ``number`` of a publisher is ``version``."""
        remember(self._versions, (key_of(endpoint), number), (version, step))
        self._reserved = max(self._reserved, version)

    def _await_turn(
        self, explorer: ExplorerState, deadline: float | None, timeout: float, ready: Callable[[], bool]
    ) -> bool:
        """Wait until there is something to do for a waiting explorer (return True), or its wait is over.

        ``timeout`` is the number of seconds that it had, for the reason.
        """
        if not self.wait_for(lambda: has_ended(explorer) or ready(), deadline):
            limit = f"within {format_seconds(timeout)}" if timeout else "in time"  # it took all to connect
            late = f"no new weights came {limit}{self._lag(explorer)}"
            busy = not self.machine.gave_up(explorer.id, late)
            end = deadline_of(2 * self._timeout)
            if busy and not self.wait_for(lambda: has_ended(explorer) or ready(), end):
                self.machine.failed(explorer.id, "the transfer did not end")
        return not has_ended(explorer)

    def _lag(self, explorer: ExplorerState) -> str:
        """Return what the trainer has not done, as far as that is known."""
        trainer, style = self.machine.trainer, self.plan.style
        at = "has not come" if trainer is None else f"is at step {trainer.step}"
        if style is SyncStyle.FIXED and (trainer is None or trainer.step < explorer.wanted):
            return f": it waits for weights of the trainer's step {explorer.wanted}, and the trainer {at}"
        if trainer is None:
            return f": the trainer {at}"
        unanswered = "has not answered; does it call need_sync() after each step?"
        return f": the trainer {at}, and {unanswered}" if style is SyncStyle.EXPLORER_DRIVEN else ""

    def _end_transfer(self, ids: Iterable[int], version: int, failures: dict[int, str]) -> None:
        """Note that what was on its way to explorers has arrived, or failed."""
        for id in ids:
            if id in failures:
                self.machine.failed(id, failures[id])
                if id in self.machine.explorers:
                    self.observers.tell(WorkerEvent("late", id, version, failures[id]))
            else:
                self._note_version(self.machine.delivered, id, version)

    # -- for observers -----------------------------------------------------------------------------

    def _tell(self, report: Reply | None) -> None:
        if report is not None:
            self.observers.tell(report_of(report))

    def _note_version(self, note: Callable[[int, int], None], id: int, version: int) -> None:
        """Note by ``note`` that a version is in force in an explorer; tell observers if that is new."""
        explorer = self.machine.explorers.get(id)
        before = None if explorer is None else explorer.version
        note(id, version)
        if explorer is not None and explorer.version != before:
            self.observers.tell(WorkerEvent("applied", id, explorer.version))


def has_ended(member: MemberState) -> bool:
    """Return whether a trainer or an explorer waits no longer."""
    return member.status is not RunningStatus.REQUIRE_SYNC


def outcome_of(explorer: ExplorerState) -> Reply:
    """Return how the wait of an explorer ended."""
    assert explorer.outcome is not None
    return asdict(explorer.outcome)
