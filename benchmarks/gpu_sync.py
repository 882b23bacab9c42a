"""From ``send()`` to applied, from weights on a GPU to a worker process whose model is on it too."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator, Mapping
from multiprocessing.connection import Connection

import torch
import torch.multiprocessing as mp

from benchmarks.patch_sync import digests, empty_model
from benchmarks.patch_updates import Update
from benchmarks.report import Figure, Table, ratio
from weight_update import (
    DistributedWeightSyncScheme,
    Encoding,
    PatchEncoding,
    SharedMemWeightSyncScheme,
    SyncReport,
    WeightStrategy,
    WeightSyncScheme,
)

__all__ = ["Key", "Sent", "encodings_for", "measure_schemes", "measure_sync", "seconds_of", "sync_table"]

SCHEMES = {"SharedMem": SharedMemWeightSyncScheme, "Distributed": DistributedWeightSyncScheme}
_WARM = 2

Key = tuple[str, str]
Weights = dict[str, torch.Tensor]
Sent = tuple[float, SyncReport]


def encodings_for(device: torch.device) -> dict[str, str | Encoding]:
    """What is compared, by the name in the table."""
    found: dict[str, str | Encoding] = {"dense": "dense", "patch": PatchEncoding()}
    if device.type == "cuda":
        found["patch, made on the GPU"] = PatchEncoding(snapshot_device="cuda", transport_device="cuda")
    return found


def measure_sync(update: Update, device: torch.device, turns: int) -> dict[Key, list[Sent]]:
    """Each of our schemes with each encoding; see :func:`measure_schemes`."""
    schemes = {
        (name, label): SCHEMES[name](strategy=WeightStrategy("state_dict", encoding=encoding))
        for name in SCHEMES
        for label, encoding in encodings_for(device).items()
    }
    return measure_schemes(update, device, turns, schemes)


def measure_schemes(
    update: Update, device: torch.device, turns: int, schemes: Mapping[Key, WeightSyncScheme]
) -> dict[Key, list[Sent]]:
    """In each turn the weights go from old to new or back, and every scheme sends them to its one receiver.

    Raises:
        RuntimeError: a receiver ended with other weights than the trainer.
        EOFError: the worker's process died.
    """
    states = [{name: value.to(device) for name, value in side.items()} for side in (update.old, update.new)]
    live = {name: value.clone() for name, value in states[0].items()}
    found: dict[Key, list[Sent]] = {key: [] for key in schemes}
    with _connected(list(schemes.values()), live, device) as pipe:
        for turn in range(_WARM + turns):
            torch._foreach_copy_(list(live.values()), list(states[1 - turn % 2].values()))
            for key, scheme in schemes.items():
                _idle(device)
                start = time.perf_counter()
                report = scheme.send(weights=live)  # returns when the worker has applied it
                found[key].append((time.perf_counter() - start, report))
        pipe.send("digests")
        for key, there in zip(found, pipe.recv(), strict=True):
            if there != digests(live):
                raise RuntimeError(f"{key}: the receiver has other weights than the trainer")
    return {key: sent[_WARM:] for key, sent in found.items()}


def _idle(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


@contextlib.contextmanager
def _connected(schemes: list[WeightSyncScheme], live: Weights, device: torch.device) -> Iterator[Connection]:
    """The senders, and one process with a receiver for each; only one is busy at a time."""
    ctx = mp.get_context("spawn")
    for scheme in schemes:
        scheme.init_on_sender(weights=live, devices=[device], num_workers=1, ctx=ctx)
    pipe, theirs = ctx.Pipe()
    shapes = {name: tuple(value.shape) for name, value in live.items()}
    arguments = (schemes, shapes, device, theirs)
    process = ctx.Process(target=_receive, args=arguments, daemon=True)
    process.start()
    theirs.close()
    try:
        for scheme in schemes:
            scheme.connect()
        yield pipe
    finally:
        pipe.close()  # ends the process, which says goodbye while the senders are still there
        process.join(30.0)
        for scheme in schemes:
            scheme.shutdown()


def _receive(
    schemes: list[WeightSyncScheme],
    shapes: dict[str, tuple[int, ...]],
    device: torch.device,
    pipe: Connection,
) -> None:
    """Body of the process with the receivers."""
    models = []
    for scheme in schemes:
        models.append(empty_model(shapes).to(device))
        scheme.init_on_receiver(model=models[-1], worker_idx=0)
        scheme.connect()
    with contextlib.suppress(EOFError):
        while pipe.recv() == "digests":
            pipe.send([digests(model.state_dict()) for model in models])
    for scheme in schemes:
        scheme.shutdown()


def sync_table(megabytes: float, update: str, found: dict[Key, list[Sent]]) -> Table:
    """One row for each scheme and encoding."""
    rows = []
    for (scheme, label), sent in found.items():
        total, dense = seconds_of(sent), seconds_of(found[scheme, "dense"])
        reports = [report for _, report in sent]
        stages = [Figure(tuple(r.seconds.get(name, 0.0) for r in reports)) for name in ("encode", "ack")]
        stall = Figure(tuple(report.stall_seconds[0] for report in reports))
        times = [figure.show(1e3, 1) for figure in (total, *stages, stall)]
        megabytes_sent = f"{reports[-1].wire_bytes / 1e6:.2f}"
        rows.append([scheme, label, megabytes_sent, *times, f"{ratio(total, dense) or 0.0:.2f}"])
    note = f"Milliseconds, median (least .. most); {update}. Trainer and worker share one GPU."
    head = ["scheme", "encoding", "MB sent", "send()", "encode", "ack", "stall", "of dense"]
    return Table(f"send() until applied, {megabytes:.0f} MB", note, head, rows)


def seconds_of(sent: list[Sent]) -> Figure:
    """From the call of ``send()`` to its return."""
    return Figure(tuple(seconds for seconds, _ in sent))
