"""Threads for large arrays, and threads that may run C++ code of PyTorch while the interpreter exits."""

from __future__ import annotations

import contextlib
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import Any, Generic, TypeVar

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
    shared = _SharedWork(work, items)
    turns = [threading.Lock() for _ in range(min(threads, len(items)) - 1)]
    try:
        with contextlib.suppress(RuntimeError):
            for turn in turns:
                start_thread("weight_update-share", shared.do_in, turn)
        shared.do()
        _await(turns)
    except BaseException as error:  # noqa: BLE001 - of a signal handler
        shared.stop(error)
        _await(turns)
    return shared.outcome()


class _SharedWork(Generic[_T, _R]):
    """Items that several threads work on; each takes the next one when it is done with one."""

    def __init__(self, work: Callable[[_T], _R], items: Sequence[_T]) -> None:
        self._work, self._items = work, items
        self._left = iter(range(len(items)))
        self._results: list[Any] = [None] * len(items)
        self._errors: list[BaseException] = []

    def do(self) -> None:
        """Work until no item is left."""
        for i in self._left:
            try:
                self._results[i] = self._work(self._items[i])
            except BaseException as error:  # noqa: BLE001 - the caller of outcome() gets it
                self.stop(error)

    def do_in(self, turn: threading.Lock) -> None:
        """Work until no item is left, and hold ``turn`` meanwhile."""
        with turn:
            self.do()

    def stop(self, error: BaseException) -> None:
        """Leave no item, because of ``error``."""
        self._errors.append(error)
        deque(self._left, maxlen=0)

    def outcome(self) -> list[_R]:
        """Return all results; raise the first error if there is one."""
        if not self._errors:
            return self._results
        first, self._errors = self._errors[0], []  # the frames of an error refer to this object
        try:
            raise first
        finally:
            del first


def _await(turns: Sequence[threading.Lock]) -> None:
    """Wait for the threads that work; a thread that begins only now finds nothing to do."""
    for turn in turns:
        with turn:
            pass


def start(thread: threading.Thread) -> None:
    """Start a thread.

    Raises:
        RuntimeError: the system starts no more threads; the message names the limits to raise.
    """
    try:
        thread.start()
    except RuntimeError as error:
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
