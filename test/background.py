"""Work beside a test, and one thread of torch for tests that fork."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor

import torch


@contextlib.contextmanager
def repeating(*actions: Callable[[], object]) -> Iterator[None]:
    """Call each action again and again while the block runs, in threads; raise their error at its end."""
    over = threading.Event()

    def run(action: Callable[[], object]) -> None:
        while not over.is_set():
            action()

    with ThreadPoolExecutor(len(actions)) as pool:
        running = [pool.submit(run, action) for action in actions]
        try:
            yield
        finally:
            over.set()
    for one in running:
        one.result()


@contextlib.contextmanager
def one_thread() -> Iterator[None]:
    """Let torch use one thread: a child forked after OpenMP ran hangs in its own parallel loops."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)
