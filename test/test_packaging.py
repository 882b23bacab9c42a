"""The distributions work where the repository is not."""

from __future__ import annotations

import os
import subprocess
import sys
import tarfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
BUILD = "import sys; from setuptools import build_meta as b; print(getattr(b, sys.argv[1])(sys.argv[2]))"

PROGRAM = """
import multiprocessing
import torch
import weight_update
from weight_update import SharedMemWeightSyncScheme

def work(scheme, done):
    model = torch.nn.Linear(2, 2)
    scheme.init_on_receiver(model=model, worker_idx=0)
    scheme.connect()
    scheme.receive(timeout=30.0)
    done.put(float(model.weight.sum()))
    scheme.shutdown()

if __name__ == "__main__":
    ctx = multiprocessing.get_context("spawn")
    model, scheme, done = torch.nn.Linear(2, 2), SharedMemWeightSyncScheme(), ctx.Queue()
    scheme.init_on_sender(model=model, num_workers=1, ctx=ctx)
    worker = ctx.Process(target=work, args=(scheme, done))
    worker.start()
    scheme.connect()
    torch.nn.init.ones_(model.weight)
    scheme.send()
    print(weight_update.__file__, done.get(timeout=60))
    worker.join()
    scheme.shutdown()
"""


def run(*args: object, cwd: Path, **env: str) -> str:
    command = [sys.executable, *map(str, args)]
    done = subprocess.run(
        command, cwd=cwd, env={**os.environ, **env}, capture_output=True, text=True, timeout=100
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def files() -> list[str]:
    """Return the files of the repository that are not hidden."""
    command = ["git", "ls-files", "--cached", "--others", "--exclude-standard"]
    listed = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    if listed.returncode:
        pytest.skip("this is not a checkout, so its files cannot be listed")
    return [name for name in listed.stdout.split() if not name.startswith(".") and (ROOT / name).exists()]


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the folder of an unpacked source distribution."""
    copy, there = tmp_path_factory.mktemp("copy"), tmp_path_factory.mktemp("source")
    for name in files():
        (copy / name).parent.mkdir(parents=True, exist_ok=True)
        (copy / name).write_bytes((ROOT / name).read_bytes())
    archive = run("-c", BUILD, "build_sdist", there, cwd=copy).split()[-1]
    with tarfile.open(there / archive) as tar:
        tar.extractall(there, filter="data")
    return there / archive.removesuffix(".tar.gz")


def test_the_source_distribution_has_every_file(source: Path) -> None:
    assert [name for name in files() if not (source / name).exists()] == []


@pytest.mark.slow
def test_a_wheel_works_without_the_repository(source: Path, tmp_path: Path) -> None:
    site = tmp_path / "site"
    wheel = run("-c", BUILD, "build_wheel", tmp_path, cwd=source).split()[-1]
    run(
        "-m",
        "pip",
        "install",
        "--quiet",
        "--no-deps",
        "--no-index",
        "--target",
        site,
        tmp_path / wheel,
        cwd=tmp_path,
    )
    (tmp_path / "program.py").write_text(PROGRAM)
    where, total = run("program.py", cwd=tmp_path, PYTHONPATH=str(site)).split()
    assert site in Path(where).parents
    assert float(total) == 4.0
    imported = run("-c", "import collectors; print(collectors.__file__)", cwd=tmp_path, PYTHONPATH=str(site))
    assert site in Path(imported.strip()).parents
