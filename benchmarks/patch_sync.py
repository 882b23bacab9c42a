"""From ``send()`` to applied, over schemes of one machine: dense beside patches."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator
from multiprocessing.connection import Connection

import numpy as np
import torch
import torch.multiprocessing as mp
from torch import nn

from benchmarks.patch_updates import change, layered
from benchmarks.report import Figure, Table, ratio
from weight_update import (
    MultiProcessWeightSyncScheme,
    PatchEncoding,
    SharedMemWeightSyncScheme,
    SyncReport,
    WeightStrategy,
    WeightSyncScheme,
)
from weight_update.wire.memory import digest

__all__ = ["digests", "empty_model", "measure_sync", "sync_table"]

SCHEMES = {"SharedMem": SharedMemWeightSyncScheme, "MultiProcess": MultiProcessWeightSyncScheme}
ENCODINGS = {
    "dense": "dense",
    "patch, relative": PatchEncoding(values="relative"),
    "patch, raw": PatchEncoding(values="raw"),
    "patch, zstd": PatchEncoding(compression="zstd"),
}
_FRACTION = 0.01
_WARM = 2

Key = tuple[str, str]
Weights = dict[str, torch.Tensor]
Sent = tuple[float, SyncReport]


def measure_sync(megabytes: float, turns: int) -> dict[Key, list[Sent]]:
    """Each turn 1 % of the weights change by a few ulp, and every side sends them to its one receiver.

    Raises:
        RuntimeError: a receiver ended with other weights than the trainer, or a patch was not sent as one.
        EOFError: the worker's process died.
    """
    weights, random = layered(megabytes), np.random.default_rng(0)
    found: dict[Key, list[Sent]] = {(scheme, label): [] for scheme in SCHEMES for label in ENCODINGS}
    with _connected(list(found), weights) as (schemes, pipe):
        for _ in range(_WARM + turns):
            change(weights, _FRACTION, "1..4 ulp", random)
            for key, scheme in schemes.items():
                start = time.perf_counter()
                report = scheme.send(weights=weights)
                found[key].append((time.perf_counter() - start, report))
        pipe.send("digests")
        for key, found_there in zip(found, pipe.recv(), strict=True):
            _check(key, found_there == digests(weights), found[key][-1][1])
    return {key: sent[_WARM:] for key, sent in found.items()}


@contextlib.contextmanager
def _connected(keys: list[Key], weights: Weights) -> Iterator[tuple[dict[Key, WeightSyncScheme], Connection]]:
    """A sender for each key, and one process with a receiver for each; only one is busy at a time."""
    ctx = mp.get_context("spawn")
    schemes = {}
    for name, label in keys:
        scheme = SCHEMES[name](strategy=WeightStrategy("state_dict", encoding=ENCODINGS[label]))
        scheme.init_on_sender(weights=weights, devices=[torch.device("cpu")], num_workers=1, ctx=ctx)
        schemes[name, label] = scheme
    pipe, theirs = ctx.Pipe()
    shapes = {name: tuple(value.shape) for name, value in weights.items()}
    process = ctx.Process(target=_receive, args=(list(schemes.values()), shapes, theirs), daemon=True)
    process.start()
    theirs.close()
    try:
        for scheme in schemes.values():
            scheme.connect()
        yield schemes, pipe
    finally:
        pipe.close()  # ends the process
        for scheme in schemes.values():
            scheme.shutdown()
        process.join(10.0)


def _receive(schemes: list[WeightSyncScheme], shapes: dict[str, tuple[int, ...]], pipe: Connection) -> None:
    """Body of the process with the receivers."""
    torch.set_num_threads(1)
    models = []
    for scheme in schemes:
        models.append(empty_model(shapes))
        scheme.init_on_receiver(model=models[-1], worker_idx=0)
        scheme.connect()
    with contextlib.suppress(EOFError):
        while pipe.recv() == "digests":
            pipe.send([digests(model.state_dict()) for model in models])
    for scheme in schemes:
        scheme.shutdown()


def empty_model(shapes: dict[str, tuple[int, ...]]) -> nn.Module:
    """A module with parameters of these names, which have one dot, in bfloat16."""
    layers: dict[str, nn.ParameterDict] = {}
    for name, shape in shapes.items():
        layer, _, leaf = name.partition(".")
        value = nn.Parameter(torch.zeros(shape, dtype=torch.bfloat16), requires_grad=False)
        layers.setdefault(layer, nn.ParameterDict())[leaf] = value
    return nn.ModuleDict(layers)


def digests(weights: Weights) -> dict[str, str]:
    """Of each tensor."""
    return {name: digest(value.cpu()) for name, value in weights.items()}


def _check(key: Key, same: bool, report: SyncReport) -> None:
    if not same:
        raise RuntimeError(f"{key}: the receiver has other weights than the trainer")
    if report.encoding != key[1].partition(",")[0]:
        raise RuntimeError(f"{key}: sent as {report.encoding}")


def sync_table(megabytes: float, found: dict[Key, list[Sent]]) -> Table:
    """One row for each scheme and encoding."""
    rows = []
    for (scheme, label), sent in found.items():
        total, dense = _figure(sent), _figure(found[scheme, "dense"])
        reports = [report for _, report in sent]
        stages = [Figure(tuple(r.seconds.get(name, 0.0) for r in reports)) for name in ("encode", "ack")]
        stall = Figure(tuple(report.stall_seconds[0] for report in reports))
        rows.append(
            [
                scheme,
                label,
                f"{reports[-1].wire_bytes / 1e6:.2f}",
                *(figure.show(1e3, 1) for figure in (total, *stages, stall)),
                f"{ratio(total, dense) or 0.0:.2f}",
            ]
        )
    note = (
        "Milliseconds, median (least .. most); 1 % of the elements change by 1 to 4 ulp in bfloat16. One\n"
        "worker process on the same machine: there is no network that a smaller update could save."
    )
    head = ["scheme", "encoding", "MB sent", "send()", "encode", "ack", "stall", "of dense"]
    return Table(f"send() until applied, {megabytes:.0f} MB", note, head, rows)


def _figure(sent: list[Sent]) -> Figure:
    return Figure(tuple(seconds for seconds, _ in sent))
