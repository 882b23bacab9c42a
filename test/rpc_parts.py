"""Worlds of torch.distributed.rpc whose rank 0 is the test.

A process that was in such a world is none that others should be forked from. So each test runs in a
process of its own.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import multiprocessing
import os
import threading
import time
import traceback
import warnings
from collections.abc import Callable, Iterable
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed import rpc

from collectors.nodes import free_port
from weight_update import RPCWeightSyncScheme
from weight_update.testing import Worker, fingerprint

LIMITS = {"timeout": 20.0, "connect_timeout": 30.0}
RPC_SECONDS = 30
TRAINER = "trainer"
TEST_SECONDS = 60.0


def enter(name: str, rank: int, port: int, size: int | None) -> None:
    """Join the world; ``size`` None for one that grows."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # PyTorch warns about what it does itself
        rpc.init_rpc(
            name,
            rank=rank,
            world_size=size,
            rpc_backend_options=rpc.TensorPipeRpcBackendOptions(
                init_method=f"tcp://127.0.0.1:{port}", rpc_timeout=RPC_SECONDS
            ),
        )


def leave(*, graceful: bool) -> None:
    """Leave the world."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        rpc.shutdown(graceful=graceful)


def in_world(**how: Any) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Run a test in a process of its own, with a :class:`World` as its first argument; ``how`` makes it."""

    def decorate(test: Callable[..., None]) -> Callable[..., None]:
        @functools.wraps(test)
        def run(**arguments: Any) -> None:
            fork = multiprocessing.get_context("fork")
            ours, theirs = fork.Pipe(duplex=False)
            process = fork.Process(target=_run, args=(theirs, how, test, arguments))
            process.start()
            theirs.close()
            try:
                trouble = ours.recv() if ours.poll(TEST_SECONDS) else "it did not end in time"
            except EOFError:
                trouble = "its process died"
            process.join(10.0)
            trouble = trouble or ("its process did not exit" if process.is_alive() else None)
            process.kill()
            process.join()
            if trouble is not None:
                pytest.fail(trouble, pytrace=False)

        kept = list(inspect.signature(test).parameters.values())[1:]
        run.__signature__ = inspect.Signature(kept)  # type: ignore[attr-defined]
        return run

    return decorate


def _run(pipe: Any, how: dict[str, Any], test: Callable[..., None], arguments: dict[str, Any]) -> None:
    trouble = None
    try:
        with contextlib.closing(World(**how)) as world:
            test(world, **arguments)
    except BaseException:  # noqa: BLE001 - failures of pytest are no Exceptions; the test's process shows it
        trouble = traceback.format_exc()
    pipe.send(trouble)


class World:
    """The test as trainer, and workers that know nothing of RPC when they begin.

    Args:
        workers: how many.
        spares: processes that are not in the world yet.
        dynamic: whether the world may grow.
    """

    def __init__(self, workers: int = 2, spares: int = 0, *, dynamic: bool = False) -> None:
        self.port = free_port()
        self.size = None if dynamic else workers + 1
        blank = RPCWeightSyncScheme(**LIMITS)
        self.workers = [Worker(blank, index, "fork") for index in range(workers + spares)]
        self.members, self.inside = workers, False
        self.schemes: list[RPCWeightSyncScheme] = []
        if dynamic:  # one after the other
            self._enter()
            for index in range(workers):
                self.admit(index)
        else:
            for index in range(workers):
                self.workers[index].post("run", enter_world, f"w{index}", index + 1, self.port, self.size)
            self._enter()
            for worker in self.workers[:workers]:
                worker.answer()

    def _enter(self) -> None:
        enter(TRAINER, 0, self.port, self.size)
        self.inside = True

    def admit(self, index: int, place: int | None = None) -> None:
        """Add a worker to a world that may grow, in the place of another if given."""
        place = index if place is None else place
        self.workers[index].call("run", enter_world, f"w{place}", place + 1, self.port, None)

    def sender(self, model: Any, *, called: bool = False, model_id: str | None = None, **options: Any) -> Any:
        """Return an initialized sender for the workers of the world, which are called if ``called``."""
        scheme = RPCWeightSyncScheme(**{**LIMITS, **options})
        self.schemes.append(scheme)
        rrefs = (
            {index: rpc.remote(f"w{index}", the_desk) for index in range(self.members)} if called else None
        )
        init = {"model_id": model_id} if model_id else {}
        scheme.init_on_sender(model=model, num_workers=self.members, worker_rrefs=rrefs, **init)
        return scheme

    def run(self, index: int, function: Any, *args: Any) -> Any:
        """Run ``function(body, *args)`` in a worker."""
        return self.workers[index].call("run", function, *args)

    def ask(self, function: Any, *args: Any) -> list[Any]:
        """Run it in both first workers."""
        return [self.run(index, function, *args) for index in (0, 1)]

    def post_join(self, model: Any, model_id: str = "policy", **options: Any) -> None:
        """Make both first workers receive into a copy of ``model``; do not wait."""
        for worker in self.workers[:2]:
            worker.post("run", join, model, model_id, options)

    def answers(self) -> None:
        """Wait for the answers of both first workers."""
        for worker in self.workers[:2]:
            worker.answer()

    def connect(self, scheme: Any, model: Any, model_id: str = "policy", **options: Any) -> None:
        """Make both first workers receive into a copy of ``model``, and connect both sides."""
        self.post_join(model, model_id, **options)
        scheme.connect()
        self.answers()

    def seen(self, model_id: str = "policy", only: Iterable[int] = (0, 1)) -> list[Any]:
        """Return the fingerprints of the workers' models."""
        return [self.run(index, weights_of, model_id) for index in only]

    def leave(self) -> None:
        """Make all processes leave the world, in order."""
        for worker in self.workers[:2]:
            worker.post("run", leave_world)
        leave(graceful=True)
        self.inside = False
        self.answers()

    def close(self) -> None:
        for scheme in self.schemes:
            scheme.shutdown()
        if self.inside:
            leave(graceful=False)
            self.inside = False
        for worker in self.workers:
            worker.runner.kill()
            worker.stop()


