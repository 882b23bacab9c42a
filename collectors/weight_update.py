"""The legacy weight updaters of TorchRL, as adapters on the schemes of a collector.

The module has the name that it has in TorchRL. New programs give a collector ``weight_sync_schemes`` instead.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
import torchrl.collectors
from tensordict import TensorDict, TensorDictBase
from torch import nn

from collectors.requests import Request
from collectors.updating import Updating
from weight_update import LifecycleError, NothingToSendError, SyncReport, WeightStrategy

with warnings.catch_warnings():
    warnings.simplefilter("ignore", DeprecationWarning)  # TorchRL's, about this subclass

    class WeightUpdaterBase(torchrl.collectors.WeightUpdaterBase):
        """TorchRL's base class of updaters that a program writes itself.

        Such an updater uses no scheme: it delivers weights in its own way, and returns no report.
        """

        def __init_subclass__(cls, **options: Any) -> None:
            """Warn that the base class is deprecated."""
            super(torchrl.collectors.WeightUpdaterBase, cls).__init_subclass__(**options)  # TorchRL's warns
            if cls.__module__ != __name__:
                warnings.warn(
                    f"{cls.__name__} derives from WeightUpdaterBase, which is deprecated: derive from "
                    "weight_update.WeightSyncScheme, and give the collector weight_sync_schemes=",
                    DeprecationWarning,
                    stacklevel=3,  # this method, abc, the program
                )


class SchemeUpdater(WeightUpdaterBase):
    """The base of all updaters that send through the schemes of their collector.

    A collector that is made with such an updater has its default scheme for the policy. An updater may also
    be assigned to ``collector.weight_updater`` later.

    Attributes:
        replacement: scheme that a program uses instead.
    """

    replacement: str

    def __init__(self) -> None:
        warnings.warn(
            f"{type(self).__name__} is deprecated: instead of weight_updater=, give the collector "
            f"weight_sync_schemes={{'policy': weight_update.{self.replacement}()}}",
            DeprecationWarning,
            stacklevel=3,
        )

    def push_weights(self, policy_or_weights: Any = None, worker_ids: Any = None) -> SyncReport | None:
        """Send weights, and call the post-hooks.

        Args:
            policy_or_weights: weights, from any source that a scheme takes; None for those of this updater.
            worker_ids: index or device of a worker, or a list of them; None for all workers.

        Returns:
            Report of the update; None if no worker was due, or if there is no collector with a scheme.

        Raises:
            LifecycleError: the updater has no collector.
            NothingToSendError: there is neither a collector nor weights.
        """
        report: SyncReport | None = self._push_weights(
            policy_or_weights=policy_or_weights, worker_ids=worker_ids
        )
        self._call_post_hooks()
        return report

    def _push_weights(self, *, policy_or_weights: Any = None, worker_ids: Any = None) -> SyncReport | None:
        if type(self)._sync_weights_with_worker is not SchemeUpdater._sync_weights_with_worker:
            super()._push_weights(policy_or_weights=policy_or_weights, worker_ids=worker_ids)
            return None  # a subclass has its own way to a worker
        weights = self._get_server_weights() if policy_or_weights is None else policy_or_weights
        if weights is not None:
            weights = self._maybe_map_weights(weights)
        workers = self.all_worker_ids() if worker_ids is None else worker_ids
        if isinstance(workers, (int, torch.device)):
            workers = [workers]
        if workers is not None:
            workers = [worker for worker in workers if not self._skip_update(worker)]
            if not workers:
                return None
        return self._deliver(weights, workers)

    def _sync_weights_with_worker(self, *, worker_id: Any = None, server_weights: Any) -> None:
        self._deliver(server_weights, None if worker_id is None else [worker_id])

    def _maybe_map_weights(self, policy_or_weights: Any) -> Any:
        return policy_or_weights

    def _deliver(self, weights: Any, workers: list[Any] | None) -> SyncReport | None:
        """Send weights in one update; None for the weights of the collector's policy."""
        collector = self.collector
        if not isinstance(collector, Updating):
            raise LifecycleError(
                f"{type(self).__name__} needs a collector of the package collectors: pass the updater as "
                "weight_updater=, or assign it to collector.weight_updater"
            )
        report = collector._update(Request({"policy": weights}, workers))
        return report if isinstance(report, SyncReport) else None


