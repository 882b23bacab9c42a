"""Observers of a Synchronizer: published versions, and what becomes of explorers."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from sync_parts import Waiting, connected, model_at, set_to, synchronizer, until_waiting, wait_until

from weight_update import (
    ExplorerClient,
    LifecycleError,
    PatchEncoding,
    Synchronizer,
    SyncMethod,
    SyncReport,
    SyncStyle,
    TrainerClient,
    WeightStrategy,
    WorkerEvent,
)
from weight_update.report import Event

STAGES = {
    SyncMethod.NCCL: ["extract", "encode", "send", "ack"],
    SyncMethod.MEMORY: ["extract", "encode", "send", "ack"],
    SyncMethod.CHECKPOINT: ["extract", "send"],
}


class Told(list[Any]):
    """An observer that keeps what it is told."""

    def __call__(self, event: Event) -> None:
        self.append(event)

    @property
    def reports(self) -> list[SyncReport]:
        return [one for one in self if isinstance(one, SyncReport)]

    @property
    def events(self) -> list[tuple[str, int, int | None]]:
        return [(one.kind, one.worker, one.version) for one in self if isinstance(one, WorkerEvent)]


def exchange(where: Synchronizer, trainer: TrainerClient, explorer: ExplorerClient, step: int) -> int:
    """Bring the trainer's weights of a step to an explorer; return their version."""
    explorer.step = trainer.step = step
    waiting = Waiting(explorer)
    until_waiting(where, explorer.id)
    version = trainer.blocking.sync_weight()["version"]
    assert waiting.result()["version"] == version
    return int(version)


@pytest.mark.parametrize("method", list(SyncMethod))
@pytest.mark.parametrize("served", [False, True])
def test_versions_and_explorers(method: SyncMethod, served: bool, tmp_path: Path) -> None:
    told, source = Told(), model_at(0)
    with synchronizer(method, SyncStyle.FIXED, tmp_path) as made:
        made.add_observer(told)
        where = made.serve() if served else made
        with TrainerClient(where, source) as trainer:
            with ExplorerClient(where, model_at(-1), id=3) as explorer:
                versions = [exchange(made, trainer, explorer, step) for step in (1, 2)]
            wait_until(lambda: ("left", 3, versions[1]) in told.events)
    assert [report.version for report in told.reports] == versions
    first = told.reports[0]
    assert list(first.seconds) == STAGES[method]
    nbytes = sum(value.numel() * value.element_size() for value in source.parameters())
    assert first.wire_bytes >= nbytes
    direct = method is SyncMethod.NCCL
    assert (list(first.apply_seconds), first.failures) == ([3] if direct else [], {})
    applied = [("applied", 3, version) for version in versions]
    assert [one for one in told.events if one[0] != "applied"] == [
        ("joined", 3, None),
        ("left", 3, versions[1]),
    ]
    assert [one for one in told.events if one[2] in versions and one[0] == "applied"] == applied


def test_a_file_has_tied_weights_once(tmp_path: Path) -> None:
    told, source = Told(), model_at(0)
    tied = torch.nn.ModuleDict({"one": source, "two": source})
    with synchronizer(SyncMethod.CHECKPOINT, SyncStyle.FIXED, tmp_path) as made:
        made.add_observer(told)
        with TrainerClient(made, tied) as trainer:
            trainer.step = 1
            trainer.blocking.sync_weight()
            wait_until(lambda: told.reports)
    (report,) = told.reports
    nbytes = sum(value.numel() * value.element_size() for value in source.parameters())
    assert (report.dense_bytes, report.wire_bytes) == (nbytes, nbytes)


def test_versions_taken_in_the_background(tmp_path: Path) -> None:
    told, source = Told(), model_at(0)
    clients = connected(SyncMethod.MEMORY, SyncStyle.FULLY_ASYNC, tmp_path, source, model_at(-1))
    with clients as (where, trainer, explorer):
        remove = where.add_observer(told)
        exchange(where, trainer, explorer, 1)
        trainer.step = 2
        version = trainer.blocking.sync_weight()["version"]

        def applied() -> bool:
            explorer.blocking.need_sync()
            return ("applied", 0, version) in told.events

        wait_until(applied)
        remove()
        trainer.step = 3
        trainer.blocking.sync_weight()
    assert [report.version for report in told.reports][-1] == version