# -- in the workers ------------------------------------------------------------------------------------


class Desk:
    """The object that a sender calls, in the place of a collector."""

    def __init__(self) -> None:
        self.schemes: dict[str, RPCWeightSyncScheme] = {}
        self.models: dict[str, Any] = {}
        self.calls: list[dict[str, Any]] = []
        self.trouble: str | None = None

    def _receive_weights_scheme(self) -> None:
        if self.trouble == "raise":
            raise KeyError("no room on the desk")
        if self.trouble == "sleep":
            time.sleep(60)
        got = {model_id: scheme.receive() for model_id, scheme in self.schemes.items()}
        self.calls.append({key: None if one is None else fingerprint(one) for key, one in got.items()})


_desk = Desk()


def the_desk() -> Desk:
    return _desk


def enter_world(body: Any, name: str, rank: int, port: int, size: int | None) -> None:
    torch.set_num_threads(1)
    enter(name, rank, port, size)


def pid_of(body: Any) -> int:
    return os.getpid()


def join(body: Any, model: Any, model_id: str, options: dict[str, Any]) -> int | None:
    worker_idx, within = options.pop("worker_idx", body.index), options.pop("within", None)
    scheme = RPCWeightSyncScheme(**{**LIMITS, **options})
    scheme.init_on_receiver(model=model, model_id=model_id, worker_idx=worker_idx)
    _desk.schemes[model_id], _desk.models[model_id] = scheme, model
    scheme.connect(timeout=within)
    return scheme.version


def weights_of(body: Any, model_id: str = "policy") -> Any:
    return fingerprint(_desk.models[model_id])


class Stripes(nn.Module):
    """A model whose forward pass returns its smallest and its largest weight, read one after the other."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ParameterList(nn.Parameter(torch.zeros(2000)) for _ in range(24))

    def forward(self) -> tuple[float, float]:
        seen = [float(layer.detach()[-1]) for layer in self.layers]
        return min(seen), max(seen)


def stripes(value: float) -> Stripes:
    model = Stripes()
    with torch.no_grad():
        for layer in model.layers:
            layer.fill_(value)
    return model


def compute(body: Any) -> None:
    _desk.computing = threading.Event()
    _desk.passes = []

    def run() -> None:
        while not _desk.computing.is_set():
            _desk.passes.append(_desk.models["policy"]())

    _desk.thread = threading.Thread(target=run)
    _desk.thread.start()


def end_compute(body: Any) -> tuple[list[tuple[float, float]], int]:
    _desk.computing.set()
    _desk.thread.join()
    return [one for one in _desk.passes if one[0] != one[1]], len(_desk.passes)


def calls_of(body: Any) -> list[dict[str, Any]]:
    return _desk.calls


def make_trouble(body: Any, kind: str | None) -> None:
    _desk.trouble = kind


def leave_scheme(body: Any, model_id: str = "policy") -> None:
    _desk.schemes[model_id].shutdown()


def leave_world(body: Any, graceful: bool = True) -> None:
    leave(graceful=graceful)
