"""Failures of trainers, explorers, disks and networks, and the state after them."""

from __future__ import annotations

import logging
import re
import resource
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from sync_parts import (
    ExplorerThread,
    Waiting,
    connected,
    exchange,
    has_step,
    model_at,
    set_to,
    step_of,
    synchronizer,
    train,
    until_waiting,
    wait_until,
)
from torch import nn

from weight_update import (
    ExplorerClient,
    LinkClosedError,
    RunningStatus,
    SchemaMismatchError,
    Synchronizer,
    SyncMethod,
    SyncStyle,
    TrainerClient,
)
from weight_update.synchronizer import CheckpointStore
from weight_update.synchronizer.transfer import key_of, settle

EVERY = list(SyncMethod)


UNANSWERED = ": the trainer is at step 0, and has not answered; does it call need_sync() after each step?"


@pytest.mark.parametrize("method", EVERY)
def test_a_timeout_leaves_nothing_half_done_and_the_next_step_tries_again(
    method: SyncMethod, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    source, model = model_at(5), model_at(-1)
    with (
        synchronizer(method, SyncStyle.EXPLORER_DRIVEN, tmp_path) as where,
        TrainerClient(where, source) as trainer,
        ExplorerClient(where, model, timeout=0.3) as explorer,
    ):
        explorer.step = 1
        said = explorer.blocking.sync_weight()
        assert re.search(rf"came (within 0\.[0-9]+ s|in time){re.escape(UNANSWERED)}$", said["reason"])
        if method is SyncMethod.NCCL:  # who joins has what the trainer began with
            assert (said["version"], step_of(model)) == (0, 5)
            assert "explorer 0 now has version 0: no new" in caplog.text
        else:
            assert (said["version"], step_of(model)) == (None, -1)
            assert "explorer 0 has no version yet: no new" in caplog.text
        set_to(source, 6)
        assert not trainer.blocking.need_sync(), "no explorer waits any more"
        assert not explorer.blocking.need_sync()
        explorer.step = 2
        assert explorer.blocking.need_sync()
        explorer.blocking.timeout = 20.0
        exchange(trainer, explorer)
        assert step_of(model) == 6


def test_an_explorer_that_took_all_its_time_to_connect_is_not_told_of_0_s() -> None:
    with Synchronizer(SyncMethod.MEMORY, SyncStyle.EXPLORER_DRIVEN) as where:
        where.service.hello("trainer", "trainer")
        where.service.hello("explorer", "explorer")
        waits = {"session": "explorer", "step": 1, "held": None, "timeout": 0.0, "again": True}
        reason = where.service.call("explorer_syncs", waits)["reason"]
        assert reason == f"no new weights came in time{UNANSWERED}"


@pytest.mark.parametrize("method", [SyncMethod.NCCL, SyncMethod.MEMORY])
def test_the_reason_of_an_explorer_that_computes_for_too_long(method: SyncMethod, tmp_path: Path) -> None:
    with (
        synchronizer(method, SyncStyle.EXPLORER_DRIVEN, tmp_path) as where,
        TrainerClient(where, model_at(0)) as trainer,
        ExplorerClient(where, model_at(-1), transfer_timeout=0.3) as explorer,
    ):
        exchange(trainer, explorer)
        with explorer.hold():
            waiting = Waiting(explorer)
            wait_until(trainer.blocking.need_sync)
            trainer.blocking.sync_weight()
            reason = waiting.result()["reason"]
    assert reason == "SyncTimeoutError: hold() or a forward pass took longer than 0.3 s"


@pytest.mark.parametrize("how", ["close", "notify"])
@pytest.mark.parametrize("method", EVERY)
def test_the_trainer_stopping_wakes_all_with_the_unchanged_version(
    method: SyncMethod, how: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with synchronizer(method, SyncStyle.FIXED, tmp_path, sync_interval=100) as where:
        trainer = TrainerClient(where, model_at(0))
        explorers = [ExplorerClient(where, model_at(-1), timeout=60.0) for _ in range(3)]
        for explorer in explorers:
            explorer.step = 100
        waiting = [Waiting(explorer) for explorer in explorers]
        until_waiting(where, 0, 1, 2)
        before = trainer.blocking.latest_version()
        if how == "close":
            trainer.close()
        else:
            trainer.blocking.notify(RunningStatus.STOPPED)
        for one in waiting:
            said = one.result(5.0)
            assert said["version"] == before
            assert said["reason"] == "the trainer stopped"
        assert not [one for one in caplog.records if one.levelno >= logging.WARNING], "so a run ends"
        assert explorers[0].blocking.status()["trainer"] is RunningStatus.STOPPED
        for client in (*explorers, trainer):
            client.close()


def test_directly_a_version_that_reached_no_explorer_is_not_published(tmp_path: Path) -> None:
    clients = connected(SyncMethod.NCCL, SyncStyle.EXPLORER_DRIVEN, tmp_path, model_at(0), model_at(-1))
    with clients as (where, trainer, explorer):
        explorer.step = 1
        waiting = Waiting(explorer)
        until_waiting(where, 0)
        explorer.blocking._method.subscriber.close()  # its link is cut, and it does not know
        wait_until(lambda: not trainer.blocking._method.publisher.joined())
        said = trainer.blocking.sync_weight()
        assert "explorer 0" in said["reason"]
        assert "not connected" in waiting.result()["reason"]
        assert trainer.blocking.latest_version() == 0, "what it joined with"
        explorer.step = 2
        newest = exchange(trainer, explorer)
        assert newest > 0
        assert newest == trainer.blocking.latest_version()


def test_directly_weights_sent_before_the_trainer_died_get_a_version_of_their_own(tmp_path: Path) -> None:
    source, model = model_at(0), model_at(-1)
    with (
        synchronizer(SyncMethod.NCCL, SyncStyle.EXPLORER_DRIVEN, tmp_path) as where,
        TrainerClient(where, source) as client,
        ExplorerClient(where, model) as explorer,
    ):
        explorer.step = 1
        waiting = Waiting(explorer)
        until_waiting(where, 0)
        trainer = client.blocking
        ids = trainer.ask("meet", step=3, timeout=20.0)["ids"]
        set_to(source, 3)
        assert not settle(trainer._method.publisher.send(ids), ids)
        client.close()  # it has not told what it sent
        said = waiting.result()
        assert "the trainer stopped" in said["reason"]
        assert step_of(model) == 3
        assert said["version"] == explorer.version == 1, "not that of other weights"
        assert not explorer.blocking.need_sync()
        assert explorer.version == explorer.blocking.latest_version() == 1


def test_directly_the_table_of_updates_stays_bounded_when_the_trainer_dies() -> None:
    with Synchronizer(SyncMethod.NCCL) as where:
        service = where.service
        endpoint = {"token": "a", "address": "127.0.0.1", "port": 1, "shared": False, "step": 0}
        service.hello("trainer", "trainer", ticket=endpoint)
        service.hello("explorer", "explorer")
        for number in range(1, 300):
            service._record(endpoint, number, number, number)
        before = len(service._versions)
        service.bye("trainer")
        held = [key_of(endpoint), 300]  # an update that it could not report
        assert service.explorer_needs("explorer", 1, held)["version"] == 300
        assert len(service._versions) == before


def test_a_full_disk_publishes_nothing_and_training_goes_on(tmp_path: Path) -> None:
    model = nn.Linear(300, 300)
    with (
        synchronizer(SyncMethod.CHECKPOINT, SyncStyle.TRAINER_DRIVEN, tmp_path) as where,
        TrainerClient(where, model) as trainer,
    ):
        soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
        resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 16, hard))  # no file may grow beyond this
        try:
            said = trainer.blocking.sync_weight()
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
        assert said["version"] is None
        assert said["reason"]
        assert trainer.blocking.latest_version() is None
        assert not trainer.blocking.need_sync(), "it would spin"
        trainer.step = 1
        assert trainer.blocking.need_sync()
        assert "reason" not in trainer.blocking.sync_weight()


