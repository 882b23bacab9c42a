"""Models of workers whose tensors the program replaces, casts, ties or moves while it is connected."""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from marks import quick_for
from pairs import connect_pair
from torch import nn

from weight_update import (
    BucketEncoding,
    Encoding,
    MemoryWeightSyncScheme,
    PatchEncoding,
    SharedMemWeightSyncScheme,
    SyncFailedError,
    UnsupportedSourceError,
    WeightStrategy,
)
from weight_update.testing import WorkerProcesses, fingerprint, scramble
from weight_update.testing.workers import Body

# With 150 layers, a receiver of dense updates keeps the weights in a flat buffer.
ENCODINGS: dict[str, tuple[int, str | Encoding]] = {
    "dense": (3, "dense"),
    "dense, many": (150, "dense"),
    "bucket": (3, BucketEncoding(bucket_size=256)),
    "patch": (3, PatchEncoding()),
}
CASES = {
    f"{name}-{'copying' if stable else 'pointing'}": (count, encoding, stable)
    for name, (count, encoding) in ENCODINGS.items()
    for stable in (False, True)
}
Sides = tuple[nn.Module, WorkerProcesses]


def layers(seed: int, count: int) -> nn.Sequential:
    model = nn.Sequential(*[nn.Linear(3, 3) for _ in range(count)])
    scramble(model, seed, finite=True)
    return model


@pytest.fixture(params=quick_for(CASES, "dense-pointing", "dense, many-pointing", "patch-copying"))
def procs(request: pytest.FixtureRequest) -> Iterator[Sides]:
    """Return a model, and its sender with one connected worker."""
    count, encoding, stable = CASES[request.param]
    source, strategy = layers(1, count), WeightStrategy(encoding=encoding)
    scheme = MemoryWeightSyncScheme(strategy=strategy, stable_addresses=stable, timeout=20.0)
    scheme.init_on_sender(model=source, num_workers=1)
    with WorkerProcesses(scheme, "thread") as procs:
        procs.hire(0, layers(2, count))
        procs.connect()
        update(procs, source, 3)
        yield source, procs


def update(procs: WorkerProcesses, source: nn.Module, seed: int) -> None:
    scramble(source, seed, finite=True)
    procs.scheme.send()


def change(body: Body, how: Callable[[Any], None]) -> None:
    how(body.model)


def integers(model: Any) -> None:
    model[1].weight = nn.Parameter(torch.zeros(3, 3, dtype=torch.int8), requires_grad=False)


def numbers_of_another_kind(model: Any) -> None:
    model[1].weight = nn.Parameter(torch.zeros(3, 3, dtype=torch.complex64))


def another_shape(model: Any) -> None:
    model[1].weight = nn.Parameter(torch.zeros(9))


def tied(model: Any) -> None:
    model[2].weight = model[1].weight


def flattened(model: Any) -> None:
    """Change the shape, but not the address."""
    model[1].weight.data = model[1].weight.data.view(-1)


MISFITS = {
    integers: "1.weight: float32[3, 3]: dtype int8 in the model",
    numbers_of_another_kind: "1.weight: float32[3, 3]: dtype complex64 in the model",
    another_shape: "1.weight: float32[3, 3]: shape [9] in the model",
    tied: "1.weight and 2.weight",
}


@pytest.mark.parametrize("held", quick_for([False, True], False), ids=["", "held"])
@pytest.mark.parametrize("how", MISFITS)
def test_weights_that_no_longer_fit_are_named(procs: Sides, how: Callable[[Any], None], held: bool) -> None:
    """Also if they change while an update that has arrived waits for the end of ``hold()``."""
    source, sides = procs
    (worker,) = sides.workers
    handle = send_while_held(sides, source) if held else None
    worker.call("run", change, how)
    before = worker.call("fingerprint")
    if held:
        worker.call("release")
    with pytest.raises(SyncFailedError) as caught:
        handle.wait(20.0) if handle is not None else sides.scheme.send()
    assert MISFITS[how] in str(caught.value)
    assert worker.call("fingerprint") == before
    worker.call("replace_model", layers(5, len(list(source.children()))))
    update(sides, source, 6)
    assert sides.ask("fingerprint") == [fingerprint(source)]


