"""SyncMethod.MEMORY: the synchronizer holds the newest weights, and explorers fetch them there."""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterable
from dataclasses import replace
from typing import Any, NamedTuple

from weight_update.errors import (
    LifecycleError,
    LinkClosedError,
    SyncTimeoutError,
    TransportError,
    WeightSyncError,
)
from weight_update.report import SyncReport
from weight_update.schemes.sender_side import close_all
from weight_update.sender.handle import SendHandle
from weight_update.strategy.strategy import WeightStrategy
from weight_update.synchronizer.client import ClientBase
from weight_update.synchronizer.methods import StoringTrainer
from weight_update.synchronizer.plan import SyncPlan, SyncStyle
from weight_update.synchronizer.service import Service, has_ended, outcome_of
from weight_update.synchronizer.sessions import Held, Reply
from weight_update.synchronizer.state import ExplorerState
from weight_update.synchronizer.transfer import Endpoint, Publisher, Subscriber, is_loopback, key_of, settle
from weight_update.transports.socket_stream import deadline_of
from weight_update.wire.schema import WeightSchema

_log = logging.getLogger(__name__)
_LOOK_SECONDS = 0.05
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
        if _SYNCHRONIZER not in self.publisher.joined():
            client.ask("take_from", ticket=self.publisher.endpoint)
        transfer = self.publisher.send([_SYNCHRONIZER])
        if failures := settle(transfer, [_SYNCHRONIZER]):
            raise LinkClosedError(f"the synchronizer did not take the weights: {failures[_SYNCHRONIZER]}")
        return replace(transfer.report, version=version, apply_seconds={}, stall_seconds={})


class _HeldVersion(NamedTuple):
    """The weights of one version, and the trainer step at which they were made."""

    version: int
    step: int
    weights: Any


