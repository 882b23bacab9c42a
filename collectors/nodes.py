"""Processes of workers on this machine, which tell what went wrong in them."""

from __future__ import annotations

import contextlib
import time
import traceback
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from typing import Any

import cloudpickle
import torch.multiprocessing as mp

from weight_update import SyncTimeoutError, WorkerError

__all__ = ["Nodes"]

_READY = "ready"
_LOOK_SECONDS = 0.2
_JOIN_SECONDS, _KILL_SECONDS = 5.0, 2.0


@dataclass
class _Node:
    process: Any
    pipe: Connection
    ready: bool = False
    told: str = ""

    def listen(self) -> None:
        """Take what it has told until now."""
        with contextlib.suppress(EOFError, OSError):
            while self.pipe.poll(0):
                said = self.pipe.recv()
                self.ready = self.ready or said == _READY
                self.told = self.told if said == _READY else said


class Nodes:
    """The processes, by worker index."""

    def __init__(self) -> None:
        self._nodes: list[_Node] = []

    def start(self, target: Callable[..., None], by_value: dict[str, Any], **arguments: Any) -> Any:
        """Start a process that runs ``target(**by_value, **arguments)``.

        Args:
            target: a function of a module.
            by_value: arguments that are copied. Multiprocessing would move their tensors into shared memory,
                and the worker would see each step of the trainer.
            arguments: as multiprocessing passes them.

        Returns:
            the process.
        """
        ctx: Any = mp.get_context(mp.get_start_method(allow_none=True) or "spawn")
        pipe, theirs = ctx.Pipe(duplex=False)
        process = ctx.Process(target=_run, args=(theirs, target, cloudpickle.dumps(by_value), arguments))
        process.start()
        theirs.close()
        self._nodes.append(_Node(process, pipe))
        return process

    def await_ready(self, timeout: float) -> None:
        """Wait until all have read their arguments.

        Raises:
            WorkerError: some ended before that.
            SyncTimeoutError: some are late.
        """
        deadline = time.monotonic() + timeout
        while late := [idx for idx, node in enumerate(self._nodes) if not node.ready]:
            self.require_alive()
            if time.monotonic() > deadline:
                raise SyncTimeoutError(f"the processes of workers {late} did not start in {timeout:g} s")
            wait([self._nodes[idx].pipe for idx in late], _LOOK_SECONDS)
            for idx in late:
                self._nodes[idx].listen()

    def alive(self, idx: int) -> bool:
        """Whether the process of worker ``idx`` runs; true where it was not started here."""
        return idx >= len(self._nodes) or bool(self._nodes[idx].process.is_alive())

    def require_alive(self) -> None:
        """Raise WorkerError if processes have ended."""
        gone = [idx for idx in range(len(self._nodes)) if not self.alive(idx)]
        if gone:
            raise WorkerError("\n".join(map(self._epitaph, gone)))

    def require_joined(self, idx: int) -> None:
        """The connection to ``idx`` broke: as :meth:`require_alive`, giving the process a moment to end."""
        self._await_end([idx])
        self.require_alive()

    def told(self, failing: Iterable[int] = ()) -> str:
        """Tracebacks of those that have failed; those of ``failing`` are given a moment to end."""
        self._await_end(failing)
        failed = []
        for idx, node in enumerate(self._nodes):
            node.listen()
            if node.told:
                failed.append(f"worker {idx}: {node.told}")
        return "\n".join(failed)

    def end(self, ask: Callable[[], None], timeout: float) -> None:
        """Wait until all have ended; whoever has not after ``timeout`` seconds is killed.

        Args:
            ask: tells them to end; called again and again, for a worker may miss it.
            timeout: seconds.
        """
        deadline = time.monotonic() + timeout
        while (running := self._running()) and time.monotonic() < deadline:
            ask()
            wait([process.sentinel for process in running], _LOOK_SECONDS)
        self.kill()

    def kill(self) -> None:
        """End all at once."""
        for process in self._running():
            process.terminate()
        deadline = time.monotonic() + _KILL_SECONDS
        for node in self._nodes:
            node.process.join(max(deadline - time.monotonic(), 0.0))
            if node.process.is_alive():
                node.process.kill()
                node.process.join()
            node.listen()
            node.pipe.close()

    def _await_end(self, workers: Iterable[int]) -> None:
        deadline = time.monotonic() + _JOIN_SECONDS
        for node in (self._nodes[idx] for idx in workers if idx < len(self._nodes)):
            node.process.join(max(deadline - time.monotonic(), 0.0))

    def _running(self) -> list[Any]:
        return [node.process for node in self._nodes if node.process.is_alive()]

    def _epitaph(self, idx: int) -> str:
        node = self._nodes[idx]
        node.listen()
        return f"worker {idx} has ended (exit code {node.process.exitcode})" + (
            f":\n{node.told}" if node.told else ""
        )


def _run(pipe: Connection, target: Callable[..., None], by_value: bytes, arguments: dict[str, Any]) -> None:
    try:
        arguments.update(cloudpickle.loads(by_value))
        pipe.send(_READY)
        target(**arguments)
    except BaseException:
        with contextlib.suppress(OSError):  # the trainer may be gone
            pipe.send(traceback.format_exc())
        raise
