"""The clients of a trainer and of an explorer, without asyncio, and their metrics."""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Mapping
from typing import Any

from torch import nn

from weight_update.arguments import require_reachable, whole_number
from weight_update.engines.base import InferenceEngine
from weight_update.errors import TransportError, UnsupportedSourceError, undo_on_error
from weight_update.sharded.gathering import is_sharded
from weight_update.strategy.strategy import GatherShards, WeightStrategy
from weight_update.synchronizer.checkpoint import CheckpointExplorer, CheckpointTrainer
from weight_update.synchronizer.client import ClientBase
from weight_update.synchronizer.direct import DirectTrainer
from weight_update.synchronizer.memory import MemoryTrainer
from weight_update.synchronizer.methods import ExplorerMethod, SubscribingExplorer, TrainerMethod
from weight_update.synchronizer.plan import SyncMethod, SyncStyle
from weight_update.synchronizer.rpc import Channel
from weight_update.synchronizer.sessions import Held, Reply
from weight_update.synchronizer.state import TRAINER_STOPPED
from weight_update.transports.distributed.relay.nccl import require_known

_log = logging.getLogger(__name__)
_PREFIX = "sync/"


class Metrics(dict[str, Any]):
    """The metrics of one ``sync_weight()``, ready for a logger.

    Its items are numbers whose names begin with ``sync/``, so that ``metrics.update(...)`` and a logger get
    names that collide with no others: ``sync/version`` (in force in an explorer, or newest published by a
    trainer; absent before the first), ``sync/step`` (of this side), ``sync/seconds`` (duration of the call),
    ``sync/bytes`` (trainer: bytes that it sent or wrote; explorer: size of its weights), ``sync/waited``
    (seconds of waiting for the other side) and ``sync/failed`` (1 if there is a reason, else 0).

    The short names work as well: ``metrics["version"]``, ``"reason" in metrics``, ``metrics.get("reason")``.
    The reason is a text, and no item. Copies such as ``dict(metrics)``, ``{**metrics}`` and
    ``metrics.copy()`` have the items only: they lose the short names and the reason.

    Args:
        fields: values by short name.
    """

    def __init__(self, fields: Mapping[str, Any]) -> None:
        self._fields = {**fields, "failed": int("reason" in fields)}
        numbers = {name: value for name, value in self._fields.items() if isinstance(value, (int, float))}
        super().__init__({_PREFIX + name: value for name, value in numbers.items()})

    def __missing__(self, name: str) -> Any:
        return self._fields[name]

    def __contains__(self, name: object) -> bool:
        return super().__contains__(name) or name in self._fields

    def get(self, name: str, default: Any = None) -> Any:
        """Return an item, or a field by its short name."""
        try:
            return self[name]
        except KeyError:
            return default


class BlockingTrainer(ClientBase):
    """A trainer's client without asyncio; see :class:`~weight_update.TrainerClient`."""

    role = "trainer"

    def __init__(
        self,
        channel: Channel,
        source: Any,
        *,
        address: str | None = None,
        backend: str = "gloo",
        step: int | None = None,
        **options: Any,
    ) -> None:
        super().__init__(channel, step=0 if step is None else step, **options)
        if address is not None:
            require_reachable(address)
        require_known(backend)
        _require_one_rank(self.strategy, source)  # a client that cannot send takes no other one's place
        reply = self._introduce()
        self.version = reply["version"]
        with undo_on_error(self.close):
            self._go_on_after(reply["step"], step)
            self._method: TrainerMethod = self._make_method(source, address, backend, reply)
            if isinstance(self._method, DirectTrainer):
                self._endpoint = self._method.publisher.endpoint
                self.ask("hello", **self._hello())  # now with the endpoint

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

    def need_sync(self) -> bool:
        """Return whether :meth:`sync_weight` should be called now."""
        return bool(self.ask("trainer_needs", step=self.step)["need"])

    def sync_weight(self) -> Metrics:
        """Publish the current weights (MEMORY, CHECKPOINT), or send them to the explorers (NCCL)."""
        with self.synchronizing():
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
                _log.warning("step %d: publishing failed: %s", step, metrics["reason"])
            return Metrics({"bytes": 0, "waited": 0.0, **metrics})


