"""The clients of a synchronizer: they introduce themselves, are heard of, and leave or are missed."""

from __future__ import annotations

import json
import logging
import os
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal

from weight_update.checkpoints.io import PART, read_regular
from weight_update.errors import LifecycleError
from weight_update.report import WorkerEvent
from weight_update.sender.observers import Observers
from weight_update.synchronizer.plan import RunningStatus, SyncPlan
from weight_update.synchronizer.state import (
    TRAINER_STOPPED,
    ExplorerState,
    MemberState,
    TrainerState,
    remember,
)
from weight_update.synchronizer.state_machine import StateMachine
from weight_update.synchronizer.transfer import Endpoint, is_loopback
from weight_update.threads import InterruptibleCondition, start_thread
from weight_update.transports.socket_stream import seconds_left

Reply = dict[str, Any]
"""The answer to a call: plain values."""

Held = list[Any] | None
"""The update that an explorer has in force: its publisher's key and its number.

None if it has no publisher. The number is None if its engine failed to load an update, and so has no complete
version.
"""

CLOSED = "the synchronizer was closed"

_log = logging.getLogger(__name__)


class Refused(Exception):
    """A call that makes no sense. The text ``"unknown"`` tells the client to say hello (again)."""


class Closed(Refused):
    """A call to a synchronizer that was closed."""


