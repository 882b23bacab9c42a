"""Patches as a user of a scheme sees them: what travels, what the report says, who gets what."""

from __future__ import annotations

import copy
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from typing import Any

import pytest
import torch
from background import one_thread
from marks import slow
from torch import nn

from weight_update import (
    BucketEncoding,
    DenseEncoding,
    LinkClosedError,
    MemoryWeightSyncScheme,
    MultiProcessWeightSyncScheme,
    PatchEncoding,
    SharedMemWeightSyncScheme,
    SyncFailedError,
    WeightStrategy,
    WeightSyncScheme,
    group_schemes,
    send_together,
)
from weight_update.testing import WorkerProcesses, fingerprint, scramble
from weight_update.testing.models import Brittle
from weight_update.testing.processes import wait_until
from weight_update.testing.worker_processes import start_workers
from weight_update.testing.workers import Method
from weight_update.wire.schema import WeightSchema

KINDS: dict[str, tuple[type[WeightSyncScheme], Method]] = {
    "memory": (MemoryWeightSyncScheme, "thread"),
    "multiprocess": (MultiProcessWeightSyncScheme, "fork"),
    "shared_mem": (SharedMemWeightSyncScheme, "fork"),
}
SMALL = 2000
"""Bytes of a patch of a few elements, with room to spare; the model has 132 KB."""


class Yard:
    """Starts schemes of one kind and their workers."""

    def __init__(self, kind: str, stack: ExitStack) -> None:
        self._cls, self._method = KINDS[kind]
        self._stack = stack

    def scheme(self, strategy: WeightStrategy | None = None, **options: Any) -> WeightSyncScheme:
        made = strategy or WeightStrategy(encoding="patch")
        return self._cls(made, **{"timeout": 10.0, "connect_timeout": 20.0, **options})

    def procs(
        self,
        source: Any,
        models: list[Any],
        strategy: WeightStrategy | None = None,
        connect: bool = True,
        **options: Any,
    ) -> WorkerProcesses:
        return self.start(self.scheme(strategy, **options), source, models, connect)

    def start(
        self, scheme: WeightSyncScheme, source: Any, models: list[Any], connect: bool = True
    ) -> WorkerProcesses:
        given = {"model" if isinstance(source, nn.Module) else "weights": source}
        procs = start_workers(scheme, models, self._method, connect=connect, **given)
        return self._stack.enter_context(procs)


@pytest.fixture(params=[slow(name) if name == "multiprocess" else name for name in KINDS])
def yard(request: pytest.FixtureRequest) -> Iterator[Yard]:
    """Over every scheme."""
    yield from _yard(request.param)


@pytest.fixture
def one_yard() -> Iterator[Yard]:
    """Where the scheme does not matter."""
    yield from _yard("memory")


def _yard(kind: str) -> Iterator[Yard]:
    with one_thread(), ExitStack() as stack:
        yield Yard(kind, stack)


def net(seed: int) -> nn.Sequential:
    model = nn.Sequential(nn.Linear(64, 256), nn.Linear(256, 64))
    scramble(model, seed, finite=True)
    return model


