"""Metrics for a logger, and states that equal the strings of the manual."""

from __future__ import annotations

import json
import pickle
from pathlib import Path

import pytest
from sync_parts import Waiting, connected, model_at, set_to, synchronizer, until_waiting

from weight_update import ExplorerClient, RunningStatus, SyncMethod, SyncStyle

NAMES = {"sync/version", "sync/step", "sync/seconds", "sync/bytes", "sync/waited", "sync/failed"}


@pytest.mark.parametrize("method", list(SyncMethod))
def test_metrics_are_numbers_in_a_namespace_of_their_own(method: SyncMethod, tmp_path: Path) -> None:
    source = model_at(0)
    clients = connected(method, SyncStyle.FIXED, tmp_path, source, model_at(-1), sync_interval=2)
    with clients as (where, trainer, explorer):
        explorer.step, trainer.step = 4, 4
        set_to(source, 4)
        waiting = Waiting(explorer)
        until_waiting(where, 0)
        said = [trainer.blocking.sync_weight(), waiting.result()]
        for metrics in said:
            logged: dict[str, float] = {"loss": 0.5}
            logged.update(metrics)
            assert set(logged) == {"loss", *NAMES}
            assert all(isinstance(value, (int, float)) for value in logged.values())
            assert (logged["sync/step"], logged["sync/failed"]) == (4, 0)
            assert metrics["version"] == logged["sync/version"]
            assert metrics.get("waited") == logged["sync/waited"]
            assert "reason" not in metrics
            with pytest.raises(KeyError):
                metrics["reason"]


def test_a_failure_is_a_number_and_its_reason_is_not_logged(tmp_path: Path) -> None:
    with (
        synchronizer(SyncMethod.MEMORY, SyncStyle.FIXED, tmp_path) as where,
        ExplorerClient(where, model_at(-1), timeout=0.1) as explorer,
    ):
        explorer.step = 1
        metrics = explorer.blocking.sync_weight()
        for said in (metrics, pickle.loads(pickle.dumps(metrics))):
            assert "reason" in said
            assert "no new weights" in said["reason"]
            assert said["version"] is None
            assert dict(said)["sync/failed"] == 1
            assert set(dict(said)) == NAMES - {"sync/version"}


def test_states_equal_the_strings_of_the_manual(tmp_path: Path) -> None:
    with (
        synchronizer(SyncMethod.MEMORY, SyncStyle.FIXED, tmp_path) as where,
        ExplorerClient(where, model_at(-1)) as explorer,
    ):
        status = explorer.blocking.status()
        assert status["trainer"] == "stopped"
        assert status["explorers"] == {0: "running"}
        assert (str(RunningStatus.STOPPED), f"{SyncStyle.FIXED}") == ("stopped", "fixed")
        assert json.loads(json.dumps(status))["trainer"] == "stopped"
        assert (explorer.plan.method, explorer.plan.style) == ("memory", "fixed")
