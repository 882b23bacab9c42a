"""Failures of trainers, explorers, disks and networks, and the state after them."""

from __future__ import annotations

import logging
import re
import resource
import socket
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from marks import quick_for
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
    wait_until,
)
from torch import distributed as dist
from torch import nn
from torch.distributed.tensor import Shard, distribute_tensor, init_device_mesh

from weight_update import (
    ExplorerClient,
    JoinRefusedError,
    LifecycleError,
    LinkClosedError,
    PatchEncoding,
    RunningStatus,
    SchemaMismatchError,
    Synchronizer,
    SyncMethod,
    SyncStyle,
    TrainerClient,
    UnsupportedSourceError,
    WeightStrategy,
)
from weight_update.synchronizer import CheckpointStore
from weight_update.synchronizer.direct import DirectService
from weight_update.synchronizer.transfer import key_of, settle

EVERY = list(SyncMethod)
HELD = [SyncMethod.MEMORY, SyncMethod.CHECKPOINT]


def waits(where: Synchronizer, *ids: int) -> bool:
    explorers = where.service.status()["explorers"]
    return all(explorers.get(str(id)) == "require_sync" for id in ids)


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
        wait_until(lambda: waits(where, 0, 1, 2))
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
        wait_until(lambda: waits(where, 0))
        subscriber = explorer.blocking._method.subscriber
        assert subscriber is not None
        subscriber.close()  # its link is cut, and it does not know
        publisher = trainer.blocking._method.publisher
        assert publisher is not None
        wait_until(lambda: not publisher.joined())
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
        wait_until(lambda: waits(where, 0))
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
        assert isinstance(service, DirectService)
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


class Counting(nn.Linear):
    """A layer whose extra state is a number, beside a head."""

    def __init__(self, seen: int) -> None:
        super().__init__(2, 2)
        self.seen, self.head = seen, nn.Linear(2, 2)
        set_to(self, seen)

    def get_extra_state(self) -> dict[str, int]:
        return {"seen": self.seen}

    def set_extra_state(self, state: dict[str, int]) -> None:
        self.seen = state["seen"]


def sync_once(method: SyncMethod, path: Path, source: nn.Module, model: nn.Module, **options: Any) -> None:
    clients = connected(method, SyncStyle.EXPLORER_DRIVEN, path, source, model, **options)
    with clients as (_, trainer, explorer):
        explorer.step = 1
        exchange(trainer, explorer)


@pytest.mark.parametrize("method", EVERY)
def test_extra_state_of_modules_travels(method: SyncMethod, tmp_path: Path) -> None:
    model = Counting(-1)
    sync_once(method, tmp_path, Counting(5), model)
    assert (model.seen, step_of(model)) == (5, 5)


@pytest.mark.parametrize("method", quick_for(EVERY, SyncMethod.NCCL, SyncMethod.CHECKPOINT))
def test_a_part_of_the_weights_travels_and_the_rest_is_left_alone(method: SyncMethod, tmp_path: Path) -> None:
    model, strategy = Counting(-1), WeightStrategy(select=["head"])
    sync_once(method, tmp_path, Counting(5), model, strategy=strategy)
    assert step_of(model.head) == 5
    assert model.weight.tolist() == [[-1.0, -1.0]] * 2


@pytest.mark.parametrize("method", EVERY)
def test_the_trainer_alone_selects_and_converts(method: SyncMethod, tmp_path: Path) -> None:
    def converted(items: Iterator[tuple[str, torch.Tensor]]) -> Iterator[tuple[str, torch.Tensor]]:
        return ((f"inner.{name}", 2 * tensor) for name, tensor in items)

    strategy = WeightStrategy("state_dict", select=["0.weight"], convert=converted)
    model = nn.ModuleDict({"inner": model_at(-1)})
    sync_once(method, tmp_path, model_at(5), model, strategy=strategy)
    assert {name: value.unique().item() for name, value in model.state_dict().items()} == {
        "inner.0.weight": 10,
        "inner.0.bias": -1,
        "inner.1.weight": -1,
        "inner.1.bias": -1,
    }