def patches() -> dict[str, Any]:
    return {"strategy": WeightStrategy("state_dict", encoding=PatchEncoding())}


def change(model: torch.nn.Module) -> None:
    next(model.parameters()).data.view(-1)[0] += 1


@pytest.mark.parametrize("method", [SyncMethod.NCCL, SyncMethod.MEMORY])
@pytest.mark.parametrize("served", [False, True])
def test_all_weights_instead_of_a_patch(method: SyncMethod, served: bool, tmp_path: Path) -> None:
    told, source, model = Told(), model_at(0), model_at(-1)
    with synchronizer(method, SyncStyle.FIXED, tmp_path, **patches()) as made:
        made.add_observer(told)
        where = made.serve() if served else made
        with (
            TrainerClient(where, source, **patches()) as trainer,
            ExplorerClient(where, model, id=3, **patches()) as explorer,
        ):
            versions = []
            for step in range(1, 5):
                if step == 3:
                    set_to(model, 7)  # patches apply to the trainer's weights, which it no longer has
                versions.append(exchange(made, trainer, explorer, step))
                change(source)
            wait_until(lambda: ("applied", 3, versions[-1]) in told.events)
    (full,) = [one for one in told if isinstance(one, WorkerEvent) and one.kind == "full_update"]
    assert (full.worker, full.version, full.reason) == (
        3,
        versions[2],
        "changes cannot be applied to the weights that it has",
    )
    # it happened before the next update, even if another thread tells of it later
    assert full.time < next(report.began for report in told.reports if report.version == versions[3])
    assert [report.encoding for report in told.reports[1:]] == ["patch"] * 3


@pytest.mark.parametrize("method", [SyncMethod.NCCL, SyncMethod.MEMORY])
def test_an_explorer_that_missed_too_many_versions(method: SyncMethod, tmp_path: Path) -> None:
    told, source, model = Told(), model_at(0), model_at(-1)
    clients = connected(method, SyncStyle.FULLY_ASYNC, tmp_path, source, model, **patches())
    with clients as (where, trainer, explorer):
        where.add_observer(told)
        explorer.step = trainer.step = 1
        trainer.blocking.sync_weight()
        assert "reason" not in explorer.blocking.sync_weight()
        scheme = trainer.blocking._method.publisher._scheme
        wait_until(lambda: scheme.worker_versions[0] is not None)  # or it misses versions before the next one
        with explorer.hold():  # the first version that comes waits, and no other is sent to it meanwhile
            for step in range(2, 14):
                change(source)
                trainer.step = step
                last = trainer.blocking.sync_weight()["version"]
        wait_until(lambda: all(map(torch.equal, model.parameters(), source.parameters())))
        wait_until(lambda: ("full_update", 0, last) in told.events)
    (full,) = [one for one in told if isinstance(one, WorkerEvent) and one.kind == "full_update"]
    assert full.reason == "it lacks the version that changes refer to"


@pytest.mark.parametrize("method", [SyncMethod.NCCL, SyncMethod.MEMORY])
def test_an_update_is_observed_as_long_as_there_are_observers(method: SyncMethod, tmp_path: Path) -> None:
    def observed() -> bool:
        return any(one.name == "weight_update-observers" for one in threading.enumerate())

    told, source, model = Told(), model_at(0), model_at(-1)
    clients = connected(method, SyncStyle.FIXED, tmp_path, source, model, **patches())
    with clients as (where, trainer, explorer):
        exchange(where, trainer, explorer, 1)
        assert not observed()
        remove = where.add_observer(told)
        exchange(where, trainer, explorer, 2)
        remove()
        set_to(model, 7)
        exchange(where, trainer, explorer, 3)
        where.add_observer(told)
        change(source)
        last = exchange(where, trainer, explorer, 4)
        wait_until(lambda: ("applied", 0, last) in told.events)
    assert "full_update" not in [kind for kind, *_ in told.events]


