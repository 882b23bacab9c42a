"""The admission of workers: which receivers the sender serves, and under which index."""

from __future__ import annotations

import functools
import logging
from collections import OrderedDict
from collections.abc import Callable

from weight_update.errors import FormatError, JoinRefusedError, SchemaMismatchError, WorkerError
from weight_update.sender.delivery import Delivery
from weight_update.sender.groups.base import SendGroup
from weight_update.sender.workers import ReceiverId, WorkerState, WorkerTable
from weight_update.strategy.strategy import WeightStrategy
from weight_update.wire.frames import Kind, WeightChunk
from weight_update.wire.schema import WeightSchema

__all__ = ["Admission"]

_log = logging.getLogger(__name__)
_MAX_REPLACED = 1024
"""Number of replaced receivers that are remembered."""


class Admission:
    """Checks join requests, and welcomes or refuses the receivers that made them.

    Args:
        table: the workers.
        delivery: writes frames to workers.
        strategy: strategy of the sender.
        token: secret that receivers must show.
        assign: returns the send group for a worker whose weights travel best as a schema.
    """

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
        self._replaced: OrderedDict[str | None, int] = OrderedDict()  # instance: pid of its successor

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
        with self._table.changed:
            former = worker.receiver
            if former is not None and former.instance == receiver.instance:
                former = None
            successor = self._replaced.get(receiver.instance, former.pid if former is not None else None)
            if again and successor is not None:
                raise JoinRefusedError(
                    f"worker {worker.idx} (process {receiver.pid}) was replaced by process {successor}"
                )
            replaces = former is not None and worker.joined and misfit is None
            if misfit is None:
                self._give_index(worker, receiver, former)
            elif former is not None and worker.joined:
                raise JoinRefusedError(str(misfit).partition("\n")[0], getattr(misfit, "problems", ()))
            worker.connections += 1
        if former is not None and replaces:
            _log.info("worker %d: process %d replaces process %d", worker.idx, receiver.pid, former.pid)

    def _give_index(self, worker: WorkerState, receiver: ReceiverId, former: ReceiverId | None) -> None:
        """Give the index of ``worker`` to ``receiver``, in the place of ``former``."""
        worker.receiver = receiver
        self._replaced.pop(receiver.instance, None)
        if former is not None:
            self._replaced[former.instance] = receiver.pid
        if len(self._replaced) > _MAX_REPLACED:
            self._replaced.popitem(last=False)
        if former is not None and worker.joined:
            worker.replaced = True

    def _misfit(self, worker: WorkerState, hello: WeightChunk) -> Exception | None:
        """Return the reason why a receiver cannot be the worker, or None."""
        try:
            self._schema_of(worker, hello)
        except (WorkerError, JoinRefusedError, SchemaMismatchError, FormatError) as error:
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
        except (WorkerError, JoinRefusedError, SchemaMismatchError, FormatError) as error:
            self._refuse(worker, error)
            return
        with self._table.changed:
            worker.mark_disconnected()
            worker.lost = None
        group = self._assign(worker, worker.schema.for_receiver(theirs))
        welcome = {"schema": group.schema.to_header(), "strategy": self._strategy.extract_as}
        with worker.sending:  # an update that is being sent goes to the old link, or not at all
            chunk = WeightChunk(Kind.WELCOME, {**welcome, **group.welcome()})
            worker.link.send_chunk(chunk, self._delivery.timeout)
            with self._table.changed:
                worker.joined, worker.left, worker.lost, worker.pid = True, False, None, header["pid"]
                worker.replaced = False
                worker.failures.clear()  # they were of another process, or of an earlier connection
        _log.info("worker %d (process %d) joined", worker.idx, worker.pid)
        self._delivery.update(worker)

    def _refuse(self, worker: WorkerState, error: Exception) -> None:
        """Tell a worker why it is not admitted, unless it told us, and note it for waiting callers."""
        if not isinstance(error, WorkerError):
            header = {
                "reason": str(error).partition("\n")[0],
                "problems": list(getattr(error, "problems", ())),
            }
            self._delivery.say(worker, WeightChunk(Kind.REFUSED, header))
        with self._table.changed:
            worker.joined, worker.lost = False, error
            self._table.changed.notify_all()
