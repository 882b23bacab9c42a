"""Models of workers whose tensors the program replaces, casts, ties or moves while it is connected."""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from marks import quick_for
from torch import nn

from weight_update import (
    BucketEncoding,
    Encoding,
    MemoryWeightSyncScheme,
    PatchEncoding,
    SyncFailedError,
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


MISFITS = {
    integers: "1.weight: dtype torch.int8 in the model, torch.float32 in the update",
    numbers_of_another_kind: "1.weight: dtype torch.complex64 in the model",
    another_shape: "1.weight: shape [9] in the model, [3, 3] in the update",
    tied: "1.weight and 2.weight: tied in the model, two different tensors in the update",
}


@pytest.mark.parametrize("held", [False, True], ids=["", "held"])
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


@pytest.mark.parametrize("dtype", [torch.float16, torch.float64])
def test_a_cast_while_an_update_waits_is_kept(procs: Sides, dtype: torch.dtype) -> None:
    source, sides = procs
    (worker,) = sides.workers
    handle = send_while_held(sides, source)
    worker.call("run", change, functools.partial(nn.Module.to, dtype=dtype))
    worker.call("release")
    handle.wait(20.0)
    expected = {name: value.to(dtype) for name, value in source.state_dict().items()}
    assert worker.call("fingerprint") == fingerprint(expected)


def transposed(model: Any) -> None:
    model[1].weight.data = model[1].weight.data.t()


def test_a_weight_that_was_transposed_in_place_is_overwritten(procs: Sides) -> None:
    source, sides = procs
    sides.workers[0].call("run", change, transposed)
    update(sides, source, 4)
    assert sides.ask("fingerprint") == [fingerprint(source)]


def of_inference(model: Any) -> None:
    with torch.inference_mode():
        model[1].weight = nn.Parameter(torch.zeros(3, 3))


def test_an_inference_tensor_changes_nothing(procs: Sides) -> None:
    source, sides = procs
    (worker,) = sides.workers
    worker.call("run", change, of_inference)
    before = worker.call("run", others)
    scramble(source, 4, finite=True)
    with pytest.raises(SyncFailedError, match="an inference tensor"):
        sides.scheme.send()
    assert worker.call("run", others) == before


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
