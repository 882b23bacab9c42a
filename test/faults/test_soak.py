"""Two minutes of everything at once, from a printed seed; SOAK_SEED=... repeats one."""

from __future__ import annotations

import os
import random
import signal
import time

import pytest
from faults_tools import (
    Crew,
    Stripes,
    assert_whole,
    compute,
    end_compute,
    eventually,
    fill,
    hold,
    join,
    let_go,
    wait_version,
)

from weight_update import SyncFailedError, WeightSyncScheme

SECONDS = 60.0
WORKERS = 3


def make() -> Stripes:
    return Stripes(24, 2048)


class Soak:
    """A trainer that sends all the time, and workers to which things happen."""

    def __init__(self, kind: type[WeightSyncScheme], crew: Crew, seed: int) -> None:
        self.random, self.crew, self.model = random.Random(seed), crew, make()
        self.scheme = crew.scheme(kind, timeout=0.7)
        self.workers = crew.launch(self.scheme, self.model, make, WORKERS)
        self.stopped: set[int] = set()
        self.held: set[int] = set()
        self.version = 0
        self.failed = 0
        for worker in self.workers:
            worker.call(compute)

    def send(self) -> None:
        self.version += 1
        chosen = self.random.choice([None, None, None, [0], [1, 2]])
        try:
            self.scheme.send(fill(self.model, self.version), worker_ids=chosen)
        except SyncFailedError as error:
            self.failed += 1
            assert set(error.failures) <= set(range(WORKERS))  # noqa: PT017 - it may also not be raised

    def send_some(self) -> None:
        """Many while all workers answer; few while each send has to wait for its timeout."""
        for _ in range(self.random.randrange(1, 3 if self.stopped or self.held else 30)):
            self.send()
        for _ in range(self.random.randrange(20)):
            self.version += 1
            self.scheme.send_async(fill(self.model, self.version))

    def happen(self) -> None:
        idx = self.random.randrange(WORKERS)
        if idx in self.stopped and self.random.random() < 0.7:
            self.workers[idx].signal(signal.SIGCONT)
            self.stopped.discard(idx)
        elif idx in self.held and self.random.random() < 0.7:
            self.workers[idx].call(let_go)
            self.held.discard(idx)
        elif not {idx} & (self.stopped | self.held) and self.random.random() < 0.6:
            self.slow_down(idx)
        else:
            self.restart(idx)

    def slow_down(self, idx: int) -> None:
        if self.random.random() < 0.5:
            self.workers[idx].signal(signal.SIGSTOP)
            self.stopped.add(idx)
        else:
            self.workers[idx].call(hold)  # its updates wait, and fail after the timeout
            self.held.add(idx)

    def restart(self, idx: int) -> None:
        if not {idx} & (self.stopped | self.held) and self.random.random() < 0.7:
            assert_whole(self.workers[idx].call(end_compute))
        self.workers[idx].kill()
        self.stopped.discard(idx)
        self.held.discard(idx)
        self.workers[idx] = fresh = self.crew.start(self.scheme, idx, make)
        fresh.begin(join)
        fresh.result()
        fresh.call(compute)

    def end(self) -> None:
        for idx in self.stopped:
            self.workers[idx].signal(signal.SIGCONT)
        for idx in self.held:
            self.workers[idx].call(let_go)
        assert eventually(self.all_joined), self.scheme.worker_versions
        last = self.scheme.send(fill(self.model, self.version + 1)).version
        for worker in self.workers:
            assert worker.call(wait_version, last) == last
            assert_whole(worker.call(end_compute))

    def all_joined(self) -> bool:
        try:
            self.send()
        except SyncFailedError:
            return False
        return None not in self.scheme.worker_versions.values()


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_everything_at_once(kind: type[WeightSyncScheme], crew: Crew) -> None:
    seed = int(os.environ.get("SOAK_SEED", random.SystemRandom().randrange(1 << 32)))
    print(f"seed {seed}")
    soak = Soak(kind, crew, seed)
    end, events = time.monotonic() + SECONDS, 0
    while time.monotonic() < end:
        soak.send_some()
        soak.happen()
        events += 1
    soak.end()
    assert events > 10
    assert soak.version > 100


def test_the_soak_counts_what_it_does(kind: type[WeightSyncScheme], crew: Crew) -> None:
    """A short one, with one event of each kind."""
    soak = Soak(kind, crew, seed=1)
    soak.send()
    soak.workers[1].signal(signal.SIGSTOP)
    soak.stopped.add(1)
    soak.send()
    soak.restart(2)
    soak.end()
    assert soak.version >= 2
