"""FULLY_ASYNC: updates in the background, how far behind they may be, and how they end."""

from __future__ import annotations

import logging
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from sync_parts import (
    Waiting,
    connected,
    exchange,
    has_step,
    model_at,
    set_to,
    step_of,
    synchronizer,
    wait_until,
)
from torch import nn

from weight_update import ExplorerClient, LifecycleError, Synchronizer, SyncMethod, SyncStyle, TrainerClient
from weight_update.synchronizer import checkpoint, transfer

ASYNC = SyncStyle.FULLY_ASYNC


@contextmanager
def background(
    directory: Path, method: SyncMethod = SyncMethod.CHECKPOINT
) -> Iterator[tuple[TrainerClient, nn.Module, ExplorerClient, nn.Module]]:
    """Yield a trainer and an explorer with files; version 0 is in force in both."""
    source, model = model_at(0), model_at(-1)
    with (
        Synchronizer(method, ASYNC, directory=directory, max_staleness=50) as where,
        TrainerClient(where, source) as trainer,
        ExplorerClient(where, model) as explorer,
    ):
        trainer.blocking.sync_weight()
        explorer.blocking.sync_weight()
        yield trainer, source, explorer, model


def publish(trainer: TrainerClient, source: nn.Module) -> None:
    trainer.step += 1
    set_to(source, trainer.step)
    assert "reason" not in trainer.blocking.sync_weight()


def require_exact_version(explorer: ExplorerClient, model: nn.Module, version: int) -> None:
    """Fail unless, from the update to ``version`` on, a hold sees the version of the weights."""
    seen = 0
    while seen < version:
        with explorer.blocking.hold():
            explorer.blocking.need_sync()
            seen = int(step_of(model))
            assert explorer.version == seen
        time.sleep(0.001)


