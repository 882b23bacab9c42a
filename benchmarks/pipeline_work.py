"""Conversions that take a chosen time."""

from __future__ import annotations

import contextlib
import functools
import statistics
import time
import weakref
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from multiprocessing.connection import Connection

import torch
import torch.multiprocessing as mp

__all__ = ["WORKS", "Conversion", "Work", "both_cores", "make_weights", "seconds_of_a_sine"]

WORKS = {"transfer-bound": 0.0, "balanced": 1.0, "conversion-bound": 3.0}
"""How long converting and encoding takes, in times of the transfer; at least as long as encoding alone."""

_CACHED = 1 << 14  # elements that stay in the cache of a core


@dataclass(frozen=True)
class Work:
    """What is done to each tensor.

    Attributes:
        sines: so many times the sine of some numbers, for which one core alone is needed.
        copies: whether a new tensor is made.
    """

    sines: int = 0
    copies: bool = False


class Conversion:
    """Does a :class:`Work`, which does not change the result.

    Attributes:
        work: what is done to each tensor.
        most: bytes of all converted tensors that were alive at once, at most.
    """

    def __init__(self) -> None:
        self.work = Work()
        self.most = 0
        self._alive: weakref.WeakSet[torch.Tensor] = weakref.WeakSet()

    def __call__(self, items: Iterator[tuple[str, torch.Tensor]]) -> Iterator[tuple[str, torch.Tensor]]:
        scratch = torch.zeros(_CACHED)
        for name, tensor in items:
            for _ in range(self.work.sines):
                scratch.sin_()
            if self.work.copies:
                tensor = tensor.clone()
                self._alive.add(tensor)
                self.most = max(self.most, sum(one.nbytes for one in self._alive))
            yield name, tensor
            del tensor


def make_weights(megabytes: float, count: int) -> dict[str, torch.Tensor]:
    """``count`` bfloat16 matrices of together so many MB."""
    size = int(megabytes * 1e6 / count / 2 / 256)
    return {f"layer{i}.weight": torch.randn(size, 256).to(torch.bfloat16) for i in range(count)}


def seconds_of_a_sine() -> float:
    scratch, best = torch.zeros(_CACHED), float("inf")
    for _ in range(5):
        start = time.perf_counter()
        for _ in range(100):
            scratch.sin_()
        best = min(best, (time.perf_counter() - start) / 100)
    return best


def both_cores() -> tuple[float, float]:
    """How long this process and another take at once, of one after the other; the other one copies.

    No pipeline of the two can do better on this machine than that, where both need a core all the time.

    Returns:
        while this one computes, and while it copies too.
    """
    ctx = mp.get_context("spawn")
    pipe, theirs = ctx.Pipe()
    other = ctx.Process(target=_copy_when_told, args=(theirs,), daemon=True)
    other.start()
    copy = _Copy()
    _seconds(functools.partial(_copy_in, pipe, copy))  # it has started, and all memory was touched
    compute = functools.partial(_compute, round(_seconds(copy) / seconds_of_a_sine()))
    ratios = []
    for mine in (compute, copy):
        turns = [_at_once(pipe, mine) for _ in range(5)]
        ratios.append(statistics.median(turns))
    pipe.close()
    other.join(10.0)
    return ratios[0], ratios[1]


def _at_once(pipe: Connection, mine: Callable[[], None]) -> float:
    alone = _seconds(mine) + _seconds(functools.partial(_copy_in, pipe))
    return _seconds(functools.partial(_copy_in, pipe, mine)) / alone


def _copy_when_told(pipe: Connection) -> None:
    torch.set_num_threads(1)
    copy = _Copy()
    with contextlib.suppress(EOFError):
        while pipe.recv():
            copy()
            pipe.send(True)


class _Copy:
    """Copies 480 MB."""

    def __init__(self) -> None:
        self._source, self._target = torch.ones(2, 20_000_000, dtype=torch.uint8)

    def __call__(self) -> None:
        for _ in range(24):
            self._target.copy_(self._source)


def _copy_in(pipe: Connection, meanwhile: Callable[[], None] = lambda: None) -> None:
    pipe.send(True)
    meanwhile()
    pipe.recv()


def _compute(sines: int) -> None:
    scratch = torch.zeros(_CACHED)
    for _ in range(sines):
        scratch.sin_()


def _seconds(action: Callable[[], None]) -> float:
    start = time.perf_counter()
    action()
    return time.perf_counter() - start
