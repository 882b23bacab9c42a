"""Worker processes on this machine, which report their errors, and jobs of a batch system."""

from __future__ import annotations

import contextlib
import random
import socket
import threading
import time
import traceback
from collections.abc import Callable, Iterable
from concurrent import futures
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

import cloudpickle
import torch.multiprocessing as mp

from collectors.exits import await_all, describe_exit
from weight_update import SyncTimeoutError, WorkerError

_READY = "ready"
_LOOK_SECONDS, _LOOK_AT_JOB_SECONDS = 0.2, 1.0
_JOIN_SECONDS, _KILL_SECONDS = 5.0, 2.0
_PORTS, _TRIES = 20_000, 100  # the first port to try, above those of known services; and how many


@dataclass
class _Process:
    """A process on this machine."""

    process: Any
    pipe: Connection
    ready: bool = False
    error: str = ""

    def alive(self) -> bool:
        return bool(self.process.is_alive())

    def join(self, seconds: float) -> None:
        self.process.join(seconds)

    def listen(self) -> None:
        """Read the messages that have arrived."""
        with contextlib.suppress(EOFError, OSError):
            while self.pipe.poll(0):
                message = self.pipe.recv()
                self.ready = self.ready or message == _READY
                self.error = self.error if message == _READY else message

    def describe_exit(self) -> str:
        return describe_exit(self.process, self.error)

    def terminate(self) -> None:
        self.process.terminate()

    def close(self, seconds: float) -> None:
        """Wait for the end, kill the process if it is late, and read its last messages."""
        self.process.join(seconds)
        if self.process.is_alive():
            self.process.kill()
            self.process.join()
        self.listen()
        self.pipe.close()


@dataclass
class _Job:
    """A job of a batch system: a ``Job`` of submitit."""

    job: Any
    error: str = ""
    _done: bool = False
    _next_look: float = 0.0

    def alive(self) -> bool:
        """Return whether the job has not ended; look at a shared file system at most once in a second."""
        if not self._done and time.monotonic() >= self._next_look:
            self._next_look = time.monotonic() + _LOOK_AT_JOB_SECONDS
            self._done = self.job.done()
        return not self._done

    def join(self, seconds: float) -> None:
        deadline = time.monotonic() + seconds
        while self.alive() and time.monotonic() < deadline:
            time.sleep(_LOOK_SECONDS)

    def listen(self) -> None:
        """Read the error of a job that has ended."""
        if not self.error and not self.alive():
            self.error = str(self.job.exception() or "")

    def describe_exit(self) -> str:
        return f"has ended (job {self.job.job_id})" + (f":\n{self.error}" if self.error else "")

    def terminate(self) -> None:
        self.job.cancel(check=False)

    def close(self, seconds: float) -> None:
        pass


