"""The scheme for models that need no synchronization."""

from __future__ import annotations

from typing import Any

from weight_update.errors import LifecycleError
from weight_update.report import SyncReport
from weight_update.schemes.base import End, WeightSyncScheme
from weight_update.schemes.collector import register_with_torchrl
from weight_update.strategy.strategy import WeightStrategy
from weight_update.transports.base import TransportBackend


class NoWeightSyncScheme(WeightSyncScheme, backend="none"):
    """Scheme for models that need no synchronization: every call does nothing and succeeds at once."""

    def __init__(self, strategy: str | WeightStrategy = "tensordict", sync: bool = True) -> None:
        super().__init__(strategy, sync)

    def create_transport(self, *, worker_idx: int, end: End) -> TransportBackend:
        """Raise LifecycleError: this scheme has no links."""
        raise LifecycleError("NoWeightSyncScheme has no transport")

    def init_on_sender(self, *, model_id: str | None = None, **ignored: Any) -> None:
        """Note that this is the sender; other arguments are ignored."""
        register_with_torchrl(WeightSyncScheme)
        self._drop_parent()
        self.model_id, self._end = model_id, "sender"

    def init_on_receiver(self, *, model_id: str | None = None, **ignored: Any) -> None:
        """Note that this is a receiver; other arguments are ignored."""
        self._drop_parent()
        self.model_id, self._end = model_id, "receiver"

    def connect(self, **ignored: Any) -> None:
        """Connect nothing."""
        self._connected = True

    def send(self, weights: Any = None, worker_ids: Any = None) -> SyncReport:
        """Send nothing, and return an empty report."""
        return SyncReport(0, "none")

    def receive(self, timeout: float | None = None) -> Any | None:
        """Return None at once."""
        return None
