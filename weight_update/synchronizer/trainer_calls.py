"""What a trainer may ask of a synchronizer."""

from __future__ import annotations

import logging

from weight_update.errors import WeightSyncError
from weight_update.synchronizer.memory import WeightCache
from weight_update.synchronizer.plan import RunningStatus, SyncStyle
from weight_update.synchronizer.sessions import Reply, SessionManager
from weight_update.synchronizer.state import TrainerState
from weight_update.synchronizer.transfer import Endpoint
from weight_update.transports.shared_memory.unix_stream import deadline_of

__all__ = ["TrainerCalls"]

_log = logging.getLogger(__name__)


class TrainerCalls:
    """Calls take and give plain values. ``step`` is how many steps the trainer has done.

    Args:
        sessions: who is here.
        memory: MEMORY: where weights are kept.
    """

    def __init__(self, sessions: SessionManager, memory: WeightCache | None) -> None:
        self.sessions, self.plan = sessions, sessions.plan
        self._machine, self._changed, self._memory = sessions.machine, sessions.changed, memory

    def trainer_needs(self, session: str, step: int) -> Reply:
        """Whether the trainer should synchronize."""
        with self._changed:
            self._trainer(session, step)
            return {"need": self._machine.trainer_needs_sync()}

    def trainer_version(self, session: str, step: int) -> Reply:
        """The number that the next version will have."""
        with self._changed:
            self._trainer(session, step)
            return {"version": self.sessions.next_version()}

    def trainer_failed(self, session: str, step: int, reason: str) -> Reply:
        """The trainer could not publish."""
        with self._changed:
            self._trainer(session, step)
            self._machine.trainer_gave_up(reason)
            self._changed.notify_all()
            return {"version": self._machine.newest, "reason": reason}

    def take_from(self, session: str, ticket: Endpoint) -> Reply:
        """MEMORY: join the trainer's publisher."""
        with self._changed:
            self.sessions.table.of(session)
        assert self._memory is not None
        self._memory.take_from(ticket)
        return {}

    def trainer_published(self, session: str, step: int, version: int) -> Reply:
        """MEMORY, CHECKPOINT: the weights are here, or in a file that is complete."""
        with self._changed:
            self._trainer(session, step)
        memory = self._memory
        if memory is not None:
            first = memory.endpoint is None
            memory.keep(version, step)
            if first and memory.endpoint is not None:
                with self._changed:
                    self.sessions.learn(memory.endpoint, 0, version, step)
        with self._changed:
            self.sessions.publish(version, step)
            self._machine.offered(step)
        if memory is not None and self.plan.style is SyncStyle.FULLY_ASYNC:
            self._spread(memory)
        return {"version": version}

    def _spread(self, memory: WeightCache) -> None:
        """Send the version just published to all who joined; explorers that miss it fetch it."""
        try:
            kept, transfer = memory.spread()
        except WeightSyncError as error:
            _log.warning("version %s was not sent in the background: %s", self._machine.newest, error)
        else:
            self.sessions.sent(memory.endpoint, transfer.number, kept.version, kept.step)

    def meet(self, session: str, step: int, timeout: float) -> Reply:
        """NCCL: wait for those who are to get weights now; who they are, and the version it will be."""
        machine, deadline = self._machine, deadline_of(timeout)
        with self._changed:
            trainer = self._trainer(session, step)
            if self.plan.style is SyncStyle.FULLY_ASYNC:
                ids = machine.ready()
            else:
                machine.trainer_requires()
                self._changed.notify_all()
                self.sessions.wait_for(lambda: bool(machine.may_transfer()) or _ended(trainer), deadline)
                ids = () if _ended(trainer) else machine.may_transfer(late=True)
                if not ids and not _ended(trainer):
                    machine.trainer_gave_up(f"no explorer was ready within {timeout:g} s")
                if not ids and trainer.outcome is not None:
                    self._changed.notify_all()
                    return {"version": machine.newest, "reason": trainer.outcome.reason}
            if ids:
                machine.begin(ids)
            return {"ids": list(ids), "version": self.sessions.next_version()}

    def met(
        self, session: str, step: int, version: int, numbers: list[int], ids: list[int], failures: Reply
    ) -> Reply:
        """NCCL: what became of the transfer.

        Args:
            session: of the trainer.
            step: of the trainer.
            version: as :meth:`meet` said.
            numbers: of the updates that carried it.
            ids: who was sent it.
            failures: why some have it not, by id.
        """
        with self._changed:
            self._trainer(session, step)
            endpoint, machine = self.sessions.trainer_endpoint, self._machine
            assert endpoint is not None
            for number in numbers:
                self.sessions.learn(endpoint, number, version, step)
            if set(ids) - {int(id) for id in failures}:
                self.sessions.publish(version, step)
            if self.plan.style is SyncStyle.FULLY_ASYNC:
                machine.offered(step, version if numbers else None)
            self.sessions.settle(ids, version, {int(id): why for id, why in failures.items()})
            machine.transferred()
            self._changed.notify_all()
            return {"version": machine.newest}

    def _trainer(self, session: str, step: int) -> TrainerState:
        trainer = self.sessions.table.of(session).member
        assert isinstance(trainer, TrainerState)
        if trainer.step != step:
            self._machine.trainer_at(step)
            self._changed.notify_all()
        return trainer


def _ended(trainer: TrainerState) -> bool:
    return trainer.status is not RunningStatus.REQUIRE_SYNC
