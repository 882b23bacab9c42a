"""A thousand random updates as patches, with random faults; SOAK_SEED=... repeats the printed seed."""

from __future__ import annotations

import os
import random
import signal
import time
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import pytest
import torch
from faults_tools import WAIT, Processes, Remote, Worker, eventually, hold, join, let_go
from torch import nn

from weight_update import (
    PatchEncoding,
    SyncFailedError,
    WeightStrategy,
    WeightSyncScheme,
    group_schemes,
    send_together,
)

DTYPES = [torch.float32, torch.bfloat16, torch.float32, torch.bfloat16]
"""The dtypes of the workers; the trainer has float32."""

OPTIONS: list[Mapping[str, Any]] = [
    {},
    {"layout": "coo", "compression": "zstd"},
    {"values": "relative", "compression": "lz4", "init_sync_bucket_size": 4096},
    {"delta_encoding": False, "values": "relative"},
]
LIMIT = 1.0
NANS = [0x7FC00000, 0x7FC01234, 0x7F800001, -1, -0x80000000, 0x7F800000, 1, 0]
"""Bit patterns: NaNs, -0.0, infinity, the smallest number, 0.0."""


class Net(nn.Module):
    """Tensors of several sizes, a tied and an integer one; its note can be made to fail in a worker."""

    def __init__(self, refuses: str = "") -> None:
        super().__init__()
        self.first, self.second = nn.Linear(96, 300), nn.Linear(300, 96, bias=False)
        self.again = nn.Linear(300, 96)
        self.again.weight = self.second.weight
        self.scale = nn.Parameter(torch.tensor(1.0))
        self.register_buffer("steps", torch.zeros(7, dtype=torch.int64))
        self.register_buffer("mask", torch.zeros(33, dtype=torch.bool))
        self.note, self.refuses = "fresh", refuses

    def get_extra_state(self) -> str:
        return self.note

    def set_extra_state(self, note: str) -> None:
        if note == self.refuses:
            raise ArithmeticError(f"{note} is not welcome")
        self.note = note


@torch.no_grad()
def change(model: Net, dice: random.Random) -> None:
    """Change no element, a few, many or all of them; now and then to strange bits."""
    share = dice.choice([0.0, 1e-4, 1e-3, 0.01, 0.01, 0.05, 0.2, 0.6, 1.0])
    seeded = torch.Generator().manual_seed(dice.randrange(1 << 40))
    for tensor in model.parameters():
        flat = tensor.view(-1)
        count = min(flat.numel(), int(share * flat.numel() + dice.random()))
        where = torch.randperm(flat.numel(), generator=seeded)[:count]
        flat[where] = torch.randn(count, generator=seeded)
        if count and dice.random() < 0.2:
            flat.view(torch.int32)[where[0]] = dice.choice(NANS)
    if dice.random() < 0.3:
        model.steps.add_(1)
        model.mask.logical_not_()


Bits = dict[str, np.ndarray[Any, Any]]


def bits_of(me: Worker) -> tuple[Bits, str]:
    with me.scheme.hold():
        return bits(me.model), me.model.note


def bits(model: nn.Module) -> Bits:
    tensors = WeightStrategy().named(model).tensors
    return {name: _bits(value) for name, value in tensors.items()}


def _bits(tensor: torch.Tensor) -> np.ndarray[Any, Any]:
    flat = tensor.detach().clone().reshape(-1)
    if flat.dtype is torch.bfloat16:
        flat[flat.isnan()] = float("nan")  # which NaN another one becomes is torch's affair
    return flat.view(torch.uint8).numpy()


def write_in_place(me: Worker, seed: int) -> None:
    """As a worker that is fine-tuned, or reset, on its own."""
    dice = random.Random(seed)
    with torch.no_grad():
        for parameter in dice.sample(list(me.model.parameters()), 2):
            parameter.view(-1)[dice.randrange(parameter.numel())] = 5.0


def write_while_held(me: Worker, seed: int, seconds: float) -> None:
    with me.scheme.hold():
        time.sleep(seconds)
        write_in_place(me, seed)


