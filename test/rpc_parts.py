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
from faults_tools import START, Passes
from torch.distributed import rpc

from collectors.nodes import free_port
from weight_update import RPCWeightSyncScheme, WeightSyncError
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
    """The test as trainer, and workers that join the world when they are told to.

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
        members = range(self.members) if called else ()
        rrefs = {index: rpc.remote(f"w{index}", called_object) for index in members} or None
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


class UnreadableError(Exception):
    """An error whose message raises another one."""

    def __str__(self) -> str:
        raise ValueError("it cannot be read")


class CalledObject:
    """The object that a sender calls instead of a collector."""

    def __init__(self) -> None:
        self.schemes: dict[str, Any] = {}
        self.models: dict[str, Any] = {}
        self.calls: list[dict[str, Any]] = []
        self.trouble: str | None = None

    def _receive_weights_scheme(self) -> None:
        if self.trouble == "raise":
            raise KeyError("told to raise")
        if self.trouble == "raise what cannot be read":
            raise UnreadableError
        if self.trouble == "sleep":
            time.sleep(60)
        got = {model_id: scheme.receive() for model_id, scheme in self.schemes.items()}
        self.calls.append({key: None if one is None else fingerprint(one) for key, one in got.items()})


_called = CalledObject()


def called_object() -> CalledObject:
    return _called


def enter_world(body: Any, name: str, rank: int, port: int, size: int | None) -> None:
    torch.set_num_threads(1)
    enter(name, rank, port, size)


def pid_of(body: Any) -> int:
    return os.getpid()


def join(body: Any, model: Any, model_id: str, options: dict[str, Any]) -> int | None:
    worker_idx, within = options.pop("worker_idx", body.index), options.pop("within", None)
    scheme = RPCWeightSyncScheme(**{**LIMITS, **options})
    scheme.init_on_receiver(model=model, model_id=model_id, worker_idx=worker_idx)
    _called.schemes[model_id], _called.models[model_id] = scheme, model
    scheme.connect(timeout=within)
    return scheme.version


def ask_and_leave(body: Any) -> str:
    """Return the error of a ``connect()`` that asks in vain, when the scheme is shut down in a second."""
    scheme = RPCWeightSyncScheme(**LIMITS)
    scheme.init_on_receiver(model={}, model_id="never announced", worker_idx=body.index)
    leaving = threading.Timer(1.0, scheme.shutdown)
    leaving.start()
    try:
        scheme.connect()
    except WeightSyncError as error:
        return f"{type(error).__name__}: {error}"
    finally:
        leaving.join()
    return "connected"


def weights_of(body: Any, model_id: str = "policy") -> Any:
    return fingerprint(_called.models[model_id])


def compute(body: Any) -> None:
    _called.passes = Passes(lambda: _called.models["policy"](START))


def end_compute(body: Any) -> dict[str, Any]:
    return _called.passes.end()


def calls_of(body: Any) -> list[dict[str, Any]]:
    return _called.calls


def make_trouble(body: Any, kind: str | None) -> None:
    _called.trouble = kind


def leave_scheme(body: Any, model_id: str = "policy") -> None:
    _called.schemes[model_id].shutdown()


def leave_world(body: Any, graceful: bool = True) -> None:
    leave(graceful=graceful)
