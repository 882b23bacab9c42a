"""The rules of synchronization alone, without transports, threads, clocks or weights.

The service tells the state machine what happened (events), then asks what may happen (questions). A trainer
or an explorer that waits has the status REQUIRE_SYNC; its wait has ended when ``outcome`` is set. Time does
not pass here: the service lets a waiting side give up.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

from weight_update.synchronizer.plan import SyncPlan, SyncStyle
from weight_update.synchronizer.state import (
    REQUIRE_SYNC,
    RUNNING,
    STOPPED,
    TRAINER_STOPPED,
    ExplorerState,
    SyncOutcome,
    TrainerState,
    remember,
    resolve,
)


@dataclass(eq=False)
class StateMachine:
    """The state of one trainer and any number of explorers: events change it, and it answers questions.

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

    # -- questions -------------------------------------------------------------------------------

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

    # -- events: coming and going ------------------------------------------------------------------

    def trainer_joined(self, step: int = 0, synced_at: int | None = None) -> TrainerState:
        """Add the trainer, perhaps again; ``synced_at`` is the step at which it last synchronized."""
        if self.trainer is not None:
            self.trainer_left("another trainer came")
        self.trainer = TrainerState(step=step, synced_at=synced_at)
        self._settle()
        return self.trainer

    def trainer_left(self, reason: str) -> None:
        """Note that the trainer stopped or died, and wake all that wait for it."""
        if self.trainer is None:
            return
        resolve(self.trainer, SyncOutcome(self.newest, reason))
        self.trainer.status = STOPPED
        self._end_transfer(reason)
        self._settle(reason)

    def joined(
        self, id: int, version: int | None = None, step: int = 0, synced_at: int | None = None
    ) -> ExplorerState:
        """Add an explorer, perhaps again. It replaces an earlier one with this id."""
        self._remove(id, "another explorer came with this id")
        known = version is not None and self.newest is not None and version <= self.newest
        if synced_at is None:
            synced_at = step if self.plan.style is SyncStyle.EXPLORER_DRIVEN else -1
        self.explorers[id] = ExplorerState(id, version if known else None, step=step, synced_at=synced_at)
        self._settle()
        return self.explorers[id]

    def left(self, id: int, reason: str) -> None:
        """Remove an explorer that stopped or died."""
        self._remove(id, reason)
        self._settle()

    # -- events: steps and wishes ------------------------------------------------------------------

    def trainer_at(self, step: int) -> None:
        """Note how many steps the trainer has done."""
        if self.trainer is not None:
            self.trainer.step = step
        self._settle()

    def explorer_at(self, id: int, step: int) -> None:
        """Note how many steps an explorer has done."""
        self.explorers[id].step = step
        self._settle()

    def trainer_requires(self) -> None:
        """Let the trainer wait for explorers (NCCL)."""
        self.trainer_announces()
        if self.trainer is not None:
            self.trainer.waits = self.trainer.status is REQUIRE_SYNC
        self._settle()

    def trainer_announces(self) -> None:
        """Note that the trainer will wait for explorers (NCCL)."""
        if self.trainer is not None and self.trainer.status is not STOPPED:
            self.trainer.status, self.trainer.outcome = REQUIRE_SYNC, None

    def trainer_withdraws(self) -> None:
        """Take back the trainer's announcement, or end its wait."""
        if self.trainer is None:
            return
        if self.trainer.waits:
            self.trainer_gave_up("it went on")
        elif self.trainer.status is REQUIRE_SYNC:
            self.trainer.status = RUNNING

    def explorer_requires(self, id: int) -> None:
        """Let an explorer wait for new weights."""
        self.explorer_announces(id, waits=True)

    def explorer_announces(self, id: int, *, waits: bool = False) -> None:
        """Note that an explorer will wait for new weights; until it ``waits``, it is handed none."""
        explorer = self.explorers[id]
        if explorer.status is not REQUIRE_SYNC:
            explorer.status, explorer.outcome = REQUIRE_SYNC, None
            explorer.asked = self.newest if self.plan.style is SyncStyle.EXPLORER_DRIVEN else None
            explorer.had = explorer.version
        if not explorer.waits:
            explorer.waits, explorer.wanted = waits, self.plan.wanted(explorer.step)
        self._settle()

    def explorer_withdraws(self, id: int) -> None:
        """Take back an explorer's announcement, or end its wait."""
        explorer = self.explorers[id]
        if explorer.waits:
            self.gave_up(id, "it went on")
        elif explorer.status is REQUIRE_SYNC:
            explorer.status = RUNNING
            self._settle()

    def gave_up(self, id: int, reason: str) -> bool:
        """End the wait of an explorer; return False while weights are on their way to it."""
        explorer = self.explorers[id]
        if explorer.busy:
            return False
        resolve(explorer, SyncOutcome(explorer.version, reason))
        explorer.failed_at, explorer.failure = explorer.step, reason
        self._settle()
        return True

    def trainer_gave_up(self, reason: str) -> bool:
        """End the wait of the trainer; return False while a transfer is under way."""
        if self.transfer or self.trainer is None:
            return False
        resolve(self.trainer, SyncOutcome(self.newest, reason))
        self.trainer.failed_at = self.trainer.step
        self._settle()
        return True

    # -- events: weights ---------------------------------------------------------------------------

    def begin(self, ids: Iterable[int]) -> None:
        """Note that weights are on their way to explorers that were ready."""
        going = tuple(self.explorers[id] for id in ids)
        assert all(explorer.waits and not explorer.busy for explorer in going)
        if self.plan.direct:
            assert not self.transfer, "a transfer is under way"
            self.transfer = going
        for explorer in going:
            explorer.busy = True

    def published(self, version: int, step: int) -> None:
        """Note that ``version``, made at the trainer's ``step``, is held somewhere; ignore older ones."""
        if self.newest is None or version > self.newest:
            self.newest = version
            self.newest_step = step
            self.lost = False
            remember(self._steps, version, step)
            self.offered(step)

    def offered(self, step: int, version: int | None = None) -> None:
        """Note that the trainer gave its weights away at ``step``; which explorers take them shows later.

        ``version`` (NCCL, FULLY_ASYNC) is the version that they will be: explorers without it are behind from
        now on.
        """
        if self.trainer is not None and version is not None:
            self.trainer.given = max(self.trainer.given, version)
        if self.trainer is not None and self.trainer.step == step:
            self.trainer.synced_at, self.trainer.failed_at = step, None
        self._settle()

    def delivered(self, id: int, version: int) -> None:
        """Note that weights that were on their way to an explorer are in force there.

        An explorer that took the place of this one since then is not meant.
        """
        explorer = self.explorers.get(id)
        if explorer is not None and explorer.busy:
            explorer.busy = False
            newer = explorer.version is None or version > explorer.version
            self.has(id, version)
            if newer:
                resolve(explorer, SyncOutcome(version))

    def failed(self, id: int, reason: str) -> None:
        """Note that weights that were on their way to an explorer did not arrive."""
        explorer = self.explorers.get(id)
        if explorer is not None and explorer.busy:
            explorer.busy = False
            self.gave_up(id, reason)

    def has(self, id: int, version: int) -> None:
        """Note that a published version is in force in an explorer, however it came there."""
        assert self.newest is not None, "nothing was published"
        assert version <= self.newest, f"version {version} was not published"
        explorer = self.explorers[id]
        if explorer.version is None or version > explorer.version:
            explorer.version = version
        self._settle()

    def has_none(self, id: int) -> None:
        """Note that an explorer has no complete version any more, because its engine failed to load one."""
        self.explorers[id].version = None

    def transferred(self) -> None:
        """End the transfer (NCCL); explorers that it has not reached by now failed."""
        self._end_transfer("the transfer did not reach it")
        trainer = self.trainer
        if trainer is not None and trainer.status is REQUIRE_SYNC:
            if trainer.synced_at == trainer.step:
                resolve(trainer, SyncOutcome(self.newest))
            else:
                self.trainer_gave_up("the transfer reached nobody")
        self._settle()

    def lost_weights(self) -> None:
        """Note that the weights of the newest version are gone; its number stays."""
        self.lost = self.newest is not None
        self._settle()

    def _remove(self, id: int, reason: str) -> None:
        explorer = self.explorers.pop(id, None)
        if explorer is not None:
            explorer.busy = False
            resolve(explorer, SyncOutcome(explorer.version, reason))
            explorer.status = STOPPED

    def _settle(self, reason: str = TRAINER_STOPPED) -> None:
        """Wake all that need not, or cannot, wait any longer."""
        for explorer in self.explorers.values():
            if explorer.status is not REQUIRE_SYNC or explorer.busy:
                continue
            if self._is_satisfied(explorer):
                resolve(explorer, SyncOutcome(explorer.version))
            elif self._trainer_stopped() and self._suitable(explorer) is None:
                resolve(explorer, SyncOutcome(explorer.version, reason))
        trainer = self.trainer
        if trainer is not None and trainer.waits and not (self.transfer or self.ready() or self.expected()):
            reason = "no explorer is running that takes weights now"
            if self.plan.style is SyncStyle.EXPLORER_DRIVEN:
                reason = "no explorer waits for weights; call sync_weight() when need_sync() returns True"
            resolve(trainer, SyncOutcome(self.newest, reason))
        self.on_change()

    def _end_transfer(self, reason: str) -> None:
        going = self.transfer
        self.transfer = ()
        for explorer in going:
            explorer.busy = False
            resolve(explorer, SyncOutcome(explorer.version, reason))
