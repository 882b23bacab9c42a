"""Conversions that take a chosen time."""

from __future__ import annotations

import time
import weakref
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from benchmarks.pipeline_sides import Side

__all__ = ["WORKS", "Conversion", "Work", "balance", "make_weights"]

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


def balance(work: Work, side: Side, share: float) -> Work:
    """A work that takes ``share`` times as long as the transfer of ``side``, which is serial."""
    plain = replace(work, sines=0)
    reports = [side.send(plain) for _ in range(3)]
    spent = [report.seconds for report in reports[1:]]
    made = min(one["convert"] + one["encode"] for one in spent)
    moved = min(one["send"] + one["ack"] for one in spent)
    lacking = share * moved - made
    return replace(work, sines=max(0, round(lacking / _seconds_of_a_sine() / side.tensors)))


def _seconds_of_a_sine() -> float:
    scratch, best = torch.zeros(_CACHED), float("inf")
    for _ in range(5):
        start = time.perf_counter()
        for _ in range(100):
            scratch.sin_()
        best = min(best, (time.perf_counter() - start) / 100)
    return best