class SessionManager:
    """A state machine behind a lock, and the clients that change it. Its methods are calls of clients.

    Args:
        plan: the rules.
        lease: seconds after which a client that is not heard of counts as gone.
        version_file: keeps the number of the newest version; None to remember nothing.

    Attributes:
        changed: the lock of all this; notified when anything changed.
        sessions: the trainer and the explorers that are here, by the name of their session.
        closed: whether all later calls are refused.
        trainer_endpoint: NCCL: endpoint of the trainer's publisher; None while there is none.
        directory: directory of the checkpoints; None for methods that have none.
        address: address of the interface by which clients on other machines reach this one; None if there are
            no such clients.
        observers: functions that are told of explorers and of published versions.
    """

    def __init__(self, plan: SyncPlan, *, lease: float, version_file: VersionFile | None = None) -> None:
        self.plan = plan
        self.machine: StateMachine = StateMachine(plan, on_change=self._wake)
        self.changed: threading.Condition = InterruptibleCondition(threading.RLock())
        self.sessions: dict[str, MemberState] = {}
        self.closed: bool = False
        self._lease = lease
        self._replaced: dict[str, str] = {}  # why the calls of a session are refused, by its name
        self._left: dict[str, str] = {}  # the same, for the last clients that have left
        self._watching = False  # whether the thread runs that ends leases
        self.trainer_endpoint: Endpoint | None = None
        self.directory: str | None = None
        self.address: str | None = None
        self.observers: Observers = Observers()
        self._version_file = version_file
        if version_file is not None and (newest := version_file.read()) is not None:
            self._restore(*newest)

    def hello(
        self,
        session: str,
        role: str,
        id: int | None = None,
        step: int = 0,
        synced_at: int | None = None,
        version: int | None = None,
        ticket: Endpoint | None = None,
        back: bool = False,
    ) -> Reply:
        """Let a client in, perhaps again.

        Args:
            session: name that the client chose for itself; each later call has it.
            role: ``"trainer"`` or ``"explorer"``.
            id: id of the explorer; None takes the first free one.
            step: number of steps done so far.
            synced_at: step of the last synchronization.
            version: explorer: version in force there; trainer: newest version that it knows of.
            ticket: trainer, NCCL: endpoint of its publisher, once it has one.
            back: whether the client was forgotten. It takes the place of no explorer that came meanwhile, but
                another id.
        """
        with self.changed:
            self._require_current(session)
            if not self._watching:
                start_thread("weight_update-lease", self._end_leases)  # or raise, before anything changes
                self._watching = True
            new = session not in self.sessions
            if new and role == "trainer":
                self._replace(self.machine.trainer)
                if version is not None and (self.machine.newest is None or version > self.machine.newest):
                    made = step if synced_at is None else synced_at
                    self._restore(version, made)  # started after the trainer, without its versions
                self.sessions[session] = self.machine.trainer_joined(step, synced_at)
            elif new:
                known = self.machine.explorers
                if id is None or (back and id in known):
                    id = next(free for free in range(len(known) + 1) if free not in known)
                self._replace(known.get(id))
                explorer = self.machine.joined(id, version, step, synced_at)
                self.sessions[session] = explorer
                self.observers.tell(WorkerEvent("joined", id, explorer.version))
            member = self.member(session)
            if role == "trainer":
                self._take_endpoint(ticket)
            return {
                "id": member.id if isinstance(member, ExplorerState) else None,
                "plan": self.plan.to_json(),
                "lease": self._lease,
                "version": self.machine.newest,
                "step": self.machine.newest_step,
                "directory": self.directory,
                "address": self.address,
            }

    def _restore(self, version: int, step: int) -> None:
        """Take over a version that was published before this service was started."""
        self.machine.published(version, step)

    def _take_endpoint(self, endpoint: Endpoint | None) -> None:
        self.trainer_endpoint = endpoint
        self.changed.notify_all()

    def bye(self, session: str) -> Reply:
        """Let a client go, for good: a call that it has begun before may still ask to come back."""
        with self.changed:
            self.gone(session, None)
            remember(self._left, session, "this client is closed; create a new one")
        return {}

    def beat(self, session: str) -> Reply:
        """Note that a client lives."""
        with self.changed:
            self.member(session)
        return {}

    def notify(self, session: str, step: int, status: str) -> Reply:
        """Note what a client is doing. REQUIRE_SYNC announces a wish without waiting."""
        with self.changed:
            member = self.member(session)
            if status == RunningStatus.STOPPED:
                self.gone(session, None)
            elif isinstance(member, TrainerState):
                self.machine.trainer_at(step)
                if status == RunningStatus.REQUIRE_SYNC and self.plan.direct:
                    self.machine.trainer_announces()
                else:
                    self.machine.trainer_withdraws()
            elif isinstance(member, ExplorerState):
                self.machine.explorer_at(member.id, step)
                if status == RunningStatus.REQUIRE_SYNC:
                    self.machine.explorer_announces(member.id)
                else:
                    self.machine.explorer_withdraws(member.id)
        return {}

    def status(self) -> Reply:
        """Return the state of the trainer and of all explorers."""
        with self.changed:
            trainer = self.machine.trainer
            return {
                "trainer": RunningStatus.STOPPED.value if trainer is None else trainer.status.value,
                "explorers": {str(e.id): e.status.value for e in self.machine.explorers.values()},
                "versions": {str(e.id): e.version for e in self.machine.explorers.values()},
                "version": self.machine.newest,
                "step": self.machine.newest_step,
            }

    # -- sessions and their leases, with the lock held -----------------------------------------------

    def member(self, name: str) -> MemberState:
        """Return the client of a session, and renew its lease.

        Raise Refused if there is none, and Closed after the end.
        """
        self._require_current(name)
        if name not in self.sessions:
            raise Refused("unknown")
        member = self.sessions[name]
        member.seen = time.monotonic()
        return member

    def _require_current(self, name: str) -> None:
        """Raise Closed after the end, and Refused if the client left, or another has taken its place."""
        if self.closed:
            raise Closed(CLOSED)
        if reason := self._replaced.get(name) or self._left.get(name):
            raise Refused(reason)

    def _replace(self, member: MemberState | None) -> None:
        """Remove the session of ``member``, whose place a new client takes. Its later calls are refused."""
        for name, known in list(self.sessions.items()):
            if known is member:
                del self.sessions[name]
                if isinstance(member, ExplorerState):
                    self._replaced[name] = (
                        f"another explorer with id {member.id} has replaced this one; each needs its own id"
                    )
                    _log.warning("explorer %d was replaced by a new client with its id", member.id)
                else:
                    self._replaced[name] = (
                        "another trainer has replaced this one; a synchronizer has one trainer"
                    )
                    _log.warning("the trainer was replaced by a new client")

    def _end_leases(self) -> None:
        """End leases, as a thread, while there are clients."""
        lease = self._lease
        with self.changed:
            while not self.closed and (sessions := dict(self.sessions)):
                now = time.monotonic()
                for name, member in sessions.items():
                    if now - member.seen >= lease:
                        _log.warning("no call of a client for %g s; it counts as gone", lease)
                        self.gone(name, f"it was not heard of for {lease:g} s")
                first = min(member.seen for member in sessions.values())
                pause = max(first + lease - now, 0.01)
                self.changed.wait(pause)
                if time.monotonic() > now + pause + lease / 2:  # stopped, this process could hear no one
                    for member in self.sessions.values():
                        member.seen = time.monotonic()
            self._watching = False

    # -- for the service ---------------------------------------------------------------------------

    def gone(self, session: str, how: str | None = "its connection ended") -> None:
        """Remove a client that left (``how`` is None) or is missed, and wake those that wait for it."""
        with self.changed:
            member = self.sessions.pop(session, None)
            if member is None:
                return
            machine, suffix = self.machine, "" if how is None else f": {how}"
            if isinstance(member, TrainerState) and machine.trainer is member:
                self.trainer_endpoint = None
                machine.trainer_left(TRAINER_STOPPED + suffix)
            elif isinstance(member, ExplorerState) and machine.explorers.get(member.id) is member:
                machine.left(member.id, f"the explorer stopped{suffix}")
                if not self.closed:
                    kind: Literal["left", "lost"] = "left" if how is None else "lost"
                    self.observers.tell(WorkerEvent(kind, member.id, member.version, how or ""))

    def save_version(self) -> None:
        """Write the newest version to the disk, without the lock: other calls go on meanwhile."""
        if self._version_file is not None:
            with self.changed:
                newest = self.machine.newest, self.machine.newest_step
            self._version_file.keep(*newest)

    def _wake(self) -> None:
        """Wake all that wait, to look whether they still have to."""
        with self.changed:
            self.changed.notify_all()

    def wait_for(self, ready: Callable[[], bool], deadline: float | None) -> bool:
        """Wait, with the lock held, until ``ready()`` or the deadline."""
        return self.changed.wait_for(ready, seconds_left(deadline))

    def reach_by(self, address: str) -> None:
        """Note the address by which clients on other machines reach this one.

        Raise LifecycleError if the trainer has told explorers an address that only this machine reaches.
        """
        with self.changed:
            endpoint = self.trainer_endpoint
            if endpoint is not None and is_loopback(endpoint["address"]):
                raise LifecycleError(
                    f"the trainer already sends on {endpoint['address']}, which other machines cannot reach; "
                    "call serve() before the trainer is made, or give the trainer address="
                )
            self.address = address

    def end_sessions(self) -> None:
        """Wake all that wait, and refuse later calls."""
        with self.changed:
            self.closed = True
            for name in list(self.sessions):
                self.gone(name, CLOSED)
            self.changed.notify_all()


