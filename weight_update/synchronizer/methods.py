"""The parts of a client that depend on the method: how weights are given, and how they are taken.

A client has a method, and passes itself to it with each call. The method keeps no reference to the client, so
that a client which is dropped is freed at once.
"""

from __future__ import annotations

import contextlib
import secrets
import time
from abc import ABC, abstractmethod
from dataclasses import asdict
from typing import Any

from weight_update.errors import (
    LifecycleError,
    LinkClosedError,
    SyncFailedError,
    SyncTimeoutError,
    TransportError,
    WeightSyncError,
    close_all,
)
from weight_update.receiver.gate import Gate, shared_gate
from weight_update.report import SyncReport
from weight_update.synchronizer.client import RETRY_SECONDS, ClientBase
from weight_update.synchronizer.plan import SyncStyle
from weight_update.synchronizer.sessions import Held, Reply
from weight_update.synchronizer.transfer import Endpoint, Publisher, Subscriber, key_of
from weight_update.transports.socket_stream import deadline_of

OUTAGES = (TransportError, SyncTimeoutError, SyncFailedError, OSError)
"""Errors that are a reason why nothing was published; others reach the caller."""


class TrainerMethod(ABC):
    """The part of a trainer's client that gives weights away.

    Attributes:
        publisher: the trainer's publisher; None for a method without one.
    """

    publisher: Publisher | None = None

    @abstractmethod
    def give(self, client: ClientBase, step: int) -> dict[str, Any]:
        """Give the weights of now away; return ``version``, perhaps ``bytes``, ``waited``, ``reason``."""

    def close(self) -> None:
        """Close the publisher, after the client was closed."""
        close_all(self.publisher)


class StoringTrainer(TrainerMethod):
    """A method by which the trainer stores weights for explorers, and never waits for them."""

    @abstractmethod
    def store(self, client: ClientBase, version: int, step: int) -> SyncReport:
        """Store the weights of now as a version, and return a report without explorers."""

    def give(self, client: ClientBase, step: int) -> dict[str, Any]:
        reply = client.ask("trainer_version", step=step)
        version = int(reply["version"])
        try:
            report = self.store(client, version, step)
            plain = asdict(report) if reply["observed"] else None
            client.ask("trainer_published", step=step, version=version, report=plain)
        except OUTAGES as error:
            soon = deadline_of(client.grace)  # the synchronizer itself may be gone
            return dict(client.ask("trainer_failed", soon, step=step, reason=str(error)))
        return {"version": version, "bytes": report.wire_bytes}


class ExplorerMethod(ABC):
    """The part of an explorer's client that takes weights.

    Attributes:
        gate: gate through which updates pass.
    """

    gate: Gate

    @abstractmethod
    def held(self, version: int | None) -> Held:
        """Return source and number of the update in force, for the synchronizer; None without a source.

        The number is None if an update failed midway in an engine, which then has no complete version.
        ``version`` is the version in force, as far as the client knows.
        """

    @abstractmethod
    def sync(self, client: ClientBase, step: int, metrics: dict[str, Any]) -> Reply:
        """Wait for new weights and take them; raise WeightSyncError if the model is not the trainer's.

        ``metrics`` gets ``waited``, the seconds until the weights were here. Return the ``version`` in force,
        and the ``reason`` if it is the one before.
        """

    def check_link(self) -> None:  # noqa: B027 - files have no link
        """Close a link whose other end is gone, after a synchronization without new weights."""

    def unlink(self) -> None:  # noqa: B027 - files have no link
        """Close the link: the client has another id, and connects by that one."""

    @abstractmethod
    def close(self) -> None:
        """Release what the method holds, after the client was closed."""


class SubscribingExplorer(ExplorerMethod):
    """The explorer's part of NCCL and MEMORY: a subscriber of the trainer, or of the synchronizer."""

    def __init__(self, model: Any) -> None:
        self._model = model
        self.subscriber: Subscriber | None = None
        self._group = secrets.token_hex(8)  # its gate is that of each subscriber
        self.gate = shared_gate(self._group)

    def held(self, version: int | None) -> Held:
        subscriber = self.subscriber  # another thread may close it
        return None if subscriber is None else [key_of(subscriber.endpoint), subscriber.scheme.version]

    def sync(self, client: ClientBase, step: int, metrics: dict[str, Any]) -> Reply:
        start = time.perf_counter()
        deadline, again = time.monotonic() + client.timeout, False
        while True:
            if client.gives_up:  # while it connected, when there was no wait to end
                return client.ask("explorer_gives_up", reason="it went on")
            held = self.held(client.version)
            reply = client.ask("explorer_syncs", deadline, wait=True, step=step, held=held, again=again)
            if "join" not in reply:
                metrics["waited"] = time.perf_counter() - start
                return self._with_version(client, step, held, reply)
            again = True
            try:
                self._join(client, reply["join"])
            except WeightSyncError as error:
                late = client.gives_up or time.monotonic() + RETRY_SECONDS >= deadline
                if isinstance(error, LinkClosedError) and not late:
                    client.closed.wait(RETRY_SECONDS)
                    continue  # there may be another publisher by now, for example after a restart
                reply = client.ask("explorer_gives_up", reason=str(error))
                if isinstance(error, (TransportError, SyncTimeoutError)):
                    return reply
                raise  # the model is not the trainer's

    def _with_version(self, client: ClientBase, step: int, before: Held, reply: Reply) -> Reply:
        """Return the reply with the version in force, if an update came although the wait failed.

        The trainer may have died after it sent weights, and before it could report them.
        """
        held = self.held(client.version)
        if reply["reason"] is not None and held not in (None, before):
            with contextlib.suppress(TransportError, LifecycleError):  # the reason states the problem
                soon = deadline_of(client.grace)
                reply["version"] = client.ask("explorer_needs", soon, step=step, held=held)["version"]
        return reply

    def _join(self, client: ClientBase, endpoint: Endpoint) -> None:
        """Connect to a publisher; raise as :class:`Subscriber`."""
        self.close()
        id = client.id
        assert id is not None
        timeout, in_background = client.transfer_timeout, client.plan.style is SyncStyle.FULLY_ASYNC
        self.subscriber = Subscriber(
            endpoint,
            id,
            self._model,
            client.strategy,
            timeout,
            self._group,
            late_updates_wait=in_background,  # an explorer that gave up waiting gets no weights afterwards
        )
        if client.closed.is_set() or client.id != id:  # another thread closed it, or said hello again
            self.close()

    def check_link(self) -> None:
        subscriber = self.subscriber  # another thread may close it
        if subscriber is not None:
            try:
                subscriber.scheme.receive(0)
            except WeightSyncError:
                self.close()

    def unlink(self) -> None:
        self.close()

    def close(self) -> None:
        subscriber, self.subscriber = self.subscriber, None
        close_all(subscriber)
