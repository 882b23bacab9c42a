"""The collector over torch.distributed.rpc, and its workers."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import torch
import torchrl.collectors
import torchrl.collectors.distributed as torchrl_distributed
from tensordict import TensorDictBase
from torch import distributed as dist
from torch.distributed import rpc
from torchrl.data.utils import CloudpickleWrapper

from collectors.launched import Launched
from collectors.rpc_node import join_world, leave, made, make_collector, name_of, run_node, was_in_a_world
from collectors.torchrl_names import tensorpipe_options
from collectors.updates import close_all
from collectors.waiting import WaitingTimes
from collectors.workers import END_SECONDS, START_SECONDS, Arguments, Put, Workers, portable
from weight_update import LifecycleError, RPCWeightSyncScheme, WeightSyncError, WorkerError

_OF_WORKER = "On WorkerInfo("
"""Part of the message of an error that a worker raised, as opposed to one of its connection."""


class RPCWorkers(Workers):
    """Workers in an RPC world, in which each has a collector.

    After :meth:`form`, :meth:`make_collectors` makes the collectors.

    Attributes:
        infos: workers of the RPC world, by index.
        rrefs: references to their collectors, by index.
    """

    def __init__(self, waits: WaitingTimes) -> None:
        super().__init__(waits)
        self.infos: list[Any] = []
        self.rrefs: list[Any] = []
        self._made: list[Any] = []  # calls that end when a collector is made
        self._in_group = False

    # -- start -------------------------------------------------------------------------------------

    def require_alone(self) -> None:
        if was_in_a_world():
            raise LifecycleError(
                "this process is or was in a world of torch.distributed.rpc, and PyTorch cannot bring it "
                "into a new one with the workers of this collector; make one RPCCollector in each process"
            )

    @contextlib.contextmanager
    def starting(self) -> Iterator[None]:
        """Wait for the collectors at the end: they may wait for the first weights."""
        try:
            yield
        except WeightSyncError as error:
            errors = self._errors(wait=False)
            if not errors:
                raise
            raise WorkerError(f"workers could not start:\n{errors}") from error
        if errors := self._errors(wait=True):
            raise WorkerError(f"workers could not start:\n{errors}")

    def form(self, action: Callable[[], None]) -> None:
        self._in_group = self.launcher == "submitit_delayed"  # TorchRL makes a process group, too
        super().form(action)

    def make_collectors(self, cls: Any, envs: Sequence[Any], several: int, options: Sequence[Any]) -> None:
        """Have each worker make its collector, of ``several`` environments if that is not 0."""
        self.infos = [rpc.get_worker_info(name_of(idx)) for idx in range(self.number)]
        self.rrefs = [
            rpc.remote(info, make_collector, args=(cls, env, several, one), timeout=START_SECONDS)
            for info, env, one in zip(self.infos, envs, options, strict=True)
        ]
        self._made = [
            rpc.rpc_async(info, made, args=(rref,), timeout=START_SECONDS)
            for info, rref in zip(self.infos, self.rrefs, strict=True)
        ]

    def _errors(self, *, wait: bool) -> str:
        """Return the errors of workers whose collectors could not be created."""
        ended = [(idx, future) for idx, future in enumerate(self._made) if wait or future.done()]
        return "\n".join(f"worker {idx}: {why}" for idx, future in ended if (why := _error_of(future)))

    def alive(self, idx: int) -> bool:
        future = self._made[idx] if idx < len(self._made) else None
        failed = future is not None and future.done() and _error_of(future) is not None
        return super().alive(idx) and not failed

    # -- data --------------------------------------------------------------------------------------

    def _request(self, idx: int, put: Put) -> None:
        self.rrefs[idx].rpc_async().next().then(put)

    def _read(self, idx: int, arrived: Any) -> TensorDictBase:
        error = str(arrived) if isinstance(arrived, Exception) else _error_of(arrived)
        if error is not None:
            if _OF_WORKER not in error:
                self.nodes.require_joined(idx)
            raise WorkerError(f"worker {idx} could not collect: {error}")
        data: TensorDictBase = arrived.value()
        return data

    # -- end ---------------------------------------------------------------------------------------

    def end(self, seconds: float) -> None:
        if not _in_world():
            return
        self._await_pending(seconds)
        ends = [
            rref.rpc_async(timeout=END_SECONDS).shutdown()
            for idx, rref in enumerate(self.rrefs)
            if self.nodes.alive(idx) and idx not in self._pending
        ]
        well = not any(map(_error_of, ends)) and not self._pending
        # Workers that leave wait for all others; without one of these they print an error.
        if well and all(map(self.nodes.alive, range(self.number))):
            for info in self.infos:
                rpc.rpc_async(info, leave)
            rpc.shutdown(graceful=True, timeout=int(END_SECONDS))
            self.nodes.end(lambda: None, END_SECONDS)

    def kill(self) -> None:
        """End all workers at once, and leave the world."""
        close_all(super().kill, self._leave_world)

    def _leave_world(self) -> None:
        self.rrefs.clear()
        self._asked.clear()
        if _in_world():
            rpc.shutdown(graceful=False)
        if self._in_group and dist.is_initialized():
            dist.destroy_process_group()


class RPCCollector(Launched, torchrl_distributed.RPCCollector):
    """TorchRL's ``RPCCollector``, whose workers run our collectors.

    It needs no process group: with ``launcher="mp"`` or ``"submitit"`` it makes none, and an existing one is
    left alone. Arguments that are not listed here are those of :class:`DistributedCollector`.

    Args:
        weight_sync_schemes: schemes by model id; None for a :class:`~weight_update.RPCWeightSyncScheme` if
            the policy has weights. They are shut down with the collector.
        tcp_port: port of the rendezvous; None for the environment's ``TCP_PORT``, or else for a free one with
            ``launcher="mp"`` and for 10003 with the others.

    Raises:
        WorkerError: workers could not start. Also raised while iterating, when a worker fails or ends.
        LifecycleError: this process is or was in an RPC world; PyTorch allows only one.
    """

    _scheme_class = RPCWeightSyncScheme
    _workers_class = RPCWorkers
    _workers: RPCWorkers

    def _begin(self, create_env_fn: Any, policy: Any, **options: Any) -> None:
        self._given_options = options.pop("tensorpipe_options", None) or {}
        super()._begin(create_env_fn, policy, **options)

    def _init(self) -> None:
        self.tensorpipe_options = {**tensorpipe_options, **self._given_options}
        self._announce()
        arguments: list[Arguments] = [({}, self._arguments_of(idx)) for idx in range(self.num_workers)]
        self.jobs = self._workers.launch(self.launcher, self.slurm_kwargs, run_node, arguments)
        delayed = partial(self._init_master_rpc, self.num_workers + 1)  # TorchRL's program waits there
        self._workers.form(delayed if self.launcher == "submitit_delayed" else self._join_world)
        # Schemes of RPC call the workers' collectors, others travel to them.
        schemes = self._updates.schemes.items()
        self._initialize({key: one for key, one in schemes if not isinstance(one, RPCWeightSyncScheme)})
        single = issubclass(self.collector_class, torchrl.collectors.Collector)
        self._workers.make_collectors(
            self.collector_class,
            list(map(portable, self.env_constructors)),
            0 if single else self.num_workers_per_collector,
            [self._inner_options(idx) for idx in range(self.num_workers)],
        )
        self.collector_infos, self.collector_rrefs = self._workers.infos, self._workers.rrefs

    def _arguments_of(self, idx: int) -> dict[str, Any]:
        """Return the arguments of the program of a worker."""
        return {
            "idx": idx,
            "address": self.IPAddr,
            "port": int(self.tcp_port),
            "world_size": self.num_workers + 1,
            "devices": None if self.visible_devices is None else self.visible_devices[idx],
            "options": self.tensorpipe_options,
            "end_seconds": END_SECONDS,
        }

    def _join_world(self) -> None:
        options = rpc.TensorPipeRpcBackendOptions(
            init_method=f"tcp://{self.IPAddr}:{self.tcp_port}", **self.tensorpipe_options
        )
        if torch.cuda.is_available() and self.visible_devices:
            for idx, device in enumerate(self.visible_devices):
                options.set_device_map(name_of(idx), {0: device})
        join_world("TRAINER_NODE", 0, self.num_workers + 1, options)

    def _inner_options(self, idx: int) -> dict[str, Any]:
        """Return the options of the collector of a worker."""
        factory = self.policy_factory[idx]
        return {
            "policy": None if factory is not None and self._updates.schemes else self.policy,
            "policy_factory": None if factory is None else CloudpickleWrapper(factory),
            "frames_per_batch": self._frames_per_batch_corrected,
            "total_frames": -1,
            "split_trajs": False,
            **self.collector_kwargs[idx],
        }

    def _update_between(self, batches: int, workers: list[int]) -> None:
        self._update_stale()

    def set_seed(self, seed: int, static_seed: bool = False) -> int:
        """Seed the environments of all workers, and return the next seed."""
        self._updates.require_open()
        for rref in self.collector_rrefs:
            seed = rref.rpc_sync().set_seed(seed, static_seed)
        return seed


def _error_of(future: Any) -> str | None:
    """Wait for the end of a call of a worker, and return its error or None."""
    try:
        future.wait()
    except Exception as error:  # noqa: BLE001 - the worker's error may have any type; it is reported to the caller
        return f"{type(error).__name__}: {error}"
    return None


def _in_world() -> bool:
    try:
        rpc.get_worker_info()
    except RuntimeError:
        return False
    return True
