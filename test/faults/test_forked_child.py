"""Processes that a trainer forked, or programs that it started."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from collections.abc import Callable, Iterator

import pytest
import torch
from faults_tools import START, WAIT, Processes, Stripes, Worker, fill, weights_of
from marks import slow
from pairs import connect_pair

from weight_update import (
    DistributedWeightSyncScheme,
    LifecycleError,
    LinkClosedError,
    MultiProcessWeightSyncScheme,
    SharedMemWeightSyncScheme,
    WeightSyncScheme,
)

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


def error_in_a_child(call: Callable[[], object]) -> str:
    """Fork, and return the LifecycleError that ``call`` raises in the child."""
    reader, writer = os.pipe()
    if os.fork() == 0:
        signal.alarm(int(LIMIT))  # it may hang in a lock that another thread held
        try:
            call()
        except LifecycleError as error:
            os.write(writer, str(error).encode())
        finally:
            os._exit(0)
    os.close(writer)
    with os.fdopen(reader) as pipe:
        os.wait()
        return pipe.read()


@pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")
@pytest.mark.parametrize("kind", [SharedMemWeightSyncScheme, MultiProcessWeightSyncScheme])
def test_a_child_does_not_send_in_the_name_of_the_trainer(kind: type[WeightSyncScheme]) -> None:
    model, target = make(), make()
    with kind(timeout=WAIT) as scheme:
        scheme.init_on_sender(model=model, num_workers=1)
        assert "init_on_receiver() in this process first" in error_in_a_child(scheme.connect)
        with connect_pair(scheme, model, target) as receiver:
            with scheme._process.sender._sending:
                assert "not a sender in this process" in error_in_a_child(scheme.send)
            assert "init_on_receiver() in this process first" in error_in_a_child(receiver.connect)
            assert "gets no updates" in error_in_a_child(receiver.receive)
            scheme.send(fill(model, 1.0))
            assert target(START).tolist() == [1.0, 1.0]


def fork_a_player(me: Worker) -> None:
    """Fork a child that waits until the end of a pipe, and writes the weights that it has then."""
    go, me.go = os.pipe()
    me.found, found = os.pipe()
    me.child = os.fork()
    if me.child == 0:
        os.close(me.go)
        os.read(go, 1)
        with me.scheme.hold():
            values = me.model(START)
        os.write(found, repr(sorted(set(values.tolist()))).encode())
        os._exit(0)
    os.close(go)
    os.close(found)


def weights_of_the_player(me: Worker) -> str:
    os.close(me.go)
    with os.fdopen(me.found) as pipe:
        os.waitpid(me.child, 0)
        return pipe.read()


@pytest.mark.parametrize(
    "kind",
    [
        SharedMemWeightSyncScheme,
        slow(MultiProcessWeightSyncScheme),
        slow(DistributedWeightSyncScheme),
    ],
)
def test_a_child_of_a_worker_keeps_its_weights(procs: Processes, kind: type[WeightSyncScheme]) -> None:
    model, value = make(), 1.0
    scheme = procs.scheme(kind, timeout=WAIT)
    (worker,) = procs.launch(scheme, fill(model, value), make, 1)
    for _ in range(4):  # each slot is in use once before a fork
        worker.call(fork_a_player)
        expected = str([value])
        for _ in range(5):  # the sender comes to each slot again
            value += 1.0
            scheme.send(fill(model, value))
            assert weights_are(worker.call(weights_of), value)
        assert worker.call(weights_of_the_player) == expected


def weights_are(weights: dict[str, torch.Tensor], value: float) -> bool:
    return all(bool((weight == value).all()) for weight in weights.values())