class Soak:
    """A trainer that sends all the time, workers to which things happen, and what each should have."""

    def __init__(self, kind: type[WeightSyncScheme], procs: Processes, seed: int) -> None:
        self.dice, self.procs = random.Random(seed), procs
        options = self.dice.choice(OPTIONS)
        print(f"seed {seed}, {options}")
        strategy = WeightStrategy(encoding=PatchEncoding(**options))
        self.scheme = procs.scheme(kind, strategy=strategy, timeout=LIMIT)
        group_schemes([self.scheme])
        self.model, self.updates, self.failed, self.checks = Net(), 0, 0, 0
        self.labels: dict[str, int] = {}
        self.due: list[Net] = [_copy(self.model) for _ in DTYPES]
        self.stopped: set[int] = set()
        self.held: set[int] = set()
        self.scheme.init_on_sender(model=self.model, num_workers=len(DTYPES))
        self.workers = [self.start(idx) for idx in range(len(DTYPES))]
        self.scheme.connect(timeout=WAIT)
        for worker in self.workers:
            worker.result()

    def start(self, idx: int) -> Remote:
        made = self.procs.start(self.scheme, idx, lambda: Net("poison" if idx % 2 else "").to(DTYPES[idx]))
        made.begin(join)
        return made

    # -- sending ---------------------------------------------------------------------------------------

    def send(self) -> None:
        way = self.dice.choices(
            [
                self.send_to_all,
                self.send_to_some,
                self.send_each,
                self.send_many,
                self.send_step,
                self.send_poison,
            ],
            [8, 4, 2, 3, 2, 1],
        )
        way[0]()

    def sent(self, weights: Mapping[int, Net]) -> None:
        self.updates += 1
        for idx, model in weights.items():
            self.due[idx] = _copy(model)

    def attempt(self, call: Callable[[], Any]) -> bool:
        try:
            report = call()
        except SyncFailedError:
            self.failed += 1
            return False
        report = next(iter(report.values())) if isinstance(report, dict) else report
        self.labels[report.encoding] = self.labels.get(report.encoding, 0) + 1
        return True

    def send_to_all(self) -> None:
        change(self.model, self.dice)
        self.sent(dict.fromkeys(range(len(DTYPES)), self.model))
        self.attempt(self.scheme.send)

    def send_to_some(self) -> None:
        chosen = self.dice.sample(range(len(DTYPES)), self.dice.randrange(1, len(DTYPES)))
        change(self.model, self.dice)
        self.sent(dict.fromkeys(chosen, self.model))
        self.attempt(lambda: self.scheme.send(worker_ids=chosen))

    def send_each(self) -> None:
        """Other weights for each, as one version."""
        weights = {}
        for idx in range(len(DTYPES)):
            weights[idx] = _copy(self.due[idx])
            change(weights[idx], self.dice)
        self.sent(weights)
        self.attempt(lambda: self.scheme.send(weights))

    def send_many(self) -> None:
        for _ in range(self.dice.randrange(1, 15)):
            change(self.model, self.dice)
            self.sent(dict.fromkeys(range(len(DTYPES)), self.model))
            self.scheme.send_async()

    def send_step(self) -> None:
        """Staged by all, then applied by all, or by none."""
        change(self.model, self.dice)
        self.updates += 1
        before = list(self.due)
        for idx in range(len(DTYPES)):
            self.due[idx] = _copy(self.model)
        try:
            send_together({self.scheme: None})
        except SyncFailedError as error:
            self.failed += 1
            if "no model was updated" in str(error):
                self.due = before

    def send_poison(self) -> None:
        """Some workers cannot apply it; nothing of it may stay."""
        self.model.note = "poison"
        self.send_to_all()
        self.model.note = f"fine {self.updates}"
        self.send_to_all()

    # -- faults ----------------------------------------------------------------------------------------

    def happen(self) -> None:
        idx = self.dice.randrange(len(DTYPES))
        if idx in self.stopped:
            self.workers[idx].signal(signal.SIGCONT)
            self.stopped.discard(idx)
        elif idx in self.held:
            self.workers[idx].call(let_go)
            self.held.discard(idx)
        else:
            kinds = [self.stop, self.hold, self.restart, self.write, self.write_and_wait, self.swap_model]
            self.dice.choices(kinds, [1, 1, 2, 3, 2, 1])[0](idx)

    def stop(self, idx: int) -> None:
        self.workers[idx].signal(signal.SIGSTOP)
        self.stopped.add(idx)

    def hold(self, idx: int) -> None:
        self.workers[idx].call(hold)
        self.held.add(idx)

    def write(self, idx: int) -> None:
        self.workers[idx].call(write_in_place, self.dice.randrange(1 << 30))

    def write_and_wait(self, idx: int) -> None:
        self.workers[idx].begin(write_while_held, self.dice.randrange(1 << 30), 0.05)
        self.send_many()
        self.workers[idx].result()

    def swap_model(self, idx: int) -> None:
        self.workers[idx].call(take_new_model)

    def restart(self, idx: int) -> None:
        self.workers[idx].kill()
        self.workers[idx] = self.start(idx)
        self.workers[idx].result()

    # -- looking ---------------------------------------------------------------------------------------

    def calm(self) -> None:
        """All go on, and have what they were sent last."""
        for idx in self.stopped:
            self.workers[idx].signal(signal.SIGCONT)
        for idx in self.held:
            self.workers[idx].call(let_go)
        self.stopped, self.held = set(), set()

    def check(self) -> None:
        """Send something to each kind, so that whoever wrote into its weights has them anew; then compare."""
        self.calm()
        assert eventually(self.all_took_one), self.scheme.worker_versions
        for idx, worker in enumerate(self.workers):
            expected, found = self.due[idx], worker.call(bits_of)
            same_bits(f"worker {idx} of {DTYPES[idx]}", bits(_copy(expected).to(DTYPES[idx])), found[0])
            assert found[1] == expected.note
        self.checks += 1

    def all_took_one(self) -> bool:
        if self.dice.random() < 0.3:
            weights = {idx: _copy(model) for idx, model in enumerate(self.due)}
        else:
            weights = dict.fromkeys(range(len(DTYPES)), self.model)
        for model in {id(model): model for model in weights.values()}.values():
            model.note = f"fine {self.updates}"
            with torch.no_grad():
                model.first.bias.add_(1.0)
        self.sent(weights)
        return self.attempt(lambda: self.scheme.send(weights))


