"""The plan of a synchronizer: the choices of a user, which do not change during a run."""

from __future__ import annotations

import enum
from dataclasses import asdict, dataclass
from typing import Any, NoReturn

from weight_update.arguments import whole_number


class _Name(str, enum.Enum):
    """An enum whose members equal their values and print as them (``enum.StrEnum`` of Python 3.11)."""

    def __str__(self) -> str:
        return str(self.value)

    @classmethod
    def _missing_(cls, value: object) -> NoReturn:
        known = ", ".join(repr(member.value) for member in cls)
        raise ValueError(f"unknown {cls.__name__} {value!r} (known: {known})")


class SyncMethod(_Name):
    """A way for weights to travel from the trainer to the explorers."""

    NCCL = "nccl"
    """Directly, when both sides are ready. Between hosts they travel over TCP, or through NCCL where the
    trainer says ``backend="nccl"``."""

    MEMORY = "memory"
    """The synchronizer holds the newest weights, and explorers fetch them there. The trainer waits for no
    explorer."""

    CHECKPOINT = "checkpoint"
    """The trainer writes files, and explorers read them. The trainer waits for no explorer."""


class SyncStyle(_Name):
    """A rule that says when an explorer takes new weights."""

    FIXED = "fixed"
    """Every ``sync_interval`` steps, with the explorer ``sync_offset`` steps ahead of the trainer."""

    EXPLORER_DRIVEN = "explorer_driven"
    """``sync_interval`` steps of an explorer after its last synchronization: it asks, the trainer answers."""

    TRAINER_DRIVEN = "trainer_driven"
    """Every ``sync_interval`` steps of the trainer: it offers, explorers answer."""

    FULLY_ASYNC = "fully_async"
    """The trainer publishes every ``sync_interval`` steps. Explorers take versions in the background, and
    wait only if they are more than ``max_staleness`` versions behind."""


class RunningStatus(_Name):
    """The present activity of a trainer or an explorer."""

    STOPPED = "stopped"
    """It has ended, or has not connected yet."""

    RUNNING = "running"
    """It trains or explores."""

    REQUIRE_SYNC = "require_sync"
    """An explorer waits, or is about to wait, for new weights; a trainer waits for explorers."""


@dataclass(frozen=True)
class SyncPlan:
    """A method and a style, with their options. Invalid combinations raise.

    Attributes:
        method: a :class:`SyncMethod` or its value, such as ``"memory"``.
        style: a :class:`SyncStyle` or its value, such as ``"fixed"``.
        sync_interval: number of steps between synchronizations: of the explorer in EXPLORER_DRIVEN, else of
            the trainer.
        sync_offset: FIXED: number of steps that the explorer runs before its first synchronization.
        max_staleness: FULLY_ASYNC: number of published versions that an explorer may be behind without
            waiting. With NCCL, a version counts once it was sent, even if no explorer has confirmed it.

    Raises:
        ValueError: an unknown method or style, a number out of range, or one that this style does not use.
    """

    method: SyncMethod
    style: SyncStyle = SyncStyle.FIXED
    sync_interval: int = 1
    sync_offset: int = 0
    max_staleness: int = 1

    def __post_init__(self) -> None:
        object.__setattr__(self, "method", SyncMethod(self.method))
        object.__setattr__(self, "style", SyncStyle(self.style))
        for name, least in (("sync_interval", 1), ("sync_offset", 0), ("max_staleness", 0)):
            object.__setattr__(self, name, whole_number(getattr(self, name), name, least))
        if self.sync_offset and self.style is not SyncStyle.FIXED:
            raise ValueError(f"sync_offset is for SyncStyle.FIXED, not for {self.style}")
        if self.max_staleness != 1 and self.style is not SyncStyle.FULLY_ASYNC:
            raise ValueError(f"max_staleness is for SyncStyle.FULLY_ASYNC, not for {self.style}")

    @property
    def direct(self) -> bool:
        """Whether trainer and explorers meet for a transfer."""
        return self.method is SyncMethod.NCCL

    def to_json(self) -> dict[str, Any]:
        """Return the fields as plain values; ``SyncPlan(**values)`` is the inverse."""
        return {**asdict(self), "method": self.method.value, "style": self.style.value}

    def trainer_due(self, step: int) -> bool:
        """Return whether the trainer publishes at ``step`` without being asked."""
        if self.style is SyncStyle.EXPLORER_DRIVEN or step % self.sync_interval:
            return False
        return not (self.direct and self.style is SyncStyle.FIXED and step + self.sync_offset == 0)

    def explorer_due(self, step: int) -> bool:
        """Return, for FIXED, whether an explorer synchronizes at ``step``."""
        return step >= max(self.sync_offset, 1) and (step - self.sync_offset) % self.sync_interval == 0

    def wanted(self, step: int) -> int:
        """Return the oldest trainer step whose weights an explorer takes at its ``step`` (FIXED; else 0)."""
        if self.style is not SyncStyle.FIXED:
            return 0
        return max(0, (step - self.sync_offset) // self.sync_interval) * self.sync_interval

    def next_wanted(self, step: int) -> int:
        """Return what :meth:`wanted` returns at the explorer's first synchronization after ``step``."""
        return self.wanted(step) + self.sync_interval if step >= self.sync_offset else 0
