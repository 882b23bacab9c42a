"""Every method with every style and 1, 2 and 4 explorers, in threads."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
from marks import slow
from sync_parts import Explored, ExplorerThread, connected, exchange, model_at, synchronizer, train

from weight_update import ExplorerClient, LifecycleError, SyncMethod, SyncStyle

INTERVAL, OFFSET, STALENESS, STEPS = 4, 2, 2, 14


def numbers_for(style: SyncStyle) -> dict[str, int]:
    offset = {"sync_offset": OFFSET} if style is SyncStyle.FIXED else {}
    staleness = {"max_staleness": STALENESS} if style is SyncStyle.FULLY_ASYNC else {}
    return {"sync_interval": INTERVAL, **offset, **staleness}


@pytest.mark.parametrize("explorers", [slow(1), 2, slow(4)])
@pytest.mark.parametrize("style", list(SyncStyle))
@pytest.mark.parametrize("method", list(SyncMethod))
def test_weights_get_where_and_when_they_should(
    method: SyncMethod, style: SyncStyle, explorers: int, tmp_path: Path
) -> None:
    with synchronizer(method, style, tmp_path, **numbers_for(style)) as where:
        threads = [ExplorerThread(where, STEPS, until_served=True, id=id) for id in range(explorers)]
        for thread in threads:
            thread.start()
        said = train(where, lambda: any(thread.is_alive() for thread in threads))
    published = {0: 0} if method is SyncMethod.NCCL else {}  # who joins has what the trainer began with
    published |= {one["version"]: one["step"] for one in said if "reason" not in one}
    for thread in threads:
        seen = thread.seen
        if seen.error is not None:
            raise seen.error
        assert seen.weights == sorted(seen.weights), "versions only grow"
        for sync in seen.syncs:
            assert "reason" not in sync.metrics, sync.metrics
            assert published[sync.metrics["version"]] <= sync.weights, "what it has was published"
            if style is not SyncStyle.FULLY_ASYNC:
                assert published[sync.metrics["version"]] == sync.weights
        check_style(style, seen)


@pytest.mark.parametrize("method", list(SyncMethod))
def test_inside_hold_no_thread_waits_for_weights(method: SyncMethod, tmp_path: Path) -> None:
    style = SyncStyle.EXPLORER_DRIVEN
    with connected(method, style, tmp_path, model_at(0), model_at(-1)) as (_, trainer, explorer):
        exchange(trainer, explorer)
        with explorer.hold(), pytest.raises(LifecycleError, match="inside hold"):
            explorer.blocking.sync_weight()


@pytest.mark.parametrize("method", list(SyncMethod))
def test_inside_hold_no_task_waits_for_weights(method: SyncMethod, tmp_path: Path) -> None:
    async def synchronize(explorer: ExplorerClient) -> None:
        with explorer.hold():
            await explorer.sync_weight()

    style = SyncStyle.EXPLORER_DRIVEN
    with connected(method, style, tmp_path, model_at(0), model_at(-1)) as (_, trainer, explorer):
        exchange(trainer, explorer)
        explorer.blocking.timeout = 5.0
        with pytest.raises(LifecycleError, match="inside hold"):
            asyncio.run(synchronize(explorer))


def check_style(style: SyncStyle, seen: Explored) -> None:
    steps = [sync.step for sync in seen.syncs]
    if style is SyncStyle.FIXED:
        assert steps == list(range(OFFSET, STEPS + 1, INTERVAL))
        assert all(sync.weights >= sync.step - OFFSET for sync in seen.syncs)
    elif style is SyncStyle.EXPLORER_DRIVEN:
        assert steps == list(range(INTERVAL, STEPS + 1, INTERVAL))
    elif style is SyncStyle.TRAINER_DRIVEN:
        assert steps
        assert all(sync.weights % INTERVAL == 0 for sync in seen.syncs)
    else:
        assert seen.weights[-1] >= 0, "they came, waited for or in the background"
