"""Announcements by notify(): they can be taken back, and hand no weights over."""

from __future__ import annotations

import threading
import time
from pathlib import Path
from typing import Any

import pytest
from sync_parts import Waiting, connected, exchange, model_at, set_to, step_of, synchronizer, wait_until
from torch import nn

from weight_update import ExplorerClient, RunningStatus, Synchronizer, SyncMethod, SyncStyle, TrainerClient
from weight_update.synchronizer import methods
from weight_update.synchronizer.plan import SyncPlan
from weight_update.synchronizer.state_machine import StateMachine
from weight_update.synchronizer.transfer import Subscriber

REQUIRE_SYNC, RUNNING = RunningStatus.REQUIRE_SYNC, RunningStatus.RUNNING
HELD = [SyncMethod.MEMORY, SyncMethod.CHECKPOINT]


def give(trainer: TrainerClient, source: nn.Module, step: int, *explorers: ExplorerClient) -> None:
    """Have the trainer publish the weights of a step, and explorers take them in ``sync_weight``."""
    trainer.step = step
    set_to(source, step)
    trainer.blocking.need_sync()  # tells its step
    waiting = []
    for explorer in explorers:
        explorer.step += 1
        waiting.append(Waiting(explorer))
    status = trainer.blocking.status
    wait_until(lambda: all(status()["explorers"][one.id] is REQUIRE_SYNC for one in explorers))
    assert "reason" not in trainer.blocking.sync_weight()
    for one in waiting:
        assert "reason" not in one.result()


@pytest.mark.parametrize("method", [SyncMethod.NCCL, SyncMethod.MEMORY])
def test_an_announcement_hands_no_weights_over_before_sync_weight(method: SyncMethod, tmp_path: Path) -> None:
    source, models = model_at(0), [model_at(-1), model_at(-1)]
    with (
        synchronizer(method, SyncStyle.EXPLORER_DRIVEN, tmp_path) as where,
        TrainerClient(where, source) as trainer,
        ExplorerClient(where, models[0]) as announcing,
        ExplorerClient(where, models[1]) as other,
    ):
        give(trainer, source, 1, announcing, other)
        announcing.step += 1
        announcing.blocking.notify(REQUIRE_SYNC)
        assert trainer.blocking.status()["explorers"][0] is REQUIRE_SYNC
        assert announcing.blocking.need_sync()
        give(trainer, source, 2, other)
        time.sleep(0.1)
        assert [step_of(model) for model in models] == [1, 2], "it computes, and counts on its weights"
        announcing.blocking.notify(RUNNING)
        assert trainer.blocking.status()["explorers"][0] is RUNNING
        give(trainer, source, 3, announcing)
        assert [step_of(model) for model in models] == [3, 2]


@pytest.mark.parametrize("method", HELD)
def test_announced_weights_are_published_before_the_explorer_asks_for_them(
    method: SyncMethod, tmp_path: Path
) -> None:
    source, model = model_at(0), model_at(-1)
    with (
        synchronizer(method, SyncStyle.EXPLORER_DRIVEN, tmp_path) as where,
        TrainerClient(where, source) as trainer,
        ExplorerClient(where, model, timeout=5.0) as explorer,
    ):
        explorer.blocking.notify(REQUIRE_SYNC)
        assert trainer.blocking.need_sync()
        version = trainer.blocking.sync_weight()["version"]
        assert not trainer.blocking.need_sync(), "once is enough"
        assert step_of(model) == -1
        assert explorer.blocking.sync_weight()["version"] == version
        assert step_of(model) == 0


def test_giving_up_when_the_wait_has_ended_changes_nothing(tmp_path: Path) -> None:
    """A call may be cancelled at the moment at which it returns."""
    clients = connected(SyncMethod.MEMORY, SyncStyle.TRAINER_DRIVEN, tmp_path, model_at(0), model_at(-1))
    with clients as (_, trainer, explorer):
        exchange(trainer, explorer)
        explorer.blocking.give_up()
        trainer.step = 1
        trainer.blocking.sync_weight()
        assert explorer.blocking.need_sync()


@pytest.mark.parametrize("method", list(SyncMethod))
def test_giving_up_ends_a_wait_for_a_trainer_that_has_not_come(method: SyncMethod, tmp_path: Path) -> None:
    with (
        synchronizer(method, SyncStyle.TRAINER_DRIVEN, tmp_path) as where,
        ExplorerClient(where, model_at(-1)) as explorer,
    ):
        waiting = Waiting(explorer)
        wait_until(lambda: explorer.blocking.status()["explorers"][0] is REQUIRE_SYNC)
        explorer.blocking.give_up()
        assert waiting.result(5.0)["reason"] == "it went on"
        assert explorer.blocking.status()["explorers"][0] is RUNNING


