"""A trainer and its workers, of this library or of TorchRL.

A *variant* is what takes part in a comparison: one of our schemes (``"shared"``), TorchRL's of the same kind
(``"torchrl-shared"``), one plain copy (``"copy"``), the least that an update can cost (``"floor"``), or bytes
without a library (``"tcp"``, ``"gloo"``, ``"ray-alone"``).
"""

from __future__ import annotations

import contextlib
import os
import resource
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
import torch.multiprocessing as mp
from tensordict import TensorDictBase

from benchmarks.bare import BARE, Bare, BareRay, Copy, Floor
from benchmarks.network import INTERFACE
from benchmarks.processes import Failed, Process
from benchmarks.workers import (
    Actors,
    Case,
    ForkedWorkers,
    Model,
    Passes,
    SpawnedWorker,
    Workers,
    World,
    fill,
    mark,
)

if TYPE_CHECKING:  # processes of TorchRL do without it
    from weight_update import SyncReport

COPY = "copy"
FLOOR = "floor"
RAY_ALONE = "ray-alone"
"""Bytes through Ray's object store without a library."""

LABELS = {
    "shared": "SharedMem, ours",
    "torchrl-shared": "SharedMem, torchrl",
    "process": "MultiProcess, ours",
    "torchrl-process": "MultiProcess, torchrl",
    COPY: "one plain copy",
    FLOOR: "a copy and a wake-up each way",
}
CLUSTER = {
    "distributed": "Distributed",
    "distributed-sockets": "Distributed, a host each",
    "rpc": "RPC",
    "ray": "Ray",
    "ray-object-store": "Ray, object store",
    "ray-object-store-apart": "Ray, object store, a host each",
    RAY_ALONE: "Ray's put and get alone",
}
"""Our schemes that can leave the machine, and Ray without a library."""

_SCHEMES = {
    "shared": ("SharedMemWeightSyncScheme", {"strategy": "tensordict"}),
    "process": ("MultiProcessWeightSyncScheme", {"strategy": "tensordict"}),
    "distributed": ("DistributedWeightSyncScheme", {}),
    "distributed-sockets": ("DistributedWeightSyncScheme", {}),
    "rpc": ("RPCWeightSyncScheme", {}),
    "ray": ("RayWeightSyncScheme", {}),
    "ray-object-store": ("RayWeightSyncScheme", {"data": "object_store"}),
    "ray-object-store-apart": ("RayWeightSyncScheme", {"data": "object_store"}),
}


def make_scheme(variant: str, **where: str) -> Any:
    """Return a scheme, with the options that both libraries start with, and those of ours in ``where``."""
    if variant.startswith("torchrl-"):
        # Only the processes that use TorchRL pay for importing it.
        import torchrl.weight_update as library
    else:
        import weight_update as library  # type: ignore[no-redef]
    name, options = _SCHEMES[variant.removeprefix("torchrl-")]
    return getattr(library, name)(**options, **where)


def rival(variant: str) -> str:
    """Return the variant of TorchRL that one of ours is compared with."""
    return f"torchrl-{variant.partition('-')[0]}"


_MARGIN = 0.02  # seconds of undisturbed forward passes that are recorded before and after an update


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


class _Sender:
    """A sender with its workers, connected.

    Args:
        scheme: initialized, but not connected.
        workers: its workers.
        weights: weights that it sends.
    """

    def __init__(self, scheme: Any, workers: Workers | Actors, weights: TensorDictBase) -> None:
        self._scheme, self._workers, self._weights = scheme, workers, weights
        self._source: Any = weights
        self._updates = 0
        workers.connect(scheme)

    def update(self) -> float:
        """Return the seconds of one synchronous send, and check that every worker has the update."""
        seconds = self._send()
        if any(marks != (self._updates, self._updates) for marks in self._workers.marks()):
            raise RuntimeError("send() returned before a worker had the update")
        return seconds

    def reported(self) -> tuple[float, SyncReport]:
        """Return the seconds of one update as :meth:`update` does, and our scheme's report."""
        return self.update(), self._scheme.last_report

    def _send(self) -> float:
        self._updates += 1
        mark(self._weights, self._updates)
        start = time.perf_counter()
        self._scheme.send(weights=self._source)
        return time.perf_counter() - start

    def close(self) -> None:
        self._scheme.shutdown()
        self._workers.close()


