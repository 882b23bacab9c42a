"""The workers of a trainer, whichever library it uses, and the model that travels to them."""

from __future__ import annotations

import functools
import math
import os
import socket
import time
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from tensordict import TensorDict, TensorDictBase
from torch import nn

from benchmarks.network import Network
from benchmarks.processes import Place, Process, close_all

LOOPBACK = "127.0.0.1"
_WIDTH = 16  # of the one layer that computes: 16 x 16 float32 is 1 KB, so that 5,000 tensors are 5 MB
_LAYER = 12  # tensors of a layer of a transformer: weights and biases in turns, 12 KB in all
_LAYERS = 8  # times that it is applied, for a forward pass of about 50 microseconds


class Model(nn.Module):
    """A small layer that computes, and parameters beside it that only travel.

    The worker's forward pass then takes some tens of microseconds at every size, and a pause of less
    than a millisecond can be seen.

    Args:
        megabytes: size of all tensors together, in units of a million bytes.
        tensors: number of tensors, at least 2.
        layered: whether the parameters are those of a transformer of about that many tensors, whatever its
            size, instead of one list.
    """

    def __init__(self, megabytes: float, tensors: int, layered: bool = False) -> None:
        super().__init__()
        self.first = nn.Linear(_WIDTH, _WIDTH, bias=False)
        self.rest: nn.Module
        if layered:
            layers = [nn.TransformerEncoderLayer(_WIDTH, 2, 56) for _ in range(max(1, tensors // _LAYER))]
            self.rest = nn.ModuleList(layers)
            return
        each = math.ceil((megabytes * 1e6 / 4 - _WIDTH**2) / (tensors - 1))
        # Not written to: pages that nobody touched cost no memory in a worker.
        rest = [nn.Parameter(torch.empty(max(each, 1))) for _ in range(tensors - 1)]
        self.rest = nn.ParameterList(rest)

    def forward(self, value: torch.Tensor) -> torch.Tensor:
        for _ in range(_LAYERS):
            value = self.first(value)
        return value

    def marks(self) -> tuple[float, float]:
        """Return the first element of the first and of the last tensor; see :func:`mark`."""
        *_, last = self.parameters()
        return float(self.first.weight.detach().flatten()[0]), float(last.detach().flatten()[0])


def fill(model: Model) -> TensorDictBase:
    """Return the model's own weights, with every byte written."""
    weights: TensorDictBase = TensorDict.from_module(model).data
    for value in weights.values(True, True):
        value.fill_(0.5)
    return weights


def mark(weights: TensorDictBase, number: float) -> None:
    """Write ``number`` where :meth:`Model.marks` reads it, so that an update can be recognized."""
    weights["first", "weight"].flatten()[0] = number
    last: TensorDictBase = weights["rest"]
    while isinstance(last, TensorDictBase):
        last = last[list(last.keys())[-1]]
    last.flatten()[0] = number


@dataclass(frozen=True)
class Case:
    """The model and the workers of one trainer.

    Attributes:
        megabytes: size of the model.
        tensors: number of its tensors.
        workers: number of receiving processes.
        descriptors: limit of open files of each process; None leaves it as it is.
        start: start method of the trainer: ``"spawn"``, or ``"forkserver"``, which imports only once.
        ray: address of the running Ray, for schemes that use it.
        network: hosts ``"trainer"`` and ``"worker"``, where the processes run; None for this machine.
        layered: whether the model is a transformer, and a sender of ours is given the module itself; that of
            TorchRL is given a TensorDict of it that was made before.
    """

    megabytes: float
    tensors: int = 16
    workers: int = 1
    descriptors: int | None = None
    start: str = "spawn"
    ray: str | None = None
    network: Network | None = None
    layered: bool = False

    @property
    def size(self) -> str:
        """Size of the model, for the progress of a run."""
        return f"{self.megabytes:g} MB in {self.tensors} tensors"

    @property
    def model(self) -> tuple[float, int, bool]:
        """Arguments of :class:`Model`."""
        return self.megabytes, self.tensors, self.layered

    @property
    def address(self) -> str:
        """Address of the trainer."""
        return LOOPBACK if self.network is None else self.network.address["trainer"]

    @property
    def enter(self) -> Callable[[], None] | None:
        """Function that moves a worker to its host; None if there is no such network."""
        return None if self.network is None else functools.partial(self.network.enter, "worker")


class Worker:
    """A worker; like a collector, it gives its scheme the policy and takes calls of the sender.

    Args:
        idx: index from 0.
        model: arguments of :class:`Model`.
    """

    def __init__(self, idx: int, model: tuple[float, int, bool]) -> None:
        torch.set_num_threads(1)
        self.worker_idx = idx
        self.policy = Model(*model)
        self._scheme: Any = None

    def join(self, scheme: Any, number: int, **where: Any) -> None:
        """Connect as worker ``number``.

        Args:
            scheme: as it came from the sender.
            number: index or rank of this worker.
            where: argument of ``init_on_receiver`` that leads to the model; by default ``context=self``.
        """
        self._scheme = scheme
        scheme.init_on_receiver(model_id="policy", worker_idx=number, **(where or {"context": self}))
        scheme.connect(worker_idx=number)

    def marks(self) -> tuple[float, float]:
        """Return :meth:`Model.marks` of the policy."""
        return self.policy.marks()

    def close(self) -> None:
        self._scheme.shutdown()

    def _receive_weights_scheme(self) -> None:
        """Receive; TorchRL's sender calls this by RPC or Ray."""
        self._scheme.receive()


@dataclass
class Passes:
    """The forward passes of a worker that computes.

    Attributes:
        starts: starting times in seconds of the machine's monotonic clock, the same in every process.
        versions: version of the scheme before each pass; empty if it has no versions.
    """

    starts: list[float]
    versions: list[int]


class SpawnedWorker(Worker):
    """A worker that connects as soon as its process starts, and that can compute.

    Args:
        scheme: as it came from the sender.
        idx: index from 0.
        model: arguments of :class:`Model`.
        recording: shared integer; 1 while forward passes are to be recorded, 2 afterwards.
    """

    def __init__(self, scheme: Any, idx: int, model: tuple[float, int, bool], recording: Any) -> None:
        super().__init__(idx, model)
        self._recording = recording
        self.join(scheme, idx, model=self.policy)

    def compute(self) -> Passes:
        """Run forward passes without pause until ``recording`` is 2, and record those while it is 1."""
        value = torch.ones(1, _WIDTH)
        counts = hasattr(type(self._scheme), "version")
        scheme, model, recording = self._scheme, self.policy, self._recording
        starts: list[float] = []
        versions: list[int] = []
        with torch.no_grad():
            while recording.value == 0:
                model(value)
            while recording.value == 1:
                starts.append(time.perf_counter())
                if counts:
                    versions.append(scheme.version)
                model(value)
        return Passes(starts, versions)


_PATIENCE = 60.0  # seconds for one step of connecting, or one answer of an actor
_LEAVING = 2.0  # seconds; TorchRL's workers may not end by themselves

_here: list[Worker] = []
Marks = list[tuple[float, float]]


def _this_worker() -> Worker:
    """Return the worker of this process."""
    return _here[0]


def _forked_worker(idx: int, model: tuple[float, int, bool], world: int | None) -> Worker:
    """Return a worker that gets its scheme later; with ``world``, it enters a world of so many processes."""
    _here.append(Worker(idx, model))
    if world is not None:
        enter_world(idx + 1, world)
    return _here[0]


def enter_world(rank: int, size: int) -> None:
    """Join the default process group and the RPC world, as TorchRL's collectors do."""
    from torch.distributed import rpc

    dist.init_process_group("gloo", rank=rank, world_size=size, timeout=timedelta(seconds=_PATIENCE))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # PyTorch warns about what it does itself
        rpc.init_rpc(
            f"worker{rank}",
            rank=rank,
            world_size=size,
            rpc_backend_options=rpc.TensorPipeRpcBackendOptions(
                init_method=f"tcp://127.0.0.1:{os.environ['RPC_PORT']}", rpc_timeout=_PATIENCE
            ),
        )


class Workers:
    """Workers that are processes of this machine.

    Attributes:
        context: attributes that a scheme looks for in its context, the sender.
    """

    def __init__(self, processes: Sequence[Process]) -> None:
        self.context: dict[str, Any] = {}
        self._processes = processes

    def connect(self, scheme: Any) -> None:
        """Connect all workers with the initialized sender."""
        scheme.connect()
        self._answers()

    def pids(self) -> list[int]:
        """Return the process ids of the workers."""
        return [process.pid for process in self._processes]

    def ask_first(self, method: str) -> Callable[[], Any]:
        """Call a method of the first worker, and return a function that waits for the result."""
        self._processes[0].send(method)
        return self._processes[0].answer

    def marks(self) -> Marks:
        """Return :meth:`Model.marks` of each worker."""
        for process in self._processes:
            process.send("marks")
        return self._answers()

    def _answers(self) -> list[Any]:
        return [process.answer() for process in self._processes]

    def end(self) -> None:
        """Tell the workers to end, without waiting for them."""
        for process in self._processes:
            process.end()

    def close(self) -> None:
        close_all(self._processes, _LEAVING)


class ForkedWorkers(Workers):
    """Workers that are forked; start them before any thread.

    Args:
        case: model and number of workers, and their host.
        first: number of the first worker: its rank with TorchRL's scheme, its index with ours.
        apart: whether each worker counts as a host of its own.
        world: number of processes of the world to enter; None for no world.
    """

    def __init__(self, case: Case, first: int = 0, apart: bool = False, world: int | None = None) -> None:
        self._first = first
        os.environ |= {"MASTER_ADDR": case.address, "MASTER_PORT": _free_port(), "RPC_PORT": _free_port()}
        places = [Place(f"host{idx}" if apart else None, case.enter) for idx in range(case.workers)]
        super().__init__(
            [
                Process(_forked_worker, idx, case.model, world, start="fork", place=place)
                for idx, place in enumerate(places)
            ]
        )

    def connect(self, scheme: Any) -> None:
        self._answers()
        self._hand_out(scheme)
        super().connect(scheme)

    def _hand_out(self, scheme: Any) -> None:
        for number, process in enumerate(self._processes, self._first):
            process.send("join", scheme, number)


class World(ForkedWorkers):
    """Processes of one RPC world and one default process group, with the sender as rank 0."""

    def __init__(self, case: Case) -> None:
        from torch.distributed import rpc

        size = case.workers + 1
        super().__init__(case, world=size)
        enter_world(0, size)
        infos = [rpc.get_worker_info(f"worker{rank}") for rank in range(1, size)]
        rrefs = [rpc.remote(info, _this_worker) for info in infos]
        self.context = {"collector_class": Worker, "collector_infos": infos, "collector_rrefs": rrefs}

    def _hand_out(self, scheme: Any) -> None:
        # TorchRL's scheme cannot be pickled any more when it knows the workers.
        super()._hand_out(type(scheme)())


class Actors:
    """Workers that are Ray actors; if ``apart``, each counts as a host of its own."""

    def __init__(self, case: Case, apart: bool) -> None:
        import ray

        ray.init(address=case.ray, log_to_driver=False, logging_level="error")
        self._ray = ray
        make = ray.remote(Worker).options
        hosts = [{"WEIGHT_UPDATE_HOST": f"host{idx}"} if apart else {} for idx in range(case.workers)]
        self._actors = [
            make(num_cpus=0, runtime_env={"env_vars": host}).remote(idx, case.model)
            for idx, host in enumerate(hosts)
        ]
        self.context = {"remote_collectors": self._actors}

    def connect(self, scheme: Any) -> None:
        """Connect all workers with the initialized sender."""
        calls = [actor.join.remote(scheme, idx) for idx, actor in enumerate(self._actors)]
        scheme.connect()
        self._ray.get(calls, timeout=_PATIENCE)

    def marks(self) -> Marks:
        """Return :meth:`Model.marks` of each worker."""
        marks: Marks = self._ray.get([actor.marks.remote() for actor in self._actors], timeout=_PATIENCE)
        return marks

    def close(self) -> None:
        calls = [actor.close.remote() for actor in self._actors]
        self._ray.wait(calls, num_returns=len(calls), timeout=_LEAVING)
        self._ray.shutdown()


def _free_port() -> str:
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        return str(sock.getsockname()[1])
