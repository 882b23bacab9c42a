"""Threads for large arrays: numpy releases the interpreter lock while it computes.

Threads pay where a single step takes a tenth of a millisecond. Encoding and decoding a patch take many
smaller steps, and were slower with two threads than with one.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

import torch

_T = TypeVar("_T")
_R = TypeVar("_R")

_MANY = 1 << 18
"""Array elements below which one thread is faster than two."""


def threads_for(numbers: int) -> int:
    """Return the number of threads worth starting for ``numbers`` elements: at most as many as torch uses."""
    return torch.get_num_threads() if numbers >= _MANY else 1


def in_threads(work: Callable[[_T], _R], items: Sequence[_T], threads: int) -> list[_R]:
    """Return ``[work(item) for item in items]``, computed by ``threads`` threads.

    ``work`` sets its own ``torch.no_grad``, which is local to a thread.
    """
    if min(threads, len(items)) < 2:
        return [work(item) for item in items]
    with ThreadPoolExecutor(threads) as pool:  # not kept: threads do not survive a fork
        return list(pool.map(work, items))
