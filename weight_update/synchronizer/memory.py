"""SyncMethod.MEMORY: the synchronizer holds the newest weights, and explorers fetch them there."""

from __future__ import annotations

import contextlib
import logging
import threading
from dataclasses import replace
from typing import Any, NamedTuple

from weight_update.encodings.patch.encoding import sends_all_at_first
from weight_update.errors import (
    LifecycleError,
    LinkClosedError,
    SyncTimeoutError,
    TransportError,
    WeightSyncError,
    close_all,
)
from weight_update.report import SyncReport
from weight_update.sender.handle import SendHandle
from weight_update.strategy.strategy import WeightStrategy
from weight_update.synchronizer.client import ClientBase
from weight_update.synchronizer.methods import StoringTrainer
from weight_update.synchronizer.plan import SyncPlan, SyncStyle
from weight_update.synchronizer.service import Service, has_ended, outcome_of
from weight_update.synchronizer.sessions import CLOSED, Closed, Held, Reply
from weight_update.synchronizer.state import ExplorerState
from weight_update.synchronizer.transfer import Endpoint, Publisher, Subscriber, is_loopback, key_of, settle
from weight_update.transports.socket_stream import deadline_of
from weight_update.wire.schema import WeightSchema

_log = logging.getLogger(__name__)
_SYNCHRONIZER = 0
"""The synchronizer's id among the subscribers of the trainer."""


class MemoryTrainer(StoringTrainer):
    """The trainer's part: a publisher that the synchronizer subscribes to."""

    def __init__(self, client: ClientBase, source: Any, address: str | None) -> None:
        require_all_at_first(client.strategy)
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
    """The weights of one version, the trainer step at which they were made, and a publisher that fits."""

    version: int
    step: int
    weights: Any
    schema: WeightSchema
    publisher: Publisher


