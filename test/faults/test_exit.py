"""An interpreter exits at once, whatever was or was not done before."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from weight_update import (
    DistributedWeightSyncScheme,
    MultiProcessWeightSyncScheme,
    SharedMemWeightSyncScheme,
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
    print("leaving", time.time(), flush=True)
    if how == "an exception":
        raise KeyError("on purpose")
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
    (SharedMemWeightSyncScheme, "not shut down"),
    (SharedMemWeightSyncScheme, "made only"),
    (SharedMemWeightSyncScheme, "an exception"),
    (DistributedWeightSyncScheme, "unwaited sends"),
}
PROMPT = 15.0  # seconds; a process that hangs takes longer than a loaded machine


def left_in_shm() -> list[str]:
    return sorted(name for name in os.listdir("/dev/shm") if not name.startswith("sem."))  # not ours


@pytest.mark.parametrize(
    ("kind", "how"),
    [
        pytest.param(kind, how, marks=[pytest.mark.slow] if (kind, how) not in OFTEN else [])
        for kind in (SharedMemWeightSyncScheme, MultiProcessWeightSyncScheme, DistributedWeightSyncScheme)
        for how in WAYS
    ],
)
def test_exits_at_once(kind: type, how: str, tmp_path: Path) -> None:
    program = tmp_path / "program.py"
    program.write_text(PROGRAM)
    shm = left_in_shm()
    done = subprocess.run(
        [sys.executable, "-W", "error", str(program), kind.__name__, how],
        capture_output=True,
        text=True,
        timeout=90,
        env={**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])},
        check=False,
    )
    after = time.time()
    assert done.returncode == WAYS[how], done.stderr
    assert after - float(done.stdout.split()[-1]) < PROMPT
    assert "Traceback" not in done.stderr.replace("Traceback", "", WAYS[how]), done.stderr
    assert left_in_shm() == shm
