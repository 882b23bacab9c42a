"""Joining: which receivers the sender serves, under which index, and the wait of connect() for them."""

from __future__ import annotations

import contextlib
import functools
import logging
import time
from collections import OrderedDict, deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from weight_update.errors import (
    FormatError,
    JoinRefusedError,
    LinkClosedError,
    NotEnoughMemoryError,
    SchemaMismatchError,
    SyncFailedError,
    SyncTimeoutError,
    TransportError,
    WorkerError,
    without_frames,
)
from weight_update.progress import SHOW_AFTER, notice
from weight_update.report import WorkerEvent
from weight_update.sender.delivery import Delivery
from weight_update.sender.groups.base import SendGroup
from weight_update.sender.workers import NOBODY, ReceiverId, WorkerState, WorkerTable
from weight_update.strategy.strategy import WeightStrategy
from weight_update.text import format_seconds
from weight_update.wire.frames import Kind, WeightChunk
from weight_update.wire.schema import WeightSchema

_log = logging.getLogger(__name__)
_CHECK_SECONDS = 0.2
_ARRIVAL_SECONDS = 0.5
"""Seconds that a failed connect() waits for join requests that were made before it."""
_MAX_REPLACED = 1024
"""Number of replaced receivers that are remembered."""
_MAX_REFUSED = 8
_MISFITS = WorkerError, JoinRefusedError, SchemaMismatchError, FormatError
"""Reasons for which a receiver cannot be a worker."""


