"""SyncMethod.MEMORY: the synchronizer holds the newest weights, and explorers fetch them there."""

from __future__ import annotations

import contextlib
import logging
import threading
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

from weight_update.errors import LifecycleError, LinkClosedError, WeightSyncError
from weight_update.report import SyncReport, WorkerEvent
from weight_update.sender.observers import Observers
from weight_update.strategy.strategy import WeightStrategy
from weight_update.synchronizer.client import ClientBase
from weight_update.synchronizer.methods import StoringTrainer
from weight_update.synchronizer.plan import SyncPlan, SyncStyle
from weight_update.synchronizer.service import Service, has_ended, outcome_of
from weight_update.synchronizer.sessions import Reply
from weight_update.synchronizer.state import ExplorerState
from weight_update.synchronizer.transfer import Endpoint, Publisher, Subscriber, Transfer, is_loopback, key_of
from weight_update.transports.shared_memory.unix_stream import deadline_of

_log = logging.getLogger(__name__)
_SYNCHRONIZER = 0
"""The synchronizer's id among the subscribers of the trainer."""


class MemoryTrainer(StoringTrainer):
    """The trainer's part: a publisher that the synchronizer subscribes to."""

    def __init__(self, client: ClientBase, source: Any, address: str | None) -> None:
        found = address or client.channel.address
        there = None if is_loopback(found) else found
        self.publisher: Publisher = Publisher(source, there, client.strategy, client.transfer_timeout)

    def store(self, client: ClientBase, version: int, step: int) -> SyncReport:
        """Send to the synchronizer, which joins (again) if it is not connected."""
        del step
        if _SYNCHRONIZER not in self.publisher.joined():
            client.ask("take_from", ticket=self.publisher.endpoint)
        transfer = self.publisher.send([_SYNCHRONIZER])
        if failures := transfer.settle([_SYNCHRONIZER]):
            raise LinkClosedError(f"the synchronizer did not take the weights: {failures[_SYNCHRONIZER]}")
        return replace(transfer.report, version=version, apply_seconds={}, stall_seconds={})


@dataclass(frozen=True)
class CachedVersion:
    """The weights of one version, and the trainer step at which they were made."""

    version: int
    step: int
    weights: Any = field(repr=False)


class WeightCache:
    """The synchronizer's copy of the newest weights.

    It takes weights from the trainer once, and sends them to explorers, which may come when the trainer is
    gone.

    Attributes:
        newest: the newest version; None before the first weights.
    """

    def __init__(self, strategy: str | WeightStrategy, timeout: float) -> None:
        self._strategy, self._timeout = strategy, timeout
        self.newest: CachedVersion | None = None
        self._address: str | None = None
        self._subscriber: Subscriber | None = None
        self._publisher: Publisher | None = None
        self._taking = threading.Lock()

    def listen_on(self, address: str) -> None:
        """Let explorers of other machines in, too; raise LifecycleError once explorers of this one came."""
        if self._publisher is not None and self._address != address:
            raise LifecycleError(
                "the synchronizer already sends weights on another interface; call serve() before the "
                "trainer publishes"
            )
        self._address = address

    @property
    def endpoint(self) -> Endpoint | None:
        """Endpoint that explorers join; None before the first weights."""
        return None if self._publisher is None else self._publisher.endpoint

    def subscribe(self, endpoint: Endpoint) -> None:
        """Join the trainer's publisher; raise LinkClosedError if it cannot be reached."""
        with self._taking:
            if self._subscriber is not None:
                self._subscriber.close()
            self._subscriber = Subscriber(endpoint, _SYNCHRONIZER, None, self._strategy, self._timeout)
            if (reason := self._subscriber.join(self._timeout)) is not None:
                raise LinkClosedError(f"the synchronizer does not reach the trainer: {reason}")

    def keep(self, version: int, step: int) -> bool:
        """Keep a copy of the weights that the trainer has just sent; return whether these are the first."""
        with self._taking:
            if self._subscriber is None:
                raise LinkClosedError("the synchronizer has no link to the trainer")
            self.newest = CachedVersion(version, step, self._subscriber.scheme.weights)
            first = self._publisher is None
            if first:
                self._publisher = Publisher(self._weights, self._address, self._strategy, self._timeout)
            return first

    def send(self, observers: Observers, ids: Iterable[int] | None = None) -> tuple[CachedVersion, Transfer]:
        """Send the newest version to the explorers ``ids`` (None: all that joined), and do not wait."""
        newest, publisher = self.newest, self._publisher
        if newest is None or publisher is None:
            raise LinkClosedError("the synchronizer holds no weights")
        weights = newest.weights
        tell = partial(_tell_full, observers, newest.version) if observers.functions else None
        if ids is None:
            return newest, publisher.spread(weights, tell=tell)
        return newest, publisher.send(ids, weights, tell)

    def close(self) -> None:
        """Close all links and release the weights."""
        with contextlib.ExitStack() as stack:  # both, also where one raises
            for end in (self._subscriber, self._publisher):
                if end is not None:
                    stack.callback(end.close)
            self.newest = None

    def _weights(self) -> Any:
        assert self.newest is not None
        return self.newest.weights


