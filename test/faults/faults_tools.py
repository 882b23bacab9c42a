"""Real worker processes that tests kill, stop, slow down and question."""

from __future__ import annotations

import contextlib
import itertools
import multiprocessing as mp
import os
import signal
import threading
import time
import traceback
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import torch
from background import repeating
from torch import nn

from weight_update import DistributedWeightSyncScheme, SharedMemWeightSyncScheme, WeightSyncScheme
from weight_update.testing import Body, processes, workers
from weight_update.testing.processes import freeze

WAIT = 30.0
"""Seconds after which a worker that does not answer is a failure of the test."""

SOCKET_KINDS: dict[str, tuple[type[WeightSyncScheme], dict[str, Any]]] = {
    "shared_mem": (SharedMemWeightSyncScheme, {}),
    "distributed": (DistributedWeightSyncScheme, {}),
    "another host": (DistributedWeightSyncScheme, {"host": "the sender's"}),
}
"""Schemes, with options, whose workers call :func:`join_from_another_host`."""


class Apart(DistributedWeightSyncScheme):
    """A scheme for which every process is a host of its own."""

    def host_name(self) -> str:
        return f"host of {os.getpid()}"


class WorkerRaised(Exception):
    """An exception of a worker, with its traceback."""


class Layer(nn.Module):
    """Widens the range of values seen so far by those of its weights."""

    def __init__(self, numel: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(numel))

    def forward(self, seen: torch.Tensor) -> torch.Tensor:
        low, high = self.weight.aminmax()
        return torch.stack([torch.minimum(seen[0], low), torch.maximum(seen[1], high)])


