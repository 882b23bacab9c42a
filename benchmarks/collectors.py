"""Collectors beside TorchRL's: frames per second, updates, and the time to the first batch."""

from __future__ import annotations

import argparse
import importlib
import time
import warnings
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
import torchrl.weight_update
from tensordict.nn import TensorDictModule
from torch import nn
from torchrl.envs import GymEnv
from torchrl.modules import OneHotCategorical, ProbabilisticActor

import weight_update
from benchmarks.report import Figure, Table, Unable, chosen, machine, numbers, ratio, say, show_ratio
from benchmarks.targets import target, targets_table

QUICK = "one turn of a MultiSyncCollector, with a policy of 18 kB"

OURS, VERSIONS, PLAIN = "ours", "torchrl, versions", "torchrl"
"""Our collector, TorchRL's with ``track_policy_version=True``, and TorchRL's as it is by default."""

WORKERS = {"Collector": 0, "MultiSyncCollector": 2, "MultiAsyncCollector": 2}
_FRAMES = 200  # of a process in one batch
_WARM_UP = 2  # batches
_NOTE = (
    f"CartPole, {_FRAMES} frames of each process in a batch, median (min .. max) of the turns. Multi "
    "collectors have two workers. Our frames have the version of their policy. *torchrl, versions*: with "
    "track_policy_version=True. The last columns: ours, divided by the columns before."
)


@dataclass
class Measured:
    """The measurements of one variant.

    Attributes:
        rates: frames per second of each collector, updates included.
        updates: seconds of each ``update_policy_weights_()``.
        starts: seconds from the call of the constructor to the first batch.
    """

    rates: list[float] = field(default_factory=list)
    updates: list[float] = field(default_factory=list)
    starts: list[float] = field(default_factory=list)


Found = dict[tuple[str, int, str], Measured]
"""Measurements by kind of collector, width of the policy's layers and variant."""


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


def make_collector(kind: str, variant: str, policy: nn.Module) -> Any:
    """Return a collector of this kind."""
    workers = WORKERS[kind]
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
    package = importlib.import_module("collectors" if variant == OURS else "torchrl.collectors")
    return getattr(package, kind)([make_env] * workers or make_env, policy, **options)


def run(kind: str, variant: str, width: int, batches: int, found: Measured) -> None:
    """Start a collector, update its policy before each batch, and shut it down."""
    policy = make_policy(width)
    start = time.perf_counter()
    collector = make_collector(kind, variant, policy)
    try:
        frames = iter(collector)
        next(frames)
        found.starts.append(time.perf_counter() - start)
        for _ in range(_WARM_UP):
            _update(collector, policy)
            next(frames)
        start, count = time.perf_counter(), 0
        for _ in range(batches):
            found.updates.append(_update(collector, policy))
            count += next(frames).numel()
        found.rates.append(count / (time.perf_counter() - start))
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


def measure(
    kinds: list[str], widths: tuple[int, ...], variants: list[str], turns: int, batches: int
) -> Found:
    """Run the variants of each kind in turns. The order of a turn is random."""
    found: Found = {}
    random = torch.Generator().manual_seed(0)
    for kind in kinds:
        for width in widths:
            say(f"{kind}, {width} units in each layer")
            for _ in range(turns):
                for index in torch.randperm(len(variants), generator=random).tolist():
                    one = found.setdefault((kind, width, variants[index]), Measured())
                    run(kind, variants[index], width, batches, one)
    return found


def add_options(known: argparse.ArgumentParser) -> None:
    known.add_argument("--kinds", type=lambda text: text.split(","), help=f"default: {','.join(WORKERS)}")
    known.add_argument("--widths", type=numbers, help="units of a hidden layer; default: 64,1024")
    known.add_argument("--turns", type=int, help="collectors of each variant; default: 3")
    known.add_argument("--batches", type=int, help="of each collector; default: 20")


def facts(options: argparse.Namespace) -> list[str]:
    if not set(options.kinds or ()) <= WORKERS.keys():
        raise Unable(f"--kinds takes {', '.join(WORKERS)}")
    return machine(["torch", "tensordict", "torchrl", "gymnasium"])


def tables(options: argparse.Namespace) -> Iterator[Table]:
    quick = {"kinds": ["MultiSyncCollector"], "widths": (64,), "turns": 1, "batches": 3}
    plan = {"kinds": list(WORKERS), "widths": (64, 1024), "turns": 3, "batches": 20}
    plan |= chosen(options, list(plan), quick)
    variants = [OURS] if options.figures else [OURS, VERSIONS, PLAIN]
    warnings.simplefilter("ignore", DeprecationWarning)
    found = measure(variants=variants, **plan)
    rates = {key: Figure(tuple(one.rates)) for key, one in found.items()}
    updates = {key: Figure(tuple(one.updates)) for key, one in found.items()}
    starts = {key: Figure(tuple(one.starts)) for key, one in found.items()}
    cases = list(dict.fromkeys(key[:2] for key in found))
    head = ["collector", "policy, MB", OURS, VERSIONS, PLAIN, "of versions", "of torchrl"]
    for title, note, figures, scale, digits in (
        ("Frames per second", _NOTE, rates, 1.0, 0),
        ("update_policy_weights_()", "Milliseconds, median (min .. max) of all updates.", updates, 1e3, 2),
        ("From the constructor to the first batch", "Seconds, of the turns.", starts, 1.0, 1),
    ):
        rows = [_row(figures, case, scale, digits, more_is_better=figures is rates) for case in cases]
        yield Table(title, note, head, rows, (0, 1))
    yield targets_table(
        [
            target(
                "{kind}, {width} units: seconds of a frame, of torchrl's with versions",
                ratio(rates.get((*case, VERSIONS)), rates[(*case, OURS)]),
                kind=case[0],
                width=case[1],
            )
            for case in cases
        ]
    )


def _row(
    figures: dict[tuple[str, int, str], Figure],
    case: tuple[str, int],
    scale: float,
    digits: int,
    *,
    more_is_better: bool,
) -> list[Any]:
    """Return the cells of one kind of collector and policy."""
    kind, width = case
    ours, versions, plain = (figures.get((*case, name), Figure(())) for name in (OURS, VERSIONS, PLAIN))
    megabytes = sum(one.numel() for one in make_policy(width).parameters()) * 4 / 1e6
    return [
        kind,
        f"{megabytes:.2f}",
        ours.cell(scale, digits, more_is_better=more_is_better),
        versions.show(scale, digits),
        plain.show(scale, digits),
        show_ratio(ours, versions),
        show_ratio(ours, plain),
    ]
