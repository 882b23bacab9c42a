"""The workers of the collectors that start them by a launcher."""

from __future__ import annotations

import _thread
import contextlib
import importlib
import math
import queue
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any

import torch
from tensordict import TensorDictBase
from torchrl.data.utils import CloudpickleWrapper
from torchrl.envs import EnvBase, EnvCreator

from collectors.nodes import Nodes
from collectors.waiting import WaitingTimes

_LOOK_SECONDS, END_SECONDS, START_SECONDS = 0.5, 10.0, 120.0
Arguments = tuple[dict[str, Any], dict[str, Any]]
"""Arguments of a worker's program: those that are copied, and the others."""

Put = Callable[[Any], None]
"""Takes the batch of a worker, or an error, once it has arrived."""


class BatchRequest:
    """A request for the next batch of a worker, made by a thread of its own.

    A signal handler, which runs in the main thread, may raise while a program waits for batches. Such a
    program may call :meth:`begin` again: the worker is asked once.

    Args:
        make: function that makes the request; its argument takes the answer.
        changed: queue that gets an item when the batch has arrived.

    Attributes:
        answer: the batch, or the error of ``make``; empty before.
    """

    def __init__(self, make: Callable[[Put], None], changed: queue.SimpleQueue[None]) -> None:
        self.answer: list[Any] = []
        self._make, self._changed = make, changed
        self._begun, self._running = False, threading.Lock()

    @property
    def pending(self) -> bool:
        """Whether the worker was asked, and has not answered."""
        return self._begun and not self.answer

    def begin(self) -> None:
        """Make the request, unless this was done."""
        self._begun = True
        if not self._running.locked():
            _thread.start_new_thread(self._run, ())  # a signal handler must not raise in Thread.start()

    def _run(self) -> None:
        if self._running.acquire(blocking=False):
            try:
                self._make(self._put)
            except Exception as error:  # noqa: BLE001 - any error is raised by the reader of the answer
                self._put(error)

    def _put(self, answer: Any) -> None:
        self.answer.append(answer)
        self._changed.put(None)


