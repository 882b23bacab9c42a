"""The sender of a sharded trainer, on the one rank that talks to the workers."""

from __future__ import annotations

import contextlib
import dataclasses
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

from weight_update.report import SyncReport
from weight_update.sender.handle import Outcome
from weight_update.sender.sender import Sender
from weight_update.sharded.links import Message, failures_to_wire
from weight_update.sharded.ranks import Ranks
from weight_update.strategy.named_weights import NamedWeights


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
        publish = partial(super().publish, group_commit=group_commit)
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
