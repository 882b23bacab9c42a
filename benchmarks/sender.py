"""The sending process of one side: a trainer with its workers, which does what it is told."""

from __future__ import annotations

import contextlib
import os
import resource
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import Any

import torch
import torch.multiprocessing as mp

from benchmarks.processes import (
    Actors,
    Capture,
    Model,
    Orders,
    Processes,
    World,
    fill,
    idle_worker,
    mark,
    trainer_weights,
)

__all__ = ["CLUSTER", "COPY", "LABELS", "Case", "Stall", "make_scheme", "rival", "serve"]

COPY = "copy"
LABELS = {
    "shared": "SharedMem, ours",
    "torchrl-shared": "SharedMem, torchrl",
    "process": "MultiProcess, ours",
    "torchrl-process": "MultiProcess, torchrl",
    COPY: "one plain copy",
}
CLUSTER = {
    "distributed": "Distributed",
    "distributed-sockets": "Distributed, a host each",
    "rpc": "RPC",
    "ray": "Ray",
    "ray-object-store": "Ray, object store",
}
"""Our sides that can leave the machine."""

_SCHEMES = {
    "shared": ("SharedMemWeightSyncScheme", {"strategy": "tensordict"}),
    "process": ("MultiProcessWeightSyncScheme", {"strategy": "tensordict"}),
    "distributed": ("DistributedWeightSyncScheme", {}),
    "distributed-sockets": ("DistributedWeightSyncScheme", {}),
    "rpc": ("RPCWeightSyncScheme", {}),
    "ray": ("RayWeightSyncScheme", {}),
    "ray-object-store": ("RayWeightSyncScheme", {"data": "object_store"}),
}


def make_scheme(side: str) -> Any:
    """Return a scheme of one side, with the options that both libraries start with."""
    if side.startswith("torchrl-"):
        # Only the processes of TorchRL's side pay for importing it.
        import torchrl.weight_update as library
    else:
        import weight_update as library  # type: ignore[no-redef]
    name, options = _SCHEMES[side.removeprefix("torchrl-")]
    return getattr(library, name)(**options)


def rival(side: str) -> str:
    """Return TorchRL's side that one of ours is compared with."""
    return f"torchrl-{side.partition('-')[0]}"


class RemoteTrainer:
    """A sender and its workers on other hosts; it is the context of its scheme, as a collector is."""

    def __init__(self, side: str, case: Case) -> None:
        self._workers = self._start(side, case)
        self.policy = Model(case.megabytes, case.tensors)
        self.num_workers = case.workers
        self._weights = fill(self.policy)
        self._updates = 0
        self._scheme = make_scheme(side)
        self._scheme.init_on_sender(
            model_id="policy", context=self, num_workers=case.workers, **self._workers.arguments
        )
        self.pids = self._workers.connect(self._scheme)

    def _start(self, side: str, case: Case) -> Processes | Actors:
        model, kind = (case.megabytes, case.tensors), side.removeprefix("torchrl-")
        if case.ray is not None:
            actors = Actors(case.workers, model, case.ray)
            self.remote_collectors = actors.arguments["remote_collectors"]
            return actors
        if kind == "rpc":
            world = World(case.workers, model, first=0)
            self.collector_infos, self.collector_rrefs = world.collector_infos, world.collector_rrefs
            self.collector_class = world.collector_class
            return world
        first = 1 if side == "torchrl-distributed" else 0
        return Processes(case.workers, model, first, apart=kind == "distributed-sockets")

    def update(self) -> float:
        """Return the seconds of one synchronous send, and check that every worker has the update."""
        self._updates += 1
        mark(self._weights, self._updates)
        start = time.perf_counter()
        self._scheme.send(weights=self._weights)
        seconds = time.perf_counter() - start
        if any(marks != (self._updates, self._updates) for marks in self._workers.marks()):
            raise RuntimeError("send() returned before a worker had the update")
        return seconds

    def close(self) -> None:
        self._scheme.shutdown()
        self._workers.close()


_MARGIN = 0.02  # seconds of undisturbed forward passes that are recorded before and after an update


@dataclass(frozen=True)
class Case:
    """The model and the workers of one group of processes.

    Attributes:
        megabytes: size of the model.
        tensors: number of its tensors.
        workers: number of receiving processes.
        descriptors: limit of open files of each process; None leaves it as it is.
        start: start method of the sender: ``"spawn"``, or ``"forkserver"``, which imports only once.
        ray: address of the running Ray, for sides that use it.
    """

    megabytes: float
    tensors: int = 16
    workers: int = 1
    descriptors: int | None = None
    start: str = "spawn"
    ray: str | None = None


@dataclass(frozen=True)
class Stall:
    """The delay that one update caused in a worker that computes without pause, in seconds.

    Attributes:
        usual: median time from the start of one forward pass to the next.
        longest: longest such time during the update, minus ``usual``.
        switch: time during which the version changed, minus ``usual``; None without versions.
        reported: stall in the scheme's report; None without a report.
    """

    usual: float
    longest: float
    switch: float | None
    reported: float | None


