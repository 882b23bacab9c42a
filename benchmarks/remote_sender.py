"""The sending side of the schemes that leave the machine."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from benchmarks.crews import Actors, Processes, World
from benchmarks.models import Model, fill, mark
from benchmarks.sides import make_scheme

if TYPE_CHECKING:
    from benchmarks.sender import Case

__all__ = ["RemoteTrainer"]


class RemoteTrainer:
    """A sender and its workers. It is the context of its scheme, as a collector is."""

    def __init__(self, side: str, case: Case) -> None:
        self._crew = self._assemble(side, case)
        self.policy = Model(case.megabytes, case.tensors)
        self.num_workers = case.workers
        self._weights = fill(self.policy)
        self._updates = 0
        self._scheme = make_scheme(side)
        self._scheme.init_on_sender(
            model_id="policy", context=self, num_workers=case.workers, **self._crew.arguments
        )
        self.pids = self._crew.connect(self._scheme)

    def _assemble(self, side: str, case: Case) -> Processes | Actors:
        model, kind = (case.megabytes, case.tensors), side.removeprefix("torchrl-")
        if case.ray is not None:
            actors = Actors(case.workers, model, case.ray)
            self.remote_collectors = actors.arguments["remote_collectors"]
            return actors
        if kind == "rpc":
            world = World(case.workers, model, first=0)
            self.collector_infos, self.collector_rrefs = world.collector_infos, world.collector_rrefs
            self.collector_class = world.collector_class
            return world
        first = 1 if side == "torchrl-distributed" else 0
        return Processes(case.workers, model, first, apart=kind == "distributed-sockets")

    def update(self) -> float:
        """Seconds of one synchronous send; afterwards every worker is asked whether it has it."""
        self._updates += 1
        mark(self._weights, self._updates)
        start = time.perf_counter()
        self._scheme.send(weights=self._weights)
        seconds = time.perf_counter() - start
        if any(marks != (self._updates, self._updates) for marks in self._crew.marks()):
            raise RuntimeError("send() returned before a worker had the update")
        return seconds

    def close(self) -> None:
        self._scheme.shutdown()
        self._crew.close()