class Admission:
    """Checks join requests, and welcomes or refuses the receivers that made them."""

    def __init__(
        self,
        table: WorkerTable,
        delivery: Delivery,
        strategy: WeightStrategy,
        token: str,
        assign: Callable[[WorkerState, WeightSchema], SendGroup],
    ) -> None:
        self._table, self._delivery, self._strategy = table, delivery, strategy
        self._token, self._assign = token, assign
        self.refused: deque[str] = deque(maxlen=_MAX_REFUSED)  # reasons; the late joiners may have left since
        self._replaced: OrderedDict[str | None, int] = OrderedDict()  # instance: pid of its successor
        self._told_of_dtypes = False

    def watch(self, worker: WorkerState) -> None:
        """Have the link of a worker pass its join requests to :meth:`screen`."""
        worker.link.on_join_request = functools.partial(self.screen, worker)

    def screen(self, worker: WorkerState, hello: WeightChunk) -> None:
        """Check a join request and note which receiver an index belongs to from now on.

        A new receiver replaces the connected one if its model fits. A receiver that was replaced and joins
        again by itself is refused.

        Raises:
            JoinRefusedError: the connected receiver stays.
        """
        header = hello.header
        receiver, again = ReceiverId(header.get("instance"), header["pid"]), header.get("again", False)
        if worker.receiver == receiver:
            worker.connections += 1
            return
        misfit = None if again else self._misfit(worker, hello)
        with self._table.lock:
            former = worker.receiver
            if former is not None and former.instance == receiver.instance:
                former = None
            successor = self._replaced.get(receiver.instance, former.pid if former is not None else None)
            if again and successor is not None:
                raise JoinRefusedError(
                    f"worker {worker.idx} (process {receiver.pid}) was replaced by process {successor}"
                )
            connected = former if worker.joined else None
            if misfit is not None and connected is not None:
                raise JoinRefusedError(str(misfit).partition("\n")[0], getattr(misfit, "problems", ()))
            worker.connections += 1
            if misfit is not None:
                return
            if worker.receiver is not None:
                worker.alive = None
            worker.receiver = receiver
            worker.replaced |= connected is not None
            self._replaced.pop(receiver.instance, None)
            if former is not None:
                self._replaced[former.instance] = receiver.pid
            if len(self._replaced) > _MAX_REPLACED:
                self._replaced.popitem(last=False)
        if connected is not None:
            _log.info("worker %d: process %d replaces process %d", worker.idx, receiver.pid, connected.pid)

    def _misfit(self, worker: WorkerState, hello: WeightChunk) -> Exception | None:
        """Return the reason why a receiver cannot be the worker, or None."""
        try:
            self._schema_of(worker, hello)
        except _MISFITS as error:
            return error
        return None

    def _schema_of(self, worker: WorkerState, hello: WeightChunk) -> WeightSchema:
        """Return the schema of a receiver's model if the model fits.

        Raises:
            JoinRefusedError: the receiver does not know the token.
            WorkerError: the receiver reports that it cannot join.
            SchemaMismatchError, FormatError: its model has other weights.
        """
        header = hello.header
        if not hello.shows(self._token):
            raise JoinRefusedError("wrong token")
        if header["error"] is not None:
            raise WorkerError(header["error"])
        if header["schema"] is None:
            return worker.schema
        theirs = WeightSchema.from_header(header["schema"])
        worker.schema.require_same(theirs, f"worker {worker.idx}", more=self._strategy.partial)
        return theirs

    def welcome(self, worker: WorkerState, hello: WeightChunk) -> None:
        """Answer a HELLO: welcome the worker and send it weights, or refuse it."""
        header = hello.header
        worker.admitted_until = 0.0
        try:
            theirs = self._schema_of(worker, hello)
            self.screen(worker, hello)
        except _MISFITS as error:
            self._refuse(worker, error)
            return
        with self._table.lock:
            worker.mark_disconnected()
            worker.joining, worker.leaving, worker.lost = True, False, None
        wire = worker.schema.for_receiver(theirs)
        try:
            group = self._assign(worker, wire)
        except (TransportError, FormatError, TimeoutError, NotEnoughMemoryError):
            raise  # the worker may join again
        except Exception as error:  # noqa: BLE001 - both sides are told, whatever it is
            _log.exception("worker %d cannot join", worker.idx)
            self._refuse(worker, error)
            return
        welcome = {"schema": group.schema.to_header(), "strategy": self._strategy.extract_as}
        with worker.sending:  # an update that is being sent goes to the old link, or not at all
            chunk = WeightChunk(Kind.WELCOME, {**welcome, **group.welcome()})
            worker.link.send_chunk(chunk, self._delivery.timeout)
            with self._table.lock:
                worker.joined, worker.joining, worker.lost, worker.pid = True, False, None, header["pid"]
                worker.connecting = not header.get("again", False)
                worker.left = worker.replaced = False
                worker.absence_told = worker.arrived = worker.complete = False
                worker.failures.clear()  # they were of another process, or of an earlier connection
        _log.info("worker %d (process %d) joined", worker.idx, worker.pid)
        if wire.nbytes < group.schema.nbytes and not self._told_of_dtypes:
            self._told_of_dtypes = True
            _log.warning(
                "worker %d joined after connect(), and gets updates of %.3g MB in the trainer's dtypes; in "
                "its own they would have %.3g MB: give the trainer's strategy convert=cast(...)",
                worker.idx,
                group.schema.nbytes / 1e6,
                wire.nbytes / 1e6,
            )
        self._table.tell(WorkerEvent("joined", worker.idx, worker.version, late_joiner=worker.late))
        self._delivery.update(worker)

    def dismiss(self, error: Exception) -> None:
        """Refuse workers that wait for weights, because ``connect()`` failed with ``error``.

        Workers that ask to join after this wait for the next ``connect()``. Join requests that were made
        before the listener was started arrive only now, so this waits for them.
        """
        deadline = time.monotonic() + _ARRIVAL_SECONDS
        refusal = JoinRefusedError(f"connect() failed in the trainer: {type(error).__name__}: {error}")
        for worker in self._table:
            with contextlib.suppress(TransportError, FormatError, TimeoutError):  # it has gone meanwhile
                if worker.thread is None and worker.idx != NOBODY:
                    self._dismiss_unheard(worker, refusal, max(deadline - time.monotonic(), 0.0))
                elif _waits_in_vain(worker):
                    self._refuse(worker, refusal)

    def _dismiss_unheard(self, worker: WorkerState, refusal: JoinRefusedError, timeout: float) -> None:
        """Refuse a worker that no thread reads from, if its join request arrives in time."""
        if not worker.reading.acquire(blocking=False):
            return  # its thread has started just now
        try:
            hello = worker.link.recv_chunk(timeout)
            if isinstance(hello, WeightChunk) and hello.kind is Kind.HELLO:
                self._refuse(worker, self._misfit(worker, hello) or refusal)
        finally:
            worker.reading.release()

    def _refuse(self, worker: WorkerState, error: Exception) -> None:
        """Tell a worker why it is not admitted, unless it told us, and note it for waiting callers."""
        if not isinstance(error, WorkerError):
            reason, problems = str(error).partition("\n")[0] or repr(error), getattr(error, "problems", ())
            refused = WeightChunk(Kind.REFUSED, {"reason": reason, "problems": list(problems)})
            with worker.sending:
                worker.link.send_chunk(refused, self._delivery.timeout)
        with self._table.lock:
            worker.joined = worker.joining = worker.leaving = False
            worker.lost = without_frames(error)
            if worker.late:
                self.refused.append(f"worker {worker.idx}: {error}")
            self._table.changed.notify_all()


def _waits_in_vain(worker: WorkerState) -> bool:
    """Return whether a connected worker has no weights, and none are on their way."""
    coming = worker.inflight is not None or worker.lacks is not None
    return worker.joined and not coming and worker.version is None and worker.error is None


def expected(table: WorkerTable) -> list[WorkerState]:
    """Return the workers that ``init_on_sender`` was told of, but not those that took weights and ended."""
    return [worker for worker in table if not worker.late and (worker.joined or not worker.arrived)]


def absent(table: WorkerTable) -> list[WorkerState]:
    """Return the expected workers that have neither joined nor an error."""
    return [worker for worker in expected(table) if not worker.joined and worker.error is None]


def without_weights(table: WorkerTable) -> list[WorkerState]:
    """Return the expected workers that have neither weights nor an error."""
    return [one for one in expected(table) if one.error is None and (not one.joined or one.version is None)]