class _LocalUpdater(SchemeUpdater):
    """The base of updaters that also keep TensorDicts of the trainer current."""

    def _kept(self, workers: list[Any] | None) -> Iterable[TensorDictBase]:
        """Return the TensorDicts of these workers."""
        raise NotImplementedError

    def _deliver(self, weights: Any, workers: list[Any] | None) -> SyncReport | None:
        report, live = None, set[int]()
        if isinstance(self.collector, Updating):
            report = super()._deliver(weights, workers)
            live = _addresses(getattr(self.collector, "policy", None))
        elif weights is None:
            raise NothingToSendError(f"give the weights: this {type(self).__name__} has none")
        if weights is not None:
            strategy = WeightStrategy("tensordict")
            for kept in self._kept(workers):
                if not any(value.data_ptr() in live for value in kept.values(True, True)):  # it has them
                    strategy.apply_weights(kept, weights)
        return report


class VanillaWeightUpdater(_LocalUpdater):
    """A legacy updater of a :class:`~collectors.Collector`. Use ``MemoryWeightSyncScheme`` instead.

    Args:
        weight_getter: function that returns the weights to send; None for those of the collector's policy.
        policy_weights: TensorDict that each update changes in place, too.
    """

    replacement = "MemoryWeightSyncScheme"

    def __init__(
        self, *, weight_getter: Callable[[], Any] | None = None, policy_weights: TensorDictBase
    ) -> None:
        super().__init__()
        self.weight_getter = weight_getter
        self.policy_weights = policy_weights

    @classmethod
    def from_policy(cls, policy: nn.Module) -> VanillaWeightUpdater:
        """Return an updater of the weights of ``policy``."""
        return cls(policy_weights=TensorDict.from_module(policy).lock_())

    def _get_server_weights(self) -> Any:
        return None if self.weight_getter is None else self.weight_getter()

    def _kept(self, workers: list[Any] | None) -> Iterable[TensorDictBase]:
        return [self.policy_weights]


class MultiProcessedWeightUpdater(_LocalUpdater):
    """A legacy updater of a :class:`~collectors.MultiCollector`.

    It is deprecated; use ``SharedMemWeightSyncScheme``.

    Args:
        get_server_weights: function that returns the weights to send; None for those of the collector's
            policy.
        policy_weights: TensorDicts by device of the workers, which each update changes in place, too.
    """

    replacement = "SharedMemWeightSyncScheme"

    def __init__(
        self, *, get_server_weights: Callable[[], Any] | None, policy_weights: dict[Any, TensorDictBase]
    ) -> None:
        super().__init__()
        self.weights_getter = get_server_weights
        self._policy_weights = policy_weights

    def all_worker_ids(self) -> list[Any] | None:
        return list(self._policy_weights) or None

    def _get_server_weights(self) -> Any:
        return None if self.weights_getter is None else self.weights_getter()

    def _kept(self, workers: list[Any] | None) -> Iterable[TensorDictBase]:
        chosen = self._policy_weights if workers is None else workers
        return [self._policy_weights[worker] for worker in chosen if worker in self._policy_weights]

    def _deliver(self, weights: Any, workers: list[Any] | None) -> SyncReport | None:
        return super()._deliver(weights, None if workers == self.all_worker_ids() else workers)


class _RemoteUpdater(SchemeUpdater):
    """The base of updaters that have the weights of the trainer."""

    policy_weights: Any
    num_workers: int

    def all_worker_ids(self) -> list[int] | None:
        return list(range(self.num_workers)) or None

    def _get_server_weights(self) -> Any:
        return self.policy_weights


class DistributedWeightUpdater(_RemoteUpdater):
    """A legacy updater of a :class:`~collectors.DistributedCollector`.

    It is deprecated; use ``DistributedWeightSyncScheme``. Workers are numbered from 0.

    Args:
        store: accepted as in TorchRL; the scheme has its own connection.
        policy_weights: weights to send if an update gives none.
        num_workers: number of workers.
        sync: accepted as in TorchRL; an update always waits for its workers.
    """

    replacement = "DistributedWeightSyncScheme"

    def __init__(self, store: Any, policy_weights: Any, num_workers: int, sync: bool) -> None:
        super().__init__()
        self.policy_weights, self.num_workers = policy_weights, num_workers


