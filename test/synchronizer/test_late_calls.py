"""Calls that come after an end, or during one."""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from sync_parts import Waiting, connected, model_at, wait_until

from weight_update import (
    ExplorerClient,
    LifecycleError,
    LinkClosedError,
    RunningStatus,
    Synchronizer,
    SyncMethod,
    SyncStyle,
    TrainerClient,
    WeightStrategy,
)
from weight_update.synchronizer import memory
from weight_update.synchronizer.direct import DirectService
from weight_update.synchronizer.memory import MemoryService
from weight_update.synchronizer.plan import SyncPlan
from weight_update.synchronizer.transfer import Publisher

EVERY = list(SyncMethod)


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


def test_a_trainer_that_is_replaced_while_its_call_waits_for_another_changes_no_link() -> None:
    publisher = Publisher(model_at(0), None, WeightStrategy(), 5.0)
    with Synchronizer(SyncMethod.MEMORY) as where, ThreadPoolExecutor(1) as pool:
        service = where.service
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
