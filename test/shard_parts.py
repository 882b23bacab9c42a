"""Ranks of a sharded trainer for tests: real processes in one gloo group that run calls of the test."""

from __future__ import annotations

import contextlib
import os
import pickle
import signal
import time
import weakref
from collections.abc import Callable, Iterator
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from interpreters import use_template_for_forkserver
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import (
    DeviceMesh,
    DTensor,
    Partial,
    Replicate,
    Shard,
    distribute_tensor,
    init_device_mesh,
)
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.distributed.tensor.placement_types import _StridedShard

from collectors.nodes import free_port
from weight_update import (
    BucketEncoding,
    DistributedWeightSyncScheme,
    GatherShards,
    MemoryWeightSyncScheme,
    SharedMemWeightSyncScheme,
    WeightStrategy,
    WeightSyncScheme,
)
from weight_update.convert import Sharded, gather_tensor_parallel
from weight_update.sharded import gathering
from weight_update.testing.models import Noted, fingerprint
from weight_update.testing.workers import ANSWER_SECONDS, RemoteObject, Worker, WorkerDiedError

TOKEN = "of the sharded tests"


class Net(nn.Module):
    """Sizes that do not divide by the number of ranks, tied weights, buffers, extra state."""

    def __init__(self, seed: int = 0) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.embed = nn.Embedding(13, 6)
        self.layers = nn.ModuleList(nn.Linear(6, 6) for _ in range(3))
        self.norm = nn.BatchNorm1d(6)
        self.frozen = nn.Parameter(torch.randn(5, 2, dtype=torch.float64), requires_grad=False)
        self.head = nn.Linear(6, 13, bias=False)
        self.head.weight = self.embed.weight
        self.register_buffer("steps", torch.tensor(0), persistent=False)
        self.noted = Noted(seed)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embed(tokens)
        for layer in self.layers:
            x = torch.relu(layer(x))
        self.steps += 1
        return torch.as_tensor(self.head(self.norm(x)))


def shard(net: Net, mesh: DeviceMesh | None) -> Net:
    for layer in net.layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(net, mesh=mesh)
    return net


def train(net: nn.Module, steps: int) -> None:
    optimizer = torch.optim.AdamW(net.parameters(), lr=0.1)
    torch.manual_seed(steps + dist.get_rank())
    for _ in range(steps):
        optimizer.zero_grad()
        net(torch.randint(0, 13, (8,))).square().mean().backward()
        optimizer.step()


def whole(net: nn.Module) -> dict[str, Any]:
    """Return all weights, gathered by torch itself, on the first rank only."""
    options = StateDictOptions(full_state_dict=True, cpu_offload=True)
    return {k: v for k, v in get_model_state_dict(net, options=options).items() if "_extra" not in k}


class ByteCounter:
    """A counter of the bytes of tensors that are alive at one time."""

    def __init__(self) -> None:
        self.alive = self.peak = 0

    def count(self, tensor: torch.Tensor) -> None:
        nbytes = tensor.untyped_storage().nbytes()
        self.alive += nbytes
        self.peak = max(self.peak, self.alive)
        weakref.finalize(tensor.untyped_storage(), self._gone, nbytes)

    def _gone(self, nbytes: int) -> None:
        self.alive -= nbytes


