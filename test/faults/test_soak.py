"""The program ``make soak`` runs, and its detectors detect."""

from __future__ import annotations

import argparse
import contextlib
import json
import multiprocessing
import os
import random
import socket
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any, cast

import pytest
import soak_run
import torch
from interpreters import run_python
from soak_drivers import Driver, driver_of
from soak_measure import give_back, growth
from soak_strangers import listeners, spoil_store
from soak_table import summary, table
from soak_worker import fill
from torch.distributed import TCPStore

from weight_update import SyncFailedError
from weight_update.testing.workers import dumps

ROOT = Path(__file__).parents[2]
_THREADS, _BLOCKS, _BLOCK = 4, 128, 64 << 10
"""Threads, and the blocks that each of them takes and frees, of so many bytes."""


def test_a_short_one(tmp_path: Path) -> None:
    """In a process of its own: other tests of this one have listeners and sockets, which would be counted."""
    file = tmp_path / "account.json"
    sizes = ["--seconds", "4", "--timeout", "5", "--workers", "2", "--megabytes", "0.1"]
    program = [ROOT / "test" / "soak" / "__main__.py", *sizes, "--seed", "1", "--json", file]
    done = run_python(*program, quick_spawn=True)
    assert done.returncode == 0, done.stdout + done.stderr
    account = json.loads(file.read_text())
    assert account["problems"] == []
    assert account["passes"] > 20
    assert account["updates"] > 5
    assert sum(account["faults"].values()) >= 1
    assert sum(account["failures"].values()) >= account["failed_updates"]
    rows = table([account, account]).splitlines()
    assert len(rows) == 6
    assert len({len(row.split("  ")) for row in rows if row.startswith("=")}) == 1


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    "arguments",
    [
        ["--scheme", "shared_mem", "--encoding", "patch"],
        ["--scheme", "multiprocess", "--encoding", "bucket"],
        ["--scheme", "distributed"],
        ["--scheme", "distributed", "--hosts"],
        ["--scheme", "ray"],
        ["--scheme", "nccl"],
        ["--scheme", "memory"],
        ["--scheme", "checkpoint"],
    ],
    ids=" ".join,
)
def test_a_longer_one(arguments: list[str], tmp_path: Path) -> None:
    if "ray" in arguments:
        pytest.importorskip("ray", reason='Ray is not installed: pip install "weight-update[ray]"')
    file = tmp_path / "account.json"
    seed = os.environ.get("SOAK_SEED", "1")
    program = [sys.executable, str(ROOT / "test" / "soak"), *arguments]
    done = subprocess.run(
        [*program, "--seconds", "60", "--seed", seed, "--json", str(file)],
        capture_output=True,
        text=True,
        timeout=280,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    account = json.loads(file.read_text())
    assert account["problems"] == []
    assert sum(account["faults"].values()) > 10


def test_strangers_find_every_listener() -> None:
    name = f"\0weight_update-{os.getpid()}"
    with socket.create_server(("127.0.0.1", 0)) as tcp, socket.socket(socket.AF_UNIX) as unix:
        unix.bind(name)
        unix.listen()
        assert {tcp.getsockname(), name} <= set(listeners(os.getpid()))


def test_strangers_spoil_what_a_store_holds() -> None:
    """The announcement of a sender is a value of a store, under a key that any client can list."""
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    spoiled = 0
    for seed in range(10):
        store.set("weight_update/key", "announcement")
        spoil_store("127.0.0.1", store.port, random.Random(seed))
        kept = store.check(["weight_update/key"]) and store.get("weight_update/key") == b"announcement"
        spoiled += not kept
    assert spoiled > 3


@pytest.mark.parametrize("peer", [None, "torchrl"])
def test_a_thread_that_starts_a_worker_handles_no_weights(peer: str | None) -> None:
    """Each such thread may get an arena of glibc of its own, which keeps what is freed there."""
    sent: list[int] = []

    class Recorder:
        def call(self, command: str, *arguments: Any) -> None:
            sent.append(len(dumps((command, arguments))))

    driver = driver_of(options_of(4.0, peer=peer))
    driver.init_worker(cast(Any, Recorder()), 0)
    assert 0 < sum(sent) < driver.options.megabytes * 1e6 / 10


@pytest.mark.slow
def test_memory_that_threads_have_freed_is_not_held() -> None:
    """Kept memory is; see also :func:`test_what_is_broken_is_found`."""
    with multiprocessing.get_context("spawn").Pool(1) as pool:  # glibc has kept nothing there yet
        in_use, kept, held = pool.apply(shares_of_freed_memory)
    assert in_use > 0.8
    assert kept > 0.5, "glibc keeps what was freed"
    assert held < 0.2


def shares_of_freed_memory() -> tuple[float, float, float]:
    """Return what threads use, what is kept when they have freed it, and what is held, as shares of it."""
    kept: list[Any] = []
    together = threading.Barrier(_THREADS + 1)

    def work() -> None:
        blocks = [torch.ones(_BLOCK // 4) for _ in range(_BLOCKS)]
        kept.append(torch.ones(_BLOCK // 4))  # above the others: what is free below stays in the arena
        together.wait(30.0)
        together.wait(30.0)  # it is measured meanwhile
        blocks.clear()

    before = held_memory()
    threads = [threading.Thread(target=work) for _ in range(_THREADS)]
    for thread in threads:
        thread.start()
    together.wait(30.0)
    during = held_memory()
    together.wait(30.0)
    for thread in threads:
        thread.join()
    freed = _THREADS * _BLOCKS * _BLOCK
    sizes = (during, anonymous_memory(), held_memory())
    in_use, still_kept, held = ((size - before) / freed for size in sizes)
    return in_use, still_kept, held


def held_memory() -> int:
    """Return what this process holds after it gave back what it has freed."""
    give_back()
    return anonymous_memory()


def anonymous_memory() -> int:
    """Return the bytes of memory that belong to no file; other processes have no share in them."""
    lines = Path("/proc/self/smaps_rollup").read_text().splitlines()
    (size,) = [line.split()[1] for line in lines if line.startswith("Anonymous:")]
    return 1024 * int(size)


class Broken(Driver):
    """A scheme that mixes versions, goes back, keeps all that it gets and hides errors."""

    def open(self) -> None:
        super().open()
        self.faults = ["refuse"]
        self.kept: list[Any] = []
        self.never = threading.Event()
        self.stack.callback(self.never.set)

    def send(self, version: int, worker_ids: list[int] | None, burst: int) -> tuple[int, dict[int, str]]:
        self._keep()
        model = fill(self.source, version - 15 if version % 20 == 0 else version)
        if version % 7 == 0:
            with torch.no_grad():
                model.weights[3][-1] = 1.5
        with contextlib.suppress(SyncFailedError):
            self.scheme.send(model)
        return version, {0: "it looked tired"} if version % 10 == 0 else {}

    def _keep(self) -> None:
        self.kept += [b"x" * 5_000_000, os.open("/dev/null", os.O_RDONLY)]
        self.kept.append(threading.Thread(target=self.never.wait, daemon=True))
        self.kept[-1].start()


class Hanging(Driver):
    """A scheme whose tenth update never ends."""

    def open(self) -> None:
        super().open()
        self.faults = ["strangers"]

    def send(self, version: int, worker_ids: list[int] | None, burst: int) -> tuple[int, dict[int, str]]:
        if version == 10:
            threading.Event().wait()
        return super().send(version, worker_ids, 1)


def options_of(seconds: float, peer: str | None = None) -> argparse.Namespace:
    """Return the options of a small soak."""
    return argparse.Namespace(
        scheme="shared_mem",
        hosts=False,
        encoding="dense",
        compression="none",
        peer=peer,
        without=[],
        seed=1,
        seconds=seconds,
        workers=2,
        megabytes=0.1,
        timeout=1.0,
        every=1.0,
    )


def run(cls: type[Driver], seconds: float) -> dict[str, Any]:
    """Run a soak here; return its account."""
    options = options_of(seconds)
    log: list[str] = []
    account = soak_run.Soak(cls(options), options, log.append).run()
    print(summary(account))
    return account


@pytest.mark.slow
def test_what_is_broken_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(soak_run, "SLACK", 0.0)  # so that workers soon count as healthy
    account = run(Broken, 6.0)
    kinds = {kind for kind, _ in account["problems"]}
    assert {"torn", "backward", "wrong_version", "false blame", "silence", "not flat"} <= kinds
    grown = {text.split()[0] for kind, text in account["problems"] if kind == "not flat"}
    assert {"memory", "descriptors", "threads"} <= grown
    assert min(account["torn"], account["backward"]) > 0


@pytest.mark.slow
def test_a_send_that_hangs_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(soak_run, "HANG", 0.0)
    account = run(Hanging, 30.0)
    assert account["hangs"] == 1
    ((kind, text),) = account["problems"]
    assert kind == "hang"
    assert "threading.Event().wait()" in text


@pytest.mark.parametrize(
    ("more", "said"),
    [
        ({"connections": 2, "descriptors": 10, "threads": 8}, ""),  # now in the middle of a chain
        ({"connections": 3, "descriptors": 15, "threads": 12}, "connections"),
        ({"descriptors": 5}, "descriptors"),
        ({"threads": 5}, "threads"),
        ({"slots": 17, "descriptors": 17}, "slots"),
        ({"memory": 30 << 20}, "memory"),
    ],
)
def test_growth_is_found(more: dict[str, int], said: str) -> None:
    before = {"memory": 100 << 20, "descriptors": 30, "slots": 6, "connections": 1, "threads": 9}
    after = {name: count + more.get(name, 0) for name, count in before.items()}
    found = growth("worker 0", 1, [before] * 3, [after] * 3)
    assert [text.split()[0] for text in found] == [said] * bool(said)
