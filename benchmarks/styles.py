"""A small loop of training under each style: who waits, and how old the weights are that made a sample."""

from __future__ import annotations

import queue
import random
import sys
import threading
import time
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from statistics import mean
from typing import Any

import torch
from torch import nn

from benchmarks.report import Figure, Table
from weight_update import ExplorerClient, Synchronizer, SyncMethod, TrainerClient

__all__ = ["Loop", "styles_table"]

SETTINGS: dict[str, dict[str, Any]] = {
    "FIXED, interval 4": {"style": "fixed", "sync_interval": 4},
    "FIXED, interval 4, offset 4": {"style": "fixed", "sync_interval": 4, "sync_offset": 4},
    "EXPLORER_DRIVEN, interval 4": {"style": "explorer_driven", "sync_interval": 4},
    "TRAINER_DRIVEN, interval 4": {"style": "trainer_driven", "sync_interval": 4},
    "FULLY_ASYNC, interval 1, staleness 8": {"style": "fully_async", "max_staleness": 8},
}
METHODS = (SyncMethod.NCCL, SyncMethod.MEMORY)
_TURNS = 3
_TRAINER_STEP = 0.02
_EXPLORER_STEPS = (0.018, 0.030)  # on average; each is between a half and one and a half of it
_ROOM = 16  # so far two explorers may be ahead with an interval and an offset of 4
_LOOK = 0.005


@dataclass
class Loop:
    """One trainer and two explorers, threads that sleep instead of computing.

    An explorer's step makes one sample; a trainer's step takes two.

    Args:
        method: of the synchronizer.
        numbers: the other fields of its plan.
        seconds: how long it runs.

    Attributes:
        shares: part of the time that somebody spent on something, by ``(who, what)``.
        ages: of each sample, in steps of the trainer since the weights that made it.
        steps: of the trainer.
    """

    method: SyncMethod
    numbers: dict[str, Any]
    seconds: float
    shares: dict[tuple[str, str], float] = field(default_factory=lambda: defaultdict(float))
    ages: list[int] = field(default_factory=list)
    steps: int = 0

    def run(self) -> None:
        """Run it to its end."""
        self._samples: queue.Queue[int] = queue.Queue(_ROOM)
        self._over = threading.Event()
        with Synchronizer(self.method, **self.numbers) as where:
            threads = [
                threading.Thread(target=self._explore, args=(where, f"explorer {idx}", pace), daemon=True)
                for idx, pace in enumerate(_EXPLORER_STEPS)
            ]
            for thread in threads:
                thread.start()
            self._train(where)
            for thread in threads:
                thread.join(20.0)

    @contextmanager
    def _noting(self, who: str, what: str) -> Iterator[None]:
        start = time.monotonic()
        yield
        self.shares[who, what] += (time.monotonic() - start) / self.seconds

    def _train(self, where: Synchronizer) -> None:
        model = _model(0)
        with TrainerClient(where, model, timeout=5.0) as client:
            me, end = client.blocking, time.monotonic() + self.seconds
            while time.monotonic() < end:
                taken: list[int] = []
                while len(taken) < 2 and time.monotonic() < end:
                    self._synchronize("trainer", me)
                    with self._noting("trainer", "starves"), suppress(queue.Empty):
                        taken.append(self._samples.get(timeout=_LOOK))
                self.ages += [me.step - made_at for made_at in taken]
                time.sleep(_TRAINER_STEP)
                me.step += 1
                _set(model, me.step)
                self._synchronize("trainer", me)
            self.steps = me.step
            self._over.set()

    def _explore(self, where: Synchronizer, who: str, pace: float) -> None:
        model, luck = _model(0), random.Random(who)
        with ExplorerClient(where, model, timeout=5.0) as client:
            me = client.blocking
            while not self._over.is_set():
                with client.hold():
                    sample = int(model.weight[0])
                    time.sleep(pace * luck.uniform(0.5, 1.5))
                while not self._over.is_set() and not self._hand_over(who, sample):
                    self._synchronize(who, me)  # the trainer may wait for it
                me.step += 1
                self._synchronize(who, me)

    def _hand_over(self, who: str, sample: int) -> bool:
        with self._noting(who, "waits for room"), suppress(queue.Full):
            self._samples.put(sample, timeout=_LOOK)
            return True
        return False

    def _synchronize(self, who: str, me: Any) -> None:
        with self._noting(who, "synchronizes"):
            if me.need_sync():
                me.sync_weight()


def _model(step: int) -> Any:
    model = nn.Linear(1, 250_000, bias=False)  # 1 MB
    _set(model, step)
    return model


def _set(model: Any, step: int) -> None:
    with torch.no_grad():
        model.weight.fill_(step)


def styles_table(seconds: float) -> Table:
    """Every style by two methods, in turns."""
    loops: dict[tuple[str, SyncMethod], list[Loop]] = defaultdict(list)
    for turn in range(_TURNS):
        print(f"... styles, turn {turn + 1} of {_TURNS}", file=sys.stderr, flush=True)
        for name, numbers in SETTINGS.items():
            for method in METHODS:
                loop = Loop(method, numbers, seconds)
                loop.run()
                loops[name, method].append(loop)
    rows = [[name, method.name, *_row(some)] for (name, method), some in loops.items()]
    slow, fast = _EXPLORER_STEPS[1], _EXPLORER_STEPS[0]
    note = (
        f"Threads that sleep instead of computing: a step of the trainer takes {_TRAINER_STEP * 1e3:.0f}\n"
        f"ms and two samples; a step of an explorer makes one, in {fast * 1e3:.0f} or {slow * 1e3:.0f} ms\n"
        f"on average, each time between a half and one and a half of that; {_ROOM} samples may lie between\n"
        f"them. A model of 1 MB. Median (least .. most) of {_TURNS} turns of {seconds:g} s. *Age*: trainer\n"
        "steps between the weights that made a sample and those that learned from it. Shares of the time:\n"
        "the trainer *starves* (no samples), or *synchronizes*; the explorers, on average, *synchronize*,\n"
        "or wait for *room*."
    )
    head = ["style", "method", "steps/s", "mean age", "oldest", "starves %", "synchronizes %"]
    head += ["explorers synchronize %", "room %"]
    return Table("Styles: who waits, and how old weights are", note, head, rows)


def _row(loops: list[Loop]) -> list[str]:
    explorers = [f"explorer {idx}" for idx in range(len(_EXPLORER_STEPS))]
    columns = [
        ([loop.steps / loop.seconds for loop in loops], 1),
        ([mean(loop.ages) for loop in loops], 1),
        ([max(loop.ages) for loop in loops], 0),
        ([100 * loop.shares["trainer", "starves"] for loop in loops], 0),
        ([100 * loop.shares["trainer", "synchronizes"] for loop in loops], 0),
        ([100 * mean(loop.shares[who, "synchronizes"] for who in explorers) for loop in loops], 0),
        ([100 * mean(loop.shares[who, "waits for room"] for who in explorers) for loop in loops], 0),
    ]
    return [Figure(tuple(values)).show(1.0, digits) for values, digits in columns]
