"""The scheme for models that need no synchronization."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeVar

from weight_update.errors import LifecycleError
from weight_update.receiver.gate import Gate, Hold
from weight_update.report import SyncReport
from weight_update.schemes.base import End, WeightSyncScheme
from weight_update.schemes.receiver_side import ReceiverSide
from weight_update.sender.handle import AnswerReader, Outcomes, SendHandle
from weight_update.sender.workers import WorkerTable
from weight_update.strategy.strategy import WeightStrategy
from weight_update.transports.base import TransportBackend

_F = TypeVar("_F", bound=Callable[..., Any])


class NoWeightSyncScheme(WeightSyncScheme, backend="none"):
    """Scheme for models that need no synchronization.

    Connecting, sending, receiving and holding do nothing and succeed at once.
    """

    def __init__(self, strategy: str | WeightStrategy = "tensordict", sync: bool = True) -> None:
        super().__init__(strategy, sync)

    def create_transport(self, *, worker_idx: int, end: End) -> TransportBackend:
        """Raise LifecycleError: this scheme has no links."""
        raise LifecycleError("NoWeightSyncScheme has no transport")

    def init_on_sender(self, *, model_id: str | None = None, **ignored: Any) -> None:
        """Note that this is the sender; other arguments are ignored."""
        self.model_id, self._begin().end = model_id, "sender"

    def init_on_receiver(self, *, model_id: str | None = None, **ignored: Any) -> None:
        """Note that this is a receiver; other arguments are ignored."""
        self.model_id, process = model_id, self._begin()
        process.receiver, process.end = ReceiverSide(None), "receiver"

    def connect(self, **ignored: Any) -> None:
        """Connect nothing."""
        self._process.connected = True

    def send(self, weights: Any = None, worker_ids: Any = None) -> SyncReport:
        """Send nothing, and return an empty report."""
        return SyncReport(0, "none")

    def send_async(self, weights: Any = None, worker_ids: Any = None) -> SendHandle:
        """Send nothing, and return a handle that is done."""
        return SendHandle(_Nobody(), SyncReport(0, "none"), ())

    def receive(self, timeout: float | None = None) -> Any | None:
        """Return None at once."""
        return None

    def hold(self) -> Hold:
        """Return a context manager; no update waits for its end."""
        return Gate().hold()

    def guarded(self, function: _F) -> _F:
        """Return ``function`` itself."""
        return function


class _Nobody(Outcomes):
    """The owner of updates that are sent to nobody."""

    def __init__(self) -> None:
        super().__init__(WorkerTable(()), timeout=0.0)
        self.reader = AnswerReader(self.table, lambda worker, chunk: None)

    def commit(self, version: int, workers: Sequence[int]) -> None: ...

    def abort(self, version: int, workers: Sequence[int]) -> None: ...
