"""A model of many small tensors lies in one flat buffer, and versions are copied into it."""

from __future__ import annotations

import copy
import itertools
import threading
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from weight_update import (
    MemoryWeightSyncScheme,
    SendHandle,
    SharedMemWeightSyncScheme,
    SyncFailedError,
    WeightStrategy,
    WeightSyncScheme,
)
from weight_update.receiver import flat_buffers
from weight_update.receiver.flat_buffers import OwnCopy
from weight_update.receiver.targets import ModelTarget
from weight_update.testing import Body, SchemeContract, WorkerProcesses, fingerprint, scramble
from weight_update.testing.processes import wait_until

COUNT = 300
PLACES = [("fork", SharedMemWeightSyncScheme), ("thread", MemoryWeightSyncScheme)]

Hire = Callable[..., WorkerProcesses]


def many() -> nn.Module:
    """Tensors of odd sizes, a tie, a buffer of integers and an empty one."""
    model = nn.Module()
    model.rest = nn.ParameterList(nn.Parameter(torch.randn(5, 1 + i % 7)) for i in range(COUNT))
    model.tied = model.rest[3]
    model.register_buffer("steps", torch.tensor(7))
    model.register_buffer("empty", torch.zeros(0, 4))
    return model


@pytest.fixture(params=PLACES, ids=[method for method, _ in PLACES])
def hire(request: pytest.FixtureRequest, hired: Hire) -> Hire:
    method, scheme_class = request.param

    def build(source: nn.Module, target: nn.Module | None = None, workers: int = 1) -> WorkerProcesses:
        scheme: WeightSyncScheme = scheme_class(timeout=20.0, connect_timeout=30.0)
        models = [copy.deepcopy(target or many()) for _ in range(workers)]
        return hired(scheme, models, method, model=source)

    return build


def expected(source: nn.Module, procs: WorkerProcesses) -> dict[str, str]:
    return fingerprint(source, procs.scheme.strategy)


_seeds = itertools.count(1)


def send_while_held(source: nn.Module, procs: WorkerProcesses, disturb: Callable[[Body], None]) -> SendHandle:
    """Send an update to a worker that is inside ``hold()``, and call a function there before it leaves."""
    ask(procs, "hold")
    scramble(source, next(_seeds))
    handle = procs.scheme.send_async()
    ask(procs, "run", disturb)
    ask(procs, "release")
    return handle


def update(source: nn.Module, procs: WorkerProcesses) -> None:
    scramble(source, next(_seeds))
    procs.scheme.send()


def ask(procs: WorkerProcesses, what: str, *arguments: Any, worker: int = 0) -> Any:
    return procs.workers[worker].call(what, *arguments)


def test_it_stays_where_it_is(hire: Hire) -> None:
    source = many()
    procs = hire(source)
    before = ask(procs, "pointers")
    for _ in range(4):
        update(source, procs)
        assert ask(procs, "fingerprint") == expected(source, procs)
    assert ask(procs, "pointers") == before
    assert before["tied"] == before["rest.3"]


def test_few_tensors_are_pointed_at_what_came(hire: Hire) -> None:
    source = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))
    procs = hire(source, source)
    before = ask(procs, "pointers")
    update(source, procs)
    assert ask(procs, "pointers") != before


def replace_two(body: Body) -> None:
    body.model.rest[5] = nn.Parameter(torch.zeros_like(body.model.rest[5]))
    body.model.rest[6].data = torch.zeros_like(body.model.rest[6])


def test_replaced_tensors_are_found_again(hire: Hire) -> None:
    source = many()
    procs = hire(source)
    before = ask(procs, "pointers")
    ask(procs, "run", replace_two)
    update(source, procs)
    assert ask(procs, "fingerprint") == expected(source, procs)
    assert ask(procs, "pointers") == before


def wait_until_it_waits(body: Body) -> None:
    wait_until(lambda: body.scheme._receiver.gate._updates)


def replace_when_it_waits(body: Body) -> None:
    wait_until_it_waits(body)
    replace_two(body)


def move_when_it_waits(body: Body) -> None:
    """Move the same tensor objects to other memory, as parameter noise does."""
    wait_until_it_waits(body)
    vector = nn.utils.parameters_to_vector(body.model.rest)
    nn.utils.vector_to_parameters(torch.zeros_like(vector), body.model.rest)


def cast_when_it_waits(body: Body) -> None:
    wait_until_it_waits(body)
    body.model.double().float()


def lose_one_when_it_waits(body: Body) -> None:
    wait_until_it_waits(body)
    del body.model.steps


@pytest.mark.parametrize("disturb", [replace_when_it_waits, move_when_it_waits, cast_when_it_waits])
def test_moved_while_an_update_waits(hire: Hire, disturb: Callable[[Body], None]) -> None:
    source = many()
    procs = hire(source)
    for _ in range(2):
        handle = send_while_held(source, procs, disturb)
        handle.wait()
        assert ask(procs, "fingerprint") == expected(source, procs)


def rest_of(body: Body) -> dict[str, str]:
    return fingerprint(body.model.rest, body.scheme.strategy)


def test_what_fails_inside_the_gate_changes_nothing(hire: Hire) -> None:
    source = many()
    procs = hire(source)
    before = ask(procs, "run", rest_of)
    handle = send_while_held(source, procs, lose_one_when_it_waits)
    with pytest.raises(SyncFailedError, match="'steps' is no longer in the target"):
        handle.wait()
    assert ask(procs, "run", rest_of) == before


