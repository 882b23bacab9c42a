"""Promise 5: a process that dies is named within the timeout, and all others go on."""

from __future__ import annotations

import contextlib
import itertools
import json
import multiprocessing as mp
import os
import re
import select
import signal
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from faults_tools import (
    START,
    WAIT,
    Passes,
    Processes,
    Remote,
    Stripes,
    assert_whole,
    compute,
    end_compute,
    eventually,
    fill,
    hold,
    join,
    report,
    small,
    version_of,
    wait_version,
    within,
)
from marks import quick_for

from weight_update import (
    LinkClosedError,
    SyncFailedError,
    WeightSyncError,
    WeightSyncScheme,
    group_schemes,
    send_together,
)

LIMIT = 2.0
"""Timeout of the schemes here; deaths are noticed sooner than that."""


def send_on(scheme: WeightSyncScheme, model: Stripes, survivors: list[Remote], versions: range) -> None:
    """The survivors keep getting updates."""
    for version in versions:
        report = scheme.send(fill(model, version), worker_ids=[worker.idx for worker in survivors])
        assert sorted(report.apply_seconds) == [worker.idx for worker in survivors]
        assert [worker.call(version_of) for worker in survivors] == [version] * len(survivors)


def test_a_caller_that_knows_the_processes_need_not_wait(kind, procs: Processes) -> None:
    scheme = procs.scheme(kind, timeout=WAIT)
    scheme.init_on_sender(model=small(), num_workers=2)
    workers = [procs.start(scheme, idx, small) for idx in range(2)]
    workers[1].kill()
    workers[0].begin(join)
    scheme.worker_alive = lambda idx: workers[idx].process.is_alive()
    with within(5.0), pytest.raises(SyncFailedError, match="worker 1") as caught:
        scheme.connect(timeout=WAIT)
    assert set(caught.value.failures) == {1}
    assert workers[0].result() == 0


def test_killed_while_idle(kind, procs: Processes) -> None:
    scheme, model = procs.scheme(kind, timeout=LIMIT), small()
    workers = procs.launch(scheme, model, small, 3)
    workers[1].kill()
    with within(LIMIT + 1), pytest.raises(SyncFailedError, match="worker 1") as caught:
        scheme.send(fill(model, 1))
    assert set(caught.value.failures) == {1}
    assert isinstance(caught.value.failures[1], LinkClosedError)
    assert caught.value.report is not None
    assert sorted(caught.value.report.apply_seconds) == [0, 2]
    assert [workers[idx].call(version_of) for idx in (0, 2)] == [1, 1]
    assert scheme.worker_versions == {0: 1, 1: None, 2: 1}
    send_on(scheme, model, [workers[0], workers[2]], range(2, 5))


def test_killed_while_it_applies(kind, procs: Processes) -> None:
    scheme, model = procs.scheme(kind, timeout=WAIT), small()
    workers = procs.launch(scheme, model, small, 2)
    workers[1].call(hold)  # the update waits for the end of a pass that never ends
    handle = scheme.send_async(fill(model, 1))
    assert workers[0].call(wait_version, 1) == 1
    assert not handle.done()
    workers[1].kill()
    with within(3.0), pytest.raises(SyncFailedError, match="worker 1"):
        handle.wait(WAIT)
    assert handle.done()
    send_on(scheme, model, [workers[0]], range(2, 5))


@pytest.mark.parametrize("delay", quick_for([0.0, 0.01, 0.03, 0.1], 0.03))
def test_killed_in_the_middle_of_large_sends(kind, procs: Processes, delay: float) -> None:
    def large() -> Stripes:
        return Stripes(8, 1 << 20)

    scheme, model = procs.scheme(kind, timeout=10.0), large()
    workers = procs.launch(scheme, model, large, 2)
    for worker in workers:
        worker.call(compute)
    killer = threading.Timer(delay, workers[1].signal, [signal.SIGKILL])
    killer.start()
    version = 0
    with within(10.0), pytest.raises(SyncFailedError, match="worker 1"):  # noqa: PT012 - some send will fail
        while True:
            version += 1
            scheme.send(fill(model, version))
    killer.join()
    assert workers[0].call(wait_version, version) == version
    send_on(scheme, model, [workers[0]], range(version + 1, version + 4))
    assert_whole(workers[0].call(end_compute))


def test_killed_with_an_update_staged(kind, procs: Processes) -> None:
    schemes = [procs.scheme(kind, timeout=WAIT) for _ in range(1)]
    group_schemes(schemes)
    scheme, model = schemes[0], small()
    workers = procs.launch(scheme, model, small, 2)
    handle = scheme.stage(fill(model, 1), None, "step/1")
    assert handle.wait_staged() == {}
    workers[1].kill()
    handle.commit()
    with within(3.0), pytest.raises(SyncFailedError, match="worker 1"):
        handle.wait(WAIT)
    assert workers[0].call(wait_version, 1) == 1
    send_on(scheme, model, [workers[0]], range(2, 5))


def test_restarted_after_a_staged_update(kind, procs: Processes) -> None:
    """A worker that joins after send_together() gets the committed version at once."""
    scheme, model = procs.scheme(kind, timeout=WAIT), small()
    group_schemes([scheme])
    workers = procs.launch(scheme, model, small, 2)
    send_together({scheme: fill(model, 1)})
    workers[1].kill()
    workers[1] = procs.start(scheme, 1, small)
    assert workers[1].call(join, timeout=10.0) == 1
    send_together({scheme: fill(model, 2)})
    send_on(scheme, model, workers, range(3, 5))


