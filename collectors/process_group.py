"""The common base of the two collectors over torch.distributed."""

from __future__ import annotations

import inspect
import json
import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
import torchrl.collectors
from tensordict import TensorDictBase

from collectors.batch_request import Make
from collectors.closing import close_all
from collectors.launched import END_SECONDS, START_SECONDS, Launched, portable
from collectors.node_programs import EXAMPLE, describe
from collectors.single import Collector
from weight_update import (
    DistributedWeightSyncScheme,
    LifecycleError,
    SyncFailedError,
    SyncTimeoutError,
    WorkerError,
)


class ProcessGroupCollector(Launched):
    """A mixin for TorchRL's classes, whose default process group carries the data; placed before them.

    TorchRL starts the workers and the group without schemes. The workers' collectors get our schemes as
    ``weight_recv_schemes``, and the schemes connect when all workers have started.
    """

    _scheme_class = DistributedWeightSyncScheme
    _join = staticmethod(torch.stack)
    _batches: Sequence[TensorDictBase] = ()  # the last one of each worker, once there is an example
    _program: Callable[..., None]
    """Program of a worker; see :mod:`collectors.node_programs`."""

    first_worker_idx = 0
    """Index of the first worker, whose rank is 1."""

    def _begin(self, create_env_fn: Any, policy: Any, **options: Any) -> None:
        try:
            super()._begin(create_env_fn, policy, **options)
            self._connect_schemes()
        except (SyncFailedError, SyncTimeoutError) as error:
            errors = self._nodes.errors(error.failures if isinstance(error, SyncFailedError) else ())
            if not errors:
                raise
            raise WorkerError(f"workers could not start:\n{errors}") from error

    def _require_alone(self) -> None:
        if dist.is_initialized():
            raise LifecycleError(
                "torch.distributed is initialized in this process, but this collector makes the default "
                "process group itself, and a process has only one; destroy that group, or shut down the "
                "collector that made it"
            )

    # -- start -------------------------------------------------------------------------------------

    def _init_workers(self) -> None:
        self._initialize(*self._schemes.values())
        for idx, options in enumerate(self.collector_kwargs):
            options["worker_idx"] = idx
            if self._schemes:
                options["weight_recv_schemes"] = self._schemes
        self._weight_sync_schemes = None  # otherwise TorchRL would pass them to the workers in its own way
        super()._init_workers()
        self._weight_sync_schemes = self._schemes or None

    def _init_worker_dist_mp(self, idx: int) -> Any:
        by_value, arguments = self._arguments_of(idx)
        return self._nodes.start(self._program, by_value, **arguments)

    def _init_worker_dist_submitit(self, executor: Any, idx: int) -> Any:
        by_value, arguments = self._arguments_of(idx)
        return self._nodes.submit(executor, self._program, **by_value, **arguments)

    def _init_master_dist(self, world_size: int, backend: str) -> None:
        self._nodes.await_ready(START_SECONDS)
        self._in_group = True
        form_group = partial(super()._init_master_dist, world_size, backend)
        # By itself it waits for 1,000 days. Jobs may wait for their hosts.
        self._nodes.attend(form_group, START_SECONDS if self.launcher == "mp" else math.inf)

    def _arguments_of(self, idx: int) -> tuple[dict[str, Any], dict[str, Any]]:
        """Return the arguments of a worker's program: those by value, and the others."""
        return {"policy": self._policy_to_send, "policy_factory": self.policy_factory[idx]}, {
            "rank": idx + 1,
            "ip": self.IPAddr,
            "port": int(self.tcp_port),
            "world_size": self.num_workers + 1,
            "backend": self.backend,
            "collector_class": self.collector_class,
            "num_workers": self.num_workers_per_collector,
            "env_make": portable(self.env_constructors[idx]),
            "frames_per_batch": self._frames_per_batch_corrected,
            "collector_kwargs": self.collector_kwargs[idx],
        }

    # -- data --------------------------------------------------------------------------------------

    def _make_container(self) -> None:
        example = self._example()
        dist.distributed_c10d._get_default_store().set(EXAMPLE, json.dumps(describe(example)))
        self._batches = [example.clone().lock_() for _ in range(self.num_workers)]

    def _example(self) -> TensorDictBase:
        """Return an example batch, collected in this process."""
        known = set(inspect.signature(torchrl.collectors.Collector.__init__).parameters)
        known -= {"weight_recv_schemes", "weight_sync_schemes", "worker_idx"}
        options = {key: value for key, value in self.collector_kwargs[0].items() if key in known}
        kind, frames, stacked = self.collector_class, self._frames_per_batch_corrected, 0
        if issubclass(kind, torchrl.collectors.MultiCollector):
            cat = self.collector_kwargs[0].get("cat_results")
            if issubclass(kind, torchrl.collectors.MultiSyncCollector) and cat in (None, "stack"):
                stacked = self.num_workers_per_collector
                frames //= stacked
            kind = Collector
        factory = self.policy_factory[0]
        collector = kind(
            self.env_constructors[0],
            None if factory else self.policy,
            policy_factory=factory,
            frames_per_batch=frames,
            total_frames=-1,
            split_trajs=False,
            **options,
        )
        try:
            batch: TensorDictBase = next(iter(collector))
            return batch.expand((stacked, *batch.shape)) if stacked else batch
        finally:
            collector.shutdown()

    def _request(self, idx: int) -> Make:
        return partial(_receive, self._batches[idx], idx + 1)

    def _read(self, idx: int, arrived: Any) -> TensorDictBase:
        if arrived is not None:
            self._nodes.require_joined(idx)
            raise WorkerError(f"the connection to worker {idx} broke: {arrived}") from arrived
        return self._batches[idx].clone()

    def set_seed(self, seed: int, static_seed: bool = False) -> int:
        """Raise NotImplementedError: the programs of the workers take no seed."""
        raise NotImplementedError(
            f"{type(self).__name__} cannot seed its workers; seed each environment in create_env_fn"
        )

    # -- end ---------------------------------------------------------------------------------------

    def _ask_to_end(self) -> None:
        """Ask workers to end; it may be called several times."""
        raise NotImplementedError

    def _end_workers(self, seconds: float) -> None:
        if self._in_group:
            self._nodes.end(self._ask_to_end, seconds)

    def _give_up(self) -> None:
        close_all(self._nodes.kill, self._end_schemes, self._leave_group)

    def _leave_group(self) -> None:
        self._await_pending(END_SECONDS)
        in_group, self._in_group = self._in_group, False
        if in_group and dist.is_initialized():
            dist.destroy_process_group()
        elif in_group:  # PyTorch counts groups that were not formed, and new workers would not
            dist.distributed_c10d._world.group_count = 0


def _receive(batch: TensorDictBase, rank: int, put: Callable[[None], None]) -> None:
    """Wait for a batch of a worker; gloo raises RuntimeError if the other end is gone."""
    parts = batch.irecv(src=rank, return_premature=True)
    while parts:
        parts.pop(0).wait()
    put(None)
