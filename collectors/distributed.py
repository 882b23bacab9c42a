"""The collectors over torch.distributed.

The other public names that TorchRL has in a module of this name are here, too.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torchrl.collectors.distributed as torchrl_distributed
from tensordict import TensorDictBase
from torchrl.collectors.distributed import DEFAULT_SLURM_CONF, RayEvalWorker, submitit_delayed_launcher

from collectors.launched import Launched
from collectors.node_programs import run_on_demand
from collectors.process_group import GroupWorkers, example_of
from collectors.ray import RayCollector
from collectors.rpc import RPCCollector
from collectors.weight_update import DistributedWeightUpdater, RPCWeightUpdater, SchemeUpdater
from collectors.workers import Arguments
from weight_update import DistributedWeightSyncScheme

__all__ = [
    "DEFAULT_SLURM_CONF",
    "DistributedCollector",
    "DistributedSyncCollector",
    "DistributedWeightUpdater",
    "RPCCollector",
    "RPCWeightUpdater",
    "RayCollector",
    "RayEvalWorker",
    "submitit_delayed_launcher",
]


class DistributedCollector(Launched, torchrl_distributed.DistributedCollector):
    """TorchRL's ``DistributedCollector``, whose workers run our collectors.

    Workers are numbered from 0 everywhere, in ``worker_ids`` as well, though their ranks in the process group
    begin with 1. Arguments that are not listed here are TorchRL's.

    Args:
        create_env_fn: a list, one for each worker.
        collector_class: see :class:`~collectors.remote.Remote`.
        weight_sync_schemes: schemes by model id; None for a
            :class:`~weight_update.DistributedWeightSyncScheme` if the policy has weights. They are shut down
            with the collector.
        weight_recv_schemes: receivers of this collector, if it is a worker itself; weights are passed on.
        weight_updater: see :class:`~collectors.remote.Remote`.
        total_frames: number of frames; -1 for no end.
        tcp_port: port of the group's rendezvous; None for the environment's ``TCP_PORT``, or else for a
            free one with ``launcher="mp"`` and for 10003 with the others.
        max_weight_update_interval: largest number of batches for which a worker gets no new version; -1 for
            no limit.

    Raises:
        WorkerError: workers could not start; the error has their tracebacks. Also raised while iterating,
            when a worker ends or its connection breaks.
        LifecycleError: torch.distributed is initialized in this process.
    """

    _scheme_class = DistributedWeightSyncScheme
    _workers_class = GroupWorkers
    _workers: GroupWorkers
    _program = staticmethod(run_on_demand)

    def _init_workers(self) -> None:
        self._initialize(self._updates.schemes)
        delayed = self.launcher == "submitit_delayed"
        form = partial(self._init_master_dist, self.num_workers + 1, self.backend)
        self._start(self._program, self._init_worker_dist_submitit_delayed if delayed else form)
        self._workers.store = self._store

    def _arguments_of(self, idx: int) -> Arguments:
        inner = self._inner_arguments(idx)
        copied = {key: inner.pop(key) for key in ("policy", "policy_factory")}
        group = {
            "rank": idx + 1,
            "ip": self.IPAddr,
            "port": int(self.tcp_port),
            "world_size": self.num_workers + 1,
            "backend": self.backend,
            "verbose": self._VERBOSE,
        }
        return copied, inner | group

    def _make_container(self) -> None:
        self._workers.expect(example_of(self))

    def _update_between(self, batches: int, workers: list[int]) -> None:
        if self.update_interval is not None and batches % self.update_interval == 0:
            self._update_workers(None if self._sync else workers)
        self._update_stale()


class DistributedSyncCollector(DistributedCollector, torchrl_distributed.DistributedSyncCollector):
    """TorchRL's ``DistributedSyncCollector``, whose workers run our collectors.

    Each batch has frames of every worker. Workers collect the next batch while the trainer uses this one, so
    frames may be of the previous version, as ``"policy_version"`` shows. Errors, and arguments that TorchRL's
    class lacks (``weight_sync_schemes``, ``weight_recv_schemes``, ``weight_updater``), are those of
    :class:`DistributedCollector`.

    Args:
        create_env_fn: a list, one for each worker.
        total_frames: number of frames; -1 for no end.
        update_interval: weights are sent before the first of each ``update_interval`` batches;
            ``update_policy_weights_`` may be called as well.
    """

    def _begin_torchrl(
        self, create_env_fn: Any, policy: Any, *, update_interval: Any = 1, **options: Any
    ) -> None:
        """Call the ``__init__`` of TorchRL's ``DistributedCollector``, which takes the schemes."""
        if not update_interval or update_interval < 1:
            raise ValueError(
                f"update_interval is a number of batches, at least 1, not {update_interval!r}; "
                "DistributedCollector with sync=True can leave it out"
            )
        if options["launcher"] == "submitit_delayed":
            raise ValueError(
                "DistributedSyncCollector cannot use launcher='submitit_delayed'; use DistributedCollector "
                "with sync=True"
            )
        super()._begin_torchrl(
            create_env_fn,
            policy,
            update_interval=update_interval,
            sync=True,
            update_after_each_batch=False,
            **options,
        )

    def _collect(self, batches: int) -> tuple[TensorDictBase, list[int]]:
        sends = not self._legacy_weight_updater or isinstance(self.weight_updater, SchemeUpdater)
        if sends and batches % self.update_interval == 0:
            self._update_workers()
        data = self._workers.gather()
        if (batches + 1) * self.frames_per_batch < self.total_frames:
            self._workers.ask_all()
        return data, list(range(self.num_workers))

    def _update_between(self, batches: int, workers: list[int]) -> None:
        """Do nothing: :meth:`_collect` sends the weights."""
