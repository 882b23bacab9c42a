"""The directory of a synchronizer, and the file in it that keeps the newest version."""

from __future__ import annotations

import os
import signal
import threading
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
from checkpoint_parts import in_child, visible
from sync_parts import model_at

from weight_update import ExplorerClient, Synchronizer, SyncMethod, TrainerClient
from weight_update.synchronizer import CheckpointStore
from weight_update.synchronizer.sessions import VersionFile

EVERY = list(SyncMethod)


@pytest.mark.parametrize("method", EVERY)
def test_a_relative_directory_is_the_same_for_all(
    method: SyncMethod, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    where = Synchronizer(method, directory="run-7")
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    with where:
        assert where.service is not None
    assert (tmp_path / "run-7").is_dir()


def test_a_slow_disk_under_the_version_file_stops_no_other_call(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stuck, go_on = threading.Event(), threading.Event()
    replace = Path.replace

    def slow(path: Path, target: Any) -> Any:
        stuck.set()
        go_on.wait(20.0)
        return replace(path, target)

    with (
        Synchronizer(SyncMethod.MEMORY, directory=tmp_path) as where,
        TrainerClient(where, model_at(0)) as trainer,
        ExplorerClient(where, model_at(-1)) as explorer,
    ):
        monkeypatch.setattr(Path, "replace", slow)
        publishing = threading.Thread(target=trainer.blocking.sync_weight, daemon=True)
        publishing.start()
        assert stuck.wait(20.0)
        asked = threading.Thread(target=explorer.blocking.need_sync, daemon=True)
        asked.start()
        asked.join(5.0)
        in_time = not asked.is_alive()
        go_on.set()
        publishing.join(20.0)
        assert in_time
    monkeypatch.undo()
    with Synchronizer(SyncMethod.MEMORY, directory=tmp_path) as where:
        assert where.service.machine.newest == 0


def test_with_checkpoints_the_manifests_tell_where_to_go_on(tmp_path: Path) -> None:
    for version in (3, 4):
        CheckpointStore(tmp_path).publish(version, model_at(version).state_dict(), step=10 * version)
    (tmp_path / "000000000004.json").write_text("broken")
    with (
        Synchronizer(SyncMethod.CHECKPOINT, directory=tmp_path) as where,
        TrainerClient(where, model_at(5)) as trainer,
    ):
        assert (trainer.version, trainer.step) == (3, 30)
        assert trainer.blocking.sync_weight()["version"] == 5, "an explorer may have version 4"
    assert not (tmp_path / "synchronizer.json").exists()


def test_a_fifo_in_place_of_the_version_file_is_ignored(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "synchronizer.json")
    made: list[int | None] = []

    def start() -> None:
        with Synchronizer(SyncMethod.MEMORY, directory=tmp_path) as where:
            made.append(where.service.machine.newest)

    starting = threading.Thread(target=start, daemon=True)
    starting.start()
    starting.join(10.0)
    assert made == [None]


@pytest.mark.parametrize("text", ["[" * 100_000, '{"version": 1e999, "step": 0}'], ids=["deep", "infinite"])
def test_a_version_file_with_rubbish_is_ignored(
    text: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "synchronizer.json").write_text(text)
    with Synchronizer(SyncMethod.MEMORY, directory=tmp_path) as where:
        assert where.service.status()["version"] is None
    assert "cannot be read and is ignored" in caplog.text


def test_a_killed_synchronizer_leaves_no_part_of_its_version_file(tmp_path: Path) -> None:
    def write_and_die() -> None:
        with patch.object(Path, "replace", lambda *_: os.kill(os.getpid(), signal.SIGKILL)):
            VersionFile(tmp_path).keep(1, 10)

    (tmp_path / "synchronizer.log.1").touch()
    assert in_child(write_and_die) == -signal.SIGKILL
    assert len(visible(tmp_path)) == 2
    assert VersionFile(tmp_path).read() is None
    assert visible(tmp_path) == ["synchronizer.log.1"]


def test_a_first_version_that_cannot_be_written_leaves_none_for_a_restart(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    file = VersionFile(tmp_path)
    tmp_path.rmdir()
    file.keep(1, 10)
    assert "synchronizer.json could not be written; a restart may begin with an older version, or none" in (
        caplog.text
    )