def wait_for_none(
    table: WorkerTable, missing: Callable[[WorkerTable], list[WorkerState]], deadline: float
) -> None:
    """Wait until ``missing(table)`` is empty or the deadline has passed; name slow workers meanwhile."""
    for limit in min(deadline, time.monotonic() + SHOW_AFTER), deadline:
        with table.lock:
            while (lacking := missing(table)) and time.monotonic() < limit and not table.closed:
                for worker in lacking:
                    if worker.joined:
                        continue  # its link reports its end, after the answers that it sent before
                    if worker.alive is not None and not worker.alive(worker.idx):
                        worker.lost = LinkClosedError(
                            "its process ended before it connected; its output has the reason, "
                            "unless it was not started or did not call connect()"
                        )
                table.changed.wait(_CHECK_SECONDS)
            awaited = [worker.idx for worker in absent(table)]
        if awaited and time.monotonic() < deadline:
            notice(f"waiting for workers {awaited} to connect")


_LONGER = "raise connect_timeout=, or timeout= of connect() if that was given"
"""Advice for a connect() that ended too early."""
_UNWATCHED = "? Set scheme.worker_alive to their processes to learn at once of one that dies."
_UNREPORTED = "(scheme.worker_alive), and the transport did not report it"
_WATCHED = f"? None of their processes is known to have ended; if they need longer to start, {_LONGER}."


def require_weights(table: WorkerTable, timeout: float, refusals: Iterable[str]) -> None:
    """Raise the error of :meth:`Sender.connect` if expected workers have no weights.

    ``refusals`` are reasons for which join requests were refused.
    """
    with table.lock:
        failures = {worker.idx: error for worker in expected(table) if (error := worker.error) is not None}
        overdue = without_weights(table)
        late = [worker for worker in table if worker.late]
        others = [worker.idx for worker in late if worker.joined]
        reasons = [*refusals, *(f"worker {worker.idx}: {worker.lost}" for worker in late if worker.lost)]
        away = [worker.idx for worker in overdue if not worker.joined]
        slow = [worker.idx for worker in overdue if worker.joined]
    refused = "".join(f"\n  {reason}" for reason in dict.fromkeys(reasons))
    if refused:
        refused = f"\nmeanwhile, connections failed or were refused:{refused}"
    mismatches = [error for error in failures.values() if isinstance(error, SchemaMismatchError)]
    if mismatches:
        problems = tuple(line for error in mismatches for line in error.problems)
        raise SchemaMismatchError(str(mismatches[0]).partition("\n")[0], problems)
    limit = format_seconds(timeout)
    slowness = f"joined, but did not apply the first weights within {limit}"
    if failures:
        failures |= dict.fromkeys(away, SyncTimeoutError(f"did not connect within {limit}"))
        failures |= dict.fromkeys(slow, SyncTimeoutError(slowness))
        lines = "".join(f"\n  worker {idx}: {error}" for idx, error in sorted(failures.items()))
        raise SyncFailedError(f"workers could not connect:{lines}{refused}", failures)
    if away:
        more = f" (others did: {others}; do the indices match?)" if others else ""
        more += f"; workers {slow} {slowness}" if slow else ""
        hint = "; have they called connect()" + (_UNWATCHED if table[away[0]].alive is None else _WATCHED)
        raise SyncTimeoutError(f"workers {away} did not connect within {limit}{more}{refused or hint}")
    if slow:
        ended = [idx for idx in slow if table[idx].has_ended]
        cause = f"the processes of {ended} have ended {_UNREPORTED}; start them again"
        advice = cause if ended else f"if they need longer, {_LONGER}"
        raise SyncTimeoutError(
            f"workers {slow} joined, but did not apply the first weights within {limit}; {advice}"
        )


WorkerAlive = Callable[[int], bool] | Sequence[Any] | Mapping[int, Any]
"""A function of the worker index, or processes of ``multiprocessing`` or ``subprocess`` by worker index."""


def require_workers(workers: WorkerAlive | None) -> WorkerAlive | None:
    """Return ``workers``; raise TypeError unless they are processes, a function or None."""
    if not (workers is None or callable(workers) or isinstance(workers, Iterable)):
        raise TypeError(
            "worker_alive takes a list or dict of processes, or a function of the worker index, not "
            f"{workers!r}"
        )
    return workers


def liveness(workers: WorkerAlive | None) -> Callable[[int], bool] | None:
    """Return a function that tells whether the process of a worker index lives; None if that is not known.

    Raises:
        TypeError: an entry is no process.
    """
    if workers is None or callable(workers):
        return workers
    processes = dict(workers if isinstance(workers, Mapping) else enumerate(workers))
    for process in processes.values():
        _lives(process)
    return lambda worker_idx: worker_idx not in processes or _lives(processes[worker_idx])


def _lives(process: Any) -> bool:
    if hasattr(process, "is_alive"):  # of multiprocessing, or a thread
        return bool(process.is_alive())
    if hasattr(process, "poll"):  # of subprocess
        return process.poll() is None
    raise TypeError(f"worker_alive takes processes or a function of the worker index, not {process!r}")
