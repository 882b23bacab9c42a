"""An interpreter exits at once, whatever was or was not done before."""

from __future__ import annotations

import multiprocessing
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import ClassVar

import psutil
import pytest
from background import one_thread
from faults_kinds import quick_over
from faults_tools import eventually
from interpreters import run_python
from marks import slow
from torch import nn

from weight_update import (
    DistributedWeightSyncScheme,
    MultiProcessWeightSyncScheme,
    SharedMemWeightSyncScheme,
    WeightSyncScheme,
)

PROGRAM = """
import contextlib, sys, time
import torch, torch.multiprocessing as mp
from torch import nn
import weight_update
torch.set_num_threads(1)

def worker(scheme, idx, how):
    torch.set_num_threads(1)
    scheme.init_on_receiver(model=nn.Linear(4, 4), worker_idx=idx)
    scheme.connect()
    with contextlib.suppress(weight_update.TransportError):  # the trainer may leave first
        scheme.receive(timeout=20.0)
    if how != "worker never shut down":
        scheme.shutdown()

if __name__ == "__main__":
    name, how = sys.argv[1:]
    ctx = mp.get_context("fork")
    scheme = getattr(weight_update, name)(sync=how != "unwaited sends")
    workers = []
    if how != "made only":
        scheme.init_on_sender(model=nn.Linear(4, 4), num_workers=2, ctx=ctx)
    if how not in ("made only", "initialized only"):
        workers = [ctx.Process(target=worker, args=(scheme, i, how), daemon=True) for i in range(2)]
        for process in workers:
            process.start()
        scheme.connect()
    if how not in ("made only", "initialized only", "connected only"):
        for _ in range(8000 if how == "unwaited sends" else 3):
            try:
                scheme.send()
            except weight_update.SyncFailedError:
                break  # workers leave after their first update
    if how == "shut down":
        scheme.shutdown()
    print("leaving", time.time(), *[process.pid for process in workers], flush=True)
    if how == "an exception":
        raise KeyError("on purpose")
"""
LATE = """
import threading, time, weakref
from weight_update import DistributedWeightSyncScheme
from weight_update.threads import start_thread

told = threading.Event()

def leave():
    told.wait()
    time.sleep(0.3)
    print("left in order", flush=True)

start_thread("late", leave, in_order=True)
scheme = DistributedWeightSyncScheme()
weakref.finalize(scheme, told.set)  # as shutdown() ends the threads of a scheme
"""
RELAY = """
import threading, time, weakref
from weight_update import DistributedWeightSyncScheme
from weight_update.transports.distributed.relay.host_relay import HostRelay

told = threading.Event()

def connect(number):
    told.wait()
    time.sleep(0.3)
    raise OSError

relay = HostRelay(connect, "", None, lambda reason: print("left in order", flush=True))
scheme = DistributedWeightSyncScheme()
weakref.finalize(scheme, told.set)  # as shutdown() ends the threads of a scheme
"""
OUTBOX = """
import threading, time, weakref
from weight_update import DistributedWeightSyncScheme
from weight_update.sender.workers import Outbox

told, changed = threading.Event(), threading.Condition()

def job():
    told.wait()
    time.sleep(0.3)
    print("left in order", flush=True)

outbox = Outbox(0, changed)
outbox.put(job)
outbox.close()
scheme = DistributedWeightSyncScheme()
weakref.finalize(scheme, told.set)  # as shutdown() ends the threads of a scheme
"""
AFTER_MAIN = """
import threading, time
import torch
from weight_update.encodings import dense

torch.set_num_threads(2)
dense._LARGE, dense._EACH, dense._FOR_ONE, dense._PIECE = 0, 0, 1, 100

def work():
    threading.main_thread().join()
    time.sleep(0.3)
    target, source = torch.zeros(1000), torch.randn(1000)
    dense.copy_tensors([target], [source], "test")
    print(torch.equal(target, source), flush=True)

threading.Thread(target=work).start()
"""
AT_EXIT = """
import atexit
import torch
from weight_update import PatchEncoding
from weight_update.wire.schema import WeightSchema

weights = torch.zeros(200_000)
tracker = PatchEncoding().tracker(WeightSchema.of({"a": weights}), None)
tracker.begin([weights])

def update():
    weights.add_(1)
    tracker.advance(tracker.compare([weights]))
    print(torch.equal(tracker.weights()[0], weights), flush=True)

atexit.register(update)
"""
CONNECTIONS = """
import threading, time
from stream_parts import signed_pair
from weight_update.transports.distributed.relay.payload_stream import (
    AwaitedStream, Forwarder, PayloadStream, discarded_pieces
)

awaited, pairs = AwaitedStream(), [signed_pair() for _ in range(2)]
for number, (here, there) in enumerate(pairs):
    awaited.add(PayloadStream(here), number, 2)
pieces = discarded_pieces(16 << 20)  # of which nothing comes
receive = awaited.get(0.0).recv_payload
threading.Thread(target=receive, args=(pieces, 60.0, Forwarder(None)), daemon=True).start()
while not any(thread.name == "weight_update-connection" for thread in threading.enumerate()):
    time.sleep(0.01)
print(time.time(), flush=True)
"""
WAYS = {
    "shut down": 0,
    "not shut down": 0,
    "worker never shut down": 0,
    "connected only": 0,
    "initialized only": 0,
    "made only": 0,
    "unwaited sends": 0,
    "an exception": 1,
}
OFTEN = {
    (SharedMemWeightSyncScheme, "an exception"),
    (DistributedWeightSyncScheme, "unwaited sends"),
}
REAL = (SharedMemWeightSyncScheme, "not shut down")
"""The one that runs in an interpreter that has imported nothing before."""
PROMPT = 15.0  # seconds; a process that hangs takes longer than a loaded machine