def test_the_model_is_exchanged_while_an_update_is_staged(hire: Hire) -> None:
    source = many()
    procs = hire(source)
    handle = send_while_held(source, procs, exchange_binding_when_it_waits)
    handle.wait()
    assert ask(procs, "fingerprint") == expected(copy.deepcopy(source).double(), procs)


def exchange_binding_when_it_waits(body: Body) -> None:
    """Do what ``scheme.model = ...`` does, before an update that was staged earlier gets its turn."""
    wait_until_it_waits(body)
    staging = body.scheme._receiver._updates.staging
    body.model = many().double()
    staging.target = ModelTarget(body.scheme.strategy, body.model, False)


def in_shared_memory(body: Body) -> list[bool]:
    body.model.share_memory()
    return [parameter.is_shared() for parameter in body.model.parameters()]


def lies_there(body: Body) -> bool:
    _, buffer = body.scheme._receiver._updates.staging._flat
    return bool(buffer._find_inside())


def test_a_model_in_shared_memory_stays_there(hire: Hire) -> None:
    source = many()
    procs = hire(source)
    assert all(ask(procs, "run", in_shared_memory))
    update(source, procs)
    assert ask(procs, "run", lies_there)
    before = ask(procs, "pointers")
    update(source, procs)
    assert ask(procs, "pointers") == before
    assert ask(procs, "fingerprint") == expected(source, procs)


def test_the_modes_of_who_connects() -> None:
    """The thread that connects applies the first version, whatever modes it has set."""
    source = many()
    scheme = MemoryWeightSyncScheme(timeout=20.0)
    scheme.init_on_sender(model=source, num_workers=1)
    model = many()
    there = copy.copy(scheme)
    there.init_on_receiver(model=model, worker_idx=0)
    sending = threading.Thread(target=scheme.connect)
    sending.start()
    with torch.inference_mode(), torch.device("meta"):
        there.connect()
    sending.join(10.0)
    assert not model.rest[0].is_inference()
    assert model.rest[0].is_cpu
    (model.rest[0] ** 2).sum().backward()
    assert torch.equal(model.rest[0], source.rest[0])
    scheme.shutdown()
    there.shutdown()


def to_double(body: Body) -> None:
    body.model.double()


def test_a_model_that_was_cast(hire: Hire) -> None:
    source = many()
    procs = hire(source)
    ask(procs, "run", to_double)
    for _ in range(2):
        update(source, procs)
        assert ask(procs, "fingerprint") == expected(copy.deepcopy(source).double(), procs)
    assert ask(procs, "run", has_no_flat_buffer)  # else converted inside the gate


def has_no_flat_buffer(body: Body) -> bool:
    _, buffer = body.scheme._receiver._updates.staging._flat
    return not isinstance(buffer, flat_buffers.FlatBuffer)


def test_a_model_that_has_other_dtypes(hire: Hire) -> None:
    source = many()
    target = many()
    target.rest[0] = nn.Parameter(target.rest[0].detach().double())
    procs = hire(source, target)
    wanted = copy.deepcopy(source)
    for _ in range(2):
        update(source, procs)
        wanted.load_state_dict(source.state_dict())
        wanted.rest[0] = nn.Parameter(source.rest[0].detach().double())
        assert ask(procs, "fingerprint") == expected(wanted, procs)


def test_on_the_meta_device(hire: Hire) -> None:
    source = many()
    with torch.device("meta"):
        target = many()
    procs = hire(source, target)
    assert ask(procs, "fingerprint") == expected(source, procs)
    update(source, procs)
    assert ask(procs, "fingerprint") == expected(source, procs)


def test_what_a_worker_writes_stays_with_it(hire: Hire) -> None:
    source = many()
    procs = hire(source, workers=2)
    update(source, procs)
    ask(procs, "fill", 3.0)
    assert ask(procs, "fingerprint", worker=1) == expected(source, procs) != ask(procs, "fingerprint")
    update(source, procs)
    assert ask(procs, "fingerprint") == ask(procs, "fingerprint", worker=1) == expected(source, procs)


def other_model(body: Body) -> None:
    body.former = body.model
    body.replace_model(many())


def former(body: Body) -> dict[str, str]:
    return fingerprint(body.former, body.scheme.strategy)


def test_a_former_model_keeps_its_version(hire: Hire) -> None:
    source = many()
    procs = hire(source)
    update(source, procs)
    kept = expected(source, procs)
    ask(procs, "run", other_model)
    assert ask(procs, "fingerprint") == kept
    for _ in range(3):
        update(source, procs)
        assert ask(procs, "fingerprint") == expected(source, procs)
    assert ask(procs, "run", former) == kept


@pytest.mark.slow
class TestContract(SchemeContract):
    """The contract of schemes, with small models in a flat buffer too."""

    @pytest.fixture(autouse=True)
    def always(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(flat_buffers, "_MANY", 1)

    def make_scheme(self, **options: Any) -> WeightSyncScheme:
        return SharedMemWeightSyncScheme(**options)


def test_a_patch_waits_for_kernels_before_and_after_it_is_written(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a GPU, a forward pass may still read after it left the gate; the next may use another stream."""
    model = nn.Linear(2, 2)
    binding = WeightStrategy("state_dict").bind(model)
    own = OwnCopy(binding.schema(), binding, lambda _: False)
    own.adopt(3, binding.read().tensors, [None, None])
    own.require(3)
    done: list[str] = []
    monkeypatch.setattr(binding, "finish_kernels", lambda: done.append("finish"))
    monkeypatch.setattr(binding, "copy", lambda *_, counted: done.append("copy"))
    delta: Any = SimpleNamespace(write=lambda flat: done.append("write"), touched=lambda schema: [0])
    own.apply([delta], 4)
    assert done == ["finish", "write", "copy", "finish"]
