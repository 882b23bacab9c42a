"""The batches of a MultiCollector's workers, and orders to workers, with a watch for lost and late ones."""

from __future__ import annotations

import contextlib
import logging
import queue
import threading
import time
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from collectors.exits import await_all, await_any, describe_exit, error_in, read_error
from collectors.substitute import Substitute
from collectors.updates import ENDED
from collectors.waiting import WaitingTimes
from weight_update import LifecycleError, SyncTimeoutError, WorkerError

_EXIT_SECONDS, _GONE_SECONDS, _READ_SECONDS = 5.0, 1.0, 1.0
_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class _Order:
    """An order of TorchRL to a worker.

    Attributes:
        answer: what the worker answers: a batch or a note in the queue of batches, or something in its pipe.
        in_pause: whether a paused worker obeys, or ends its pause. Any order that it does not know ends it
            with an error, and is refused.
    """

    answer: Literal["batch", "note", "in pipe", "none"]
    in_pause: Literal["refused", "obeyed", "ends it"]


_CALL = _Order("in pipe", "refused")
_ORDERS = {
    "continue": _Order("batch", "refused"),
    "continue_random": _Order("batch", "refused"),
    "run_free": _Order("none", "refused"),
    "pause": _Order("note", "refused"),
    "restart": _Order("none", "ends it"),
    "close": _Order("none", "ends it"),  # its answer comes after the last order
    "cascade_execute": _Order("in pipe", "obeyed"),
    "get_distant_attr": _Order("in pipe", "obeyed"),
}
"""The orders by name; all others, such as ``state_dict``, are calls."""


class WorkersLateError(Exception):
    """A wrapper of a SyncTimeoutError, because TorchRL's code takes any TimeoutError for an empty queue."""


class _Reader:
    """A reader of a queue in a thread.

    A batch gets its memory from its worker, and a stopped worker does not answer.

    Attributes:
        stuck: whether the last :meth:`get` found a batch that cannot be read.
        taken: the answer that :meth:`get` returns, until it is removed.
    """

    def __init__(self, batches: Any) -> None:
        self.stuck = False
        self.taken: deque[tuple[Any, Exception | None]] = deque()
        self._batches = batches
        self._reading = False
        self._orders: queue.SimpleQueue[float | None] = queue.SimpleQueue()
        self._answers: queue.SimpleQueue[tuple[Any, Exception | None]] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="weight_update-batches", daemon=True)
        self._thread.start()

    def get(self, timeout: float) -> Any:
        """Return the next item; raise ``queue.Empty`` if none came in time, and what reading it raised.

        The item is returned again until :meth:`remove` is called: a signal handler may raise in between.
        """
        if not self.taken:
            if not self._reading:
                self._orders.put(timeout)
                self._reading, timeout = True, timeout + _READ_SECONDS
            try:
                # in one call, so that no signal handler raises while the answer is in neither place
                self.taken.extend(map(self._answers.get, (True,), (timeout,)))
            except queue.Empty:
                self.stuck = True
                raise
        self._reading = self.stuck = False
        item, error = self.taken[0]
        if error is not None:
            self.remove()
            try:
                raise error
            finally:
                del error  # its frames would refer to it
        return item

    def remove(self) -> None:
        """Remove the item that :meth:`get` has returned."""
        self.taken.clear()

    def close(self) -> None:
        """End the thread, unless it is stuck."""
        self._orders.put(None)
        self._thread.join(0.0 if self.stuck else _READ_SECONDS)

    def _run(self) -> None:
        while (timeout := self._orders.get()) is not None:
            try:
                self._answers.put((self._batches.get(timeout=timeout), None))
            except Exception as error:  # noqa: BLE001 - any error is raised by get()
                self._answers.put((None, error))