class Stripes(nn.Module):
    """Its forward pass gives the smallest and the largest of all weights that it used.

    Every weight of version ``v`` is ``v``, so a pass that saw two versions shows two values.
    """

    def __init__(self, layers: int, numel: int) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Sequential(Layer(numel), Layer(numel)) for _ in range(layers // 2))

    def forward(self, start: torch.Tensor) -> torch.Tensor:
        seen = start
        for block in self.blocks:
            seen = block(seen)
        return seen


def small() -> Stripes:
    return Stripes(8, 64)


START = torch.tensor([float("inf"), float("-inf")])


@torch.no_grad()
def fill(model: nn.Module, value: float) -> nn.Module:
    """Make every weight ``value``."""
    torch._foreach_copy_(list(model.parameters()), [torch.full((), value)] * len(list(model.parameters())))
    return model


def state_of(model: nn.Module) -> dict[str, torch.Tensor]:
    return {name: value.detach().clone() for name, value in model.state_dict().items()}


class Worker(Body):
    """The content of a worker process."""

    def __init__(self, scheme: WeightSyncScheme, idx: int, model: Any) -> None:
        super().__init__(scheme, idx)
        self.idx, self.model = idx, model
        self.passes: list[Passes] = []

    def end(self) -> None:
        """Leave the scheme alone: some tests are about workers that do."""


class Passes:
    """A thread that calls ``look`` without pause and keeps what it saw."""

    def __init__(self, look: Callable[[], torch.Tensor]) -> None:
        self._look, self._stop = look, threading.Event()
        self.torn: list[tuple[float, float]] = []
        self.count, self.newest, self.error = 0, -1.0, ""
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        try:
            with torch.no_grad():
                while not self._stop.is_set():
                    self._once()
        except Exception:  # noqa: BLE001 - the test reads it
            self.error = traceback.format_exc()

    def _once(self) -> None:
        low, high = self._look().tolist()
        if low != high or low < self.newest:
            self.torn.append((low, high))
        self.newest = max(self.newest, high)
        self.count += 1

    def report(self) -> dict[str, Any]:
        """Return the observations so far."""
        return {"torn": self.torn[:5], "count": self.count, "newest": self.newest, "error": self.error}

    def end(self) -> dict[str, Any]:
        """Stop, and :meth:`report`."""
        self._stop.set()
        self._thread.join(WAIT)
        return self.report()


# -- what a worker can be asked to do ------------------------------------------------------------------

hold, let_go, leave, version_of = Body.hold, Body.release, Body.shutdown, Body.version


def join(me: Worker) -> int | None:
    me.scheme.init_on_receiver(model=me.model, worker_idx=me.idx)
    me.scheme.connect()
    return me.scheme.version


def join_from_another_host(me: Worker) -> int | None:
    """Join as from another host, if the scheme has a ``host``."""
    if getattr(me.scheme, "host", None) is not None:
        me.scheme.host = "another"
    return join(me)


def weights_of(me: Worker) -> dict[str, torch.Tensor]:
    with me.scheme.hold():
        return state_of(me.model)


def compute(me: Worker, threads: int = 1) -> None:
    me.passes = [Passes(lambda: me.model(START)) for _ in range(threads)]


def report(me: Worker) -> list[dict[str, Any]]:
    return [one.report() for one in me.passes]


def end_compute(me: Worker) -> list[dict[str, Any]]:
    return [one.end() for one in me.passes]


def wait_version(me: Worker, version: int, timeout: float = WAIT) -> int | None:
    eventually(lambda: (me.scheme.version or 0) >= version, timeout)
    return me.scheme.version


def slot_bytes(me: Worker | None = None) -> int:
    """Return the bytes of slots that this process maps."""
    total = 0
    for line in Path("/proc/self/maps").read_text().splitlines():
        if "memfd:weight_update-" in line:
            start, _, stop = line.split()[0].partition("-")
            total += int(stop, 16) - int(start, 16)
    return total


def slots_mapped_for_reading() -> int:
    maps = Path("/proc/self/maps").read_text().splitlines()
    return sum("weight_update-" in line and line.split()[1].endswith("p") for line in maps)


# -- the trainer's side --------------------------------------------------------------------------------


class Remote(workers.Worker):
    """A worker process, seen from the test."""

    def __init__(self, scheme: WeightSyncScheme, idx: int, make_model: Callable[[], Any]) -> None:
        super().__init__(scheme, idx, "fork", lambda scheme, idx: Worker(scheme, idx, make_model()))
        self.idx, self.process = idx, self.runner

    @property
    def pid(self) -> int:
        assert self.process.pid is not None
        return int(self.process.pid)

    def begin(self, function: Callable[..., Any], *args: Any) -> None:
        """Let it run ``function(worker, *args)``."""
        self.post("run", function, *args)

    def answered(self) -> bool:
        """Whether :meth:`result` has something to return."""
        return not self.busy()

    def result(self, timeout: float = WAIT) -> Any:
        """Return the result of the function."""
        if self.busy(timeout):
            raise TimeoutError(f"worker {self.idx} did not answer within {timeout} s")
        try:
            return self.answer()
        except workers.WorkerDiedError:
            raise
        except Exception as error:  # noqa: BLE001 - tests look for its name and its message
            raise WorkerRaised(str(error.__cause__)) from None

    def call(self, function: Callable[..., Any], *args: Any, timeout: float = WAIT) -> Any:
        """:meth:`begin` and :meth:`result`."""
        self.begin(function, *args)
        return self.result(timeout)

    def dismiss(self) -> None:
        """Let its main function return."""
        self._pipe.send_bytes(workers.dumps(None))

    def signal(self, number: int) -> None:
        if number == signal.SIGSTOP:
            freeze(self.pid)
        else:
            os.kill(self.pid, number)

    def kill(self) -> None:
        """End it at once, as the kernel does when memory runs out."""
        if self.process.is_alive():
            self.signal(signal.SIGKILL)
        self.process.join(WAIT)

    def close(self) -> None:
        self.kill()
        self._pipe.close()
        self.process.close()


class Processes:
    """Schemes and worker processes of one test; all of them end with it."""

    def __init__(self) -> None:
        self._ctx = mp.get_context("fork")
        self._schemes: list[WeightSyncScheme] = []
        self._remotes: list[Remote] = []

    def scheme(self, cls: type[WeightSyncScheme], **options: Any) -> WeightSyncScheme:
        scheme = cls(**options)
        self._schemes.append(scheme)
        return scheme

    def start(self, scheme: WeightSyncScheme, idx: int, make_model: Callable[[], Any]) -> Remote:
        """A worker that did not join yet."""
        self._remotes.append(Remote(scheme, idx, make_model))
        return self._remotes[-1]

    def launch(
        self, scheme: WeightSyncScheme, model: nn.Module, make_model: Callable[[], Any], count: int
    ) -> list[Remote]:
        """Initialize, start ``count`` workers and connect all."""
        scheme.init_on_sender(model=model, num_workers=count, ctx=self._ctx)
        return connect_all(scheme, [self.start(scheme, idx, make_model) for idx in range(count)])

    def forget(self, remote: Remote) -> None:
        """End a worker, and keep nothing of it."""
        self._remotes.remove(remote)
        remote.close()

    def close(self) -> None:
        for remote in self._remotes:
            remote.close()
        for scheme in self._schemes:
            scheme.shutdown()


def connect_all(scheme: WeightSyncScheme, workers: list[Remote]) -> list[Remote]:
    """Connect an initialized sender and its workers."""
    for worker in workers:
        worker.begin(join)
    scheme.connect(timeout=WAIT)
    for worker in workers:
        worker.result()
    return workers


def eventually(condition: Callable[[], bool], timeout: float = WAIT) -> bool:
    """Return whether ``condition`` becomes true within ``timeout`` seconds, 30 by default."""
    return processes.eventually(condition, timeout)


@contextlib.contextmanager
def sending(scheme: WeightSyncScheme, model: Stripes) -> Iterator[None]:
    """Updates flow meanwhile, as fast as they can."""
    versions = itertools.count(1)
    with repeating(lambda: scheme.send(fill(model, next(versions)))):
        assert eventually(lambda: (scheme.version or 0) > 5)
        yield


def flows_on(scheme: WeightSyncScheme) -> bool:
    """Whether updates that :func:`sending` sends still arrive."""
    before = scheme.version
    return eventually(lambda: scheme.version > before + 3, 10.0)


@contextlib.contextmanager
def within(seconds: float) -> Iterator[None]:
    start = time.monotonic()
    yield
    assert time.monotonic() - start < seconds


def assert_whole(reports: Iterable[dict[str, Any]], at_least: int = 1) -> None:
    """No pass saw two versions, none went back in time, and there were some."""
    for one in reports:
        assert not one["error"], one["error"]
        assert one["torn"] == []
        assert one["count"] >= at_least
