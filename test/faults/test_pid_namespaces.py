"""Workers in a pid namespace of their own that reach the sender, as two containers of a pod do."""

from __future__ import annotations

import ctypes
import os
import signal
import subprocess
from pathlib import Path

import pytest
from faults_kinds import quick_over
from faults_tools import START, WAIT, Processes, Remote, Stripes, Worker, eventually, fill, join, leave

from weight_update import SyncFailedError
from weight_update.testing.processes import freeze

CLONE_NEWPID, PR_SET_PDEATHSIG = 0x20000000, 1


@pytest.fixture(autouse=True)
def allowed() -> None:
    tried = subprocess.run(["unshare", "--pid", "--fork", "true"], capture_output=True, check=False)
    if tried.returncode != 0:
        pytest.skip("this machine does not let us make a pid namespace")


def make_model() -> Stripes:
    return Stripes(2, 5000)


def enter_namespace(me: Worker) -> int:
    """Go on in a child in a namespace of its own, with a number that no process has outside."""
    libc = ctypes.CDLL(None, use_errno=True)
    assert libc.unshare(CLONE_NEWPID) == 0, os.strerror(ctypes.get_errno())
    go_on_in_child(libc)
    while child := os.fork():
        _, status = os.waitpid(child, 0)
        if status != 0:  # it was the one that went on, and was killed
            os._exit(1)
    libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.path.exists(f"/proc/{os.getpid()}"):  # the file system of before shows the processes outside
        os._exit(0)
    return os.getpid()


def go_on_in_child(libc: ctypes.CDLL) -> None:
    """Continue in a child; this process waits for it, and ends as it does."""
    child = os.fork()
    if child:
        os.waitpid(child, 0)
        os._exit(0)
    libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL)


def look(me: Worker) -> set[float]:
    return set(me.model(START).tolist())


def inner_pid(worker: Remote) -> int:
    """The number that the worker has here."""
    pid = worker.pid
    for _ in range(2):
        pid = int(Path(f"/proc/{pid}/task/{pid}/children").read_text())
    return pid


@quick_over("shared_mem")
def test_workers_that_have_gone_keep_their_weights(kind: type, procs: Processes) -> None:
    """One left and the link of one was lost; by its number in its own namespace each seems to be dead."""
    scheme, model = procs.scheme(kind, timeout=20.0), make_model()
    scheme.init_on_sender(model=model, num_workers=3, ctx=procs._ctx)
    workers = [procs.start(scheme, idx, make_model) for idx in range(3)]
    stayer, leaver, lost = workers
    for worker in (leaver, lost):
        assert not os.path.exists(f"/proc/{worker.call(enter_namespace)}")
    for worker in workers:
        worker.begin(join)
    scheme.connect(timeout=WAIT)
    for worker in workers:
        worker.result()
    scheme.send(fill(model, 1))
    leaver.call(leave)
    freeze(inner_pid(lost))
    sender = scheme._sender
    sender._delivery.lose(sender.table[2], TimeoutError("cut off by the test"))
    assert eventually(lambda: not sender.table[1].joined)
    for version in range(2, 6):
        with pytest.raises(SyncFailedError):
            scheme.send(fill(model, version))
        assert stayer.call(look) == {float(version)}
        assert leaver.call(look) == {1.0}
    lost.begin(look)
    os.kill(inner_pid(lost), signal.SIGCONT)
    assert lost.result() in ({1.0}, {5.0})  # it may have joined again by now
