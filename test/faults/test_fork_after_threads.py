"""Workers forked after the trainer used OpenMP: whatever starts such threads there hangs for ever."""

from __future__ import annotations

import contextlib
import multiprocessing as mp
import re
import subprocess
import textwrap
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from interpreters import run_python
from marks import quick_for
from torch import nn

from weight_update import (
    BucketEncoding,
    DenseEncoding,
    LifecycleError,
    MultiProcessWeightSyncScheme,
    ObjectStoreWeightSyncScheme,
    PatchEncoding,
    SharedMemWeightSyncScheme,
    WeightStrategy,
    WeightSyncScheme,
)

ROOT = Path(__file__).parents[2]
ENCODINGS = {
    "dense": DenseEncoding(),
    "bucket": BucketEncoding(bucket_size=1 << 20),
    "bucket, kept": BucketEncoding(bucket_size=1 << 20, load_instant=False),
    "bucket, bfloat16": BucketEncoding(bucket_size=1 << 20, bucket_dtype="bfloat16"),
    "patch": PatchEncoding(),
    "patch, relative": PatchEncoding(values="relative"),
    "patch, no init": PatchEncoding(init_sync=False),
}


@pytest.fixture
def openmp() -> Iterator[None]:
    """Let PyTorch start its threads in this process."""
    threads = torch.get_num_threads()
    torch.set_num_threads(2)
    torch.ones(1 << 20).mul_(2.0)
    yield
    torch.set_num_threads(threads)


@contextlib.contextmanager
def forked(work: Callable[..., None], *args: object) -> Iterator[None]:
    worker = mp.get_context("fork").Process(target=work, args=args, daemon=True)
    worker.start()
    try:
        yield
    finally:
        worker.kill()
        worker.join()


def follow(scheme: WeightSyncScheme, model: nn.Module, pipe: Any) -> None:
    scheme.init_on_receiver(model=model, worker_idx=0)
    scheme.connect()
    while pipe.recv():
        pipe.send(model.weight.detach().numpy().tobytes())


@pytest.mark.usefixtures("openmp")
@pytest.mark.parametrize("encoding", quick_for(ENCODINGS, "dense", "bucket, bfloat16", "patch, relative"))
def test_workers_do_not_hang(kind: type[WeightSyncScheme], encoding: str) -> None:
    ctx = mp.get_context("fork")
    source, target = nn.Linear(400, 1000), nn.Linear(400, 1000)
    target.load_state_dict(source.state_dict())
    scheme = kind(strategy=WeightStrategy(encoding=ENCODINGS[encoding]), timeout=10.0, connect_timeout=10.0)
    ours, theirs = ctx.Pipe()
    with scheme:
        scheme.init_on_sender(model=source, num_workers=1, ctx=ctx)
        with forked(follow, scheme, target, theirs):
            scheme.connect()
            for count in (5, 400_000, 5):  # a little, all, a little
                with torch.no_grad():
                    source.weight.view(-1)[:count].add_(1.0)
                scheme.send()
                ours.send(True)
                sent = source.weight.detach().to(torch.bfloat16 if "bfloat16" in encoding else torch.float32)
                assert ours.recv() == sent.float().numpy().tobytes()


@pytest.mark.usefixtures("openmp")
def test_a_reader_of_an_object_store_does_not_hang(tmp_path: Path) -> None:
    """It joins with a bucket and a patch, which it merges."""
    source, target = nn.Linear(400, 1000), nn.Linear(400, 1000)
    scheme = ObjectStoreWeightSyncScheme(
        tmp_path.as_uri(), token="secret", strategy=WeightStrategy(encoding="patch"), connect_timeout=10.0
    )
    ours, theirs = mp.Pipe()
    with scheme:
        scheme.init_on_sender(model=source)
        scheme.connect()
        with torch.no_grad():
            source.weight[0, 0] += 1
        scheme.send()
        with forked(follow, scheme, target, theirs):
            ours.send(True)
            assert ours.poll(10.0)
            assert ours.recv() == source.weight.detach().numpy().tobytes()


def receive(scheme: WeightSyncScheme, pipe: Any) -> None:
    scheme.init_on_receiver(worker_idx=0)
    scheme.connect()
    pipe.send(scheme.receive(10.0)["weight"].numpy().tobytes())