class Nodes:
    """The worker processes or jobs, by index."""

    def __init__(self) -> None:
        self._nodes: list[_Process | _Job] = []

    def start(self, target: Callable[..., None], by_value: dict[str, Any], **arguments: Any) -> Any:
        """Start a process that runs ``target(**by_value, **arguments)``, and return it.

        The arguments ``by_value`` are copied. Multiprocessing would move their tensors into shared memory,
        and the worker would see each step of the trainer.
        """
        ctx: Any = mp.get_context(mp.get_start_method(allow_none=True) or "spawn")
        pipe, theirs = ctx.Pipe(duplex=False)
        process = ctx.Process(target=_run, args=(theirs, target, cloudpickle.dumps(by_value), arguments))
        process.start()
        theirs.close()
        self._nodes.append(_Process(process, pipe))
        return process

    def submit(self, executor: Any, target: Callable[..., None], **arguments: Any) -> Any:
        """Submit a job that runs ``target(**arguments)`` to an executor of submitit, and return it."""
        job = executor.submit(target, **arguments)
        job.paths.submitted_pickle.chmod(0o600)  # it contains the schemes' tokens
        self._nodes.append(_Job(job))
        return job

    def await_ready(self, timeout: float) -> None:
        """Wait until all processes have read their arguments; raise if one ends (WorkerError) or is late."""
        deadline = time.monotonic() + timeout
        processes = [node for node in self._nodes if isinstance(node, _Process)]
        while late := {idx: node for idx, node in enumerate(processes) if not node.ready}:
            self.require_alive()
            if time.monotonic() > deadline:
                raise SyncTimeoutError(f"the processes of workers {[*late]} did not start in {timeout:g} s")
            wait([node.pipe for node in late.values()], _LOOK_SECONDS)
            for node in late.values():
                node.listen()

    def attend(self, action: Callable[[], None], timeout: float) -> None:
        """Run ``action``, which waits for all processes, in a thread; return when it has ended.

        The thread is left behind if a process ends (WorkerError), or if it takes longer than ``timeout``
        seconds (SyncTimeoutError): it waits in C++ and cannot be interrupted. After Ctrl-C it gets some
        seconds to end, because processes that are alive let it end.
        """
        done: futures.Future[None] = futures.Future()

        def run() -> None:
            try:
                action()
                done.set_result(None)
            except BaseException as error:  # noqa: BLE001 - raised again in the thread that waits
                done.set_exception(error)

        deadline = time.monotonic() + timeout
        try:
            threading.Thread(target=run, name="weight_update-group", daemon=True).start()
            while not futures.wait([done], _LOOK_SECONDS).done:
                self.require_alive()
                if time.monotonic() > deadline:
                    raise SyncTimeoutError(f"workers did not form a process group in {timeout:g} s")
        except KeyboardInterrupt:
            futures.wait([done], _JOIN_SECONDS)
            raise
        done.result()

    def alive(self, idx: int) -> bool:
        """Return whether worker ``idx`` is alive; True for a worker that was not started here."""
        return idx >= len(self._nodes) or self._nodes[idx].alive()

    def require_alive(self) -> None:
        """Raise WorkerError if processes have ended."""
        gone = [idx for idx in range(len(self._nodes)) if not self.alive(idx)]
        if gone:
            raise WorkerError("\n".join(map(self._exit_of, gone)))

    def require_joined(self, *workers: int) -> None:
        """Raise WorkerError if one of ``workers``, whose connections broke, fails or ends in some seconds."""
        errors = self.errors(workers)
        self.require_alive()
        if errors:  # the end of the process takes longer
            raise WorkerError(errors)

    def errors(self, failing: Iterable[int]) -> str:
        """Return the tracebacks of failed workers; wait a moment for the workers ``failing`` to end."""
        self._await_end(failing)
        failed = []
        for idx, node in enumerate(self._nodes):
            node.listen()
            if node.error:
                failed.append(f"worker {idx}: {node.error}")
        return "\n".join(failed)

    def end(self, ask: Callable[[], None], timeout: float) -> None:
        """Wait until all workers have ended; kill those that have not after ``timeout`` seconds.

        ``ask`` asks them to end; it is called repeatedly, because a worker may miss it.
        """
        deadline = time.monotonic() + timeout
        while (running := self._running()) and time.monotonic() < deadline:
            ask()
            running[0].join(_LOOK_SECONDS)
        self.kill()

    def kill(self) -> None:
        """End all workers at once."""
        for node in self._running():
            node.terminate()
        deadline = time.monotonic() + _KILL_SECONDS
        for node in self._nodes:
            node.close(max(deadline - time.monotonic(), 0.0))

    def _await_end(self, workers: Iterable[int]) -> None:
        await_all([self._nodes[idx] for idx in workers if idx < len(self._nodes)], _JOIN_SECONDS)

    def _running(self) -> list[Any]:
        return [node for node in self._nodes if node.alive()]

    def _exit_of(self, idx: int) -> str:
        node = self._nodes[idx]
        node.listen()
        return f"worker {idx} {node.describe_exit()}"


def _run(pipe: Connection, target: Callable[..., None], by_value: bytes, arguments: dict[str, Any]) -> None:
    try:
        arguments.update(cloudpickle.loads(by_value))
        pipe.send(_READY)
        target(**arguments)
    except BaseException:
        with contextlib.suppress(OSError):  # the trainer may be gone
            pipe.send(traceback.format_exc())
        raise


def free_port() -> int:
    """Return a port of this machine that is free.

    If possible, the port is below those that the kernel gives to connections. A connection could take one of
    the kernel's ports before the caller listens there.
    """
    ports = Path("/proc/sys/net/ipv4/ip_local_port_range").read_text("utf-8")
    given = int(ports.split()[0])  # the first of them
    tries = random.SystemRandom().sample(range(_PORTS, given), _TRIES) if given >= _PORTS + _TRIES else []
    for port in tries:
        with socket.socket() as sock, contextlib.suppress(OSError):
            sock.bind(("localhost", port))
            return port
    with socket.socket() as sock:
        sock.bind(("localhost", 0))
        return int(sock.getsockname()[1])