def test_a_broken_checkpoint_is_skipped_with_a_warning_and_does_not_spin(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    source, model = model_at(1), model_at(-1)
    clients = connected(SyncMethod.CHECKPOINT, SyncStyle.TRAINER_DRIVEN, tmp_path, source, model)
    with clients as (_, trainer, explorer):
        trainer.blocking.sync_weight()
        data = next(tmp_path.rglob("*.safetensors"))
        data.write_bytes(data.read_bytes()[:-40])
        explorer.step = 1
        with caplog.at_level(logging.WARNING):
            said = explorer.blocking.sync_weight()
        assert said["version"] is None
        assert said["reason"]
        assert caplog.records
        assert step_of(model) == -1
        assert not explorer.blocking.need_sync(), "it would spin"
        trainer.step = 1
        set_to(source, 2)
        trainer.blocking.sync_weight()
        explorer.step = 2
        assert explorer.blocking.need_sync()
        assert explorer.blocking.sync_weight()["version"] == 1
        assert step_of(model) == 2


def test_the_step_of_a_version_is_that_of_the_file_that_was_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    read = CheckpointStore.reading

    def replaced_first(store: CheckpointStore, version: int) -> Any:
        monkeypatch.setattr(CheckpointStore, "reading", read)
        store.publish(version, model_at(7).state_dict(), step=7)
        return read(store, version)

    model = model_at(-1)
    clients = connected(SyncMethod.CHECKPOINT, SyncStyle.TRAINER_DRIVEN, tmp_path, model_at(0), model)
    with clients as (_, trainer, explorer):
        trainer.blocking.sync_weight()
        monkeypatch.setattr(CheckpointStore, "reading", replaced_first)
        explorer.step = 1
        explorer.blocking.sync_weight()
        assert step_of(model) == explorer.blocking._method._step == 7


def test_files_of_versions_that_were_never_reported_are_not_replaced(tmp_path: Path) -> None:
    source, model = model_at(0), model_at(-1)
    clients = connected(
        SyncMethod.CHECKPOINT, SyncStyle.FULLY_ASYNC, tmp_path, source, model, max_staleness=0
    )
    with clients as (_, trainer, explorer):
        version = trainer.blocking.ask("trainer_version", step=0)["version"]
        trainer.blocking._method.store(trainer.blocking, version, 0)  # and the trainer fails
        wait_until(lambda: explorer.version == version)  # read in the background
        trainer.step = 1
        set_to(source, 1)
        trainer.blocking.sync_weight()
        if explorer.blocking.need_sync():
            explorer.blocking.sync_weight()
        wait_until(lambda: has_step(model, 1))
        assert explorer.version == trainer.version > version


@pytest.mark.parametrize("method", EVERY)
def test_a_model_that_is_not_the_trainers_is_an_error_and_the_others_go_on(
    method: SyncMethod, tmp_path: Path
) -> None:
    with (
        synchronizer(method, SyncStyle.EXPLORER_DRIVEN, tmp_path) as where,
        TrainerClient(where, model_at(3)) as trainer,
        ExplorerClient(where, nn.Linear(2, 2), id=7, timeout=10.0) as other,
    ):
        model = model_at(-1)
        with ExplorerClient(where, model, id=0) as good:
            good.step = other.step = 1
            fitting, wrong = Waiting(good), Waiting(other)
            for one in (fitting, wrong):
                one.be_served_by(trainer)
            assert "reason" not in fitting.result()
        assert step_of(model) == 3
        with pytest.raises(SchemaMismatchError, match="weight"):
            wrong.result()
        assert other.blocking.status()["explorers"][7] is RunningStatus.RUNNING, "it does not wait any more"
        assert not other.blocking.need_sync(), "it would spin"


@pytest.mark.parametrize("style", [SyncStyle.TRAINER_DRIVEN, SyncStyle.EXPLORER_DRIVEN])
def test_directly_the_trainer_is_told_which_models_do_not_fit(style: SyncStyle, tmp_path: Path) -> None:
    with (
        synchronizer(SyncMethod.NCCL, style, tmp_path) as where,
        TrainerClient(where, model_at(3), timeout=0.3) as trainer,
        ExplorerClient(where, nn.Linear(2, 2), id=7) as explorer,
    ):
        explorer.step = 1
        with pytest.raises(SchemaMismatchError):
            explorer.blocking.sync_weight()
        reason = trainer.blocking.sync_weight()["reason"]
        assert "explorer 7" in reason
        assert "0.weight" in reason


@pytest.mark.parametrize("method", EVERY)
def test_the_synchronizer_restarts_from_the_last_published_version(
    method: SyncMethod, tmp_path: Path
) -> None:
    source, model = model_at(1), model_at(-1)

    def start(port: int = 0) -> tuple[Synchronizer, Any]:
        made = Synchronizer(method, SyncStyle.EXPLORER_DRIVEN, directory=tmp_path)
        return made, made.serve(port=port, token="the token")

    first, server = start()
    trainer = TrainerClient(server, source)
    explorer = ExplorerClient(server, model)
    explorer.step = 1
    before = exchange(trainer, explorer)
    port = int(server.address.rpartition(":")[2])
    first.close()
    del first, server
    second, _ = start(port)
    assert trainer.blocking.latest_version() == before, "from the disk, by a client that found it again"
    set_to(source, 2)
    explorer.step, trainer.step = 2, 1
    assert exchange(trainer, explorer) > before
    assert step_of(model) == 2
    for client in (trainer, explorer):
        client.close()
    second.close()


def test_a_synchronizer_that_is_away_for_good_is_an_error_and_sync_ends(tmp_path: Path) -> None:
    where = Synchronizer(SyncMethod.MEMORY)
    server = where.serve()
    explorer = ExplorerClient(server, model_at(-1), timeout=0.5)
    where.close()
    with pytest.raises(LinkClosedError, match="no synchronizer"):
        explorer.blocking.need_sync()
    assert "no synchronizer" in explorer.blocking.sync_weight()["reason"]
    explorer.close()


def test_wall_clocks_that_jump_change_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    jumps = iter(range(10**9))
    monkeypatch.setattr(time, "time", lambda: 1e9 + (-1) ** next(jumps) * 1e7)
    monkeypatch.setattr(time, "time_ns", lambda: int(time.time() * 1e9))
    for method in EVERY:
        directory = tmp_path / method.value
        with synchronizer(method, SyncStyle.FIXED, directory, sync_interval=2, lease=1.0) as where:
            thread = ExplorerThread(where.serve(), 8)
            thread.start()
            train(where, thread.is_alive)
        assert thread.seen.error is None
        assert all("reason" not in sync.metrics for sync in thread.seen.syncs)
        assert len(thread.seen.syncs) == 4


def test_updates_land_between_forward_passes(tmp_path: Path) -> None:
    """In FULLY_ASYNC weights come in the background, in all methods."""

    class Twice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.zeros(()))

        def forward(self) -> tuple[float, float]:
            first = self.weight.item()
            time.sleep(0.003)
            return first, self.weight.item()

    for method in EVERY:
        source, model = Twice(), Twice()
        seen = set()
        clients = connected(method, SyncStyle.FULLY_ASYNC, tmp_path / method.value, source, model)
        with clients as (_, trainer, explorer):
            deadline = time.monotonic() + 20.0
            while len(seen) < 4 and time.monotonic() < deadline:
                if explorer.blocking.need_sync():
                    Waiting(explorer).be_served_by(trainer)
                if trainer.blocking.need_sync():
                    trainer.blocking.sync_weight()
                trainer.step += 1
                explorer.step += 1
                set_to(source, trainer.step)
                for _ in range(3):
                    first, second = model()
                    assert first == second
                    seen.add(first)
        assert len(seen) >= 4, f"{method}: {seen}"