class _RemoteSender(_Sender):
    """A sender whose workers may be on other hosts; it is the context of its scheme, as a collector is."""

    def __init__(self, variant: str, case: Case) -> None:
        workers = self._start(variant, case)
        vars(self).update(workers.context)
        self.policy = Model(*case.model)
        self.num_workers = case.workers
        weights = fill(self.policy)
        apart = case.network is not None and not variant.startswith("torchrl-")
        scheme = make_scheme(variant, **({"address": case.address} if apart else {}))
        arguments = {} if case.ray is None else workers.context
        scheme.init_on_sender(model_id="policy", context=self, num_workers=case.workers, **arguments)
        super().__init__(scheme, workers, weights)

    @staticmethod
    def _start(variant: str, case: Case) -> Workers | Actors:
        kind = variant.removeprefix("torchrl-")
        if case.ray is not None:
            return Actors(case, apart=variant.endswith("-apart"))
        if kind == "rpc":
            return World(case)
        first = 1 if variant == "torchrl-distributed" else 0
        return ForkedWorkers(case, first, apart=kind == "distributed-sockets")


class _LocalSender(_Sender):
    """A sender whose workers are spawned processes."""

    _workers: Workers

    def __init__(self, variant: str, case: Case) -> None:
        context: Any = mp.get_context("spawn")
        policy = Model(*case.model)
        weights = fill(policy)
        scheme = make_scheme(variant)
        # TorchRL makes what it is given here its shared memory: give it weights of their own.
        first = weights.clone() if variant.startswith("torchrl-") else weights
        devices = [torch.device("cpu")] * case.workers
        scheme.init_on_sender(
            model_id="policy", weights=first, devices=devices, num_workers=case.workers, ctx=context
        )
        self._recording = context.RawValue("i", 0)
        arguments = [(SpawnedWorker, scheme, idx, case.model, self._recording) for idx in range(case.workers)]
        super().__init__(scheme, Workers([Process(*one) for one in arguments]), weights)
        if case.layered and not variant.startswith("torchrl-"):
            self._source = policy

    def pids(self) -> tuple[int, ...]:
        """Return the ids of this process and of the workers."""
        return (os.getpid(), *self._workers.pids())

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
        self._recording.value = 0
        passes = self._workers.ask_first("compute")
        time.sleep(_MARGIN)
        self._recording.value = 1
        time.sleep(_MARGIN)
        begin = time.perf_counter()
        action()
        end = time.perf_counter()
        time.sleep(_MARGIN)
        self._recording.value = 2
        found: Passes = passes()
        report = getattr(self._scheme, "last_report", None)
        reported = report.stall_seconds[0] if report is not None and report is not before else None
        return _stall(found, begin, end, reported)

    def close(self) -> None:
        self._workers.end()
        super().close()


def _stall(passes: Passes, begin: float, end: float, reported: float | None) -> Stall:
    starts = torch.tensor(passes.starts, dtype=torch.float64)
    gaps = starts[1:] - starts[:-1]
    usual = float(gaps[starts[1:] < begin].median())
    during = (starts[1:] >= begin) & (starts[:-1] <= end)
    if not during.any():
        raise RuntimeError("the worker made no forward pass during the update, the machine is too busy")
    longest = float(gaps[during].max()) - usual
    pairs = list(zip(passes.versions, passes.versions[1:], strict=False))
    changes = [i for i, (old, new) in enumerate(pairs) if old != new]
    switch = float(gaps[changes[0]]) - usual if changes else None
    return Stall(usual, longest, switch, reported)


_ALONE = {COPY: Copy, FLOOR: Floor, RAY_ALONE: BareRay}


def _make(variant: str, case: Case) -> Any:
    """Return the sender of a variant; called in its process."""
    if case.descriptors is not None:
        resource.setrlimit(resource.RLIMIT_NOFILE, (case.descriptors, case.descriptors))
    if case.network is not None:
        case.network.settle("trainer")
        os.environ["GLOO_SOCKET_IFNAME"] = INTERFACE
    if variant in _ALONE:
        return _ALONE[variant](case)
    if variant in BARE:
        return Bare(variant, case)
    return _LocalSender(variant, case) if variant in LABELS else _RemoteSender(variant, case)


def preload(beside: bool, *more: str) -> None:
    """Have the forkserver import the modules of trainers once, and silence warnings of PyTorch's C++ code.

    Args:
        beside: whether TorchRL's schemes are measured, too.
        more: further modules.
    """
    # PyTorch warns that a host has no name, and that processes of a group that end together have ended.
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
    modules = ["torch.distributed.rpc", "weight_update", *["torchrl.weight_update"] * beside, *more]
    mp.set_forkserver_preload(modules)


class Trainer(Process):
    """The process of a variant's sender, which starts its workers."""

    def __init__(self, variant: str, case: Case) -> None:
        super().__init__(_make, variant, case, start=case.start, leader=True)
        self.variant, self.case = variant, case


@contextlib.contextmanager
def trainers(cases: Sequence[tuple[str, Case]], timeout: float) -> Iterator[list[Trainer]]:
    """Start a trainer for each variant and case; wait until each is ready or failed; end them on leaving."""
    started = [Trainer(variant, case) for variant, case in cases]
    try:
        for trainer in started:
            with contextlib.suppress(Failed):
                trainer.answer(timeout)
        yield started
    finally:
        for trainer in started:
            trainer.close()
