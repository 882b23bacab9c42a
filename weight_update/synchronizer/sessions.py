"""The clients of a synchronizer: they introduce themselves, are heard of, and leave or are missed."""

from __future__ import annotations

import json
import logging
import os
import threading
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from weight_update.checkpoints.io import read_regular
from weight_update.errors import LifecycleError
from weight_update.synchronizer.addresses import is_loopback
from weight_update.synchronizer.plan import RunningStatus, SyncMethod, SyncPlan
from weight_update.synchronizer.state import TRAINER_STOPPED, ExplorerState, TrainerState
from weight_update.synchronizer.state_machine import StateMachine
from weight_update.synchronizer.transfer import Endpoint, key_of

__all__ = [
    "CHECKPOINT",
    "Closed",
    "Refused",
    "Reply",
    "Session",
    "SessionManager",
    "SessionTable",
    "VersionFile",
]

_log = logging.getLogger(__name__)
CHECKPOINT = "checkpoint"
"""In place of the key of a publisher: the number is a version, read from a file."""

_REMEMBERED = 256
Reply = dict[str, Any]


class Refused(Exception):
    """A call makes no sense; ``"unknown"`` tells the client to say hello (again)."""


class Closed(Refused):
    """The synchronizer was closed."""


@dataclass
class Session:
    """One that said hello.

    Attributes:
        member: it, in the machine.
        leased: whether it counts as gone when it is not heard of.
        linked: key of the publisher that it is connected to.
        seen: when it was last heard of, on the monotonic clock.
    """

    member: TrainerState | ExplorerState
    leased: bool = False
    linked: str | None = None
    seen: float = field(default_factory=time.monotonic)


class SessionTable:
    """Its methods are called with the lock held.

    Args:
        changed: the lock; notified when somebody came or left.
        lease: seconds after which a leased client that is not heard of is missed; None: never.
        missed: called for such a client with its session and the reason.
    """

    def __init__(
        self, changed: threading.Condition, lease: float | None, missed: Callable[[str, str], None]
    ) -> None:
        self.lease, self.closed = lease, False
        self._changed, self._missed = changed, missed
        self._clients: dict[str, Session] = {}
        self._replaced: set[str] = set()
        self._watching = False

    def __contains__(self, session: str) -> bool:
        return session in self._clients

    def add(self, session: str, member: TrainerState | ExplorerState, leased: bool) -> None:
        """A client has come."""
        self._clients[session] = Session(member, leased=leased and self.lease is not None)
        if self._leased() and not self._watching and self.lease is not None:
            self._watching = True
            args = (self.lease,)
            threading.Thread(target=self._watch, args=args, name="weight_update-lease", daemon=True).start()
        self._changed.notify_all()

    def of(self, session: str) -> Session:
        """The client of that session, which is heard of by this.

        Raises:
            Refused: nobody has said hello under this name, or another has taken its place.
        """
        self.require_not_replaced(session)
        if session not in self._clients:
            raise Refused("unknown")
        client = self._clients[session]
        client.seen = time.monotonic()
        return client

    def require_not_replaced(self, session: str) -> None:
        """Raise Refused if another has taken this client's place, and Closed after the synchronizer's end."""
        if self.closed:
            raise Closed("the synchronizer was closed")
        if session in self._replaced:
            raise Refused(
                "another client has taken this one's place: of several trainers, or explorers of one id, "
                "the newest counts"
            )

    def remove(self, session: str) -> Session | None:
        """A client has left; None if it was not here."""
        self._changed.notify_all()
        return self._clients.pop(session, None)

    def replace(self, member: TrainerState | ExplorerState | None) -> None:
        """Somebody comes who says that he is ``member``: that one is not heard any more."""
        for session, client in list(self._clients.items()):
            if client.member is member:
                del self._clients[session]
                self._replaced.add(session)
                _log.warning("a client was replaced by another that says it is the same")

    def linked(self, key: str) -> list[ExplorerState]:
        """Explorers that are connected to a publisher."""
        members = [client.member for client in self._clients.values() if client.linked == key]
        return [member for member in members if isinstance(member, ExplorerState)]

    def sessions(self) -> list[str]:
        """Of all who are here."""
        return list(self._clients)

    def _leased(self) -> dict[str, Session]:
        return {session: client for session, client in self._clients.items() if client.leased}

    def _watch(self, lease: float) -> None:
        """Thread, while somebody is leased: sleep until the first lease would end."""
        with self._changed:
            while not self.closed and (clients := self._leased()):
                now = time.monotonic()
                for session, client in clients.items():
                    if now - client.seen >= lease:
                        _log.warning("a client was not heard of for %g s", lease)
                        self._missed(session, f"it was not heard of for {lease:g} s")
                first = min(client.seen for client in clients.values())
                pause = max(first + lease - now, 0.01)
                self._changed.wait(pause)
                if time.monotonic() > now + pause + lease / 2:  # stopped, this process could hear nobody
                    for client in self._leased().values():
                        client.seen = time.monotonic()
            self._watching = False


