"""Steps that all ranks of a sharded trainer take together, led by one of them."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, TypeVar

from weight_update.errors import LifecycleError, WeightSyncError, kept_error
from weight_update.sharded.links import Message, RankLinks, error_from_wire, error_to_wire

_T = TypeVar("_T")
Read = Callable[[Sequence[int] | None], _T]
"""Reads weights for workers, given by index; None leaves it to this rank to find out which."""
_CALLS = {
    "send": "send(), send_async() or send_together()",
    "wait": "send() with sync=True, send_together() or wait() of an update",
    "wait_staged": "send_together()",
    "outcomes": "send() with sync=False",
}
"""The calls of users that certain steps belong to; any other step has the name of its call."""


class Ranks(RankLinks):
    """Steps that all ranks take together; the arguments are those of :class:`RankLinks`.

    A step takes these messages; ``<-`` is the answer of each other rank, or its error::

        -> {"step": name of the call, "workers": indices of workers, or null}
        <- {}
        ...                                  passes of the gather, if the call has some
        -> {"end": error or null, "step": name of the call, ...}      with the result of the call

    An error on any rank is raised on all of them.

    Attributes:
        result: message that the leader sends to the others at the end of a step.
        take_part: called on the other ranks with the messages of the leader until the end of a step.
    """

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self.result: Message = {}
        self.take_part: Callable[[Iterator[Message]], None] | None = None
        self._working = threading.RLock()

    @contextlib.contextmanager
    def step(self, call: str, patience: float, read: Read[Any] = lambda _: None) -> Iterator[Any]:
        """Return a context in which all ranks do one thing together.

        Args:
            call: name of the call that the step belongs to, the same on all ranks.
            patience: seconds that the leader may be silent during the step.
            read: called first on each rank; where it gives the leader a mapping, the others are given its
                keys.

        Raises:
            SyncFailedError: another rank failed or is gone; the message names it and the reason. An error of
                this library is raised here with the same type.
            SyncTimeoutError: another rank did not take part in time.
        """
        with self._working:
            if self.broken is not None:
                raise kept_error(self.broken)
            if self.leads:
                with self._leading(call):
                    value = read(None)
                    workers = list(value) if isinstance(value, Mapping) else None
                    self.tell({"step": call, "workers": workers})
                    self.hear()
                    yield value
            else:
                yield self._begin_to_follow(call, read, patience)

    @contextlib.contextmanager
    def _leading(self, call: str) -> Iterator[None]:
        self.result = {}
        try:
            yield
        except BaseException as error:
            with contextlib.suppress(WeightSyncError):  # ranks that can be reached get it
                self.tell({"end": error_to_wire(error), "step": call, **self.result})
            raise
        else:
            self.tell({"end": None, "step": call, **self.result})
        finally:
            if self.broken is not None:
                self.cut()  # ranks that wait for this one, or will, get an error now

    def _begin_to_follow(self, call: str, read: Read[_T], patience: float) -> _T:
        self.patience, self.result = patience, {}
        message = self.listen()
        self._require_no_error(message)
        with self.answering():
            if message["step"] != call:
                raise LifecycleError(
                    f"this rank called {_named(call)} where rank {self.members[0]} called "
                    f"{_named(message['step'])}"
                )
            return read(message["workers"])

    def follow(self) -> Message:
        """Take part until the end of the step; return the last message of the leader."""
        assert self.take_part is not None
        self.take_part(self._until_end())
        self._require_no_error(self.result)
        return self.result

    def _until_end(self) -> Iterator[Message]:
        while "end" not in (message := self.listen()):
            yield message
        self.result = message

    @contextlib.contextmanager
    def answering(self) -> Iterator[Message]:
        """Return a context with an answer to the leader, which is reported at the end.

        An error is reported instead, and raised here when the leader has told it to all others.
        """
        answer: Message = {}
        try:
            yield answer
        except BaseException as error:
            if self.broken is None:
                with contextlib.suppress(WeightSyncError):  # this error is raised
                    self.report({"error": error_to_wire(error)})
                    while "end" not in self.listen():
                        pass
            raise
        self.report(answer)

    def _require_no_error(self, message: Message) -> None:
        if message.get("end") is not None:
            raise error_from_wire(message["end"], self.name(0))


def _named(step: str) -> str:
    """Return the call of a user that a step belongs to."""
    return _CALLS.get(step, f"{step}()")
