"""A trainer dies while a process that it forked, or a program that it started, lives on."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from collections.abc import Iterator

import pytest
from faults_tools import WAIT, Processes, Stripes, Worker, fill

from weight_update import DistributedWeightSyncScheme, LinkClosedError

LIMIT = 5.0
SHAPE = (4, 1 << 16)  # more than what travels with a signal


def make() -> Stripes:
    return Stripes(*SHAPE)


def open_as_trainer(me: Worker) -> dict[str, object]:
    me.scheme = DistributedWeightSyncScheme(timeout=WAIT)
    me.scheme.init_on_sender(model=me.model, num_workers=1)
    return {"port": me.scheme.port, "token": me.scheme.token}


def send_once(me: Worker) -> None:
    me.scheme.connect(timeout=WAIT)
    me.scheme.send(fill(me.model, 1.0))


def leave_a_fork(me: Worker) -> int:
    child = os.fork()
    if child == 0:
        time.sleep(WAIT)
        os._exit(0)
    return child


def leave_a_program(me: Worker) -> int:
    """Start one that gets all descriptors which are not closed by the kernel."""
    return subprocess.Popen(["sleep", str(WAIT)], close_fds=False).pid


def join_from(me: Worker, host: str | None, where: dict[str, object]) -> None:
    me.scheme = DistributedWeightSyncScheme(host=host, **where)
    me.scheme.init_on_receiver(model=me.model, worker_idx=0)
    me.scheme.connect(timeout=WAIT)


def seconds_until_the_end(me: Worker) -> float:
    start = time.monotonic()
    try:
        while True:
            me.scheme.receive(timeout=WAIT)
    except LinkClosedError:
        return time.monotonic() - start


@pytest.fixture
def procs() -> Iterator[Processes]:
    procs = Processes()
    yield procs
    procs.close()


@pytest.mark.parametrize("leave", [leave_a_fork, leave_a_program], ids=["fork", "program"])
@pytest.mark.parametrize("host", [None, "elsewhere"], ids=["this_host", "another_host"])
def test_a_worker_learns_of_it(procs: Processes, host: str | None, leave) -> None:
    trainer, worker = procs.start(None, 0, make), procs.start(None, 0, make)
    worker.begin(join_from, host, trainer.call(open_as_trainer))
    trainer.call(send_once)
    worker.result()
    child = trainer.call(leave)
    try:
        worker.begin(seconds_until_the_end)
        trainer.signal(signal.SIGKILL)
        assert worker.result(LIMIT) < LIMIT
    finally:
        os.kill(child, signal.SIGKILL)
