"""Threads for large arrays, and threads that may run C++ code of PyTorch while the interpreter exits."""

from __future__ import annotations

import contextlib
import sys
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future, wait
from typing import Any, TypeVar

import torch

_T = TypeVar("_T")
_R = TypeVar("_R")

_MANY = 1 << 18
"""Array elements below which one thread is faster than two."""

_FAREWELL_SECONDS = 2.0

_threads: weakref.WeakSet[threading.Thread] = weakref.WeakSet()


def threads_for(numbers: int) -> int:
    """Return the number of threads worth starting for ``numbers`` elements: at most as many as torch uses.

    Numpy releases the interpreter lock while it computes. Threads pay where a single step takes a tenth of a
    millisecond.
    """
    return torch.get_num_threads() if numbers >= _MANY else 1


def exiting() -> bool:
    """Return whether the main thread has ended; pools then start no threads."""
    return not threading.main_thread().is_alive()


def in_threads(work: Callable[[_T], _R], items: Sequence[_T], threads: int) -> list[_R]:
    """Return ``[work(item) for item in items]``, computed by ``threads`` threads, one of which is the caller.

    Fewer threads do all of the work if the system starts no more. After an error, no further item is begun,
    and the error is raised when no thread works any more. ``work`` sets its own ``torch.no_grad``, which is
    local to a thread.
    """
    if exiting() or min(threads, len(items)) < 2:
        return [work(item) for item in items]
    left = iter(range(len(items)))  # each thread takes the next one when it is done with one
    results: list[Any] = [None] * len(items)
    errors: list[BaseException] = []

    def share() -> None:
        for i in left:
            try:
                results[i] = work(items[i])
            except BaseException as error:  # noqa: BLE001 - raised below
                errors.append(error)
                deque(left, maxlen=0)  # leave none

    others: list[Future[None]] = []
    try:
        with contextlib.suppress(RuntimeError):
            for _ in range(min(threads, len(items)) - 1):
                others.append(call_in_thread("weight_update-share", share))
        share()
    finally:
        deque(left, maxlen=0)  # after an error of a signal handler
        wait(others)
    if errors:
        del errors[1:]
        raise errors.pop()  # and keep none: the frames of an error refer to this one
    return results


class InterruptibleCondition(threading.Condition):
    """A condition whose lock is held after a wait, also if a signal handler raised in it."""

    def wait(self, timeout: float | None = None) -> bool:
        """Wait as the base class does, which may not have taken the lock again when a handler raises."""
        try:
            return super().wait(timeout)
        except BaseException:
            if not self._is_owned():  # type: ignore[attr-defined]
                self.acquire()
            raise


def start(thread: threading.Thread) -> None:
    """Start a thread.

    Raises:
        RuntimeError: the system starts no more threads; the message names the limits to raise.
    """
    handled = sys.exc_info()[1]  # by a caller
    try:
        thread.start()
    except RuntimeError as error:
        cause = error.__context__
        if isinstance(cause, KeyboardInterrupt) and cause is not handled:  # it left a lock in disorder
            raise cause from None
        if exiting():
            raise
        raise RuntimeError(
            f"{error} ({thread.name}): raise the limits of processes (ulimit -u), of address space "
            "(ulimit -v) or, in a container, of process ids (docker run --pids-limit)"
        ) from None


def start_thread(
    name: str, work: Callable[..., None], *args: Any, in_order: bool = False
) -> threading.Thread:
    """Start a daemon thread that calls ``work(*args)``.

    ``in_order`` makes the interpreter's exit wait briefly for the thread, which may return from C++ at that
    moment. Otherwise the process would abort.

    Raises:
        RuntimeError: as :func:`start`.
    """
    thread = threading.Thread(target=work, args=args, name=name, daemon=True)
    if in_order:
        _threads.add(thread)
    start(thread)
    return thread


def call_in_thread(name: str, work: Callable[..., _R], *args: Any, in_order: bool = False) -> Future[_R]:
    """Call ``work(*args)`` in a thread of :func:`start_thread`; return the future result.

    Ctrl-C does not wait for the call, and the interpreter's exit does only as in :func:`start_thread`; both
    would wait for the calls of a pool.
    """
    result: Future[_R] = Future()

    def run() -> None:
        try:
            result.set_result(work(*args))
        except BaseException as error:  # noqa: BLE001 - the caller gets it
            result.set_exception(error)

    start_thread(name, run, in_order=in_order)
    return result


def _await_threads() -> None:
    deadline = time.monotonic() + _FAREWELL_SECONDS
    for thread in [one for one in _threads if one.is_alive()]:
        thread.join(max(deadline - time.monotonic(), 0.0))


# At exit, finalizers run from the newest to the oldest: schemes are shut down first, which ends the threads.
weakref.finalize(start_thread, _await_threads)
