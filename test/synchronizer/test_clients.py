"""Clients that are admitted, refused, or take the place of others."""

from __future__ import annotations

import logging
import socket
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from marks import quick_for
from sync_parts import model_at, synchronizer

from weight_update import (
    ExplorerClient,
    JoinRefusedError,
    LifecycleError,
    RunningStatus,
    Synchronizer,
    SyncMethod,
    SyncStyle,
    TrainerClient,
    UnsupportedSourceError,
)

HELD = [SyncMethod.MEMORY, SyncMethod.CHECKPOINT]


def test_a_client_with_another_token_is_refused_at_once() -> None:
    with Synchronizer(SyncMethod.MEMORY) as where:
        server = where.serve()
        start = time.monotonic()
        with pytest.raises(JoinRefusedError, match="wrong token"):
            ExplorerClient(server.address, model_at(-1), token="another")
        assert time.monotonic() - start < 5.0


def test_backends_that_cannot_be_used_are_refused_and_the_trainer_does_not_stay(tmp_path: Path) -> None:
    with synchronizer(SyncMethod.NCCL, SyncStyle.FIXED, tmp_path) as where:
        with pytest.raises(ValueError, match="known: 'gloo', 'nccl'"):
            TrainerClient(where, model_at(0), backend="pigeon")
        assert where.service.status()["trainer"] == "stopped"
    with (
        synchronizer(SyncMethod.MEMORY, SyncStyle.FIXED, tmp_path) as where,
        pytest.raises(ValueError, match=r"for SyncMethod\.NCCL"),
    ):
        TrainerClient(where, model_at(0), backend="nccl")


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
def test_without_cuda_tcp_stands_in_and_says_so(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with synchronizer(SyncMethod.NCCL, SyncStyle.FIXED, tmp_path) as where, caplog.at_level(logging.INFO):
        TrainerClient(where, model_at(0)).close()
        assert "over TCP (there is no CUDA)" in caplog.text
        with pytest.raises(ValueError, match="backend='gloo'"):
            TrainerClient(where, model_at(0), backend="nccl")


def test_strangers_do_not_disturb(caplog: pytest.LogCaptureFixture) -> None:
    with Synchronizer(SyncMethod.MEMORY) as where, caplog.at_level(logging.ERROR):
        server = where.serve()
        host, _, port = server.address.rpartition(":")
        for data in (b"", b"GET / HTTP/1.0\r\n\r\n", bytes(16) + b"\xff" * 100, bytes(200)):
            with socket.create_connection((host, int(port))) as stranger:
                stranger.sendall(data)
        with ExplorerClient(server, model_at(-1)) as explorer:
            assert explorer.blocking.latest_version() is None
    assert not caplog.records


def test_a_call_with_nonsense_is_answered_with_an_error() -> None:
    with Synchronizer(SyncMethod.MEMORY) as where:
        assert "unknown call" in where.service.call("explode", {})["refused"]
        assert where.service.call("trainer_needs", {"session": "x", "step": 0}) == {"refused": "unknown"}


@pytest.mark.parametrize("bad", [{"source": "no model"}, {"backend": "pigeons"}])
def test_a_trainer_that_cannot_send_takes_no_place(bad: dict[str, Any]) -> None:
    with Synchronizer(SyncMethod.MEMORY) as where, TrainerClient(where, model_at(0)) as trainer:
        with pytest.raises((ValueError, UnsupportedSourceError)):
            TrainerClient(where, bad.get("source", model_at(1)), backend=bad.get("backend", "gloo"))
        assert trainer.blocking.sync_weight()["version"] == 0


@pytest.mark.parametrize("method", HELD)
def test_clients_made_at_the_same_time_meet(method: SyncMethod, tmp_path: Path) -> None:
    for turn in range(10):
        with Synchronizer(method, directory=tmp_path / str(turn)) as where:
            assert len(set(map(id, asked_by(8, where)))) == 1


def asked_by(count: int, where: Synchronizer) -> list[Any]:
    """Return the services that threads get which ask for one at the same time."""
    start = threading.Barrier(count)

    def ask(_: int) -> Any:
        start.wait(10.0)
        return where.service

    with ThreadPoolExecutor(count) as pool:
        return list(pool.map(ask, range(count)))


def test_a_second_trainer_takes_the_place_of_the_first() -> None:
    with (
        Synchronizer(SyncMethod.MEMORY) as where,
        TrainerClient(where, model_at(0)) as old,
        TrainerClient(where, model_at(9)) as new,
    ):
        assert new.blocking.sync_weight()["version"] == 0
        with pytest.raises(LifecycleError, match=r"^another trainer has replaced this one"):
            old.blocking.need_sync()


def test_a_second_explorer_with_one_id_takes_the_place_of_the_first(caplog: pytest.LogCaptureFixture) -> None:
    with (
        Synchronizer(SyncMethod.MEMORY) as where,
        TrainerClient(where, model_at(5)) as trainer,
        ExplorerClient(where, model_at(0), id=3) as old,
        ExplorerClient(where, model_at(0), id=3) as new,
    ):
        trainer.blocking.sync_weight()
        assert new.blocking.sync_weight()["version"] == 0
        with pytest.raises(LifecycleError, match=r"^another explorer with id 3 has replaced this one"):
            old.blocking.sync_weight()
    assert "explorer 3 was replaced by a new client with its id" in caplog.messages


@pytest.mark.parametrize("style", SyncStyle)
def test_an_explorer_without_a_trainer_is_told_so(style: SyncStyle) -> None:
    staleness = 1 if style is SyncStyle.FULLY_ASYNC else None
    with (
        Synchronizer("memory", style, sync_interval=1, max_staleness=staleness) as where,
        ExplorerClient(where, model_at(0), timeout=0.1) as explorer,
    ):
        assert "the trainer has not come" in explorer.blocking.sync_weight()["reason"]


@pytest.mark.parametrize("role", quick_for(["trainer", "explorer"], "explorer"))
def test_a_client_that_said_stopped_stays_so_until_it_asks_again(role: str) -> None:
    with (
        Synchronizer(SyncMethod.MEMORY, lease=1.0) as where,
        TrainerClient(where.serve(), model_at(0)) as trainer,
        ExplorerClient(where.serve(), model_at(-1)) as explorer,
    ):
        quiet, other = (trainer, explorer) if role == "trainer" else (explorer, trainer)
        quiet.blocking.notify(RunningStatus.STOPPED)
        time.sleep(0.6)  # two beats
        status = other.blocking.status()
        assert status["trainer" if role == "trainer" else "explorers"] in (RunningStatus.STOPPED, {})
        quiet.blocking.need_sync()
        status = other.blocking.status()
        assert status["trainer"] is RunningStatus.RUNNING
        assert status["explorers"] == {0: RunningStatus.RUNNING}
