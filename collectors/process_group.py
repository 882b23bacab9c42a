"""The workers of the two collectors over torch.distributed, whose default process group carries the data."""

from __future__ import annotations

import contextlib
import inspect
import json
from collections.abc import Callable, Iterator, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
import torchrl.collectors
from tensordict import TensorDictBase

from collectors.node_programs import EXAMPLE, STOP, describe
from collectors.single import Collector
from collectors.waiting import WaitingTimes
from collectors.workers import END_SECONDS, Arguments, Put, Workers, portable
from weight_update import LifecycleError, SyncFailedError, SyncTimeoutError, WorkerError


class GroupWorkers(Workers):
    """Workers in the default process group, in which the trainer has rank 0.

    After :meth:`form`, :meth:`expect` describes a batch to the workers.
    """

    _join = staticmethod(torch.stack)

    def __init__(self, waits: WaitingTimes) -> None:
        super().__init__(waits)
        self._in_group = False
        self._batches: Sequence[TensorDictBase] = ()  # the last one of each worker, once there is an example

    def require_alone(self) -> None:
        if dist.is_initialized():
            raise LifecycleError(
                "torch.distributed is initialized in this process, but this collector makes the default "
                "process group itself, and a process has only one; destroy that group, or shut down the "
                "collector that made it"
            )

    @contextlib.contextmanager
    def starting(self) -> Iterator[None]:
        try:
            yield
        except (SyncFailedError, SyncTimeoutError) as error:
            errors = self.nodes.errors(error.failures if isinstance(error, SyncFailedError) else ())
            if not errors:
                raise
            raise WorkerError(f"workers could not start:\n{errors}") from error

    def form(self, action: Callable[[], None]) -> None:
        self._in_group = True
        super().form(action)

    def expect(self, example: TensorDictBase) -> None:
        """Prepare for batches like ``example``; a worker that makes others ends with an error."""
        dist.distributed_c10d._get_default_store().set(EXAMPLE, json.dumps(describe(example)))
        self._batches = [example.clone().lock_() for _ in range(self.number)]

    def _request(self, idx: int, put: Put) -> None:
        parts = self._batches[idx].irecv(src=idx + 1, return_premature=True)
        while parts:
            parts.pop(0).wait()  # gloo raises RuntimeError if the other end is gone
        put(None)

    def _read(self, idx: int, arrived: Any) -> TensorDictBase:
        if arrived is not None:
            self.nodes.require_joined(idx)
            raise WorkerError(f"the connection to worker {idx} broke: {arrived}") from arrived
        return self._batches[idx].clone()

    def end(self, seconds: float) -> None:
        if self._in_group:
            self.nodes.end(self._ask_to_end, seconds)

    def _ask_to_end(self) -> None:
        """Ask workers to end; it may be called several times."""
        raise NotImplementedError

    def leave(self) -> None:
        self._await_pending(END_SECONDS)
        in_group, self._in_group = self._in_group, False
        if in_group and dist.is_initialized():
            dist.destroy_process_group()
        elif in_group:  # PyTorch counts groups that were not formed, and new workers would not
            dist.distributed_c10d._world.group_count = 0


class OnDemandWorkers(GroupWorkers):
    """Workers that run :func:`~collectors.node_programs.run_on_demand`.

    Attributes:
        store: store of TorchRL's collector, through which workers get their orders; set after :meth:`form`.
    """

    store: Any

    def _request(self, idx: int, put: Put) -> None:
        self.store.set(f"NODE_{idx + 1}_in", b"continue")
        super()._request(idx, put)

    def end(self, seconds: float) -> None:
        super().end(seconds)
        if self._in_group and self.launcher == "submitit_delayed":  # these jobs were started elsewhere
            self._ask_to_end()
            with contextlib.suppress(RuntimeError):  # a job is late or gone
                ends = [f"NODE_{idx + 1}_out" for idx in range(self.number)]
                self.store.wait(ends, timedelta(seconds=seconds))

    def _ask_to_end(self) -> None:
        self.store.set("TRAINER_status", b"shutdown")
        for idx in range(self.number):
            self.store.set(f"NODE_{idx + 1}_in", b"shutdown")


class AheadWorkers(GroupWorkers):
    """Workers that run :func:`~collectors.node_programs.run_ahead`."""

    def _ask_to_end(self) -> None:
        dist.distributed_c10d._get_default_store().set(STOP, "1")
        # A worker that is about to send a batch must be able to send it. Batches that have come are dropped.
        self._drop(self._answers())
        for idx in range(len(self._batches)):
            if self.nodes.alive(idx):
                self.ask(idx)


def program_arguments(collector: Any, frames_per_batch: int, **more: Any) -> list[Arguments]:
    """Return the arguments of each worker's program, from what TorchRL's ``__init__`` has set."""
    policy = None if any(collector.policy_factory) else collector.policy
    return [
        (
            {"policy": policy, "policy_factory": collector.policy_factory[idx]},
            {
                "rank": idx + 1,
                "ip": collector.IPAddr,
                "port": int(collector.tcp_port),
                "world_size": collector.num_workers + 1,
                "backend": collector.backend,
                "collector_class": collector.collector_class,
                "num_workers": collector.num_workers_per_collector,
                "env_make": portable(collector.env_constructors[idx]),
                "frames_per_batch": frames_per_batch,
                "collector_kwargs": collector.collector_kwargs[idx],
                **more,
            },
        )
        for idx in range(collector.num_workers)
    ]


def example_of(trainer: Any, frames_per_batch: int) -> TensorDictBase:
    """Return an example of the batches of the workers of ``trainer``, collected in this process."""
    known = set(inspect.signature(torchrl.collectors.Collector.__init__).parameters)
    known -= {"weight_recv_schemes", "weight_sync_schemes", "worker_idx"}
    options = {key: value for key, value in trainer.collector_kwargs[0].items() if key in known}
    kind, stacked = trainer.collector_class, 0
    if issubclass(kind, torchrl.collectors.MultiCollector):
        cat = trainer.collector_kwargs[0].get("cat_results")
        if issubclass(kind, torchrl.collectors.MultiSyncCollector) and cat in (None, "stack"):
            stacked = trainer.num_workers_per_collector
            frames_per_batch //= stacked
        kind = Collector
    factory = trainer.policy_factory[0]
    collector = kind(
        trainer.env_constructors[0],
        None if factory else trainer.policy,
        policy_factory=factory,
        frames_per_batch=frames_per_batch,
        total_frames=-1,
        split_trajs=False,
        **options,
    )
    try:
        batch: TensorDictBase = next(iter(collector))
        return batch.expand((stacked, *batch.shape)) if stacked else batch
    finally:
        collector.shutdown()
