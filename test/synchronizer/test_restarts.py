"""Trainers and synchronizers that end and begin again."""

from __future__ import annotations

import logging
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from sync_parts import Waiting, exchange, model_at, set_to, step_of, synchronizer, wait_until
from torch import nn

from weight_update import (
    ExplorerClient,
    LifecycleError,
    SchemaMismatchError,
    Synchronizer,
    SyncMethod,
    SyncStyle,
    TrainerClient,
    TransportError,
    WeightStrategy,
)
from weight_update.synchronizer import CheckpointStore, methods
from weight_update.synchronizer.memory import MemoryService
from weight_update.synchronizer.ray_actor import RayHost
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
        if service._newest.publisher is not before:
            service.close()
        require_open(service)

    with Synchronizer(SyncMethod.MEMORY) as where:
        with TrainerClient(where, model_at(0)) as trainer:
            trainer.blocking.sync_weight()
        before = where.service._newest.publisher
        monkeypatch.setattr(Publisher, "close", noted)
        monkeypatch.setattr(MemoryService, "_require_open", closed_meanwhile)
        with TrainerClient(where, nn.Linear(3, 2)) as trainer:
            trainer.blocking.sync_weight()
        assert before in closed


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