class Body:
    """The objects of one rank."""

    def __init__(self) -> None:
        self.scheme: WeightSyncScheme | None = None
        self.net: Any = None
        self.groups: dict[tuple[int, ...], Any] = {}

    def group(self, ranks: list[int]) -> None:
        """Make a process group; all ranks of the world call this."""
        self.groups[tuple(ranks)] = dist.new_group(ranks)

    def make(self, seed: int, size: int, change: Callable[[Body], None] | None = None) -> None:
        """Make a model sharded over the first ``size`` ranks; each rank starts with the same weights."""
        mesh = DeviceMesh.from_group(self.groups[tuple(range(size))], "cpu", mesh=list(range(size)))
        self.net = shard(Net(seed), mesh)
        if change is not None:
            change(self)

    def init(self, kind: str, size: int, workers: int, port: int, options: dict[str, Any]) -> bytes | None:
        """Call ``init_on_sender``; return the leader's pickled scheme for workers."""
        options = dict(options)
        timeout = options.pop("timeout", 20.0)
        of_scheme = {"timeout": timeout, "connect_timeout": timeout, "sync": options.pop("sync", True)}
        gather = GatherShards(self.groups[tuple(range(size))], **options.pop("shards", {}))
        of_scheme |= {"strategy": WeightStrategy(gather=gather, **options), "token": TOKEN}
        if kind == "shared_mem":
            self.scheme = SharedMemWeightSyncScheme(**of_scheme)
        else:
            self.scheme = DistributedWeightSyncScheme(port=port, **of_scheme)
        self.scheme.init_on_sender(model=self.net, num_workers=workers)
        return pickle.dumps(self.scheme) if dist.get_rank() == 0 else None

    def end(self) -> None:
        if self.scheme is not None:
            self.scheme.shutdown()
        os._exit(0)  # other ranks may have been killed: an orderly end would wait for them

    def call(self, name: str, *args: Any, **kwargs: Any) -> Any:
        """Call a method of the scheme."""
        return getattr(self.scheme, name)(*args, **kwargs)

    def get(self, name: str) -> Any:
        """Return an attribute of the scheme."""
        return getattr(self.scheme, name)

    def run(self, function: Callable[..., Any], *args: Any) -> Any:
        """Return ``function(self, *args)``."""
        return function(self, *args)

    def train(self, steps: int) -> None:
        train(self.net, steps)

    def whole(self) -> dict[str, Any]:
        return fingerprint(whole(self.net))

    def descriptors(self) -> int:
        """Return the number of open file descriptors of this process."""
        return len(os.listdir("/proc/self/fd"))


BODY = Body()  # of this rank


def make_rank(rank: int, size: int, port: int) -> Body:
    """Join the group of all ranks."""
    dist.init_process_group(
        "gloo",
        init_method=f"tcp://127.0.0.1:{port}",
        rank=rank,
        world_size=size,
        timeout=timedelta(seconds=60),
    )
    globals()["BODY"] = Body()
    return BODY


class Ranks:
    """All ranks, as the test sees them; a context manager."""

    def __init__(self, size: int) -> None:
        self.size = size
        port = free_port()
        use_template_for_forkserver()
        self.all_ranks = [
            RemoteObject(make_rank, rank, size, port, method="forkserver", name=f"rank {rank}")
            for rank in range(size)
        ]

    def each(self, name: str, *args: Any, of: int | None = None, **kwargs: Any) -> list[Any]:
        """Call a method on the first ``of`` ranks (None: all) at one time; return results or exceptions."""
        self.post(name, *args, of=of, **kwargs)
        return self.answers(of)

    def all(self, name: str, *args: Any, of: int | None = None, **kwargs: Any) -> list[Any]:
        """Call a method as :meth:`each` does; raise the first exception."""
        answers = self.each(name, *args, of=of, **kwargs)
        for answer in answers:
            if isinstance(answer, Exception):
                raise answer
        return answers

    def post(self, name: str, *args: Any, of: int | None = None, **kwargs: Any) -> None:
        for rank in self.all_ranks[:of]:
            with contextlib.suppress(WorkerDiedError):  # it was killed
                rank.post(name, *args, **kwargs)

    def answers(self, of: int | None = None) -> list[Any]:
        return [_answer(rank) for rank in self.all_ranks[:of]]

    def pid(self, rank: int) -> int:
        return int(self.all_ranks[rank].runner.pid)

    def kill(self, rank: int) -> None:
        os.kill(self.pid(rank), signal.SIGKILL)
        self.all_ranks[rank].runner.join()

    def __enter__(self) -> Ranks:
        return self

    def __exit__(self, *exc_info: object) -> None:
        for rank in self.all_ranks:
            rank.stop()


def _answer(rank: RemoteObject) -> Any:
    """Return the result or the exception of a rank, or None if it was killed."""
    assert not rank.busy(ANSWER_SECONDS), f"{rank.name} gave no answer"
    try:
        return rank.answer()
    except WorkerDiedError:
        return None
    except Exception as error:  # noqa: BLE001 - handed to the test, which asserts on it
        return error


