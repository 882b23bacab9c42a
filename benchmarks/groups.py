"""Handles of the processes of each side, for the process that compares them."""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections.abc import Iterator, Sequence
from typing import Any

import torch.multiprocessing as mp

from benchmarks.sender import Case, serve

__all__ = ["Group", "GroupFailed", "groups", "interleave"]


class GroupFailed(Exception):
    """A side could not do what it was asked, or not in time; the message says which, in short."""


class Group:
    """The sending process of one side and, through it, its workers."""

    def __init__(self, side: str, case: Case) -> None:
        ctx = mp.get_context(case.start)
        self.side, self.case = side, case
        self.pids: tuple[int, ...] = ()
        self.failure: str | None = None
        self._conn, theirs = ctx.Pipe()
        self._process = ctx.Process(target=serve, args=(theirs, side, case))
        self._process.start()
        theirs.close()

    def begin(self, timeout: float) -> None:
        """Wait until every worker is connected.

        Raises:
            GroupFailed: as :meth:`ask`.
        """
        self.pids = self._answer(timeout)

    def ask(self, order: str, timeout: float) -> Any:
        """Let the sender call one of its methods, and return the result.

        Raises:
            GroupFailed: it failed or took longer than ``timeout`` seconds; the group is dead then.
        """
        if self.failure is not None:
            raise GroupFailed(self.failure)
        self._conn.send(order)
        return self._answer(timeout)

    def close(self) -> None:
        """End all its processes."""
        if self.failure is None:
            with contextlib.suppress(GroupFailed, OSError):
                self.ask("close", 20.0)
                self._process.join(5.0)  # TorchRL's may hang at exit
        self._kill()

    def _answer(self, timeout: float) -> Any:
        try:
            if not self._conn.poll(timeout):
                self._fail(f"never (cut after {timeout:g} s)")
            good, result = self._conn.recv()
        except (EOFError, OSError):
            self._fail("a process died")
        if not good:
            self._fail(result)
        return result

    def _fail(self, why: str) -> None:
        self.failure = why
        self._kill()
        raise GroupFailed(why)

    def _kill(self) -> None:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            if os.getpgid(self._process.pid) == self._process.pid:
                os.killpg(self._process.pid, signal.SIGKILL)
        self._process.join(1.0)
        if self._process.is_alive():
            self._process.kill()
            self._process.join()


@contextlib.contextmanager
def groups(cases: Sequence[tuple[str, Case]], timeout: float) -> Iterator[list[Group]]:
    """Groups for several sides at once, all ready or marked as failed; ended on leaving."""
    started = [Group(side, case) for side, case in cases]
    try:
        for group in started:
            with contextlib.suppress(GroupFailed):
                group.begin(timeout)
        yield started
    finally:
        for group in started:
            group.close()


def interleave(
    sides: Sequence[Group], order: str, repeats: int, *, warmup: int = 2, timeout: float, budget: float
) -> list[list[Any]]:
    """Ask each side in turn, ``repeats`` times over: A B C A B C ...

    Args:
        sides: live groups; one that fails on the way keeps no results and is left out from then on.
        order: what they are asked to do.
        repeats: how often.
        warmup: rounds before, not kept.
        timeout: seconds for one answer.
        budget: seconds after which a side that is slow gets no further turns.
    """
    results: list[list[Any]] = [[] for _ in sides]
    spent = [0.0] * len(sides)
    for turn in range(warmup + repeats):
        for place, group in enumerate(sides):
            if group.failure is not None or (spent[place] > budget and len(results[place]) > 0):
                continue
            start = time.perf_counter()
            try:
                answer = group.ask(order, timeout)
            except GroupFailed:
                results[place].clear()
                continue
            spent[place] += time.perf_counter() - start
            if turn >= warmup or spent[place] > budget:
                results[place].append(answer)
    return results