class BatchQueue(Substitute):
    """A substitute for the queue through which workers deliver their batches.

    Args:
        batches: the queue.
        processes: processes of the workers, by index.
        pipes: pipes to the workers, by index.
        in_rounds: whether each worker delivers one batch before any delivers a second one.
        frames_timeout: seconds that the collector waits for batches while a worker delivers none.
        may_lose: whether to go on with the other workers when one is lost.

    Attributes:
        may_lose: as the argument; orders to a worker that is gone are dropped then.
        lost: reasons why workers were lost, by worker index.
        errors: tracebacks of exceptions that ended workers, by worker index; empty for another end.
        buffers: memory of each worker's batches if they come in rounds; None before its first batch.
        waits: seconds that the collector has waited for each worker.
    """

    def __init__(
        self,
        batches: Any,
        processes: Sequence[Any],
        pipes: Sequence[Any],
        *,
        in_rounds: bool,
        frames_timeout: float,
        may_lose: bool,
    ) -> None:
        super().__init__(batches)
        self.lost: dict[int, str] = {}
        self.buffers: list[Any] = [None] * len(processes)
        self.errors: dict[int, str] = {}
        self._reading_errors = threading.Lock()  # of two threads, one would find the error, the other none
        self._processes, self._pipes = processes, pipes
        self._reader = _Reader(batches)
        self._in_rounds, self.may_lose = in_rounds, may_lose
        self.waits: WaitingTimes = WaitingTimes(frames_timeout)
        self._due: set[int] = set()  # workers that were asked for an item, which was not read yet
        self._kept: deque[Any] = deque()  # batches that settle() has read
        self._unread: set[int] = set()  # lost workers, each of which may have left a batch in the queue

    def get(self, timeout: float) -> Any:
        """Return the next batch; raise ``queue.Empty`` after ``timeout`` seconds, or as :meth:`look` does."""
        return self._kept.popleft() if self._kept else self._read(timeout)

    @property
    def kept(self) -> int:
        """Number of batches that :meth:`get` returns at once."""
        return len(self._kept)

    def ask(self, worker: int) -> None:
        """Note that a worker is asked for an item of the queue."""
        self._due.add(worker)

    def settle(self, worker: int) -> None:
        """Wait for the batch that a worker was asked for, and keep it for :meth:`get`.

        A worker that gets another order while it collects drops its batch, and waits to be asked again.

        Raises:
            WorkerError: a worker has ended, or no worker is left.
            SyncTimeoutError: workers are late.
        """
        while self._reader.taken or worker in self._missing:
            try:
                self._kept.append(self._read(_READ_SECONDS))
            except queue.Empty:
                continue
            except WorkersLateError as error:
                raise error.args[0] from None

    def _read(self, timeout: float) -> Any:
        self.look()
        start = time.monotonic()
        try:
            item = self._reader.get(timeout)
        except queue.Empty:
            self.waits.add(time.monotonic() - start, self._missing)
            self.look()
            raise
        except (OSError, EOFError, RuntimeError) as error:  # the memory of a batch is gone with its worker
            if not self._lost_with_its_batch():
                raise
            _log.info("a batch cannot be read, and is taken for that of a lost worker: %s", error)
            raise queue.Empty from error
        self.waits.add(time.monotonic() - start, self._missing)
        self._note(item[0])
        self._reader.remove()
        return item

    def look(self) -> None:
        """Check the workers.

        Raises:
            WorkerError: a worker has ended, or no worker is left.
            WorkersLateError: workers are late.
        """
        gone = {idx: self._exit_of(idx) for idx, one in self._left() if not one.is_alive()}
        if gone and not self.may_lose:
            raise WorkerError(_describe(gone))
        if self._reader.stuck or not self.may_lose:  # the worker whose batch cannot be read is unknown
            try:
                self.waits.require_in_time()
            except SyncTimeoutError as error:
                raise WorkersLateError(error) from None
        for idx in set(self.waits.late) - gone.keys():
            gone[idx] = f"has made no batch in {self.waits.limit:g} s of waiting, and was killed"
            self._processes[idx].kill()
            self._processes[idx].join(_EXIT_SECONDS)
        for idx, why in gone.items():
            _log.warning("collection goes on without worker %d, which %s", idx, why)
            self.lost[idx] = why
            self.waits.end(idx)
            self._unread.add(idx)
        if not self._left():
            raise WorkerError(f"no worker is left:\n{_describe(self.lost)}")

    def gone(self, worker: int, seconds: float = 0.0) -> str | None:
        """Return the reason why a worker is gone or ends within ``seconds``; None if it is alive."""
        await_all([self._processes[worker]], seconds)
        ended = None if self._processes[worker].is_alive() else self._exit_of(worker)
        why = self.lost.get(worker, ended)
        return None if why is None else f"worker {worker} {why}"

    def reasons(self, workers: Iterable[int]) -> list[str]:
        """Return the reasons of those workers that are gone; wait for workers that are ending."""
        return [why for idx in workers if (why := self.gone(idx, _GONE_SECONDS)) is not None]

    def _exit_of(self, worker: int) -> str:
        with self._reading_errors:
            if worker not in self.errors:
                self.errors[worker] = read_error(self._pipes[worker])
        return describe_exit(self._processes[worker], self.errors[worker])

    def close(self) -> None:
        """Close the queue."""
        self._reader.close()
        self._original.close()

    def lost_all(self, workers: Iterable[int]) -> bool:
        """Return whether all these workers are lost; wait for workers that are ending."""
        wanted = set(workers)
        await_all([one for idx, one in self._left() if idx in wanted], _GONE_SECONDS)
        self.look()
        return wanted <= self.lost.keys()

    def _lost_with_its_batch(self) -> bool:
        """Return whether the unreadable batch may be that of a lost worker; wait for one that is ending."""
        if not self._unread:
            await_any([one for _, one in self._left()], _EXIT_SECONDS)
            self.look()
        if not self._unread:
            return False
        self._unread.pop()
        return True

    @property
    def _missing(self) -> set[int]:
        """Workers whose item is awaited."""
        return self._due - self.lost.keys()

    def _left(self) -> list[tuple[int, Any]]:
        return [(idx, one) for idx, one in enumerate(self._processes) if idx not in self.lost]

    def _note(self, batch: Any) -> None:
        """Note the arrival of a batch: a worker's index, or a pair that ends with it."""
        idx = batch[1] if isinstance(batch, tuple) else batch
        self.waits.end(idx)
        self._due.discard(idx)
        self._unread.discard(idx)
        if self._in_rounds and isinstance(batch, tuple):
            self.buffers[idx] = batch[0]


