"""The collector over torch.distributed.rpc."""

from __future__ import annotations

from typing import Any

import torch
import torchrl.collectors
import torchrl.collectors.distributed as torchrl_distributed
from tensordict import TensorDictBase
from torch import distributed as dist
from torch.distributed import rpc
from torchrl.data.utils import CloudpickleWrapper

from collectors.batch_request import Make
from collectors.closing import close_all
from collectors.launched import END_SECONDS, START_SECONDS, Intervals, portable
from collectors.rpc_node import join_world, leave, made, make_collector, name_of, run_node, was_in_a_world
from collectors.torchrl_names import tensorpipe_options
from weight_update import LifecycleError, RPCWeightSyncScheme, WeightSyncError, WorkerError

_OF_WORKER = "On WorkerInfo("
"""Part of the message of an error that a worker raised, as opposed to one of its connection."""


class RPCCollector(Intervals, torchrl_distributed.RPCCollector):
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

    def _begin(self, create_env_fn: Any, policy: Any, **options: Any) -> None:
        self.collector_infos: list[Any] = []
        self.collector_rrefs: list[Any] = []
        self._made: list[Any] = []
        self._given_options = options.pop("tensorpipe_options", None) or {}
        super()._begin(create_env_fn, policy, **options)
        self._weight_sync_schemes = self._schemes or None
        self._connect()

    def _require_alone(self) -> None:
        if was_in_a_world():
            raise LifecycleError(
                "this process is or was in a world of torch.distributed.rpc, and PyTorch cannot bring it "
                "into a new one with the workers of this collector; make one RPCCollector in each process"
            )

    # -- start -------------------------------------------------------------------------------------

    def _init(self) -> None:
        self.tensorpipe_options = {**tensorpipe_options, **self._given_options}
        super()._init()

    def _init_worker_rpc(self, executor: Any, i: int) -> Any:
        arguments = {
            "idx": i,
            "address": self.IPAddr,
            "port": int(self.tcp_port),
            "world_size": self.num_workers + 1,
            "devices": None if self.visible_devices is None else self.visible_devices[i],
            "options": self.tensorpipe_options,
            "end_seconds": END_SECONDS,
        }
        if self.launcher == "mp":
            return self._nodes.start(run_node, {}, **arguments)
        if self.launcher == "submitit":
            return self._nodes.submit(executor, run_node, **arguments)
        return super()._init_worker_rpc(executor, i)

    def _init_master_rpc(self, world_size: int) -> None:
        self._nodes.await_ready(START_SECONDS)
        if self.launcher == "submitit_delayed":  # TorchRL's program waits there and makes a process group
            self._in_group = True
            super()._init_master_rpc(world_size)
            return
        options = rpc.TensorPipeRpcBackendOptions(
            init_method=f"tcp://{self.IPAddr}:{self.tcp_port}", **self.tensorpipe_options
        )
        if torch.cuda.is_available() and self.visible_devices:
            for idx, device in enumerate(self.visible_devices):
                options.set_device_map(name_of(idx), {0: device})
        join_world("TRAINER_NODE", 0, world_size, options)

    def _start_workers(self, **given: Any) -> None:
        # Schemes of RPC call the workers' collectors, others travel to them.
        self._initialize(*(one for one in self._schemes.values() if not isinstance(one, RPCWeightSyncScheme)))
        self.collector_infos = [rpc.get_worker_info(name_of(idx)) for idx in range(self.num_workers)]
        self.collector_rrefs = [self._make(idx, **given) for idx in range(self.num_workers)]
        self._made = [
            rpc.rpc_async(info, made, args=(rref,), timeout=START_SECONDS)
            for info, rref in zip(self.collector_infos, self.collector_rrefs, strict=True)
        ]
        self.futures = ()  # TorchRL's list of pending calls

    def _connect(self) -> None:
        """Connect the schemes while workers create their collectors, which may wait for the first weights."""
        try:
            self._initialize(*self._schemes.values())
            self._connect_schemes()
        except WeightSyncError as error:
            errors = self._errors(wait=False)
            if not errors:
                raise
            raise WorkerError(f"workers could not start:\n{errors}") from error
        if errors := self._errors(wait=True):
            raise WorkerError(f"workers could not start:\n{errors}")

    def _errors(self, *, wait: bool) -> str:
        """Return the errors of workers whose collectors could not be created."""
        ended = [(idx, future) for idx, future in enumerate(self._made) if wait or future.done()]
        return "\n".join(f"worker {idx}: {why}" for idx, future in ended if (why := _error_of(future)))

    def _make(
        self,
        idx: int,
        *,
        env_constructors: Any,
        collector_class: Any,
        num_workers_per_collector: int,
        policy: Any,
        policy_factory: Any,
        frames_per_batch: int,
        collector_kwargs: Any,
        **unused: Any,
    ) -> Any:
        env, factory = portable(env_constructors[idx]), policy_factory[idx]
        single = issubclass(collector_class, torchrl.collectors.Collector)
        options = {
            "policy": None if factory is not None and self._schemes else policy,
            "policy_factory": None if factory is None else CloudpickleWrapper(factory),
            "frames_per_batch": frames_per_batch,
            "total_frames": -1,
            "split_trajs": False,
            "worker_idx": idx,
            **({"weight_recv_schemes": self._schemes} if self._schemes else {}),
            **collector_kwargs[idx],
        }
        several = 0 if single else num_workers_per_collector
        return rpc.remote(
            self.collector_infos[idx],
            make_collector,
            args=(collector_class, env, several, options),
            timeout=START_SECONDS,
        )

    def _worker_alive(self, worker_idx: int) -> bool:
        future = self._made[worker_idx] if worker_idx < len(self._made) else None
        failed = future is not None and future.done() and _error_of(future) is not None
        return super()._worker_alive(worker_idx) and not failed

    # -- data --------------------------------------------------------------------------------------

    def _request(self, idx: int) -> Make:
        rref = self.collector_rrefs[idx]
        return lambda put: rref.rpc_async().next().then(put)

    def _read(self, idx: int, arrived: Any) -> TensorDictBase:
        error = str(arrived) if isinstance(arrived, Exception) else _error_of(arrived)
        if error is not None:
            if _OF_WORKER not in error:
                self._nodes.require_joined(idx)
            raise WorkerError(f"worker {idx} could not collect: {error}")
        data: TensorDictBase = arrived.value()
        return data

    def set_seed(self, seed: int, static_seed: bool = False) -> int:
        """Seed the environments of all workers, and return the next seed."""
        self._require_open()
        for rref in self.collector_rrefs:
            seed = rref.rpc_sync().set_seed(seed, static_seed)
        return seed

    # -- end ---------------------------------------------------------------------------------------

    def _end_workers(self, seconds: float) -> None:
        self._shutdown = True
        if not _in_world():
            return
        self._await_pending(seconds)
        ends = [
            rref.rpc_async(timeout=END_SECONDS).shutdown()
            for idx, rref in enumerate(self.collector_rrefs)
            if self._nodes.alive(idx) and idx not in self._pending
        ]
        well = not any(map(_error_of, ends)) and not self._pending
        # Workers that leave wait for all others; without one of these they print an error.
        if well and all(map(self._nodes.alive, range(self.num_workers))):
            for info in self.collector_infos:
                rpc.rpc_async(info, leave)
            rpc.shutdown(graceful=True, timeout=int(END_SECONDS))
            self._nodes.end(lambda: None, END_SECONDS)

    def _give_up(self) -> None:
        self._shutdown = True
        close_all(self._nodes.kill, self._leave_world, self._end_schemes)

    def _leave_world(self) -> None:
        self.collector_rrefs = []
        self._asked.clear()
        if _in_world():
            rpc.shutdown(graceful=False)
        if self._in_group and dist.is_initialized():
            dist.destroy_process_group()


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