@pytest.mark.parametrize(
    ("kind", "how"),
    [
        pytest.param(kind, how, marks=[pytest.mark.slow] if (kind, how) not in OFTEN else [])
        for kind in (SharedMemWeightSyncScheme, MultiProcessWeightSyncScheme, DistributedWeightSyncScheme)
        for how in WAYS
    ],
)
def test_exits_at_once(kind: type, how: str, tmp_path: Path) -> None:
    program, temporary = tmp_path / "program.py", tmp_path / "temporary"
    program.write_text(PROGRAM)
    temporary.mkdir()
    arguments = ["-W", "error", str(program), kind.__name__, how]
    if (kind, how) == REAL:
        done = subprocess.run(
            [sys.executable, *arguments],
            capture_output=True,
            text=True,
            timeout=90,
            env={**os.environ, "PYTHONPATH": str(Path(__file__).parents[2]), "TMPDIR": str(temporary)},
            check=False,
        )
    else:
        done = run_python(*arguments, timeout=90.0, env={"TMPDIR": str(temporary)})
    after = time.time()
    assert done.returncode == WAYS[how], done.stderr
    _, left, *workers = done.stdout.split()
    assert after - float(left) < PROMPT
    assert "Traceback" not in done.stderr.replace("Traceback", "", WAYS[how]), done.stderr
    # Slots and sockets have no names: only a process can keep them.
    assert eventually(lambda: not any(psutil.pid_exists(int(pid)) for pid in workers), 5.0), workers
    assert list(temporary.iterdir()) == []


@pytest.mark.parametrize("program", [LATE, slow(RELAY), slow(OUTBOX)], ids=["any", "relay", "outbox"])
def test_exit_waits_for_threads_that_the_end_of_a_scheme_ends(program: str) -> None:
    """A thread that returns from PyTorch's C++ while the interpreter ends would abort the process."""
    done = run_python("-c", program)
    assert (done.returncode, done.stdout) == (0, "left in order\n"), done.stderr


def test_exit_does_not_wait_for_a_payload_over_several_connections() -> None:
    done = run_python("-c", CONNECTIONS)
    assert (done.returncode, done.stderr) == (0, "")
    assert time.time() - float(done.stdout) < PROMPT


@pytest.mark.parametrize("program", [slow(AFTER_MAIN), AT_EXIT], ids=["large copy", "large patch"])
def test_no_pool_of_threads_is_needed_after_the_main_thread(program: str) -> None:
    done = run_python("-c", program)
    assert (done.returncode, done.stdout) == (0, "True\n"), done.stderr


class SlowToAnswer:
    """A context with workers of its own, which delays the answer to an update that is already visible."""

    _weight_sync_schemes: ClassVar = {"another model": None}

    def update_policy_weights_(self, **weights: object) -> None:
        time.sleep(0.3)


def receive_once(scheme: WeightSyncScheme) -> None:
    context = SlowToAnswer()
    scheme.init_on_receiver(model=nn.Linear(4, 4), worker_idx=0, context=context)
    scheme.connect()
    scheme.receive(timeout=20.0)


@quick_over("shared_mem", "queues")
def test_a_worker_that_ends_right_after_an_update_has_confirmed_it(kind: type[WeightSyncScheme]) -> None:
    with one_thread(), kind(timeout=20.0) as scheme:
        scheme.init_on_sender(model=nn.Linear(4, 4), num_workers=1)
        worker = multiprocessing.get_context("fork").Process(target=receive_once, args=(scheme,))
        worker.start()
        scheme.connect()
        assert scheme.send().apply_seconds[0] >= 0.3
        worker.join(20.0)
        assert worker.exitcode == 0