class MemoryService(Service):
    """The synchronizer's part: it sends the newest weights to explorers, even when the trainer is gone."""

    calls = (*Service.calls, "take_from", "trainer_published")

    def __init__(self, plan: SyncPlan, strategy: WeightStrategy, **options: Any) -> None:
        super().__init__(plan, **options)
        self._strategy = _passing_on(strategy)
        self._newest: _HeldVersion | None = None
        self._subscriber: Subscriber | None = None  # of the trainer
        self._publisher: Publisher | None = None  # for explorers; there are weights then
        self._published_from: Subscriber | None = None  # the link whose weights the publisher is known to fit
        self._schema: WeightSchema | None = None  # of the publisher
        self._taking, self._delivering = threading.Lock(), threading.Lock()
        self._transfers: dict[ExplorerState, tuple[int, SendHandle]] = {}

    def reach_by(self, address: str) -> None:
        if self._publisher is not None and self.address != address:
            raise LifecycleError(
                "the synchronizer already sends weights on another interface; call serve() before the "
                "trainer publishes"
            )
        super().reach_by(address)

    def _restore(self, version: int, step: int) -> None:
        super()._restore(version, step)
        self.machine.lost_weights()  # they were in the memory of the earlier service

    def _release(self) -> None:
        self._newest = None
        close_all(self._publisher, self._subscriber)

    def _release_if_closed(self) -> None:
        """Release what was made while another thread closed the service."""
        if self.table.closed:
            self._release()

    def take_from(self, session: str, ticket: Endpoint) -> Reply:
        """Subscribe to the trainer's publisher."""
        self.beat(session)
        with self._taking:
            close_all(self._subscriber)
            self._subscriber = None
            try:
                self._subscriber = Subscriber(ticket, _SYNCHRONIZER, None, self._strategy, self._timeout)
            except (TransportError, SyncTimeoutError) as error:
                raise LinkClosedError(f"the synchronizer does not reach the trainer: {error}") from None
            self._release_if_closed()
        return {}

    def trainer_published(self, session: str, step: int, version: int, report: Reply | None = None) -> Reply:
        """Keep the weights that the trainer has sent, as a version."""
        with self.changed:
            self._trainer(session, step)
        with self._taking:
            if self._subscriber is None:
                raise LinkClosedError("the synchronizer has no link to the trainer")
            self._newest = _HeldVersion(version, step, self._subscriber.scheme.weights)
            if self._published_from is not self._subscriber:
                self._make_publisher(self._newest)
                self._published_from = self._subscriber
            self._release_if_closed()
        with self.changed:
            self.machine.published(version, step)
            self.machine.offered(step)
        self._tell(report)
        if self.plan.style is SyncStyle.FULLY_ASYNC:
            with self._delivering:
                self._send_to_waiting(spread=True)
        return {"version": version}

    def _make_publisher(self, newest: _HeldVersion) -> None:
        """Make a publisher, unless the present one fits the weights of the trainer, perhaps a new one."""
        schema = self._strategy.named(newest.weights).schema()
        if self._publisher is not None and schema == self._schema:
            return
        tell, before = self.observers.tell, self._publisher
        made = Publisher(self._weights, self.address, self._strategy, self._timeout, tell=tell)
        with self.changed:  # explorers that join it begin with this version
            self._record(made.endpoint, 0, newest.version, newest.step)
        self._publisher, self._schema = made, schema
        if before is not None:
            _log.warning("the trainer has other weights than the one before; explorers connect again")
            before.close()

    def _weights(self) -> Any:
        assert self._newest is not None
        return self._newest.weights

    def _send(self, ids: Iterable[int], spread: bool) -> tuple[int, SendHandle]:
        """Send the newest version to the explorers ``ids``, or to all that joined, and do not wait."""
        newest, publisher = self._newest, self._publisher
        if newest is None or publisher is None:
            raise LinkClosedError("the synchronizer holds no weights")
        observed = newest.version if self.observers.functions else None
        transfer = publisher.send(ids, newest.weights, spread=spread, observe=observed)
        with self.changed:
            self._record(publisher.endpoint, transfer.version, newest.version, newest.step)
            self.machine.published(newest.version, newest.step)
        return newest.version, transfer

    def explorer_needs(self, session: str, step: int, held: Held) -> Reply:
        while self._being_recorded(held):  # the send that brought this update is about to record its version
            if self._delivering.acquire(timeout=_LOOK_SECONDS):
                self._delivering.release()
                break  # it failed, unless it has recorded the version
        return super().explorer_needs(session, step, held)

    def _being_recorded(self, held: Held) -> bool:
        """Return whether an explorer has an update of the present publisher without a recorded version."""
        with self.changed:
            publisher = self._publisher
            if held is None or held[1] is None:
                return False
            if publisher is None or held[0] != key_of(publisher.endpoint):
                return False
            return self._version_of(*held) is None

    def explorer_syncs(self, session: str, step: int, held: Held, timeout: float, again: bool) -> Reply:
        deadline = deadline_of(timeout)
        with self.changed:
            found, explorer = self._explorer(session, step, held)
            if again and explorer.outcome is not None:
                return outcome_of(explorer)
            self.machine.explorer_requires(explorer.id)
        while True:
            with self.changed:
                if not self._await_turn(explorer, deadline, timeout, lambda: self._may_take(explorer)):
                    self._transfers.pop(explorer, None)
                    return outcome_of(explorer)
                publisher = self._publisher
                if publisher is not None and found.linked != key_of(publisher.endpoint):
                    return {"join": publisher.endpoint}
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
            failures = settle(transfer, [explorer.id])
            with self.changed:
                if not has_ended(explorer):
                    self._end_transfer([explorer.id], version, failures)

    def _send_to_waiting(self, *, spread: bool = False) -> None:
        """Send to all explorers that wait; with ``spread`` also to the others, which fetch what they miss."""
        assert self._publisher is not None
        with self.changed:
            linked = self.table.linked(key_of(self._publisher.endpoint))
            going = [one for one in linked if self.machine.may_fetch(one.id) is not None]
            self.machine.begin([one.id for one in going])
        ids = [one.id for one in going]
        if not ids and not spread:
            return
        try:
            sent = self._send(ids, spread)
        except WeightSyncError as error:
            if spread:
                _log.warning("version %s was not sent in the background: %s", self.machine.newest, error)
            with self.changed:
                for id in ids:
                    self.machine.failed(id, str(error))
            return
        with self.changed:
            self._transfers.update(dict.fromkeys(going, sent))
            self.changed.notify_all()


def _passing_on(strategy: WeightStrategy) -> WeightStrategy:
    """Return a strategy that sends weights on as the trainer has selected, gathered and converted them."""
    select = None if strategy.select is None else lambda name, tensor: True
    return WeightStrategy(strategy.extract_as, encoding=strategy.encoding, select=select)