def take_new_model(me: Worker) -> None:
    me.model = Net(me.model.refuses).to(me.model.first.weight.dtype)
    me.scheme.model = me.model


def _copy(model: Net) -> Net:
    made = Net()
    made.load_state_dict(model.state_dict())
    return made


def same_bits(who: str, expected: Bits, found: Bits) -> None:
    assert expected.keys() == found.keys()
    wrong = {name: int((expected[name] != found[name]).sum()) for name in expected}
    assert not any(wrong.values()), f"{who}: bytes that differ, by name: {wrong}"


def run(kind: type[WeightSyncScheme], procs: Processes, updates: int, seconds: float) -> Soak:
    seed = int(os.environ.get("SOAK_SEED", random.SystemRandom().randrange(1 << 32)))
    soak, end = Soak(kind, procs, seed), time.monotonic() + seconds
    while soak.updates < updates and time.monotonic() < end:
        for _ in range(soak.dice.randrange(1, 4 if soak.stopped or soak.held else 10)):
            soak.send()
        soak.happen()
        if soak.dice.random() < 0.3:
            soak.check()
    soak.check()
    print(f"{soak.updates} updates, {soak.failed} failed, {soak.checks} checks, {soak.labels}")
    return soak


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_a_thousand_updates(kind: type[WeightSyncScheme], procs: Processes) -> None:
    soak = run(kind, procs, 1000, 800.0)  # a busy machine may need five minutes
    assert soak.updates >= 1000
    assert soak.checks > 10


@pytest.mark.slow  # test_patch.py has each fault by itself
def test_some_updates(kind: type[WeightSyncScheme], procs: Processes) -> None:
    soak = run(kind, procs, 200, 6.0)
    assert soak.updates > 3  # a stopped worker costs seconds; how many more there are is for the slow one
    assert soak.checks > 0
