"""The ranks of a sharded trainer keep step: one leads, the others do their part when it says so."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Protocol, TypeVar

from weight_update.errors import LifecycleError, WeightSyncError
from weight_update.sharded.errors import error_from_wire, error_to_wire
from weight_update.sharded.links import Message, RankLinks

__all__ = ["Alone", "Part", "Ranks"]

_T = TypeVar("_T")
Read = Callable[[Sequence[int] | None], _T]
"""Reads weights for the workers of those indices; None: this rank finds out which."""


class Part(Protocol):
    """What a rank that does not lead does between the beginning and the end of a step."""

    def obey(self, message: Message) -> None:
        """Do what the leader says; whatever this raises reaches all ranks."""


class Alone:
    """The one rank of a trainer that is not sharded."""

    @contextlib.contextmanager
    def step(self, what: str, read: Read[_T], patience: float) -> Iterator[_T]:
        """See :meth:`Ranks.step`."""
        del what, patience
        yield read(None)

    def close(self) -> None:
        """See :meth:`RankLinks.close`."""


class Ranks(RankLinks):
    """Has all ranks do the same things together.

    A step begins when the leader says so, and each of the others has answered that it is there too. Then the
    others do what they are told, until the leader says how it ended: what any rank raises, all raise.

    Args:
        arguments: as for :class:`RankLinks`.

    Attributes:
        result: what the leader tells the others at the end of a step.
        part: others: what to do during a step.
    """

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self.result: Message = {}
        self.part: Part | None = None
        self._working = threading.RLock()

    @contextlib.contextmanager
    def step(self, what: str, read: Read[_T], patience: float) -> Iterator[_T]:
        """Something that all ranks do together.

        Args:
            what: its name, the same on all ranks.
            read: what this rank does first; it gives the leader something with a length, or a mapping whose
                keys the others are given.
            patience: seconds that the leader may take over any part of it.

        Raises:
            SyncFailedError: another rank failed or is gone; the message says which, and why. What is raised
                by this library there is raised here as the same type.
            SyncTimeoutError: another rank did not take part in time.
        """
        with self._working:
            if self.broken is not None:
                raise self.broken
            if self.leads:
                with self._leading(what):
                    value = read(None)
                    workers = list(value) if isinstance(value, Mapping) else None
                    self.tell({"step": what, "workers": workers})
                    self.hear()
                    yield value
            else:
                yield self._begin_to_follow(what, read, patience)

    @contextlib.contextmanager
    def _leading(self, what: str) -> Iterator[None]:
        self.result = {}
        try:
            try:
                yield
            except BaseException as error:
                with contextlib.suppress(WeightSyncError):  # those who can hear it do; this error is raised
                    self.tell({"end": error_to_wire(error), "step": what, **self.result})
                raise
            self.tell({"end": None, "step": what, **self.result})
        finally:
            if self.broken is not None:
                self.abort()

    def _begin_to_follow(self, what: str, read: Read[_T], patience: float) -> _T:
        self.patience, self.result = patience, {}
        message = self.listen()
        self._require_no_error(message)
        try:
            if message["step"] != what:
                raise LifecycleError(
                    f"this rank called {what}() where rank {self.members[0]} called {message['step']}()"
                )
            value = read(message["workers"])
        except BaseException as error:
            self._fail(error)
            raise
        self.report()
        return value

    def follow(self) -> Message:
        """What the leader says at the end of the step; until then, do what it says."""
        assert self.part is not None
        while True:
            message = self.listen()
            if "end" in message:
                self.result = message
                self._require_no_error(message)
                return message
            try:
                self.part.obey(message)
            except BaseException as error:
                self._fail(error)
                raise

    def _fail(self, error: BaseException) -> None:
        """Tell the leader, and wait until it has told all others."""
        if error is self.broken:
            return
        with contextlib.suppress(WeightSyncError):  # this error is raised
            self.report({"error": error_to_wire(error)})
            while "end" not in self.listen():
                pass

    def _require_no_error(self, message: Message) -> None:
        if message.get("end") is not None:
            raise error_from_wire(message["end"], self.name(0))