@contextlib.contextmanager
def running(
    ranks: Ranks, kind: str = "distributed", *, size: int, workers: int, model: Any = None, **options: Any
) -> Iterator[list[Worker]]:
    """Connect ranks and workers; yield the workers."""
    blob = ranks.all("init", kind, size, workers, free_port(), options, of=size)[0]
    procs = [Worker(pickle.loads(blob), idx, "forkserver") for idx in range(workers)]
    try:
        for worker in procs:
            worker.call("init", Net(7) if model is None else model)
        ranks.post("call", "connect", of=size)
        for worker in procs:
            worker.post("connect")
        errors = [one for one in ranks.answers(size) if isinstance(one, Exception)]
        for worker in procs:
            worker.answer()
        assert not errors, errors
        yield procs
    finally:
        for worker in procs:
            worker.stop()
        ranks.each("call", "shutdown", of=size)


@contextlib.contextmanager
def added(ranks: Ranks, index: int, joined: bool = True) -> Iterator[Worker]:
    """Yield a late joiner that has a scheme of its own, ``joined`` or still in ``connect()``."""
    port = ranks.all("get", "port", of=1)[0]
    scheme = DistributedWeightSyncScheme(
        strategy=WeightStrategy(encoding=BUCKETS["encoding"]), port=port, token=TOKEN
    )
    worker = Worker(scheme, index, "forkserver")
    try:
        worker.call("init", Net(7))
        worker.post("connect")
        if joined:
            worker.answer()
        yield worker
    finally:
        worker.stop()


BUCKETS: dict[str, Any] = {"encoding": BucketEncoding(bucket_size=256), "max_in_flight": 2}


# -- functions that run in ranks ------------------------------------------------------------------------


class FailingConverter:
    """A converter that fails at the third tensor in the ranks in which ``fails`` is set."""

    fails = False

    def __call__(self, items: Iterator[Any]) -> Iterator[Any]:
        for number, item in enumerate(items):
            if number == 2 and FailingConverter.fails:
                raise ValueError("no such format")
            yield item


def set_failing(body: Body, fails: bool) -> None:
    FailingConverter.fails = fails


class KillingConverter:
    """A converter that kills the process ``victim``, if there is one, at the third tensor."""

    victim: int | None = None

    def __call__(self, items: Iterator[Any]) -> Iterator[Any]:
        for number, item in enumerate(items):
            if number == 2 and KillingConverter.victim is not None:
                os.kill(KillingConverter.victim, signal.SIGKILL)
                time.sleep(0.1)  # the kernel closes its connections meanwhile
            yield item


def set_victim(body: Body, pid: int) -> None:
    KillingConverter.victim = pid


def centered(items: Iterator[tuple[str, torch.Tensor]]) -> Iterator[tuple[str, torch.Tensor]]:
    """Subtract from each weight its sum, which takes a collective if the weight is sharded."""
    for name, tensor in items:
        yield name, tensor - tensor.sum()


def send_shards(body: Body, options: dict[str, Any]) -> None:
    """Send this rank's part of the model, by a scheme that was initialized with whole weights."""
    with MemoryWeightSyncScheme(WeightStrategy("state_dict", convert=centered, **options)) as scheme:
        scheme.init_on_sender(model=Net(1), num_workers=0)
        scheme.connect()
        scheme.send(body.net)


def rename_on_second(body: Body) -> None:
    if dist.get_rank() == 1:
        body.net.layers[1].register_parameter("strange", body.net.layers[1]._parameters.pop("weight"))


def count_bytes(body: Body) -> None:
    """Count the tensors that the gather makes from now on."""
    body.made, body.kept = ByteCounter(), ByteCounter()  # type: ignore[attr-defined]
    assemble, flat = gathering._assemble, gathering._flat

    def counted_assemble(*args: Any) -> torch.Tensor:
        tensor = assemble(*args)
        body.made.count(tensor)  # type: ignore[attr-defined]
        return tensor

    def counted_flat(*args: Any) -> Any:
        memory, views = flat(*args)
        body.kept.count(memory)  # type: ignore[attr-defined]
        return memory, views

    gathering._assemble = counted_assemble
    gathering._flat = counted_flat


def peaks(body: Body) -> tuple[int, int]:
    """Return the peak bytes of whole tensors, and of parts on their way."""
    return body.made.peak, body.kept.peak  # type: ignore[attr-defined]


