"""Trainers and explorers for tests. Each weight of a model is the trainer step at which it was made."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import nn

from weight_update import ExplorerClient, Synchronizer, SyncMethod, SyncPlan, SyncStyle, TrainerClient
from weight_update.synchronizer import StateMachine
from weight_update.testing import processes

PATIENCE = 20.0


def model_at(step: float) -> nn.Module:
    model = nn.Sequential(nn.Linear(8, 4), nn.LayerNorm(4))
    set_to(model, step)
    return model


def set_to(model: nn.Module, step: float) -> None:
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.fill_(step)


def step_of(model: nn.Module) -> float:
    """Return the trainer step of the weights, which are of one version."""
    found = {value for parameter in model.parameters() for value in parameter.detach().flatten().tolist()}
    assert len(found) == 1, f"weights of several steps: {found}"
    return found.pop()


def has_step(model: nn.Module, step: float) -> bool:
    """Return whether all weights are of ``step``; an update may be under way meanwhile."""
    return all(bool((parameter == step).all()) for parameter in model.parameters())


@contextmanager
def synchronizer(
    method: SyncMethod, style: SyncStyle, directory: Path, **fields: Any
) -> Iterator[Synchronizer]:
    where = directory if method is SyncMethod.CHECKPOINT else None
    with Synchronizer(method, style, **{"directory": where, **fields}) as made:
        yield made


@contextmanager
def connected(
    method: SyncMethod, style: SyncStyle, directory: Path, source: Any, model: Any, **options: Any
) -> Iterator[tuple[Synchronizer, TrainerClient, ExplorerClient]]:
    """Yield a synchronizer, a trainer and an explorer, with one strategy and one limit of a transfer."""
    shared = {name: options[name] for name in ("strategy", "transfer_timeout") if name in options}
    with (
        synchronizer(method, style, directory, **options) as where,
        TrainerClient(where, source, **shared) as trainer,
        ExplorerClient(where, model, **shared) as explorer,
    ):
        yield where, trainer, explorer


def wait_until(true: Callable[[], Any], seconds: float = PATIENCE) -> None:
    processes.wait_until(true, seconds)


def machine(method: SyncMethod, style: SyncStyle, explorers: int = 1, **numbers: int) -> StateMachine:
    """Return a state machine with a trainer and explorers."""
    made = StateMachine(SyncPlan(method, style, **numbers))
    made.trainer_joined()
    for id in range(explorers):
        made.joined(id)
    return made


def until_waiting(where: Synchronizer, *ids: int) -> None:
    """Wait until explorers wait for weights."""
    wait_until(lambda: all(where.service.status()["explorers"].get(str(id)) == "require_sync" for id in ids))


class Waiting(threading.Thread):
    """An explorer in ``sync_weight``."""

    def __init__(self, client: ExplorerClient) -> None:
        super().__init__(daemon=True)
        self.client, self.said = client.blocking, Future()
        self.start()

    def run(self) -> None:
        try:
            self.said.set_result(self.client.sync_weight())
        except Exception as error:  # noqa: BLE001 - for the test to raise
            self.said.set_exception(error)

    def result(self, seconds: float = 20.0) -> dict[str, Any]:
        self.join(seconds)
        assert not self.is_alive(), "it still waits"
        return self.said.result()

    def be_served_by(self, trainer: TrainerClient) -> None:
        """Let a trainer synchronize whenever it needs to, until the explorer does not wait any more."""
        while self.is_alive():
            if trainer.blocking.need_sync():
                trainer.blocking.sync_weight()
            time.sleep(0.005)


def exchange(trainer: TrainerClient, explorer: ExplorerClient) -> int:
    """Let an explorer wait, and the trainer synchronize once it needs to; return the version."""
    waiting = Waiting(explorer)
    wait_until(trainer.blocking.need_sync)
    published, taken = trainer.blocking.sync_weight(), waiting.result()
    assert "reason" not in published
    assert "reason" not in taken
    assert published["version"] == taken["version"]
    return int(published["version"])


@dataclass
class Sync:
    """One ``sync_weight`` of an explorer."""

    step: int
    weights: float
    metrics: dict[str, Any]


@dataclass
class Explored:
    """The observations of an explorer."""

    syncs: list[Sync] = field(default_factory=list)
    weights: list[float] = field(default_factory=list)
    error: Exception | None = None


class ExplorerThread(threading.Thread):
    """A thread that explores: it counts a step, and synchronizes when it is needed.

    With ``until_served`` it goes on until it has weights, if it was through before the trainer began.
    """

    def __init__(
        self, where: Any, steps: int, pause: float = 0.002, *, until_served: bool = False, **options: Any
    ) -> None:
        super().__init__(daemon=True)
        self.model = model_at(-1)
        self.client = ExplorerClient(where, self.model, **{"timeout": PATIENCE, **options})
        self.steps, self.pause, self.seen = steps, pause, Explored()
        self.until_served = until_served

    def run(self) -> None:
        try:
            with self.client:
                for _ in range(self.steps):
                    self._step()
                deadline = time.monotonic() + PATIENCE
                while self.until_served and self.seen.weights[-1] < 0 and time.monotonic() < deadline:
                    self._step()
        except Exception as error:  # noqa: BLE001 - for the test to raise
            self.seen.error = error

    def _step(self) -> None:
        client = self.client.blocking
        time.sleep(self.pause)
        client.step += 1
        if client.need_sync():
            metrics = client.sync_weight()
            self.seen.syncs.append(Sync(client.step, self._weights(), metrics))
        self.seen.weights.append(self._weights())

    def _weights(self) -> float:
        with self.client.hold():
            return step_of(self.model)


def train(
    where: Any, while_true: Callable[[], bool], pause: float = 0.002, **options: Any
) -> list[dict[str, Any]]:
    """Train until explorers are done; return the metrics of each ``sync_weight``, with its ``step``."""
    model, said = model_at(0), []
    with TrainerClient(where, model, **{"timeout": PATIENCE, **options}) as client:
        trainer = client.blocking
        deadline = time.monotonic() + 3 * PATIENCE
        while while_true():
            assert time.monotonic() < deadline, "explorers do not come to an end"
            if trainer.need_sync():
                said.append(trainer.sync_weight())
            time.sleep(pause)
            trainer.step += 1
            set_to(model, trainer.step)
    return said