@pytest.mark.parametrize("method", [SyncMethod.NCCL, SyncMethod.MEMORY])
def test_giving_up_while_the_explorer_connects_ends_the_wait(
    method: SyncMethod, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def connect_slowly(*args: Any, **options: Any) -> Subscriber:
        subscriber = Subscriber(*args, **options)
        explorer.blocking.give_up()
        return subscriber

    monkeypatch.setattr(methods, "Subscriber", connect_slowly)
    clients = connected(method, SyncStyle.EXPLORER_DRIVEN, tmp_path, model_at(0), model_at(-1))
    with clients as (_, trainer, explorer):
        if method is SyncMethod.MEMORY:
            trainer.blocking.sync_weight()
        assert Waiting(explorer).result(5.0)["reason"] == "it went on"  # timeout= is 60 s
        assert not trainer.blocking.need_sync()


def test_the_end_of_the_thread_that_gave_up_is_not_the_end_of_the_client() -> None:
    with Synchronizer(SyncMethod.MEMORY, lease=0.4) as where, ExplorerClient(where, model_at(-1)) as explorer:
        timer = threading.Timer(0.1, explorer.blocking.give_up)
        timer.start()
        assert explorer.blocking.sync_weight()["reason"] == "it went on"
        timer.join()
        time.sleep(1.0)
        assert list(where.service.status()["explorers"]) == ["0"]


@pytest.mark.parametrize("role", ["trainer", "explorer"])
@pytest.mark.parametrize("method", list(SyncMethod))
def test_giving_up_ends_a_wait_for_a_synchronizer_that_is_away(
    method: SyncMethod, role: str, tmp_path: Path
) -> None:
    with synchronizer(method, SyncStyle.TRAINER_DRIVEN, tmp_path) as where:
        make = {"trainer": TrainerClient, "explorer": ExplorerClient}[role]
        client = make(where.serve(), model_at(0))
    with client:
        waiting = Waiting(client)
        wait_until(lambda: client.blocking._syncing.locked())
        client.blocking.give_up()
        assert "synchronizer at 127.0.0.1" in waiting.result(5.0)["reason"]  # timeout= is 60 s


def test_directly_a_trainer_announces_its_wish_and_takes_it_back(tmp_path: Path) -> None:
    clients = connected(SyncMethod.NCCL, SyncStyle.TRAINER_DRIVEN, tmp_path, model_at(0), model_at(-1))
    with clients as (_, trainer, explorer):
        for status, needed in ((REQUIRE_SYNC, True), (RUNNING, False)):
            trainer.blocking.notify(status)
            assert trainer.blocking.status()["trainer"] is status
            assert explorer.blocking.need_sync() is needed
        waiting = Waiting(trainer)
        wait_until(lambda: trainer.blocking.status()["trainer"] is REQUIRE_SYNC)
        trainer.blocking.give_up()
        assert "it went on" in waiting.result()["reason"]


@pytest.mark.parametrize("style", list(SyncStyle))
@pytest.mark.parametrize("method", list(SyncMethod))
def test_a_wish_that_is_taken_back_leaves_nothing(method: SyncMethod, style: SyncStyle) -> None:
    made = StateMachine(SyncPlan(method, style))
    made.trainer_joined()
    made.joined(0)
    made.explorer_at(0, 1)
    before = made.explorer_needs_sync(0)
    made.explorer_announces(0)
    made.trainer_requires()
    assert made.ready() == ()
    assert made.may_fetch(0) is None
    made.trainer_gave_up("late")
    made.explorer_withdraws(0)
    assert made.explorers[0].status is RUNNING
    assert made.explorer_needs_sync(0) is before


@pytest.mark.parametrize("method", list(SyncMethod))
def test_in_fixed_a_wish_is_not_granted_by_weights_that_are_too_old(method: SyncMethod) -> None:
    made = StateMachine(SyncPlan(method, SyncStyle.FIXED, sync_interval=10))
    made.trainer_joined()
    made.joined(0)
    made.published(0, 0)
    made.has(0, 0)
    made.explorer_at(0, 10)
    made.explorer_announces(0)
    assert made.explorers[0].status is REQUIRE_SYNC
    assert made.explorer_needs_sync(0)
    made.explorer_withdraws(0)
    assert made.explorer_needs_sync(0)


def test_directly_the_trainer_does_not_wait_for_a_wish() -> None:
    made = StateMachine(SyncPlan(SyncMethod.NCCL, SyncStyle.EXPLORER_DRIVEN))
    made.trainer_joined()
    made.joined(0)
    made.explorer_announces(0)
    assert not made.trainer_needs_sync()
    made.explorer_requires(0)
    assert made.trainer_needs_sync()


def test_directly_a_trainer_that_takes_back_its_wish_is_due_as_before() -> None:
    made = StateMachine(SyncPlan(SyncMethod.NCCL, SyncStyle.TRAINER_DRIVEN))
    made.trainer_joined()
    made.joined(0)
    made.trainer_announces()
    assert made.explorer_needs_sync(0)
    made.trainer_withdraws()
    assert not made.explorer_needs_sync(0)
    assert made.trainer_needs_sync(), "it is due at this step"