class VersionFile:
    """A small file that keeps the number of the newest version, so that a restarted synchronizer goes on.

    It is replaced as a whole at each new version and survives the death of the process. It holds no weights.
    Its directory is made, for this user alone, if it does not exist.
    """

    def __init__(self, directory: str | os.PathLike[str]) -> None:
        self._path = Path(directory) / "synchronizer.json"
        self._path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        self._beside = self._path.with_name(self._path.name + PART)
        self._beside.unlink(missing_ok=True)  # of a process that was killed in _write()
        self._writing = threading.Lock()
        self._kept = -1  # version in the file, or on its way there

    def read(self) -> tuple[int, int] | None:
        """Return the version and the trainer step last written; None if there is nothing readable."""
        try:
            fields = json.loads(read_regular(self._path))
            newest = int(fields["version"]), int(fields["step"])
        except FileNotFoundError:
            return None
        except (OSError, ValueError, KeyError, TypeError, OverflowError, RecursionError) as error:
            _log.warning("%s cannot be read and is ignored: %s", self._path, error)
            return None
        self._kept = newest[0]
        return newest

    def keep(self, version: int | None, step: int) -> None:
        """Write a version, unless that or a newer one is kept; call it without a lock held."""
        if version is None or version <= self._kept:
            return
        with self._writing:
            if version > self._kept:
                self._kept = version
                self._write(version, step)

    def _write(self, version: int, step: int) -> None:
        """Replace the file; a full disk is logged, and the run goes on without."""
        try:
            self._beside.unlink(missing_ok=True)
            with self._beside.open("x", encoding="utf-8") as file:
                file.write(json.dumps({"version": version, "step": step}))
            self._beside.replace(self._path)
        except OSError as error:
            then = "a restart may begin with an older version, or none"
            _log.warning("%s could not be written; %s: %s", self._path, then, error)
