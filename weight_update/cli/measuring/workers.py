"""Worker processes, each with a receiver for every scheme and encoding that is measured."""

from __future__ import annotations

import contextlib
import signal
import time
from collections.abc import Callable, Iterator, Mapping
from multiprocessing import resource_tracker
from multiprocessing.connection import Connection
from typing import Any

import torch
import torch.multiprocessing as mp

from weight_update.cli.measuring.models import ModelSource, checksums, tensors_of
from weight_update.errors import WorkerError
from weight_update.schemes import WeightSyncScheme
from weight_update.schemes.remote import RemoteWeightSyncScheme
from weight_update.transports.ray.rendezvous import require_ray


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


class WorkerLateError(WorkerError):
    """A call of a worker did not end in time."""


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
            WorkerLateError: the call did not end in time.
            WorkerError: the call failed.
        """
        raise NotImplementedError

    def stop(self) -> None:
        """Ask the worker to end, without waiting for it."""
        with contextlib.suppress(WorkerError):
            self.post("stop")

    def close(self, timeout: float) -> None:
        """Wait for the end of the worker, and kill it if it takes longer than ``timeout`` seconds."""
        raise NotImplementedError


@contextlib.contextmanager
def _interrupts_deferred() -> Iterator[None]:
    """Defer Ctrl-C to the end of the block. Processes that are started in the block ignore it."""
    resource_tracker.ensure_running()  # it changes the mask when it starts
    noted: list[int] = []
    handler = signal.signal(signal.SIGINT, lambda number, frame: noted.append(number))
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGINT])  # of the processes, too
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)
        signal.signal(signal.SIGINT, handler)
        if noted:
            signal.raise_signal(signal.SIGINT)


class ProcessWorker(Worker):
    """A worker in a spawned process."""

    def __init__(self, index: int, schemes: Mapping[str, WeightSyncScheme], source: ModelSource) -> None:
        super().__init__(index)
        context: Any = mp.get_context("spawn")
        self._pipe, theirs = context.Pipe()
        self._posted = self._answered = 0  # numbers of calls; 0 is the start
        args = (theirs, index, schemes, source)
        self._process = context.Process(target=_serve, args=args, daemon=True)
        with _interrupts_deferred():  # the parent ends its workers
            self._process.start()
        theirs.close()  # so that the end of the process is noticed

    def post(self, command: str, *args: Any) -> None:
        self._posted += 1
        try:
            self._pipe.send((self._posted, command, args))
        except OSError:
            raise WorkerError(f"worker {self.index} has died") from None

    def answer(self, timeout: float) -> Any:
        awaited, number = self._answered, -1
        self._answered += 1
        end = time.monotonic() + timeout
        try:
            while number < awaited:  # a call that took too long may be answered late
                if not self._pipe.poll(max(0.0, end - time.monotonic())):
                    raise WorkerLateError(f"worker {self.index} did not answer within {timeout:.1f} s")
                number, good, result = self._pipe.recv()
        except (EOFError, OSError):
            raise WorkerError(f"worker {self.index} has died") from None
        if not good:
            raise WorkerError(f"worker {self.index}: {result}")
        return result

    def close(self, timeout: float) -> None:
        self._process.join(timeout)
        if self._process.is_alive():
            self._process.kill()
            self._process.join()
        self._pipe.close()


def _serve(
    pipe: Connection, index: int, schemes: Mapping[str, WeightSyncScheme], source: ModelSource
) -> None:
    good, receivers = _outcome(_Receivers, index, schemes, source)
    with contextlib.suppress(EOFError, OSError):  # the program was ended
        pipe.send((0, good, None if good else receivers))
        command = ""
        while good and command != "stop":
            number, command, args = pipe.recv()
            pipe.send((number, *_outcome(getattr(receivers, command), *args)))


def _outcome(action: Callable[..., Any], *args: Any) -> tuple[bool, Any]:
    """Return whether a call succeeded, and its result or error."""
    try:
        return True, action(*args)
    except Exception as error:  # noqa: BLE001 - the other process raises it
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
        except self._ray.exceptions.GetTimeoutError:
            raise WorkerLateError(f"worker {self.index} did not answer within {timeout:.1f} s") from None
        except self._ray.exceptions.RayError as error:
            raise WorkerError(f"worker {self.index}: {error}") from None

    def close(self, timeout: float) -> None:
        with contextlib.suppress(self._ray.exceptions.RayError):
            self._ray.get(self._calls[-1:], timeout=timeout)
        self._ray.kill(self._actor)