def _tell_full(observers: Observers, version: int, event: WorkerEvent) -> None:
    """Tell observers of an explorer that is sent all weights of a version instead of a patch."""
    observers.tell(replace(event, version=version))


class MemoryService(Service):
    """The synchronizer's part: a cache of the newest weights, for explorers that wait and those that come."""

    calls = (*Service.calls, "take_from", "trainer_published")

    def __init__(self, plan: SyncPlan, strategy: str | WeightStrategy, **options: Any) -> None:
        super().__init__(plan, **options)
        self.cache = WeightCache(strategy, self._timeout)
        self._delivering = threading.Lock()
        self._transfers: dict[ExplorerState, tuple[int, Transfer]] = {}

    def reach_by(self, address: str) -> None:
        self.cache.listen_on(address)
        super().reach_by(address)

    def _restore(self, version: int, step: int) -> None:
        super()._restore(version, step)
        self.machine.lost_weights()  # they were in the memory of the earlier service

    def _release(self) -> None:
        self.cache.close()

    def take_from(self, session: str, ticket: Endpoint) -> Reply:
        """Subscribe to the trainer's publisher."""
        with self.changed:
            self.table.of(session)
        self.cache.subscribe(ticket)
        return {}

    def trainer_published(self, session: str, step: int, version: int, report: Reply | None = None) -> Reply:
        """Keep the weights that the trainer has sent, as a version."""
        with self.changed:
            self._trainer(session, step)
        first = self.cache.keep(version, step)
        with self.changed:
            if first and self.cache.endpoint is not None:
                self._record(self.cache.endpoint, 0, version, step)
            self.publish(version, step)
            self.machine.offered(step)
        self._tell(report)
        if self.plan.style is SyncStyle.FULLY_ASYNC:
            self._spread()
        return {"version": version}

    def _spread(self) -> None:
        """Send the version just published to all who joined; explorers that miss it fetch it."""
        try:
            sent, transfer = self.cache.send(self.observers)
        except WeightSyncError as error:
            _log.warning("version %s was not sent in the background: %s", self.machine.newest, error)
        else:
            with self.changed:
                self._record_sent(sent, transfer)

    def _record_sent(self, sent: CachedVersion, transfer: Transfer) -> None:
        assert self.cache.endpoint is not None
        self._record(self.cache.endpoint, transfer.number, sent.version, sent.step)
        self.publish(sent.version, sent.step)

    def explorer_syncs(
        self, session: str, step: int, held: list[Any] | None, timeout: float, again: bool = False
    ) -> Reply:
        deadline = deadline_of(timeout)
        with self.changed:
            found, explorer = self._explorer(session, step, held)
            if again and has_ended(explorer):
                return outcome_of(explorer)
            self._begin_wait(explorer)
        while True:
            with self.changed:
                if not self._await_turn(explorer, deadline, timeout, lambda: self._may_take(explorer)):
                    self._transfers.pop(explorer, None)
                    return outcome_of(explorer)
                endpoint = self.cache.endpoint
                if endpoint is not None and found.linked != key_of(endpoint):
                    return {"join": endpoint}
            self._deliver(explorer)

    def _may_take(self, explorer: ExplorerState) -> bool:
        """Return whether weights are there for a waiting explorer, or on their way to it."""
        return explorer in self._transfers or self.machine.may_fetch(explorer.id) is not None

    def _deliver(self, explorer: ExplorerState) -> None:
        """Send to all explorers that wait, once; then wait for this explorer alone."""
        with self._delivering:
            if explorer not in self._transfers:
                self._send_to_waiting()
        version, transfer = self._transfers.pop(explorer, (0, None))
        if transfer is not None:
            failures = transfer.settle([explorer.id])
            with self.changed:
                if not has_ended(explorer):
                    self._end_transfer([explorer.id], version, failures)

    def _send_to_waiting(self) -> None:
        assert self.cache.endpoint is not None
        with self.changed:
            linked = self.table.linked(key_of(self.cache.endpoint))
            going = [one for one in linked if self.machine.may_fetch(one.id) is not None]
            self.machine.begin([one.id for one in going])
        ids = [one.id for one in going]
        if not ids:
            return
        try:
            sent, transfer = self.cache.send(self.observers, ids)
        except WeightSyncError as error:
            with self.changed:
                for id in ids:
                    self.machine.failed(id, str(error))
                self.changed.notify_all()
            return
        with self.changed:
            self._record_sent(sent, transfer)
            self._transfers.update(dict.fromkeys(going, (sent.version, transfer)))
            self.changed.notify_all()
