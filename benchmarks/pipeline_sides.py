"""Senders that differ in how many chunks are in flight, each with a worker in a process of its own."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from multiprocessing.connection import Connection
from typing import Any

import torch
import torch.multiprocessing as mp

from benchmarks.network import Network
from benchmarks.patch_sync import digests, empty_model
from benchmarks.pipeline_work import Conversion, Work, seconds_of_a_sine
from weight_update import (
    BucketEncoding,
    DistributedWeightSyncScheme,
    SharedMemWeightSyncScheme,
    SyncReport,
    WeightStrategy,
    WeightSyncScheme,
)

__all__ = ["PLACES", "Place", "Side", "balance", "connected"]


@dataclass(frozen=True)
class Place:
    """Between sender and worker.

    Attributes:
        name: as shown.
        rate: of the link between them, as ``tc`` writes it; None for one host.
        sockets: whether they believe to be on two hosts.
    """

    name: str
    rate: str | None = None
    sockets: bool = False

    @property
    def shaped(self) -> bool:
        """Whether there is a link whose rate is limited."""
        return self.rate is not None


PLACES = (
    Place("shared memory"),
    Place("sockets of one machine", sockets=True),
    Place("a link of 1 Gbit/s", rate="1gbit", sockets=True),
)


class Side:
    """One sender.

    Attributes:
        name: how many chunks are in flight.
        tensors: number of tensors.
    """

    def __init__(
        self,
        limit: int | None,
        scheme: WeightSyncScheme,
        convert: Conversion,
        weights: dict[str, torch.Tensor],
    ) -> None:
        self.name = {None: "whole", 1: "serial"}.get(limit, f"{limit} in flight")
        self.tensors = len(weights)
        self.scheme = scheme
        self.pipe: Connection | None = None
        self._convert, self._weights = convert, weights

    def send(self, work: Work) -> SyncReport:
        """One update."""
        self._convert.work = work
        return self.scheme.send()

    def require_same(self, work: Work) -> None:
        """Raise RuntimeError unless the worker has the weights of the trainer."""
        first = next(iter(self._weights.values()))
        first.add_(1)
        self.send(work)
        assert self.pipe is not None
        self.pipe.send("digests")
        if self.pipe.recv() != digests(self._weights):
            raise RuntimeError(f"{self.name}: the worker has other weights than the trainer")

    @property
    def chunk_megabytes(self) -> float:
        """Size of the largest chunk."""
        encoding = self.scheme.strategy.encoding
        assert isinstance(encoding, BucketEncoding)
        return (encoding.bucket_size + 64) / 1e6

    def peak_megabytes(self) -> tuple[float, float]:
        """All slots, and all converted tensors that were there at once, while an update was sent."""
        self.send(Work(copies=True))
        sender = self.scheme._sender
        assert sender is not None
        slots = sum(slot.buffer.tensor.nbytes for slot in sender._pool._slots)
        return slots / 1e6, self._convert.most / 1e6


def balance(work: Work, side: Side, share: float) -> Work:
    """A work that takes ``share`` times as long as the transfer of ``side``, which is serial."""
    plain = replace(work, sines=0)
    reports = [side.send(plain) for _ in range(3)]
    spent = [report.seconds for report in reports[1:]]
    made = min(one["convert"] + one["encode"] for one in spent)
    moved = min(one["send"] + one["ack"] for one in spent)
    lacking = share * moved - made
    return replace(work, sines=max(0, round(lacking / seconds_of_a_sine() / side.tensors)))


@contextlib.contextmanager
def connected(
    place: Place, limits: Sequence[int | None], weights: dict[str, torch.Tensor], chunks: int
) -> Iterator[list[Side]]:
    """One side for each of ``limits``, connected; the sides of a place share its link."""
    with contextlib.ExitStack() as stack:
        network = None
        if place.rate is not None:
            network = stack.enter_context(Network(["trainer", "worker"]))
            stack.enter_context(network.inside("trainer"))
            network.shape("trainer", place.rate)
        yield [stack.enter_context(_side(place, network, limit, weights, chunks)) for limit in limits]


@contextlib.contextmanager
def _side(
    place: Place,
    network: Network | None,
    limit: int | None,
    weights: dict[str, torch.Tensor],
    chunks: int,
) -> Iterator[Side]:
    convert = Conversion()
    nbytes = sum(value.nbytes for value in weights.values())
    size = -(-nbytes // chunks // 64) * 64 + 64
    strategy = WeightStrategy(
        "state_dict", encoding=BucketEncoding(bucket_size=size), convert=convert, max_in_flight=limit
    )
    scheme = _scheme(place, network, strategy)
    ctx = mp.get_context("spawn")
    scheme.init_on_sender(weights=weights, num_workers=1, ctx=ctx)
    side = Side(limit, scheme, convert, weights)
    side.pipe, theirs = ctx.Pipe()
    shapes = {name: tuple(value.shape) for name, value in weights.items()}
    worker = ctx.Process(target=_receive, args=(place, network, scheme, shapes, theirs), daemon=True)
    worker.start()
    theirs.close()
    try:
        scheme.connect()
        yield side
    finally:
        side.pipe.close()  # ends the worker
        worker.join(10.0)
        scheme.shutdown()


def _scheme(place: Place, network: Network | None, strategy: WeightStrategy) -> WeightSyncScheme:
    if not place.sockets:
        return SharedMemWeightSyncScheme(strategy=strategy)
    os.environ["WEIGHT_UPDATE_HOST"] = "trainer"
    options: dict[str, Any] = {} if network is None else {"address": network.address["trainer"]}
    return DistributedWeightSyncScheme(strategy=strategy, **options)


def _receive(
    place: Place,
    network: Network | None,
    scheme: WeightSyncScheme,
    shapes: dict[str, tuple[int, ...]],
    pipe: Connection,
) -> None:
    """Body of a worker."""
    if network is not None:
        network.enter("worker")
    if place.sockets:
        os.environ["WEIGHT_UPDATE_HOST"] = "worker"
    torch.set_num_threads(1)
    model = empty_model(shapes)
    scheme.init_on_receiver(model=model, worker_idx=0)
    scheme.connect()
    with contextlib.suppress(EOFError):
        while pipe.recv() == "digests":
            pipe.send(digests(model.state_dict()))
    scheme.shutdown()
