"""The end of worker processes: waiting for it, and its description."""

from __future__ import annotations

import contextlib
import pickle
import signal
import time
import traceback
from collections.abc import Iterable, Mapping, Sequence
from multiprocessing.connection import wait
from typing import Any

from collectors.substitute import Substitute
from collectors.torchrl_names import main_of_worker
from weight_update import SyncTimeoutError, WorkerError

_REAP_SECONDS, _LOOK_SECONDS = 5.0, 0.5
_MOST_TEXT = 20_000  # characters, which a pipe keeps until they are read
_CAUSES = {-one.value: one.name for one in signal.Signals}  # by exit code
_CAUSES[-signal.SIGKILL] += ", often the kernel when memory ran out"
_CAUSES[1] = "probably an exception; see its output"


def describe_exit(process: Any, error: str = "") -> str:
    """Return "has ended" with the exit code of a process and its cause: ``error``, or a signal by name."""
    code = process.exitcode
    if error:
        return f"has ended (exit code {code}):\n{error}"
    cause = _CAUSES.get(code)
    return f"has ended (exit code {code}{f', {cause}' if cause else ''})"


class StartedPipe(Substitute):
    """A substitute for the pipe to a worker that starts, whose first message is awaited with a limit.

    Args:
        pipe: pipe of TorchRL's collector, which waits without a limit.
        worker: index of the worker.
        processes: processes of the workers, by index; TorchRL adds each when it starts it.
        seconds: time for the start.
    """

    def __init__(self, pipe: Any, worker: int, processes: Sequence[Any], seconds: float) -> None:
        super().__init__(pipe)
        self._worker, self._processes, self._seconds = worker, processes, seconds

    def recv(self) -> Any:
        """Return the message of the worker.

        Raises:
            WorkerError: it is an error, or the worker has ended without a message.
            SyncTimeoutError: the worker is late.
        """
        process, deadline = self._processes[self._worker], time.monotonic() + self._seconds
        while process.is_alive() and not self._original.poll(_LOOK_SECONDS):
            if time.monotonic() > deadline:
                raise SyncTimeoutError(
                    f"worker {self._worker} did not start in {self._seconds:g} s (frames_timeout= raises the "
                    "limit)"
                )
        with contextlib.suppress(EOFError, OSError):
            message: Any = self._original.recv() if self._original.poll(0) else None
            if error := error_in(message):
                cause = message.get("exception_msg", "")
                raise WorkerError(f"worker {self._worker}: {cause}\n\nWorker traceback:\n{error}")
            if message is not None:
                return message
        if process.ident is None:  # the collector tells why
            raise WorkerError("")
        await_all([process], _REAP_SECONDS)
        raise WorkerError(f"worker {self._worker} {describe_exit(process)}")


def run_worker(**arguments: Any) -> None:
    """Run a worker of TorchRL's ``MultiCollector``; send the exception that ends it to the collector."""
    try:
        main_of_worker(**arguments)
    except Exception:
        text, half = traceback.format_exc().rstrip(), _MOST_TEXT // 2
        if len(text) > _MOST_TEXT:
            text = f"{text[:half]}\n[...]\n{text[-half:]}"
        with contextlib.suppress(OSError):  # the collector may be gone
            arguments["pipe_child"].send({"error": True, "traceback": text})
        raise


def error_in(message: Any) -> str:
    """Return the traceback in a message of a worker; empty if it is another message."""
    return str(message["traceback"]) if isinstance(message, Mapping) and message.get("error") else ""


def read_error(pipe: Any) -> str:
    """Return the traceback that a worker which has ended has sent; empty if there is none."""
    error = ""
    with contextlib.suppress(EOFError, OSError):
        while not error and pipe.poll(0):
            message = pipe.recv_bytes()
            with contextlib.suppress(Exception):  # tensors that are gone with the worker
                error = error_in(pickle.loads(message))
    return error


def await_all(processes: Iterable[Any], seconds: float) -> None:
    """Wait until all processes have ended and ``is_alive()`` says so, at most ``seconds``."""
    deadline = time.monotonic() + seconds
    for process in processes:
        process.join(max(deadline - time.monotonic(), 0.0))


def await_any(processes: Iterable[Any], seconds: float) -> None:
    """Wait until a process has ended and ``is_alive()`` says so, at most ``seconds``.

    A sentinel is ready as soon as a dying process closes its files. ``is_alive()`` is still True then, until
    ``join()`` has reaped the process.
    """
    by_sentinel = {process.sentinel: process for process in processes}
    await_all([by_sentinel[ready] for ready in wait(list(by_sentinel), seconds)], _REAP_SECONDS)
