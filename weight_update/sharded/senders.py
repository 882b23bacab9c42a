"""The sender of a sharded trainer, on the rank that talks to workers, and its counterpart on the others."""

from __future__ import annotations

import contextlib
import dataclasses
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any, TypeVar

from weight_update.report import SyncReport, report_of
from weight_update.sender.handle import Outcome
from weight_update.sender.sender import Sender
from weight_update.sender.workers import NOBODY
from weight_update.sharded.links import Message, failures_from_wire, failures_to_wire
from weight_update.sharded.ranks import Ranks
from weight_update.strategy.named_weights import NamedWeights

_T = TypeVar("_T")
_REMEMBERED = 64
_PATIENCE = 8  # times the timeout, which starts on the leader when all was sent


class Leader(Sender):
    """A sender that tells the other ranks, its followers, the result of each call.

    ``connect``, ``publish`` and ``whole_weights`` are called within a step of all ranks; the other methods
    that wait make one of their own.
    """

    def __init__(self, ranks: Ranks, *arguments: Any) -> None:
        super().__init__(*arguments)
        self._ranks = ranks

    def connect(
        self, weights: Mapping[int, NamedWeights], timeout: float, alive: Callable[[int], bool] | None = None
    ) -> SyncReport:
        connect = super().connect
        return self._gathered(weights, lambda whole: connect(whole, timeout, alive))

    def publish(
        self, weights: dict[int, NamedWeights], *, group_commit: str | None = None, to_all: bool = False
    ) -> SyncReport:
        publish = partial(super().publish, group_commit=group_commit, to_all=to_all)
        return self._gathered(weights, publish)

    def wait(
        self, report: SyncReport, workers: Sequence[int], timeout: float | None, since: float | None = None
    ) -> dict[int, Exception]:
        with self._ranks.step("wait", self.timeout), self._telling() as result:
            failures = super().wait(report, workers, timeout, since)
            result["report"] = dataclasses.asdict(report)
            result["failures"] = failures_to_wire(failures)
        return failures

    def wait_staged(
        self, version: int, workers: Sequence[int], since: float | None = None
    ) -> dict[int, Exception]:
        with self._ranks.step("wait_staged", self.timeout), self._telling() as result:
            failures = super().wait_staged(version, workers, since)
            result["failures"] = failures_to_wire(failures)
        return failures

    def outcomes(self, updates: Sequence[tuple[int, Sequence[int]]]) -> list[Outcome]:
        with self._ranks.step("outcomes", self.timeout), self._telling() as result:
            found = super().outcomes(updates)
            result["outcomes"] = [(settled, failures_to_wire(failures)) for settled, failures in found]
        return found

    def _gathered(
        self, weights: Mapping[int, NamedWeights], send: Callable[[dict[int, NamedWeights]], SyncReport]
    ) -> SyncReport:
        """Gather weights, unless they travel in a pipeline; send them, and tell the others the report."""
        with self._telling() as result:
            if self._strategy.max_in_flight is not None:
                report = send(dict(weights))
            else:
                start = time.perf_counter()
                distinct = {id(named): named for named in weights.values()}
                whole = {key: named.converted() for key, named in distinct.items()}
                seconds = time.perf_counter() - start
                report = send({idx: whole[id(named)] for idx, named in weights.items()})
                report.seconds = {"convert": seconds, **report.seconds}
            result["report"] = dataclasses.asdict(report)
        return report

    @contextlib.contextmanager
    def _telling(self) -> Iterator[Message]:
        """Yield a message for the others, which they get at the end of the step, also if that is an error."""
        result = self._ranks.result
        try:
            yield result
        finally:
            versions = list(self.worker_versions.items())
            result.update(version=self.version, workers=versions, serving=self.serving)


class Follower:
    """Counterpart, on the other ranks, of the leader's :class:`~weight_update.sender.sender.Sender`.

    A follower has no links, opens no port and allocates no buffers. It gives its parts of the weights when
    they are gathered, and the leader tells it the result of each call. Its attributes are those of the
    leader at the end of the last call.
    """

    closed = False  # an error of the ranks tells of the end

    def __init__(self, ranks: Ranks, timeout: float) -> None:
        self.timeout, self._ranks = timeout, ranks
        self.version: int | None = None
        self.worker_versions: dict[int, int | None] = {}
        self.serving = False
        self.late_joiners, self.incomplete = set[int](), {NOBODY}
        self._failures: dict[int, dict[int, Exception]] = {}

    @property
    def workers(self) -> tuple[int, ...]:
        """Indices of the workers at the end of the last call."""
        return tuple(self.worker_versions)

    def publish(self, *weights: object, **how: object) -> SyncReport:
        """Take part until an update was sent, as :meth:`Sender.publish` on the leader."""
        del weights, how  # the leader has both
        return report_of(self._follow()["report"])

    connect = publish  # in which the first weights are sent

    def wait(
        self, report: SyncReport, workers: Sequence[int], timeout: float | None, since: float | None = None
    ) -> dict[int, Exception]:
        """Wait until the leader has waited for workers; return the errors that it found."""
        limit = _PATIENCE * self.timeout if timeout is None else timeout + self.timeout
        with self._ranks.step("wait", limit):
            message = self._follow()
        heard = report_of(message["report"])
        report.apply_seconds, report.stall_seconds = heard.apply_seconds, heard.stall_seconds
        self._failures[report.version] = failures = failures_from_wire(message["failures"])
        for old in list(self._failures)[:-_REMEMBERED]:
            del self._failures[old]
        return failures

    def wait_staged(
        self, version: int, workers: Sequence[int], since: float | None = None
    ) -> dict[int, Exception]:
        """Wait until the leader has waited for workers to stage; return the errors that it found."""
        with self._ranks.step("wait_staged", _PATIENCE * self.timeout):
            return failures_from_wire(self._follow()["failures"])

    def settled(self, version: int, workers: Sequence[int]) -> bool:
        """Return whether :meth:`wait` has returned for this version."""
        return version in self._failures

    def failures(self, version: int, workers: Sequence[int]) -> dict[int, Exception]:
        """Return the errors that :meth:`wait` returned for this version."""
        return {idx: error for idx, error in self._failures.get(version, {}).items() if idx in workers}

    def outcomes(self, updates: Sequence[tuple[int, Sequence[int]]]) -> list[Outcome]:
        """Return the outcomes that the leader knows."""
        with self._ranks.step("outcomes", self.timeout):
            found = self._follow()["outcomes"]
        return [(settled, failures_from_wire(failures)) for settled, failures in found]

    def members(self, workers: Sequence[int]) -> Sequence[object]:
        """Return nothing: the leader holds the states of workers."""
        return ()

    def whole_weights(self, weights: Mapping[int, NamedWeights]) -> None:
        """Take part in the gather; the leader alone gets the whole weights."""
        self._ranks.follow()

    def attend(self, call: Callable[[], _T]) -> _T:
        """Return the result of ``call()``: the leader reads the answers of workers."""
        return call()

    def commit(self, *what: object, **how: object) -> None:
        """Do nothing: the leader tells the workers and observers, and numbers the versions."""

    abort = dismiss = tell_observers = continue_from = unite = commit

    def close(self) -> None:
        """Take part in no more calls."""
        self.serving = False

    def _follow(self) -> Message:
        try:
            return self._ranks.follow()
        finally:
            last = self._ranks.result
            if "version" in last:
                self.version, self.serving = last["version"], last["serving"]
                self.worker_versions = dict(last["workers"])
