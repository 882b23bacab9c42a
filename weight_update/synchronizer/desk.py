"""Who is here: clients introduce themselves, are heard of, and leave or are missed."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable
from typing import Any

from weight_update.errors import LifecycleError
from weight_update.synchronizer.addresses import is_loopback
from weight_update.synchronizer.journal import Journal
from weight_update.synchronizer.plan import RunningStatus, SyncMethod, SyncPlan
from weight_update.synchronizer.register import Client, Register
from weight_update.synchronizer.state import TRAINER_STOPPED, Explorer, Trainer
from weight_update.synchronizer.state_machine import Machine
from weight_update.synchronizer.transfer import Ticket, key_of

__all__ = ["CHECKPOINT", "Desk", "Reply"]

CHECKPOINT = "checkpoint"
"""In place of the key of an outlet: the number is a version, read from a file."""

_REMEMBERED = 256
Reply = dict[str, Any]


class Desk:
    """The machine behind a lock, and the clients.

    Args:
        plan: the rules.
        journal: where the newest version is remembered.
        lease: seconds after which a client that is not heard of counts as gone; None: for ever.
        newest: version and step that are published already, if any.
        directory: CHECKPOINT: where the files are.

    Attributes:
        address: of the interface of this machine that clients on other machines reach; None: there are none.
    """

    def __init__(
        self,
        plan: SyncPlan,
        journal: Journal | None,
        lease: float | None,
        newest: tuple[int, int] | None,
        directory: str | None,
    ) -> None:
        self.plan, self.directory = plan, directory
        self.machine = Machine(plan)
        self.moved = threading.Condition(threading.RLock())
        self.trainer_ticket: Ticket | None = None
        self.address: str | None = None
        self.journal = journal
        self.register = Register(self.moved, lease, self.gone)
        self._versions: dict[tuple[str, int], tuple[int, int]] = {}
        for known in (newest, None if journal is None else journal.read()):
            if known is not None:
                self.machine.published(*known)
        if plan.method is SyncMethod.MEMORY:
            self.machine.lost_weights()

    # -- coming and going --------------------------------------------------------------------------

    def hello(
        self,
        session: str,
        role: str,
        id: int | None = None,
        step: int = 0,
        synced_at: int | None = None,
        version: int | None = None,
        ticket: Ticket | None = None,
        leased: bool = False,
    ) -> Reply:
        """A client is here, perhaps again.

        Args:
            session: its own name, told in each later call.
            role: ``"trainer"`` or ``"explorer"``.
            id: of the explorer; None takes the first free one.
            step: steps it has done.
            synced_at: the step of its last synchronization.
            version: explorer: in force there; trainer: the newest it knows of.
            ticket: trainer, NCCL: where explorers join.
            leased: whether it must be heard of, because nothing else tells that it lives.
        """
        with self.moved:
            self.register.require_not_replaced(session)
            if session in self.register:
                self._heard_again(session, step, ticket)
            elif role == "trainer":
                party: Trainer | Explorer = self._let_trainer_in(step, synced_at, version, ticket)
                self.register.add(session, party, leased)
            else:
                id = self._free_id() if id is None else id
                self.register.replace(self.machine.explorers.get(id))
                self.register.add(session, self.machine.joined(id, version, step, synced_at), leased)
            return {
                "id": id,
                "plan": self.plan.to_json(),
                "lease": self.register.lease if leased else None,
                "version": self.machine.newest,
                "step": self.machine.newest_step,
                "directory": self.directory,
                "address": self.address,
            }

    def _heard_again(self, session: str, step: int, ticket: Ticket | None) -> None:
        if isinstance(self.register.of(session).party, Trainer):
            self._take_ticket(ticket, step)

    def _let_trainer_in(
        self, step: int, synced_at: int | None, version: int | None, ticket: Ticket | None
    ) -> Trainer:
        machine = self.machine
        self.register.replace(machine.trainer)
        if version is not None and (machine.newest is None or version > machine.newest):
            self.publish(version, step)  # this synchronizer is newer than the trainer, and has no journal
            if self.plan.method is SyncMethod.MEMORY:
                machine.lost_weights()
        trainer = machine.trainer_joined(step, synced_at)
        self._take_ticket(ticket, step)
        return trainer

    def _take_ticket(self, ticket: Ticket | None, step: int) -> None:
        if self.plan.direct and ticket is not None and ticket != self.trainer_ticket:
            self.learn(ticket, 0, self.next_version(), step)  # what an outlet opens with; who joins has it
        self.trainer_ticket = ticket
        self.moved.notify_all()

    def _free_id(self) -> int:
        return next(id for id in range(len(self.machine.explorers) + 1) if id not in self.machine.explorers)

    def bye(self, session: str) -> Reply:
        """A client leaves."""
        self.gone(session, None)
        return {}

    def beat(self, session: str) -> Reply:
        """A client lives."""
        with self.moved:
            self.register.of(session)
        return {}

    def notify(self, session: str, step: int, status: str) -> Reply:
        """A client says what it is doing; REQUIRE_SYNC announces a wish without waiting."""
        with self.moved:
            party = self.register.of(session).party
            if status == RunningStatus.STOPPED.value:
                self.gone(session, None)
            elif isinstance(party, Trainer):
                self.machine.trainer_at(step)
                if status == RunningStatus.REQUIRE_SYNC.value and self.plan.direct:
                    self.machine.trainer_announces()
                else:
                    self.machine.trainer_withdraws()
            else:
                self.machine.explorer_at(party.id, step)
                if status == RunningStatus.REQUIRE_SYNC.value:
                    self.machine.explorer_announces(party.id)
                else:
                    self.machine.explorer_withdraws(party.id)
            self.moved.notify_all()
        return {}

    def gone(self, session: str, how: str | None = "its connection ended") -> None:
        """A client has left, or is missed; whoever waits for it need not any more."""
        with self.moved:
            client = self.register.remove(session)
            if client is None:
                return
            party, machine, suffix = client.party, self.machine, "" if how is None else f": {how}"
            if isinstance(party, Trainer) and machine.trainer is party:
                self.trainer_ticket = None
                machine.trainer_left(TRAINER_STOPPED + suffix)
            elif isinstance(party, Explorer) and machine.explorers.get(party.id) is party:
                machine.left(party.id, f"the explorer stopped{suffix}")
            self.moved.notify_all()

    def close(self) -> None:
        """Wake everybody."""
        with self.moved:
            self.register.closed = True
            for session in self.register.sessions():
                self.gone(session, "the synchronizer was closed")
            self.moved.notify_all()

    def reach_by(self, address: str) -> None:
        """Record the address by which clients on other machines reach this one.

        Raises:
            LifecycleError: the trainer has already told explorers an address that only this machine reaches.
        """
        with self.moved:
            ticket = self.trainer_ticket
            if ticket is not None and is_loopback(ticket["address"]):
                raise LifecycleError(
                    f"the trainer already sends on {ticket['address']}, which other machines cannot reach; "
                    "call serve() before the trainer is made, or give the trainer address="
                )
            self.address = address

    # -- for those who serve clients ---------------------------------------------------------------

    def note(self, session: str, step: int, held: list[Any] | None) -> tuple[Client, Explorer]:
        """What an explorer says of itself with each call: its step, and the update in force there."""
        client = self.register.of(session)
        explorer = client.party
        assert isinstance(explorer, Explorer)
        if explorer.step != step:
            self.machine.explorer_at(explorer.id, step)
        client.linked = None if held is None else held[0]
        known = None if held is None else self._version_of(held)
        if known is not None:
            self.publish(*known)
            self.machine.has(explorer.id, known[0])
        self.moved.notify_all()
        return client, explorer

    def _version_of(self, held: list[Any]) -> tuple[int, int] | None:
        """Version and trainer step of an update that an explorer has."""
        key, number = held
        if key == CHECKPOINT:
            newest = self.machine.newest
            return None if newest is None or number > newest else (number, self.machine.newest_step)
        trainer = self.machine.trainer
        if trainer is not None and trainer.status is RunningStatus.STOPPED and self._is_untold(key, number):
            self._versions[key, number] = self.next_version(), trainer.step
        return self._versions.get((key, number))

    def _is_untold(self, key: str, number: int) -> bool:
        """NCCL: whether an explorer has an update that the trainer did not live to tell of."""
        told = [other for outlet, other in self._versions if outlet == key]
        return self.plan.direct and bool(told) and number > max(told)

    def learn(self, ticket: Ticket, number: int, version: int, step: int) -> None:
        """The update ``number`` of an outlet is ``version``."""
        self._versions[key_of(ticket), number] = version, step
        while len(self._versions) > _REMEMBERED:
            del self._versions[next(iter(self._versions))]

    def sent(self, ticket: Ticket | None, number: int, version: int, step: int) -> None:
        """As :meth:`learn`, of a version that somebody holds."""
        assert ticket is not None
        with self.moved:
            self.learn(ticket, number, version, step)
            self.publish(version, step)

    def settle(self, ids: Iterable[int], version: int, failures: dict[int, str]) -> None:
        """What was on its way to explorers has arrived, or failed."""
        for id in ids:
            if id in failures:
                self.machine.failed(id, failures[id])
            else:
                self.machine.delivered(id, version)
        self.moved.notify_all()

    def next_version(self) -> int:
        """A number above all that were given."""
        given = [version for version, _ in self._versions.values()]
        return 1 + max(-1 if self.machine.newest is None else self.machine.newest, *given, -1)

    def publish(self, version: int, step: int) -> None:
        """Somebody holds ``version`` now."""
        newest = self.machine.newest
        if newest is None or version > newest:
            if self.journal is not None:
                self.journal.note(version, step)
            self.machine.published(version, step)
        self.moved.notify_all()

    def await_(self, ready: Callable[[], bool], deadline: float | None) -> bool:
        """Wait, with the lock held, until ``ready()`` or the deadline."""
        left = None if deadline is None else max(deadline - time.monotonic(), 0.0)
        return self.moved.wait_for(ready, left)

    def status(self) -> Reply:
        """Everybody's state, by name."""
        with self.moved:
            trainer = self.machine.trainer
            stopped = RunningStatus.STOPPED.value
            return {
                "trainer": stopped if trainer is None else trainer.status.value,
                "explorers": {str(e.id): e.status.value for e in self.machine.explorers.values()},
                "versions": {str(e.id): e.version for e in self.machine.explorers.values()},
                "version": self.machine.newest,
                "step": self.machine.newest_step,
            }
