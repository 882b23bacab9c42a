"""Liveness of the workers' processes."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

__all__ = ["WorkerAlive", "liveness"]

WorkerAlive = Callable[[int], bool] | Sequence[Any] | Mapping[int, Any]
"""A function of the worker index, or processes of ``multiprocessing`` or ``subprocess`` by worker index."""


def liveness(workers: WorkerAlive | None) -> Callable[[int], bool] | None:
    """Return a function that tells whether the process of a worker index lives; None if that is not known.

    Raises:
        TypeError: an entry is no process.
    """
    if workers is None or callable(workers):
        return workers
    processes = dict(workers if isinstance(workers, Mapping) else enumerate(workers))
    for process in processes.values():
        _lives(process)

    def lives(worker_idx: int) -> bool:
        return worker_idx not in processes or _lives(processes[worker_idx])

    return lives


def _lives(process: Any) -> bool:
    if hasattr(process, "is_alive"):  # of multiprocessing, or a thread
        return bool(process.is_alive())
    if hasattr(process, "poll"):  # of subprocess
        return process.poll() is None
    raise TypeError(f"worker_alive takes processes or a function of the worker index, not {process!r}")
