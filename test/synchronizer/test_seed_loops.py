"""The two loops of Trinity-RFT's documentation, on our clients.

The lines of ``Trainer.train`` and ``Explorer.explore`` are those of the seed, as printed there, because that
they run is what is tested. All other lines stand for what is not ours: samples, training, files, logging.
"""

from __future__ import annotations

import asyncio
import logging
import traceback
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from sync_parts import model_at, set_to, step_of, synchronizer

from weight_update import ExplorerClient, SyncMethod, SyncStyle, TrainerClient


class Monitor:
    def __init__(self) -> None:
        self.logged: list[dict[str, Any]] = []

    def log(self, metrics: dict[str, Any], step: int) -> None:
        self.logged.append({**metrics, "step": step})


class Trainer(TrainerClient):
    """The loop of the seed, with stand-ins for the rest."""

    def __init__(self, where: Any, samples: asyncio.Queue[int], total_steps: int) -> None:
        self.model = model_at(0)
        super().__init__(where, self.model, timeout=20.0)
        self.samples, self.total_steps = samples, total_steps
        self.logger, self.monitor = logging.getLogger("trainer"), Monitor()
        self.config = SimpleNamespace(trainer=SimpleNamespace(enable_preview=False))
        self.save_hf_checkpoint = "never"

    @property
    def train_step_num(self) -> int:
        return self.step

    def need_save(self) -> bool:
        return False

    async def save_checkpoint(self, save_as_hf: bool) -> dict[str, Any]:
        raise AssertionError("nothing is to be saved")

    def _log_experiences(self, samples: Any) -> None:
        raise AssertionError("nothing is to be shown")

    async def _sample_data(self) -> tuple[list[int], dict[str, Any], list[int]]:
        return [await self.samples.get()], {"sampled": 1}, []

    async def train_step(self, exps: list[int]) -> dict[str, Any]:
        self.step += 1
        set_to(self.model, self.step)
        return {"trained": len(exps)}

    async def train(self) -> str:
        while self.train_step_num < self.total_steps:
            try:
                metrics = {}
                # sample may be blocked due to explorer does not generate enough data
                self.logger.info(f"Sample data for step {self.train_step_num + 1} started.")
                sample_task = asyncio.create_task(self._sample_data())
                while not sample_task.done():
                    # sync weight to make sure the explorer can continue to explore and generate enough data
                    if await self.need_sync():
                        metrics.update(await self.sync_weight())
                    await asyncio.sleep(1)
                exps, sample_metrics, repr_samples = await sample_task
                metrics.update(sample_metrics)
                self.logger.info(f"Sample data for step {self.train_step_num + 1} finished.")
                metrics.update(await self.train_step(exps))
                if await self.need_sync():
                    metrics.update(await self.sync_weight())
                if self.need_save():
                    metrics.update(await self.save_checkpoint(save_as_hf=self.save_hf_checkpoint == "always"))
                if self.config.trainer.enable_preview:
                    self._log_experiences(repr_samples)
                self.monitor.log(metrics, self.train_step_num)
            except StopAsyncIteration:
                self.logger.info("No more samples to train. Stopping training.")
                break
            except Exception:  # noqa: BLE001 - as printed
                self.logger.error(f"Error in Trainer:\n{traceback.format_exc()}")
                break
        return "trained"


class Explorer(ExplorerClient):
    """The loop of the seed, with stand-ins for the rest."""

    def __init__(self, where: Any, samples: asyncio.Queue[int], steps: int) -> None:
        self.model = model_at(-1)
        super().__init__(where, self.model, timeout=20.0)
        self.samples, self.steps, self.weights = samples, steps, []
        self.logger = logging.getLogger("explorer")

    @property
    def explore_step_num(self) -> int:
        return self.step

    def need_eval(self) -> bool:
        return False

    async def eval(self) -> None:
        raise AssertionError("nothing is to be evaluated")

    async def explore_step(self) -> bool:
        if self.step == self.steps:
            return False
        await self.samples.put(self.step)
        self.step += 1
        self.weights.append(step_of(self.model))
        return True

    async def explore(self) -> str:
        while True:
            try:
                self.logger.info(f"Explore step {self.explore_step_num + 1} started.")
                explore_continue = await self.explore_step()
                if not explore_continue:
                    break
                if self.need_eval():
                    await self.eval()
                if await self.need_sync():
                    await self.sync_weight()  # Request latest weights via Synchronizer
            except Exception:  # noqa: BLE001 - as printed
                self.logger.error(f"Error in Explorer: {traceback.format_exc()}")
                break
        return "explored"


async def both(where: Any, steps: int) -> tuple[Trainer, Explorer]:
    samples: asyncio.Queue[int] = asyncio.Queue()
    with Trainer(where, samples, steps) as trainer, Explorer(where, samples, steps) as explorer:
        assert await asyncio.gather(trainer.train(), explorer.explore()) == ["trained", "explored"]
        return trainer, explorer


@pytest.mark.parametrize("method", list(SyncMethod))
def test_the_loops_run_as_printed(
    method: SyncMethod, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    sleep = asyncio.sleep
    monkeypatch.setattr(asyncio, "sleep", lambda seconds: sleep(seconds / 50))  # 1 s is long for a test
    with synchronizer(method, SyncStyle.FIXED, tmp_path, sync_interval=2) as where:
        trainer, explorer = asyncio.run(both(where, 8))
    assert not [record for record in caplog.records if record.levelno >= logging.ERROR]
    assert [one["step"] for one in trainer.monitor.logged] == list(range(1, 9))
    assert trainer.version is not None
    assert explorer.weights == [-1, -1, 2, 2, 4, 4, 6, 6], "weights of steps 2, 4 and 6, each for two steps"


@pytest.mark.parametrize(
    "style", [SyncStyle.EXPLORER_DRIVEN, SyncStyle.TRAINER_DRIVEN, SyncStyle.FULLY_ASYNC]
)
def test_the_loops_run_in_every_style(
    style: SyncStyle, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    sleep = asyncio.sleep
    monkeypatch.setattr(asyncio, "sleep", lambda seconds: sleep(seconds / 50))
    with synchronizer(SyncMethod.MEMORY, style, tmp_path, sync_interval=2) as where:
        trainer, explorer = asyncio.run(both(where, 6))
    assert not [record for record in caplog.records if record.levelno >= logging.ERROR]
    assert len(trainer.monitor.logged) == 6
    assert explorer.weights == sorted(explorer.weights)


def test_waiting_does_not_stop_the_event_loop_and_can_be_cancelled(tmp_path: Path) -> None:
    async def wait(where: Any) -> tuple[int, dict[str, Any]]:
        ticks = 0
        with ExplorerClient(where, model_at(-1), timeout=60.0) as explorer:
            explorer.step = 1
            waiting = asyncio.create_task(explorer.sync_weight())
            while ticks < 20:
                await asyncio.sleep(0.01)
                ticks += 1
            waiting.cancel()
            with pytest.raises(asyncio.CancelledError):
                await waiting
            status = await explorer.status()
            for _ in range(200):
                if status["explorers"][explorer.id].value == "running":
                    break
                await asyncio.sleep(0.01)
                status = await explorer.status()
            return ticks, status

    with synchronizer(SyncMethod.MEMORY, SyncStyle.EXPLORER_DRIVEN, tmp_path) as where:
        ticks, status = asyncio.run(wait(where))
    assert ticks == 20
    assert status["explorers"][0].value == "running", "it does not wait any more"
