"""Trainer and worker on one GPU: slots on it, opened by CUDA IPC, against slots in host memory."""

from __future__ import annotations

import time

import torch

from benchmarks.gpu_sync import Key, Sent, measure_schemes, seconds_of
from benchmarks.patch_updates import Update
from benchmarks.report import Figure, Table, ratio
from weight_update import BucketEncoding, SharedMemWeightSyncScheme, WeightStrategy
from weight_update.wire.schema import WeightSchema

__all__ = ["colocated_table", "measure_colocated", "measure_copy", "strategies_for"]

HOST = "host memory"
_BUCKETS = 8


def strategies_for(nbytes: int) -> dict[str, WeightStrategy]:
    """What is compared, by the name in the table, for weights of so many bytes."""
    buckets = BucketEncoding(bucket_size=max(nbytes // _BUCKETS, 64))
    return {
        "dense": WeightStrategy("state_dict"),
        "bucket": WeightStrategy("state_dict", encoding=buckets),
        "bucket, 2 in flight": WeightStrategy("state_dict", encoding=buckets, max_in_flight=2),
    }


def measure_colocated(update: Update, device: torch.device, turns: int) -> dict[Key, list[Sent]]:
    """Every strategy with every place for slots; on the CPU there is only host memory."""
    places = {HOST: None, "the GPU": str(device)} if device.type == "cuda" else {HOST: None}
    schemes = {
        (place, label): SharedMemWeightSyncScheme(strategy, slot_device=slot_device)
        for label, strategy in strategies_for(WeightSchema.of(update.old).nbytes).items()
        for place, slot_device in places.items()
    }
    return measure_schemes(update, device, turns, schemes)


def measure_copy(update: Update, device: torch.device, turns: int) -> Figure:
    """One plain copy of all tensors into a flat buffer on the device: what no update can do without."""
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


def colocated_table(megabytes: float, copy: Figure, found: dict[Key, list[Sent]]) -> Table:
    """One row for each place of the slots and each strategy."""
    rows = []
    for (place, label), sent in found.items():
        total = seconds_of(sent)
        reports = [report for _, report in sent]
        stages = [Figure(tuple(r.seconds.get(name, 0.0) for r in reports)) for name in ("encode", "ack")]
        stall = Figure(tuple(report.stall_seconds[0] for report in reports))
        times = [figure.show(1e3, 2) for figure in (total, *stages, stall)]
        against = [ratio(total, seconds_of(found[HOST, label])), ratio(total, copy)]
        rows.append([place, label, *times, *(f"{value or 0.0:.2f}" for value in against)])
    note = (
        "Milliseconds, median (least .. most). Weights of trainer and worker lie on one GPU. One plain copy\n"
        f"there: {copy.show(1e3, 2)}."
    )
    head = ["slots in", "encoding", "send()", "encode", "ack", "stall", "of host memory", "of one copy"]
    return Table(f"Colocated, {megabytes:.0f} MB", note, head, rows)