@pytest.mark.parametrize("method", [SyncMethod.NCCL, SyncMethod.MEMORY])
def test_an_explorer_that_is_late(method: SyncMethod, tmp_path: Path) -> None:
    told, source = Told(), model_at(0)
    options = {"transfer_timeout": 0.5}
    clients = connected(method, SyncStyle.FIXED, tmp_path, source, model_at(-1), **options)
    with clients as (where, trainer, explorer):
        where.add_observer(told)
        exchange(where, trainer, explorer, 1)
        with explorer.hold():
            explorer.step = trainer.step = 2
            set_to(source, 2)
            waiting = Waiting(explorer)
            until_waiting(where, 0)
            trainer.blocking.sync_weight()
            assert "reason" in waiting.result()
            wait_until(lambda: told.events[-1][:2] == ("late", 0))
    (late,) = [one for one in told if isinstance(one, WorkerEvent) and one.kind == "late"]
    assert "0.5 s" in late.reason  # the limit of the trainer, or that of the explorer, which is the same
    if method is SyncMethod.NCCL:
        assert told.reports[-1].failures == {0: late.reason}


def test_an_explorer_that_is_lost(tmp_path: Path) -> None:
    told = Told()
    with synchronizer(SyncMethod.MEMORY, SyncStyle.FIXED, tmp_path, lease=0.5) as where:
        where.add_observer(told)

        def explore() -> None:
            clients.append(ExplorerClient(where, model_at(-1)))

        clients: list[ExplorerClient] = []
        thread = threading.Thread(target=explore)  # it ends without closing its client
        thread.start()
        thread.join()
        wait_until(lambda: [kind for kind, *_ in told.events] == ["joined", "lost"])
        assert "was not heard of for 0.5 s" in told[-1].reason
        clients[0].close()
        with ExplorerClient(where, model_at(-1)):
            pass
    assert [kind for kind, *_ in told.events] == ["joined", "lost", "joined", "left"]


@pytest.mark.parametrize("last_call", ["as it is", "status"])
def test_an_explorer_whose_connection_ends_is_lost(last_call: str, tmp_path: Path) -> None:
    told = Told()
    with synchronizer(SyncMethod.CHECKPOINT, SyncStyle.FIXED, tmp_path) as where:
        where.add_observer(told)
        with ExplorerClient(where.serve(), model_at(-1)) as explorer:
            if last_call == "status":  # a call that does not say who calls
                explorer.blocking.status()
            explorer.blocking.channel.close()  # as when its process is killed
            wait_until(lambda: [kind for kind, *_ in told.events] == ["joined", "lost"])
        assert told[-1].reason == "its connection ended"


def test_no_report_travels_without_observers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with (
        synchronizer(SyncMethod.MEMORY, SyncStyle.FIXED, tmp_path) as where,
        TrainerClient(where, model_at(0)) as trainer,
    ):
        calls: list[dict[str, Any]] = []
        ask = trainer.blocking.ask

        def noted(name: str, *args: Any, **named: Any) -> Any:
            calls.append(named)
            return ask(name, *args, **named)

        monkeypatch.setattr(trainer.blocking, "ask", noted)
        trainer.blocking.sync_weight()
        assert calls[-1]["report"] is None
        where.add_observer(Told())
        trainer.step = 1
        trainer.blocking.sync_weight()
        assert calls[-1]["report"]["version"] == 1


def test_after_the_end_and_in_an_actor(tmp_path: Path) -> None:
    where = Synchronizer("memory")
    where.add_observer(print)
    with pytest.raises(LifecycleError, match="no observers"):
        where.as_ray_actor("unused")
    where.close()
    with pytest.raises(LifecycleError, match="shut down"):
        where.add_observer(print)
    with pytest.raises(LifecycleError, match="is closed"):
        where.as_ray_actor("unused")
