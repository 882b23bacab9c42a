"""Weights on a GPU: dense and patch, to the CPU's memory and to a worker on the GPU, also by CUDA IPC.

::

    python -m benchmarks gpu                        # some minutes on one GPU
    python -m benchmarks gpu --quick                # half a minute, to see that it works
    python -m benchmarks gpu --rst docs/benchmark_gpu.rst

Needs torch and tensordict alone; ``nvcomp_lz4`` is measured where the extra ``nvcomp`` is installed. Without
a CUDA device it says so and exits with status 2.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import torch

from benchmarks.gpu_times import Variant, build_table, dense_table, measure_build, measure_dense
from benchmarks.report import Figure, Table, machine, parser, publish, ratio, say
from benchmarks.sending import Key, Sent, measure_schemes, stages
from benchmarks.updates import Update, by_chance, layered
from weight_update import (
    BucketEncoding,
    DistributedWeightSyncScheme,
    Encoding,
    PatchEncoding,
    SharedMemWeightSyncScheme,
    WeightStrategy,
    WeightSyncScheme,
)
from weight_update.compression import resolve_compression
from weight_update.wire.schema import WeightSchema

__all__ = ["Plan", "main", "measure", "plan"]

SCHEMES = {"SharedMem": SharedMemWeightSyncScheme, "Distributed": DistributedWeightSyncScheme}


def _encodings(device: torch.device) -> dict[str, str | Encoding]:
    found: dict[str, str | Encoding] = {"dense": "dense", "patch": PatchEncoding()}
    if device.type == "cuda":
        found["patch, made on the GPU"] = PatchEncoding(snapshot_device="cuda", transport_device="cuda")
    return found


def _measure(
    update: Update, device: torch.device, turns: int, schemes: Mapping[Key, WeightSyncScheme]
) -> dict[Key, list[Sent]]:
    """Turn the weights from old to new or back in each turn, and send them by every scheme."""
    states = [[value.to(device) for value in side.values()] for side in (update.old, update.new)]
    live = {name: value.clone() for name, value in zip(update.old, states[0], strict=True)}

    def advance(turn: int) -> None:
        torch._foreach_copy_(list(live.values()), states[1 - turn % 2])

    return measure_schemes(schemes, live, advance, turns, str(device))


def _measure_sync(update: Update, device: torch.device, turns: int) -> dict[Key, list[Sent]]:
    schemes = {
        (name, label): SCHEMES[name](strategy=WeightStrategy("state_dict", encoding=encoding))
        for name in SCHEMES
        for label, encoding in _encodings(device).items()
    }
    return _measure(update, device, turns, schemes)


def _sync_table(megabytes: float, update: str, found: dict[Key, list[Sent]]) -> Table:
    rows = []
    for (scheme, label), sent in found.items():
        figures = stages(sent)
        times = [figure.show(1e3, 1) for figure in figures]
        of_dense = f"{ratio(figures[0], stages(found[scheme, 'dense'])[0]) or 0.0:.2f}"
        rows.append([scheme, label, f"{sent[-1][1].wire_bytes / 1e6:.2f}", *times, of_dense])
    note = f"Milliseconds, median (min .. max); {update}. Trainer and worker share one GPU."
    head = ["scheme", "encoding", "MB sent", "send()", "encode", "ack", "stall", "of dense"]
    return Table(f"send() until applied, {megabytes:.0f} MB", note, head, rows)


HOST = "host memory"
_BUCKETS = 8


def _strategies(nbytes: int) -> dict[str, WeightStrategy]:
    buckets = BucketEncoding(bucket_size=max(nbytes // _BUCKETS, 64))
    return {
        "dense": WeightStrategy("state_dict"),
        "bucket": WeightStrategy("state_dict", encoding=buckets),
        "bucket, 2 in flight": WeightStrategy("state_dict", encoding=buckets, max_in_flight=2),
    }


def _measure_colocated(update: Update, device: torch.device, turns: int) -> dict[Key, list[Sent]]:
    """Measure every strategy with slots in host memory and, where there is one, on the GPU."""
    places = {HOST: None, "the GPU": str(device)} if device.type == "cuda" else {HOST: None}
    schemes = {
        (place, label): SharedMemWeightSyncScheme(strategy, slot_device=slot_device)
        for label, strategy in _strategies(WeightSchema.of(update.old).nbytes).items()
        for place, slot_device in places.items()
    }
    return _measure(update, device, turns, schemes)


def _measure_copy(update: Update, device: torch.device, turns: int) -> Figure:
    """Time one plain copy of all tensors into a flat buffer on the device, which every update needs."""
    schema = WeightSchema.of(update.old)
    live = [value.to(device) for value in update.old.values()]
    views = schema.views(torch.zeros(schema.nbytes, dtype=torch.uint8, device=device))
    seconds = []
    for _ in range(1 + turns):
        start = time.perf_counter()
        torch._foreach_copy_(views, live)
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        seconds.append(time.perf_counter() - start)
    return Figure(tuple(seconds[1:]))


def _colocated_table(megabytes: float, copy: Figure, found: dict[Key, list[Sent]]) -> Table:
    rows = []
    for (place, label), sent in found.items():
        figures = stages(sent)
        times = [figure.show(1e3, 2) for figure in figures]
        against = [ratio(figures[0], stages(found[HOST, label])[0]), ratio(figures[0], copy)]
        rows.append([place, label, *times, *(f"{value or 0.0:.2f}" for value in against)])
    note = (
        "Milliseconds, median (min .. max). Weights of trainer and worker lie on one GPU. One plain copy\n"
        f"there: {copy.show(1e3, 2)}."
    )
    head = ["slots in", "encoding", "send()", "encode", "ack", "stall", "of host memory", "of one copy"]
    return Table(f"Colocated, {megabytes:.0f} MB", note, head, rows)


_FRACTIONS = (0.0001, 0.01, 0.05, 0.2)
_SYNC_FRACTION = 0.01


@dataclass(frozen=True)
class Plan:
    """The options of one run.

    Attributes:
        megabytes: size of the model, in bfloat16.
        turns: number of turns of each measurement, after one turn that warms up.
        fractions: of elements that change.
        variants: ways to build a patch.
    """

    megabytes: float
    turns: int
    fractions: tuple[float, ...]
    variants: tuple[Variant, ...]


def plan(megabytes: float | None, quick: bool, compressions: tuple[str, ...]) -> Plan:
    """Return the plan for these options; ``nvcomp_lz4`` goes with ``transport_device="cuda"`` only."""
    variants = [
        Variant(snapshot, transport, compression, values)
        for values in ("raw", "relative")
        for compression in compressions
        for snapshot in ("cpu", "cuda")
        for transport in ("cpu", "cuda")
        if transport == "cuda" or compression == "none"
    ]
    fractions = _FRACTIONS[1:2] if quick else _FRACTIONS
    return Plan(megabytes or (20.0 if quick else 500.0), 2 if quick else 9, fractions, tuple(variants))


def main(arguments: list[str] | None = None) -> int:
    """Parse, measure, print; return the exit status."""
    options = _parser().parse_args(arguments)
    if not torch.cuda.is_available():
        print("benchmarks gpu needs a CUDA device, and torch sees none here", file=sys.stderr)
        return 2
    chosen = plan(options.megabytes, options.quick, _compressions())
    facts = [*machine(("torch", "tensordict")), _gpu()]
    return publish("gpu", facts, measure(chosen, torch.device("cuda")), options.rst)


def measure(chosen: Plan, device: torch.device) -> Iterator[Table]:
    """Yield the tables of a run, each as soon as it is measured."""
    old = layered(chosen.megabytes)
    yield dense_table(chosen.megabytes, measure_dense(old, device, chosen.turns))
    for fraction in chosen.fractions:
        say(f"patches: {fraction:.2%} of {chosen.megabytes:g} MB")
        update = by_chance(old, fraction, "1..4 ulp")
        yield build_table(update.name, measure_build(update, chosen.variants, device, chosen.turns))
    say("send() until applied")
    update = by_chance(old, _SYNC_FRACTION, "1..4 ulp")
    yield _sync_table(chosen.megabytes, update.name, _measure_sync(update, device, chosen.turns))
    say("slots on the GPU and in host memory")
    copy = _measure_copy(update, device, chosen.turns)
    yield _colocated_table(chosen.megabytes, copy, _measure_colocated(update, device, chosen.turns))


def _compressions() -> tuple[str, ...]:
    try:
        resolve_compression("nvcomp_lz4")
    except ImportError as reason:
        say(f"without nvcomp_lz4: {reason}")
        return ("none",)
    return ("none", "nvcomp_lz4")


def _gpu() -> str:
    found = torch.cuda.get_device_properties(torch.device("cuda"))
    return f"GPU: {found.name}, {found.total_memory / 1e9:.0f} GB, CUDA {torch.version.cuda}"


def _parser() -> argparse.ArgumentParser:
    options = parser("gpu", __doc__, "20 MB, 2 turns, 1 %% changed only")
    options.add_argument("--megabytes", type=float, help="size of the model in bfloat16; default: 500")
    return options
