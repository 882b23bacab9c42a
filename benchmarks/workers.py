"""The receiving processes: one that waits for orders, and one that computes without pause."""

from __future__ import annotations

import os
import time
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import Any

import torch

from benchmarks.models import Model

__all__ = ["Capture", "Orders", "idle_worker"]


@dataclass
class Capture:
    """What a computing worker saw: when each forward pass began, and with which version's mark.

    Attributes:
        starts: seconds on the machine's monotonic clock, the same in every process.
        versions: what the scheme called the version before each of them; empty if it has no versions.
    """

    starts: list[float]
    versions: list[int]


class Orders:
    """How the sender's process talks to one worker.

    Attributes:
        conn: orders as strings, and answers.
        capture: a shared integer; 1 while forward passes are to be recorded, 2 when that is over.
    """

    def __init__(self, conn: Connection, capture: Any) -> None:
        self.conn, self.capture = conn, capture


def idle_worker(scheme: Any, idx: int, megabytes: float, tensors: int, orders: Orders) -> None:
    """Body of a worker: joins, then sleeps until an order comes."""
    torch.set_num_threads(1)
    model = Model(megabytes, tensors)
    scheme.init_on_receiver(model_id="policy", model=model, worker_idx=idx)
    scheme.connect(worker_idx=idx)
    orders.conn.send(os.getpid())
    while True:
        try:
            order = orders.conn.recv()
        except EOFError:
            break
        if order == "marks":
            orders.conn.send(model.marks())
        elif order == "compute":
            orders.conn.send(_compute(model, scheme, orders))
        else:
            break
    scheme.shutdown()


def _compute(model: Model, scheme: Any, orders: Orders) -> Capture:
    """Forward passes without pause until an order comes; those while ``capture`` is 1 are recorded."""
    value = torch.ones(1, 16)
    counts = hasattr(type(scheme), "version")
    starts: list[float] = []
    versions: list[int] = []
    recording = orders.capture
    with torch.no_grad():
        while recording.value == 0:
            model(value)
        while recording.value == 1:
            starts.append(time.perf_counter())
            if counts:
                versions.append(scheme.version)
            model(value)
    return Capture(starts, versions)
