"""Objects that live in processes of their own, and whose methods are called in turns."""

from __future__ import annotations

import contextlib
import os
import random
import signal
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import Any

import torch.multiprocessing as mp

_PATIENCE = 100.0  # seconds for one answer, where the caller sets no limit
_EXITING = 5.0  # seconds from the end of an object to the end of its process


class Failed(Exception):
    """A process failed or took too long; the message is short enough for a cell."""


@dataclass(frozen=True)
class Place:
    """The place of a process.

    Attributes:
        host: name of the host that the process takes for its own; None for this one.
        enter: function that moves the process to that host; None if there is no such network.
    """

    host: str | None = None
    enter: Callable[[], None] | None = None


HERE = Place()


class Process:
    """An object in a process of its own; its methods are called by their names.

    Until :meth:`send`, the one answer to come is that to the object's construction, which is None.

    Args:
        make: function that makes the object, which has a method ``close``.
        args: arguments of ``make``.
        start: start method.
        leader: whether the process starts others; it then leads a session, so that one signal ends them all.
        place: place of the process.

    Attributes:
        failure: reason why the process was ended; None if it was not.
        pid: its id.
    """

    def __init__(
        self,
        make: Callable[..., Any],
        *args: Any,
        start: str = "spawn",
        leader: bool = False,
        place: Place = HERE,
    ) -> None:
        context: Any = mp.get_context(start)
        self._conn, theirs = context.Pipe()
        arguments = (theirs, make, args, leader, place)
        self._process = context.Process(target=_serve, args=arguments, daemon=not leader)
        self._process.start()
        theirs.close()  # so that recv() ends when the process dies
        self.pid: int = self._process.pid
        self.failure: str | None = None

    def send(self, method: str, *args: Any) -> None:
        """Call a method without waiting for the result.

        Raises:
            Failed: the process has died or was ended before.
        """
        if self.failure is not None:
            raise Failed(self.failure)
        try:
            self._conn.send((method, args))
        except OSError:
            self._fail("a process died")

    def answer(self, timeout: float = _PATIENCE) -> Any:
        """Return the result of the oldest call that is not answered yet.

        Raises:
            Failed: the call failed or took longer than ``timeout`` seconds; the process has been ended.
        """
        try:
            if not self._conn.poll(timeout):
                self._fail(f"never (cut after {timeout:g} s)")
            good, result = self._conn.recv()
        except (EOFError, OSError):
            self._fail("a process died")
        if not good:
            self._fail(result)
        return result

    def ask(self, method: str, *args: Any, timeout: float = _PATIENCE) -> Any:
        """Call a method and return its result.

        Raises:
            Failed: as :meth:`answer`.
        """
        self.send(method, *args)
        return self.answer(timeout)

    def end(self) -> None:
        """Tell the process to close its object and exit, without waiting for it."""
        if self.failure is None:
            with contextlib.suppress(OSError):
                self._conn.send(None)

    def close(self, timeout: float = 20.0) -> None:
        """End the process, and with a leader all processes that it has started; wait until it is gone."""
        if self.failure is None:
            self.end()
            with contextlib.suppress(Failed):
                self.answer(timeout)
                self._process.join(min(timeout, _EXITING))  # TorchRL's may hang at exit
        self._kill()

    def _fail(self, reason: str) -> None:
        self.failure = reason
        self._kill()
        raise Failed(reason)

    def _kill(self) -> None:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            if os.getpgid(self.pid) == self.pid:
                os.killpg(self.pid, signal.SIGKILL)
        self._process.join(1.0)
        if self._process.is_alive():
            self._process.kill()
            self._process.join()


def _serve(
    conn: Connection, make: Callable[..., Any], args: tuple[Any, ...], leader: bool, place: Place
) -> None:
    """Run the process: make the object, and answer each call with ``(True, result)``."""
    if leader:
        os.setsid()
    try:
        if place.enter is not None:
            place.enter()
        if place.host is not None:
            os.environ["WEIGHT_UPDATE_HOST"] = place.host
        served = make(*args)
        conn.send((True, None))
        while (call := _next_call(conn)) is not None:
            method, arguments = call
            conn.send((True, getattr(served, method)(*arguments)))
        served.close()
        with contextlib.suppress(OSError):  # nobody waits for it
            conn.send((True, None))
    except Exception as error:  # noqa: BLE001 - the caller shows it as the result
        traceback.print_exc()
        reason = str(error).rpartition(": ")[2]  # the cause stands last, e.g. "Too many open files (24)"
        with contextlib.suppress(OSError):
            conn.send((False, f"never ({reason or type(error).__name__})"))


def _next_call(conn: Connection) -> tuple[str, tuple[Any, ...]] | None:
    try:
        call: tuple[str, tuple[Any, ...]] | None = conn.recv()
    except EOFError:
        return None
    return call


def close_all(processes: Sequence[Process], timeout: float = 20.0) -> None:
    """End the processes at the same time, within ``timeout`` seconds."""
    for process in processes:
        process.end()
    limit = time.monotonic() + timeout
    for process in processes:
        process.close(max(limit - time.monotonic(), 0.0))


def in_turns(
    processes: Sequence[Process],
    method: str,
    repeats: int,
    *,
    warmup: int = 2,
    timeout: float,
    budget: float,
    rest: float = 0.0,
) -> list[list[Any]]:
    """Call a method of each process in turn, ``repeats`` times over, in a random order each time.

    The order matters: what comes next finds the caches, and threads that still spin, of what was before.

    Args:
        processes: one that fails on the way keeps no results and is left out from then on.
        method: name of the method.
        repeats: number of turns.
        warmup: number of turns before, whose results are dropped; new memory is slow at first.
        timeout: seconds for one answer.
        budget: seconds, without those of the warmup, after which a slow process gets no further turns.
        rest: seconds between two calls in which this process alone computes, so that processors stay awake.
    """
    results: list[list[Any]] = [[] for _ in processes]
    spent = [0.0] * len(processes)
    shuffle = random.Random(0).sample
    for turn in range(warmup + repeats):
        for place in shuffle(range(len(processes)), len(processes)):
            process = processes[place]
            if process.failure is not None or spent[place] > budget:
                continue
            begin = time.perf_counter() + rest
            while (start := time.perf_counter()) < begin:
                pass
            try:
                answer = process.ask(method, timeout=timeout)
            except Failed:
                results[place].clear()
                continue
            if turn >= warmup:
                spent[place] += time.perf_counter() - start
                results[place].append(answer)
    return results
