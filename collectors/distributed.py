"""The collectors over torch.distributed.

The other public names that TorchRL has in a module of this name are here, too.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterator
from datetime import timedelta
from typing import Any

import torchrl.collectors.distributed as torchrl_distributed
from tensordict import TensorDictBase
from torch import distributed as dist
from torchrl.collectors.distributed import DEFAULT_SLURM_CONF, RayEvalWorker, submitit_delayed_launcher

from collectors.batch_request import Make
from collectors.launched import Intervals, endless
from collectors.node_programs import STOP, run_ahead, run_on_demand
from collectors.process_group import ProcessGroupCollector
from collectors.ray import RayCollector
from collectors.rpc import RPCCollector
from collectors.weight_update import DistributedWeightUpdater, RPCWeightUpdater

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


class DistributedCollector(Intervals, ProcessGroupCollector, torchrl_distributed.DistributedCollector):
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

    _program = staticmethod(run_on_demand)

    def _arguments_of(self, idx: int) -> tuple[dict[str, Any], dict[str, Any]]:
        by_value, arguments = super()._arguments_of(idx)
        return by_value, {**arguments, "verbose": self._VERBOSE}

    def _request(self, idx: int) -> Make:
        store, receive = self._store, super()._request(idx)

        def make(put: Callable[[Any], None]) -> None:
            store.set(f"NODE_{idx + 1}_in", b"continue")
            receive(put)

        return make

    def _update_between(self, batches: int, workers: list[int]) -> None:
        if self.update_interval is not None and batches % self.update_interval == 0:
            self._update_workers(None if self._sync else workers)
        super()._update_between(batches, workers)

    def _end_workers(self, seconds: float) -> None:
        super()._end_workers(seconds)
        if self._in_group and self.launcher == "submitit_delayed":  # these jobs were started elsewhere
            self._ask_to_end()
            with contextlib.suppress(RuntimeError):  # a job is late or gone
                ends = [f"NODE_{idx + 1}_out" for idx in range(self.num_workers)]
                self._store.wait(ends, timedelta(seconds=seconds))

    def _ask_to_end(self) -> None:
        self._store.set("TRAINER_status", b"shutdown")
        for idx in range(self.num_workers):
            self._store.set(f"NODE_{idx + 1}_in", b"shutdown")


class DistributedSyncCollector(ProcessGroupCollector, torchrl_distributed.DistributedSyncCollector):
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

    _program = staticmethod(run_ahead)

    def _begin(self, create_env_fn: Any, policy: Any, *, policy_factory: Any = None, **options: Any) -> None:
        self._given = policy, policy_factory
        options.pop("weight_sync_schemes")
        self._updater = options.pop("weight_updater")
        self._total = endless(options.get("total_frames", -1))
        if self._total == math.inf:
            options["total_frames"] = 0
        # TorchRL makes a scheme of its own for a policy that it sees.
        super()._begin(create_env_fn, None, policy_factory=_unseen, **options)

    def _passed_on(self, collector_kwargs: Any) -> Any:
        self._inner_options = collector_kwargs
        return {}  # TorchRL's takes no list

    def _init_workers(self) -> None:
        if self.launcher == "submitit_delayed":
            raise ValueError(
                "DistributedSyncCollector cannot use launcher='submitit_delayed'; use DistributedCollector "
                "with sync=True"
            )
        policy, factory = self._given
        many = isinstance(factory, (list, tuple))
        self.policy, self.policy_factory = policy, list(factory) if many else [factory] * self.num_workers
        self._policy_to_send = None if any(self.policy_factory) else policy
        inner = self._inner_options
        given = [inner] * self.num_workers if isinstance(inner, dict) else inner
        completed: Any = vars(self)["collector_kwargs"]
        self.collector_kwargs = [one | more for one, more in zip(given, completed, strict=True)]
        self.total_frames = self._total
        if self._total == math.inf:
            self.total_frames_per_collector = -1
        self.weight_updater = self._updater
        super()._init_workers()

    def _arguments_of(self, idx: int) -> tuple[dict[str, Any], dict[str, Any]]:
        by_value, arguments = super()._arguments_of(idx)
        return by_value, {**arguments, "total_frames": self.total_frames_per_collector}

    def iterator(self) -> Iterator[TensorDictBase]:
        """Yield batches until ``total_frames`` frames were collected."""
        collected = batches = 0
        while collected < self.total_frames:
            if batches % self.update_interval == 0:
                self._send_all()
            data = self._gather()
            collected, batches = collected + data.numel(), batches + 1
            yield self._processed(data)

    def _ask_to_end(self) -> None:
        dist.distributed_c10d._get_default_store().set(STOP, "1")
        # A worker that is about to send a batch must be able to send it. Batches that have come are dropped.
        for idx in self._answers():
            self._asked.pop(idx, None)
        for idx in range(len(self._batches)):
            if self._nodes.alive(idx):
                self._ask(idx)


def _unseen() -> None:
    """Stand in for the policy while TorchRL's ``__init__`` runs."""
