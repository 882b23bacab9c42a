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

from collectors.node_programs import EXAMPLE, describe, make_collector
from collectors.single import Collector
from collectors.waiting import WaitingTimes
from collectors.workers import END_SECONDS, Put, Workers
from weight_update import LifecycleError, SyncFailedError, SyncTimeoutError, WorkerError


class GroupWorkers(Workers):
    """Workers in the default process group, in which the trainer has rank 0.

    They run :func:`~collectors.node_programs.run_on_demand`. After :meth:`launch`, :meth:`form` makes the
    group, and :meth:`expect` describes a batch to the workers.

    Attributes:
        store: store of TorchRL's collector, through which workers get their orders; set after :meth:`form`.
    """

    store: Any

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

    def form(self, form: Callable[[], None]) -> None:
        self._in_group = True
        super().form(form)

    def expect(self, example: TensorDictBase) -> None:
        """Prepare for batches like ``example``; a worker that makes others ends with an error."""
        dist.distributed_c10d._get_default_store().set(EXAMPLE, json.dumps(describe(example)))
        self._batches = [example.clone().lock_() for _ in range(self.number)]

    def _request(self, idx: int, put: Put) -> None:
        self.store.set(f"NODE_{idx + 1}_in", b"continue")
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
        if not self._in_group:
            return
        self.nodes.end(self._ask_to_end, seconds)
        if self.launcher == "submitit_delayed":  # these jobs were started elsewhere
            self._ask_to_end()
            with contextlib.suppress(RuntimeError):  # a job is late or gone
                ends = [f"NODE_{idx + 1}_out" for idx in range(self.number)]
                self.store.wait(ends, timedelta(seconds=seconds))

    def _ask_to_end(self) -> None:
        """Ask workers to end; it may be called several times."""
        self.store.set("TRAINER_status", b"shutdown")
        for idx in range(self.number):
            self.store.set(f"NODE_{idx + 1}_in", b"shutdown")

    def leave(self) -> None:
        self._await_asked(END_SECONDS)
        in_group, self._in_group = self._in_group, False
        if in_group and dist.is_initialized():
            dist.destroy_process_group()
        elif in_group:  # PyTorch counts groups that were not formed, and new workers would not
            dist.distributed_c10d._world.group_count = 0


def example_of(trainer: Any) -> TensorDictBase:
    """Return an example of the batches of the workers of ``trainer``, collected in this process."""
    inner = trainer._inner_arguments(0) | {"num_workers": 1}
    kind, given, stacked = inner["collector_class"], inner["collector_kwargs"], 0
    known = set(inspect.signature(torchrl.collectors.Collector.__init__).parameters)
    known -= {"weight_recv_schemes", "weight_sync_schemes", "worker_idx"}
    inner["collector_kwargs"] = {key: value for key, value in given.items() if key in known}
    if issubclass(kind, torchrl.collectors.MultiCollector):
        cat = given.get("cat_results")
        if issubclass(kind, torchrl.collectors.MultiSyncCollector) and cat in (None, "stack"):
            stacked = trainer.num_workers_per_collector
            inner["frames_per_batch"] //= stacked
        inner["collector_class"] = Collector
    collector = make_collector(**inner)
    try:
        batch: TensorDictBase = next(iter(collector))
        return batch.expand((stacked, *batch.shape)) if stacked else batch
    finally:
        collector.shutdown()
