"""The rules of synchronization, and nothing else: no transport, thread, clock or weight is known here.

Whoever runs the machine tells it what happened (events), then asks what may happen (questions). Who waits is
REQUIRE_SYNC; a wait has ended when ``outcome`` is set. Time does not pass here: who runs the machine lets a
waiter give up.
"""

from __future__ import annotations

from collections.abc import Iterable

from weight_update.synchronizer.plan import RunningStatus, SyncStyle
from weight_update.synchronizer.state import (
    TRAINER_STOPPED,
    ExplorerState,
    State,
    SyncOutcome,
    TrainerState,
    resolve,
)

__all__ = ["StateMachine"]

_STEPS_REMEMBERED = 256
REQUIRE_SYNC, STOPPED = RunningStatus.REQUIRE_SYNC, RunningStatus.STOPPED


class StateMachine(State):
    """The state, and the events that change it."""

    # -- events: coming and going ------------------------------------------------------------------

    def trainer_joined(self, step: int = 0, synced_at: int | None = None) -> TrainerState:
        """The trainer is here, perhaps again; ``synced_at`` is the step it last synchronized at."""
        if self.trainer is not None:
            self.trainer_left("another trainer came")
        self.trainer = TrainerState(step=step, synced_at=synced_at)
        self._settle()
        return self.trainer

    def trainer_left(self, reason: str = TRAINER_STOPPED) -> None:
        """It stopped or died: whoever waits for it is woken."""
        if self.trainer is None:
            return
        resolve(self.trainer, SyncOutcome(self.newest, reason))
        self.trainer.status = STOPPED
        self._end_transfer(reason)
        self._settle(reason)

    def joined(
        self, id: int, version: int | None = None, step: int = 0, synced_at: int | None = None
    ) -> ExplorerState:
        """An explorer is here, perhaps again; one of that id that was here before is gone."""
        self.left(id, "another explorer came with this id")
        known = version is not None and self.newest is not None and version <= self.newest
        if synced_at is None:
            synced_at = step if self.plan.style is SyncStyle.EXPLORER_DRIVEN else -1
        self.explorers[id] = ExplorerState(id, version if known else None, step=step, synced_at=synced_at)
        self._settle()
        return self.explorers[id]

    def left(self, id: int, reason: str = "the explorer left") -> None:
        """An explorer stopped or died; nobody waits for it any more."""
        explorer = self.explorers.pop(id, None)
        if explorer is not None:
            explorer.busy = False
            resolve(explorer, SyncOutcome(explorer.version, reason))
            explorer.status = STOPPED
        self._settle()

    # -- events: steps and wishes ------------------------------------------------------------------

    def trainer_at(self, step: int) -> None:
        """The trainer has done so many steps."""
        if self.trainer is not None:
            self.trainer.step = step
        self._settle()

    def explorer_at(self, id: int, step: int) -> None:
        """An explorer has done so many steps."""
        self.explorers[id].step = step
        self._settle()

    def trainer_requires(self) -> None:
        """NCCL: the trainer waits for those who are to get weights."""
        self.trainer_announces()
        if self.trainer is not None:
            self.trainer.waits = self.trainer.status is REQUIRE_SYNC
        self._settle()

    def trainer_announces(self) -> None:
        """Record that the trainer will wait for explorers (NCCL)."""
        if self.trainer is not None and self.trainer.status is not STOPPED:
            self.trainer.status, self.trainer.outcome = REQUIRE_SYNC, None

    def trainer_withdraws(self) -> None:
        """Take back what the trainer announced, or end its wait."""
        if self.trainer is None:
            return
        if self.trainer.waits:
            self.trainer_gave_up("it went on")
        elif self.trainer.status is REQUIRE_SYNC:
            self.trainer.status = RunningStatus.RUNNING

    def explorer_requires(self, id: int) -> None:
        """An explorer waits for new weights."""
        self._want(self.explorers[id], waits=True)

    def explorer_announces(self, id: int) -> None:
        """Record that an explorer will wait for new weights; until it does, it is handed none."""
        self._want(self.explorers[id], waits=False)

    def explorer_withdraws(self, id: int) -> None:
        """Take back what an explorer announced, or end its wait."""
        explorer = self.explorers[id]
        if explorer.waits:
            self.gave_up(id, "it went on")
        elif explorer.status is REQUIRE_SYNC:
            explorer.status = RunningStatus.RUNNING
            self._settle()

    def _want(self, explorer: ExplorerState, *, waits: bool) -> None:
        if explorer.status is not REQUIRE_SYNC:
            explorer.status, explorer.outcome = REQUIRE_SYNC, None
            explorer.asked, explorer.had = self.newest, explorer.version
        if waits and not explorer.waits:
            explorer.waits, explorer.wanted = True, self.plan.wanted(explorer.step)
        self._settle()

    def gave_up(self, id: int, reason: str = "no new weights came in time") -> bool:
        """An explorer does not want to wait longer; False while weights are on their way to it."""
        explorer = self.explorers[id]
        if explorer.busy:
            return False
        resolve(explorer, SyncOutcome(explorer.version, reason))
        explorer.failed_at = explorer.step
        self._settle()
        return True

    def trainer_gave_up(self, reason: str = "no explorer was ready in time") -> bool:
        """The trainer does not want to wait longer; False while a transfer is under way."""
        if self.transfer or self.trainer is None:
            return False
        resolve(self.trainer, SyncOutcome(self.newest, reason))
        self.trainer.failed_at = self.trainer.step
        self._settle()
        return True

    # -- events: weights ---------------------------------------------------------------------------

    def begin(self, ids: Iterable[int]) -> None:
        """Weights are on their way to explorers that were ready."""
        going = tuple(self.explorers[id] for id in ids)
        assert all(explorer.waits and not explorer.busy for explorer in going)
        if self.plan.direct:
            assert not self.transfer, "a transfer is under way"
            self.transfer = going
        for explorer in going:
            explorer.busy = True

    def published(self, version: int, step: int) -> None:
        """Somebody holds ``version``, made at the trainer's ``step``; older news than we have are ignored."""
        if self.newest is None or version > self.newest:
            self.newest, self.newest_step, self.lost = version, step, False
            self._steps[version] = step
            while len(self._steps) > _STEPS_REMEMBERED:
                del self._steps[min(self._steps)]
        self.offered(step)

    def offered(self, step: int, version: int | None = None) -> None:
        """The trainer gave away what it had at ``step``; who takes it shows later.

        ``version``: NCCL, FULLY_ASYNC: what it will be; explorers that do not have it are behind from now on.
        """
        if self.trainer is not None and version is not None:
            self.trainer.given = max(self.trainer.given, version)
        if self.trainer is not None and self.trainer.step == step:
            self.trainer.synced_at, self.trainer.failed_at = step, None
        self._settle()

    def delivered(self, id: int, version: int) -> None:
        """What was on its way to an explorer is in force there; one that came since then is not meant."""
        explorer = self.explorers.get(id)
        if explorer is not None and explorer.busy:
            explorer.busy = False
            newer = explorer.version is None or version > explorer.version
            self.has(id, version)
            if newer:
                resolve(explorer, SyncOutcome(version))

    def failed(self, id: int, reason: str) -> None:
        """What was on its way to an explorer did not arrive."""
        explorer = self.explorers.get(id)
        if explorer is not None and explorer.busy:
            explorer.busy = False
            self.gave_up(id, reason)

    def has(self, id: int, version: int) -> None:
        """An explorer has a published version in force, however it came."""
        assert self.newest is not None, "nothing was published"
        assert version <= self.newest, f"version {version} was not published"
        explorer = self.explorers[id]
        if explorer.version is None or version > explorer.version:
            explorer.version = version
        self._settle()

    def transferred(self) -> None:
        """NCCL: the transfer is over; who was not reached until now is not any more."""
        self._end_transfer("the transfer did not reach it")
        trainer = self.trainer
        if trainer is not None and trainer.status is REQUIRE_SYNC:
            if trainer.synced_at == trainer.step:
                resolve(trainer, SyncOutcome(self.newest))
            else:
                self.trainer_gave_up("the transfer reached nobody")
        self._settle()

    def lost_weights(self) -> None:
        """Nobody holds the newest version any more: its number stays, its weights must come anew."""
        self.lost = self.newest is not None
        self._settle()

    # -- insides -----------------------------------------------------------------------------------

    def _settle(self, reason: str = TRAINER_STOPPED) -> None:
        """Wake everybody who need not, or cannot, wait any longer."""
        for explorer in self.explorers.values():
            if explorer.status is not REQUIRE_SYNC or explorer.busy:
                continue
            if self._content(explorer):
                resolve(explorer, SyncOutcome(explorer.version))
            elif self._trainer_stopped() and self._suitable(explorer) is None:
                resolve(explorer, SyncOutcome(explorer.version, reason))
        trainer = self.trainer
        if (
            trainer is not None
            and trainer.waits
            and not self.transfer
            and not self.ready()
            and not self.expected()
        ):
            resolve(trainer, SyncOutcome(self.newest, "no explorer is running that takes weights now"))

    def _end_transfer(self, reason: str) -> None:
        going, self.transfer = self.transfer, ()
        for explorer in going:
            explorer.busy = False
            resolve(explorer, SyncOutcome(explorer.version, reason))
