"""Explorers in processes of their own: they die, stop, and come back."""

from __future__ import annotations

import multiprocessing
import os
import signal
import time
from collections.abc import Iterator
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import pytest
from interpreters import use_template_for_forkserver
from sync_parts import model_at, set_to, synchronizer, train, until_waiting, wait_until
from sync_programs import explore

from weight_update import RunningStatus, SyncMethod, SyncStyle, TrainerClient
from weight_update.testing.processes import freeze

FORKSERVER = multiprocessing.get_context("forkserver")
COMING = 100.0


class ExplorerProcess:
    """An explorer in a process, and its reports."""

    def __init__(self, server: Any, id: int, steps: int, **options: Any) -> None:
        use_template_for_forkserver()
        self._told, theirs = FORKSERVER.Pipe(duplex=False)
        args = (server.address, server.token, id, steps, theirs, {"timeout": 30.0, **options})
        self.process = FORKSERVER.Process(target=explore, args=args, daemon=True)
        self.process.start()
        theirs.close()
        self.told: list[tuple[Any, Any, Any]] = []

    def await_coming(self) -> None:
        assert self._told.poll(COMING), "it does not come"
        self.told.append(self._told.recv())

    def drain(self) -> bool:
        """Read a report; return whether the explorer is done."""
        connection: Connection = self._told
        while connection.poll(0):
            try:
                self.told.append(connection.recv())
            except EOFError:
                return True
        return bool(self.told) and self.told[-1][0] == "done"

    def end(self) -> None:
        if self.process.is_alive():
            self.process.kill()
        self.process.join(10.0)


@pytest.fixture
def hire() -> Iterator[Any]:
    hired: list[ExplorerProcess] = []

    def one(*args: Any, **options: Any) -> ExplorerProcess:
        hired.append(ExplorerProcess(*args, **options))
        return hired[-1]

    yield one
    for explorer in hired:
        explorer.end()


@pytest.mark.parametrize(
    "method",
    [
        SyncMethod.NCCL,
        pytest.param(SyncMethod.MEMORY, marks=pytest.mark.slow),
        pytest.param(SyncMethod.CHECKPOINT, marks=pytest.mark.slow),
    ],
)
def test_one_that_is_killed_and_one_that_stops_do_not_stop_the_third(
    method: SyncMethod, tmp_path: Path, hire: Any
) -> None:
    fields = {"sync_interval": 2, "lease": 1.0, "transfer_timeout": 2.0}
    with synchronizer(method, SyncStyle.FIXED, tmp_path, **fields) as where:
        server = where.serve()
        killed, stopped = hire(server, 0, 10**6), hire(server, 1, 10**6)
        good = hire(server, 2, 40)
        for explorer in (killed, stopped, good):
            explorer.await_coming()

        def going() -> bool:
            if good.told[-1][0] != "done" and len(good.told) == 8:
                os.kill(killed.process.pid, signal.SIGKILL)
                freeze(stopped.process.pid)
                good.told.append(("they are gone", None, None))
            killed.drain()  # pipes that are full would stop them
            stopped.drain()
            return not good.drain()

        start = time.monotonic()
        said = train(server, going, timeout=3.0, transfer_timeout=2.0)
    syncs = [(step, metrics) for step, metrics, _ in good.told if isinstance(step, int)]
    assert [step for step, _ in syncs] == list(range(2, 41, 2))
    late = [metrics for _, metrics in syncs if "reason" in metrics]
    assert len(late) <= 2, late
    assert time.monotonic() - start < 60
    assert len([one for one in said if "reason" not in one]) > 12


def test_one_that_is_killed_while_it_waits_is_missed_at_once(tmp_path: Path, hire: Any) -> None:
    with synchronizer(SyncMethod.MEMORY, SyncStyle.FIXED, tmp_path, lease=1000.0) as where:
        explorer = hire(where.serve(), 0, 1)
        explorer.await_coming()
        until_waiting(where, 0)
        time.sleep(0.5)  # until its first sign of life has come
        explorer.process.kill()
        wait_until(lambda: not where.service.status()["explorers"])


@pytest.mark.slow
def test_one_that_stops_is_missed_and_comes_back(tmp_path: Path, hire: Any) -> None:
    with synchronizer(SyncMethod.MEMORY, SyncStyle.TRAINER_DRIVEN, tmp_path, lease=1.0) as where:
        server = where.serve()
        source = model_at(0)
        explorer = hire(server, 5, 10**6)
        explorer.await_coming()
        with TrainerClient(server, source) as client:
            trainer = client.blocking
            trainer.sync_weight()
            wait_until(lambda: explorer.drain() or len(explorer.told) > 1)
            freeze(explorer.process.pid)
            wait_until(lambda: 5 not in trainer.status()["explorers"])
            trainer.step += 1
            set_to(source, 1)
            trainer.sync_weight()
            before = len(explorer.told)
            os.kill(explorer.process.pid, signal.SIGCONT)
            wait_until(lambda: explorer.drain() or len(explorer.told) > before)
            assert explorer.told[-1][2] == 1.0
            assert trainer.status()["explorers"][5] in (RunningStatus.RUNNING, RunningStatus.REQUIRE_SYNC)
