"""The collectors over torch.distributed.

The other public names that TorchRL has in a module of this name are here, too.
"""

from __future__ import annotations

import math
from functools import partial
from types import SimpleNamespace
from typing import Any

import torchrl.collectors.distributed as torchrl_distributed
from tensordict import TensorDictBase
from torchrl.collectors.distributed import DEFAULT_SLURM_CONF, RayEvalWorker, submitit_delayed_launcher

from collectors.launched import Launched
from collectors.node_programs import run_ahead, run_on_demand
from collectors.process_group import AheadWorkers, OnDemandWorkers, example_of, program_arguments
from collectors.ray import RayCollector
from collectors.remote import Remote
from collectors.rpc import RPCCollector
from collectors.weight_update import DistributedWeightUpdater, RPCWeightUpdater
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
    _workers_class = OnDemandWorkers
    _workers: OnDemandWorkers
    _program = staticmethod(run_on_demand)

    def _init_workers(self) -> None:
        self._initialize(self._updates.schemes)
        self._announce()
        arguments = program_arguments(self, self._frames_per_batch_corrected, verbose=self._VERBOSE)
        self.jobs = self._workers.launch(self.launcher, self.slurm_kwargs, self._program, arguments)
        delayed = self.launcher == "submitit_delayed"
        form = partial(self._init_master_dist, self.num_workers + 1, self.backend)
        self._workers.form(self._init_worker_dist_submitit_delayed if delayed else form)
        self._workers.store = self._store

    def _make_container(self) -> None:
        self._workers.expect(example_of(self, self._frames_per_batch_corrected))

    def _update_between(self, batches: int, workers: list[int]) -> None:
        if self.update_interval is not None and batches % self.update_interval == 0:
            self._update_workers(None if self._sync else workers)
        self._update_stale()


class DistributedSyncCollector(Launched, torchrl_distributed.DistributedSyncCollector):
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

    _scheme_class = DistributedWeightSyncScheme
    _workers_class = AheadWorkers
    _workers: AheadWorkers
    _program = staticmethod(run_ahead)
    total_frames_per_collector: int

    def _begin_torchrl(self, create_env_fn: Any, policy: Any, **options: Any) -> None:
        """Call TorchRL's ``__init__``, which would make a scheme of its own for a policy that it sees."""
        interval = options.get("update_interval", 1)
        if not interval or interval < 1:
            raise ValueError(
                f"update_interval is a number of batches, at least 1, not {interval!r}; DistributedCollector "
                "with sync=True can leave it out"
            )
        self._given = SimpleNamespace(
            policy=policy,
            factories=options.pop("policy_factory"),
            inner_options=options.pop("collector_kwargs"),  # TorchRL's takes no list
            total_frames=options.pop("total_frames"),
            updater=options.pop("weight_updater"),
        )
        options.pop("weight_sync_schemes")
        finite = 0 if self._given.total_frames == math.inf else self._given.total_frames
        Remote._begin(self, create_env_fn, None, policy_factory=_unseen, total_frames=finite, **options)

    def _init_workers(self) -> None:
        if self.launcher == "submitit_delayed":
            raise ValueError(
                "DistributedSyncCollector cannot use launcher='submitit_delayed'; use DistributedCollector "
                "with sync=True"
            )
        self._set_given()
        self._initialize(self._updates.schemes)
        self._announce()
        frames = self.total_frames_per_collector
        arguments = program_arguments(self, self._frames_per_batch_corrected, total_frames=frames)
        self.jobs = self._workers.launch(self.launcher, self.slurm_kwargs, self._program, arguments)
        self._workers.form(partial(self._init_master_dist, self.num_workers + 1, self.backend))

    def _set_given(self) -> None:
        """Set what TorchRL's ``__init__`` has not seen."""
        given, number = self._given, self.num_workers
        many = isinstance(given.factories, (list, tuple))
        self.policy, self.weight_updater = given.policy, given.updater
        self.policy_factory = list(given.factories) if many else [given.factories] * number
        inner = given.inner_options
        each = [inner] * number if isinstance(inner, dict) else inner
        self.collector_kwargs = [one | more for one, more in zip(each, self.collector_kwargs, strict=True)]
        self.total_frames = given.total_frames
        if given.total_frames == math.inf:
            self.total_frames_per_collector = -1

    def _make_container(self) -> None:
        self._workers.expect(example_of(self, self._frames_per_batch_corrected))

    def _collect(self, batches: int) -> tuple[TensorDictBase, list[int]]:
        if batches % self.update_interval == 0:
            self._send_all()
        return self._workers.gather(), list(range(self.num_workers))


def _unseen() -> None:
    """Stand in for the policy while TorchRL's ``__init__`` runs."""