class ControlPipe(Substitute):
    """A substitute for the pipe to a worker, whose errors say what happened to the worker.

    After the shutdown of the collector, which closes the pipe, errors are LifecycleErrors.

    Args:
        pipe: pipe of TorchRL's collector.
        batches: queue of batches, which knows whether the worker has ended and owes a batch.
        worker: index of the worker.

    Attributes:
        paused: whether the worker was told to pause, and not to restart.
    """

    def __init__(self, pipe: Any, batches: BatchQueue, worker: int) -> None:
        super().__init__(pipe)
        self._batches, self._worker, self._drops = batches, worker, batches.may_lose
        self.paused = False
        self._answers = 0  # answers of the worker that were not read, usually because of Ctrl-C
        self._waited = 0.0  # seconds for the next answer

    def send(self, message: tuple[Any, str]) -> None:
        """Send an order, after dropping the answers to earlier ones.

        Raises:
            WorkerError: the worker is gone, and the order is not to end.
            SyncTimeoutError: the worker does not answer an earlier order in time (``frames_timeout``).
            LifecycleError: the worker is paused, and would end with an error.
        """
        _, name = message
        order = _ORDERS.get(name, _CALL)
        self._note_pause(name, order)
        if order.answer == "in pipe" and not self._original.closed:
            self._batches.settle(
                self._worker
            )  # with a call, the worker would drop the batch that it collects
        if order.answer in ("batch", "in pipe"):
            self._drop_answers()  # if large, they fill the pipe, and the worker can do nothing else
        try:
            if order.answer in ("batch", "note"):
                self._batches.ask(self._worker)
            self._original.send(message)
            self._answers += order.answer == "in pipe"
        except KeyboardInterrupt:
            if order.answer == "batch":  # a worker that gets the order twice at once makes one batch
                with contextlib.suppress(OSError):  # Ctrl-C may have ended the worker as well
                    self._original.send(message)
            raise
        except OSError as error:
            if not self._drops and order.in_pause != "ends it":
                raise self._error() from error

    def _note_pause(self, name: str, order: _Order) -> None:
        """Note whether a worker is paused after an order, and end its pause before it is closed."""
        if self.paused and order.in_pause == "refused":
            raise LifecycleError(f"workers are paused and cannot do {name!r}; call it after the pause")
        if self.paused and name == "close":
            self.send((None, "restart"))  # a paused worker would take it for an error
        self.paused = name == "pause" or (self.paused and order.in_pause != "ends it")

    def poll(self, timeout: float | None = 0.0) -> bool:
        """Return whether there is an answer.

        Raises:
            WorkerError: the worker is gone without an answer.
            SyncTimeoutError: the worker does not answer in time (``frames_timeout``).
        """
        start, limit = time.monotonic(), self._batches.waits.limit
        try:
            found = bool(self._original.poll(timeout))
        except OSError as error:
            raise self._error() from error
        if not found and self._batches.gone(self._worker):
            raise self._error()
        self._waited = 0.0 if found else self._waited + time.monotonic() - start
        if self._waited > limit:
            self._waited = 0.0
            raise SyncTimeoutError(
                f"worker {self._worker} did not answer a call in {limit:g} s of waiting (frames_timeout)"
            )
        return found

    def recv(self) -> Any:
        """Wait for the next answer, and return it; raise the errors of :meth:`poll`."""
        while not self.poll(_READ_SECONDS):
            pass
        self._answers -= 1
        try:
            answer = self._original.recv()
        except (EOFError, OSError) as error:
            raise self._error() from error
        if failed := error_in(answer):
            self._batches.errors[self._worker] = failed
            raise self._error()
        return answer

    def _drop_answers(self) -> None:
        try:
            while self._answers > 0 and not self._original.closed:
                self.recv()
        except WorkerError:
            if not self._drops:
                raise

    def _error(self) -> WorkerError | LifecycleError:
        if self._original.closed:
            return LifecycleError(ENDED)
        return WorkerError(
            self._batches.gone(self._worker, _GONE_SECONDS) or "a worker has closed its connection"
        )


class WorkerProcess(Substitute):
    """A substitute for the process of a worker.

    TorchRL ends all workers when it sees a worker that has ended but is not closed. :class:`BatchQueue`
    watches the workers instead.
    """

    def __init__(self, process: Any) -> None:
        super().__init__(process)
        self._seen: bool | None = None

    @property
    def _closed(self) -> bool:
        self._seen = bool(self._original.is_alive())
        return not self._seen

    def is_alive(self) -> bool:
        """Return whether the process is alive, or was when TorchRL has just read ``_closed``."""
        seen, self._seen = self._seen, None
        return bool(self._original.is_alive()) if seen is None else seen


def _describe(gone: dict[int, str]) -> str:
    return "\n".join(f"worker {idx} {why}" for idx, why in gone.items())
