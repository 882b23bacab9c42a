"""Trainers and synchronizers that end and begin again, and calls that come too late."""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from checkpoint_parts import in_child, visible
from sync_parts import Waiting, connected, exchange, model_at, set_to, step_of, synchronizer, wait_until
from torch import nn

from weight_update import (
    ExplorerClient,
    LifecycleError,
    LinkClosedError,
    RunningStatus,
    SchemaMismatchError,
    Synchronizer,
    SyncMethod,
    SyncStyle,
    TrainerClient,
    TransportError,
    WeightStrategy,
)
from weight_update.synchronizer import CheckpointStore, memory, methods
from weight_update.synchronizer.direct import DirectService
from weight_update.synchronizer.memory import MemoryService
from weight_update.synchronizer.plan import SyncPlan
from weight_update.synchronizer.ray_actor import RayHost
from weight_update.synchronizer.sessions import VersionFile
from weight_update.synchronizer.transfer import Publisher, Subscriber, key_of

EVERY = list(SyncMethod)


def test_a_synchronizer_that_could_not_join_the_trainer_keeps_no_link_to_it() -> None:
    gone = Publisher(model_at(0), None, WeightStrategy(), 5.0)
    gone.close()
    with Synchronizer(SyncMethod.MEMORY, transfer_timeout=0.5) as where:
        service = where.service
        service.hello("trainer", "trainer")
        reply = service.call("take_from", {"session": "trainer", "ticket": gone.endpoint})
        assert "does not reach the trainer" in reply["error"]
        reply = service.call("trainer_published", {"session": "trainer", "step": 0, "version": 0})
        assert "no link to the trainer" in reply["error"]
        assert service.status()["version"] is None