class MemoryService(Service):
    """The synchronizer's part: it sends the newest weights to explorers, even when the trainer is gone.

    A call takes or sends weights in its own thread, without the lock ``changed``. That lock guards all
    attributes but the link to the trainer.

    - A call of the trainer uses the link and replaces the version that is held. One call at a time does so:
      it holds the lock ``_taking``, which guards the link.
    - A call that finds explorers waiting sends the version to all of them. One call at a time does so:
      it holds the lock ``_sending``. The call of each explorer then waits for its own delivery.
    """

    calls = (*Service.calls, "take_from", "trainer_published")

    def __init__(self, plan: SyncPlan, strategy: WeightStrategy, **options: Any) -> None:
        super().__init__(plan, **options)
        self._strategy = _passing_on(strategy)
        self._taking = threading.Lock()  # acquired before ``changed``
        self._subscriber: Subscriber | None = None  # the link to the trainer
        self._schema: WeightSchema | None = None  # of the weights by this link, once they are known
        self._newest: _HeldVersion | None = None
        self._sending = threading.Lock()  # acquired before ``changed``
        self._transfers: dict[ExplorerState, tuple[int, SendHandle]] = {}  # that no call waits for yet

    def reach_by(self, address: str) -> None:
        with self.changed:
            if self._newest is not None and self.address != address:
                raise LifecycleError(
                    "the synchronizer already sends weights on another interface; call serve() before the "
                    "trainer publishes"
                )
            super().reach_by(address)

    def _restore(self, version: int, step: int) -> None:
        super()._restore(version, step)
        self.machine.lost_weights()  # they were in the memory of the earlier service

    def _release(self) -> None:
        with self.changed:
            newest, self._newest = self._newest, None
        close_all(None if newest is None else newest.publisher, self._subscriber)

    def _require_open(self) -> None:
        """Raise Closed if another thread closed the service, and release what was made meanwhile."""
        if self.closed:
            self._release()
            raise Closed(CLOSED)

    # -- from the trainer --------------------------------------------------------------------------

    def take_from(self, session: str, ticket: Endpoint) -> Reply:
        """Subscribe to the trainer's publisher."""
        with self._taking:
            self.beat(session)
            close_all(self._subscriber)
            self._subscriber = self._schema = None
            try:
                self._subscriber = Subscriber(ticket, _SYNCHRONIZER, None, self._strategy, self._timeout)
            except (TransportError, SyncTimeoutError) as error:
                raise LinkClosedError(f"the synchronizer does not reach the trainer: {error}") from None
            self._require_open()
        return {}

    def trainer_published(self, session: str, step: int, version: int, report: Reply | None = None) -> Reply:
        """Keep the weights that the trainer has sent, as a version."""
        with self._taking:
            with self.changed:
                self._trainer(session, step)
            before, weights = self._newest, self._weights()
            if self._schema is None:
                self._schema = self._strategy.named(weights).schema()
            fitting = None if before is None or before.schema != self._schema else before.publisher
            publisher = fitting or self._make_publisher()
            with self.changed:
                if fitting is None:  # explorers that join it begin with this version
                    self._record(publisher.endpoint, 0, version, step)
                self._newest = _HeldVersion(version, step, weights, self._schema, publisher)
                self.machine.published(version, step)
                self.machine.offered(step)
            if before is not None and fitting is None:
                _log.warning("the trainer has other weights than the one before; explorers connect again")
                before.publisher.close()
            self._require_open()
        self._tell(report)
        if self.plan.style is SyncStyle.FULLY_ASYNC:
            self._send_to_waiting(spread=True)
        return {"version": version}

    def _weights(self) -> Any:
        """Return the weights that the trainer has sent last."""
        if self._subscriber is None:
            raise LinkClosedError("the synchronizer has no link to the trainer")
        return self._subscriber.scheme.weights

    def _make_publisher(self) -> Publisher:
        tell = self.observers.tell
        return Publisher(self._weights, self.address, self._strategy, self._timeout, tell=tell)

    # -- to explorers ------------------------------------------------------------------------------

    def explorer_needs(self, session: str, step: int, held: Held) -> Reply:
        with self.changed:
            being_recorded = self._being_recorded(held)
        with self._sending if being_recorded else contextlib.nullcontext():
            return super().explorer_needs(session, step, held)

    def _being_recorded(self, held: Held) -> bool:
        """Return whether an explorer has an update that is still being sent; its version is recorded then."""
        if not self._sending.locked() or self._newest is None or held is None or held[1] is None:
            return False
        return held[0] == key_of(self._newest.publisher.endpoint) and self._version_of(*held) is None

    def explorer_syncs(self, session: str, step: int, held: Held, timeout: float, again: bool) -> Reply:
        deadline = deadline_of(timeout)
        with self.changed:
            explorer = self._explorer(session, step, held)
            if again and explorer.outcome is not None:
                return outcome_of(explorer)
            self.machine.explorer_requires(explorer.id)
        while True:
            with self.changed:
                if not self._await_turn(explorer, deadline, timeout, lambda: self._may_take(explorer)):
                    self._transfers.pop(explorer, None)
                    return outcome_of(explorer)
                newest, sent = self._newest, self._transfers.pop(explorer, None)
                if sent is None and newest and explorer.linked != key_of(newest.publisher.endpoint):
                    return {"join": newest.publisher.endpoint}
            if sent is None:
                self._send_to_waiting()
                continue
            version, transfer = sent
            failures = settle(transfer, [explorer.id])
            with self.changed:
                if not has_ended(explorer):
                    self._end_transfer([explorer.id], version, failures)

    def _may_take(self, explorer: ExplorerState) -> bool:
        """Return whether weights are there for a waiting explorer, or on their way to it."""
        return explorer in self._transfers or self.machine.may_fetch(explorer.id) is not None

    def _send_to_waiting(self, *, spread: bool = False) -> None:
        """Send to all explorers that wait; with ``spread`` also to the others, which fetch what they miss."""
        with self._sending:
            with self.changed:
                newest = self._newest
                if newest is None:  # the service was closed
                    return
                key = key_of(newest.publisher.endpoint)
                linked = [one for one in self.machine.explorers.values() if one.linked == key]
                going = [one for one in linked if self.machine.may_fetch(one.id) is not None]
                if not going and not spread:  # the call before has sent to them
                    return
                self.machine.begin([one.id for one in going])
            self._send(newest, going, spread)

    def _send(self, newest: _HeldVersion, going: list[ExplorerState], spread: bool) -> None:
        """Send a version, and record what is on its way to whom; or note why it was not sent."""
        ids, publisher = [one.id for one in going], newest.publisher
        observed = newest.version if self.observers.functions else None
        try:
            transfer = publisher.send(ids, newest.weights, spread=spread, observe=observed)
        except Exception as error:
            if spread:
                _log.warning("version %s was not sent in the background: %s", newest.version, error)
            with self.changed:
                for id in ids:
                    self.machine.failed(id, str(error))
            if not isinstance(error, WeightSyncError):
                raise
        else:
            with self.changed:
                self._record(publisher.endpoint, transfer.version, newest.version, newest.step)
                waiting = [one for one in going if not has_ended(one)]  # the others may have left for good
                self._transfers.update(dict.fromkeys(waiting, (newest.version, transfer)))
                self.changed.notify_all()


def require_all_at_first(strategy: WeightStrategy) -> None:
    """Raise ValueError if a strategy sends no weights, or only some, before it sends changes."""
    if not sends_all_at_first(strategy.encoding):
        raise ValueError(
            "with SyncMethod.MEMORY, the synchronizer needs all weights at first, because it has no model: "
            "leave init_sync and init_sync_prefixes of the PatchEncoding as they are"
        )


def _passing_on(strategy: WeightStrategy) -> WeightStrategy:
    """Return a strategy that sends weights on as the trainer has selected, gathered and converted them."""
    select = None if strategy.select is None else lambda name, tensor: True
    return WeightStrategy(strategy.extract_as, encoding=strategy.encoding, select=select)
