"""Strategy x encoding x scheme x way of applying: the same bits, update after update."""

from __future__ import annotations

import itertools
import logging
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from marks import quick_for
from tensordict import TensorDict
from torch import nn

from weight_update import (
    BucketEncoding,
    DenseEncoding,
    DistributedWeightSyncScheme,
    Encoding,
    MemoryWeightSyncScheme,
    MultiProcessWeightSyncScheme,
    PatchEncoding,
    SharedMemWeightSyncScheme,
    WeightStrategy,
    WeightSyncScheme,
)
from weight_update.testing import Apart, WorkerProcesses, Zoo, fingerprint, mlp, scramble
from weight_update.testing.workers import Method

SCHEMES: dict[str, tuple[type[WeightSyncScheme], Method]] = {
    "shared_mem": (SharedMemWeightSyncScheme, "fork"),
    "multiprocess": (MultiProcessWeightSyncScheme, "fork"),
    "distributed": (DistributedWeightSyncScheme, "fork"),
    "distributed, two hosts": (Apart, "fork"),
    "memory": (MemoryWeightSyncScheme, "thread"),
}
STRATEGIES = ["tensordict", "state_dict"]
ENCODINGS: dict[str, Encoding] = {
    "dense": DenseEncoding(),
    "bucket": BucketEncoding(bucket_size=256),
    "bucket, kept": BucketEncoding(bucket_size=256, load_instant=False),
    "patch": PatchEncoding(),
    "patch, coo": PatchEncoding(layout="coo"),
    "patch, relative, zstd": PatchEncoding(values="relative", compression="zstd"),
    "patch, ans": PatchEncoding(compression="ans"),
    "patch, lz4": PatchEncoding(compression="lz4", delta_encoding=False, init_sync_bucket_size=512),
}


def on_meta(model: nn.Module) -> nn.Module:
    return model.to("meta")


def as_dict(model: nn.Module) -> dict[str, torch.Tensor]:
    return {name: value.detach().clone() for name, value in WeightStrategy().named(model).tensors.items()}


DESTINATIONS: dict[str, Callable[[nn.Module], Any]] = {
    "module": lambda model: model,
    "meta module": on_meta,
    "TensorDict": lambda model: TensorDict(as_dict(model)).unflatten_keys("."),
    "dict": as_dict,
}


def same_bits_cases() -> Iterator[Any]:
    """Yield every combination; those that are not slow have each encoding once over each scheme.

    The strategy, and whether tensors keep their addresses, change from scheme to scheme.
    """
    for place, scheme in enumerate(SCHEMES):
        for number, encoding in enumerate(ENCODINGS, place):
            for strategy, stable in itertools.product(STRATEGIES, (False, True)):
                chosen = (strategy, stable) == (STRATEGIES[number % 2], number % 4 > 1)
                kept = chosen and scheme != "multiprocess"
                yield pytest.param(
                    *(scheme, strategy, encoding, stable),
                    id=f"{scheme}-{strategy}-{encoding}-{'copying' if stable else 'pointing'}",
                    marks=[] if kept else [pytest.mark.slow],
                )


@pytest.fixture(params=quick_for(SCHEMES, "memory", "shared_mem"), ids=str)
def hire(request: pytest.FixtureRequest, hired: Callable[..., WorkerProcesses]) -> Any:
    """Return a function that starts one worker and connects it."""
    cls, method = SCHEMES[request.param]

    def build(source: Any, target: Any, **options: Any) -> WorkerProcesses:
        scheme = cls(timeout=20.0, connect_timeout=30.0, **options)
        return hired(scheme, [target], method, model=source)

    return build


@pytest.mark.parametrize(
    ("hire", "strategy", "encoding", "stable"), list(same_bits_cases()), indirect=["hire"]
)
def test_same_bits(
    hire: Any, strategy: str, encoding: str, stable: bool, caplog: pytest.LogCaptureFixture
) -> None:
    source, made = Zoo(1), WeightStrategy(strategy, encoding=ENCODINGS[encoding])
    procs = hire(source, Zoo(2), strategy=made, stable_addresses=stable)
    for seed in range(5):
        assert procs.ask("fingerprint") == [fingerprint(source, made)]
        source.load_state_dict(Zoo(10 + seed).state_dict())
        with torch.no_grad():
            source.cache.copy_(Zoo(10 + seed).cache)
        report = procs.scheme.send()
        assert report.encoding == made.encoding.whole.label  # all has changed
    assert procs.ask("fingerprint") == [fingerprint(source, made)]
    for step in range(4):
        with torch.no_grad():
            source.inner.bias[: step + 1].add_(1)
        report = procs.scheme.send()
        assert report.encoding == made.encoding.label
        assert procs.ask("fingerprint") == [fingerprint(source, made)]
        assert procs.scheme.worker_versions == {0: report.version}
    in_worker = [one for one in procs.ask("warnings")[0] if not one.startswith("more than 90 %")]
    assert in_worker == [], "the worker asked for full weights, or joined again"
    found = [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING]
    may_send_changes = made.encoding.label != made.encoding.whole.label
    assert [one.partition(" of the")[0] for one in found] == ["more than 90 %"] * may_send_changes


@pytest.mark.parametrize("destination", DESTINATIONS)
@pytest.mark.parametrize("stable", [False, True], ids=["pointing", "copying"])
def test_every_destination(hire: Any, destination: str, stable: bool) -> None:
    source = Zoo(1)
    procs = hire(source, DESTINATIONS[destination](Zoo(2)), stable_addresses=stable)
    for seed in range(4):
        assert procs.ask("fingerprint") == [fingerprint(source)]
        scramble(source, seed)
        source.note = {"seed": seed}
        procs.scheme.send()
    assert procs.ask("fingerprint") == [fingerprint(source)]


@pytest.mark.parametrize("stable", [False, True], ids=["pointing", "copying"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64, torch.float8_e4m3fn])
def test_receiver_of_another_dtype_gets_its_own(hire: Any, dtype: torch.dtype, stable: bool) -> None:
    source = mlp(1)
    procs = hire(source, mlp(2).to(dtype), stable_addresses=stable)
    for seed in range(3):
        scramble(source, seed, finite=True)
        procs.scheme.send()
        expected = {name: value.to(dtype) for name, value in source.state_dict().items()}
        assert procs.ask("fingerprint") == [fingerprint(expected)]


def test_addresses_move_only_if_they_may(hire: Any) -> None:
    source = mlp(1)
    for stable in (False, True):
        procs = hire(source, mlp(2), stable_addresses=stable)
        before = procs.ask("pointers")
        procs.scheme.send()
        assert (procs.ask("pointers") == before) is stable


@pytest.mark.parametrize("view", ["conj", "neg"])
def test_lazy_views_are_sent_as_what_they_show(hire: Any, view: str) -> None:
    numbers = torch.arange(6).to(torch.complex64) * (1 + 2j)
    shown = numbers.conj() if view == "conj" else numbers.conj().imag
    assert shown.is_conj() or shown.is_neg()
    procs = hire({"x": shown}, {"x": torch.zeros_like(shown.resolve_conj().resolve_neg())})
    for _ in range(3):
        expected = shown.resolve_conj().resolve_neg().clone()
        assert procs.ask("fingerprint") == [fingerprint({"x": expected})]
        numbers.mul_(2)
        procs.scheme.send()