@pytest.mark.parametrize("method", EVERY)
def test_in_fixed_a_trainer_that_is_made_anew_goes_on_at_the_step_of_the_newest_version(
    method: SyncMethod, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    def start() -> Synchronizer:
        return Synchronizer(method, SyncStyle.FIXED, sync_interval=10, directory=tmp_path)

    with start() as where, TrainerClient(where, model_at(0), step=20):
        if method is SyncMethod.CHECKPOINT:
            CheckpointStore(tmp_path).publish(3, model_at(0).state_dict(), step=20)
        service = where.service
        with service.changed:
            service.machine.published(3, 20)
        service.call("status", {})
    with start() as where:
        with TrainerClient(where, model_at(0)) as trainer:
            assert trainer.step == 20
            assert trainer.blocking.status()["step"] == 20
        with caplog.at_level(logging.WARNING), TrainerClient(where, model_at(0), step=0) as trainer:
            assert trainer.step == 0, "as it was told"
            assert "step 20" in caplog.text
            with ExplorerClient(where, model_at(-1), timeout=0.1, step=30) as explorer:
                reason = explorer.blocking.sync_weight()["reason"]
            assert "trainer's step 30" in reason
            assert "is at step 0" in reason


@pytest.mark.parametrize("method", EVERY)
def test_after_the_synchronizer_was_closed_sync_weight_gives_a_reason_at_once(
    method: SyncMethod, tmp_path: Path
) -> None:
    clients = connected(method, SyncStyle.FIXED, tmp_path, model_at(0), model_at(-1))
    with clients as (where, trainer, explorer):
        where.close()
        for client in (trainer, explorer):
            began = time.monotonic()
            assert "the synchronizer was closed" in client.blocking.sync_weight()["reason"]
            with pytest.raises(LinkClosedError, match="the synchronizer was closed"):
                client.blocking.need_sync()
            assert time.monotonic() - began < 10.0


def test_a_client_that_is_closed_while_it_says_hello_again_does_not_come_back(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Signs of life, or a call of another thread, may find that the synchronizer has forgotten it."""
    with Synchronizer(SyncMethod.MEMORY) as where, ExplorerClient(where, model_at(-1)) as explorer:
        channel = explorer.blocking.channel
        call = channel.call

        def close_first(name: str, *args: Any) -> Any:
            if name == "hello":
                explorer.close()
            return call(name, *args)

        where.service.gone(explorer.blocking.session)
        monkeypatch.setattr(channel, "call", close_first)
        with pytest.raises(LifecycleError, match="is closed"):
            explorer.blocking.need_sync()
        assert where.service.status()["explorers"] == {}


def test_directly_an_explorer_that_waits_for_a_trainer_is_told_of_the_end(
    caplog: pytest.LogCaptureFixture,
) -> None:
    with Synchronizer(SyncMethod.NCCL) as where, ExplorerClient(where, model_at(-1)) as explorer:
        explorer.step = 1
        waiting = Waiting(explorer)
        changed = where.service.changed
        wait_until(lambda: changed._waiters)
        where.close()
        assert "was closed" in waiting.result()["reason"]
    assert not [one for one in caplog.records if one.levelno >= logging.ERROR]


def test_a_call_that_the_end_of_a_synchronizer_overtakes_says_so(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Another thread has taken the weights away."""
    make = MemoryService._make_publisher

    def overtaken(*arguments: Any) -> None:
        pool.submit(where.close).result(20.0)
        make(*arguments)

    with Synchronizer(SyncMethod.MEMORY) as where, ThreadPoolExecutor(1) as pool:
        monkeypatch.setattr(MemoryService, "_make_publisher", overtaken)
        with TrainerClient(where, model_at(0)) as trainer:
            assert trainer.blocking.sync_weight()["reason"] == "the synchronizer was closed"
    assert "a call failed" not in caplog.text


def test_directly_a_trainer_that_was_replaced_begins_no_transfer() -> None:
    where = DirectService(SyncPlan(SyncMethod.NCCL, SyncStyle.TRAINER_DRIVEN), lease=30.0, timeout=60.0)
    ticket = {"token": "t", "address": "127.0.0.1", "port": 0, "shared": False}
    where.call("hello", {"session": "old", "role": "trainer", "ticket": ticket})
    for id in range(2):
        where.call("hello", {"session": str(id), "role": "explorer"})
    machine, changed = where.machine, where.changed
    with changed:
        machine.explorer_requires(0)
    said: list[dict[str, Any]] = []
    args = {"session": "old", "step": 0, "timeout": 20.0}
    meeting = threading.Thread(target=lambda: said.append(where.call("meet", args)), daemon=True)
    meeting.start()
    wait_until(lambda: machine.trainer is not None and machine.trainer.status is RunningStatus.REQUIRE_SYNC)
    with changed:  # the new one is faster than the thread of the old one
        where.call("hello", {"session": "new", "role": "trainer", "ticket": ticket})
        machine.explorer_requires(0)
        machine.trainer_requires()
    meeting.join(10.0)
    assert "another trainer came" in said[0]["reason"]
    assert not machine.transfer
    where.close()


@pytest.mark.parametrize("answer", ["fails", "is forgotten"])
def test_a_client_that_cannot_introduce_itself_says_so(answer: str) -> None:
    calls: list[str] = []

    def hello(**_: Any) -> dict[str, Any]:
        calls.append("hello")
        if answer == "fails":
            raise OSError("no room for another")
        return {}

    with (
        Synchronizer(SyncMethod.MEMORY) as where,
        ExplorerClient(where, model_at(-1), timeout=0.5) as explorer,
    ):
        service = where.service
        service.gone(explorer.blocking.session)
        service.hello = hello
        with ThreadPoolExecutor(1) as pool:
            asking = pool.submit(explorer.blocking.need_sync)
            try:
                error = asking.exception(5.0)
            finally:
                explorer.blocking.closed.set()
        assert isinstance(error, TransportError)
        assert ("no room" if answer == "fails" else "forgets") in str(error)
        assert len(calls) < 20


@pytest.mark.parametrize("method", EVERY)
def test_a_trainer_that_is_made_anew_may_have_other_weights(method: SyncMethod, tmp_path: Path) -> None:
    source, model = nn.Linear(3, 2), nn.Linear(3, 2)
    with (
        synchronizer(method, SyncStyle.EXPLORER_DRIVEN, tmp_path) as where,
        ExplorerClient(where, model_at(-1), id=7) as old,
    ):
        with TrainerClient(where, model_at(0)) as trainer:
            old.step = 1
            exchange(trainer, old)
        with TrainerClient(where, source) as trainer, ExplorerClient(where, model) as explorer:
            if method is not SyncMethod.NCCL:
                trainer.blocking.sync_weight()  # else the explorer finds the weights of the trainer before
            explorer.step, old.step = 1, 2
            fitting, wrong = Waiting(explorer), Waiting(old)
            for one in (fitting, wrong):
                one.be_served_by(trainer)
            assert "reason" not in fitting.result()
            with pytest.raises(SchemaMismatchError, match="weight"):
                wrong.result()
        assert torch.equal(model.weight, source.weight)


def test_while_a_new_trainer_brings_other_weights_those_before_are_fetched(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    make, model, said = MemoryService._make_publisher, model_at(-1), list[dict[str, Any]]()

    def fetched_meanwhile(*arguments: Any) -> Any:
        said.append(explorer.blocking.sync_weight())
        return make(*arguments)

    with (
        synchronizer(SyncMethod.MEMORY, SyncStyle.TRAINER_DRIVEN, tmp_path) as where,
        ExplorerClient(where, model, timeout=10.0) as explorer,
    ):
        source = model_at(0)
        with TrainerClient(where, source) as trainer:
            exchange(trainer, explorer)
            trainer.step = 1
            set_to(source, 1)
            trainer.blocking.sync_weight()
        monkeypatch.setattr(MemoryService, "_make_publisher", fetched_meanwhile)
        with TrainerClient(where, nn.Linear(3, 2)) as trainer:
            trainer.blocking.sync_weight()
    assert [(one["version"], one.get("reason")) for one in said] == [(1, None)]
    assert step_of(model) == 1


def test_close_while_a_new_trainer_brings_other_weights_leaves_no_publisher(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    close, require_open, closed = Publisher.close, MemoryService._require_open, list[Publisher]()

    def noted(publisher: Publisher) -> None:
        closed.append(publisher)
        close(publisher)

    def closed_meanwhile(service: MemoryService) -> None:
        assert service._newest is not None
        if service._newest.publisher is not before:
            service.close()
        require_open(service)

    with Synchronizer(SyncMethod.MEMORY) as where:
        with TrainerClient(where, model_at(0)) as trainer:
            trainer.blocking.sync_weight()
        assert isinstance(where.service, MemoryService)
        assert where.service._newest is not None
        before = where.service._newest.publisher
        monkeypatch.setattr(Publisher, "close", noted)
        monkeypatch.setattr(MemoryService, "_require_open", closed_meanwhile)
        with TrainerClient(where, nn.Linear(3, 2)) as trainer:
            trainer.blocking.sync_weight()
        assert before in closed


def test_a_trainer_that_is_replaced_while_its_call_waits_for_another_changes_no_link() -> None:
    publisher = Publisher(model_at(0), None, WeightStrategy(), 5.0)
    with Synchronizer(SyncMethod.MEMORY) as where, ThreadPoolExecutor(1) as pool:
        service = where.service
        assert isinstance(service, MemoryService)
        service.hello("old", "trainer")
        with service._taking:  # as by an earlier call, which takes its time to connect
            args = {"session": "old", "ticket": publisher.endpoint}
            said = pool.submit(service.call, "take_from", args)
            time.sleep(0.2)
            service.hello("new", "trainer")
        assert "has replaced this one" in said.result(10.0)["refused"]
    publisher.close()


@pytest.mark.parametrize("method", EVERY)
def test_a_call_that_is_cancelled_before_it_waits_does_not_wait(method: SyncMethod, tmp_path: Path) -> None:
    withdrawn, ended = threading.Event(), threading.Event()

    async def cancel(explorer: ExplorerClient) -> None:
        call, called = explorer.blocking.channel.call, asyncio.Event()
        loop = asyncio.get_running_loop()

        def late(name: str, *args: Any) -> Any:
            if name == "explorer_syncs" and not withdrawn.is_set():
                loop.call_soon_threadsafe(called.set)
                assert withdrawn.wait(20)
            reply = call(name, *args)
            if name == "notify":
                withdrawn.set()
            elif name in ("explorer_syncs", "explorer_gives_up") and "join" not in reply:
                ended.set()
            return reply

        explorer.blocking.channel.call = late  # type: ignore[method-assign, assignment]
        waiting = asyncio.create_task(explorer.sync_weight())
        await called.wait()
        waiting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await waiting

    with connected(method, SyncStyle.FIXED, tmp_path, model_at(0), model_at(-1)) as (_, _, explorer):
        explorer.step = 1
        asyncio.run(cancel(explorer))
        assert ended.wait(20), "it still waits"  # timeout= is 60 s
        assert explorer.blocking.status()["explorers"][0] is RunningStatus.RUNNING


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


def test_a_call_that_is_cancelled_after_close_is_cancelled() -> None:
    async def cancel(where: Synchronizer) -> None:
        explorer = ExplorerClient(where, model_at(-1))
        explorer.step = 1
        waiting = asyncio.create_task(explorer.sync_weight())
        await asyncio.sleep(0.1)
        explorer.close()
        waiting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await waiting
        with pytest.raises(LifecycleError, match="create a new one"):
            await explorer.need_sync()

    with Synchronizer(SyncMethod.MEMORY) as where:
        asyncio.run(cancel(where))


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


@pytest.mark.parametrize("method", [SyncMethod.NCCL, SyncMethod.MEMORY])
def test_an_explorer_has_no_version_of_a_count_that_has_ended(method: SyncMethod) -> None:
    """Trainer and synchronizer restart without a directory; version 0 is not taken for version 2 then."""

    def start(port: int = 0) -> tuple[Synchronizer, TrainerClient, int]:
        made = Synchronizer(method, SyncStyle.EXPLORER_DRIVEN)
        server = made.serve(port=port, token="the token")
        return made, TrainerClient(server, model_at(1)), int(server.address.rpartition(":")[2])

    where, trainer, port = start()
    with ExplorerClient(f"127.0.0.1:{port}", model_at(-1), token="the token") as explorer:
        for explorer.step in (1, 2, 3):
            before = exchange(trainer, explorer)
        for one in (trainer, where):
            one.close()
        where, trainer, _ = start(port)
        explorer.blocking.need_sync()
        assert explorer.version is None
        explorer.step = 4
        now = exchange(trainer, explorer)
        assert explorer.version == now < before
        for one in (trainer, where):
            one.close()


def test_an_explorer_that_comes_back_before_the_trainer_has_no_version(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """The synchronizer does not know yet whether the count goes on."""
    where = Synchronizer(SyncMethod.MEMORY)
    server = where.serve(token="the token")
    port = int(server.address.rpartition(":")[2])
    with ExplorerClient(server, model_at(-1), timeout=0.5) as explorer:
        with TrainerClient(server, model_at(1)) as trainer:
            assert exchange(trainer, explorer) == explorer.version == 0
        where.close()
        with Synchronizer(SyncMethod.MEMORY) as where:
            where.serve(port=port, token="the token")
            assert "no new weights came" in explorer.blocking.sync_weight()["reason"]
            assert explorer.version is None
    assert "explorer 0 has no version yet: no new weights came" in caplog.text


def test_an_explorer_that_says_hello_again_keeps_its_id() -> None:
    with Synchronizer(SyncMethod.MEMORY) as where:
        service = where.service
        first = service.hello("one", "explorer")["id"]
        second = service.hello("two", "explorer")["id"]
        assert service.hello("two", "explorer")["id"] == second != first, "the first answer was lost"


def test_a_synchronizer_in_a_ray_actor_serves_nobody_here() -> None:
    where = Synchronizer(SyncMethod.MEMORY)
    where._servers.append(object.__new__(RayHost))
    with pytest.raises(LifecycleError, match="Ray actor"):
        TrainerClient(where, model_at(0))
    with pytest.raises(LifecycleError, match="Ray actor"):
        where.serve()
    with pytest.raises(LifecycleError, match=r"make another one, and serve\(\) that"):
        where.add_observer(print)


@pytest.mark.parametrize("synced_at", [None, 8])
def test_directly_old_weights_get_no_new_step_when_the_trainer_comes_back(synced_at: int | None) -> None:
    with Synchronizer(SyncMethod.NCCL) as where, TrainerClient(where, model_at(0)) as trainer:
        service, client = where.service, trainer.blocking
        held = [key_of(client._method.publisher.endpoint), 0]
        service.hello("explorer", "explorer")
        assert service.explorer_needs("explorer", 1, held)["version"] == 0
        client.step, client._synced_at = 10, synced_at
        service.gone(client.session, "it was not heard of")
        client.need_sync()  # and comes back
        service.explorer_needs("explorer", 1, held)
        assert service.status()["step"] == 0


def test_directly_an_explorer_may_come_back_before_the_trainer() -> None:
    """After a restart, the synchronizer does not know the trainer's updates yet."""
    with Synchronizer(SyncMethod.NCCL) as where:
        where.service.hello("explorer", "explorer", version=4, step=9)
        reply = where.service.call("explorer_needs", {"session": "explorer", "step": 9, "held": ["gone", 4]})
        assert reply == {"need": True, "version": None}


@pytest.mark.parametrize(("version", "lost"), [(1, False), (2, False), (3, True)])
def test_weights_are_lost_only_if_the_trainer_knows_a_newer_version(version: int, lost: bool) -> None:
    """A trainer that comes back to the same synchronizer finds its weights there."""
    with Synchronizer(SyncMethod.MEMORY) as where:
        where.service.machine.published(2, 20)
        where.service.hello("trainer", "trainer", version=version, step=30, synced_at=30)
        assert where.service.machine.lost is lost
        assert where.service.status()["version"] == max(version, 2)


@pytest.mark.parametrize("made", ["Subscriber", "Publisher"])
def test_closed_while_weights_arrive_the_synchronizer_keeps_no_link(
    made: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    links: list[Any] = []

    def make_and_close(*args: Any, **options: Any) -> Any:
        links.append(make(*args, **options))
        where.close()
        return links[-1]

    make = getattr(memory, made)
    with Synchronizer(SyncMethod.MEMORY) as where, TrainerClient(where, model_at(0)) as trainer:
        monkeypatch.setattr(memory, made, make_and_close)
        trainer.blocking.sync_weight()
        scheme = links[0].scheme if made == "Subscriber" else links[0]._scheme
        with pytest.raises(LifecycleError, match="shut down"):
            scheme.connect()


def test_a_synchronizer_that_restarts_while_an_explorer_connects_to_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The explorer waits for the weights that the trainer sends to the new one."""

    def start(port: int = 0) -> Any:
        made.append(Synchronizer(SyncMethod.MEMORY, SyncStyle.EXPLORER_DRIVEN, directory=tmp_path))
        return made[-1].serve(port=port, token="the token")

    def connect(*args: Any, **options: Any) -> Subscriber:
        if len(made) == 1:
            made[0].close()
            start(int(server.address.rpartition(":")[2]))
        return Subscriber(*args, **options)

    made: list[Synchronizer] = []
    server, source, model = start(), model_at(1), model_at(-1)
    trainer, explorer = TrainerClient(server, source, timeout=20), ExplorerClient(server, model, timeout=20)
    trainer.blocking.sync_weight()
    monkeypatch.setattr(methods, "Subscriber", connect)
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(explorer.blocking.sync_weight)
        wait_until(lambda: waiting.done() or trainer.blocking.need_sync())
        trainer.blocking.sync_weight()
        said = waiting.result(30)
    assert (said["version"], said.get("reason")) == (1, None)
    for one in (trainer, explorer, made[1]):
        one.close()


def test_a_synchronizer_that_starts_after_the_trainer_knows_the_step_of_its_version() -> None:
    """The trainer may have gone on since, and then failed to publish."""
    with Synchronizer(SyncMethod.NCCL) as where:
        where.service.hello("trainer", "trainer", step=25, synced_at=10, version=3)
        assert (where.service.status()["version"], where.service.status()["step"]) == (3, 10)