@pytest.mark.usefixtures("openmp")
def test_a_worker_without_a_model_does_not_hang() -> None:
    source = nn.Linear(400, 1000)
    scheme = SharedMemWeightSyncScheme(timeout=10.0, connect_timeout=10.0)
    ours, theirs = mp.Pipe()
    with scheme:
        scheme.init_on_sender(model=source, num_workers=1)
        with forked(receive, scheme, theirs):
            scheme.connect()
            scheme.send()
            assert ours.poll(10.0)
            assert ours.recv() == source.weight.detach().numpy().tobytes()


WARNED = """
import logging, multiprocessing
import torch
from torch import nn
from weight_update import SharedMemWeightSyncScheme

logging.basicConfig(format="%(message)s")

def follow(scheme, threads):
    torch.set_num_threads(threads)
    for _ in range(2):
        scheme.__class__().init_on_receiver(model=nn.Linear(2, 2), worker_idx=0)

def start(what, threads):
    print(what, flush=True)
    process = multiprocessing.get_context("fork").Process(target=follow, args=(scheme, threads))
    process.start()
    process.join()

scheme = SharedMemWeightSyncScheme()
start("nothing was computed", 2)
nn.Linear(1000, 1000)(torch.ones(1000, 1000))
start("one thread", 1)
start("two threads", 2)
"""


def test_a_warning_names_the_cure(tmp_path: Path) -> None:
    """Once in each worker that may hang, and nowhere else."""
    done = run(WARNED, tmp_path)
    assert done.returncode == 0, done.stdout
    before, *after = done.stdout.partition("two threads\n")
    assert before == "nothing was computed\none thread\n"
    assert after[1].count("get_context('spawn')") == 1


@pytest.mark.slow
def test_the_program_of_the_readme(tmp_path: Path) -> None:
    """As it is printed, with a trainer and workers that compute with several threads."""
    text = (ROOT / "README.rst").read_text()
    section = text[text.index("Without collectors") :]
    block = re.search(r"\.\. code-block:: python\n\n((?:    .*\n|\n)+)", section)
    assert block is not None
    program = textwrap.dedent(block[1]).replace("Linear(4, 2)", "Linear(1000, 1000)")
    program = program.replace("connect()              #", "connect(); compute(policy) #")
    program = program.replace("scheme.init_on_sender(", "compute(policy); scheme.init_on_sender(")
    assert program.count("compute(policy)") == 2
    compute = "import torch\ndef compute(policy):\n    policy(torch.ones(1000, 1000))\n"
    done = run(f"{compute}{program}    print('all of it ran')\n", tmp_path)
    assert (done.returncode, done.stdout) == (0, "all of it ran\n")


def run(program: str, folder: Path) -> subprocess.CompletedProcess[str]:
    file = folder / "program.py"
    file.write_text(program)
    return run_python("-W", "error", file, env={"OMP_NUM_THREADS": "2"}, merged=True, timeout=80.0)


def report_version(scheme: WeightSyncScheme, pipe: Any) -> None:
    scheme.init_on_receiver(model=nn.Linear(2, 2), worker_idx=0)
    scheme.connect()
    pipe.send(scheme.version)


def test_a_process_whose_name_is_no_text() -> None:
    """The kernel cuts names off after 15 bytes, also within a character."""
    run = "import ctypes; ctypes.CDLL(None).prctl(15, b'a\\xe8'); import weight_update"
    assert run_python("-c", run, merged=True, timeout=80.0).stdout == ""


@pytest.mark.parametrize("method", ["fork", pytest.param("spawn", marks=pytest.mark.slow)])
def test_queues_of_no_context_serve_processes_of_any(method: str) -> None:
    ctx = mp.get_context(method)
    ours, theirs = ctx.Pipe()
    with MultiProcessWeightSyncScheme(connect_timeout=60.0) as scheme:
        scheme.init_on_sender(model=nn.Linear(2, 2), num_workers=1)
        worker = ctx.Process(target=report_version, args=(scheme, theirs), daemon=True)
        worker.start()
        scheme.connect()
        assert ours.recv() == 0
        worker.join()


def test_queues_of_another_context_are_refused_by_name() -> None:
    with MultiProcessWeightSyncScheme() as scheme:
        scheme.init_on_sender(model=nn.Linear(2, 2), num_workers=1, ctx=mp.get_context("fork"))
        worker = mp.get_context("spawn").Process(target=report_version, args=(scheme, None), daemon=True)
        with pytest.raises(LifecycleError, match="ctx="):
            worker.start()
