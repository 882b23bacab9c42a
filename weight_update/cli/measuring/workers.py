"""Worker processes, each with a receiver for every scheme and encoding that is measured."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from multiprocessing.connection import Connection
from typing import Any

import torch
import torch.multiprocessing as mp

from weight_update.cli.measuring.models import ModelSource, checksums, tensors_of
from weight_update.errors import WeightSyncError, WorkerError
from weight_update.schemes import WeightSyncScheme
from weight_update.schemes.remote import RemoteWeightSyncScheme
from weight_update.transports.ray.rendezvous import require_ray

__all__ = ["ProcessWorker", "RayWorker", "Worker"]

_STOP_SECONDS = 3.0


class _Receivers:
    """The content of a worker: a model for each scheme."""

    def __init__(self, index: int, schemes: Mapping[str, WeightSyncScheme], source: ModelSource) -> None:
        torch.set_num_threads(1)  # workers share the cores
        self._index, self._schemes = index, schemes
        self._models = {name: source.make() for name in schemes}

    def connect(self, name: str, timeout: float) -> None:
        """Connect one receiver."""
        scheme = self._schemes[name]
        if isinstance(scheme, RemoteWeightSyncScheme):
            scheme.host = f"bench-{self._index}"  # weights cross sockets, as between machines
        scheme.init_on_receiver(model=self._models[name], worker_idx=self._index)
        scheme.connect(timeout=timeout)

    def checksums(self, name: str) -> dict[str, int]:
        """Return the checksums of one model."""
        return checksums(tensors_of(self._models[name]))

    def stop(self) -> None:
        """Shut all receivers down."""
        for scheme in self._schemes.values():
            scheme.shutdown()


class Worker:
    """A worker, whose methods are called without waiting for the answer.

    Attributes:
        index: index of the worker.
    """

    def __init__(self, index: int) -> None:
        self.index = index

    def post(self, command: str, *args: Any) -> None:
        """Call a method of the worker."""
        raise NotImplementedError

    def answer(self, timeout: float) -> Any:
        """Return the result of the oldest call.

        Raises:
            WorkerError: the call failed, or did not end in time.
        """
        raise NotImplementedError

    def stop(self) -> None:
        """End the worker."""
        raise NotImplementedError


class ProcessWorker(Worker):
    """A worker in a spawned process."""

    def __init__(self, index: int, schemes: Mapping[str, WeightSyncScheme], source: ModelSource) -> None:
        super().__init__(index)
        context: Any = mp.get_context("spawn")
        self._pipe, theirs = context.Pipe()
        args = (theirs, index, schemes, source)
        self._process = context.Process(target=_serve, args=args, daemon=True)
        self._process.start()
        theirs.close()  # so that the end of the process is noticed

    def post(self, command: str, *args: Any) -> None:
        try:
            self._pipe.send((command, args))
        except OSError:
            raise WorkerError(f"worker {self.index} has died") from None

    def answer(self, timeout: float) -> Any:
        try:
            if not self._pipe.poll(max(0.0, timeout)):
                raise WorkerError(f"worker {self.index} did not answer within {timeout:.1f} s")
            good, result = self._pipe.recv()
        except (EOFError, OSError):
            raise WorkerError(f"worker {self.index} has died") from None
        if not good:
            raise WorkerError(f"worker {self.index}: {result}")
        return result

    def stop(self) -> None:
        with contextlib.suppress(WorkerError):
            self.post("stop")
        self._process.join(_STOP_SECONDS)
        if self._process.is_alive():
            self._process.kill()
            self._process.join()
        self._pipe.close()


def _serve(
    pipe: Connection, index: int, schemes: Mapping[str, WeightSyncScheme], source: ModelSource
) -> None:
    try:
        receivers = _Receivers(index, schemes, source)
        pipe.send((True, None))
        command = ""
        while command != "stop":
            command, args = pipe.recv()
            pipe.send(_outcome(receivers, command, args))
    except (EOFError, OSError):
        pass  # the program was ended


def _outcome(receivers: _Receivers, command: str, args: tuple[Any, ...]) -> tuple[bool, Any]:
    try:
        return True, getattr(receivers, command)(*args)
    except (WeightSyncError, OSError, RuntimeError) as error:
        return False, f"{type(error).__name__}: {error}"


class RayWorker(Worker):
    """A worker in an actor of Ray, which must run."""

    def __init__(self, index: int, schemes: Mapping[str, WeightSyncScheme], source: ModelSource) -> None:
        super().__init__(index)
        self._ray = require_ray()
        self._actor = self._ray.remote(num_cpus=0)(_Receivers).remote(index, schemes, source)
        self._calls = [self._actor.__ray_ready__.remote()]

    def post(self, command: str, *args: Any) -> None:
        self._calls.append(getattr(self._actor, command).remote(*args))

    def answer(self, timeout: float) -> Any:
        try:
            return self._ray.get(self._calls.pop(0), timeout=max(0.0, timeout))
        except self._ray.exceptions.RayError as error:
            raise WorkerError(f"worker {self.index}: {error}") from None

    def stop(self) -> None:
        self.post("stop")
        with contextlib.suppress(WorkerError):
            self.answer(_STOP_SECONDS)
        self._ray.kill(self._actor)