class Workers:
    """The workers of a collector: it starts them, asks them for batches, watches them and ends them.

    There is one subclass for each way to reach the workers. None refers to the collector, which ends as soon
    as a program drops it.

    Call sequence:

    1. :meth:`require_alone`, before anything starts.
    2. :meth:`launch` starts the processes or jobs, and :meth:`form` connects them.
    3. :meth:`starting` surrounds all of that, and the connection of the schemes.
    4. :meth:`ask` and :meth:`take`, or :meth:`gather`, for batches.
    5. :meth:`end` has workers end; it is left out after an error at the start. Then come :meth:`kill`, the
       shutdown of the schemes, and :meth:`leave`.

    Args:
        waits: seconds that the collector has waited for each worker.

    Attributes:
        nodes: their processes or jobs.
        number: how many there are.
        launcher: the launcher that has started them.
    """

    _join: Callable[..., Any] = staticmethod(torch.cat)
    """Makes one batch of a list of them, one of each worker."""

    def __init__(self, waits: WaitingTimes) -> None:
        self.nodes = Nodes()
        self.number = 0
        self.launcher = ""
        self._waits = waits
        self._asked: dict[int, BatchRequest] = {}  # workers that were asked for a batch not taken yet
        self._arrived: queue.SimpleQueue[None] = queue.SimpleQueue()

    # -- start -------------------------------------------------------------------------------------

    def require_alone(self) -> None:
        """Raise LifecycleError if this process cannot make the group or RPC world of these workers."""
        raise NotImplementedError

    def starting(self) -> contextlib.AbstractContextManager[None]:
        """Return a context whose errors have the tracebacks of workers that could not start."""
        raise NotImplementedError

    def launch(
        self,
        launcher: str,
        slurm_kwargs: dict[str, Any],
        program: Callable[..., None],
        arguments: Sequence[Arguments],
    ) -> list[Any]:
        """Start a program for each item of ``arguments``; return the processes or jobs.

        With ``launcher="submitit_delayed"``, the programs run already.
        """
        self.launcher, self.number = launcher, len(arguments)
        if launcher == "mp":
            return [self.nodes.start(program, copied, **others) for copied, others in arguments]
        if launcher == "submitit":
            executor = importlib.import_module("submitit").AutoExecutor(folder="log_test")
            executor.update_parameters(**slurm_kwargs)
            return [self.nodes.submit(executor, program, **copied, **others) for copied, others in arguments]
        return []

    def form(self, action: Callable[[], None]) -> None:
        """Call ``action``, which makes the group or RPC world, once the processes have started.

        Raises:
            WorkerError: a process has ended.
            SyncTimeoutError: processes are late.
        """
        self.nodes.await_ready(START_SECONDS)
        # By itself, PyTorch waits for half an hour or for 1,000 days. Jobs may wait for their hosts.
        self.nodes.attend(action, START_SECONDS if self.launcher == "mp" else math.inf)

    def alive(self, idx: int) -> bool:
        """Return False only if a worker has certainly ended."""
        return self.nodes.alive(idx)

    # -- data --------------------------------------------------------------------------------------

    def gather(self) -> TensorDictBase:
        """Return a batch of each worker, as one."""
        for idx in range(self.number):
            self.ask(idx)
        batches = dict(self.take() for _ in range(self.number))
        found: TensorDictBase = self._join([batches[idx] for idx in sorted(batches)])
        return found

    def ask(self, idx: int) -> None:
        """Have a worker send its next batch, unless this was done before."""
        if (request := self._asked.get(idx)) is None:
            request = self._asked[idx] = BatchRequest(partial(self._request, idx), self._arrived)
        request.begin()

    def take(self) -> tuple[int, TensorDictBase]:
        """Wait for a batch; return the worker, and the batch with trajectory numbers of this worker alone.

        Raises:
            WorkerError: a worker has failed or ended.
            SyncTimeoutError: a worker is late.
        """
        self._waits.require_in_time()
        while (found := self._look()) is None:
            self.nodes.require_alive()
            self._waits.require_in_time()
        idx, arrived = found
        self._waits.end(idx)
        self._asked.pop(idx, None)
        data = self._read(idx, arrived)
        key = ("collector", "traj_ids")
        if key in data.keys(True):
            data.set_(key, data[key] * self.number + idx)
        return idx, data

    def _request(self, idx: int, put: Put) -> None:
        """Ask a worker for its next batch, and have ``put`` called with it; runs in a thread."""
        raise NotImplementedError

    def _read(self, idx: int, arrived: Any) -> TensorDictBase:
        """Return the batch of a worker; raise WorkerError if an error has arrived instead."""
        raise NotImplementedError

    @property
    def _pending(self) -> set[int]:
        """Workers whose next batch is awaited."""
        return {idx for idx, request in list(self._asked.items()) if request.pending}

    def _look(self) -> tuple[int, Any] | None:
        """Return a worker whose batch has arrived, and the batch or error; None if none came in a while."""
        start = time.monotonic()
        with contextlib.suppress(queue.Empty):
            self._arrived.get(timeout=0.0 if self._answers() else _LOOK_SECONDS)
        self._waits.add(time.monotonic() - start, self._pending)
        return next(iter(self._answers().items()), None)

    def _answers(self) -> dict[int, Any]:
        return {idx: request.answer[0] for idx, request in list(self._asked.items()) if request.answer}

    def _drop(self, workers: Iterable[int]) -> None:
        """Drop the batches of workers that have arrived."""
        for idx in workers:
            self._asked.pop(idx, None)

    def _await_pending(self, seconds: float) -> None:
        """Wait until no batch is awaited, and drop those that have come."""
        deadline = time.monotonic() + seconds
        while self._pending and time.monotonic() < deadline:
            if (found := self._look()) is not None:
                self._drop([found[0]])

    # -- end ---------------------------------------------------------------------------------------

    def end(self, seconds: float) -> None:
        """Have the workers end, within some seconds."""
        raise NotImplementedError

    def kill(self) -> None:
        """End all workers at once."""
        self.nodes.kill()

    def leave(self) -> None:
        """Release what the schemes may have needed until their end."""


def portable(env: Any) -> Any:
    """Return an environment, or a function that makes one, in a form that can be pickled."""
    return env if isinstance(env, (EnvBase, EnvCreator)) else CloudpickleWrapper(env)