def test_everybody_killed(kind, procs: Processes) -> None:
    scheme, model = procs.scheme(kind, timeout=LIMIT), small()
    workers = procs.launch(scheme, model, small, 2)
    for worker in workers:
        worker.kill()
    with within(LIMIT + 1), pytest.raises(SyncFailedError) as caught:
        scheme.send(fill(model, 1))
    assert set(caught.value.failures) == {0, 1}
    with within(5.0):
        scheme.shutdown()


# -- the sender dies -----------------------------------------------------------------------------------


FAMILY_SHAPE = (8, 1 << 19)


def train_without_end(kind: type[WeightSyncScheme], folder: Path) -> None:
    """Run a trainer that starts two workers, and sends without pause."""
    torch.set_num_threads(1)
    scheme, model = kind(timeout=WAIT), Stripes(*FAMILY_SHAPE)
    scheme.init_on_sender(model=model, num_workers=2)
    for idx in range(2):
        mp.get_context("fork").Process(target=work_until_alone, args=(scheme, idx, folder)).start()
    scheme.connect(timeout=WAIT)
    for version in itertools.count(1):
        scheme.send(fill(model, version))
        if version == 3:
            (folder / "sends").touch()


def work_until_alone(scheme: WeightSyncScheme, idx: int, folder: Path) -> None:
    """Run a worker that computes until its trainer is gone, and write down what it saw."""
    torch.set_num_threads(1)
    model = Stripes(*FAMILY_SHAPE)
    scheme.init_on_receiver(model=model, worker_idx=idx)
    scheme.connect(timeout=WAIT)
    (folder / f"pid {idx}").write_text(str(os.getpid()))
    passes = Passes(lambda: model(START))
    with pytest.raises(WeightSyncError):  # noqa: PT012 - the last of many calls
        while True:
            scheme.receive()
    before = passes.report()
    time.sleep(0.2)
    found = {"before": before, "after": passes.end(), "last": model(START).tolist()}
    part = folder / f"part {idx}"
    part.write_text(json.dumps(found))
    part.rename(folder / f"found {idx}")
    scheme.shutdown()


@contextlib.contextmanager
def family(kind: type[WeightSyncScheme], folder: Path) -> Iterator[tuple[mp.process.BaseProcess, list[int]]]:
    """Yield a trainer that sends, and the pids of its workers, which are no children of the test."""
    trainer = mp.get_context("fork").Process(target=train_without_end, args=(kind, folder))
    trainer.start()
    files = [folder / f"pid {idx}" for idx in range(2)]
    try:
        assert eventually(lambda: (folder / "sends").exists())
        yield trainer, [int(file.read_text()) for file in files]
    finally:
        trainer.kill()
        trainer.join()
        for file in files:
            with contextlib.suppress(FileNotFoundError, ProcessLookupError):
                os.kill(int(file.read_text()), signal.SIGKILL)


def slots_of(pid: int) -> set[str]:
    """Return the names of the slots that a process maps."""
    try:
        maps = Path(f"/proc/{pid}/maps").read_text()
    except OSError:  # it has ended
        return set()
    return set(re.findall(r"memfd:(weight_update-\w+)", maps))


def mapping(slots: set[str]) -> list[int]:
    """Return the processes that map one of ``slots``."""
    pids = [int(path.name) for path in Path("/proc").glob("[0-9]*")]
    return [pid for pid in pids if slots_of(pid) & slots]


@pytest.mark.parametrize("delay", quick_for([0.0, 0.013, 0.05, 0.11], 0.013))
def test_sender_killed_at_any_moment(kind, delay: float, tmp_path: Path) -> None:
    """Workers keep one whole version, go on computing, learn of it, and leave promptly."""
    with family(kind, tmp_path) as (trainer, pids):
        slots = slots_of(pids[0]) - slots_of(os.getpid())  # inherited ones
        assert slots
        on_one_host = "host_name" not in vars(kind)
        assert len(mapping(slots)) == 3 if on_one_host else pids[0] in mapping(slots)
        ends = [os.pidfd_open(pid) for pid in pids]
        time.sleep(delay)
        trainer.kill()
        for idx, end in enumerate(ends):
            file = tmp_path / f"found {idx}"
            assert eventually(file.exists, 10.0)
            seen = json.loads(file.read_text())
            assert seen["before"]["torn"] == seen["after"]["torn"] == []
            assert seen["after"]["count"] > seen["before"]["count"]  # it goes on computing
            assert seen["last"][0] == seen["last"][1]
            assert select.select([end], [], [], 5.0)[0], "a worker goes on"
            os.close(end)
        assert mapping(slots) == []  # slots have no names: only a process can keep them


def test_workers_in_the_report(kind, procs: Processes) -> None:
    """A death between two sends shows in worker_versions without any call."""
    scheme, model = procs.scheme(kind, timeout=LIMIT), small()
    workers = procs.launch(scheme, model, small, 2)
    workers[0].call(compute)
    workers[1].kill()
    assert eventually(lambda: scheme.worker_versions == {0: 0, 1: None}, 5.0)
    assert_whole(workers[0].call(report), at_least=0)
