"""The trainer's client, without asyncio."""

from __future__ import annotations

import logging
import time
from typing import Any

from torch import nn

from weight_update.errors import TransportError
from weight_update.strategy.strategy import WeightStrategy
from weight_update.synchronizer.checkpoint import CheckpointTrainer
from weight_update.synchronizer.client import ClientBase
from weight_update.synchronizer.direct import DirectTrainer
from weight_update.synchronizer.memory import MemoryTrainer
from weight_update.synchronizer.methods import TrainerMethod
from weight_update.synchronizer.metrics import Metrics
from weight_update.synchronizer.plan import RunningStatus, SyncMethod, SyncStyle
from weight_update.synchronizer.rpc import Channel
from weight_update.synchronizer.sessions import Reply
from weight_update.synchronizer.transfer import Endpoint, require_reachable
from weight_update.transports.distributed.relay.nccl import require_known

_log = logging.getLogger(__name__)


class BlockingTrainer(ClientBase):
    """A client that gives weights away when the plan says so; see :class:`~weight_update.TrainerClient`."""

    role = "trainer"

    def __init__(
        self,
        channel: Channel,
        source: Any,
        *,
        address: str | None = None,
        backend: str = "gloo",
        strategy: str | WeightStrategy = "tensordict",
        timeout: float = 60.0,
        transfer_timeout: float = 60.0,
        step: int | None = None,
    ) -> None:
        super().__init__(channel, strategy, timeout, transfer_timeout, step or 0)
        if address is not None:
            require_reachable(address)
        self._method: TrainerMethod | None = None
        require_known(backend)
        if not callable(source) or isinstance(source, nn.Module):
            self.strategy.named(source)  # a client that cannot send takes no other one's place
        reply = self._introduce()
        self.version = reply["version"]
        try:
            self._go_on_after(reply["step"], step)
            self._method = self._make_method(source, address, backend, reply)
            if self.plan.direct:
                self.ask("hello", **self._hello())  # now with the endpoint
        except BaseException:
            self.close()
            raise

    def _go_on_after(self, newest: int, given: int | None) -> None:
        """Take over the step of the newest version in FIXED, where explorers count on trainer steps."""
        if self.plan.style is not SyncStyle.FIXED or newest <= self.step:
            return
        if given is None:
            self.step = newest
            _log.info("the trainer continues at step %d, the step of version %s", newest, self.version)
        else:
            _log.warning(
                "the trainer begins at step %d, but version %s is from step %d; explorers that are ahead "
                "wait until the trainer catches up (step=None continues at step %d)",
                given,
                self.version,
                newest,
                newest,
            )

    def _make_method(self, source: Any, address: str | None, backend: str, reply: Reply) -> TrainerMethod:
        method = self.plan.method
        if method is SyncMethod.NCCL:
            return DirectTrainer(self, source, address, reply["address"], backend)
        if backend != "gloo":
            raise ValueError(f"backend={backend!r} is for SyncMethod.NCCL, not for {method}")
        if method is SyncMethod.MEMORY:
            return MemoryTrainer(self, source, address)
        return CheckpointTrainer(source, reply["directory"])

    def _endpoint(self) -> Endpoint | None:
        publisher = None if self._method is None else self._method.publisher
        return None if publisher is None else publisher.endpoint

    # -- for users ---------------------------------------------------------------------------------

    def need_sync(self) -> bool:
        """Return whether :meth:`sync_weight` should be called now."""
        return bool(self.ask("trainer_needs", step=self.step)["need"])

    def sync_weight(self) -> Metrics:
        """Give the weights of now away: publish them (MEMORY, CHECKPOINT), or meet explorers (NCCL)."""
        assert self._method is not None
        with self._syncing:
            start, step = time.perf_counter(), self.step
            try:
                metrics = self._method.give(self, step)
            except TransportError as error:
                metrics = {"version": self.version, "reason": str(error)}
            metrics |= {"step": step, "seconds": time.perf_counter() - start}
            if "reason" not in metrics:
                self.version: int | None = metrics["version"]
                self._synced_at = step
            else:
                _log.warning("step %d: nothing was published: %s", step, metrics["reason"])
            return Metrics({"bytes": 0, "waited": 0.0, **metrics})

    def give_up(self) -> None:
        """End the wait of :meth:`sync_weight`, which another thread has called."""
        self.ask("notify", step=self.step, status=RunningStatus.RUNNING.value)

    def close(self) -> None:
        try:
            super().close()
        finally:
            if self._method is not None:
                self._method.close()
