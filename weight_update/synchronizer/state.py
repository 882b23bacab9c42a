"""The state of the trainer and the explorers, and the questions that it answers."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TypeVar

from weight_update.synchronizer.plan import RunningStatus, SyncPlan, SyncStyle

TRAINER_STOPPED = "the trainer stopped"
"""Reason when the trainer said goodbye, as at the end of a run; if it died, the reason says more."""

_REMEMBERED = 256
_K = TypeVar("_K")
_V = TypeVar("_V")

RUNNING, REQUIRE_SYNC, STOPPED = RunningStatus.RUNNING, RunningStatus.REQUIRE_SYNC, RunningStatus.STOPPED


@dataclass(frozen=True)
class SyncOutcome:
    """The end of a synchronization.

    Attributes:
        version: version in force now; None before the first.
        reason: cause for which the version is the one before; None if the synchronization succeeded.
    """

    version: int | None
    reason: str | None = None


@dataclass(eq=False, kw_only=True)
class MemberState:
    """The state of the trainer or of an explorer, from its coming to its end.

    Attributes:
        step: number of steps done.
        synced_at: step of its last synchronization; None before.
        failed_at: step at which it last failed to synchronize; None if it succeeded since.
        waits: whether it is inside ``sync_weight`` (the trainer: by NCCL); if not, REQUIRE_SYNC only
            announces that.
        outcome: end of its last wait; None while it waits.
    """

    status: RunningStatus = RUNNING
    step: int = 0
    synced_at: int | None = None
    failed_at: int | None = None
    waits: bool = False
    outcome: SyncOutcome | None = None


@dataclass(eq=False)
class TrainerState(MemberState):
    """The state of the trainer.

    Attributes:
        given: NCCL, FULLY_ASYNC: newest version that it sent off, even if no explorer is known to have it.
    """

    given: int = -1


@dataclass(eq=False)
class ExplorerState(MemberState):
    """The state of an explorer.

    Attributes:
        version: version in force; None before the first.
        wanted: FIXED, in REQUIRE_SYNC: trainer step whose weights it needs; else 0.
        asked: EXPLORER_DRIVEN, in REQUIRE_SYNC: newest version when it began to wait; else None.
        had: while it waits: version in force when it began to wait.
        busy: whether weights are on their way to it, so that it cannot give up.
        failure: reason for which it last gave up; None if it synchronized since.
    """

    id: int
    version: int | None = None
    synced_at: int = field(default=-1, kw_only=True)
    wanted: int = 0
    asked: int | None = None
    had: int | None = None
    busy: bool = False
    failure: str | None = None


@dataclass(eq=False)
class State:
    """The state of one trainer and any number of explorers.

    Attributes:
        trainer: the trainer; None before it came.
        explorers: explorers that are here, by id.
        newest: newest published version; None before the first.
        newest_step: trainer step at which it was made.
        lost: whether the weights of the newest version are gone; the trainer is asked for new ones.
        transfer: NCCL: explorers that take part in the transfer under way.
        on_change: called after each change that ends a wait, or may.
    """

    plan: SyncPlan
    trainer: TrainerState | None = None
    explorers: dict[int, ExplorerState] = field(default_factory=dict)
    newest: int | None = None
    newest_step: int = 0
    lost: bool = False
    transfer: tuple[ExplorerState, ...] = ()
    on_change: Callable[[], None] = lambda: None
    _steps: dict[int, int] = field(default_factory=dict)

    def trainer_needs_sync(self) -> bool:
        """Return whether the trainer should call ``sync_weight`` now."""
        trainer, plan = self.trainer, self.plan
        if trainer is None or trainer.status is STOPPED:
            return False
        if trainer.status is REQUIRE_SYNC or self.ready():
            return True
        if trainer.step == trainer.failed_at:
            return False
        if self.lost or self._unserved():
            return True
        return plan.trainer_due(trainer.step) and trainer.step != trainer.synced_at

    def explorer_needs_sync(self, id: int) -> bool:
        """Return whether an explorer should call ``sync_weight`` now."""
        explorer, plan = self.explorers[id], self.plan
        if explorer.status is REQUIRE_SYNC:
            return True
        if explorer.failed_at == explorer.step:
            return False
        if self._trainer_stopped():
            return not (plan.direct or self.lost) and self._behind(explorer) > 0
        if plan.style is SyncStyle.FIXED:
            return plan.explorer_due(explorer.step) and explorer.step != explorer.synced_at
        if plan.style is SyncStyle.EXPLORER_DRIVEN:
            return explorer.step - explorer.synced_at >= plan.sync_interval
        if plan.style is SyncStyle.FULLY_ASYNC:
            exist = self.newest is not None or (plan.direct and self.trainer is not None)  # weights
            return self._behind(explorer) > plan.max_staleness or (exist and explorer.version is None)
        if plan.direct:
            return self.trainer is not None and self.trainer.status is REQUIRE_SYNC
        return self._behind(explorer) > 0

    def ready(self) -> tuple[int, ...]:
        """Return the explorers that wait for the weights that the trainer has now (NCCL)."""
        if not self.plan.direct or self.trainer is None or self.transfer:
            return ()
        step = self.trainer.step
        return tuple(e.id for e in self.explorers.values() if e.waits and e.wanted <= step)

    def may_transfer(self, late: bool = False) -> tuple[int, ...]:
        """Return the explorers that are to get weights now (NCCL); none if the trainer is to wait.

        ``late`` says that the trainer has waited long enough, and goes on without those that are not ready.
        """
        ready = self.ready()
        if self.trainer is None or self.trainer.status is not REQUIRE_SYNC:
            return ()
        return ready if late or set(self.expected()) <= set(ready) else ()

    def expected(self) -> tuple[int, ...]:
        """Return the explorers that the trainer waits for (NCCL)."""
        if self.trainer is None or self.plan.style in (SyncStyle.EXPLORER_DRIVEN, SyncStyle.FULLY_ASYNC):
            return ()
        if self.plan.style is SyncStyle.TRAINER_DRIVEN:
            return tuple(self.explorers)
        return tuple(e.id for e in self.explorers.values() if self._next_wanted(e) <= self.trainer.step)

    def may_fetch(self, id: int) -> int | None:
        """Return the version for a waiting explorer to fetch (MEMORY, CHECKPOINT); None to wait."""
        explorer = self.explorers[id]
        return self._suitable(explorer) if explorer.waits else None

    def _suitable(self, explorer: ExplorerState) -> int | None:
        """Return the version for an explorer that waits or will; None where none suits, and for NCCL."""
        newest = self.newest
        if self.plan.direct or explorer.status is not REQUIRE_SYNC or explorer.busy:
            return None
        if newest is None or self.lost or newest == explorer.version:
            return None
        enough = self._answers(explorer, newest) and self.newest_step >= explorer.wanted
        return newest if enough or self._trainer_stopped() else None

    def _is_satisfied(self, explorer: ExplorerState) -> bool:
        """Return whether a waiting explorer has what it waits for."""
        if explorer.version is None:
            return False
        newest, new = self.plan.direct or explorer.version == self.newest, explorer.version != explorer.had
        if newest and new and self._trainer_stopped() and not self.plan.direct:
            return True
        if self.plan.style is SyncStyle.FULLY_ASYNC:
            return self._behind(explorer) <= self.plan.max_staleness
        if self.plan.style is SyncStyle.FIXED:
            return newest and self._steps.get(explorer.version, -1) >= explorer.wanted
        return newest and new and self._answers(explorer, explorer.version)

    def _answers(self, explorer: ExplorerState, version: int) -> bool:
        """Return whether ``version`` came after an explorer asked, or is what the trainer still has."""
        current = self.trainer is not None and self.trainer.step == self.newest_step
        since = explorer.asked is None or version > explorer.asked
        return since or (current and version == self.newest)

    def _next_wanted(self, explorer: ExplorerState) -> int:
        if explorer.waits:
            return explorer.wanted
        if self.explorer_needs_sync(explorer.id):
            return self.plan.wanted(explorer.step)
        return self.plan.next_wanted(explorer.step)

    def _unserved(self) -> bool:
        """Return whether an explorer wants what the trainer is yet to publish (EXPLORER_DRIVEN, not NCCL)."""
        if self.plan.direct or self.plan.style is not SyncStyle.EXPLORER_DRIVEN:
            return False
        waiting = [e for e in self.explorers.values() if e.status is REQUIRE_SYNC and not e.busy]
        return any(self._suitable(explorer) is None for explorer in waiting)

    def _behind(self, explorer: ExplorerState) -> int:
        newest = -1 if self.newest is None else self.newest
        if self.trainer is not None:
            newest = max(newest, self.trainer.given)
        return newest - (-1 if explorer.version is None else explorer.version)

    def _trainer_stopped(self) -> bool:
        return self.trainer is not None and self.trainer.status is STOPPED


def resolve(member: MemberState, outcome: SyncOutcome) -> None:
    """End the wait of ``member``, if it waits."""
    if member.status is not REQUIRE_SYNC:
        return
    member.status, member.outcome, member.waits = RUNNING, outcome, False
    if outcome.reason is not None:
        member.failed_at = member.step
    elif isinstance(member, ExplorerState):
        member.synced_at, member.failed_at, member.failure = member.step, None, None


def remember(known: dict[_K, _V], key: _K, value: _V) -> None:
    """Add an entry on a version or an update, and forget the oldest ones."""
    known[key] = value
    while len(known) > _REMEMBERED:
        del known[next(iter(known))]
