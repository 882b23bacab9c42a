"""The states of the trainer and the explorers, which a state machine changes."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TypeVar

from weight_update.synchronizer.plan import RunningStatus

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
        seen: for the service: time on the monotonic clock when the client was last heard of.
    """

    status: RunningStatus = RUNNING
    step: int = 0
    synced_at: int | None = None
    failed_at: int | None = None
    waits: bool = False
    outcome: SyncOutcome | None = None
    seen: float = 0.0


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
        linked: for the service: key of the publisher that it is connected to; None for none.
    """

    id: int
    version: int | None = None
    synced_at: int = field(default=-1, kw_only=True)
    wanted: int = 0
    asked: int | None = None
    had: int | None = None
    busy: bool = False
    failure: str | None = None
    linked: str | None = None


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
