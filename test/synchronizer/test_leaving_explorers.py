"""Explorers that leave at a bad moment, or without a goodbye."""

from __future__ import annotations

import contextlib
import signal
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
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
    until_waiting,
    wait_until,
)
from torch import nn

from weight_update import (
    ExplorerClient,
    LifecycleError,
    SchemaMismatchError,
    Synchronizer,
    SyncMethod,
    SyncPlan,
    SyncStyle,
    TrainerClient,
    TransportError,
    WeightStrategy,
)
from weight_update.synchronizer import methods, sessions
from weight_update.synchronizer.sessions import SessionManager
from weight_update.synchronizer.transfer import Publisher, Subscriber, settle


def test_an_explorer_that_a_signal_handler_closes_while_it_reads_a_file(tmp_path: Path) -> None:
    """The handler runs in the thread that reads, and does not wait for itself."""
    source, model = model_at(0), model_at(-1)
    options = {"transfer_timeout": 8.0}
    clients = connected(SyncMethod.CHECKPOINT, SyncStyle.EXPLORER_DRIVEN, tmp_path, source, model, **options)
    with clients as (_, trainer, explorer):
        trainer.blocking.sync_weight()
        store, seconds = explorer.blocking._method._store, list[float]()
        latest = store.latest

        def interrupted() -> Any:
            began = time.monotonic()
            explorer.close()
            seconds.append(time.monotonic() - began)
            return latest()

        store.latest = interrupted
        with contextlib.suppress(LifecycleError, TransportError):
            explorer.blocking.sync_weight()
        assert max(seconds) < 4.0
        assert step_of(model) == -1


def test_directly_a_version_that_its_only_explorer_did_not_live_to_take_is_not_published(
    tmp_path: Path,
) -> None:
    source, model = model_at(0), model_at(-1)
    clients = connected(SyncMethod.NCCL, SyncStyle.EXPLORER_DRIVEN, tmp_path, source, model)
    with clients as (where, trainer, explorer), ThreadPoolExecutor(1) as pool:
        explorer.step = 1
        before = exchange(trainer, explorer)
        with explorer.hold():  # the next update reaches it, and cannot land
            explorer.step, trainer.step = 2, 1
            set_to(source, 1)
            Waiting(explorer)
            wait_until(trainer.blocking.need_sync)
            sending = pool.submit(trainer.blocking.sync_weight)
            wait_until(lambda: where.service.machine.transfer)
            time.sleep(0.2)
            explorer.close()
        said = sending.result(20.0)
        assert "explorer 0" in said["reason"]
        assert step_of(model) == 0
        assert trainer.blocking.latest_version() == said["version"] == before


