"""The options of a run, and handles of the processes of each side."""

from __future__ import annotations

import contextlib
import math
import os
import signal
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch.multiprocessing as mp

from benchmarks.sender import Case, serve

__all__ = ["Group", "GroupFailed", "Plan", "groups", "interleave"]


@dataclass(frozen=True)
class Plan:
    """The options of one run.

    Attributes:
        sizes: model sizes in MB.
        tensors: numbers of tensors.
        workers: numbers of workers.
        schemes: names of our sides.
        repeats: turns of each side at the largest sizes; small updates get ten times as many.
        timeout: seconds for one answer of a side.
        start_timeout: seconds until all processes of a side are connected; each imports torch first.
        budget: seconds after which a slow side gets no further turns.
        tensors_megabytes: size of the model in the many-tensors case.
        tensors_workers: workers in the many-tensors case.
        rounds: number of times that a side's processes are started, if sides do not run at once.
        many: number of tensors beyond which TorchRL is also measured without a limit on open files.
    """

    sizes: tuple[float, ...] = (1.0, 100.0, 1000.0)
    tensors: tuple[int, ...] = (16, 1000, 5000)
    workers: tuple[int, ...] = (1, 2, 4, 8)
    schemes: tuple[str, ...] = ("shared", "process")
    repeats: int = 10
    timeout: float = 60.0
    start_timeout: float = 120.0
    budget: float = 30.0
    tensors_megabytes: float = 5.0
    tensors_workers: int = 2
    many: int = 200
    rounds: int = 1

    def for_one_round(self) -> Plan:
        """Return this plan with the turns of one of its rounds."""
        return replace(self, repeats=math.ceil(self.repeats / self.rounds), budget=self.budget / self.rounds)

    def repeats_for(self, megabytes: float) -> int:
        """Return the number of turns of each side at this size."""
        return self.repeats * 10 if megabytes <= 10 else self.repeats

    @property
    def pairs(self) -> tuple[tuple[str, str], ...]:
        """Our side and TorchRL's, for each scheme."""
        return tuple((scheme, f"torchrl-{scheme}") for scheme in self.schemes)

    @property
    def largest(self) -> float:
        """The largest size, where stall and memory are measured."""
        return max(self.sizes)


class GroupFailed(Exception):
    """A side failed or took too long; the message is short enough for a cell."""


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
        """Call a method of the sender by its name, and return the result.

        Raises:
            GroupFailed: the call failed or took longer than ``timeout`` seconds; the group is dead then.
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
    """Start groups for several sides, wait until each is ready or has failed, and end them on leaving."""
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
        order: method of the sender to call.
        repeats: number of turns.
        warmup: number of turns before, whose results are dropped.
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
