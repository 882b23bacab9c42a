"""The distributions work where the repository is not."""

from __future__ import annotations

import os
import subprocess
import sys
import tarfile
import venv
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

TYPED = """
from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from collectors import MultiSyncCollector
from torch import nn
from typing_extensions import assert_type
from weight_update import (
    Capabilities,
    PatchEncoding,
    SendHandle,
    SharedMemWeightSyncScheme,
    SyncFailedError,
    SyncReport,
    TransportBackend,
    WeightChunk,
    WeightStrategy,
    WeightSyncScheme,
    WorkerEvent,
)
from weight_update.convert import Item


class OwnTransport(TransportBackend):
    capabilities = Capabilities(send_never_blocks=True)

    def send_chunk(self, chunk: WeightChunk, timeout: float | None = None) -> None:
        assert_type(chunk.encode(), bytes)

    def recv_chunk(self, timeout: float | None = None, allocate: Any = None) -> WeightChunk | None:
        return None

    def close(self) -> None:
        pass


class OwnScheme(WeightSyncScheme):
    def create_transport(self, *, worker_idx: int, end: str) -> TransportBackend:
        return OwnTransport()


def halved(weights: Iterator[Item]) -> Iterator[Item]:
    for name, tensor in weights:
        yield name, tensor.half()


def chosen(name: str, tensor: torch.Tensor) -> bool:
    return "head" in name


def observe(seen: object) -> None:
    if isinstance(seen, WorkerEvent):
        assert_type(seen.version, int | None)


def train(model: nn.Module) -> float:
    strategy = WeightStrategy("state_dict", encoding=PatchEncoding(), select=chosen, convert=halved)
    with SharedMemWeightSyncScheme(strategy=strategy) as scheme:
        scheme.init_on_sender(model=model, num_workers=2)
        scheme.add_observer(observe)
        scheme.connect(timeout=10.0)
        try:
            report = scheme.send(worker_ids=[0, 1])
        except SyncFailedError as error:
            assert_type(error.failures, dict[int, Exception])
            raise
        assert_type(report, SyncReport)
        handle = scheme.send_async()
        assert_type(handle, SendHandle)
        assert_type(handle.wait(timeout=1.0), SyncReport)
        assert_type(scheme.worker_versions, dict[int, int | None])
        with scheme.hold():
            return report.total_seconds


def act(scheme: WeightSyncScheme, model: nn.Module) -> int | None:
    scheme.init_on_receiver(model=model, worker_idx=0)
    scheme.receive(timeout=1.0)
    return scheme.version


def collect(policy: nn.Module, make_env: Any) -> None:
    collector = MultiSyncCollector([make_env], policy, weight_sync_schemes={"policy": OwnScheme()})
    collector.update_policy_weights_(policy)


def wrong(scheme: WeightSyncScheme) -> None:
    scheme.send(timeout=1.0)  # type: ignore[call-arg]
    scheme.receive(timeout="1")  # type: ignore[arg-type]
    WeightStrategy(extract_as="json")  # type: ignore[arg-type]
    scheme.no_such_method()  # type: ignore[attr-defined]
"""


def run(
    *args: object, cwd: Path, python: str | Path = sys.executable, seconds: float = 100.0, **env: str
) -> str:
    command = [str(python), *map(str, args)]
    done = subprocess.run(
        command, cwd=cwd, env={**os.environ, **env}, capture_output=True, text=True, timeout=seconds
    )
    assert done.returncode == 0, done.stdout + done.stderr
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


@pytest.fixture(scope="module")
def site(source: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder into which the wheel, built from the source distribution, is installed."""
    there = tmp_path_factory.mktemp("wheel")
    wheel = there / run("-c", BUILD, "build_wheel", there, cwd=source).split()[-1]
    options = ["--quiet", "--no-deps", "--no-index"]
    run("-m", "pip", "install", *options, "--target", there / "site", wheel, cwd=there)
    return there / "site"


@pytest.mark.slow
def test_a_wheel_works_without_the_repository(site: Path, tmp_path: Path) -> None:
    (tmp_path / "program.py").write_text(PROGRAM)
    where, total = run("program.py", cwd=tmp_path, PYTHONPATH=str(site)).split()
    assert site in Path(where).parents
    assert float(total) == 4.0
    imported = run("-c", "import collectors; print(collectors.__file__)", cwd=tmp_path, PYTHONPATH=str(site))
    assert site in Path(imported.strip()).parents


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_the_types_of_a_wheel_reach_a_program(site: Path, tmp_path: Path) -> None:
    """A strict mypy accepts the program, and finds the mistakes that are marked in it."""
    pytest.importorskip("mypy", reason="the extra test is not installed")
    venv.create(tmp_path / "venv")
    python = tmp_path / "venv" / "bin" / "python"
    packages = run(
        "-c", "import sysconfig; print(sysconfig.get_path('purelib'))", cwd=tmp_path, python=python
    )
    paths = [site, *(path for path in sys.path if path.endswith("-packages"))]
    (Path(packages.strip()) / "others.pth").write_text("\n".join(map(str, paths)))
    (tmp_path / "program.py").write_text(TYPED)
    options = ["--strict", "--python-executable", python, "--cache-dir", tmp_path / "cache"]
    run("-m", "mypy", *options, "program.py", cwd=tmp_path, PYTHONPATH="", seconds=390)
