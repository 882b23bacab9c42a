"""What an explorer may ask of a synchronizer."""

from __future__ import annotations

import threading
from typing import Any

from weight_update.errors import WeightSyncError
from weight_update.synchronizer.memory import WeightCache
from weight_update.synchronizer.plan import RunningStatus, SyncMethod, SyncStyle
from weight_update.synchronizer.sessions import Reply, SessionManager
from weight_update.synchronizer.state import ExplorerState
from weight_update.synchronizer.transfer import Endpoint, Transfer, key_of
from weight_update.transports.shared_memory.unix_stream import deadline_of

__all__ = ["ExplorerCalls"]


class ExplorerCalls:
    """Calls take and give plain values. ``held`` is the update in force in the explorer, by number.

    Args:
        sessions: who is here.
        memory: MEMORY: where weights are kept.
        timeout: seconds a transfer may take.
    """

    def __init__(self, sessions: SessionManager, memory: WeightCache | None, timeout: float) -> None:
        self.sessions, self.plan = sessions, sessions.plan
        self._machine, self._changed, self._memory, self._timeout = (
            sessions.machine,
            sessions.changed,
            memory,
            timeout,
        )
        self._delivering = threading.Lock()
        self._transfers: dict[ExplorerState, tuple[int, Transfer]] = {}

    def explorer_needs(self, session: str, step: int, held: list[Any] | None) -> Reply:
        """Whether an explorer should synchronize."""
        with self._changed:
            _, explorer = self.sessions.note(session, step, held)
            return {"need": self._machine.explorer_needs_sync(explorer.id), "version": explorer.version}

    def explorer_syncs(
        self, session: str, step: int, held: list[Any] | None, timeout: float, again: bool = False
    ) -> Reply:
        """Wait for new weights.

        Args:
            session: of the explorer.
            step: of the explorer.
            held: the update in force there.
            timeout: seconds.
            again: whether it was told to join, and has done so.

        Returns:
            the ``version`` in force and perhaps a ``reason``; or, where the explorer has to act first: a
            endpoint to ``join`` by, or a version to ``fetch``.
        """
        machine, deadline = self._machine, deadline_of(timeout)
        with self._changed:
            client, explorer = self.sessions.note(session, step, held)
            if again and not self.plan.direct and _ended(explorer):
                return _answer(explorer)
            if self.plan.direct:
                self.sessions.wait_for(
                    lambda: self._endpoint() is not None or self._is_over(explorer), deadline
                )
                self.sessions.table.of(session)  # it may have left meanwhile
                if (endpoint := self._endpoint()) is not None and client.linked != key_of(endpoint):
                    return {"join": endpoint}
            machine.explorer_requires(explorer.id)
            self._changed.notify_all()
        while True:
            with self._changed:
                self.sessions.wait_for(lambda: _ended(explorer) or self._may_act(explorer), deadline)
                if not _ended(explorer) and not self._may_act(explorer):
                    self._give_up(explorer, timeout)
                if _ended(explorer):
                    self._transfers.pop(explorer, None)
                    return _answer(explorer)
                if self.plan.method is SyncMethod.CHECKPOINT:
                    version = machine.may_fetch(explorer.id)
                    machine.begin([explorer.id])
                    return {"fetch": version}
                if (endpoint := self._endpoint()) is not None and client.linked != key_of(endpoint):
                    return {"join": endpoint}
            self._deliver(explorer)

    def explorer_fetched(self, session: str, version: int | None, step: int, reason: str) -> Reply:
        """CHECKPOINT: an explorer has read a version made at the trainer's ``step``, or could not."""
        with self._changed:
            explorer = self.sessions.table.of(session).member
            assert isinstance(explorer, ExplorerState)
            if version is None:
                self._machine.failed(explorer.id, reason)
            else:
                self.sessions.publish(version, step)
                self._machine.delivered(explorer.id, version)
            self._changed.notify_all()
            return _answer(explorer)

    def explorer_gives_up(self, session: str, reason: str) -> Reply:
        """An explorer does not wait any longer."""
        with self._changed:
            explorer = self.sessions.table.of(session).member
            assert isinstance(explorer, ExplorerState)
            self._machine.gave_up(explorer.id, reason)
            self._changed.notify_all()
            return {"version": explorer.version, "reason": reason}

    def _endpoint(self) -> Endpoint | None:
        return self.sessions.trainer_endpoint if self._memory is None else self._memory.endpoint

    def _is_over(self, explorer: ExplorerState) -> bool:
        trainer = self._machine.trainer
        members = (explorer, trainer)
        return any(member is not None and member.status is RunningStatus.STOPPED for member in members)

    def _may_act(self, explorer: ExplorerState) -> bool:
        """Whether a waiting explorer has something to do: weights are there for it, or on their way."""
        return explorer in self._transfers or self._machine.may_fetch(explorer.id) is not None

    def _give_up(self, explorer: ExplorerState, timeout: float) -> None:
        late = f"no new weights came within {timeout:g} s{self._lag(explorer)}"
        if not self._machine.gave_up(explorer.id, late):
            self.sessions.wait_for(lambda: _ended(explorer), deadline_of(2 * self._timeout))
            if not _ended(explorer):
                self._machine.failed(explorer.id, "the transfer did not end")
        self._changed.notify_all()

    def _lag(self, explorer: ExplorerState) -> str:
        """Return, for FIXED, how far the trainer is from the step that an explorer waits for."""
        trainer = self._machine.trainer
        if self.plan.style is not SyncStyle.FIXED or (
            trainer is not None and trainer.step >= explorer.wanted
        ):
            return ""
        at = "has not come" if trainer is None else f"is at step {trainer.step}"
        return f": it waits for weights of the trainer's step {explorer.wanted}, and the trainer {at}"

    def _deliver(self, explorer: ExplorerState) -> None:
        """MEMORY: send to all who wait, once; then wait for this explorer alone."""
        with self._delivering:
            if explorer not in self._transfers:
                self._send_to_waiting()
        version, transfer = self._transfers.pop(explorer, (0, None))
        if transfer is not None:
            failures = transfer.settle([explorer.id])
            with self._changed:
                if not _ended(explorer):
                    self.sessions.settle([explorer.id], version, failures)
                    self._changed.notify_all()

    def _send_to_waiting(self) -> None:
        memory = self._memory
        assert memory is not None
        assert memory.endpoint is not None
        with self._changed:
            linked = self.sessions.table.linked(key_of(memory.endpoint))
            going = [one for one in linked if self._machine.may_fetch(one.id) is not None]
            self._machine.begin([one.id for one in going])
        if not going:
            return
        try:
            kept, transfer = memory.send([one.id for one in going])
        except WeightSyncError as error:
            with self._changed:
                self.sessions.settle([one.id for one in going], 0, {one.id: str(error) for one in going})
                self._changed.notify_all()
            return
        with self._changed:
            self.sessions.sent(memory.endpoint, transfer.number, kept.version, kept.step)
            self._transfers.update(dict.fromkeys(going, (kept.version, transfer)))
            self._changed.notify_all()


def _ended(explorer: ExplorerState) -> bool:
    return explorer.status is not RunningStatus.REQUIRE_SYNC


def _answer(explorer: ExplorerState) -> Reply:
    assert explorer.outcome is not None
    return {"version": explorer.outcome.version, "reason": explorer.outcome.reason}
