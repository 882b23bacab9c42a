"""Promise 1: a forward pass sees one version, never two, while updates are sent without pause."""

from __future__ import annotations

import threading
import time

import pytest
import torch
from faults_kinds import quick_over
from faults_tools import (
    START,
    Passes,
    Processes,
    Remote,
    Stripes,
    Worker,
    assert_whole,
    compute,
    end_compute,
    eventually,
    fill,
    report,
)
from marks import quick_for

from weight_update import WeightSyncScheme

SECONDS = 1.5
SHAPES = {"200_tiny": (200, 4), "24_of_64KB": (24, 1 << 14), "6_of_1MB": (6, 1 << 18)}


def send_for(scheme: WeightSyncScheme, model: Stripes, seconds: float) -> int:
    version, end = 0, time.monotonic() + seconds
    while time.monotonic() < end:
        version += 1
        assert scheme.send(fill(model, version)).version == version
    return version


def all_reached(workers: list[Remote], version: int) -> bool:
    return all(one["newest"] == version for worker in workers for one in worker.call(report))


@pytest.mark.parametrize("shape", quick_for(SHAPES.values(), SHAPES["24_of_64KB"]), ids=SHAPES)
def test_passes_without_pause_see_whole_versions(kind, procs: Processes, shape) -> None:
    model, scheme = Stripes(*shape), procs.scheme(kind)
    workers = procs.launch(scheme, model, lambda: Stripes(*shape), 2)
    for worker in workers:
        worker.call(compute)
    version = send_for(scheme, model, SECONDS)
    assert version > 5
    assert eventually(lambda: all_reached(workers, version))
    for worker in workers:
        assert_whole(worker.call(end_compute), at_least=10)


@pytest.mark.slow
def test_passes_in_several_threads_of_one_worker(kind, procs: Processes) -> None:
    model, scheme = Stripes(24, 4096), procs.scheme(kind)
    (worker,) = procs.launch(scheme, model, lambda: Stripes(24, 4096), 1)
    worker.call(compute, 3)
    version = send_for(scheme, model, SECONDS)
    assert version > 5
    assert eventually(lambda: all_reached([worker], version))
    assert_whole(worker.call(end_compute), at_least=10)


@quick_over("shared_mem")
def test_async_sends_back_to_back(kind, procs: Processes) -> None:
    model, scheme = Stripes(24, 1 << 14), procs.scheme(kind)
    workers = procs.launch(scheme, model, lambda: Stripes(24, 1 << 14), 2)
    for worker in workers:
        worker.call(compute)
    for version in range(1, 301):
        handle = scheme.send_async(fill(model, version))
        fill(model, -1.0)  # the trainer's changes after the call reach no worker
    assert handle.wait(30.0).version == 300
    assert eventually(lambda: all_reached(workers, 300))
    for worker in workers:
        assert_whole(worker.call(end_compute), at_least=2)


def compute_parts(me: Worker) -> None:
    """Compute by calling submodules directly, which no hook guards, inside hold()."""

    def look() -> torch.Tensor:
        with me.scheme.hold():
            seen = START
            for block in me.model.blocks:
                seen = block(seen)
                time.sleep(0)  # lets the receiver's thread run, if it can
            return me.model(seen)  # a guarded pass inside hold() is fine

    me.passes = [Passes(look)]


@quick_over("shared_mem")
def test_hold_around_submodules(kind, procs: Processes) -> None:
    model, scheme = Stripes(100, 256), procs.scheme(kind)
    workers = procs.launch(scheme, model, lambda: Stripes(100, 256), 2)
    for worker in workers:
        worker.call(compute_parts)
    version = send_for(scheme, model, SECONDS)
    assert version > 5
    assert eventually(lambda: all_reached(workers, version))
    for worker in workers:
        assert_whole(worker.call(end_compute), at_least=10)


@quick_over("distributed")
def test_copying_receivers_see_whole_versions(kind, procs: Processes) -> None:
    model, scheme = Stripes(24, 1 << 14), procs.scheme(kind, stable_addresses=True)
    workers = procs.launch(scheme, model, lambda: Stripes(24, 1 << 14), 2)
    for worker in workers:
        worker.call(compute)
    version = send_for(scheme, model, SECONDS)
    assert eventually(lambda: all_reached(workers, version))
    for worker in workers:
        assert_whole(worker.call(end_compute), at_least=10)


def test_the_detector_catches_an_ungated_writer() -> None:
    model, stop = Stripes(200, 4), threading.Event()

    def write() -> None:
        version = 0
        while not stop.is_set():
            version += 1
            for parameter in model.parameters():
                parameter.data.fill_(version)

    writer = threading.Thread(target=write, daemon=True)
    passes = Passes(lambda: model(START))
    try:
        writer.start()
        assert eventually(lambda: len(passes.torn) > 0, 20.0)
    finally:
        stop.set()
        seen = passes.end()
        writer.join(5.0)
    with pytest.raises(AssertionError):
        assert_whole([seen])
