"""An explorer's client, without asyncio."""

from __future__ import annotations

import contextlib
import logging
import time
from typing import Any

from weight_update.engines.base import InferenceEngine
from weight_update.errors import TransportError
from weight_update.strategy.strategy import WeightStrategy
from weight_update.synchronizer.checkpoint import CheckpointExplorer
from weight_update.synchronizer.client import ClientBase
from weight_update.synchronizer.methods import ExplorerMethod, SubscribingExplorer
from weight_update.synchronizer.metrics import Metrics
from weight_update.synchronizer.plan import SyncMethod
from weight_update.synchronizer.rpc import Channel
from weight_update.synchronizer.state import TRAINER_STOPPED

_log = logging.getLogger(__name__)


class BlockingExplorer(ClientBase):
    """A client that takes new weights when the plan says so; see :class:`~weight_update.ExplorerClient`."""

    role = "explorer"

    def __init__(
        self,
        channel: Channel,
        model: Any,
        *,
        id: int | None = None,
        strategy: str | WeightStrategy = "tensordict",
        timeout: float = 60.0,
        transfer_timeout: float = 60.0,
        step: int = 0,
    ) -> None:
        super().__init__(channel, strategy, timeout, transfer_timeout, step)
        if id is not None and id < 0:
            raise ValueError(f"id must be 0 or greater, got {id}")
        self.id: int | None = id
        self._model = model
        self._method: ExplorerMethod = SubscribingExplorer(model)
        reply = self._introduce()
        if self.plan.method is SyncMethod.CHECKPOINT:
            try:
                self._method = CheckpointExplorer(self, model, reply["directory"])
            except BaseException:
                self.close()
                raise

    # -- for users ---------------------------------------------------------------------------------

    def need_sync(self) -> bool:
        """Return whether :meth:`sync_weight` should be called now."""
        reply = self.ask("explorer_needs", step=self.step, held=self._method.held(self.version))
        self.advance_to(reply["version"])
        return bool(reply["need"])

    def sync_weight(self) -> Metrics:
        """Wait for new weights; when this returns they are in force."""
        with self._syncing:
            start, step = time.perf_counter(), self.step
            metrics: dict[str, Any] = {"waited": 0.0}
            try:
                reply = self._method.sync(self, step, metrics)
            except TransportError as error:
                reply = {"version": self.version, "reason": str(error)}
            self.advance_to(reply["version"])
            metrics["version"] = self.version
            if reply["reason"] is not None:
                metrics["reason"] = reply["reason"]
                level = logging.INFO if reply["reason"] == TRAINER_STOPPED else logging.WARNING
                _log.log(level, "explorer %s keeps version %s: %s", self.id, self.version, reply["reason"])
                self._method.check_link()
            else:
                self._synced_at = step
            metrics |= {"step": step, "bytes": self._nbytes(), "seconds": time.perf_counter() - start}
            return Metrics(metrics)

    def hold(self) -> contextlib.AbstractContextManager[None]:
        """Return a context inside which no update lands, for several forward passes in FULLY_ASYNC.

        In the other styles weights change in :meth:`sync_weight` only.
        """
        return self._method.hold()

    def give_up(self) -> None:
        """End the wait of :meth:`sync_weight`, which another thread has called, with the version there is."""
        self.ask("explorer_gives_up", reason="it was cancelled")

    def close(self) -> None:
        """Leave, and wake all that wait for this side. The model keeps its weights, also those of now.

        With CHECKPOINT, this waits up to ``transfer_timeout`` seconds for the end of a read.
        """
        try:
            super().close()
        finally:
            self._method.close()

    def _nbytes(self) -> int:
        engine = isinstance(self._model, InferenceEngine)
        held = self._model.expected_weights() or {} if engine else self._model
        tensors = self.strategy.named(held).tensors.values()
        return sum(tensor.numel() * tensor.element_size() for tensor in tensors)