@pytest.mark.parametrize("before", [torch.float32, torch.float16], ids=["", "narrower before"])
@pytest.mark.parametrize("dtype", [torch.float16, torch.float64])
def test_a_cast_while_an_update_waits_is_kept(procs: Sides, dtype: torch.dtype, before: torch.dtype) -> None:
    source, sides = procs
    (worker,) = sides.workers
    worker.call("run", change, functools.partial(nn.Module.to, dtype=before))
    handle = send_while_held(sides, source)
    worker.call("run", change, functools.partial(nn.Module.to, dtype=dtype))
    worker.call("release")
    handle.wait(20.0)
    expected = {name: value.to(dtype) for name, value in source.state_dict().items()}
    assert worker.call("fingerprint") == fingerprint(expected)


def test_a_weight_that_is_flattened_in_its_place_stays_flat(procs: Sides) -> None:
    source, sides = procs
    (worker,) = sides.workers
    handle = send_while_held(sides, source)
    worker.call("run", change, flattened)
    worker.call("release")
    with pytest.raises(SyncFailedError, match=r"1\.weight: float32\[3, 3\]: shape \[9\] in the model"):
        handle.wait(20.0)
    assert worker.call("run", dimensions) == 1


def dimensions(body: Body) -> int:
    return body.model[1].weight.dim()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_tied_weights_arrive_in_buckets_of_another_dtype(dtype: torch.dtype) -> None:
    strategy = WeightStrategy(encoding=BucketEncoding(bucket_dtype="bf16"))
    source, target = layers(1, 3), layers(2, 3).to(dtype)
    for model in (source, target):
        tied(model)
    with MemoryWeightSyncScheme(strategy, timeout=20.0) as scheme, connect_pair(scheme, source, target):
        scramble(source, 3, finite=True)
        scheme.send()
    expected = {name: one.bfloat16().to(dtype) for name, one in source.state_dict().items()}
    assert fingerprint(target) == fingerprint(expected)
    assert target[1].weight is target[2].weight


def transposed(model: Any) -> None:
    model[1].weight.data = model[1].weight.data.t()


def test_a_weight_that_was_transposed_in_place_is_overwritten(procs: Sides) -> None:
    source, sides = procs
    sides.workers[0].call("run", change, transposed)
    with torch.no_grad():
        source[1].weight[0, 2] += 1
    sides.scheme.send()
    assert sides.ask("fingerprint") == [fingerprint(source)]


def written_and_shared(model: nn.Module) -> None:
    scramble(model, 9, finite=True)
    model.share_memory()


MOVED_TO_SHARED_MEMORY: dict[str, Callable[[nn.Module], Any]] = {
    "share_memory()": nn.Module.share_memory,
    "written before": written_and_shared,
    "one, as a queue does": lambda model: model[1].weight.data.share_memory_(),
}


@pytest.mark.parametrize("how", MOVED_TO_SHARED_MEMORY)
def test_weights_that_a_worker_puts_into_shared_memory_are_updated(how: str) -> None:
    """PyTorch then moves all tensors that lie in one memory to another, also those of the transport."""
    source, target = layers(1, 3), layers(2, 3)
    with SharedMemWeightSyncScheme(timeout=20.0) as scheme, connect_pair(scheme, source, target):
        for seed in range(3, 12):
            scramble(source, seed, finite=True)
            scheme.send()
            assert fingerprint(target) == fingerprint(source)
            if seed % 3:
                MOVED_TO_SHARED_MEMORY[how](target)


class Wrapper(torch.Tensor):
    """A tensor that has its values elsewhere, as DTensor and the tensors of torchao have them."""

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return args[0] if func is torch.ops.aten.detach.default else NotImplemented


