"""Answers that the thread which waits for them reads, while signal handlers raise in it."""

from __future__ import annotations

import random
import signal
from collections.abc import Iterator
from contextlib import closing, nullcontext

import pytest
from faults_tools import Processes, Stripes, Worker, eventually, fill, leave

from weight_update import SharedMemWeightSyncScheme

PROMPT = 15.0
"""Seconds: more than any call here takes on a busy machine, and fewer than a timeout of the library."""
UPDATES = 300


def two_layers() -> Stripes:
    return Stripes(2, 64)


@pytest.fixture(autouse=True)
def interrupts() -> Iterator[None]:
    before = signal.signal(signal.SIGALRM, signal.default_int_handler)
    yield
    signal.setitimer(signal.ITIMER_REAL, 0)
    signal.signal(signal.SIGALRM, before)


def version_of(me: Worker) -> int | None:
    version: int | None = me.scheme.version
    return version


@pytest.mark.parametrize("reads", [True, False])
def test_interrupts_while_the_trainer_waits(reads: bool) -> None:
    """If the trainer does not read all answers itself, it waits for threads that do."""
    seed = random.randrange(1 << 30)
    print(f"seed {seed}")
    rng, interrupted = random.Random(seed), 0
    with closing(Processes()) as processes:
        scheme, model = processes.scheme(SharedMemWeightSyncScheme, timeout=PROMPT), two_layers()
        workers = processes.launch(scheme, model, two_layers, 2)
        for version in range(1, UPDATES):
            with scheme._require_sender().attended() if reads else nullcontext():
                handle = scheme.send_async(fill(model, version))
                try:
                    signal.setitimer(signal.ITIMER_REAL, rng.uniform(1e-5, 1e-3))
                    handle.wait()
                    signal.setitimer(signal.ITIMER_REAL, 0)  # or it came already
                except KeyboardInterrupt:
                    interrupted += 1
        assert interrupted > UPDATES // 10
        assert scheme.send(fill(model, UPDATES)).version == UPDATES
        assert [worker.call(version_of) for worker in workers] == [UPDATES, UPDATES]
        workers[0].call(leave, timeout=PROMPT)
        assert eventually(lambda: scheme.worker_versions[0] is None), "nobody reads what this worker sends"
