"""Collectors beside TorchRL's: frames per second, updates, and the time to the first batch."""

from __future__ import annotations

import argparse
import importlib
import itertools
import time
import warnings
from collections import defaultdict
from collections.abc import Iterator, Sequence
from typing import Any

import torch
import torchrl.weight_update
from tensordict.nn import TensorDictModule
from torch import nn
from torchrl.envs import GymEnv
from torchrl.modules import OneHotCategorical, ProbabilisticActor

import weight_update
from benchmarks.options import Options
from benchmarks.report import Figure, Table, Unable, machine, ratio, say, show_ratio
from benchmarks.targets import target, targets_table

QUICK = "one turn of a MultiSyncCollector, with a policy of 18 kB"

OURS, VERSIONS, PLAIN = "ours", "torchrl, versions", "torchrl"
"""Our collector, TorchRL's with ``track_policy_version=True``, and TorchRL's as it is by default."""

WORKERS = {"Collector": 0, "MultiSyncCollector": 2, "MultiAsyncCollector": 2}
_FRAMES = 200  # of a batch, for each process
_WARM_UP = 2  # batches
_NOTE = (
    "CartPole, median (min .. max) of the turns. Multi collectors have two workers. A batch has "
    f"{_FRAMES} frames of each process, or twice as many of one with a MultiAsyncCollector. Our frames have "
    "the version of their policy. *torchrl, versions*: with track_policy_version=True. The last columns: "
    "ours, divided by the columns before."
)


Case = tuple[str, int]
"""Kind of collector, and width of the policy's layers."""

RATE, UPDATE, START = "rate", "update", "start"
"""Frames per second, updates included; seconds of ``update_policy_weights_()``; seconds from constructor to
the first batch."""

Found = defaultdict[tuple[Case, str, str], list[float]]
"""Measurements by case, variant and what was measured."""


def make_env() -> GymEnv:
    """Return the environment of each process."""
    return GymEnv("CartPole-v1")


def make_policy(width: int) -> ProbabilisticActor:
    """Return a policy with two hidden layers."""
    layers = nn.Sequential(
        nn.Linear(4, width), nn.Tanh(), nn.Linear(width, width), nn.Tanh(), nn.Linear(width, 2)
    )
    return ProbabilisticActor(
        TensorDictModule(layers, in_keys=["observation"], out_keys=["logits"]),
        in_keys=["logits"],
        distribution_class=OneHotCategorical,
    )


def class_of(kind: str, variant: str) -> Any:
    """Import and return the class of this kind of collector."""
    return getattr(importlib.import_module("collectors" if variant == OURS else "torchrl.collectors"), kind)


def make_collector(cls: Any, variant: str, policy: nn.Module) -> Any:
    """Return a collector of this class."""
    workers = WORKERS[cls.__name__]
    options: dict[str, Any] = {
        "frames_per_batch": _FRAMES * max(workers, 1),
        "total_frames": -1,
        "auto_register_policy_transforms": False,
    }
    if variant == VERSIONS:
        options["track_policy_version"] = True
    if workers:
        library = weight_update if variant == OURS else torchrl.weight_update
        options["weight_sync_schemes"] = {"policy": library.SharedMemWeightSyncScheme()}
    return cls([make_env] * workers or make_env, policy, **options)


def run(case: Case, variant: str, batches: int, found: Found) -> None:
    """Start a collector, update its policy before each batch, and shut it down."""
    kind, width = case
    policy, cls = make_policy(width), class_of(kind, variant)
    start = time.perf_counter()
    collector = make_collector(cls, variant, policy)
    try:
        frames = iter(collector)
        next(frames)
        found[case, variant, START].append(time.perf_counter() - start)
        for _ in range(_WARM_UP):
            _update(collector, policy)
            next(frames)
        updates: list[float] = []
        start, count = time.perf_counter(), 0
        for _ in range(batches):
            updates.append(_update(collector, policy))
            count += next(frames).numel()
        found[case, variant, RATE].append(count / (time.perf_counter() - start))
        found[case, variant, UPDATE] += updates
    finally:
        collector.shutdown()


def _update(collector: Any, policy: nn.Module) -> float:
    """Change all weights; return the seconds of the update."""
    with torch.no_grad():
        for parameter in policy.parameters():
            parameter.mul_(0.999)
    start = time.perf_counter()
    collector.update_policy_weights_()
    return time.perf_counter() - start


def measure(cases: Sequence[Case], variants: Sequence[str], turns: int, batches: int) -> Found:
    """Run the variants of each case in turns. The order of a turn is random."""
    found: Found = defaultdict(list)
    random = torch.Generator().manual_seed(0)
    for case in cases:
        say(f"{case[0]}, {case[1]} units in each layer")
        for _ in range(turns):
            for index in torch.randperm(len(variants), generator=random).tolist():
                run(case, variants[index], batches, found)
    return found


def add_options(known: Options) -> None:
    known.add("--kinds", tuple(WORKERS), "kinds of collectors", quick=("MultiSyncCollector",))
    known.add("--widths", (64, 1024), "units of a hidden layer", quick=(64,))
    known.add("--turns", 3, "collectors of each variant", quick=1)
    known.add("--batches", 20, "of each collector", quick=3)


def facts(options: argparse.Namespace) -> list[str]:
    if not set(options.kinds) <= WORKERS.keys():
        raise Unable(f"--kinds takes {', '.join(WORKERS)}")
    return machine("torchrl", "gymnasium")


def tables(options: argparse.Namespace) -> Iterator[Table]:
    warnings.simplefilter("ignore", DeprecationWarning)
    cases = list(itertools.product(options.kinds, options.widths))
    variants = [OURS, VERSIONS, PLAIN] if options.beside else [OURS]
    found = measure(cases, variants, options.turns, options.batches)
    head = ["collector", "policy, MB", OURS, VERSIONS, PLAIN, "of versions", "of torchrl"]
    for title, note, what, scale, digits in (
        ("Frames per second", _NOTE, RATE, 1.0, 0),
        ("update_policy_weights_()", "Milliseconds, median (min .. max) of all updates.", UPDATE, 1e3, 2),
        ("From the constructor to the first batch", "Seconds, of the turns.", START, 1.0, 1),
    ):
        rows = [_row(found, case, what, scale, digits) for case in cases]
        yield Table(title, note, head, rows, (0, 1))
    template = "{kind}, {width} units: seconds of a frame, of torchrl's with versions"
    rates = [[Figure(found[case, variant, RATE]) for variant in (VERSIONS, OURS)] for case in cases]
    yield targets_table(
        target(template, ratio(*pair), kind=case[0], width=case[1])
        for case, pair in zip(cases, rates, strict=True)
    )


def _row(found: Found, case: Case, what: str, scale: float, digits: int) -> list[object]:
    """Return the cells of one kind of collector and policy."""
    kind, width = case
    ours, *others = (Figure(found[case, variant, what]) for variant in (OURS, VERSIONS, PLAIN))
    megabytes = sum(one.numel() for one in make_policy(width).parameters()) * 4 / 1e6
    cell = ours.cell(scale, digits, more_is_better=what == RATE)
    shown = [other.show(scale, digits) for other in others]
    return [kind, f"{megabytes:.2f}", cell, *shown, *(show_ratio(ours, other) for other in others)]
