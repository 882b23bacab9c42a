"""Explorers whose model is an inference engine."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import pytest
import torch
from engine_parts import Notebook
from sync_parts import Waiting, connected, exchange, model_at, set_to, synchronizer, wait_until

from weight_update import ExplorerClient, SyncMethod, SyncStyle, TrainerClient, UnsupportedSourceError
from weight_update.testing import fingerprint


@pytest.mark.parametrize("expected", [None, dict(model_at(0).state_dict())], ids=["any", "expected"])
@pytest.mark.parametrize("method", [SyncMethod.NCCL, SyncMethod.MEMORY])
def test_an_engine_gets_weights(
    method: SyncMethod, expected: Mapping[str, torch.Tensor] | None, tmp_path: Path
) -> None:
    source, engine = model_at(0), Notebook(expected=expected)
    with connected(method, SyncStyle.EXPLORER_DRIVEN, tmp_path, source, engine) as (_, trainer, explorer):
        for step in (1, 2):
            set_to(source, step)
            explorer.step = trainer.step = step
            assert explorer.blocking.need_sync()
            waiting = Waiting(explorer)
            wait_until(trainer.blocking.need_sync)
            trainer.blocking.sync_weight()
            said = waiting.result()
            assert "reason" not in said
            assert said["bytes"] == (0 if expected is None else 4 * 44)
            assert fingerprint(engine.loaded) == fingerprint(source)


def test_files_are_not_for_engines(tmp_path: Path) -> None:
    with synchronizer(SyncMethod.CHECKPOINT, SyncStyle.EXPLORER_DRIVEN, tmp_path) as where:
        with pytest.raises(UnsupportedSourceError, match="an inference engine takes weights by"):
            ExplorerClient(where, Notebook())
        assert where.service.status()["explorers"] == {}


class Verbose(ZeroDivisionError):
    """An error whose message has a paragraph of its own for what to do."""

    def __str__(self) -> str:
        return f"{super().__str__()}\n\nBuy another one."


@pytest.mark.parametrize("method", [SyncMethod.NCCL, SyncMethod.MEMORY])
def test_a_reason_has_the_whole_message_of_the_engine(method: SyncMethod, tmp_path: Path) -> None:
    source, engine = model_at(0), Notebook()
    with connected(method, SyncStyle.EXPLORER_DRIVEN, tmp_path, source, engine) as (_, trainer, explorer):
        exchange(trainer, explorer)
        engine.fails, engine.error = "begin", Verbose
        waiting = Waiting(explorer)
        wait_until(trainer.blocking.need_sync)
        trainer.blocking.sync_weight()
        assert waiting.result()["reason"] == "Verbose: the engine broke at begin\n\nBuy another one."


@pytest.mark.parametrize("method", [SyncMethod.NCCL, SyncMethod.MEMORY])
def test_an_engine_that_failed_in_the_background_asks_for_weights(method: SyncMethod, tmp_path: Path) -> None:
    source, engine = model_at(0), Notebook()
    options = {"max_staleness": 8}
    with connected(method, SyncStyle.FULLY_ASYNC, tmp_path, source, engine, **options) as (
        _,
        trainer,
        explorer,
    ):
        first = exchange(trainer, explorer)
        engine.fails = "finish"
        set_to(source, 1)
        trainer.step = 1
        trainer.blocking.sync_weight()
        wait_until(lambda: engine.fails is None)
        wait_until(explorer.blocking.need_sync)
        assert explorer.version is None
        waiting = Waiting(explorer)
        if method is SyncMethod.NCCL:
            wait_until(trainer.blocking.need_sync)
            trainer.blocking.sync_weight()
        said = waiting.result()
        assert "reason" not in said
        assert said["version"] == explorer.version > first
        assert fingerprint(engine.loaded) == fingerprint(source)
        assert not explorer.blocking.need_sync()


@pytest.mark.parametrize("method", [SyncMethod.NCCL, SyncMethod.MEMORY])
def test_an_explorer_has_no_version_after_its_engine_failed(
    method: SyncMethod, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    source, engine = model_at(0), Notebook()
    with connected(method, SyncStyle.EXPLORER_DRIVEN, tmp_path, source, engine) as (where, trainer, explorer):
        exchange(trainer, explorer)
        engine.fails = "finish"
        waiting = Waiting(explorer)
        wait_until(trainer.blocking.need_sync)
        trainer.blocking.sync_weight()
        said = waiting.result()
        assert said["reason"] == "ZeroDivisionError: the engine broke at finish"
        assert "sync/version" not in said
        assert explorer.version is None
        assert "explorer 0 has no complete version: ZeroDivisionError" in caplog.text
        assert not explorer.blocking.need_sync()  # it failed at this step
        assert where.service.status()["versions"]["0"] is None
        set_to(source, 2)
        explorer.step = trainer.step = 1
        trainer.blocking.need_sync()  # tells its step, so that the explorer waits for it
        version = exchange(trainer, explorer)
        assert explorer.version == version
        assert fingerprint(engine.loaded) == fingerprint(source)


class Chatty(ZeroDivisionError):
    """An error with a message of more than a megabyte, such as one that lists all weights."""

    def __str__(self) -> str:
        return f"{super().__str__()} {'again ' * 400_000}"


@pytest.mark.parametrize("method", [SyncMethod.NCCL, SyncMethod.MEMORY])
def test_an_engine_with_a_long_message(method: SyncMethod, tmp_path: Path) -> None:
    source, engine = model_at(0), Notebook()
    with synchronizer(method, SyncStyle.EXPLORER_DRIVEN, tmp_path) as where:
        server = where.serve()
        with TrainerClient(server, source) as trainer, ExplorerClient(server, engine) as explorer:
            exchange(trainer, explorer)
            engine.fails, engine.error = "begin", Chatty
            waiting = Waiting(explorer)
            wait_until(trainer.blocking.need_sync)
            published = trainer.blocking.sync_weight()
            assert waiting.result()["reason"].startswith("Chatty: the engine broke at begin again")
            if method is SyncMethod.NCCL:
                assert published["reason"].startswith("explorer 0: Chatty: the engine broke at begin again")
            set_to(source, 1)
            explorer.step = trainer.step = 1
            trainer.blocking.need_sync()  # tells its step, so that the explorer waits for it
            exchange(trainer, explorer)