class RPCWeightUpdater(_RemoteUpdater):
    """A legacy updater of an :class:`~collectors.RPCCollector`. Use ``RPCWeightSyncScheme`` instead.

    Args:
        collector_infos: accepted as in TorchRL; the scheme has its own connection.
        collector_class: as ``collector_infos``.
        collector_rrefs: as ``collector_infos``.
        policy_weights: weights to send if an update gives none.
        num_workers: number of workers.
    """

    replacement = "RPCWeightSyncScheme"

    def __init__(
        self,
        collector_infos: Any,
        collector_class: Any,
        collector_rrefs: Any,
        policy_weights: Any,
        num_workers: int,
    ) -> None:
        super().__init__()
        self.collector_infos, self.collector_class = collector_infos, collector_class
        self.collector_rrefs = collector_rrefs
        self.policy_weights, self.num_workers = policy_weights, num_workers

    def push_weights(
        self, policy_or_weights: Any = None, worker_ids: Any = None, *, weights: Any = None
    ) -> SyncReport | None:
        """Send weights, which TorchRL calls ``weights`` here; see :meth:`SchemeUpdater.push_weights`."""
        return super().push_weights(policy_or_weights if weights is None else weights, worker_ids)


class RayWeightUpdater(_RemoteUpdater):
    """A legacy updater of a :class:`~collectors.RayCollector`. Use ``RayWeightSyncScheme`` instead.

    Args:
        policy_weights: weights to send if an update gives none.
        remote_collectors: actors of the collector; an empty list for those of the collector that it is given
            to.
        max_interval: number of calls that skip a worker before a call updates it.
    """

    replacement = "RayWeightSyncScheme"

    def __init__(self, policy_weights: Any, remote_collectors: Sequence[Any], max_interval: int = 0) -> None:
        super().__init__()
        self.policy_weights, self.remote_collectors = policy_weights, list(remote_collectors)
        self.max_interval = max(0, max_interval)
        self._passed_over: dict[int, int] = {}

    def all_worker_ids(self) -> list[int] | None:
        return list(range(len(self.remote_collectors))) or None

    def register_collector(self, collector: Any) -> None:
        """Register the collector of this updater, and its actors."""
        super().register_collector(collector)
        self.remote_collectors = self.remote_collectors or list(collector.remote_collectors)

    def _skip_update(self, worker_id: int) -> bool:
        passed = self._passed_over.get(worker_id, 0)
        skip = passed < self.max_interval
        self._passed_over[worker_id] = passed + 1 if skip else 0
        return skip


class RemoteModuleWeightUpdater(WeightUpdaterBase):
    """A legacy updater for workers that update themselves: it sends nothing, and requires weights."""

    def _sync_weights_with_worker(self, *, worker_id: Any = None, server_weights: Any) -> None:
        return

    def _maybe_map_weights(self, policy_or_weights: Any) -> Any:
        if policy_or_weights is None:
            raise LifecycleError(f"give the weights: {type(self).__name__} has none")
        return super()._maybe_map_weights(policy_or_weights)


def _addresses(policy: Any) -> set[int]:
    """Return the addresses of the weights of a policy."""
    return {one.data_ptr() for one in policy.parameters()} if isinstance(policy, nn.Module) else set()


def make_updater(weight_updater: Any, weight_sync_schemes: Any, policy: Any) -> tuple[Any, Any]:
    """Return the updater that a collector was given or makes: first if it sends by a scheme, else second.

    Raises:
        TypeError: schemes were given as well, or ``weight_updater`` is no updater.
    """
    if weight_updater is not None and weight_sync_schemes is not None:
        raise TypeError("give either weight_sync_schemes or weight_updater, not both")
    updater = weight_updater
    if updater is not None and not isinstance(updater, torchrl.collectors.WeightUpdaterBase):
        if not callable(updater):
            raise TypeError(f"weight_updater is a WeightUpdaterBase, not {type(updater).__name__}")
        from_policy = getattr(updater, "from_policy", None)
        made = from_policy(policy) if from_policy is not None and isinstance(policy, nn.Module) else None
        updater = updater() if made is None else made
    return (updater, None) if isinstance(updater, SchemeUpdater) else (None, updater)
