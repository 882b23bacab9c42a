"""A sender and its workers, for tests.

::

    with WorkerProcesses(scheme, method="fork") as procs:    # scheme: after init_on_sender()
        for index in range(2):
            procs.hire(index, model)              # starts the worker, init_on_receiver() with a copy of model
        procs.connect()                           # connect() on both sides
        scheme.send(...)
        procs.workers[0].call("fingerprint")      # any method of Body, run in the worker
"""

from __future__ import annotations

import multiprocessing
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from weight_update.errors import undo_on_error
from weight_update.schemes import WeightSyncScheme
from weight_update.testing.ray_workers import RayWorker
from weight_update.testing.workers import Method, Worker


class WorkerProcesses:
    """A sender and its workers; a context manager that leaves nothing running.

    Args:
        scheme: an initialized sender.
        method: how to start workers; ``"ray"`` needs Ray to run.
    """

    def __init__(self, scheme: WeightSyncScheme, method: Method = "fork") -> None:
        self.scheme: WeightSyncScheme = scheme
        self.method = method
        self.workers: list[Worker] = []

    def hire(self, index: int, model: Any, **options: Any) -> Worker:
        """Start a worker that calls ``init_on_receiver`` with a copy of ``model``."""
        worker = start_worker(self.scheme, index, self.method)
        self.workers.append(worker)
        worker.call("init", model, **options)
        return worker

    def connect(self, **options: Any) -> None:
        """Connect both sides, the sender with ``options``; raise its error, or else the first of a worker."""
        errors = self.try_connect(**options)
        for error in errors.values():
            if error is not None:
                raise error

    def try_connect(self, **options: Any) -> dict[int | None, BaseException | None]:
        """Connect both sides; return the errors of workers by index, and of the sender under None."""
        for worker in self.workers:
            worker.post("connect")
        errors: dict[int | None, BaseException | None] = {
            None: _error_of(partial(self.scheme.connect, **options))
        }
        for worker in self.workers:
            errors[worker.index] = _error_of(worker.answer)
        return errors

    def ask(self, command: str, *args: Any) -> list[Any]:
        """Call a method of :class:`Body` in all workers, and return their answers in order."""
        return [worker.call(command, *args) for worker in self.workers]

    def __enter__(self) -> WorkerProcesses:
        return self

    def __exit__(self, *exc_info: object) -> None:
        for worker in self.workers:
            worker.stop()
        self.scheme.shutdown()


def start_workers(
    scheme: WeightSyncScheme,
    models: Sequence[Any],
    method: Method = "fork",
    *,
    connect: bool = True,
    **init: Any,
) -> WorkerProcesses:
    """Initialize a sender with ``init``, start a worker for each of ``models``, and connect.

    Unless ``init`` says how many workers there are, they are as many as ``models``.
    """
    if not init.keys() & {"params_map", "devices", "context", "num_workers"}:
        init["num_workers"] = len(models)
    scheme.init_on_sender(ctx=context_of(method), **init)
    procs = WorkerProcesses(scheme, method)
    with undo_on_error(procs.__exit__):
        for index, model in enumerate(models):
            procs.hire(index, model)
        if connect:
            procs.connect()
    return procs


def start_worker(scheme: WeightSyncScheme, index: int, method: Method) -> Worker:
    """Start a worker."""
    return RayWorker(scheme, index) if method == "ray" else Worker(scheme, index, method)


def context_of(method: Method) -> Any:
    """Return the multiprocessing context for ``init_on_sender(ctx=...)``, or None if there is none."""
    return None if method in ("thread", "ray") else multiprocessing.get_context(method)


def _error_of(action: Callable[[], Any]) -> BaseException | None:
    try:
        action()
    except Exception as error:  # noqa: BLE001 - handed to the test, which asserts on it
        return error
    return None