class _Copier:
    """One copy by all threads into existing memory, the least that an update can cost."""

    pids: tuple[int, ...] = ()

    def __init__(self, case: Case) -> None:
        weights = trainer_weights(case.megabytes, case.tensors)
        self._source = list(weights.values(True, True))
        self._target = [torch.zeros_like(value).fill_(1.0) for value in self._source]

    def update(self) -> float:
        start = time.perf_counter()
        torch._foreach_copy_(self._target, self._source)
        return time.perf_counter() - start

    def close(self) -> None: ...


class _Trainer:
    """A sender and its workers."""

    def __init__(self, side: str, case: Case) -> None:
        ctx = mp.get_context("spawn")
        self._weights = trainer_weights(case.megabytes, case.tensors)
        self._updates = 0
        self._scheme = make_scheme(side)
        # TorchRL makes what it is given here its shared memory: give it weights of their own.
        first = self._weights.clone() if side.startswith("torchrl-") else self._weights
        self._scheme.init_on_sender(
            model_id="policy",
            weights=first,
            devices=[torch.device("cpu")] * case.workers,
            num_workers=case.workers,
            ctx=ctx,
        )
        self._capture = ctx.RawValue("i", 0)
        pipes = [ctx.Pipe() for _ in range(case.workers)]
        self._conns = [mine for mine, _ in pipes]
        self._processes = [
            ctx.Process(
                target=idle_worker,
                args=(self._scheme, idx, case.megabytes, case.tensors, Orders(theirs, self._capture)),
                daemon=True,
            )
            for idx, (_, theirs) in enumerate(pipes)
        ]
        for process in self._processes:
            process.start()
        for _, theirs in pipes:
            theirs.close()  # so that recv() ends when the worker dies
        self._scheme.connect()
        try:
            self.pids = tuple(conn.recv() for conn in self._conns)
        except EOFError:
            raise RuntimeError("a worker died before it was connected") from None

    def update(self) -> float:
        """Return the seconds of one synchronous send, and check that every worker has the update."""
        seconds = self._send()
        for conn in self._conns:
            conn.send("marks")
        for conn in self._conns:
            if conn.recv() != (self._updates, self._updates):
                raise RuntimeError("send() returned before a worker had the update")
        return seconds

    def _send(self) -> float:
        self._updates += 1
        mark(self._weights, self._updates)
        start = time.perf_counter()
        self._scheme.send(weights=self._weights)
        return time.perf_counter() - start

    def stall(self) -> Stall:
        """Send one update while worker 0 computes."""
        return self._observed(self._send)

    def control(self) -> Stall:
        """Make a plain copy and no update while worker 0 computes, to see the cost of sharing the cores."""
        target = self._weights.clone()

        def copy() -> float:
            torch._foreach_copy_(list(target.values(True, True)), list(self._weights.values(True, True)))
            return 0.0

        return self._observed(copy)

    def _observed(self, action: Callable[[], float]) -> Stall:
        before = getattr(self._scheme, "last_report", None)
        self._capture.value = 0
        self._conns[0].send("compute")
        time.sleep(_MARGIN)
        self._capture.value = 1
        time.sleep(_MARGIN)
        begin = time.perf_counter()
        action()
        end = time.perf_counter()
        time.sleep(_MARGIN)
        self._capture.value = 2
        capture: Capture = self._conns[0].recv()
        report = getattr(self._scheme, "last_report", None)
        reported = report.stall_seconds[0] if report is not None and report is not before else None
        return _stall(capture, begin, end, reported)

    def close(self) -> None:
        for conn in self._conns:
            with contextlib.suppress(OSError):
                conn.send("end")
        self._scheme.shutdown()
        for process in self._processes:
            process.join(5.0)


def _stall(capture: Capture, begin: float, end: float, reported: float | None) -> Stall:
    starts = torch.tensor(capture.starts, dtype=torch.float64)
    gaps = starts[1:] - starts[:-1]
    usual = float(gaps[starts[1:] < begin].median())
    during = (starts[1:] >= begin) & (starts[:-1] <= end)
    longest = float(gaps[during].max()) - usual
    pairs = list(zip(capture.versions, capture.versions[1:], strict=False))
    changes = [i for i, (old, new) in enumerate(pairs) if old != new]
    switch = float(gaps[changes[0]]) - usual if changes else None
    return Stall(usual, longest, switch, reported)


def _make(side: str, case: Case) -> Any:
    if side == COPY:
        return _Copier(case)
    return _Trainer(side, case) if side in LABELS else RemoteTrainer(side, case)


def serve(conn: Connection, side: str, case: Case) -> None:
    """Run the sending process: receive names of methods, answer ``(True, result)``."""
    os.setsid()  # one signal then ends the whole group, however it hangs
    if case.descriptors is not None:
        resource.setrlimit(resource.RLIMIT_NOFILE, (case.descriptors, case.descriptors))
    try:
        group = _make(side, case)
        conn.send((True, (os.getpid(), *group.pids)))
        while (order := conn.recv()) != "close":
            conn.send((True, getattr(group, order)()))
        group.close()
        conn.send((True, None))
    except Exception as error:  # noqa: BLE001 - the parent prints it as this side's result
        traceback.print_exc()
        reason = str(error).rpartition(": ")[2]  # the cause stands last, e.g. "Too many open files (24)"
        conn.send((False, f"never ({reason or type(error).__name__})"))