def of_inference() -> torch.Tensor:
    with torch.inference_mode():
        return torch.zeros(3, 3)


NOT_WRITABLE = {
    "an inference tensor": of_inference,
    "a torch.sparse_coo tensor": lambda: torch.zeros(3, 3).to_sparse(),
    "Wrapper, without memory": lambda: torch.Tensor._make_wrapper_subclass(Wrapper, (3, 3)),
}


@pytest.mark.parametrize("kind", NOT_WRITABLE)
def test_a_tensor_that_cannot_be_written_changes_nothing(procs: Sides, kind: str) -> None:
    source, sides = procs
    (worker,) = sides.workers
    worker.call("run", change, functools.partial(replace, kind))
    before = worker.call("run", others)
    scramble(source, 4, finite=True)
    with pytest.raises(SyncFailedError, match=rf"'1\.weight' .*{kind}"):
        sides.scheme.send()
    assert worker.call("run", others) == before


def replace(kind: str, model: Any) -> None:
    model[1]._parameters["weight"] = NOT_WRITABLE[kind]()


def others(body: Body) -> dict[str, str]:
    """Return the fingerprint of the weights that were not replaced."""
    return fingerprint({name: one for name, one in body.model.state_dict().items() if name != "1.weight"})


def send_while_held(sides: WorkerProcesses, source: nn.Module) -> Any:
    """Have the worker hold, and send an update; return when it waits for the end of the hold."""
    (worker,) = sides.workers
    worker.call("hold")
    scramble(source, 4, finite=True)
    handle = sides.scheme.send_async()
    worker.call("run", await_staged)
    return handle


def await_staged(body: Body) -> None:
    gate, deadline = body.scheme._receiver.gate, time.monotonic() + 20.0
    while not gate._updates and time.monotonic() < deadline:
        time.sleep(0.005)


def in_one_buffer(model: nn.Module) -> torch.Tensor:
    """Move the parameters of a model into one buffer, as Megatron and FSDP do; return the buffer."""
    sizes = [one.numel() for one in model.parameters()]
    flat = torch.zeros(1 + sum(sizes))
    for one, place in zip(model.parameters(), flat[1:].split(sizes), strict=True):
        one.data = place.view_as(one)
    return flat


@pytest.mark.parametrize("encoding", ["dense", "bucket", "patch", "converted"])
@pytest.mark.parametrize("count", [3, 150])
def test_weights_that_a_trainer_has_offloaded_are_not_sent(count: int, encoding: str) -> None:
    convert = iter if encoding == "converted" else None
    strategy = WeightStrategy(encoding="dense" if convert else encoding, convert=convert)
    source, target = layers(1, count), layers(2, count)
    memory = in_one_buffer(source).untyped_storage()
    with MemoryWeightSyncScheme(strategy, timeout=10.0) as scheme:
        receiver = connect_pair(scheme, source, target)
        before = fingerprint(target)
        nbytes = memory.nbytes()
        memory.resize_(0)
        with pytest.raises(UnsupportedSourceError, match=r"the memory of '0\.weight' was freed"):
            scheme.send()
        memory.resize_(nbytes)
        assert fingerprint(target) == before
        receiver.shutdown()


@pytest.mark.parametrize("stable", [False, True])
def test_a_worker_that_has_offloaded_its_weights_is_named(stable: bool) -> None:
    source, target = layers(1, 3), layers(2, 3)
    memory = in_one_buffer(target).untyped_storage()
    with MemoryWeightSyncScheme(timeout=10.0, stable_addresses=stable) as scheme:
        scheme.init_on_sender(model=source, num_workers=1)
        nbytes = memory.nbytes()
        memory.resize_(0)
        with pytest.raises(SyncFailedError, match=r"the memory of '0\.weight' was freed"):
            connect_pair(scheme, source, target).shutdown()
        memory.resize_(nbytes)
