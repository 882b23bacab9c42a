"""The moment of the swap: no update lands while a forward pass runs."""

from __future__ import annotations

import contextlib
import os
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn

from weight_update.errors import LifecycleError, LinkClosedError, SyncTimeoutError

__all__ = ["Gate", "shared_gate"]


class _Job:
    def __init__(self, action: Callable[[], None]) -> None:
        self.action = action
        self.done = False
        self.error: BaseException | None = None
        self.seconds = 0.0

    def run(self) -> None:
        start = time.perf_counter()
        try:
            self.action()
        except BaseException as error:  # noqa: BLE001 - handed to the thread that waits in run()
            self.error = error
        self.seconds = time.perf_counter() - start
        self.done = True


_gates: weakref.WeakSet[Gate] = weakref.WeakSet()


class Gate:
    """Lets forward passes in at any time, and an update when nobody is inside.

    Threads that compute call :meth:`enter` and :meth:`leave` (nested calls are fine). An update goes
    through :meth:`run`: at once when nobody is inside, else by the thread that leaves last, so a worker
    that computes without pause neither starves updates nor waits for another thread to wake up.
    """

    def __init__(self) -> None:
        self._reset()
        _gates.add(self)

    def _reset(self) -> None:
        self._lock = threading.Lock()
        self._moved = threading.Condition(self._lock)
        self._inside: dict[int, int] = {}
        self._jobs: deque[_Job] = deque()

    def enter(self) -> None:
        """Begin a stretch in which no update lands."""
        me = threading.get_ident()
        with self._lock:
            if me not in self._inside:
                while self._jobs and self._inside:  # others are inside: let the update go first
                    self._moved.wait()
                self._run_jobs()
            self._inside[me] = self._inside.get(me, 0) + 1

    def leave(self) -> None:
        """End it; updates that waited land now."""
        me = threading.get_ident()
        with self._lock:
            depth = self._inside.get(me, 0)
            if depth > 1:
                self._inside[me] = depth - 1
                return
            self._inside.pop(me, None)
            self._run_jobs()

    @contextlib.contextmanager
    def hold(self) -> Iterator[None]:
        """:meth:`enter` and :meth:`leave` as a context manager."""
        self.enter()
        try:
            yield
        finally:
            self.leave()

    def run(
        self,
        action: Callable[[], None],
        timeout: float | None = None,
        given_up: Callable[[], bool] = lambda: False,
    ) -> float:
        """Run ``action`` while nobody is inside; its exception is raised here.

        Args:
            action: short; forward passes wait while it runs.
            timeout: seconds to wait for a moment with nobody inside.
            given_up: ends the wait when it is true; asked again after :meth:`look_again`.

        Returns:
            seconds for which it kept forward passes out.

        Raises:
            SyncTimeoutError: somebody stayed inside for ``timeout`` seconds; ``action`` was not run.
            LinkClosedError: the wait was given up; ``action`` was not run.
            LifecycleError: the calling thread is inside itself.
        """
        job = _Job(action)
        with self._lock:
            if threading.get_ident() in self._inside:
                raise LifecycleError("an update cannot land inside hold() or a forward pass of this thread")
            self._jobs.append(job)
            self._run_jobs()
            self._moved.wait_for(lambda: job.done or given_up(), timeout)
            if not job.done:
                self._jobs.remove(job)
                self._moved.notify_all()
                if given_up():
                    raise LinkClosedError("the receiver was shut down while an update waited")
                raise SyncTimeoutError(f"hold() or a forward pass took longer than {timeout} s")
        if job.error is not None:
            raise job.error
        return job.seconds

    def look_again(self) -> None:
        """Let waits that were given up end now."""
        with self._lock:
            self._moved.notify_all()

    def guard(self, module: nn.Module) -> Callable[[], None]:
        """Hold the gate during every forward pass of ``module``; returns what undoes it."""
        handles = [
            module.register_forward_pre_hook(_Enter(self), prepend=True),
            module.register_forward_hook(_Leave(self), always_call=True),
        ]

        def undo() -> None:
            for handle in handles:
                handle.remove()

        return undo

    def _run_jobs(self) -> None:
        if self._jobs and not self._inside:
            while self._jobs:
                self._jobs.popleft().run()
            self._moved.notify_all()


class _Hook:
    """A hook that a copy of the module does not inherit: the copy is not kept up to date."""

    def __init__(self, gate: Gate | None) -> None:
        self.gate = gate

    def __deepcopy__(self, memo: dict[int, Any]) -> _Hook:
        return type(self)(None)

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (None,)


class _Enter(_Hook):
    def __call__(self, module: nn.Module, args: Any) -> None:
        if self.gate is not None:
            _enter(self.gate)


class _Leave(_Hook):
    def __call__(self, module: nn.Module, args: Any, output: Any) -> None:
        if self.gate is not None:
            _leave(self.gate)


@torch.compiler.disable  # type: ignore[untyped-decorator]
def _enter(gate: Gate) -> None:
    gate.enter()


@torch.compiler.disable  # type: ignore[untyped-decorator]
def _leave(gate: Gate) -> None:
    gate.leave()


def _reset_all() -> None:
    for gate in list(_gates):
        gate._reset()


# A forked child must not inherit a gate that another thread of its parent held just then.
os.register_at_fork(after_in_child=_reset_all)

_shared: weakref.WeakValueDictionary[str, Gate] = weakref.WeakValueDictionary()
_shared_lock = threading.Lock()


def shared_gate(name: str | None) -> Gate:
    """The gate that all receivers of one group in this process share; a new one for None."""
    if name is None:
        return Gate()
    with _shared_lock:
        gate = _shared.get(name)
        if gate is None:
            gate = _shared[name] = Gate()
        return gate