def delayed(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return ``function`` with a pause at its end."""

    def call(*args: Any, **kwargs: Any) -> Any:
        result = function(*args, **kwargs)
        time.sleep(0.5)
        return result

    return call


@pytest.mark.parametrize("method", [SyncMethod.MEMORY, SyncMethod.CHECKPOINT])
def test_inside_hold_the_version_is_that_of_the_weights(
    method: SyncMethod, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(transfer.Publisher, "send", delayed(transfer.Publisher.send))
    monkeypatch.setattr(
        checkpoint.CheckpointExplorer, "_apply", delayed(checkpoint.CheckpointExplorer._apply)
    )
    with background(tmp_path, method) as (trainer, source, explorer, model):
        publishing = threading.Thread(target=publish, args=(trainer, source))
        publishing.start()
        require_exact_version(explorer, model, 1)
        publishing.join()


def followers() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name == "weight_update-files"]


@pytest.mark.slow
def test_after_close_the_model_stays_and_nothing_is_read(tmp_path: Path) -> None:
    for k in range(10):
        with background(tmp_path / str(k)) as (trainer, source, explorer, model):
            time.sleep(0.01 * (k % 5))
            publish(trainer, source)
            explorer.close()
            assert not followers()
            before = step_of(model)
            publish(trainer, source)
            time.sleep(0.1)
            assert step_of(model) == before
            assert not list((tmp_path / str(k)).rglob("*.lease"))


def test_an_explorer_that_is_dropped_is_freed_and_counts_as_gone(tmp_path: Path) -> None:
    where = Synchronizer(SyncMethod.CHECKPOINT, ASYNC, directory=tmp_path, lease=1.0)
    with where, TrainerClient(where, model_at(0)) as trainer:
        explorer = ExplorerClient(where, model_at(-1), id=7)
        client = weakref.ref(explorer.blocking)
        del explorer
        wait_until(lambda: client() is None and not followers())
        wait_until(lambda: not trainer.blocking.status()["explorers"])


@pytest.mark.parametrize("ending", ["close", "drop"])
def test_a_model_without_a_client_has_no_hooks(tmp_path: Path, ending: str) -> None:
    model = model_at(-1)
    with Synchronizer(SyncMethod.CHECKPOINT, directory=tmp_path) as where:
        explorer = ExplorerClient(where, model)
        if ending == "close":
            explorer.close()
        del explorer
        wait_until(lambda: not model._forward_pre_hooks and not model._forward_hooks)


def test_an_error_of_the_model_does_not_end_later_updates(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with background(tmp_path) as (trainer, source, explorer, model):

        def fail(*args: object) -> None:
            raise RuntimeError("out of memory")

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(explorer.blocking.strategy, "apply_weights", fail)
            publish(trainer, source)
            wait_until(lambda: "keeps version 0: out of memory" in caplog.text)
        publish(trainer, source)
        wait_until(lambda: explorer.version == 2)
        assert has_step(model, 2)


def test_close_takes_no_longer_than_a_look(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checkpoint, "_LOOK_SECONDS", 60.0)
    with background(tmp_path) as (_, _, explorer, _):
        time.sleep(0.5)  # by now it looks seldom
        began = time.monotonic()
        explorer.close()
        assert time.monotonic() - began < 20.0


def test_closed_inside_hold_an_update_that_waits_is_dropped(tmp_path: Path) -> None:
    with background(tmp_path) as (trainer, source, explorer, model):
        gate = explorer.blocking._method.gate
        with explorer.hold():
            publish(trainer, source)
            wait_until(lambda: gate._updates)
            began = time.monotonic()
            explorer.close()
            assert time.monotonic() - began < 5
        assert not followers()
        assert step_of(model) == 0


def test_closed_while_another_thread_synchronizes_the_model_stays(tmp_path: Path) -> None:
    with background(tmp_path) as (trainer, source, explorer, model):
        client, failures = explorer.blocking, []

        def fetch() -> None:
            try:
                client._method.fetch(client, 1)
            except LifecycleError as error:
                failures.append(error)

        with explorer.hold():
            publish(trainer, source)
            wait_until(lambda: client._method.gate._updates)
            fetching = threading.Thread(target=fetch)
            fetching.start()
            explorer.close()
        fetching.join(20)
        assert len(failures) == 1
        assert step_of(model) == 0


@pytest.mark.slow
def test_a_directory_that_is_away_for_a_while_is_warned_about_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    def warnings() -> list[logging.LogRecord]:
        """Return those that it keeps a version; a file that vanishes while it is read gives another one."""
        named = (one for one in caplog.records if one.name.endswith("synchronizer.checkpoint"))
        return [one for one in named if "keeps version" in one.getMessage()]

    here, away = tmp_path / "here", tmp_path / "away"
    with background(here) as (trainer, source, _, model), caplog.at_level(logging.WARNING):
        for episode in (1, 2):
            here.rename(away)
            wait_until(lambda n=episode: len(warnings()) == n)
            time.sleep(1.3)  # it looks again meanwhile
            away.rename(here)
            assert len(warnings()) == episode
            publish(trainer, source)
            wait_until(lambda: has_step(model, trainer.step))
        assert len(followers()) == 1


def test_directly_who_holds_falls_behind_what_was_sent_off(tmp_path: Path) -> None:
    source, model = model_at(0), model_at(-1)
    clients = connected(SyncMethod.NCCL, ASYNC, tmp_path, source, model, max_staleness=2)
    with clients as (_, trainer, explorer):
        exchange(trainer, explorer)
        with explorer.hold():
            needs = []
            for _ in range(4):
                publish(trainer, source)
                needs.append(explorer.blocking.need_sync())
            assert needs == [False, False, True, True]
            assert step_of(model) == 0

        def caught_up() -> bool:
            with explorer.hold():  # an update may land just now
                return bool(step_of(model) == 4)

        wait_until(caught_up)
        assert not explorer.blocking.need_sync()
        assert explorer.version == trainer.version


@pytest.mark.parametrize("method", list(SyncMethod))
def test_a_hold_longer_than_a_transfer_may_take_only_delays_the_update(
    method: SyncMethod, tmp_path: Path
) -> None:
    source, model = model_at(0), model_at(-1)
    with (
        synchronizer(method, ASYNC, tmp_path, max_staleness=50) as where,
        TrainerClient(where, source) as trainer,
        ExplorerClient(where, model, transfer_timeout=0.3) as explorer,
    ):
        exchange(trainer, explorer)
        with explorer.hold():
            publish(trainer, source)
            time.sleep(0.8)
            assert step_of(model) == 0
        wait_until(lambda: has_step(model, 1))


@pytest.mark.parametrize("method", list(SyncMethod))
def test_inside_hold_no_link_brings_weights_the_first_one_and_a_new_one_included(
    method: SyncMethod, tmp_path: Path
) -> None:
    source, model = model_at(0), model_at(-1)
    with (
        synchronizer(method, ASYNC, tmp_path, max_staleness=0) as where,
        ExplorerClient(where, model) as explorer,
    ):
        for version in (0, 1):
            before = step_of(model)
            set_to(source, version)
            with TrainerClient(where, source, step=version) as trainer:
                with explorer.hold():
                    if method is not SyncMethod.NCCL:
                        trainer.blocking.sync_weight()
                    explorer.step += 1
                    waiting = Waiting(explorer)
                    time.sleep(0.2)
                    assert step_of(model) == before
                waiting.be_served_by(trainer)
                assert "reason" not in waiting.result()
                assert step_of(model) == version