class ColumnParallel:
    """A gather function of a user, which finds its group in each rank."""

    def __init__(self, ranks: list[int]) -> None:
        self.ranks = ranks

    def __call__(self, items: Iterator[Any]) -> Iterator[Any]:
        group = BODY.groups[tuple(self.ranks)]
        return gather_tensor_parallel(group, [("", Sharded(1))])(items)


def make_columns(body: Body, size: int) -> None:
    body.net = {f"w{i}": torch.arange(6.0).reshape(2, 3) + 100 * i + 10 * dist.get_rank() for i in range(4)}


def kinds_of_shards(mesh: DeviceMesh, line: DeviceMesh) -> dict[str, torch.Tensor]:
    """Return the same tensors on all ranks, sharded in every way over four ranks."""
    generator = torch.Generator().manual_seed(5)
    ways: dict[str, tuple[DeviceMesh, list[Any]]] = {
        "rows": (line, [Shard(0)]),
        "columns": (line, [Shard(1)]),
        "copies": (line, [Replicate()]),
        "hybrid": (mesh, [Replicate(), Shard(0)]),
        "hybrid the other way": (mesh, [Shard(1), Replicate()]),
        "rows and columns": (mesh, [Shard(0), Shard(1)]),
        "rows twice": (mesh, [Shard(0), Shard(0)]),
        "a line of a mesh": (mesh["tp"], [Shard(0)]),
    }
    shapes = ((8, 6), (7, 5), (3, 2), (1, 1))
    found: dict[str, torch.Tensor] = {}
    for name, (where, placements) in ways.items():
        for shape in shapes:
            whole = torch.randn(shape, generator=generator)
            found[f"{name} {shape}"] = distribute_tensor(whole, where, placements)
    for shape in shapes:
        found[f"rows from the right {shape}"] = twice_from_the_right(torch.ones(shape).cumsum(0), mesh)
    found["scalar"] = distribute_tensor(torch.tensor(3.0), line, [Replicate()])
    found["nothing"] = distribute_tensor(torch.empty(0, 4), line, [Shard(0)])
    found["sum"] = DTensor.from_local(torch.full((3,), 1.0 + dist.get_rank()), line, [Partial()])
    found["tied"] = found["rows (7, 5)"]
    found["plain"] = torch.full((4,), float(dist.get_rank()))
    return found


def twice_from_the_right(whole: torch.Tensor, mesh: DeviceMesh) -> DTensor:
    """Shard as FSDP2 shards a tensor that is sharded by rows already."""
    local = distribute_tensor(whole, mesh["tp"], [Shard(0)]).to_local()
    local = distribute_tensor(local, mesh["dp"], [Shard(0)], src_data_rank=None).to_local()
    placements = [_StridedShard(0, split_factor=2), Shard(0)]
    return DTensor.from_local(
        local, mesh, placements, run_check=False, shape=whole.shape, stride=whole.stride()
    )


def make_kinds(body: Body) -> None:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    body.net = kinds_of_shards(mesh, init_device_mesh("cpu", (4,)))


def whole_kinds(body: Body) -> dict[str, str]:
    return fingerprint({n: t.full_tensor() if isinstance(t, DTensor) else t for n, t in body.net.items()})


def hollow_kinds(body: Body) -> dict[str, torch.Tensor]:
    """Return a model for a worker."""
    tensors = {name: torch.zeros(tensor.shape) for name, tensor in body.net.items()}
    return {**tensors, "tied": tensors["rows (7, 5)"]}


def make_tensor_parallel(body: Body) -> None:
    """Make a model with FSDP2 over tensor parallelism, as users write it."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    plan = {"layers.0": ColwiseParallel(), "layers.1": RowwiseParallel()}
    body.net = shard(parallelize_module(Net(1), mesh["tp"], plan), mesh["dp"])


def whole_weights(body: Body) -> dict[str, str] | None:
    """Return the fingerprint of ``scheme.weights``."""
    assert body.scheme is not None
    weights = body.scheme.weights
    return None if weights is None else fingerprint(weights)


def evaluate(body: Body) -> None:
    """Run a forward pass alone, which leaves the root module unsharded."""
    with torch.no_grad():
        body.net(torch.randint(0, 13, (8,)))