class SessionManager:
    """The machine behind a lock, and the clients.

    Args:
        plan: the rules.
        version_file: where the newest version is remembered.
        lease: seconds after which a client that is not heard of counts as gone; None: for ever.
        newest: version and step that are published already, if any.
        directory: CHECKPOINT: where the files are.

    Attributes:
        address: of the interface of this machine that clients on other machines reach; None: there are none.
    """

    def __init__(
        self,
        plan: SyncPlan,
        version_file: VersionFile | None,
        lease: float | None,
        newest: tuple[int, int] | None,
        directory: str | None,
    ) -> None:
        self.plan, self.directory = plan, directory
        self.machine = StateMachine(plan)
        self.changed = threading.Condition(threading.RLock())
        self.trainer_endpoint: Endpoint | None = None
        self.address: str | None = None
        self.version_file = version_file
        self.table = SessionTable(self.changed, lease, self.gone)
        self._versions: dict[tuple[str, int], tuple[int, int]] = {}
        for known in (newest, None if version_file is None else version_file.read()):
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
        ticket: Endpoint | None = None,
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
            ticket: trainer, NCCL: the endpoint of its publisher, where explorers join.
            leased: whether it must be heard of, because nothing else tells that it lives.
        """
        with self.changed:
            self.table.require_not_replaced(session)
            if session in self.table:
                self._heard_again(session, step, ticket)
            elif role == "trainer":
                member: TrainerState | ExplorerState = self._let_trainer_in(step, synced_at, version, ticket)
                self.table.add(session, member, leased)
            else:
                id = self._free_id() if id is None else id
                self.table.replace(self.machine.explorers.get(id))
                self.table.add(session, self.machine.joined(id, version, step, synced_at), leased)
            return {
                "id": id,
                "plan": self.plan.to_json(),
                "lease": self.table.lease if leased else None,
                "version": self.machine.newest,
                "step": self.machine.newest_step,
                "directory": self.directory,
                "address": self.address,
            }

    def _heard_again(self, session: str, step: int, endpoint: Endpoint | None) -> None:
        if isinstance(self.table.of(session).member, TrainerState):
            self._take_endpoint(endpoint, step)

    def _let_trainer_in(
        self, step: int, synced_at: int | None, version: int | None, endpoint: Endpoint | None
    ) -> TrainerState:
        machine = self.machine
        self.table.replace(machine.trainer)
        if version is not None and (machine.newest is None or version > machine.newest):
            self.publish(version, step)  # this synchronizer is newer than the trainer, and remembers nothing
            if self.plan.method is SyncMethod.MEMORY:
                machine.lost_weights()
        trainer = machine.trainer_joined(step, synced_at)
        self._take_endpoint(endpoint, step)
        return trainer

    def _take_endpoint(self, endpoint: Endpoint | None, step: int) -> None:
        if self.plan.direct and endpoint is not None and endpoint != self.trainer_endpoint:
            self.learn(
                endpoint, 0, self.next_version(), step
            )  # what a publisher opens with; who joins has it
        self.trainer_endpoint = endpoint
        self.changed.notify_all()

    def _free_id(self) -> int:
        return next(id for id in range(len(self.machine.explorers) + 1) if id not in self.machine.explorers)

    def bye(self, session: str) -> Reply:
        """A client leaves."""
        self.gone(session, None)
        return {}

    def beat(self, session: str) -> Reply:
        """A client lives."""
        with self.changed:
            self.table.of(session)
        return {}

    def notify(self, session: str, step: int, status: str) -> Reply:
        """A client says what it is doing; REQUIRE_SYNC announces a wish without waiting."""
        with self.changed:
            member = self.table.of(session).member
            if status == RunningStatus.STOPPED.value:
                self.gone(session, None)
            elif isinstance(member, TrainerState):
                self.machine.trainer_at(step)
                if status == RunningStatus.REQUIRE_SYNC.value and self.plan.direct:
                    self.machine.trainer_announces()
                else:
                    self.machine.trainer_withdraws()
            else:
                self.machine.explorer_at(member.id, step)
                if status == RunningStatus.REQUIRE_SYNC.value:
                    self.machine.explorer_announces(member.id)
                else:
                    self.machine.explorer_withdraws(member.id)
            self.changed.notify_all()
        return {}

    def gone(self, session: str, how: str | None = "its connection ended") -> None:
        """A client has left, or is missed; whoever waits for it need not any more."""
        with self.changed:
            client = self.table.remove(session)
            if client is None:
                return
            member, machine, suffix = client.member, self.machine, "" if how is None else f": {how}"
            if isinstance(member, TrainerState) and machine.trainer is member:
                self.trainer_endpoint = None
                machine.trainer_left(TRAINER_STOPPED + suffix)
            elif isinstance(member, ExplorerState) and machine.explorers.get(member.id) is member:
                machine.left(member.id, f"the explorer stopped{suffix}")
            self.changed.notify_all()

    def close(self) -> None:
        """Wake everybody."""
        with self.changed:
            self.table.closed = True
            for session in self.table.sessions():
                self.gone(session, "the synchronizer was closed")
            self.changed.notify_all()

    def reach_by(self, address: str) -> None:
        """Record the address by which clients on other machines reach this one.

        Raises:
            LifecycleError: the trainer has already told explorers an address that only this machine reaches.
        """
        with self.changed:
            endpoint = self.trainer_endpoint
            if endpoint is not None and is_loopback(endpoint["address"]):
                raise LifecycleError(
                    f"the trainer already sends on {endpoint['address']}, which other machines cannot reach; "
                    "call serve() before the trainer is made, or give the trainer address="
                )
            self.address = address

    # -- for those who serve clients ---------------------------------------------------------------

    def note(self, session: str, step: int, held: list[Any] | None) -> tuple[Session, ExplorerState]:
        """What an explorer says of itself with each call: its step, and the update in force there."""
        client = self.table.of(session)
        explorer = client.member
        assert isinstance(explorer, ExplorerState)
        if explorer.step != step:
            self.machine.explorer_at(explorer.id, step)
        client.linked = None if held is None else held[0]
        known = None if held is None else self._version_of(held)
        if known is not None:
            self.publish(*known)
            self.machine.has(explorer.id, known[0])
        self.changed.notify_all()
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
        told = [other for publisher, other in self._versions if publisher == key]
        return self.plan.direct and bool(told) and number > max(told)

    def learn(self, endpoint: Endpoint, number: int, version: int, step: int) -> None:
        """The update ``number`` of a publisher is ``version``."""
        self._versions[key_of(endpoint), number] = version, step
        while len(self._versions) > _REMEMBERED:
            del self._versions[next(iter(self._versions))]

    def sent(self, endpoint: Endpoint | None, number: int, version: int, step: int) -> None:
        """As :meth:`learn`, of a version that somebody holds."""
        assert endpoint is not None
        with self.changed:
            self.learn(endpoint, number, version, step)
            self.publish(version, step)

    def settle(self, ids: Iterable[int], version: int, failures: dict[int, str]) -> None:
        """What was on its way to explorers has arrived, or failed."""
        for id in ids:
            if id in failures:
                self.machine.failed(id, failures[id])
            else:
                self.machine.delivered(id, version)
        self.changed.notify_all()

    def next_version(self) -> int:
        """A number above all that were given."""
        given = [version for version, _ in self._versions.values()]
        return 1 + max(-1 if self.machine.newest is None else self.machine.newest, *given, -1)

    def publish(self, version: int, step: int) -> None:
        """Somebody holds ``version`` now."""
        newest = self.machine.newest
        if newest is None or version > newest:
            if self.version_file is not None:
                self.version_file.note(version, step)
            self.machine.published(version, step)
        self.changed.notify_all()

    def wait_for(self, ready: Callable[[], bool], deadline: float | None) -> bool:
        """Wait, with the lock held, until ``ready()`` or the deadline."""
        left = None if deadline is None else max(deadline - time.monotonic(), 0.0)
        return self.changed.wait_for(ready, left)

    def status(self) -> Reply:
        """Everybody's state, by name."""
        with self.changed:
            trainer = self.machine.trainer
            stopped = RunningStatus.STOPPED.value
            return {
                "trainer": stopped if trainer is None else trainer.status.value,
                "explorers": {str(e.id): e.status.value for e in self.machine.explorers.values()},
                "versions": {str(e.id): e.version for e in self.machine.explorers.values()},
                "version": self.machine.newest,
                "step": self.machine.newest_step,
            }


