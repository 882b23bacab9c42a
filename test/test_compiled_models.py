"""Forward passes that PyTorch compiles, or in which it keeps values computed from the weights."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator

import pytest
import torch
from marks import quick_for
from pairs import PATHS, add_one, connect_pair, same
from torch import nn

from weight_update import MemoryWeightSyncScheme, SendHandle, SyncFailedError, WeightStrategy


@pytest.fixture
def counters() -> Iterator[dict[str, dict[str, int]]]:
    """Return torch's counts of compilations, which begin at 0."""
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    yield torch._dynamo.utils.counters
    torch._dynamo.reset()


def normalizing(layers: int) -> nn.Module:
    """Return a model of float weights and integer buffers, which writes to its buffers in training mode."""
    parts = [part for _ in range(layers) for part in (nn.Linear(3, 3), nn.BatchNorm1d(3))]
    return nn.Sequential(*parts)


@pytest.mark.parametrize("path", quick_for(PATHS, "patch"))
@pytest.mark.parametrize("grad", quick_for([True, False], True))
def test_a_compiled_forward_pass_that_writes_to_buffers(
    counters: dict[str, dict[str, int]], path: str, grad: bool
) -> None:
    source = normalizing(37 if path == "flat buffer" else 2)
    options = dict(PATHS[path])
    strategy = WeightStrategy(encoding=options.pop("encoding", "dense"))
    target, given = copy.deepcopy(source), torch.rand(4, 3)
    with (
        MemoryWeightSyncScheme(strategy, **options) as scheme,
        connect_pair(scheme, source, target) as receiver,
        torch.set_grad_enabled(grad),
    ):
        compiled = receiver.guarded(torch.compile(target, backend="aot_eager"))
        for _ in range(3):
            add_one(source)
            scheme.send()
            before = copy.deepcopy(source)
            assert torch.equal(compiled(given), before(given))
            assert all(map(torch.equal, target.state_dict().values(), before.state_dict().values()))
    assert counters["stats"]["unique_graphs"] == 1


@pytest.mark.parametrize("encoding", ["dense", "patch"])
def test_a_compiled_training_step_sends(counters: dict[str, dict[str, int]], encoding: str) -> None:
    source, target = nn.Linear(30, 30), nn.Linear(30, 30)
    handles: list[SendHandle] = []

    @torch.compile(backend="eager")
    def train(given: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            source.weight[0] += given
        scheme.send()
        handles.append(scheme.send_async())
        return given + 1

    @torch.compile(backend="eager")
    def wait(given: torch.Tensor) -> torch.Tensor:
        receiver.receive(timeout=0)
        return given + 1

    with (
        MemoryWeightSyncScheme(WeightStrategy(encoding=encoding)) as scheme,
        connect_pair(scheme, source, target) as receiver,
    ):
        for value in (1.0, 2.0, 3.0):
            train(torch.tensor(value))
            handles.pop().wait()
            wait(torch.tensor(value))
            assert same(source, target)


@pytest.mark.parametrize("path", PATHS)
def test_autocast_casts_new_weights_after_an_update(path: str) -> None:
    """Autocast keeps its casts of the weights until the outermost block ends."""
    layers = 150 if path == "flat buffer" else 1
    source = nn.Sequential(*[nn.Linear(3, 3) for _ in range(layers)])
    options = dict(PATHS[path])
    strategy = WeightStrategy(encoding=options.pop("encoding", "dense"))
    with MemoryWeightSyncScheme(strategy, **options) as scheme:
        target = copy.deepcopy(source)
        given = torch.ones(1, 3)
        with connect_pair(scheme, source, target), torch.autocast("cpu", torch.bfloat16):
            for _ in range(3):
                output = target(given)
                with torch.autocast("cpu", torch.bfloat16, cache_enabled=False):
                    assert torch.equal(output, source(given))
                add_one(source)
                scheme.send()


@pytest.mark.parametrize("path", PATHS)
def test_parametrized_weights_are_computed_anew_after_an_update(path: str) -> None:
    """``parametrize.cached()`` keeps the weights that it computed until the outermost block ends."""
    layers = 150 if path == "flat buffer" else 1
    source = nn.Sequential(*[nn.utils.parametrizations.weight_norm(nn.Linear(3, 3)) for _ in range(layers)])
    options = dict(PATHS[path])
    strategy = WeightStrategy(encoding=options.pop("encoding", "dense"))
    target, given = copy.deepcopy(source), torch.ones(1, 3)
    length = source[0].parametrizations.weight.original0
    with (
        MemoryWeightSyncScheme(strategy, **options) as scheme,
        connect_pair(scheme, source, target),
        nn.utils.parametrize.cached(),
    ):
        for value in (1.0, 2.0, 3.0):
            target(given)
            nn.init.constant_(length, value)
            scheme.send()
            target(given)
            assert torch.allclose(target[0].weight.norm(dim=1), length.flatten())


@pytest.mark.filterwarnings("ignore:`torch.jit")
def test_a_script_module_computes_with_the_weights_of_the_module_it_was_made_of() -> None:
    source, target = nn.Linear(3, 3), nn.Linear(3, 3)
    script, given = torch.jit.script(target), torch.ones(1, 3)
    with MemoryWeightSyncScheme() as scheme, connect_pair(scheme, source, target) as receiver:
        policy = receiver.guarded(script)
        for _ in range(3):
            add_one(source)
            scheme.send()
            assert torch.equal(policy(given), source(given))


@pytest.mark.filterwarnings("ignore:`torch.jit")
@pytest.mark.parametrize(
    ("place", "name"), [(lambda one: one, "the model"), (lambda one: nn.Sequential(nn.ReLU(), one), "1")]
)
def test_a_script_module_as_a_target_is_refused_with_the_cure(
    place: Callable[[nn.Module], nn.Module], name: str
) -> None:
    source, target = (place(torch.jit.script(nn.Linear(3, 3))) for _ in range(2))
    with MemoryWeightSyncScheme() as scheme:
        with pytest.raises(SyncFailedError) as caught:
            connect_pair(scheme, source, target)
        message = f"UnsupportedSourceError: cannot write weights into {name}, a ScriptModule; give the module"
        assert message in str(caught.value)