def test_a_file_has_converted_weights_with_max_in_flight_too(tmp_path: Path) -> None:
    def negated(items: Iterator[tuple[str, torch.Tensor]]) -> Iterator[tuple[str, torch.Tensor]]:
        return ((name, -tensor) for name, tensor in items)

    strategy = WeightStrategy("state_dict", encoding="bucket", max_in_flight=1, convert=negated)
    model = model_at(-1)
    sync_once(SyncMethod.CHECKPOINT, tmp_path, model_at(5), model, strategy=strategy)
    assert step_of(model) == -5


@pytest.mark.parametrize("method", [SyncMethod.NCCL, SyncMethod.MEMORY])
def test_max_in_flight_without_files_is_refused(method: SyncMethod, tmp_path: Path) -> None:
    """Such a sender keeps no weights for explorers that join, which would wait for the next update."""
    strategy = WeightStrategy("state_dict", encoding="bucket", max_in_flight=1)
    with (
        synchronizer(method, SyncStyle.EXPLORER_DRIVEN, tmp_path) as where,
        pytest.raises(ValueError, match="max_in_flight keeps no weights for explorers that join"),
    ):
        TrainerClient(where, model_at(5), strategy=strategy)
    if method is SyncMethod.MEMORY:
        with pytest.raises(ValueError, match="max_in_flight keeps no weights"):
            Synchronizer(method, strategy=strategy)


@pytest.mark.parametrize(
    "options", [{"init_sync": False}, {"init_sync_prefixes": ["0"]}, {"init_sync_prefixes": []}]
)
def test_changes_of_weights_that_the_synchronizer_does_not_have_are_refused(options: dict[str, Any]) -> None:
    strategy = WeightStrategy("state_dict", encoding=PatchEncoding(**options))
    text = "the synchronizer needs all weights at first"
    with pytest.raises(ValueError, match=text):
        Synchronizer(SyncMethod.MEMORY, strategy=strategy)
    with Synchronizer(SyncMethod.MEMORY) as where, pytest.raises(ValueError, match=text):
        TrainerClient(where, model_at(5), strategy=strategy)


def test_shards_are_not_written_to_a_file(tmp_path: Path) -> None:
    def counted(items: Iterator[tuple[str, torch.Tensor]]) -> Iterator[tuple[str, torch.Tensor]]:
        calls.append(1)
        return items

    calls: list[int] = []
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        weights = {"weight": distribute_tensor(torch.ones(4), init_device_mesh("cpu", (1,)), [Shard(0)])}
        with (
            synchronizer(SyncMethod.CHECKPOINT, SyncStyle.EXPLORER_DRIVEN, tmp_path) as where,
            TrainerClient(where, weights, strategy=WeightStrategy(convert=counted)) as trainer,
            pytest.raises(UnsupportedSourceError, match=r"sharded \(DTensor\), and a file has whole ones"),
        ):
            trainer.blocking.sync_weight()
    finally:
        dist.destroy_process_group()
    assert not calls


class TwoLayers(nn.Module):
    def __init__(self, value: float, *, tied: bool = True) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(3, 3), nn.Linear(3, 3)
        if tied:
            self.b.weight = self.a.weight
        set_to(self, value)


def test_tied_weights_stay_tied(tmp_path: Path) -> None:
    for method in EVERY:
        model = TwoLayers(-1)
        sync_once(method, tmp_path / method.value, TwoLayers(4), model)
        assert step_of(model) == 4
        assert model.a.weight.data_ptr() == model.b.weight.data_ptr()


@pytest.mark.parametrize("method", EVERY)
def test_an_explorer_that_ties_what_the_trainer_does_not_says_so(method: SyncMethod, tmp_path: Path) -> None:
    source, model = TwoLayers(4, tied=False), TwoLayers(-1)
    set_to(source.b, 5)
    with connected(method, SyncStyle.EXPLORER_DRIVEN, tmp_path, source, model) as (_, trainer, explorer):
        explorer.step = 1
        waiting = Waiting(explorer)
        waiting.be_served_by(trainer)
        with pytest.raises(SchemaMismatchError, match=r"a\.weight and b\.weight: tied in"):
            waiting.result()
    assert step_of(model) == -1


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