@pytest.mark.parametrize("method", [SyncMethod.NCCL, SyncMethod.MEMORY])
def test_closed_while_another_thread_joins_it_keeps_no_link(
    method: SyncMethod, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def join_and_be_closed(*args: Any, **options: Any) -> Subscriber:
        joined = Subscriber(*args, **options)
        explorer.close()
        return joined

    source, model = model_at(0), model_at(-1)
    with (
        synchronizer(method, SyncStyle.FULLY_ASYNC, tmp_path) as where,
        TrainerClient(where, source) as trainer,
    ):
        if method is SyncMethod.MEMORY:
            trainer.blocking.sync_weight()
        explorer = ExplorerClient(where, model)
        monkeypatch.setattr(methods, "Subscriber", join_and_be_closed)
        with pytest.raises(LifecycleError, match="closed"):
            explorer.blocking.sync_weight()
        before = step_of(model)
        trainer.step = 7
        set_to(source, 7)
        trainer.blocking.sync_weight()
        time.sleep(0.1)
        assert step_of(model) == before
        assert explorer.blocking._method.subscriber is None


def test_one_that_leaves_between_the_look_and_the_sending_fails_alone(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    models = [model_at(-1), model_at(-1)]
    publisher = Publisher(model_at(4), None, WeightStrategy(), 20.0)
    subscribers = [
        Subscriber(publisher.endpoint, id, model, WeightStrategy(), 20.0) for id, model in enumerate(models)
    ]
    look = publisher.joined

    def look_and_lose_one() -> list[int]:
        monkeypatch.setattr(publisher, "joined", look)
        found = look()
        subscribers[1].close()
        wait_until(lambda: 1 not in look())
        return found

    monkeypatch.setattr(publisher, "joined", look_and_lose_one)
    try:
        failures = settle(publisher.send([0, 1]), [0, 1])
    finally:
        subscribers[0].close()
        publisher.close()
    assert list(failures) == [1]
    assert "not connected" in failures[1]


def test_a_version_is_published_even_if_the_background_did_not_get_it(tmp_path: Path) -> None:
    source = model_at(0)
    with (
        synchronizer(SyncMethod.MEMORY, SyncStyle.FULLY_ASYNC, tmp_path) as where,
        TrainerClient(where, source) as trainer,
    ):
        trainer.blocking.sync_weight()
        publisher = where.service._newest.publisher
        publisher.close()  # nothing can be spread any more
        trainer.step = 1
        said = trainer.blocking.sync_weight()
        assert "reason" not in said
        assert said["version"] == trainer.blocking.latest_version() == 1


def test_directly_an_update_on_its_way_to_others_is_no_failure(tmp_path: Path) -> None:
    source, models = model_at(0), [model_at(-1), model_at(-1)]
    with (
        synchronizer(SyncMethod.NCCL, SyncStyle.FULLY_ASYNC, tmp_path) as where,
        TrainerClient(where, source) as trainer,
        ExplorerClient(where, models[0]) as cut,
        ExplorerClient(where, models[1]) as other,
    ):
        waiting = [Waiting(cut), Waiting(other)]
        for one in waiting:  # who joins has what the trainer began with
            assert "reason" not in one.result()
        with cut.hold():  # it falls behind until it waits
            for step in range(1, 4):
                trainer.step = step
                set_to(source, step)
                trainer.blocking.sync_weight()
            again = Waiting(cut)
            until_waiting(where, 0)
            subscriber, publisher = cut.blocking._method.subscriber, trainer.blocking._method.publisher
            subscriber.close()
            wait_until(lambda: 0 not in publisher.joined())
            trainer.step = 4
            set_to(source, 4)
            said = trainer.blocking.sync_weight()
        assert "reason" not in said, "the other has it, or will have it in a moment"
        assert "not connected" in again.result()["reason"]
        wait_until(lambda: has_step(models[1], 4))


def test_a_client_whose_thread_ended_without_close_is_missed_and_may_come_back(tmp_path: Path) -> None:
    with (
        synchronizer(SyncMethod.NCCL, SyncStyle.TRAINER_DRIVEN, tmp_path, lease=0.4) as where,
        TrainerClient(where, model_at(0)) as trainer,
        ExplorerClient(where, model_at(-1), id=1) as alive,
    ):
        made: list[ExplorerClient] = []
        thread = threading.Thread(target=lambda: made.append(ExplorerClient(where, model_at(-1), id=0)))
        thread.start()
        thread.join()
        wait_until(lambda: 0 not in trainer.blocking.status()["explorers"])
        time.sleep(0.5)  # longer than the lease
        wait_until(lambda: set(trainer.blocking.status()["explorers"]) == {1})  # whose thread computes
        alive.close()
        said = trainer.blocking.sync_weight()
        assert said["waited"] < 20.0
        assert "no explorer" in said["reason"]
        made[0].blocking.need_sync()
        assert set(trainer.blocking.status()["explorers"]) == {0}
        made[0].close()


@pytest.mark.parametrize("asks", [True, False])
@pytest.mark.parametrize("method", SyncMethod)
def test_one_that_was_missed_for_a_while_takes_the_place_of_no_other(
    method: SyncMethod, asks: bool, tmp_path: Path
) -> None:
    source, models = model_at(0), [model_at(-1), model_at(-1)]
    with (
        synchronizer(method, SyncStyle.EXPLORER_DRIVEN, tmp_path) as where,
        TrainerClient(where, source) as trainer,
        ExplorerClient(where, models[0]) as stopped,
    ):
        stopped.step = 1
        exchange(trainer, stopped)
        where.service.gone(stopped.blocking.session, "it was stopped")
        with ExplorerClient(where, models[1]) as other:
            for step in (2, 3):
                set_to(source, step)
                for model, explorer in zip(models, (stopped, other), strict=True):
                    explorer.step = step
                    if asks:
                        explorer.blocking.need_sync()
                    waiting = Waiting(explorer)
                    waiting.be_served_by(trainer)
                    assert "reason" not in waiting.result()
                    assert step_of(model) == step
            assert [explorer.blocking.id for explorer in (stopped, other)] == [1, 0]


def test_a_client_that_is_dropped_is_missed() -> None:
    with Synchronizer(SyncMethod.MEMORY, lease=0.4) as where:
        service = where.service
        client = ExplorerClient(where, model_at(-1))
        del client
        wait_until(lambda: not service.status()["explorers"])


def test_a_client_that_comes_without_a_thread_to_spare_is_refused_whole(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The next one is admitted, and missed when it is dropped."""

    def refuse(*_: object) -> None:
        raise RuntimeError("can't start new thread")

    with Synchronizer(SyncMethod.MEMORY, lease=0.4) as where:
        with monkeypatch.context() as patch:
            patch.setattr(sessions, "start_thread", refuse)
            with pytest.raises(TransportError, match=r"hello failed .*: can't start new thread"):
                ExplorerClient(where, model_at(-1), timeout=1.0)
        assert where.service.status()["explorers"] == {}
        client = ExplorerClient(where, model_at(-1))
        assert list(where.service.status()["explorers"]) == ["0"]
        del client
        wait_until(lambda: not where.service.status()["explorers"])


def test_a_model_does_not_keep_the_receiver_of_a_dropped_client() -> None:
    def receivers() -> list[str]:
        return [one.name for one in threading.enumerate() if one.name.startswith("weight_update-receiver")]

    model, before = model_at(-1), receivers()
    with Synchronizer(SyncMethod.MEMORY, lease=0.4) as where, TrainerClient(where, model_at(0)) as trainer:
        trainer.blocking.sync_weight()
        client = ExplorerClient(where, model)
        assert client.blocking.sync_weight()["version"] == 0
        assert len(receivers()) > len(before)
        during = len(receivers())
        del client
        wait_until(lambda: len(receivers()) == during - 1)


@pytest.mark.slow
def test_a_process_that_was_stopped_renews_all_leases() -> None:
    manager = SessionManager(SyncPlan(SyncMethod.MEMORY), lease=0.5)
    manager.hello("one", "explorer")
    time.sleep(0.1)
    with manager.changed:
        time.sleep(1.0)  # as if it had been stopped
        going_on = time.monotonic()
    wait_until(lambda: not manager.sessions)
    assert time.monotonic() - going_on > 0.4
    manager.end_sessions()


def test_an_explorer_is_named_by_its_own_id() -> None:
    """The error of an explorer whose model does not fit names that explorer, not a worker beside it."""
    publisher = Publisher(nn.Linear(2, 2), None, WeightStrategy("state_dict"), 10.0)
    try:
        with pytest.raises(SchemaMismatchError, match="worker 0 does not have the same weights"):
            Subscriber(publisher.endpoint, 0, nn.Linear(3, 3), WeightStrategy("state_dict"), 10.0)
    finally:
        publisher.close()


def test_weights_that_are_sent_to_all_when_the_time_of_one_ends_reach_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = model_at(-1)
    with (
        synchronizer(SyncMethod.MEMORY, SyncStyle.EXPLORER_DRIVEN, tmp_path) as where,
        TrainerClient(where, model_at(0)) as trainer,
        ExplorerClient(where, model_at(-1)) as patient,
        ExplorerClient(where, model, timeout=0.5) as hasty,
    ):
        service = where.service
        trainer.blocking.sync_weight()
        for explorer in (patient, hasty):
            explorer.blocking.sync_weight()
        for explorer in (patient, hasty):
            explorer.step = 1
        send, may_take = service._send, service._may_take
        monkeypatch.setattr(service, "_send", lambda *args: (time.sleep(1.0), send(*args))[1])
        # The other thread begins to send before this one looks.
        monkeypatch.setattr(service, "_may_take", lambda one: may_take(one) and (one.id == 0 or one.busy))
        waiting = [Waiting(patient), Waiting(hasty)]
        until_waiting(where, 0, 1)
        trainer.step = 1
        trainer.blocking.sync_weight()
        assert ["reason" in one.result(10.0) for one in waiting] == [False, False]
        assert hasty.version == 1


@contextlib.contextmanager
def two_with_weights(
    directory: Path,
) -> Iterator[tuple[Synchronizer, TrainerClient, ExplorerClient, ExplorerClient]]:
    """Yield a synchronizer that sends from memory, its trainer, and two explorers that have its weights."""
    with (
        synchronizer(SyncMethod.MEMORY, SyncStyle.EXPLORER_DRIVEN, directory) as where,
        TrainerClient(where, model_at(0)) as trainer,
        ExplorerClient(where, model_at(-1)) as one,
        ExplorerClient(where, model_at(-1)) as other,
    ):
        trainer.blocking.sync_weight()
        for explorer in (one, other):
            explorer.blocking.sync_weight()
            explorer.step = 1
        yield where, trainer, one, other


def test_nothing_is_kept_for_an_explorer_that_leaves_while_weights_are_sent_to_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As after the death of its process; another explorer's call sends to both."""
    with two_with_weights(tmp_path) as (where, trainer, one, other):
        publisher, waiting = where.service._newest.publisher, [Waiting(one), Waiting(other)]
        send = publisher.send

        def send_late(*args: Any, **options: Any) -> Any:
            handle = send(*args, **options)
            (leaving,) = (thread for thread in waiting if thread is not threading.current_thread())
            leaving.client.close()
            leaving.join()
            return handle

        monkeypatch.setattr(publisher, "send", send_late)
        until_waiting(where, 0, 1)
        trainer.step = 1
        trainer.blocking.sync_weight()
        assert sorted("reason" in thread.result(10.0) for thread in waiting) == [False, True]
        assert not where.service._transfers


def test_an_unexpected_error_of_a_send_ends_the_wait_of_all_that_it_was_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*args: Any, **options: Any) -> None:
        raise RuntimeError("no thread to spare")

    with two_with_weights(tmp_path) as (where, trainer, one, other):
        monkeypatch.setattr(where.service._newest.publisher, "send", fail)
        waiting = [Waiting(one), Waiting(other)]
        until_waiting(where, 0, 1)
        trainer.step = 1
        trainer.blocking.sync_weight()
        assert ["no thread to spare" in one.result(10.0)["reason"] for one in waiting] == [True, True]


def test_an_explorer_that_counts_as_gone_while_it_reads_a_file_has_its_version(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    put = WeightStrategy.apply_weights

    def put_late(*args: Any) -> None:
        where.service.gone(explorer.blocking.session)  # as after ``lease`` seconds
        put(*args)

    source, model = model_at(0), model_at(-1)
    with connected(SyncMethod.CHECKPOINT, SyncStyle.FIXED, tmp_path, source, model) as clients:
        where, trainer, explorer = clients
        monkeypatch.setattr(WeightStrategy, "apply_weights", put_late)
        trainer.blocking.sync_weight()
        said = explorer.blocking.sync_weight()
        assert (said["version"], said.get("reason")) == (0, None)
        assert step_of(model) == 0
        assert explorer.blocking.status()["versions"] == {0: 0}


def test_an_explorer_that_counts_as_gone_while_it_connects_gets_its_weights(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def connect_late(*args: Any, **options: Any) -> Subscriber:
        where.service.gone(explorer.blocking.session)  # as after ``lease`` seconds, or after a restart
        return Subscriber(*args, **options)

    source, model = model_at(0), model_at(-1)
    with connected(SyncMethod.MEMORY, SyncStyle.FIXED, tmp_path, source, model) as clients:
        where, trainer, explorer = clients
        monkeypatch.setattr(methods, "Subscriber", connect_late)
        trainer.blocking.sync_weight()
        said = explorer.blocking.sync_weight()
        assert (said["version"], said.get("reason")) == (0, None)
        assert step_of(model) == 0


@pytest.mark.parametrize("method", [SyncMethod.NCCL, SyncMethod.MEMORY])
def test_an_explorer_whose_wait_is_interrupted_gets_no_weights_afterwards(
    method: SyncMethod, tmp_path: Path
) -> None:
    """As by Ctrl-C in a notebook; the trainer would else go on serving it."""
    source, model = model_at(0), model_at(-1)
    with connected(method, SyncStyle.EXPLORER_DRIVEN, tmp_path, source, model) as (where, trainer, explorer):
        before = exchange(trainer, explorer)
        explorer.step = 1
        main = threading.main_thread().ident or 0
        interrupting = threading.Timer(0.3, signal.pthread_kill, (main, signal.SIGINT))
        interrupting.start()
        with pytest.raises(KeyboardInterrupt):
            explorer.blocking.sync_weight()
        interrupting.join()
        assert where.service.status()["explorers"] == {"0": "running"}
        assert not trainer.blocking.need_sync()
        explorer.step = trainer.step = 2
        set_to(source, 2)
        assert exchange(trainer, explorer) > before
        assert step_of(model) == 2