class VersionFile:
    """A small file in a directory, replaced as a whole at each new version.

    It survives the death of the process. Weights are not in it.

    Args:
        directory: made if it does not exist, for this user alone.
    """

    def __init__(self, directory: str | os.PathLike[str]) -> None:
        self._path = Path(directory) / "synchronizer.json"
        self._path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        self._writing = threading.Lock()
        self._unwritten: tuple[int, int] | None = None

    def read(self) -> tuple[int, int] | None:
        """Version and trainer step last written; None if there is nothing that can be read."""
        try:
            fields = json.loads(read_regular(self._path))
            return int(fields["version"]), int(fields["step"])
        except FileNotFoundError:
            return None
        except (OSError, ValueError, KeyError, TypeError) as error:
            _log.warning("%s cannot be read and is ignored: %s", self._path, error)
            return None

    def note(self, version: int, step: int) -> None:
        """Take down a version for the next :meth:`flush`. Does not touch the disk."""
        self._unwritten = version, step

    def flush(self) -> None:
        """Write the version noted last, if that is still to be done; call it without a lock held."""
        if self._unwritten is None:
            return
        with self._writing:
            newest, self._unwritten = self._unwritten, None
            if newest is not None:
                self._write(*newest)

    def _write(self, version: int, step: int) -> None:
        """Replace what was written before; a full disk is logged, and the run goes on without."""
        beside = self._path.with_suffix(f".{os.getpid()}")
        try:
            beside.unlink(missing_ok=True)
            with beside.open("x") as file:
                file.write(json.dumps({"version": version, "step": step}))
            beside.replace(self._path)
        except OSError as error:
            _log.warning("%s could not be written; a restart begins with an older version: %s", beside, error)
