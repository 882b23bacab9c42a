"""From ``send()`` to applied: schemes that take turns, each with receivers in other processes."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection

import torch
import torch.multiprocessing as mp
from torch import nn

from benchmarks.network import Network
from benchmarks.report import Figure
from weight_update import SyncReport, WeightSyncScheme
from weight_update.wire.memory import digest

__all__ = ["Key", "Place", "Sent", "Weights", "connected", "measure_schemes", "require_same", "stages"]

_WARM = 2

Key = tuple[str, str]
"""Scheme and encoding."""

Weights = dict[str, torch.Tensor]

Sent = tuple[float, SyncReport]
"""Seconds from the call of ``send()`` to its return, and the report."""


@dataclass(frozen=True)
class Place:
    """The place of a receiver.

    Attributes:
        device: of its model.
        host: name of the host that it takes for its own; None for this one.
        network: network that has a host of that name; None for no network.
    """

    device: str = "cpu"
    host: str | None = None
    network: Network | None = None


def measure_schemes(
    schemes: Mapping[Key, WeightSyncScheme],
    live: Weights,
    advance: Callable[[int], None],
    turns: int,
    device: str = "cpu",
) -> dict[Key, list[Sent]]:
    """Let every scheme send ``live`` to its one receiver, in turns.

    Args:
        schemes: not initialized yet.
        live: the trainer's weights.
        advance: changes ``live`` in place before turn ``n``.
        turns: number of turns that are kept.
        device: of the trainer's and the receivers' weights.

    Raises:
        RuntimeError: a receiver ended with other weights than the trainer.
        EOFError: the receivers' process died.
    """
    found: dict[Key, list[Sent]] = {key: [] for key in schemes}
    with connected(list(schemes.values()), live, [Place(device)]) as pipes:
        for turn in range(_WARM + turns):
            advance(turn)
            for key, scheme in schemes.items():
                if device.startswith("cuda"):
                    torch.cuda.synchronize(device)
                start = time.perf_counter()
                report = scheme.send(weights=live)  # returns when the worker has applied it
                found[key].append((time.perf_counter() - start, report))
        require_same(pipes, live, list(found))
    return {key: sent[_WARM:] for key, sent in found.items()}


@contextlib.contextmanager
def connected(
    schemes: Sequence[WeightSyncScheme], weights: Weights, places: Sequence[Place]
) -> Iterator[list[Connection]]:
    """Start a process at each place that receives by every scheme; yield pipes to the processes."""
    ctx = mp.get_context("spawn")
    for scheme in schemes:
        devices = [torch.device(place.device) for place in places]
        scheme.init_on_sender(weights=weights, devices=devices, num_workers=len(places), ctx=ctx)
    shapes = {name: tuple(value.shape) for name, value in weights.items()}
    pipes, processes = [], []
    for idx, place in enumerate(places):
        pipe, theirs = ctx.Pipe()
        arguments = (schemes, shapes, place, idx, theirs)
        processes.append(ctx.Process(target=_receive, args=arguments, daemon=True))
        processes[-1].start()
        pipes.append(pipe)
        theirs.close()
    try:
        for scheme in schemes:
            scheme.connect()
        yield pipes
    finally:
        for pipe in pipes:
            pipe.close()  # ends the process, which says goodbye while the senders are still there
        for process in processes:
            process.join(30.0)
        for scheme in schemes:
            scheme.shutdown()


def _receive(
    schemes: Sequence[WeightSyncScheme],
    shapes: dict[str, tuple[int, ...]],
    place: Place,
    idx: int,
    pipe: Connection,
) -> None:
    """Run the process with the receivers until the pipe is closed."""
    if place.network is not None and place.host is not None:
        place.network.enter(place.host)
    if place.host is not None:
        os.environ["WEIGHT_UPDATE_HOST"] = place.host
    if place.device == "cpu":
        torch.set_num_threads(1)
    models = []
    for scheme in schemes:
        models.append(_empty_model(shapes).to(place.device))
        scheme.init_on_receiver(model=models[-1], worker_idx=idx)
        scheme.connect()
    with contextlib.suppress(EOFError):
        while pipe.recv() == "digests":
            pipe.send([_digests(model.state_dict()) for model in models])
    for scheme in schemes:
        scheme.shutdown()


def _empty_model(shapes: dict[str, tuple[int, ...]]) -> nn.Module:
    """Return a module with bfloat16 parameters of these names, each of which has one dot."""
    layers: dict[str, nn.ParameterDict] = {}
    for name, shape in shapes.items():
        layer, _, leaf = name.partition(".")
        value = nn.Parameter(torch.zeros(shape, dtype=torch.bfloat16), requires_grad=False)
        layers.setdefault(layer, nn.ParameterDict())[leaf] = value
    return nn.ModuleDict(layers)


def _digests(weights: Weights) -> dict[str, str]:
    return {name: digest(value.cpu()) for name, value in weights.items()}


def require_same(pipes: Sequence[Connection], weights: Weights, labels: Sequence[object]) -> None:
    """Raise RuntimeError unless every receiver has the trainer's weights; ``labels`` name the schemes."""
    for pipe in pipes:
        pipe.send("digests")
    expected = _digests(weights)
    for pipe in pipes:
        for label, found in zip(labels, pipe.recv(), strict=True):
            if found != expected:
                raise RuntimeError(f"{label}: the receiver has other weights than the trainer")


def stages(sent: Sequence[Sent]) -> tuple[Figure, Figure, Figure, Figure]:
    """Return the seconds of ``send()``, and of its encoding, acknowledgement and stall."""
    reports = [report for _, report in sent]
    encode, ack = (Figure(tuple(r.seconds.get(name, 0.0) for r in reports)) for name in ("encode", "ack"))
    stall = Figure(tuple(report.stall_seconds[0] for report in reports))
    return Figure(tuple(seconds for seconds, _ in sent)), encode, ack, stall