def _require_one_rank(strategy: WeightStrategy, source: Any) -> None:
    """Raise UnsupportedSourceError if a source cannot be read, or if several ranks hold parts of it."""
    readable = not callable(source) or isinstance(source, nn.Module)
    gather = strategy.gather
    if readable and is_sharded(strategy, source) and gather is None:
        gather = GatherShards()
    if gather is not None and len(gather.members()) > 1:
        raise UnsupportedSourceError(
            "several ranks hold parts of these weights, and a synchronizer has one trainer: gather them on "
            "all ranks, for example with DTensor.full_tensor(), and give the client of one rank a function "
            "that returns the whole weights"
        )


class BlockingExplorer(ClientBase):
    """An explorer's client without asyncio; see :class:`~weight_update.ExplorerClient`."""

    role = "explorer"

    def __init__(self, channel: Channel, model: Any, *, id: int | None = None, **options: Any) -> None:
        super().__init__(channel, **options)
        self.id: int | None = None if id is None else whole_number(id, "id", least=0)
        self._model = model
        self._method: ExplorerMethod = SubscribingExplorer(model)
        reply = self._introduce()
        if self.plan.method is SyncMethod.CHECKPOINT:
            with undo_on_error(self.close):
                self._method = CheckpointExplorer(self, model, reply["directory"])

    def need_sync(self) -> bool:
        """Return whether :meth:`sync_weight` should be called now."""
        held = self._method.held(self.version)
        reply = self.ask("explorer_needs", step=self.step, held=held)
        self._note_version(held, reply["version"])
        return bool(reply["need"])

    def _note_version(self, held: Held, version: int | None) -> None:
        """Note the version in force, which is none if the update that is ``held`` has no number."""
        if held is not None and held[1] is None:
            self.version = None
        else:
            self.advance_to(version)

    def sync_weight(self) -> Metrics:
        """Wait for weights that are new enough; without them, the metrics have a ``reason``.

        Raises:
            LifecycleError: the calling thread is inside :meth:`hold`.
        """
        self._method.gate.require_outside()  # the update would wait for this thread
        with self.synchronizing():
            start, step, before = time.perf_counter(), self.step, self.version
            metrics: dict[str, Any] = {"waited": 0.0}
            try:
                reply = self._method.sync(self, step, metrics)
            except TransportError as error:
                reply = {"version": self.version, "reason": str(error)}
            held = self._method.held(self.version)
            self._note_version(held, reply["version"])
            metrics["version"] = self.version
            if reply["reason"] is None:
                self._synced_at = step
            else:
                metrics["reason"] = reply["reason"]
                self._log_failure(reply["reason"], before, held)
                self._method.check_link()
            metrics |= {"step": step, "bytes": self._nbytes(), "seconds": time.perf_counter() - start}
            return Metrics(metrics)

    def _log_failure(self, reason: str, before: int | None, held: Held) -> None:
        """Log why no version came that is new enough; ``before`` is the version before the call."""
        if self.version is None:
            torn = held is not None and held[1] is None
            state = "has no complete version" if torn else "has no version yet"
        elif self.version == before:
            state = f"keeps version {before}"
        else:  # that of the sender that it joined
            state = f"now has version {self.version}"
        expected = self.closed.is_set() or reason == TRAINER_STOPPED
        _log.log(logging.INFO if expected else logging.WARNING, "explorer %s %s: %s", self.id, state, reason)

    def hold(self) -> contextlib.AbstractContextManager[None]:
        """Return a context manager inside which no update is applied, for use in FULLY_ASYNC.

        In the other styles, weights change only in :meth:`sync_weight`.
        """
        return self._method.gate.hold()

    def _nbytes(self) -> int:
        engine = isinstance(self._model, InferenceEngine)
        held = self._model.expected_weights() or {} if engine else self._model
        tensors = self.strategy.named(held).tensors.values()
        return sum(tensor.numel() * tensor.element_size() for tensor in tensors)