class Frozen(nn.Module):
    """A frozen body, a small head that is trained, and buffers that are saved or not."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        self.body, self.head = nn.Linear(64, 256), nn.Linear(256, 4)
        self.register_buffer("steps", torch.zeros(3))
        self.register_buffer("cache", torch.zeros(5), persistent=False)
        scramble(self, seed, finite=True)
        self.body.requires_grad_(False)


@torch.no_grad()
def poke(module: nn.Module, seed: int, share: float = 0.0) -> None:
    """Change one element of each parameter, or a share of all."""
    generator = torch.Generator().manual_seed(seed)
    for parameter in module.parameters():
        flat = parameter.view(-1)
        count = max(1, int(share * flat.numel()))
        where = torch.randperm(flat.numel(), generator=generator)[:count]
        flat[where] = torch.randn(count, generator=generator)


def same(procs: WorkerProcesses, *expected: Any) -> None:
    """Every worker has all of its own; one stands for all."""
    all_of = expected * len(procs.workers) if len(expected) == 1 else expected
    strategy = procs.scheme.strategy
    assert procs.ask("fingerprint") == [fingerprint(one, strategy) for one in all_of]


# -- what the report says ------------------------------------------------------------------------------


def test_a_small_change_is_a_small_patch(yard: Yard) -> None:
    source = net(1)
    procs = yard.procs(source, [net(2)])
    first = procs.scheme.last_report
    assert first is not None
    assert (first.version, first.encoding) == (0, "bucket")  # all weights
    poke(source, 3)
    report = procs.scheme.send()
    assert report.encoding == "patch"
    assert 0 < report.wire_bytes < SMALL
    assert report.dense_bytes == sum(4 * one.numel() for one in source.parameters())
    assert report.changed_fraction == 4 / sum(one.numel() for one in source.parameters())
    assert list(report.seconds) == ["extract", "encode", "send", "ack"]
    assert all(value >= 0 for value in report.seconds.values())
    assert set(report.apply_seconds) == set(report.stall_seconds) == {0}
    same(procs, source)


@pytest.mark.parametrize("share", [0.01, 0.1, 0.2, 0.4, 0.6, 0.8, 0.95, 1.0])
def test_the_report_tells_what_travelled(one_yard: Yard, share: float) -> None:
    source = net(1)
    procs = one_yard.procs(source, [net(2)])
    poke(source, 3, share)
    report = procs.scheme.send()
    assert report.encoding == ("patch" if report.wire_bytes < 0.9 * report.dense_bytes else "bucket")
    assert report.changed_fraction == pytest.approx(share, abs=0.01)
    assert report.wire_bytes < 1.01 * report.dense_bytes
    if share <= 0.2:
        assert report.encoding == "patch"
    if share >= 0.9:
        assert report.encoding == "bucket"
    same(procs, source)
    poke(source, 4)
    assert procs.scheme.send().encoding == "patch"
    same(procs, source)


def test_a_patch_of_more_than_half_the_weights_travels(one_yard: Yard) -> None:
    source = {name: torch.zeros(1 << 20) for name in "abcd"}
    procs = one_yard.procs(source, [{name: torch.ones(1 << 20) for name in source}])
    for name in "abc":
        source[name].add_(1.0)
    report = procs.scheme.send()
    assert report.encoding == "patch"
    assert report.wire_bytes / report.dense_bytes == pytest.approx(0.75, abs=0.01)
    same(procs, source)


def test_nothing_changed(yard: Yard) -> None:
    source = net(1)
    procs = yard.procs(source, [net(2)])
    report = procs.scheme.send()
    assert (report.version, report.encoding, report.changed_fraction) == (1, "patch", 0.0)
    assert report.wire_bytes < 200
    assert procs.ask("version") == [1]
    same(procs, source)


def test_bytes_in_shared_memory_count_once() -> None:
    for cls in (SharedMemWeightSyncScheme, MultiProcessWeightSyncScheme):
        with ExitStack() as stack:
            yard = Yard("shared_mem", stack)
            yard._cls = cls
            source = net(1)
            procs = yard.procs(source, [net(2), net(3), net(4)])
            poke(source, 5)
            assert procs.scheme.send().wire_bytes < SMALL / 4


def test_bits_that_compare_equal_are_sent(yard: Yard) -> None:
    source = {"a": torch.zeros(1000), "b": torch.full((1000,), float("nan"))}
    procs = yard.procs(source, [{name: torch.ones(1000) for name in source}])
    same(procs, source)
    source["a"][5] = -0.0
    source["b"].view(torch.int32)[7] += 1
    report = procs.scheme.send()
    assert (report.encoding, report.changed_fraction) == ("patch", 2 / 2000)
    same(procs, source)


# -- who gets what -------------------------------------------------------------------------------------


def test_a_restarted_worker_gets_all_and_then_patches(yard: Yard) -> None:
    source = net(1)
    procs = yard.procs(source, [net(2), net(3)])
    poke(source, 4)
    procs.scheme.send()
    procs.workers[0].call("shutdown")
    with pytest.raises(SyncFailedError) as caught:
        procs.scheme.send()
    assert {idx: type(error) for idx, error in caught.value.failures.items()} == {0: LinkClosedError}
    if procs.method == "thread":
        return  # a link in memory ends with its worker
    procs.workers[0].stop()
    procs.workers.pop(0)
    procs.hire(0, net(5)).call("connect")
    same(procs, source)
    poke(source, 6)
    report = procs.scheme.send()
    assert report.encoding == "patch"
    assert report.wire_bytes < SMALL
    same(procs, source)


@pytest.mark.parametrize("missed", [3, 20])
def test_a_busy_worker_gets_all_that_it_missed(yard: Yard, missed: int) -> None:
    source = net(1)
    procs = yard.procs(source, [net(2), net(3)])
    procs.workers[0].call("hold")
    for step in range(missed):
        poke(source, step)
        handle = procs.scheme.send_async()
    assert procs.workers[0].call("version") == 0
    procs.workers[0].call("release")
    handle.wait()
    assert procs.ask("version") == [missed, missed]
    same(procs, source)


@pytest.mark.parametrize(("share", "sent"), [(0.0, "patch"), (0.85, "bucket")])  # a patch would be larger
def test_many_versions_keep_few_buffers(yard: Yard, share: float, sent: str) -> None:
    source = net(1)
    procs = yard.procs(source, [net(2)])
    for step in range(50):
        poke(source, step, share)
        assert procs.scheme.send().encoding == sent
    assert procs.scheme._sender is not None
    assert len(procs.scheme._sender._pool._slots) < 15
    same(procs, source)


def test_workers_with_weights_of_their_own_come_together(yard: Yard) -> None:
    """Both have a version 1, with other weights each: a patch for one must not reach the other."""
    first, second = net(1), net(2)
    procs = yard.procs(first, [net(3), net(4)])
    procs.scheme.send({0: first, 1: second})
    same(procs, first, second)
    together = copy.deepcopy(first)
    poke(together, 5)
    procs.scheme.send(together)
    same(procs, together)
    poke(together, 6)
    assert procs.scheme.send().version == 3
    same(procs, first)
    report = procs.scheme.send(together)
    assert report.encoding == "patch"
    same(procs, together)


def test_an_aborted_step_brings_no_workers_together(one_yard: Yard) -> None:
    scheme, first, second = one_yard.scheme(), Brittle(1), Brittle(2)
    group_schemes([scheme])
    procs = one_yard.start(scheme, first, [Brittle(3), Brittle(4)])
    scheme.send({0: first, 1: second})
    staged = scheme.stage(Brittle(5), None, "step/1")
    assert staged.wait_staged() == {}
    staged.abort()
    same(procs, first, second)
    scheme.send({0: first, 1: second})
    same(procs, first, second)


def brittle(seed: int, **options: Any) -> Brittle:
    """One that is large enough for patches."""
    model = Brittle(seed, **options)
    model.net = net(seed)
    return model


@pytest.mark.parametrize("small", [False, True], ids=["by two patches", "whole"])
def test_a_step_together_after_a_failure(yard: Yard, small: bool) -> None:
    """A worker that did not take a version is brought up to the next one, which is only staged at first."""
    make = Brittle if small else brittle
    scheme, source = yard.scheme(), make(1)
    group_schemes([scheme])
    procs = yard.start(scheme, source, [make(2), make(3, refuses="nothing")])
    poke(source, 4)
    source.note = "poison"
    with pytest.raises(SyncFailedError, match="poison refused"):
        scheme.send()
    source.note = "fine"
    poke(source, 5)
    start = time.monotonic()
    send_together({scheme: None})
    assert time.monotonic() - start < 5.0
    same(procs, source)


def test_one_after_the_other_over_many_workers_does_not_block(one_yard: Yard) -> None:
    for encoding in (DenseEncoding(), BucketEncoding(), PatchEncoding()):
        source = net(1)
        procs = one_yard.procs(source, [net(2)] * 8, WeightStrategy(encoding=encoding))
        start = time.monotonic()
        for step in range(24):
            poke(source, step)
            procs.scheme.send(worker_ids=step % 8)
        assert time.monotonic() - start < 5.0
        assert sorted(procs.scheme.worker_versions.values()) == list(range(17, 25))
        procs.scheme.send()
        same(procs, source)


def test_many_busy_workers_do_not_block_the_sender(one_yard: Yard) -> None:
    source = net(1)
    procs = one_yard.procs(source, [net(2)] * 8)
    for worker in procs.workers:
        worker.call("hold")
    start = time.monotonic()
    for step in range(6):
        poke(source, step)
        handle = procs.scheme.send_async()
    assert time.monotonic() - start < 5.0
    for worker in procs.workers:
        worker.call("release")
    handle.wait()
    same(procs, source)


# -- what the worker does ------------------------------------------------------------------------------


def test_a_worker_that_wrote_into_its_weights(yard: Yard) -> None:
    source = net(1)
    procs = yard.procs(source, [net(2)])
    for number, write in enumerate(["fill", "inplace", "pointing"]):
        if write == "fill":
            procs.workers[0].call("fill", 7.0)
        else:
            procs.workers[0].call("apply_weights", net(9), write == "inplace")
        poke(source, number)
        procs.scheme.send()
        same(procs, source)


def test_a_worker_that_wrote_into_its_weights_and_then_changes_its_model(yard: Yard) -> None:
    source = net(1)
    procs = yard.procs(source, [net(2)])
    poke(source, 3)
    procs.scheme.send()
    procs.workers[0].call("fill", 7.0)
    procs.workers[0].call("replace_model", net(4))
    poke(source, 4)
    procs.scheme.send()
    same(procs, source)


def test_a_worker_that_writes_while_a_patch_waits(yard: Yard) -> None:
    source = net(1)
    procs = yard.procs(source, [net(2)])
    worker = procs.workers[0]
    worker.call("hold")
    poke(source, 3)
    handle = procs.scheme.send_async()
    time.sleep(0.2)
    worker.call("fill", 7.0)
    worker.call("release")
    handle.wait()
    same(procs, source)


@pytest.mark.parametrize("stable", [False, True], ids=["pointing", "copying"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_worker_that_changes_its_model(yard: Yard, stable: bool, dtype: torch.dtype) -> None:
    source = net(1)
    procs = yard.procs(source, [net(2)], stable_addresses=stable)
    poke(source, 3)
    procs.scheme.send()
    procs.workers[0].call("replace_model", net(4).to(dtype))
    for step in range(3):
        same(procs, copy.deepcopy(source).to(dtype))
        poke(source, step)
        assert procs.scheme.send().encoding == "patch"
    same(procs, copy.deepcopy(source).to(dtype))


def spoil(payload: torch.Tensor) -> None:
    payload[40:] ^= 0x5A


@pytest.mark.parametrize("values", ["raw", "relative"])
def test_a_spoilt_patch_is_not_applied(yard: Yard, values: Any) -> None:
    """It is spoilt after it was made, where no checksum of the link sees it."""
    source = net(1)
    strategy = WeightStrategy(encoding=PatchEncoding(values=values, compression="zstd"))
    procs = yard.procs(source, [net(2)], strategy)
    poke(source, 4)
    procs.scheme.send()
    before = copy.deepcopy(source)
    procs.workers[0].call("hold")
    for step in (5, 6):  # one waits in the worker, one in the sender
        poke(source, step)
        procs.scheme.send_async()
    assert procs.scheme._sender is not None
    spoil(procs.scheme._sender.table[0].group._past[-1].payload)  # type: ignore[union-attr]
    same(procs, before)
    procs.workers[0].call("release")
    wait_until(lambda: procs.scheme.worker_versions[0] == 3)  # it joins again by itself
    same(procs, source)
    poke(source, 7)
    assert procs.scheme.send().encoding == "patch"
    same(procs, source)


def test_a_snapshot_that_still_advances_is_waited_for_by_every_thread() -> None:
    """A joining worker's thread and the next update read it at the same time."""
    schema = WeightSchema.of({"w": torch.zeros(1 << 22)})
    tracker = PatchEncoding().tracker(schema, None)
    for step in range(3):
        tracker.begin([torch.zeros(1 << 22)])
        tracker.advance(tracker.compare([torch.ones(1 << 22)]))
        with ThreadPoolExecutor(4) as pool:
            seen = list(pool.map(lambda _: float(tracker.weights()[0].sum()), range(4)))
        assert seen == [float(1 << 22)] * 4, step
